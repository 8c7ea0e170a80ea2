"""Optimizer state in Orbax checkpoints: a run that stops and continues is bitwise the run without the stop."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import emopt_jax

OPTIMIZERS = {
  'muon': emopt_jax.muon,
  'soap': emopt_jax.soap,
  'kl_soap': emopt_jax.kl_soap,
  'shampoo': emopt_jax.shampoo,
}
STOP, STEPS = 7, 10
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(STEPS + 1, 16, 4)).astype(np.float32)  # one batch a step
TARGETS = np.sin(3 * INPUTS)


def routed(name):
  # A schedule, so that a restored run must know its step.
  schedule = optax.cosine_decay_schedule(0.02, STEPS)
  return emopt_jax.route(OPTIMIZERS[name](schedule), optax.adamw(schedule))


def create_params():
  random = np.random.default_rng(1)
  return jax.tree.map(
    lambda shape: jnp.asarray(0.5 * random.normal(size=shape), jnp.float32),
    {'block_0': {'up': {'kernel': (4, 8), 'bias': (8,)}, 'down': {'kernel': (8, 4)}}, 'head/0': {'kernel': (4, 4)}},
    is_leaf=lambda node: isinstance(node, tuple),
  )


def loss_of(params, inputs, targets):
  block = params['block_0']
  hidden = jnp.tanh(inputs @ block['up']['kernel'] + block['up']['bias']) @ block['down']['kernel']
  return (((inputs + hidden) @ params['head/0']['kernel'] - targets) ** 2).mean()


@functools.cache
def plain_run(name):
  """Returns a function that creates the state of a run, and its compiled step."""
  optimizer = routed(name)

  def create():
    params = create_params()
    return {'step': jnp.zeros((), jnp.int32), 'params': params, 'opt_state': optimizer.init(params)}

  @jax.jit
  def step(state):
    batch = jnp.asarray(INPUTS)[state['step']], jnp.asarray(TARGETS)[state['step']]
    gradients = jax.grad(loss_of)(state['params'], *batch)
    updates, opt_state = optimizer.update(gradients, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'step': state['step'] + 1, 'params': params, 'opt_state': opt_state}

  return create, step


def advance(step, state, steps):
  for _ in range(steps):
    state = step(state)
  return state


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_restored_run_is_bitwise_the_run_without_a_stop(name, tmp_path):
  create, step = plain_run(name)
  stopped = advance(step, create(), STOP)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', stopped)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / 'state', jax.eval_shape(create))

  # MaskedNode, EmptyState and the NamedTuples come back as what they were, not as None, lists and dicts.
  assert jax.tree.structure(restored) == jax.tree.structure(stopped)
  chex.assert_trees_all_equal(restored, stopped)
  chex.assert_trees_all_equal_shapes_and_dtypes(restored, stopped)

  without_stop = advance(step, create(), STEPS)
  chex.assert_trees_all_equal(advance(step, restored, STEPS - STOP), without_stop)
  assert int(without_stop['step']) == STEPS


def test_checkpoint_manager(tmp_path):
  create, step = plain_run('kl_soap')
  options = ocp.CheckpointManagerOptions(max_to_keep=2)
  with ocp.CheckpointManager(tmp_path, options=options) as manager:
    state = create()
    for number in range(1, STOP + 1):
      state = step(state)
      manager.save(number, args=ocp.args.StandardSave(state))
  with ocp.CheckpointManager(tmp_path, options=options) as manager:
    assert manager.latest_step() == STOP
    restored = manager.restore(STOP, args=ocp.args.StandardRestore(jax.eval_shape(create)))
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  chex.assert_trees_all_equal(advance(step, restored, STEPS - STOP), advance(step, create(), STEPS))


def test_paths_with_slashes_survive(tmp_path):
  create, step = plain_run('kl_soap')
  state = step(create())
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', state)
    checkpointer.wait_until_finished()
    without_target = checkpointer.restore(tmp_path / 'state')
  of_matrices = without_target['opt_state']['inner_states']['matrix']['inner_state'][0]
  expected = state['opt_state'].inner_states['matrix'].inner_state[0]
  paths = {'block_0/up/kernel', 'block_0/down/kernel'}
  assert set(of_matrices['covariance']['factors']) == paths
  for path in paths:
    for side in ('left', 'right'):
      np.testing.assert_array_equal(
        of_matrices['covariance']['factors'][path][side], getattr(expected.covariance.factors[path], side)
      )
      np.testing.assert_array_equal(
        of_matrices['eigenbasis'][path][side]['vectors'], getattr(expected.eigenbasis[path], side).vectors
      )
  # A slash in the user's own key too.
  np.testing.assert_array_equal(without_target['params']['head/0']['kernel'], state['params']['head/0']['kernel'])


class NnxModel(nnx.Module):
  def __init__(self, rngs):
    self.up, self.head = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, x):
    return x + self.head(jnp.tanh(self.up(x)))


@nnx.jit
def nnx_step(model, optimizer, inputs, targets):
  gradients = nnx.grad(lambda model: ((model(inputs) - targets) ** 2).mean())(model)
  optimizer.update(model, gradients)


def test_nnx_optimizer(tmp_path):
  def create(seed):
    model = NnxModel(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

  def train(nodes, first, last):
    for step in range(first, last):
      nnx_step(*nodes, INPUTS[step], TARGETS[step])

  optimizer = routed('kl_soap')
  whole, stopped, resumed = create(0), create(0), create(1)
  train(whole, 0, STEPS)
  train(stopped, 0, STOP)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', nnx.state(stopped))
    checkpointer.wait_until_finished()
    nnx.update(resumed, checkpointer.restore(tmp_path / 'state', nnx.state(resumed)))
  assert jax.tree.structure(nnx.state(resumed)) == jax.tree.structure(nnx.state(stopped))
  chex.assert_trees_all_equal(nnx.as_pure(nnx.state(resumed)), nnx.as_pure(nnx.state(stopped)))
  train(resumed, STOP, STEPS)
  assert int(resumed[1].step[...]) == STEPS
  chex.assert_trees_all_equal(nnx.as_pure(nnx.state(resumed)), nnx.as_pure(nnx.state(whole)))


class LinenModel(nn.Module):
  boxed: bool

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.lecun_normal()
    up_init = nn.with_partitioning(init, (None, 'model')) if self.boxed else init
    return x + nn.Dense(4, name='head')(nn.tanh(nn.Dense(8, kernel_init=up_init, name='up')(x)))


@jax.jit
def linen_step(state):
  inputs, targets = jnp.asarray(INPUTS)[state.step], jnp.asarray(TARGETS)[state.step]
  gradients = jax.grad(lambda params: ((state.apply_fn({'params': params}, inputs) - targets) ** 2).mean())(
    state.params
  )
  return state.apply_gradients(grads=gradients)


@pytest.mark.parametrize('boxed', [False, True], ids=['plain', 'Partitioned'])
def test_linen_train_state(boxed, tmp_path):
  model, optimizer = LinenModel(boxed), routed('kl_soap')

  def create():
    params = model.init(jax.random.key(0), INPUTS[0])['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer).replace(step=jnp.zeros((), jnp.int32))

  stopped = advance(linen_step, create(), STOP)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', stopped)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / 'state', jax.eval_shape(create))
  assert jax.tree.structure(restored) == jax.tree.structure(stopped)
  chex.assert_trees_all_equal(restored, stopped)
  resumed = advance(linen_step, restored, STEPS - STOP)
  assert int(resumed.step) == STEPS
  chex.assert_trees_all_equal(resumed, advance(linen_step, create(), STEPS))
