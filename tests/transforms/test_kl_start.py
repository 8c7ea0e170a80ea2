"""DESIGN 3.4: where the KL factors start, and that they stay where the gradients are."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emopt_jax import eigenbasis_rotate, kl_covariance


@functools.partial(jax.jit, static_argnums=0)
def factor_means(transform, gradients):
  """Returns mean(w_L) and mean(w_R) after every step."""

  def step(state, gradient):
    _, state = transform.update(gradient, state)
    factors = (state.covariance if hasattr(state, 'covariance') else state).factors['params']
    return state, [jnp.trace(factor[0]) / factor.shape[-1] for factor in factors]

  return jax.lax.scan(step, transform.init(gradients[0]), gradients)[1]


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache  # one compilation for all runs of a test
def rotated(decay=0.95):
  return eigenbasis_rotate(optax.scale_by_adam(eps=1e-30), covariance=kl_covariance(decay))


@pytest.mark.parametrize('shape', [(128, 64), (64, 128), (64, 64)])
def test_product_of_the_factors_is_the_variance_from_step_1_on(shape):
  """Fault 11: mean(w_L) mean(w_R) within 10 % of 1, times the scale squared, in steps 1 to 60."""
  gradients = normal(60, *shape)
  for scale in (1e-6, 1.0, 1e6):
    left, right = factor_means(rotated(), gradients * np.float32(scale))
    product = np.asarray(left, np.float64) * np.asarray(right, np.float64) / scale**2
    # DESIGN's figure.
    chex.assert_trees_all_close(product, np.ones(60), atol=0.1)


def test_alone_with_its_own_eigh():
  left, right = factor_means(kl_covariance(), normal(20, 32, 24))
  # DESIGN's figure, on smaller matrices.
  chex.assert_trees_all_close(left * right, jnp.ones(20), atol=0.1)


def test_rank_two_gradients():
  """Fresh rank-2 gradients of 64 x 48 for 1500 steps: between 0.1 and 100 of their mean square."""
  rng = np.random.default_rng(0)
  left, right = rng.standard_normal((1500, 64, 2)), rng.standard_normal((1500, 2, 48))
  gradients = (left @ right).astype(np.float32)
  product = np.multiply(*factor_means(rotated(), gradients)) / np.mean(gradients**2)
  # DESIGN's figures.
  assert product.min() > 0.1 and product.max() < 100


def fixed_subspace(rng, steps, m, n, rank):
  left, right = rng.standard_normal((m, rank)), rng.standard_normal((rank, n))
  return left @ rng.standard_normal((steps, rank, rank)) @ right


@pytest.mark.parametrize('kind', ['rank two', 'rank one, thin', 'half the rows'])
@pytest.mark.parametrize('scale', [1e-10, 1.0, 1e10])
def test_factors_do_not_drift_apart(kind, scale):
  """L and R are defined up to c and 1/c, which drifts on rank-deficient gradients; decay 0.5 makes the drift fast."""
  rng = np.random.default_rng(0)
  if kind == 'half the rows':
    gradients = rng.standard_normal((1500, 16, 24))
    gradients[:, :8] = 0
  else:
    shape = (16, 24, 2) if kind == 'rank two' else (2, 48, 1)
    gradients = fixed_subspace(rng, 1500, *shape)
  left, right = factor_means(rotated(0.5), (gradients * scale).astype(np.float32))
  assert np.all(np.isfinite(left)) and np.all(np.isfinite(right)) and np.all(left > 0) and np.all(right > 0)
  # Brought together when 2^40 apart, and at most one step's drift further.
  assert np.abs(np.log2(left) - np.log2(right)).max() < 50
  product = np.asarray(left, np.float64) * np.asarray(right, np.float64) / np.mean(gradients**2) / scale**2
  # Bounded for ever, not growing: the last 500 steps against the 500 before them, in the mean of logarithms.
  level = np.log(product).reshape(3, 500).mean(1)
  assert abs(level[2] - level[1]) < 0.5


def test_balancing_changes_no_digit():
  """Factors that meet 2^40 apart are brought together by a power of two, without a trace in the updates."""
  rng = np.random.default_rng(0)
  gradients = fixed_subspace(rng, 200, 2, 48, 1).astype(np.float32)
  transform = rotated(0.5)

  @jax.jit
  def updates(gradients):
    return jax.lax.scan(lambda s, g: transform.update(g, s)[::-1], transform.init(gradients[0]), gradients)[1]

  # Powers of two scale every product exactly, so a run on doubled gradients meets the balancing at other steps.
  chex.assert_trees_all_equal(updates(gradients * 4), updates(gradients))
