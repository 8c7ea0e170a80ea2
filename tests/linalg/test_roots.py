"""Powers of positive semi-definite matrices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax.linalg.roots import matrix_power
from tests.references import oracles


def factor(n=6, seed=0, rank=None):
  root = np.random.default_rng(seed).standard_normal((n, rank or n))
  return root @ root.T + (0 if rank else 0.1 * np.eye(n))


@pytest.mark.parametrize('exponent', [-1, -1 / 2, -1 / 4, 1 / 2])
def test_against_float64(exponent):
  a = factor()
  # A condition number of about 100 times float32's rounding.
  chex.assert_trees_all_close(
    matrix_power(a.astype(np.float32), exponent), oracles.power(a, exponent), rtol=1e-3, atol=1e-4
  )
  with jax.enable_x64(True):
    chex.assert_trees_all_close(matrix_power(jnp.asarray(a), exponent), oracles.power(a, exponent), atol=1e-11)


def test_inverse_root_undoes_the_factor():
  a = factor().astype(np.float32)
  root = matrix_power(a, -1 / 4)
  # Four products of a matrix of condition 100.
  chex.assert_trees_all_close(root @ root @ a @ root @ root, jnp.eye(6), atol=1e-3)


@pytest.mark.parametrize('scale', [1e-30, 1e-12, 1e12, 1e30])
def test_homogeneous_in_the_scale(scale):
  """(cA)^p = c^p A^p: no absolute floor."""
  a = factor().astype(np.float32)
  expected = np.float64(scale) ** -0.25 * oracles.power(factor(), -1 / 4)
  actual = matrix_power(a * np.float32(scale), -1 / 4)
  # As against float64, relative to the size of the result.
  chex.assert_trees_all_close(actual / np.abs(expected).max(), expected / np.abs(expected).max(), atol=1e-4)


def test_floor_bounds_null_directions():
  a = factor(rank=2).astype(np.float32)
  power = matrix_power(a, -1 / 2, floor=1e-4)
  largest = np.linalg.eigvalsh(a)[-1]
  # The null space is multiplied by (floor * largest)^p and no more; eigenvalues carry float32's rounding.
  assert np.linalg.eigvalsh(power)[-1] == pytest.approx((1e-4 * largest) ** -0.5, rel=1e-3)


def test_zero_gives_zero():
  chex.assert_trees_all_equal(matrix_power(jnp.zeros((2, 3, 3)), -1 / 4), jnp.zeros((2, 3, 3)))


def test_batch_is_each_matrix_on_its_own():
  stack = np.stack([factor(seed=seed) * 10.0**seed for seed in range(3)]).astype(np.float32)
  separate = jnp.stack([matrix_power(a, -1 / 4) for a in stack])
  # Same kernel, another order of sums.
  chex.assert_trees_all_close(matrix_power(stack, -1 / 4), separate, rtol=1e-4, atol=1e-5)
