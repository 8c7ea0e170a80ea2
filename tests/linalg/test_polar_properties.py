"""What holds for the polar factor of any matrix, on drawn shapes, scales and seeds."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from emopt_jax import newton_schulz, polar_svd

# Few shapes, so that few programs are compiled.
SHAPES = st.sampled_from([(5, 9), (9, 5), (6, 6)])
SEEDS = st.integers(0, 2**31)
METHODS = [jax.jit(newton_schulz), jax.jit(polar_svd)]
few = functools.partial(settings, max_examples=12, deadline=None, derandomize=True)


def well_conditioned(shape, seed):
  """Returns a matrix with singular values from 0.3 to 3, float32, and its polar factor."""
  rng = np.random.default_rng(seed)
  u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
  return ((u * rng.uniform(0.3, 3, min(shape))) @ vt).astype(np.float32), u @ vt


def orthogonal(n, seed):
  return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0].astype(np.float32)


@few()
@given(SHAPES, SEEDS)
def test_orthogonality(shape, seed):
  x, expected = well_conditioned(shape, seed)
  for method, tolerance in zip(METHODS, (1e-3, 1e-5), strict=True):
    # Eight Polar Express steps leave 1e-4 at these singular values; the SVD float32's rounding.
    chex.assert_trees_all_close(method(x), expected, atol=tolerance)


@few()
@given(SHAPES, SEEDS, st.integers(-100, 100))
def test_scale_invariance(shape, seed, exponent):
  """Powers of two scale without rounding: the same to the last bit."""
  x, _ = well_conditioned(shape, seed)
  for method in METHODS:
    chex.assert_trees_all_equal(method(np.ldexp(x, exponent)), method(x))


@few()
@given(SHAPES, SEEDS)
def test_rotation_equivariance(shape, seed):
  """polar(U G V) = U polar(G) V."""
  x, _ = well_conditioned(shape, seed)
  u, v = orthogonal(shape[0], seed + 1), orthogonal(shape[1], seed + 2)
  for method in METHODS:
    # A rotation in float32, amplified by the slopes of the first rows.
    chex.assert_trees_all_close(method(u @ x @ v), u @ method(x) @ v, atol=2e-5)


@few()
@given(SHAPES, SEEDS)
def test_permutation_and_sign_equivariance(shape, seed):
  x, _ = well_conditioned(shape, seed)
  rng = np.random.default_rng(seed)
  rows, columns = rng.permutation(shape[0]), rng.permutation(shape[1])
  signs = rng.choice([-1, 1], shape[1]).astype(np.float32)
  for method in METHODS:
    # Sums in another order.
    chex.assert_trees_all_close(method((x * signs)[rows][:, columns]), (method(x) * signs)[rows][:, columns], atol=2e-5)


@few()
@given(SHAPES, SEEDS)
def test_transposition(shape, seed):
  x, _ = well_conditioned(shape, seed)
  for method in METHODS:
    # Newton-Schulz works on the smaller side either way.
    chex.assert_trees_all_close(method(x.T), method(x).T, atol=2e-5)


@few()
@given(SHAPES, SEEDS, st.tuples(*[st.integers(-20, 20)] * 3))
def test_batch_is_each_matrix_on_its_own(shape, seed, exponents):
  """Whatever the scales of the others."""
  stack = np.stack([np.ldexp(well_conditioned(shape, seed + i)[0], e) for i, e in enumerate(exponents)])
  for method in METHODS:
    # A batch may take another product kernel.
    chex.assert_trees_all_close(method(stack), jnp.stack([method(x) for x in stack]), atol=2e-5)
