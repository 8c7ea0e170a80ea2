"""Optax's wrappers around a distributed optimizer equal those around one device's, or say what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed
from tests.distributed import problems

WRAPPERS = {
  'MultiSteps': lambda optimizer: optax.MultiSteps(optimizer, 2).gradient_transformation(),
  'MultiSteps that skips': lambda optimizer: optax.MultiSteps(
    optimizer, 2, should_skip_update_fn=optax.skip_not_finite
  ).gradient_transformation(),
  'apply_if_finite': lambda optimizer: optax.apply_if_finite(optimizer, 3),
  'conditionally_transform': lambda optimizer: optax.conditionally_transform(optimizer, lambda step: step % 2 == 0),
  'conditionally_mask': lambda optimizer: optax.conditionally_mask(optimizer, lambda step: step % 2 == 0),
}
SKIPPING = ('MultiSteps that skips', 'apply_if_finite')
every_wrapper = pytest.mark.parametrize('name', WRAPPERS)


def setting(layout='replicated', kind='Auto'):
  problem = problems.problem('3', layout, kind)
  return problem, distributed.plan_layerwise(problem.params, problem.mesh, 'data', specs=problem.specs)


def layerwise(plan, wrapper=None):
  arguments = {} if wrapper is None else {'wrapper': wrapper}
  return distributed.layerwise(emopt_jax.muon(0.02), plan, others=optax.adamw(0.01), max_norm=1.0, **arguments)


def plain(wrapper):
  optimizer = emopt_jax.route(emopt_jax.muon(0.02), optax.adamw(0.01))
  return wrapper(optax.chain(emopt_jax.clip_by_finite_norm(1.0), optimizer))


def gradients(problem, name):
  """Returns the gradients of all ranks for three steps, so that two are accumulated and one is left over."""
  steps = [problems.local_gradients(problem.params, step, problem.mesh.shape['data']) for step in range(3)]
  if name in SKIPPING:
    steps[1]['norm']['scale'][3, 2] = np.nan  # on one rank
  return steps


@every_wrapper
@pytest.mark.parametrize(
  ('entry', 'kind', 'check_vma'),
  [('A', 'Auto', True), ('A', 'Auto', False), ('B', 'Auto', True), ('C', 'Explicit', True)],
)
def test_wrapper_of_averaged_gradients_equals_one_device(name, entry, kind, check_vma):
  problem, plan = setting(kind=kind)
  optimizer = layerwise(plan, WRAPPERS[name])
  steps = gradients(problem, name)
  problems.assert_equals_one_device(optimizer, plain(WRAPPERS[name]), problem, plan, entry, steps, check_vma)


@every_wrapper
@pytest.mark.parametrize('kind', ['Auto', 'Explicit'])
def test_around_the_optimizer_in_jit(name, kind):
  problem, plan = setting(kind=kind)
  optimizer = WRAPPERS[name](layerwise(plan))
  problems.assert_equals_one_device(optimizer, plain(WRAPPERS[name]), problem, plan, 'B', gradients(problem, name))


@every_wrapper
@pytest.mark.parametrize('check_vma', [True, False])
def test_around_the_optimizer_inside_shard_map_it_would_have_local_gradients(name, check_vma):
  problem, plan = setting()
  with pytest.raises(ValueError, match=r'optax\.transforms\._.* around layerwise.*write layerwise\(\.\.\., wrapper='):
    trace(WRAPPERS[name](layerwise(plan)), problem, plan, 'A', check_vma)


def trace(optimizer, problem, plan, entry, check_vma=True):
  params = problems.place(problem, problem.params)
  state = jax.jit(optimizer.init)(params)
  local = problems.local_gradients(problem.params, 0, problem.mesh.shape['data'])
  step = problems.make_step(entry, optimizer, problem, plan, state, check_vma)
  return step.trace(problems.place_gradients(problem, local, entry), state, params)


@pytest.mark.parametrize('name', ['conditionally_transform', 'conditionally_mask'])
def test_around_the_optimizer_with_unreduced_gradients(name):
  problem, plan = setting(kind='Explicit')
  with pytest.raises(ValueError, match=r'around layerwise.*write layerwise\(\.\.\., wrapper='):
    trace(WRAPPERS[name](layerwise(plan)), problem, plan, 'C')


def test_of_sharded_parameters_a_wrapper_that_decides_from_none_of_them():
  problem, plan = setting('FSDP')
  optimizer = layerwise(plan, WRAPPERS['MultiSteps'])
  steps = gradients(problem, 'MultiSteps')
  problems.assert_equals_one_device(optimizer, plain(WRAPPERS['MultiSteps']), problem, plan, 'A', steps)


@pytest.mark.parametrize('name', SKIPPING)
def test_of_sharded_parameters_a_wrapper_that_decides_from_shards(name):
  problem, plan = setting('FSDP')
  optimizer = layerwise(plan, WRAPPERS[name])
  with pytest.raises(ValueError, match=r"predicate varies over 'data'.*call the optimizer outside of shard_map"):
    trace(optimizer, problem, plan, 'A')
  with pytest.raises(ValueError, match=r"leaf '8x16_0/kernel' of shape \(8, 16\) is sharded.*check_vma=True"):
    trace(optimizer, problem, plan, 'A', check_vma=False)
  problems.assert_equals_one_device(optimizer, plain(WRAPPERS[name]), problem, plan, 'B', gradients(problem, name))


def branching(optimizer, decide):
  """Returns the optimizer with a branch of the user's own around it."""

  def update(updates, state, params):
    skip = lambda: (jax.tree.map(jnp.zeros_like, params), state)  # noqa: E731
    return lax.cond(decide(updates), lambda: optimizer.update(updates, state, params), skip)

  return optax.GradientTransformation(optimizer.init, update)


def all_finite(updates):
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]))


def test_branch_of_which_the_ranks_may_differ():
  problem, plan = setting()
  with pytest.raises(ValueError, match=r"branch whose predicate varies over 'data'.*reduce the predicate over it"):
    trace(branching(layerwise(plan), all_finite), problem, plan, 'A')


@pytest.mark.parametrize('check_vma', [True, False])
def test_branch_that_all_ranks_take_alike(check_vma):
  problem, plan = setting()
  agreed = branching(layerwise(plan), lambda updates: lax.pmin(all_finite(updates).astype(jnp.int32), 'data') == 1)
  alone = branching(plain(lambda optimizer: optimizer), all_finite)
  steps = gradients(problem, 'apply_if_finite')
  problems.assert_equals_one_device(agreed, alone, problem, plan, 'A', steps, check_vma)


def test_branch_around_the_whole_shard_map_is_no_concern():
  problem, plan = setting()
  optimizer = layerwise(plan)
  state = jax.jit(optimizer.init)(problem.params)
  specs = distributed.state_specs(state, plan)
  mark = lambda params: jax.tree.map(lambda leaf: lax.pcast(leaf, 'data', to='varying'), params)  # noqa: E731
  update = jax.shard_map(
    lambda params, state: optimizer.update(mark(params), state, params)[0],
    mesh=problem.mesh,
    in_specs=(P(), specs),
    out_specs=P(),
  )
  inside = lambda go, params, state: lax.cond(go, update, lambda params, state: params, params, state)  # noqa: E731
  actual = jax.jit(inside)(True, problem.params, state)
  problems.assert_close(*jax.tree.map(np.asarray, (actual, jax.jit(update)(problem.params, state))), 1e-6)


SCHEDULE = optax.linear_schedule(0.02, 0.01, 3)


@pytest.mark.parametrize(('entry', 'kind'), [('A', 'Auto'), ('B', 'Explicit'), ('C', 'Explicit')])
def test_hyperparameters_of_the_inner_optimizer(entry, kind):
  problem, plan = setting(kind=kind)
  inner = optax.inject_hyperparams(emopt_jax.muon)(SCHEDULE)
  others = optax.inject_hyperparams(optax.adamw)(SCHEDULE)
  optimizer = distributed.layerwise(inner, plan, others=others)
  alone = emopt_jax.route(inner, others)
  problems.assert_equals_one_device(optimizer, alone, problem, plan, entry, gradients(problem, 'none'))


@pytest.mark.parametrize(('entry', 'kind'), [('A', 'Explicit'), ('B', 'Auto'), ('B', 'Explicit'), ('C', 'Explicit')])
def test_hyperparameters_around_the_optimizer(entry, kind):
  problem, plan = setting(kind=kind)
  make = lambda rate: distributed.layerwise(emopt_jax.muon(rate), plan, others=optax.adamw(rate))  # noqa: E731
  optimizer = optax.inject_hyperparams(make)(SCHEDULE)
  if kind == 'Explicit' and entry != 'A':
    with pytest.raises(ValueError, match=r'Explicit mesh.*write layerwise\(optax.inject_hyperparams\(muon\)'):
      trace(optimizer, problem, plan, entry)
    return
  alone = optax.inject_hyperparams(lambda rate: emopt_jax.route(emopt_jax.muon(rate), optax.adamw(rate)))(SCHEDULE)
  problems.assert_equals_one_device(optimizer, alone, problem, plan, entry, gradients(problem, 'none'))


def scale_by_value():
  """Returns a transformation that multiplies updates by an extra argument."""

  def update(updates, state, params=None, *, value, **extra_args):
    del params, extra_args
    return jax.tree.map(lambda leaf: leaf * value, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(('entry', 'kind'), [('A', 'Auto'), ('B', 'Auto'), ('B', 'Explicit'), ('C', 'Explicit')])
def test_extra_arguments(entry, kind):
  problem, plan = setting(kind=kind)

  def with_value(optimizer):
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    chained = optax.chain(optimizer, plateau)
    # A loss that the mesh has, as it comes of a state on the mesh, and that does not fall.
    update = lambda updates, state, params: chained.update(updates, state, params, value=2.0 + 0 * state[1].scale)  # noqa: E731
    return optax.GradientTransformation(chained.init, update)

  inner = optax.chain(emopt_jax.muon(0.02), scale_by_value())
  optimizer = with_value(distributed.layerwise(inner, plan, others=optax.adamw(0.01)))
  alone = with_value(emopt_jax.route(inner, optax.adamw(0.01)))
  problems.assert_equals_one_device(optimizer, alone, problem, plan, entry, gradients(problem, 'none'))
