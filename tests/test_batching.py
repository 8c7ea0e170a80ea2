"""Matrices of one shape are worked on in one batch: the same result, and a program that grows with the shapes."""

import re

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import MatrixAxes, batching
from emopt_jax.linalg import factorizations
from emopt_jax.matrices import single_matrices


def parameters(layers):
  """Returns matrices of three shapes, one of them scanned."""
  key = jax.random.key(0)
  shapes = {'up': (4, 8), 'down': (8, 4), 'again': (4, 8)}
  return {
    f'{i}/{name}': jax.random.normal(jax.random.fold_in(key, 10 * i + j), shape)
    for i in range(layers)
    for j, (name, shape) in enumerate(shapes.items())
  }


RECIPES = {
  'muon': lambda: emopt_jax.muon(0.1),
  'soap': lambda: emopt_jax.soap(0.1),
  'kl_soap': lambda: emopt_jax.kl_soap(0.1),
  'blocks': lambda: emopt_jax.scale_by_soap(emopt_jax.kl_covariance(block_size=4)),
  'shampoo': lambda: emopt_jax.shampoo(0.1),
}


@pytest.mark.parametrize('name', RECIPES)
def test_joined_matrices_get_the_updates_of_separate_ones(name):
  optimizer = RECIPES[name]()
  params = parameters(2)
  update = jax.jit(optimizer.update)
  together, apart = optimizer.init(params), {path: optimizer.init({path: leaf}) for path, leaf in params.items()}
  for step in range(3):
    gradients = jax.tree.map(lambda p, step=step: jnp.cos((step + 1) * p), params)
    # One matrix has a bad gradient in one step: its neighbours in the batch are none the worse.
    gradients['1/up'] = jnp.where(step == 1, jnp.nan, gradients['1/up'])
    updates, together = update(gradients, together, params)
    for path, gradient in gradients.items():
      expected, apart[path] = update({path: gradient}, apart[path], {path: params[path]})
      # Batched products add up in another order, and Adam divides by what can be small.
      chex.assert_trees_all_close({path: updates[path]}, expected, atol=1e-4)


@pytest.mark.parametrize('name', RECIPES)
def test_program_grows_with_the_shapes_and_not_with_the_layers(name, monkeypatch):
  monkeypatch.setattr(factorizations, '_SIDE_BY_SIDE', 1)  # and not with the processors

  def count(layers):
    params, optimizer = parameters(layers), RECIPES[name]()
    state = jax.eval_shape(optimizer.init, params)
    program = jax.jit(optimizer.update).lower(params, state, params).as_text()
    return {kind: len(re.findall(kind, program)) for kind in ('dot_general', 'custom_call', 'stablehlo.while')}

  assert count(5) == count(2)
  assert count(2)['dot_general'] > 0


def test_what_is_joined(monkeypatch):
  axes = {'a': None, 'b': None, 'layers': MatrixAxes(-2, -1), 'qkv': MatrixAxes(0, 1, split=(1, (8, 8, 8))), 'c': None}
  leaves = {
    'a': jnp.zeros((4, 8)),
    'b': jnp.zeros((1, 4, 8)),
    'layers': jnp.zeros((3, 4, 8)),
    'qkv': jnp.zeros((4, 24)),
    'c': jnp.zeros((8, 4)),
  }
  single = single_matrices(leaves, axes)
  # Layers, experts and heads may be sharded over their own axis.
  assert single == {'a', 'b', 'qkv', 'c'}
  stacks = emopt_jax.matrices.to_stacks(leaves, axes)
  assert batching.batches(single, stacks) == [['a', 'b', 'qkv'], ['c'], ['layers']]
  for limit in ('LARGEST_BATCH', 'LARGEST_BATCH_ON_CPU'):
    monkeypatch.setattr(batching, limit, 64)
  assert batching.batches(single, stacks) == [['a', 'b'], ['qkv'], ['c'], ['layers']]


def test_matrices_of_different_shardings_are_not_joined():
  mesh = jax.make_mesh((1, 1), ('x', 'y'))
  specs = {'a': P(None, 'x', None), 'b': P(None, 'x', None), 'c': P(None, None, 'y'), 'd': P(None, None, None)}
  stacks = {path: jax.device_put(jnp.ones((1, 4, 8)), jax.NamedSharding(mesh, spec)) for path, spec in specs.items()}
  assert batching.batches(specs, stacks) == [['a', 'b'], ['c'], ['d']]
  with jax.set_mesh(mesh):
    doubled = jax.jit(lambda stacks: batching.map_by_shape(lambda x: 2 * x, specs, stacks))(stacks)
  assert {path: leaf.sharding.spec for path, leaf in doubled.items()} == specs
  chex.assert_trees_all_equal(doubled, jax.tree.map(lambda x: 2 * x, stacks))
