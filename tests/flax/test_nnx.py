"""The optimizers in `nnx.Optimizer`: as the plain Optax loop, and with sharded parameters."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import emopt_jax

OPTIMIZERS = {
  'muon': emopt_jax.muon,
  'soap': emopt_jax.soap,
  'kl_soap': emopt_jax.kl_soap,
  'shampoo': emopt_jax.shampoo,
}
MATRICES = {'block/qkv/kernel', 'block/out/kernel'}
VOCABULARY, WIDTH, STEPS = 16, 8, 3
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(8, 9))


class Block(nnx.Module):
  def __init__(self, rngs):
    def linear(inputs, outputs, *names):
      kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
      return nnx.Linear(inputs, outputs, kernel_init=kernel_init, use_bias=False, rngs=rngs)

    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
    self.qkv = linear(WIDTH, 3 * WIDTH, 'data', 'model')
    self.out = linear(WIDTH, WIDTH, 'model', 'data')

  def __call__(self, x):
    query, key, value = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
    return x + self.out(jax.nn.softmax(query @ key.mT) @ value)


class Transformer(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.block = Block(rngs)
    self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

  def __call__(self, tokens):
    return self.head(self.block(self.embed(tokens)))


def loss_of(model, tokens):
  return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def train_step(model, optimizer, tokens):
  loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
  optimizer.update(model, gradients)
  return loss


def routed(name):
  return emopt_jax.route(OPTIMIZERS[name](0.02), optax.adamw(3e-3))


def create(name, sharded=False):
  # Eager sharding places a parameter as its metadata says, and asks for a mesh when there is none.
  with nnx.use_eager_sharding(sharded):
    model = Transformer(nnx.Rngs(0))
    return model, nnx.Optimizer(model, routed(name), wrt=nnx.Param)


@functools.cache
def train(name):
  """Returns the losses and the parameters after each step, and the optimizer."""
  model, optimizer = create(name)
  step = nnx.jit(train_step)
  losses, params = [], []
  for _ in range(STEPS):
    losses.append(float(step(model, optimizer, TOKENS)))
    params.append(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  return losses, params, optimizer


def train_plainly(name):
  """Returns the parameters of a training on their dict, without `nnx.Optimizer` and without metadata boxes."""
  graph, state = nnx.split(create(name)[0])
  params, optimizer = nnx.to_pure_dict(state), routed(name)
  opt_state = optimizer.init(params)

  @jax.jit
  def step(params, opt_state):
    loss, gradients = jax.value_and_grad(lambda params: loss_of(nnx.merge(graph, params), TOKENS))(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return loss, optax.apply_updates(params, updates), opt_state

  for _ in range(STEPS):
    _, params, opt_state = step(params, opt_state)
  return params


def matrix_state(optimizer):
  """Returns the state of the first transformation for matrices, with its `nnx.Variable`s."""
  return optimizer.opt_state.inner_states['matrix'].inner_state[0]


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_equals_the_plain_optax_loop(name):
  losses, params, _ = train(name)
  assert losses == sorted(losses, reverse=True), losses
  assert losses[-1] < losses[0] - 0.05
  # The same operations in differently fused programs: float32 rounding of values of about 1.
  chex.assert_trees_all_close(params[-1], train_plainly(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_equals_itself_without_jit(name):
  model, optimizer = create(name)
  losses = [float(train_step(model, optimizer, TOKENS)) for _ in range(2)]
  expected_losses, expected_params, _ = train(name)
  np.testing.assert_allclose(losses, expected_losses[:2], rtol=1e-5)
  # Nothing is fused: every product is rounded by itself, and Adam divides small entries by their own size.
  chex.assert_trees_all_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected_params[1], rtol=0, atol=1e-5)


def test_paths_are_the_same_at_init_and_at_update():
  def paths(optimizer):
    state = matrix_state(optimizer)
    return [set(field) for field in (state.covariance.factors, state.covariance.skipped, state.eigenbasis)]

  model, fresh = create('kl_soap')
  trained = train('kl_soap')[2]
  assert paths(fresh) == paths(trained) == [MATRICES] * 3
  table = emopt_jax.describe_routing(nnx.state(model, nnx.Param))
  assert {leaf.path: leaf.optimizer for leaf in table.leaves} == {
    **dict.fromkeys(MATRICES, 'matrix'),
    **dict.fromkeys(['embed/embedding', 'block/norm/scale', 'head/kernel', 'head/bias'], 'other'),
  }


def sharded_training(name):
  """Returns model, optimizer and step, created sharded and with the shardings of their metadata declared."""
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('data', 'model'))
  with jax.set_mesh(mesh):
    model, optimizer = nnx.jit(lambda: create(name, sharded=True))()
  shardings = [nnx.StateSharding(nnx.get_named_sharding(nnx.state(node), mesh)) for node in (model, optimizer)]
  step = nnx.jit(train_step, in_shardings=(*shardings, None))
  return mesh, model, optimizer, step


def shardings_of(*nodes):
  return {
    jax.tree_util.keystr(keys): array.sharding
    for keys, array in jax.tree_util.tree_leaves_with_path([nnx.state(node) for node in nodes])
  }


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_sharded_parameters(name):
  mesh, model, optimizer, step = sharded_training(name)
  assert model.block.qkv.kernel.get_value().sharding.spec == P('data', 'model')
  before = shardings_of(model, optimizer)
  with jax.set_mesh(mesh):
    losses = [float(step(model, optimizer, TOKENS)) for _ in range(STEPS)]
  assert step.jitted_fn._cache_size() == 1, 'traced or compiled again'
  after = shardings_of(model, optimizer)
  assert all(before[path].is_equivalent_to(after[path], 3) for path in before)

  expected_losses, expected_params, _ = train(name)
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
  # Sums over a sharded axis are added up in another order: a few more roundings than in one program.
  chex.assert_trees_all_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected_params[-1], rtol=0, atol=1e-5)


def test_factors_do_not_inherit_the_sharding_of_their_parameter():
  _, model, optimizer, _ = sharded_training('kl_soap')
  state = matrix_state(optimizer)
  of_factors = jax.tree.leaves(
    (state.covariance, state.eigenbasis, state.rejected), is_leaf=lambda node: isinstance(node, nnx.Variable)
  )
  assert len(of_factors) == 1 + len(MATRICES) * (2 + 1 + 4 + 1)
  for variable in of_factors:
    assert 'out_sharding' not in variable.get_metadata()
    assert variable.get_value().sharding.is_fully_replicated
  # Moments have the shape of their parameter, and lie where it lies.
  for moment in (state.inner[0].mu, state.inner[0].nu):
    variable = moment['block']['qkv']['kernel']
    assert variable.get_metadata()['out_sharding'] == ('data', 'model')
    assert variable.get_value().sharding == model.block.qkv.kernel.get_value().sharding


def test_undeclared_shardings_settle_in_the_first_step():
  mesh, model, optimizer, _ = sharded_training('shampoo')
  step = nnx.jit(train_step)
  with jax.set_mesh(mesh):
    losses = [float(step(model, optimizer, TOKENS)) for _ in range(STEPS)]
  # On automatic meshes the compiler chooses where undeclared results lie, AdamW's included; then it stays with it.
  assert step.jitted_fn._cache_size() <= 2
  np.testing.assert_allclose(losses, train('shampoo')[0], rtol=1e-5)
