"""Matrix products and norms at full precision: the arithmetic that the rest of `linalg` is written in."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

# The share of the largest number that sums of squares may reach, so that what is made of them has room to grow.
ROOM = 2.0**-8


def product(
  a: Float[Array, '*batch m k'], b: Float[Array, '*batch k n'], dtype: DTypeLike | None = None
) -> Float[Array, '*batch m n']:
  """Returns `a @ b` without the TF32 or bfloat16 shortcut that accelerators take by default.

  Eigenbases and orthogonality errors live at the last digits of float32; three decimal digits are not enough.

  Args:
    a, b: The factors, in one dtype, which the result has too.
    dtype: Dtype that the factors are rounded to first; sums are still taken in the dtype of a.
  """
  if dtype is None:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
  return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=a.dtype)


def rows_by_rows(
  a: Float[Array, '*batch m k'], b: Float[Array, '*batch n k'], dtype: DTypeLike | None = None
) -> Float[Array, '*batch m n']:
  """Returns A B^T, at the cost of A B: of `product(a, transpose(b))` XLA on CPUs would store the transpose.

  Args:
    a, b, dtype: As for `product`.
  """
  precision = jax.lax.Precision.HIGHEST if dtype is None else None
  return jnp.einsum(
    '...mk,...nk->...mn',
    *(x if dtype is None else x.astype(dtype) for x in (a, b)),
    precision=precision,
    preferred_element_type=a.dtype,
  )


def symmetric_product(
  a: Float[Array, '*batch m k'], b: Float[Array, '*batch m k'], dtype: DTypeLike | None = None
) -> Float[Array, '*batch m m']:
  """Returns A B^T where that is symmetric, from its blocks on and above the diagonal.

  So are X X^T, and the product of two symmetric matrices that commute. `symmetric_share(m)` of the operations.

  Args:
    a, b, dtype: As for `product`.
  """
  return _by_blocks(a, b, dtype, _levels(a.shape[-2]))


def symmetric_share(m: int) -> float:
  """Returns the share of the operations of A B^T, m rows, that `symmetric_product` does: 1, 3/4 or 5/8."""
  return (1 + 2.0 ** -_levels(m)) / 2


def _levels(m: int) -> int:
  """Returns how often a product of m rows is cut in four.

  Blocks below 256 rows cost more to put together than they save, and more where several threads share a product; a
  third cut saves nothing on CPUs and doubles what there is to compile.
  """
  return min(max(m // 256, 1).bit_length() - 1, 2)


def _by_blocks(a: jax.Array, b: jax.Array, dtype: DTypeLike | None, levels: int) -> jax.Array:
  if levels == 0:
    return rows_by_rows(a, b, dtype)
  half = a.shape[-2] // 2
  upper_left = _by_blocks(a[..., :half, :], b[..., :half, :], dtype, levels - 1)
  upper_right = rows_by_rows(a[..., :half, :], b[..., half:, :], dtype)
  lower_right = _by_blocks(a[..., half:, :], b[..., half:, :], dtype, levels - 1)
  upper = jnp.concatenate([upper_left, upper_right], axis=-1)
  return jnp.concatenate([upper, jnp.concatenate([transpose(upper_right), lower_right], axis=-1)], axis=-2)


def transpose(x: Float[Array, '*batch m n']) -> Float[Array, '*batch n m']:
  """Returns each matrix transposed."""
  return jnp.swapaxes(x, -1, -2)


def trace(x: Float[Array, '*batch n n']) -> Float[Array, '*batch 1 1']:
  """Returns the sum of each diagonal, reading only that: `jnp.trace` masks the whole matrix."""
  return jnp.sum(jnp.diagonal(x, axis1=-2, axis2=-1), axis=-1)[..., None, None]


def leaves_room_for_squares(largest: Float[Array, '*batch'], x: Float[Array, '*batch m n']) -> Bool[Array, '*batch']:
  """Returns whether |X|_F^2 is far from overflow, from max |x_ij|; false for what is not finite.

  Args:
    largest: max |x_ij| of each matrix.
    x: The matrices, of which only size and dtype count.
  """
  limit = (ROOM * float(jnp.finfo(x.dtype).max) / (x.shape[-2] * x.shape[-1])) ** 0.5
  return largest < limit


def largest_magnitude(x: Float[Array, '*batch m n']) -> Float[Array, '*batch 1 1']:
  """Returns max |x_ij| of each matrix, and 1 for a zero matrix so that it can be divided by."""
  largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
  return jnp.where(largest > 0, largest, 1)


def frobenius_norm(x: Float[Array, '*batch m n']) -> Float[Array, '*batch 1 1']:
  """Returns |x|_F of each matrix, safe from overflow and underflow of the squares."""
  scale = largest_magnitude(x)
  return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale), axis=(-2, -1), keepdims=True))


def root_mean_square(x: Float[Array, '*batch m n']) -> Float[Array, '*batch 1 1']:
  """Returns |x|_F / sqrt(m n) of each matrix, finite where the matrix is."""
  scale = largest_magnitude(x)
  return scale * jnp.sqrt(jnp.mean(jnp.square(x / scale), axis=(-2, -1), keepdims=True))


def all_finite(x: Float[Array, 'batch ...']) -> jax.Array:
  """Returns, for each entry of the leading axis, whether all its numbers are finite."""
  return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))
