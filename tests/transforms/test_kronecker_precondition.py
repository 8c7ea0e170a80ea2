"""`kronecker_precondition` alone: Shampoo and KL-Shampoo directions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import MatrixAxes, kl_covariance, kronecker_covariance, kronecker_precondition, zero_start
from tests.references import oracles


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(transform, gradients):
  state, updates = jax.lax.scan(lambda s, g: transform.update(g, s)[::-1], transform.init(gradients[0]), gradients)
  return updates, state


@functools.cache  # one compilation for all runs of a test
def shampoo(**settings):
  return kronecker_precondition(kronecker_covariance(0.9, **settings), axes=settings.get('axes'))


@functools.cache
def kl_shampoo(**settings):
  return kronecker_precondition(kl_covariance(0.9, **settings), exponent=-1 / 2, axes=settings.get('axes'))


def test_how_to_test_one_alone():
  """From a zero start and decay 0 the first update is the polar factor: (GG^T)^(-1/4) G (G^TG)^(-1/4) = U V^T."""
  gradient = {'kernel': normal(4, 4) + 3 * np.eye(4, dtype=np.float32)}
  transform = kronecker_precondition(kronecker_covariance(0.0, start=zero_start))
  updates, _ = transform.update(gradient, transform.init(gradient))
  # Roots of float32 eigenvalues of a well conditioned matrix.
  chex.assert_trees_all_close(updates, {'kernel': oracles.polar(gradient['kernel'])}, atol=1e-4)


@pytest.mark.parametrize('shape', [(4, 7), (7, 4), (5, 5)])
@pytest.mark.parametrize('make, kl', [(shampoo, False), (kl_shampoo, True)])
def test_against_oracle(make, kl, shape):
  gradients = normal(20, *shape)
  updates, _ = run(make(), gradients)
  expected = oracles.shampoo(gradients, kl=kl, momentum=0.0, decay=0.9, rms=1.0)
  scaled = updates / np.sqrt(np.mean(np.square(updates), axis=(1, 2), keepdims=True))
  # Inverse roots of factors of condition up to 1e3 in float32.
  chex.assert_trees_all_close(scaled, expected, atol=2e-3)


@pytest.mark.parametrize('make', [shampoo, kl_shampoo])
def test_faults_in_one_stack(make):
  """Zero, not finite and healthy matrices side by side: only the healthy ones move, the others come back."""
  gradients = normal(10, 3, 4, 5)
  gradients[:4, 1] = 0
  gradients[5, 2, 0, 0] = np.nan
  updates, state = run(make(axes=MatrixAxes(-2, -1)), gradients)
  chex.assert_trees_all_equal(updates[:4, 1], jnp.zeros((4, 4, 5)))
  chex.assert_trees_all_equal(updates[5, 2], jnp.zeros((4, 5)))
  assert jnp.all(jnp.isfinite(updates)) and jnp.all(jnp.any(updates[6:] != 0, axis=(2, 3)))
  chex.assert_trees_all_equal(state.covariance.skipped['params'], jnp.array([0, 0, 1]))
  alone, _ = run(make(axes=MatrixAxes(-2, -1)), np.repeat(gradients[:, :1], 3, axis=1))
  # The same program on the same numbers.
  chex.assert_trees_all_equal(updates[:, 0], alone[:, 0])


@pytest.mark.parametrize('scale', [1e-10, 1e10])
@pytest.mark.parametrize('make', [shampoo, kl_shampoo])
def test_scale_invariant(make, scale):
  """Exponents -1/4 twice on squares, -1/2 twice on first powers: the scale of the gradients cancels."""
  gradients = normal(5, 4, 6)
  expected, _ = run(make(), gradients)
  # Inverse roots in float32.
  chex.assert_trees_all_close(run(make(), gradients * np.float32(scale))[0], expected, rtol=1e-2, atol=1e-3)


def test_rank_deficient_is_bounded_by_the_floor():
  rng = np.random.default_rng(0)
  gradients = np.einsum('tir,trj->tij', rng.standard_normal((60, 12, 2)), rng.standard_normal((60, 2, 8)))
  updates, _ = run(shampoo(), gradients.astype(np.float32))
  # Each side multiplies a direction by at most (floor * largest)^(-1/4) = 32 times the inverse root of the largest.
  assert float(jnp.max(jnp.abs(updates))) < 32**2 and jnp.all(jnp.isfinite(updates))


def test_one_sided():
  """A side too long for a factor is left alone."""
  gradients = normal(3, 4, 9)
  updates, _ = run(kronecker_precondition(kronecker_covariance(0.0, max_dim=4), exponent=-1 / 2), gradients)
  wide = gradients.astype(np.float64)
  expected = np.stack([oracles.power(g @ g.T, -1 / 2) @ g for g in wide[1:]])
  # Inverse root in float32.
  chex.assert_trees_all_close(updates[1:], expected, atol=1e-4)


def test_half_precision_and_float64():
  gradients = normal(3, 4, 6)
  half = jnp.asarray(gradients, jnp.bfloat16)
  updates, _ = run(shampoo(), half)
  expected, _ = run(shampoo(), half.astype(jnp.float32))
  assert updates.dtype == jnp.bfloat16
  # One rounding to 8 bits at the end.
  chex.assert_trees_all_close(updates.astype(jnp.float32), expected, rtol=4e-3, atol=1e-4)
  with jax.enable_x64(True):
    assert run(shampoo(), jnp.asarray(gradients, jnp.float64))[0].dtype == jnp.float64


@pytest.mark.parametrize('floor', [0.0, 1.0, -1.0])
def test_floor_out_of_range_raises(floor):
  with pytest.raises(ValueError, match=rf'^floor must be in \(0, 1\), got {floor}$'):
    kronecker_precondition(kronecker_covariance(), floor=floor)
