"""Paths of leaves: the same with and without metadata boxes, and never the same for two leaves."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import emopt_jax
from emopt_jax.matrices import leaf_path, resolve_axes

MATRIX = jnp.ones((2, 3))


def paths(tree):
  return [leaf_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize(
  'box',
  [
    lambda x: x,
    lambda x: nn.Partitioned(x, names=(None, 'model')),
    lambda x: nn.LogicallyPartitioned(x, names=(None, 'hidden')),
    nnx.Param,
    lambda x: nnx.Param(x, out_sharding=(None, 'model'), eager_sharding=False),
  ],
  ids=['plain', 'Partitioned', 'LogicallyPartitioned', 'Param', 'sharded Param'],
)
def test_boxes_leave_no_trace(box):
  assert paths({'blocks': [{'attention': {'value': box(MATRIX)}}]}) == ['blocks/0/attention/value']
  assert paths(box(MATRIX)) == ['params']


def test_leaves_of_a_node_without_names_keep_apart():
  class Model(nnx.Module):
    def __init__(self):
      self.up, self.down = nnx.Param(MATRIX), nnx.Param(2 * MATRIX)

  flat = nnx.to_flat_state(nnx.state(Model()))  # its leaves have numbers for paths
  assert len(set(paths(flat))) == 2
  optimizer = optax.chain(emopt_jax.momentum(0.0), optax.identity())
  updates, _ = optimizer.update(flat, optimizer.init(flat))
  assert [array.mean() for array in jax.tree.leaves(updates)] == [2, 1]  # down, up


def test_two_leaves_of_one_path_are_an_error():
  with pytest.raises(ValueError) as error:
    resolve_axes({'a': {'b': MATRIX}, 'a/b': MATRIX})
  assert str(error.value) == (
    "leaf 'a/b' of shape (2, 3): another leaf has this path, by which the state is keyed; rename one of the dict keys "
    "that hold a '/'"
  )
