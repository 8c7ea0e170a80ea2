"""`orthogonalize` alone, on every kind of leaf."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emopt_jax import MatrixAxes, newton_schulz, orthogonalize, polar_svd
from tests.references import oracles


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def apply(updates, method=newton_schulz, axes=None):
  transform = orthogonalize(method, axes=axes)
  return jax.jit(transform.update)(updates, transform.init(updates))[0]


def test_how_to_test_one_alone():
  """Initialise with parameters, update with gradients, compare with the equation."""
  gradient = {'kernel': normal(4, 8)}
  transform = orthogonalize(functools.partial(newton_schulz, steps=16))
  state = transform.init(gradient)
  updates, state = transform.update(gradient, state)
  # 16 steps converge to float32's rounding.
  chex.assert_trees_all_close(updates, {'kernel': oracles.polar(gradient['kernel'])}, atol=1e-5)
  assert state == optax.EmptyState()


def test_scanned_kernels_are_separate_matrices():
  """Fault 5: [12, 64, 256] is twelve matrices."""
  kernel = normal(12, 6, 10)
  updates = apply({'kernel': kernel}, polar_svd, MatrixAxes(-2, -1))['kernel']
  # Float32 SVD.
  chex.assert_trees_all_close(updates, np.stack([oracles.polar(matrix) for matrix in kernel]), atol=1e-5)


@pytest.mark.parametrize('sizes', [(4, 4, 4), (8, 2, 2), (2, 8, 2), (1, 11), (1,) * 12])
def test_fused_kernel_equals_separate_matrices(sizes):
  """Fault 6: blocks of a fused kernel are orthogonalized each on its own, in their places; (1,) * 12 is a head each."""
  kernel = normal(6, 12)
  updates = apply(kernel, axes=MatrixAxes(0, 1, split=(1, sizes)))
  blocks = jnp.split(kernel, np.cumsum(sizes)[:-1], axis=1)
  # A batch and a lone matrix may take different product kernels: rounding, amplified by the first rows.
  chex.assert_trees_all_close(updates, jnp.concatenate([newton_schulz(block) for block in blocks], 1), atol=1e-5)


def test_input_side_split():
  kernel = normal(12, 5)
  updates = apply(kernel, polar_svd, MatrixAxes(0, 1, split=(0, (8, 4))))
  # Float32 SVD.
  chex.assert_trees_all_close(
    updates, np.concatenate([oracles.polar(kernel[:8]), oracles.polar(kernel[8:])]), atol=1e-5
  )


@pytest.mark.parametrize('shape', [(64, 1, 128), (1, 64), (64, 1), (1, 1)])
def test_unit_dimensions(shape):
  """Fault 7: squeezed; a vector-like leaf is divided by its norm."""
  gradient = normal(*shape)
  expected = oracles.polar(gradient.reshape([size for size in shape if size > 1] if len(shape) == 3 else shape))
  # Float32 SVD.
  chex.assert_trees_all_close(apply(gradient, polar_svd), expected.reshape(shape), atol=1e-5)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float16, jnp.bfloat16])
def test_zero_gives_zero_and_not_finite_gives_zero(dtype):
  """Fault 2 and DESIGN 3.7, matrix by matrix."""
  stack = jnp.stack([normal(4, 6), jnp.zeros((4, 6)), normal(4, 6).at[1, 2].set(jnp.nan), normal(4, 6, seed=1)])
  stack = stack.astype(dtype).at[3, 0, 0].set(jnp.inf)
  updates = apply(stack, axes=MatrixAxes(-2, -1))
  assert updates.dtype == dtype
  chex.assert_trees_all_equal(updates[1:], jnp.zeros((3, 4, 6), dtype))
  chex.assert_trees_all_equal(updates[0], apply(stack[0]))


@pytest.mark.parametrize('c', [1e-30, 1e-10, 1e20])
def test_scale_invariant(c):
  """Fault 1."""
  gradient = normal(6, 10)
  # c * G rounds G by 6e-8, amplified by the first rows in small singular directions.
  chex.assert_trees_all_close(apply(gradient * c), apply(gradient), atol=1e-5)


def test_float64():
  with jax.enable_x64(True):
    gradient = jnp.asarray(np.random.default_rng(0).standard_normal((4, 7)))
    updates = apply(gradient, polar_svd)
    assert updates.dtype == jnp.float64
    # float64's rounding.
    chex.assert_trees_all_close(updates, oracles.polar(gradient), atol=1e-13)


def test_own_method():
  """Any function of a stack will do: here rows divided by their norm."""
  gradient = normal(3, 5)
  rows = apply(gradient, lambda stack: stack / jnp.linalg.norm(stack, axis=-1, keepdims=True))
  # One division.
  chex.assert_trees_all_close(jnp.sum(rows**2, axis=-1), jnp.ones(3), atol=1e-6)


def test_holes_pass_through():
  tree = {'kernel': normal(3, 4), 'masked': optax.MaskedNode(), 'none': None, 'empty': jnp.zeros((0, 4))}
  updates = apply(tree)
  assert jax.tree.structure(updates) == jax.tree.structure(tree)
  chex.assert_trees_all_equal(updates['kernel'], apply(tree['kernel']))
