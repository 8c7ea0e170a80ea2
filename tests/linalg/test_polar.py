"""`newton_schulz` and `polar_svd`: recorded numbers, scale invariance, every shape and dtype."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import emopt_jax
from emopt_jax import newton_schulz, polar_svd
from tests import references
from tests.references import oracles

TABLES = {
  'simple': emopt_jax.KELLER_JORDAN,
  'quintic': emopt_jax.QUINTIC,
  'polar_express': emopt_jax.POLAR_EXPRESS,
  'cans': emopt_jax.CANS,
  'deepseekv4': emopt_jax.DEEPSEEK_V4,
  'cubic5': emopt_jax.CUBIC5,
}
SHAPES = {'wide': (8, 20), 'tall': (20, 8), 'square': (12, 12), 'row': (1, 64), 'column': (64, 1), 'thin': (2, 3000)}
exact = functools.partial(newton_schulz, steps=16)


def normal(shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize('name', [name for name in references.names('ns_') if name != 'ns_bfloat16'])
def test_recorded(name):
  case, settings = references.load(name), references.settings(name)
  y = newton_schulz(case['x'], coefficients=TABLES[settings['coefficients']], steps=settings['steps'])
  # The tolerance: sums in another order in float32.
  chex.assert_trees_all_close(y, case['y'], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
  'name', [name for name in references.names('ns_') if name.endswith('_wide') and '16' not in name]
)
def test_default_steps_are_the_recorded_ones(name):
  """What the source of a table counts; 16 steps of `POLAR_EXPRESS` are for those who ask."""
  case, settings = references.load(name), references.settings(name)
  # As above.
  chex.assert_trees_all_close(
    newton_schulz(case['x'], coefficients=TABLES[settings['coefficients']]), case['y'], atol=2e-5, rtol=0
  )


def test_recorded_bfloat16():
  case = references.load('ns_bfloat16')
  y = newton_schulz(case['x'], coefficients=emopt_jax.QUINTIC, steps=5, dtype=jnp.bfloat16)
  # bfloat16 operands carry 8 bits, 4e-3, through 15 products.
  chex.assert_trees_all_close(y, case['y'], atol=5e-2, rtol=0)


@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_both_methods_against_svd(shape):
  x = normal(shape)
  expected = oracles.polar(x)
  # 16 steps converge below float32's rounding, which the products and the SVD leave at about 1e-6.
  chex.assert_trees_all_close(exact(x), expected, atol=1e-5)
  chex.assert_trees_all_close(polar_svd(x), expected, atol=1e-5)


@pytest.mark.parametrize('c', [1e-30, 1e-20, 1e-10, 1e-3, 1e10, 1e20, 1e30])
@pytest.mark.parametrize('method', [newton_schulz, polar_svd])
def test_scale_invariant_float32(method, c):
  """DESIGN 3.2 and fault 1: no floor in the normalisation, no overflow of squares."""
  x = normal((8, 20))
  # c * x rounds each entry by 6e-8, which the slopes of the first rows amplify in the small singular directions.
  chex.assert_trees_all_close(method(x * np.float32(c)), method(x), atol=1e-5)


@pytest.mark.parametrize('dtype, exponents', [(jnp.float16, (-10, -4, 4, 12)), (jnp.bfloat16, (-100, -66, 33, 100))])
@pytest.mark.parametrize('method', [newton_schulz, polar_svd])
def test_scale_invariant_half(method, dtype, exponents):
  """Powers of two scale without rounding as far as the dtype reaches, so the results are the same to the last bit."""
  x = jnp.asarray(1 + np.abs(normal((8, 20)))).astype(dtype) * jnp.sign(normal((8, 20), 1)).astype(dtype)
  for exponent in exponents:
    chex.assert_trees_all_equal(method(jnp.ldexp(x, exponent)), method(x))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize('method', [newton_schulz, functools.partial(newton_schulz, dtype=jnp.bfloat16), polar_svd])
def test_zero_gives_zero(method, dtype):
  zero = jnp.zeros((3, 5), dtype)
  chex.assert_trees_all_equal(method(zero), zero)
  aol = newton_schulz(zero, coefficients=emopt_jax.AOL)
  chex.assert_trees_all_equal(aol, zero)


@pytest.mark.parametrize('dtype, tolerance', [(jnp.float16, 1e-3), (jnp.bfloat16, 8e-3)])
def test_half_precision_computes_wide_and_returns_its_dtype(dtype, tolerance):
  x = jnp.asarray(normal((8, 20))).astype(dtype)
  for method in (exact, polar_svd):
    y = method(x)
    assert y.dtype == dtype
    # One rounding of a result below 1, at the very end: half a unit in the last place.
    chex.assert_trees_all_close(y.astype(jnp.float32), oracles.polar(x.astype(jnp.float32)), atol=tolerance)


def test_float64():
  x = normal((8, 20), dtype=np.float64)
  with jax.enable_x64(True):
    for method in (exact, polar_svd):
      y = method(x)
      assert y.dtype == jnp.float64
      # float64's rounding; the table converges to (1.875, -1.25, 0.375), whose fixed point is exactly 1.
      chex.assert_trees_all_close(y, oracles.polar(x), atol=1e-12)


@pytest.mark.parametrize('method', [newton_schulz, polar_svd])
def test_batch_is_each_matrix_on_its_own(method):
  x = normal((2, 3, 6, 10)) * np.array([1e-12, 1.0, 1e12], np.float32)[:, None, None]
  # XLA may pick another product kernel for a batch: rounding, amplified as above.
  separate = jnp.stack([jnp.stack([method(matrix) for matrix in row]) for row in x])
  chex.assert_trees_all_close(method(x), separate, atol=1e-5)


def test_rank_deficient():
  """`polar_svd` is the partial isometry; Newton-Schulz agrees where singular values are not zero."""
  rng = np.random.default_rng(3)
  x = (rng.standard_normal((30, 2)) @ rng.standard_normal((2, 20))).astype(np.float32)
  # Null directions hold noise of 1e-7 |X|; 8 Polar Express steps amplify it by up to 8 * 4^4.
  chex.assert_trees_all_close(polar_svd(x), oracles.polar(x), atol=1e-5)
  chex.assert_trees_all_close(newton_schulz(x), oracles.polar(x), atol=1e-2)
  assert np.linalg.matrix_rank(polar_svd(x), tol=1e-3) == 2


@pytest.mark.parametrize('shape', [(64, 64), (256, 256), (128, 512), (512, 128)])
def test_svd_keeps_small_directions(shape):
  """Singular values from 1 to 1e-5, which is 84 eps: none is noise."""
  left, right = (np.linalg.qr(normal((n, min(shape)), n, np.float64))[0] for n in (shape[0], shape[1] + 1))
  right = right[: shape[1]] if shape[1] == min(shape) else np.linalg.qr(right[: shape[1]])[0]
  x = ((left * np.geomspace(1, 1e-5, min(shape))) @ right.T).astype(np.float32)
  difference = polar_svd(x) - oracles.polar(x)
  # LAPACK's backward error of at most eps of the largest singular value, over twice the smallest: 1/168 in the spectral
  # norm, and less than a tenth of that in any entry. A direction that is left out makes 1.
  assert np.linalg.norm(difference, 2) < 6e-3
  assert np.abs(difference).max() < 1e-3


@pytest.mark.parametrize('shape', [(16, 16), (128, 128), (300, 48), (128, 512), (512, 512), (2, 3000)])
def test_svd_leaves_out_what_is_rounding(shape):
  """Products of rank r whose entries are rounded, and small integers, which are not: the partial isometry of rank r."""
  compiled = jax.jit(polar_svd)
  for rank in [rank for rank in (1, 3, 8) if rank < min(shape)]:
    left, right = normal((shape[0], rank), 1, np.float64), normal((rank, shape[1]), 2, np.float64)
    for x in (left @ right, np.floor(2 + left) @ np.floor(2 + right)):
      y = np.asarray(compiled(np.float32(x)))
      u, s, vt = np.linalg.svd(x, full_matrices=False)
      assert s[rank - 1] > 1e-3 * s[0]
      # At most 100 eps of the largest singular value, over one of a thousandth of it, in an entry.
      chex.assert_trees_all_close(y, np.float32(u[:, :rank] @ vt[:rank]), atol=1e-4)
      # The singular values are 1 and 0 to the rounding of U and V.
      chex.assert_trees_all_close(np.linalg.svd(y, compute_uv=False), np.arange(min(shape)) < rank, atol=1e-4)


def test_svd_of_ones():
  """LAPACK's second singular value is 35 eps of the first: its backward error, which is in the first vectors too."""
  chex.assert_trees_all_close(polar_svd(np.ones((2, 3000), np.float32)), np.full((2, 3000), 6000**-0.5), atol=4e-6)


def test_thin_zero_rows_and_columns_stay_zero():
  x = normal((6, 10))
  x[2], x[:, 7] = 0, 0
  for method in (newton_schulz, polar_svd):
    y = method(x)
    # polar_svd's zero row is a product of orthogonal vectors: rounding.
    chex.assert_trees_all_close(y[2], jnp.zeros(10), atol=1e-6)
    chex.assert_trees_all_close(y[:, 7], jnp.zeros(6), atol=1e-6)


@pytest.mark.parametrize('jit', [False, True])
def test_one_trace_and_jit_changes_nothing(jit):
  traced = chex.assert_max_traces(newton_schulz, n=1) if jit else newton_schulz
  function = jax.jit(traced) if jit else traced
  for seed in range(3):
    x = normal((8, 20), seed)
    # The same program, fused differently.
    chex.assert_trees_all_close(function(x), oracles.newton_schulz(x, emopt_jax.POLAR_EXPRESS.rows), atol=1e-5)


def test_steps_below_one_raise():
  with pytest.raises(ValueError, match=r'^steps must be at least 1, got 0$'):
    newton_schulz(jnp.eye(2), steps=0)


METHODS = [newton_schulz, polar_svd]


@pytest.mark.parametrize('method', METHODS)
def test_what_is_no_real_floating_matrix_raises(method):
  for x, message in (
    (jnp.ones(3), r'^polar factors are of matrices .* got shape \(3,\): a vector v is the row v\[None\]$'),
    (jnp.ones(()), r'^polar factors are of matrices .* got shape \(\)'),
    (
      1j * jnp.ones((2, 3)),
      r'^polar factors are of real matrices, got complex64 of shape \(2, 3\): give \[\[real, -imag\]',
    ),
    (jnp.ones((2, 3), jnp.int32), r'^polar factors are of floating matrices, got int32 of shape \(2, 3\): cast it'),
    (jnp.ones((2, 3), bool), r'^polar factors are of floating matrices, got bool of shape \(2, 3\): cast it'),
    (jnp.ones((0, 3), jnp.int32), r'^polar factors are of floating matrices, got int32'),
  ):
    with pytest.raises(ValueError, match=message):
      method(x)


def test_complex_matrices_as_real_ones():
  """The mend that the error names: the blocks of the result are the polar factor of the complex matrix."""
  x = normal((4, 6)) + 1j * normal((4, 6), 1)
  y = polar_svd(np.block([[x.real, -x.imag], [x.imag, x.real]]))
  u, _, vt = np.linalg.svd(x, full_matrices=False)
  # Float32 SVD.
  chex.assert_trees_all_close(y[:4, :6] + 1j * y[4:, :6], np.complex64(u @ vt), atol=1e-5)


@pytest.mark.parametrize('shape', [(0, 3, 4), (3, 0), (0, 3), (2, 0, 4), (0, 0)])
@pytest.mark.parametrize('method', METHODS)
def test_nothing_gives_nothing(method, shape):
  for dtype in (jnp.float32, jnp.bfloat16):
    y = method(jnp.zeros(shape, dtype))
    assert y.shape == shape and y.dtype == dtype


@pytest.mark.parametrize('dtype', [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize('method', METHODS)
def test_eight_bits_compute_wide_and_return_their_dtype(method, dtype):
  x = jnp.asarray(normal((8, 20))).astype(dtype)
  y = method(x)
  assert y.dtype == dtype
  # One rounding of the wide result at the very end, which may fall on the other side of a tie.
  chex.assert_trees_all_close(y.astype(jnp.float32), method(x.astype(jnp.float32)).astype(dtype).astype(jnp.float32))
