"""Gradients inside shard_map: neither N times too large nor clipped by norms of each rank's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed
from tests.distributed import problems

RNG = np.random.default_rng(0)
PARAMS = {
  'up': RNG.standard_normal((8, 16), np.float32),
  'down': RNG.standard_normal((16, 8), np.float32),
  'bias': RNG.standard_normal(16, np.float32),
}
BATCHES = RNG.standard_normal((3, 32, 8), np.float32)
INNER = functools.partial(emopt_jax.muon, 0.05)


def loss_of(params, x, gather=lambda leaf, path: leaf):
  up, bias = gather(params['up'], 'up'), gather(params['bias'], 'bias')
  return jnp.mean(jnp.square(jnp.tanh(x @ up + bias) @ gather(params['down'], 'down') - x))


def on_one_device(max_norm):
  optimizer = emopt_jax.route(INNER(), optax.adamw(0.01))
  optimizer = optax.chain(optax.clip_by_global_norm(max_norm), optimizer) if max_norm else optimizer
  params, state = PARAMS, optimizer.init(PARAMS)
  for x in BATCHES:
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
  return loss, params, state


def inside_shard_map(max_norm, specs, check_vma=True):
  mesh = problems.mesh_of((8,), ('data',))
  plan = distributed.plan_layerwise(PARAMS, mesh, 'data', specs=specs)
  optimizer = distributed.layerwise(INNER(), plan, others=optax.adamw(0.01), max_norm=max_norm)

  def gather(leaf, path):
    axes = [i for i, axis in enumerate(specs[path]) if axis]
    return lax.all_gather(leaf, 'data', axis=axes[0], tiled=True) if axes else leaf

  def step(params, state, x):
    loss, gradients = distributed.value_and_grad(functools.partial(loss_of, gather=gather), plan)(params, x)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), PARAMS, specs)
  state = jax.jit(optimizer.init)(params)
  state_specs = distributed.state_specs(state, plan)
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(specs, state_specs, P('data')), out_specs=(specs, state_specs, P()), check_vma=check_vma
  )
  for x in BATCHES:
    params, state, loss = jax.jit(mapped)(params, state, x)
  plain = emopt_jax.route(INNER(), optax.adamw(0.01))
  plain = optax.chain(optax.clip_by_global_norm(max_norm), plain) if max_norm else plain
  return loss, params, distributed.logical_state(state, plan, jax.eval_shape(plain.init, PARAMS))


@pytest.mark.parametrize(
  ('sharded', 'max_norm', 'check_vma'),
  [(False, None, True), (False, 0.1, False), (False, 1e6, True), (True, 0.1, True), (True, None, False)],
)
def test_train_steps_equal_one_device(sharded, max_norm, check_vma):
  """Momentum too, since Newton-Schulz hides the scale of a gradient."""
  specs = {'up': P(None, 'data'), 'down': P('data'), 'bias': P('data')} if sharded else dict.fromkeys(PARAMS, P())
  actual = inside_shard_map(max_norm, specs, check_vma)
  # Sums of eight means instead of one mean, in float32, over three steps.
  problems.assert_close(*(jax.tree.map(np.asarray, x) for x in (actual, on_one_device(max_norm))), 1e-5)


def test_outside_of_shard_map_it_is_value_and_grad():
  plan = distributed.plan_layerwise(PARAMS, problems.mesh_of((8,), ('data',)), 'data')
  actual = distributed.value_and_grad(loss_of, plan)(PARAMS, BATCHES[0])
  jax.tree.map(np.testing.assert_array_equal, actual, jax.value_and_grad(loss_of)(PARAMS, BATCHES[0]))


def test_auxiliary_values_stay_local():
  mesh = problems.mesh_of((8,), ('data',))
  plan = distributed.plan_layerwise(PARAMS, mesh, 'data')

  def step(params, x):
    (loss, rows), _ = distributed.value_and_grad(lambda p, x: (loss_of(p, x), x[:, 0]), plan, has_aux=True)(params, x)
    return loss, rows

  loss, rows = jax.shard_map(step, mesh=mesh, in_specs=(P(), P('data')), out_specs=(P(), P('data')))(PARAMS, BATCHES[0])
  np.testing.assert_allclose(loss, loss_of(PARAMS, BATCHES[0]), rtol=1e-6)
  np.testing.assert_array_equal(rows, BATCHES[0][:, 0])


def test_plain_grad_inside_shard_map_is_refused():
  """jax.grad of replicated parameters sums over the ranks by itself, and the gradient is eight times too large."""
  mesh = problems.mesh_of((8,), ('data',))
  plan = distributed.plan_layerwise(PARAMS, mesh, 'data')
  optimizer = distributed.layerwise(INNER(), plan, others=optax.adamw(0.01))
  state = jax.jit(optimizer.init)(PARAMS)

  def step(params, state, x):
    return optimizer.update(jax.grad(loss_of)(params, x), state, params)[0]

  in_specs = (P(), distributed.state_specs(state, plan), P('data'))
  with pytest.raises(ValueError, match=r"leaf 'bias' of shape \(16,\) is reduced over 'data' already.*value_and_grad"):
    jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=P())(PARAMS, state, BATCHES[0])
