"""`kronecker_covariance` and `kl_covariance` alone: equations, starts, failures."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import MatrixAxes, bias_corrected, kl_covariance, kronecker_covariance, zero_start
from emopt_jax.diagnostics import skipped_gradients
from tests.references import oracles

# Cached, so that the runs of a test compile once.
BOTH = {'kronecker': functools.cache(kronecker_covariance), 'kl': functools.cache(kl_covariance)}


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(transform, gradients):
  """Returns the factors of a tree of one leaf after every step, and the last state."""

  def step(state, gradient):
    _, state = transform.update(gradient, state)
    return state, state.factors

  state, factors = jax.lax.scan(step, transform.init(gradients[0]), gradients)
  return factors['params'], state


def test_how_to_test_one_alone():
  """Updates pass through untouched; the factors are in the state."""
  gradient = {'kernel': normal(3, 5)}
  transform = kronecker_covariance(0.9)
  updates, state = transform.update(gradient, transform.init(gradient))
  chex.assert_trees_all_equal(updates, gradient)
  left, right = oracles.kronecker_step(*oracles.kronecker_start(gradient['kernel']), gradient['kernel'], 0.9)
  # Float32 sums of at most five products.
  chex.assert_trees_all_close(state.factors['kernel'].left[0], left, rtol=1e-5)
  chex.assert_trees_all_close(state.factors['kernel'].right[0], right, rtol=1e-5)


@pytest.mark.parametrize('shape', [(4, 7), (7, 4), (5, 5), (1, 6), (6, 1)])
@pytest.mark.parametrize('name', BOTH)
def test_against_oracle(name, shape):
  gradients = normal(12, *shape)
  wide = gradients.astype(np.float64)
  left, right = (oracles.kl_start if name == 'kl' else oracles.kronecker_start)(wide[0])
  lefts, rights = [], []
  for gradient in wide:
    if name == 'kl':
      left, right = oracles.kl_step(left, right, gradient, 0.9, *(np.linalg.eigh(f)[::-1] for f in (left, right)))
    else:
      left, right = oracles.kronecker_step(left, right, gradient, 0.9)
    lefts.append(left)
    rights.append(right)
  factors, _ = run(BOTH[name](0.9), gradients)
  # Float32, times the condition number of the factors of these few gradients (below 100) for the KL form.
  chex.assert_trees_all_close(factors.left[:, 0], np.array(lefts), rtol=1e-3, atol=1e-4)
  chex.assert_trees_all_close(factors.right[:, 0], np.array(rights), rtol=1e-3, atol=1e-4)


def test_zero_start_with_bias_correction_is_the_plain_average():
  gradients = normal(6, 3, 4)
  factors, _ = run(kronecker_covariance(bias_corrected(0.9), start=zero_start), gradients)
  wide = gradients.astype(np.float64)
  weights = 0.9 ** np.arange(5, -1, -1)
  expected = np.einsum('t,tij,tkj->ik', weights / weights.sum(), wide, wide)
  # Float32; the first weight is 1 - (1-b)/(1-b), which float32 leaves at 1e-7.
  chex.assert_trees_all_close(factors.left[-1, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', BOTH)
def test_start_waits_for_the_first_gradient_that_is_not_zero(name):
  gradients = normal(5, 3, 4)
  late = np.concatenate([np.zeros((3, 3, 4), np.float32), gradients])
  factors, _ = run(BOTH[name](), late)
  expected, _ = run(BOTH[name](), gradients)
  chex.assert_trees_all_equal(
    jax.tree.map(lambda f: f[:3], factors), jax.tree.map(lambda f: jnp.zeros_like(f[:3]), expected)
  )
  # Scans of other lengths fuse alike or nearly so.
  chex.assert_trees_all_close(jax.tree.map(lambda f: f[3:], factors), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', BOTH)
def test_not_finite_gradient_leaves_its_factors(name):
  """Fault 13, with the very first gradient bad too."""
  gradients = normal(7, 2, 3, 4)
  poisoned = gradients.copy()
  poisoned[0, 1, 0, 0], poisoned[5, 1, 2, 3] = np.nan, np.inf
  transform = BOTH[name](axes=MatrixAxes(-2, -1))
  factors, state = run(transform, poisoned)
  clean, _ = run(transform, gradients)
  chex.assert_trees_all_equal(jax.tree.map(lambda f: f[:, 0], factors), jax.tree.map(lambda f: f[:, 0], clean))
  chex.assert_trees_all_equal(jax.tree.map(lambda f: f[5, 1], factors), jax.tree.map(lambda f: f[4, 1], factors))
  shifted, _ = run(transform, np.delete(poisoned, [0, 5], axis=0)[[0, 1, 2, 3, 4, 4, 4]])
  # Entry 1 saw good gradients only, one step earlier each: a matrix alone in the same program.
  chex.assert_trees_all_equal(jax.tree.map(lambda f: f[6, 1], factors), jax.tree.map(lambda f: f[4, 1], shifted))
  chex.assert_trees_all_equal(state.skipped['params'], jnp.array([0, 2]))
  assert skipped_gradients(state) == 2


@pytest.mark.parametrize('name', BOTH)
def test_finite_gradient_too_large_to_square_does_not_poison(name):
  """Fault 13: 1e25 is finite and its square is not; the factors must recover."""
  gradients = normal(8, 3, 4)
  gradients[4] *= 1e25
  factors, _ = run(BOTH[name](), gradients)
  for factor in jax.tree.leaves(factors):
    assert jnp.all(jnp.isfinite(factor[-1]))


@pytest.mark.parametrize('name', BOTH)
def test_idle_matrix_comes_back(name):
  """Fault 30: after 400 steps without gradient the factors soon describe the gradients again.

  A KL factor that decays meanwhile whitens the first gradient by 1 / 0.95^400 = 1e9 too much, as a bad start would.
  """
  gradients = normal(520, 12, 8)
  gradients[60:460] = 0
  factors, _ = run(BOTH[name](), gradients)
  size = jnp.trace(factors.left[:, 0], axis1=-2, axis2=-1) * jnp.trace(factors.right[:, 0], axis1=-2, axis2=-1)
  # 40 steps of decay 0.95 replace 87 % of a factor; a KL product that overshot by 1e9 would take 400.
  assert 0.5 < size[500] / size[59] < 2


def test_a_long_side_has_no_factor():
  factors, _ = run(kronecker_covariance(0.9, max_dim=4), normal(3, 4, 9))
  assert factors.right is None and factors.left.shape == (3, 1, 4, 4)
  factors, _ = run(kl_covariance(0.0, max_dim=4), normal(3, 9, 4))
  gradient = normal(3, 9, 4)[-1].astype(np.float64)
  assert factors.left is None
  # R = G^T G / m, unwhitened; float32 sums.
  chex.assert_trees_all_close(factors.right[-1, 0], gradient.T @ gradient / 9, rtol=1e-5, atol=1e-6)


def test_half_precision_computes_in_float32():
  """Fault 8."""
  for dtype in (jnp.float16, jnp.bfloat16):
    gradients = jnp.asarray(normal(4, 3, 4), dtype)
    factors, _ = run(kronecker_covariance(), gradients)
    expected, _ = run(kronecker_covariance(), gradients.astype(jnp.float32))
    chex.assert_trees_all_equal_shapes_and_dtypes(factors, expected)
    # The same float32 arithmetic on the same numbers.
    chex.assert_trees_all_close(factors, expected, rtol=1e-5, atol=1e-6)


def test_float64():
  gradients = np.random.default_rng(0).standard_normal((4, 3, 5))
  left, right = oracles.kl_start(gradients[0])
  for gradient in gradients:
    left, right = oracles.kl_step(left, right, gradient, 0.95, *(np.linalg.eigh(f)[::-1] for f in (left, right)))
  with jax.enable_x64(True):
    factors, _ = run(kl_covariance(), jnp.asarray(gradients))
    # float64's rounding times a small condition number; 0.95 itself must be a float64.
    chex.assert_trees_all_close(factors.left[-1, 0], left, rtol=1e-11)
    chex.assert_trees_all_close(factors.right[-1, 0], right, rtol=1e-11)


@pytest.mark.parametrize('name', BOTH)
def test_state_is_not_changed_in_place(name):
  """Fault 27."""
  transform, gradient = BOTH[name](), normal(3, 4)
  state = transform.init(gradient)
  chex.assert_trees_all_equal(transform.update(gradient, state), transform.update(gradient, state))


def test_bad_settings_raise():
  with pytest.raises(ValueError, match=r'^decay must be in \[0, 1\), got 1.0$'):
    kl_covariance(1.0)
  with pytest.raises(ValueError, match=r'^max_dim must be at least 1, got 0$'):
    kronecker_covariance(max_dim=0)
