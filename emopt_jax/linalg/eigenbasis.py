"""Eigenbases of covariance factors: how they are refreshed, and rotations into and out of them.

A refresh is a function `refresh(factor, eigenbasis) -> Eigenbasis`. Column j of the result continues column j of the
argument, so whatever belongs to a column stays with it. An arrangement reorders columns and says how.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from emopt_jax.linalg.blocks import multiply_left, multiply_right, multiply_right_transposed, per_matrix
from emopt_jax.linalg.orthonormal import LQ, lq_by_cholesky, q_by_reflections
from emopt_jax.linalg.products import largest_magnitude, product, rows_by_rows, transpose
from emopt_jax.linalg.replace_where import replace_where


class Eigenbasis(NamedTuple):
  """Orthonormal columns and their eigenvalues: factor ~ vectors diag(values) vectors^T.

  Attributes:
    vectors: `[*batch, n, n]`, one eigenvector a column.
    values: `[*batch, n]`, not negative up to rounding; all zero before the first refresh.
  """

  vectors: Float[Array, '*batch n n']
  values: Float[Array, '*batch n']


class Eigenbases(NamedTuple):
  """The eigenbases of the two sides of a matrix; `None` stands for the identity, kept for a side that is too long."""

  left: Eigenbasis | None
  right: Eigenbasis | None


Refresh = Callable[[jax.Array, Eigenbasis], Eigenbasis]
Arrange = Callable[[Eigenbasis], tuple[Eigenbasis, jax.Array]]


def qr_refresh(factor: Float[Array, '*batch n n'], eigenbasis: Eigenbasis) -> Eigenbasis:
  """Takes one step of orthogonal iteration: Q <- QR(A Q), w = diag(Q^T A Q).

  R has a positive diagonal, so that Q moves continuously with A. It comes from `lq_by_cholesky`, and from reflections
  where Q is still far from an eigenbasis.

  Args:
    factor: Symmetric positive semi-definite A `[*batch, n, n]`. A zero factor keeps the basis.
    eigenbasis: The basis to start from.

  Returns:
    The new basis, column j continuing column j.

  Example:
    >>> import jax.numpy as jnp
    >>> start = Eigenbasis(jnp.eye(2), jnp.zeros(2))
    >>> qr_refresh(jnp.diag(jnp.array([1.0, 4.0])), start).values
    Array([1., 4.], dtype=float32)

  References:
    Vyas et al., SOAP, arXiv 2409.11321, section 4; Golub and Van Loan, Matrix Computations, section 8.2.4.
  """
  scale = largest_magnitude(factor)
  normalized = factor / scale
  # Products are fastest with rows, so all of this is transposed: (A Q)^T = L Z, and Z^T is the new Q.
  old_rows = transpose(eigenbasis.vectors)
  rows = product(old_rows, normalized)
  factors = lq_by_cholesky(rows)
  by_cholesky = Eigenbasis(transpose(jnp.concatenate(factors.rows, axis=-2)), _values(factors, old_rows))
  far = ~factors.accurate
  new = replace_where(far, _by_reflections, rows, normalized, eigenbasis.vectors, otherwise=by_cholesky)
  return new._replace(values=new.values * scale[..., 0])


def _values(factors: LQ, old_rows: jax.Array) -> jax.Array:
  """Returns diag(Z A Z^T) from A Q = Z^T L^T, where it is the diagonal of L^T (Q^T Z^T).

  Of Q^T Z^T that takes the lower triangle only: five eighths of a product for four blocks of rows.
  """
  values = [
    jnp.sum(transpose(lower) * rows_by_rows(rows, old_rows[..., -lower.shape[-2] :, :]), axis=-1)
    for lower, rows in zip(factors.lower, factors.rows, strict=True)
  ]
  return jnp.concatenate(values, axis=-1)


def _by_reflections(rows: jax.Array, normalized: jax.Array, old: jax.Array) -> Eigenbasis:
  zero = jnp.all(rows == 0, axis=(-2, -1), keepdims=True)
  q = jnp.where(zero, old, transpose(q_by_reflections(rows)))
  return Eigenbasis(q, rayleigh_quotients(normalized, q))


def rayleigh_quotients(factor: Float[Array, '*batch n n'], vectors: Float[Array, '*batch n n']) -> jax.Array:
  """Returns diag(Q^T A Q)."""
  return jnp.sum(vectors * product(factor, vectors), axis=-2)


def select(condition: jax.Array, chosen: Eigenbasis, other: Eigenbasis) -> Eigenbasis:
  """Returns, matrix by matrix, `chosen` where the condition `[*batch]` holds and `other` elsewhere."""
  return Eigenbasis(
    jnp.where(per_matrix(condition, chosen.vectors), chosen.vectors, other.vectors),
    jnp.where(per_matrix(condition, chosen.values), chosen.values, other.values),
  )


def sort_by_magnitude(eigenbasis: Eigenbasis) -> tuple[Eigenbasis, Int[Array, '*batch n']]:
  """Returns the basis with its columns by falling power of two of w_max / w, and the old index of each new column.

  QR wants dominant columns first: rounding noise of a dominant direction in an earlier column grows at each step.
  Columns within a factor of two keep their order, since a full sort is not continuous: where two eigenvalues meet to
  rounding, it decides which column the next QR puts first, and so the next basis.
  """
  largest = jnp.max(eigenbasis.values, axis=-1, keepdims=True)
  smallest = jnp.finfo(eigenbasis.values.dtype).eps * largest
  ratio = jnp.where(largest > 0, largest / jnp.maximum(eigenbasis.values, smallest), 1)
  return _reorder(eigenbasis, jnp.floor(jnp.log2(ratio)))


def sort_descending(eigenbasis: Eigenbasis) -> tuple[Eigenbasis, Int[Array, '*batch n']]:
  """Returns the basis with its columns by falling eigenvalue, and the old index of each new column."""
  return _reorder(eigenbasis, -eigenbasis.values)


def _reorder(eigenbasis: Eigenbasis, keys: jax.Array) -> tuple[Eigenbasis, jax.Array]:
  order = jnp.argsort(keys, axis=-1, stable=True)
  vectors = take_columns(eigenbasis.vectors, order)
  return Eigenbasis(vectors, jnp.take_along_axis(eigenbasis.values, order, axis=-1)), order


def take_columns(x: Float[Array, '*batch m n'], order: Int[Array, '*batch n']) -> Float[Array, '*batch m n']:
  """Returns X with its columns in the order of their old indices."""
  # One index for each entry: with one for each column XLA gathers by columns on CPUs and transposes the result.
  return jnp.take_along_axis(x, jnp.broadcast_to(order[..., None, :], x.shape), axis=-1)


def rotate(x: Float[Array, '*batch m n'], bases: Eigenbases) -> Float[Array, '*batch m n']:
  """Returns C = Q_L^T X Q_R with entries that are no more than its rounding error set to zero.

  Without that, the null space of a low-rank X holds noise that an elementwise optimizer divides by its own size. C_ij
  is noise up to 16 eps |C_:j| + 16 eps |C_i:| + 2 eps e_j with e_j^2 = sum_k |X_:k|^2 (Q_R)_kj^2. A column of Q_L or
  Q_R is an eigenvector up to eps over its relative gap, 2 eps in steady state and 12 eps in the first step of a
  gradient of rank 3 (measured), which leaks within a column and a row of C. The product with Q_L rounds the entries of
  column k by 0.2 eps of its norm (measured; sums of any length that cancel), which Q_R carries to C; ten times that is
  never met. A side that is not rotated neither leaks nor rounds.
  """
  return _rotate(x, bases, rotations=1)


def move(x: Float[Array, '*batch m n'], before: Eigenbases, after: Eigenbases) -> Float[Array, '*batch m n']:
  """Returns what is kept in the bases `before` in those of `after`, without the rounding error of both rotations."""
  return _rotate(rotate_back(x, before), after, rotations=2)


def _rotate(x: jax.Array, bases: Eigenbases, rotations: int) -> jax.Array:
  left, right = (None if side is None else side.vectors for side in bases)
  scale = largest_magnitude(x)  # so that squares neither overflow nor vanish
  rotated, noise = x, jnp.zeros((), x.dtype)
  if left is not None:
    rotated = multiply_left(transpose(left), rotated)
    squares = jnp.sum(jnp.square(x / scale), axis=-2, keepdims=True)
    noise = noise + 2 * jnp.sqrt(squares if right is None else multiply_right(squares, jnp.square(right)))
  if right is not None:
    rotated = multiply_right(rotated, right)
  for side, axis in ((left, -2), (right, -1)):
    if side is not None:
      noise = noise + 16 * jnp.sqrt(jnp.sum(jnp.square(rotated / scale), axis=axis, keepdims=True))
  return jnp.where(jnp.abs(rotated) > rotations * jnp.finfo(x.dtype).eps * scale * noise, rotated, 0)


def rotate_back(x: Float[Array, '*batch m n'], bases: Eigenbases) -> Float[Array, '*batch m n']:
  """Returns Q_L X Q_R^T."""
  if bases.left is not None:
    x = multiply_left(bases.left.vectors, x)
  if bases.right is not None:
    x = multiply_right_transposed(x, bases.right.vectors)
  return x
