"""How leaves become stacks of matrices: axes, splits, unit dimensions, boxes and errors word for word."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emopt_jax.matrices import MatrixAxes, from_stacks, resolve_axes, stack_shapes, to_stacks


def numbered(*shape, dtype=jnp.float32):
  return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape).astype(dtype)


def assert_round_trip(tree, axes=None):
  chex.assert_trees_all_equal(from_stacks(to_stacks(tree, axes), tree, axes), tree)


def test_how_to_use_alone():
  """A tree of kernels becomes one dict of stacks [batch, in, out], and back."""
  tree = {'dense': {'kernel': numbered(3, 4)}, 'scanned': numbered(2, 3, 5)}
  axes = {'dense': None, 'scanned': MatrixAxes(-2, -1)}
  stacks = to_stacks(tree, axes)
  chex.assert_trees_all_equal(stacks, {'dense/kernel': tree['dense']['kernel'][None], 'scanned': tree['scanned']})
  assert_round_trip(tree, axes)


def test_convolution_kernel_is_flattened():
  """Fault 3: [3, 3, 16, 64] is one matrix of fan-in 144 and fan-out 64."""
  kernel = numbered(3, 3, 16, 64)
  axes = MatrixAxes((0, 1, 2), 3)
  chex.assert_trees_all_equal(to_stacks(kernel, axes), {'params': kernel.reshape(1, 144, 64)})
  assert_round_trip(kernel, axes)


def test_axes_in_any_order():
  """PyTorch's [out, in], and heads in the middle: [embed, heads, head_dim] as one matrix a head."""
  weight = numbered(5, 3)
  chex.assert_trees_all_equal(to_stacks(weight, MatrixAxes(1, 0)), {'params': weight.T[None]})
  projection = numbered(6, 4, 2)
  heads = to_stacks(projection, MatrixAxes(0, 2))['params']
  chex.assert_trees_all_equal(heads, projection.transpose(1, 0, 2))
  whole = to_stacks(projection, MatrixAxes(0, (1, 2)))['params']
  chex.assert_trees_all_equal(whole, projection.reshape(1, 6, 8))
  for axes in (MatrixAxes(0, 2), MatrixAxes(0, (1, 2)), MatrixAxes((2, 1), 0), MatrixAxes(-1, -3)):
    assert_round_trip(projection, axes)


def test_split_of_equal_sizes_is_one_stack():
  kernel = numbered(4, 9)
  stacks = to_stacks(kernel, MatrixAxes(0, 1, split=(1, (3, 3, 3))))
  chex.assert_trees_all_equal(stacks, {'params': kernel.reshape(4, 3, 3).transpose(1, 0, 2)})
  assert_round_trip(kernel, MatrixAxes(0, 1, split=(1, (3, 3, 3))))


def test_split_of_unequal_sizes_is_a_stack_a_size():
  """Grouped queries: wide Q between narrow K and V, whose order must survive."""
  kernel = numbered(4, 10)
  axes = MatrixAxes(0, 1, split=(1, (2, 6, 2)))
  stacks = to_stacks(kernel, axes)
  chex.assert_trees_all_equal(
    stacks, {'params': jnp.stack([kernel[:, :2], kernel[:, 8:]]), 'params:1': kernel[None, :, 2:8]}
  )
  assert_round_trip(kernel, axes)


@pytest.mark.parametrize('axis', [0, 1, 2, -2])
def test_split_along_every_axis(axis):
  """Inputs, outputs and batch axes may all hold blocks."""
  leaf = numbered(4, 6, 8)
  sizes = {4: (1, 3), 6: (2, 2, 2), 8: (5, 3)}[leaf.shape[axis]]
  axes = MatrixAxes(-2, -1, split=(axis, sizes))
  assert_round_trip(leaf, axes)
  assert sum(stack.size for stack in to_stacks(leaf, axes).values()) == leaf.size


@pytest.mark.parametrize(
  'shape, matrix',
  [((64, 1, 128), (64, 128)), ((1, 64), (1, 64)), ((64, 1), (64, 1)), ((1, 1), (1, 1)), ((1, 1, 7), (1, 7))],
)
def test_unit_dimensions_are_squeezed(shape, matrix):
  """Fault 7: a vector-like leaf does not crash and stays the matrix it is."""
  leaf = numbered(*shape)
  chex.assert_trees_all_equal(to_stacks(leaf), {'params': leaf.reshape(1, *matrix)})
  assert_round_trip(leaf)


@pytest.mark.parametrize('dtype, wide', [('float16', 'float32'), ('bfloat16', 'float32'), ('float32', 'float32')])
def test_stacks_are_float32_or_wider(dtype, wide):
  leaf = numbered(2, 3, dtype=dtype)
  assert to_stacks(leaf)['params'].dtype == wide
  assert_round_trip(leaf)
  chex.assert_trees_all_equal_shapes_and_dtypes(from_stacks(to_stacks(leaf), leaf), leaf)


def test_float64_stays_float64():
  with jax.enable_x64(True):
    leaf = jnp.ones((2, 3), jnp.float64)
    assert to_stacks(leaf)['params'].dtype == jnp.float64


def test_holes_and_empty_leaves_pass_through():
  tree = {'kernel': numbered(2, 3), 'masked': optax.MaskedNode(), 'none': None, 'empty': jnp.zeros((0, 5))}
  assert list(to_stacks(tree)) == ['kernel']
  back = from_stacks(to_stacks(tree), tree)
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  chex.assert_trees_all_equal(back, tree)


def test_axes_may_be_a_prefix_or_a_function():
  tree = {'blocks': {'a': numbered(2, 3, 4), 'b': numbered(2, 4, 3)}, 'head': numbered(3, 5)}
  prefix = {'blocks': MatrixAxes(-2, -1), 'head': None}
  expected = to_stacks(tree, prefix)
  assert {path: stack.shape for path, stack in expected.items()} == {
    'blocks/a': (2, 3, 4),
    'blocks/b': (2, 4, 3),
    'head': (1, 3, 5),
  }
  by_shape = lambda params: jax.tree.map(lambda p: MatrixAxes(-2, -1) if p.ndim == 3 else None, params)  # noqa: E731
  chex.assert_trees_all_equal(to_stacks(tree, by_shape), expected)
  assert resolve_axes(tree, prefix)['blocks/a'] == MatrixAxes((1,), (2,))


def test_abstract_leaves():
  tree = {'kernel': jax.ShapeDtypeStruct((4, 9), jnp.bfloat16)}
  shapes = stack_shapes(tree, MatrixAxes(0, 1, split=(1, (3, 3, 3))))
  assert shapes == {'kernel': jax.ShapeDtypeStruct((3, 4, 3), jnp.float32)}


@pytest.mark.parametrize(
  'shape, dtype, axes, message',
  [
    (
      (12, 64, 256),
      'float32',
      None,
      "leaf 'block/kernel' of shape (12, 64, 256) is not a matrix: give its axes, as in axes=MatrixAxes(inputs=-2, "
      'outputs=-1) for stacked [in, out] kernels, or route it to another optimizer',
    ),
    (
      (64,),
      'float32',
      None,
      "leaf 'block/kernel' of shape (64,) is not a matrix: give its axes, as in axes=MatrixAxes(inputs=-2, "
      'outputs=-1) for stacked [in, out] kernels, or route it to another optimizer',
    ),
    (
      (4, 8),
      'int32',
      None,
      "leaf 'block/kernel' of shape (4, 8) has dtype int32: matrix optimizers take real floating leaves; route it to "
      'another optimizer or mask it',
    ),
    (
      (4, 8),
      'complex64',
      None,
      "leaf 'block/kernel' of shape (4, 8) has dtype complex64: matrix optimizers take real floating leaves; route it "
      'to another optimizer or mask it',
    ),
    (
      (4, 8),
      'float32',
      MatrixAxes(0, 2),
      "leaf 'block/kernel' of shape (4, 8): axis 2 of MatrixAxes(inputs=0, outputs=2, split=None) is out of range; "
      'use axes from 0 to 1',
    ),
    (
      (4, 8),
      'float32',
      MatrixAxes(1, -1),
      "leaf 'block/kernel' of shape (4, 8): inputs and outputs of MatrixAxes(inputs=1, outputs=-1, split=None) "
      'overlap; name every axis once',
    ),
    (
      (4, 9),
      'float32',
      MatrixAxes(0, 1, split=(1, (4, 4))),
      "leaf 'block/kernel' of shape (4, 9): split sizes (4, 4) add up to 8, not to the 9 of axis 1; give the sizes of "
      'the whole, unsharded leaf',
    ),
  ],
)
def test_errors_name_leaf_shape_and_mend(shape, dtype, axes, message):
  tree = {'block': {'kernel': jax.ShapeDtypeStruct(shape, dtype)}}
  with pytest.raises(ValueError, match=rf'^{re.escape(message)}$'):
    resolve_axes(tree, axes)


def test_negative_split_sizes_raise():
  """(12, -3) adds up to 9 and is no split."""
  with pytest.raises(ValueError, match=r"leaf 'params' of shape \(4, 9\): split sizes"):
    resolve_axes(numbered(4, 9), MatrixAxes(0, 1, split=(1, (12, -3))))


def test_axes_of_another_structure_raise():
  with pytest.raises(
    ValueError, match=r'^axes is no pytree prefix of the parameters: give one MatrixAxes for all leaves'
  ):
    to_stacks({'a': numbered(2, 3)}, {'b': MatrixAxes()})
