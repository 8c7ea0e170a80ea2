"""What the compiled programs communicate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed
from tests.distributed import hlo, problems


def compiled_step(layout: str, entry: str, max_norm: float | None = None, with_params: bool = True):
  """Returns the program of an update, its plan and its problem."""
  problem = problems.problem('48 in 4 classes', layout)
  plan = distributed.plan_layerwise(
    problem.params, problem.mesh, 'data', specs=problem.specs, axes=problem.axes, inner=emopt_jax.muon(0.1)
  )
  optimizer = distributed.layerwise(
    emopt_jax.muon(0.1, weight_decay=0.1 * with_params), plan, others=optax.sgd(0.1), max_norm=max_norm
  )
  params = problems.place(problem, problem.params)
  state = jax.jit(optimizer.init)(params)
  update = optimizer.update
  if entry == 'A':
    specs = distributed.state_specs(state, plan)

    def inside(gradients, state, params):
      # Gradients of leaves that the data axis shards vary over it already.
      mark = lambda g, spec: g if 'data' in spec else jax.lax.pcast(g, 'data', to='varying')  # noqa: E731
      return optimizer.update(jax.tree.map(mark, gradients, problem.specs), state, params)

    update = jax.shard_map(
      inside, mesh=problem.mesh, in_specs=(problem.specs, specs, problem.specs), out_specs=(problem.specs, specs)
    )
  shardings = distributed.state_shardings(state, plan)
  jitted = jax.jit(update, out_shardings=(distributed.state_shardings(params, plan), shardings))
  return jitted.lower(params, state, params).compile(), plan, problem


@functools.cache
def replicated_inside():
  return compiled_step('replicated', 'A')


def test_inside_shard_map_one_reduce_scatter_and_one_all_gather_per_bundle():
  compiled, plan, _ = replicated_inside()
  assert len(plan.bundles) <= len(plan.classes)
  # The one all-reduce is that of the one leaf that is no matrix.
  expected = {'reduce-scatter': len(plan.bundles), 'all-gather': len(plan.bundles), 'all-reduce': 1}
  assert hlo.count(compiled) == expected
  assert not hlo.in_loops(compiled)


def test_inside_shard_map_sends_what_the_plan_says_and_5_percent_over_the_ideal_at_most():
  compiled, plan, problem = replicated_inside()
  matrices = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.params) if leaf.ndim == 2 + (problem.axes is not None))
  ideal = 2 * 7 / 8 * matrices
  sent = hlo.sent(compiled, ('reduce-scatter', 'all-gather'))
  assert ideal <= sent <= 1.05 * ideal
  traffic = distributed.traffic_inside_shard_map(plan)
  assert sent == traffic.reduce_scatter + traffic.all_gather
  assert hlo.sent(compiled, ('all-reduce',)) == traffic.all_reduce


def test_clipping_adds_two_numbers():
  compiled, _, _ = compiled_step('replicated', 'A', max_norm=1.0)
  # The eight numbers of the leaf that is no matrix; and, for all bundles together, since their owners are the same
  # ranks, the sum of the squares and that of the squares of smaller numbers, in case the first overflows.
  assert hlo.sent(compiled, ('all-reduce',)) == 2 * 7 / 8 * 4 * (8 + 2)
  assert not hlo.in_loops(compiled)


def test_in_jit_no_all_to_all_and_no_reduction():
  compiled, plan, _ = compiled_step('replicated', 'B')
  # Gradients are whole on every rank, so that there is nothing left to reduce: the updates are gathered.
  assert hlo.count(compiled) == {'all-gather': len(plan.bundles)}
  assert not hlo.in_loops(compiled)


@pytest.mark.parametrize('entry', ['A', 'B'])
def test_sharded_in_sharded_out_all_to_alls_only(entry):
  compiled, plan, _ = compiled_step('FSDP', entry, with_params=False)
  found = hlo.count(compiled)
  assert found.pop('all-to-all') == 2 * len(plan.bundles)
  assert found == ({'all-reduce': 1} if entry == 'A' else {})  # of the leaf that is no matrix
  assert not hlo.in_loops(compiled)
  assert hlo.sent(compiled, ('all-to-all',)) == distributed.traffic_inside_shard_map(plan).all_to_all


def test_weight_decay_sends_sharded_parameters_once_more():
  compiled, plan, _ = compiled_step('FSDP', 'A')
  traffic = distributed.traffic_inside_shard_map(plan)
  assert hlo.sent(compiled, ('all-to-all',)) == traffic.all_to_all + traffic.parameters


@pytest.mark.parametrize('layout', ['tensor parallel', 'FSDP x tensor parallel'])
@pytest.mark.parametrize('entry', ['A', 'B'])
def test_two_mesh_axes_one_collective_per_axis(entry, layout):
  compiled, plan, _ = compiled_step(layout, entry, with_params=False)
  found = hlo.count(compiled)
  found.pop('all-reduce', None)
  passes = {'all-to-all': 2 * len(plan.bundles)}
  if layout == 'FSDP x tensor parallel':
    passes = {'all-to-all': 4 * len(plan.bundles)}
  else:
    passes |= {'all-gather': len(plan.bundles)} | ({'reduce-scatter': len(plan.bundles)} if entry == 'A' else {})
  assert found == passes
  assert not hlo.in_loops(compiled)


def test_local_gradients_of_a_model_are_reduced_once():
  """A whole train step: the only all-reduces are those of the loss and of the leaf that is no matrix."""
  rng = np.random.default_rng(0)
  params = {'w1': rng.standard_normal((8, 16), np.float32), 'w2': rng.standard_normal((16, 8), np.float32)}
  params |= {'bias': np.zeros(16, np.float32)}
  mesh = problems.mesh_of((8,), ('data',))
  plan = distributed.plan_layerwise(params, mesh, 'data')
  optimizer = distributed.layerwise(emopt_jax.muon(0.1), plan, others=optax.sgd(0.1))

  def loss_of(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params['w1'] + params['bias']) @ params['w2'] - x))

  def inside(params, state, x):
    loss, gradients = distributed.value_and_grad(loss_of, plan)(params, x)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  state = jax.jit(optimizer.init)(params)
  specs = distributed.state_specs(state, plan)
  step = jax.shard_map(inside, mesh=mesh, in_specs=(P(), specs, P('data')), out_specs=(P(), specs, P()))
  compiled = jax.jit(step).lower(params, state, np.zeros((32, 8), np.float32)).compile()
  bundles = len(plan.bundles)
  found = hlo.count(compiled)
  assert found.pop('all-reduce') <= 2
  assert found == {'reduce-scatter': bundles, 'all-gather': bundles}
