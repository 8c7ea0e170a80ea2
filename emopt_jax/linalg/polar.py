"""The polar factor U V^T of a matrix U S V^T: by Newton-Schulz iteration, and exactly."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from emopt_jax.linalg.coefficients import POLAR_EXPRESS, Coefficients
from emopt_jax.linalg.products import frobenius_norm, largest_magnitude, product, transpose


def newton_schulz(
  x: Float[Array, '*batch m n'],
  *,
  coefficients: Coefficients = POLAR_EXPRESS,
  steps: int | None = None,
  dtype: DTypeLike | None = None,
) -> Float[Array, '*batch m n']:
  """Approximates the polar factor of each matrix by matrix products alone.

  X_0 = X / |X|_F, then X <- aX + (bA + cA^2)X with A = X X^T, on the smaller side.

  Args:
    x: Matrices `[*batch, m, n]` of any real floating dtype and any scale: the result for c * x is that for x.
    coefficients: The rows (a, b, c), one a step.
    steps: Number of steps, at least 1; by default every row once.
    dtype: Dtype of the operands of the products, which accumulate in float32; by default float32 or wider.

  Returns:
    `[*batch, m, n]` in the dtype of x, with singular values near 1. A zero matrix gives zero.

  Raises:
    ValueError: If `steps` is below 1.

  Example:
    >>> import jax
    >>> factor = newton_schulz(jax.random.normal(jax.random.key(0), (4, 8)), steps=16)
    >>> bool(jax.numpy.allclose(factor @ factor.T, jax.numpy.eye(4), atol=1e-4))
    True

  References:
    Jordan et al., https://kellerjordan.github.io/posts/muon/; Amsel et al., arXiv 2505.16932.
  """
  wide = x.shape[-2] <= x.shape[-1]
  y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  # The largest magnitude first: the squares inside the Frobenius norm would leave float32 for |x| beyond 1e19.
  y = y / largest_magnitude(y)
  if not coefficients.rescales_rows:
    norm = frobenius_norm(y)
    y = y / jnp.where(norm > 0, norm, 1)
  y = y if wide else transpose(y)
  if coefficients.rescales_rows:
    y = _rescale_rows(y)

  rows = coefficients.schedule(steps)
  cubic = not rows[:, 2].any()

  def step(y, row):
    a, b, c = row
    gram = _product(y, transpose(y), dtype)
    polynomial = b * gram if cubic else b * gram + c * _product(gram, gram, dtype)
    return a * y + _product(polynomial, y, dtype), None

  y, _ = jax.lax.scan(step, y, jnp.asarray(rows, y.dtype))
  y = y if wide else transpose(y)
  return y.astype(x.dtype)


def _product(a: jax.Array, b: jax.Array, dtype: DTypeLike | None) -> jax.Array:
  if dtype is None:
    return product(a, b)
  return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=a.dtype)


def _rescale_rows(y: jax.Array) -> jax.Array:
  row_sums = jnp.sum(jnp.abs(product(y, transpose(y))), axis=-1, keepdims=True)
  # The bound is 1, which a matrix of rank one reaches, and above 0.88 the first AOL row turns the sign round.
  return 0.8 * y * jax.lax.rsqrt(jnp.where(row_sums > 0, row_sums, 1))


def polar_svd(x: Float[Array, '*batch m n']) -> Float[Array, '*batch m n']:
  """Returns the exact polar factor U V^T of each matrix, by singular value decomposition.

  Directions whose singular value is zero to rounding (below eps max(m, n) times the largest) are left out, so the
  result is the unique partial isometry, and zero for a zero matrix.

  Args:
    x: Matrices `[*batch, m, n]` of any real floating dtype.

  Returns:
    `[*batch, m, n]` in the dtype of x.

  Example:
    >>> import jax.numpy as jnp
    >>> polar_svd(jnp.diag(jnp.array([3.0, -2.0]))).round(4)
    Array([[ 1.,  0.],
           [ 0., -1.]], dtype=float32)

  References:
    Higham, Functions of Matrices, chapter 8.
  """
  y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  u, s, vt = jnp.linalg.svd(y / largest_magnitude(y), full_matrices=False)
  tolerance = jnp.finfo(y.dtype).eps * max(x.shape[-2:]) * s[..., :1]
  kept = (s > tolerance).astype(y.dtype)
  return product(u * kept[..., None, :], vt).astype(x.dtype)
