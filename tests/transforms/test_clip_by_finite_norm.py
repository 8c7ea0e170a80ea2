"""Clipping by the norm of what is finite, against the same in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax

LARGEST = float(np.finfo(np.float32).max)


def clip(gradients, max_norm):
  transform = emopt_jax.clip_by_finite_norm(max_norm)
  return jax.jit(transform.update)(gradients, transform.init(gradients))[0]


def oracle(gradients, max_norm):
  wide = {path: np.asarray(leaf, np.float64) for path, leaf in gradients.items()}
  norm = np.sqrt(sum(np.sum(np.square(leaf[np.isfinite(leaf)] / LARGEST)) for leaf in wide.values())) * LARGEST
  return {path: leaf * min(1.0, max_norm / max(norm, 1e-300)) for path, leaf in wide.items()}


def normal(scale=1.0, dtype=np.float32, **entries):
  rng = np.random.default_rng(0)
  gradients = {'kernel': rng.standard_normal((6, 4)) * scale, 'bias': rng.standard_normal(5) * scale}
  for path, entry in entries.items():
    gradients[path].flat[1] = entry
  return {path: jnp.asarray(leaf, dtype) for path, leaf in gradients.items()}


@pytest.mark.parametrize('max_norm', [0.5, 1e3, 1e30])
@pytest.mark.parametrize(
  'gradients',
  [
    normal(),
    normal(kernel=np.nan),
    normal(bias=np.inf, kernel=-np.inf),
    normal(kernel=1e25),
    normal(kernel=3e38, bias=np.nan),
    normal(scale=1e37),
    normal(scale=1e-30),
    normal(scale=0),
  ],
  ids=['plain', 'nan', 'infinite', 'huge', 'huge and nan', 'all huge', 'tiny', 'zero'],
)
def test_equals_float64(gradients, max_norm):
  actual, expected = clip(gradients, max_norm), oracle(gradients, max_norm)
  for path, leaf in actual.items():
    # A sum of 29 squares and three products in float32, 1e-7 each; below 1.2e-38 float32 has no digits.
    np.testing.assert_allclose(np.float64(leaf), expected[path], rtol=1e-6, atol=1.2e-38)


def test_all_entries_the_largest_number():
  gradients = {'kernel': jnp.full((64, 64), LARGEST)}
  # Each of 4096 equal entries of a matrix of norm 1 is 1/64.
  np.testing.assert_allclose(clip(gradients, 1.0)['kernel'], 1 / 64, rtol=1e-6)


@pytest.mark.parametrize('max_norm', [0.5, 1e3])
def test_equals_optax_on_finite_gradients(max_norm):
  optax_clip = optax.clip_by_global_norm(max_norm)
  expected, _ = optax_clip.update(normal(), optax_clip.init(normal()))
  for path, leaf in clip(normal(), max_norm).items():
    np.testing.assert_allclose(leaf, expected[path], rtol=1e-6)  # two products in another order


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
  """The square of 60000 is infinite in float16."""
  gradients = normal(100, dtype, kernel=6e4)
  expected = oracle(gradients, 10.0)
  for path, leaf in clip(gradients, 10.0).items():
    assert leaf.dtype == dtype
    # Half a last digit of the result, and float16 has no digits below 6e-8.
    np.testing.assert_allclose(np.float64(leaf), expected[path], rtol=float(jnp.finfo(dtype).eps), atol=6e-8)


def test_small_gradients_are_returned_as_they_are():
  for path, leaf in clip(normal(kernel=np.nan), 100.0).items():
    np.testing.assert_array_equal(leaf, normal(kernel=np.nan)[path])


@pytest.mark.parametrize('max_norm', [0.0, -1.0, float('nan')])
def test_norm_that_is_not_positive(max_norm):
  with pytest.raises(ValueError, match='max_norm must be positive'):
    emopt_jax.clip_by_finite_norm(max_norm)


def test_norm_may_be_traced():
  actual = jax.jit(clip)(normal(), 0.5)
  for path, leaf in clip(normal(), 0.5).items():
    np.testing.assert_allclose(actual[path], leaf, rtol=1e-6)  # one product in another order
