"""`rms_match`, `rms_normalize` and the scale rules."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import (
  MatrixAxes,
  adam_rms,
  orthogonalize,
  polar_svd,
  rms_match,
  rms_normalize,
  shape,
  spectral,
  unit_rms,
)
from tests import references


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def apply(transform, updates):
  return jax.jit(transform.update)(updates, transform.init(updates))[0]


def rms(x):
  return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_how_to_test_one_alone():
  """An orthogonal kernel of [in, out] = [4, 16] comes out with the target as its RMS."""
  kernel = polar_svd(normal(4, 16))
  updates = apply(rms_match(0.2), {'kernel': kernel})
  # sqrt(16) * 0.2, one multiplication.
  chex.assert_trees_all_close(updates, {'kernel': 0.8 * kernel}, rtol=1e-6)
  assert rms(updates['kernel']) == pytest.approx(0.2, rel=1e-5)  # float32 SVD


@pytest.mark.parametrize('name, rule', [('spectral', spectral), ('shape_scaling', shape), ('unit_rms_norm', unit_rms)])
def test_recorded_rules(name, rule):
  case = references.load(f'scale_{name}')
  for (fan_out, fan_in), scale in zip(case['sizes'].tolist(), case['scale'], strict=True):
    # Roots in double precision on both sides.
    assert rule(fan_in, fan_out) == pytest.approx(scale, rel=1e-12)
    updates = apply(rms_match(0.2, rule=rule), jnp.ones((fan_in, fan_out)))
    chex.assert_trees_all_close(updates[0, 0], 0.2 * scale, rtol=1e-6)  # one rounding to float32


@pytest.mark.parametrize('leaf, axes, fans', [
  ((3, 3, 16, 64), MatrixAxes((0, 1, 2), 3), (144, 64)),
  ((12, 4, 32), MatrixAxes(-2, -1), (4, 32)),
  ((32, 4), MatrixAxes(1, 0), (4, 32)),
  ((8, 24), MatrixAxes(0, 1, split=(1, (8, 8, 8))), (8, 8)),
])  # fmt: skip
def test_scale_comes_from_the_flattened_matrix(leaf, axes, fans):
  """Fault 3: fan-in and fan-out are those of the matrix that is orthogonalized, not the leaf's last two axes."""
  for rule in (spectral, shape, unit_rms):
    updates = apply(rms_match(1.0, rule=rule, axes=axes), jnp.ones(leaf))
    # One multiplication.
    chex.assert_trees_all_close(updates, jnp.full(leaf, rule(*fans)), rtol=1e-6)


def test_stack_equals_separate_leaves():
  """Fault 29: [3, 8, 8] against three leaves, for rules and for measured RMS."""
  stack = normal(3, 8, 8) * jnp.array([0.01, 1.0, 100.0])[:, None, None]
  leaves = {str(i): matrix for i, matrix in enumerate(stack)}
  for make in (rms_match, rms_normalize, functools.partial(rms_match, rule=unit_rms)):
    stacked = apply(make(0.2, axes=MatrixAxes(-2, -1)), stack)
    separate = apply(make(0.2), leaves)
    # A batched reduction may sum in another order.
    chex.assert_trees_all_close(stacked, jnp.stack(list(separate.values())), rtol=1e-6)


@pytest.mark.parametrize('scale', [1e-30, 1e-3, 1.0, 1e30])
def test_normalize_measures(scale):
  updates = apply(rms_normalize(0.2), normal(5, 7) * scale)
  assert rms(updates) == pytest.approx(0.2, rel=1e-5)  # a float32 sum of 35 squares


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize('make', [rms_match, rms_normalize])
def test_zero_gives_zero_in_its_dtype(make, dtype):
  zero = jnp.zeros((4, 6), dtype)
  updates = apply(make(0.2), zero)
  chex.assert_trees_all_equal_shapes_and_dtypes(updates, zero)
  chex.assert_trees_all_equal(updates, zero)


def test_half_precision_keeps_its_digits():
  x = normal(16, 64).astype(jnp.bfloat16)
  updates = apply(rms_normalize(0.2), x)
  assert updates.dtype == jnp.bfloat16
  assert rms(updates) == pytest.approx(0.2, rel=4e-3)  # bfloat16's last place, systematic at worst


def test_adam_rms():
  assert adam_rms(0.9) == pytest.approx(0.229, abs=5e-4)  # DESIGN 3.3 gives three digits
  """Adam's update on noise has that RMS once b2's average has settled."""
  gradients = normal(400, 2000)
  adam = optax.scale_by_adam(b1=0.9, b2=0.999)
  _, updates = jax.lax.scan(lambda s, g: adam.update(g, s)[::-1], adam.init(gradients[0]), gradients)
  # 2000 samples of 300 steps whose second moment still fluctuates.
  assert rms(updates[100:]) == pytest.approx(adam_rms(0.9), rel=0.05)


def test_chains_with_orthogonalize_in_float64():
  with jax.enable_x64(True):
    gradient = jnp.asarray(np.random.default_rng(0).standard_normal((6, 10)))
    updates = apply(optax.chain(orthogonalize(polar_svd), rms_match(0.2)), gradient)
    assert updates.dtype == jnp.float64
    # float64's rounding; 0.2 itself must be a float64.
    assert rms(updates) == pytest.approx(0.2, rel=1e-13)


def test_leaf_that_is_no_matrix_raises():
  with pytest.raises(ValueError, match=r"leaf 'bias' of shape \(8,\) is not a matrix"):
    rms_match().update({'bias': jnp.ones(8)}, optax.EmptyState())
  assert emopt_jax.rms_match is rms_match
