"""The polar factor U V^T of a matrix U S V^T: by Newton-Schulz iteration, and exactly."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from emopt_jax.linalg import gram
from emopt_jax.linalg.coefficients import POLAR_EXPRESS, Coefficients
from emopt_jax.linalg.factorizations import svd
from emopt_jax.linalg.products import largest_magnitude, product, symmetric_product, transpose


def newton_schulz(
  x: Float[Array, '*batch m n'],
  *,
  coefficients: Coefficients = POLAR_EXPRESS,
  steps: int | None = None,
  dtype: DTypeLike | None = None,
) -> Float[Array, '*batch m n']:
  """Approximates the polar factor of each matrix by matrix products alone.

  X_0 = X / |X|_F, then X <- aX + (bA + cA^2)X with A = X X^T, on the smaller side. Where that takes fewer operations
  (see `restart_lengths`), all but two or three steps run on A alone, and steps that would change nothing are left out.

  Accuracy in float32, measured up to [128, 512], condition number 1e6, rank 8 of 128 and singular values k^-2, as the
  spectral norm of the difference from the same steps in float64: 1e-4 for the 5-step tables (`CANS` 4e-4), 2e-3 for
  `POLAR_EXPRESS`, at most 10 times the rounding errors of steps on X alone. |U U^T - I|_2 after 16 steps of the latter
  is 2e-6 up to condition number 1e4. `QUINTIC` in bfloat16 0.02, in float16 0.003; `POLAR_EXPRESS` in bfloat16 0.06.

  Args:
    x: Matrices `[*batch, m, n]` of any real floating dtype and any scale: the result for c * x is that for x.
    coefficients: The rows (a, b, c), one a step.
    steps: Number of steps, at least 1; by default every row once. What more steps do, `Coefficients` says.
    dtype: Dtype of the operands of the products, which accumulate in float32; by default float32 or wider.

  Returns:
    `[*batch, m, n]` in the dtype of x, with singular values near 1. A zero matrix gives zero.

  Raises:
    ValueError: If x is no array of matrices of a real floating dtype, `steps` is below 1, or there are no coefficients.

  Example:
    >>> import jax
    >>> factor = newton_schulz(jax.random.normal(jax.random.key(0), (4, 8)), steps=16)
    >>> bool(jax.numpy.allclose(factor @ factor.T, jax.numpy.eye(4), atol=1e-4))
    True

  References:
    Jordan et al., https://kellerjordan.github.io/posts/muon/; Amsel et al., arXiv 2505.16932.
  """
  rows = coefficients.schedule(steps)
  y = widened(x)
  if y.size == 0:
    return y.astype(x.dtype)
  wide = x.shape[-2] <= x.shape[-1]
  # The largest magnitude first: the squares inside the Gram matrix would leave float32 for |x| beyond 1e19.
  y = y / largest_magnitude(y)
  y = y if wide else transpose(y)
  y = y * gram.row_scale(_gram(y, dtype), coefficients) if coefficients.rescales_rows else y / _norm(y)
  matrix = _gram(y, dtype)

  lengths = restart_lengths(y.shape[-2], y.shape[-1], rows, dtype)
  form_gram = lambda z: _gram(z, dtype)  # noqa: E731
  if len(lengths) == len(rows):
    y = gram.plain_steps(y, matrix, rows, form_gram, dtype)
  else:
    y = gram.restarted_steps(y, matrix, rows, lengths, form_gram, dtype)
  y = y if wide else transpose(y)
  return y.astype(x.dtype)


def restart_lengths(m: int, n: int, rows: np.ndarray, dtype: DTypeLike | None = None) -> tuple[int, ...]:
  """Returns how many steps `newton_schulz` takes from one Gram matrix of X to the next, part by part: all 1 is plain.

  Plain unless that takes a fifth more operations, by `gram.step_cost`: squares are plain, sides of 1 : 4 are not. In 16
  bits all are plain, since an entry of A rounded to 4e-3 leaves nothing of the singular values that A squares.

  Args:
    m, n: Sides of a matrix.
    rows: Rows (a, b, c) `[steps, 3]`, as from `Coefficients.schedule`.
    dtype: As for `newton_schulz`.

  Example:
    >>> restart_lengths(256, 1024, POLAR_EXPRESS.schedule(16))
    (1, 3, 3, 5, 4)
  """
  # Between restarts slopes multiply to at most about 30: errors of 6e-8 * 30^2 in singular values near 0 at most.
  growth = 30.0 if dtype is None or jnp.finfo(dtype).bits >= 32 else 1.0
  return gram.cheapest_lengths(min(m, n), max(m, n), rows, growth)


def _norm(y: jax.Array) -> jax.Array:
  """Returns |Y|_F of matrices whose largest entry is 1, and 1 for a zero matrix."""
  norm = jnp.sqrt(jnp.sum(jnp.square(y), axis=(-2, -1), keepdims=True))
  return jnp.where(norm > 0, norm, 1)


def _gram(y: jax.Array, dtype: DTypeLike | None) -> jax.Array:
  return symmetric_product(y, y, dtype)


def polar_svd(x: Float[Array, '*batch m n']) -> Float[Array, '*batch m n']:
  """Returns the exact polar factor U V^T of each matrix, by singular value decomposition.

  Directions where u^T X v is at most 10 eps of the largest singular value are left out, so the result is the unique
  partial isometry, and zero for a zero matrix. A matrix of low rank whose entries are rounded leaves 0.6 eps there. In
  a direction of singular value s the error is about eps / s of the largest: a few 1e-3 at 1e-5.

  Args:
    x: Matrices `[*batch, m, n]` of any real floating dtype.

  Returns:
    `[*batch, m, n]` in the dtype of x.

  Raises:
    ValueError: If x is no array of matrices of a real floating dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> polar_svd(jnp.diag(jnp.array([3.0, -2.0]))).round(4)
    Array([[ 1.,  0.],
           [ 0., -1.]], dtype=float32)

  References:
    Higham, Functions of Matrices, chapter 8.
  """
  y = widened(x)
  if y.size == 0:
    return y.astype(x.dtype)
  y = y / largest_magnitude(y)
  u, s, vt = svd(y)
  # Not s, of which LAPACK leaves up to 100 eps of a matrix of ones: u and v then lie across its one direction, and here
  # both of them count.
  along = jnp.sum(u * product(y, transpose(vt)), axis=-2)
  kept = (along > 10 * jnp.finfo(y.dtype).eps * s[..., :1]).astype(y.dtype)
  return product(u * kept[..., None, :], vt).astype(x.dtype)


def widened(x: Float[Array, '*batch m n']) -> Float[Array, '*batch m n']:
  """Returns the matrices in float32 or wider, after `check_matrices`."""
  check_matrices(x)
  # Dtypes of 8 bits promote to none.
  return x.astype(jnp.promote_types(x.dtype, jnp.float32) if jnp.finfo(x.dtype).bits > 8 else jnp.float32)


def check_matrices(x: Float[Array, '*batch m n']) -> None:
  """Raises a ValueError if x is no array of matrices of a real floating dtype."""
  if x.ndim < 2:
    raise ValueError(
      f'polar factors are of matrices [*batch, m, n], got shape {x.shape}: a vector v is the row v[None]'
    )
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    raise ValueError(
      f'polar factors are of real matrices, got {x.dtype} of shape {x.shape}: give [[real, -imag], [imag, real]], '
      'whose polar factor has that form too'
    )
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f'polar factors are of floating matrices, got {x.dtype} of shape {x.shape}: cast it to float32')
