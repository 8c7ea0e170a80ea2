"""The optimizers in a Linen `TrainState`: plain, and with parameters in metadata boxes."""

import functools

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import emopt_jax

OPTIMIZERS = {
  'muon': emopt_jax.muon,
  'soap': emopt_jax.soap,
  'kl_soap': emopt_jax.kl_soap,
  'shampoo': emopt_jax.shampoo,
}
STEPS, WIDTH = 3, 8
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(32, WIDTH)).astype(np.float32)
TARGETS = np.sin(3 * INPUTS)


def unboxed(initializer, names):
  del names
  return initializer


BOXES = {'plain': unboxed, 'Partitioned': nn.with_partitioning, 'LogicallyPartitioned': nn.with_logical_partitioning}


class Residual(nn.Module):
  box: str

  @nn.compact
  def __call__(self, x):
    def dense(features, name, *names):
      return nn.Dense(features, kernel_init=BOXES[self.box](nn.initializers.lecun_normal(), names), name=name)

    return x + dense(WIDTH, 'down', 'hidden', None)(nn.gelu(dense(2 * WIDTH, 'up', None, 'hidden')(nn.LayerNorm()(x))))


MODELS = {box: Residual(box) for box in BOXES}  # one of each, because a TrainState compares its apply_fn by identity


def create(box, optimizer, wrap=lambda params: params):
  params = wrap(MODELS[box].init(jax.random.key(0), INPUTS)['params'])
  return TrainState.create(apply_fn=MODELS[box].apply, params=params, tx=optimizer)


def train_step(state):
  def loss_of(params):
    return ((state.apply_fn({'params': params}, INPUTS) - TARGETS) ** 2).mean()

  loss, gradients = jax.value_and_grad(loss_of)(state.params)
  return state.apply_gradients(grads=gradients), loss


def routed(name):
  return emopt_jax.route(OPTIMIZERS[name](0.02), optax.adamw(3e-3))


def train(state):
  """Returns the last state and the losses."""
  step, losses = jax.jit(train_step), []
  for _ in range(STEPS):
    state, loss = step(state)
    losses.append(float(loss))
  return state, losses


@functools.cache
def plain_run(name):
  return train(create('plain', routed(name)))


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_boxes_change_nothing(name):
  plain, losses = plain_run(name)
  assert losses == sorted(losses, reverse=True), losses
  assert losses[-1] < losses[0] - 0.1
  start = create('Partitioned', routed(name))
  boxed, boxed_losses = train(start)
  assert isinstance(boxed.params['up']['kernel'], nn.Partitioned)
  assert jax.tree.structure(start.opt_state) == jax.tree.structure(boxed.opt_state)
  assert boxed_losses == losses
  chex.assert_trees_all_equal(nn.unbox(boxed.params), plain.params)
  # Without its boxes the state is that of the plain run, so that a checkpoint of one fits the other.
  chex.assert_trees_all_equal(nn.unbox(boxed.opt_state), plain.opt_state)


def test_frozen_dicts_change_nothing():
  plain, losses = plain_run('muon')
  frozen, frozen_losses = train(create('plain', routed('muon'), wrap=freeze))
  assert frozen_losses == losses
  chex.assert_trees_all_equal(frozen.params.unfreeze(), plain.params)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_partition_specs_of_the_state(name):
  optimizer = routed(name)
  mesh = Mesh(np.array(jax.devices()), ('model',))
  logical_specs = nn.get_partition_spec(jax.eval_shape(lambda: create('LogicallyPartitioned', optimizer)))
  shardings = nn.logical_to_mesh_sharding(logical_specs, mesh, rules=[('hidden', 'model')])
  with mesh:
    start = jax.jit(lambda: create('LogicallyPartitioned', optimizer), out_shardings=shardings)()
    step = jax.jit(train_step, in_shardings=(shardings,), out_shardings=(shardings, None))
    state, losses = start, []
    for _ in range(STEPS):
      state, loss = step(state)
      losses.append(float(loss))
  assert step._cache_size() == 1

  assert state.params['up']['kernel'].value.sharding == NamedSharding(mesh, P(None, 'model'))
  of_matrices = state.opt_state.inner_states['matrix'].inner_state[0]
  if name == 'kl_soap':  # moments lie where their parameter lies, factors whole on every device
    assert of_matrices.inner[0].nu['up']['kernel'].value.sharding == NamedSharding(mesh, P(None, 'model'))
    assert all(array.sharding.is_fully_replicated for array in jax.tree.leaves(of_matrices.covariance))
  for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True):
    assert before.sharding.is_equivalent_to(after.sharding, after.ndim)

  plain, plain_losses = plain_run(name)
  np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
  # Sums over a sharded axis are added up in another order, and Adam divides small entries by their own size.
  chex.assert_trees_all_close(nn.unbox(state.params), plain.params, rtol=0, atol=1e-5)
