"""Orthonormal columns: the Q of X = QR, by Cholesky where that is as accurate as by reflections."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from emopt_jax.linalg.factorizations import cholesky, qr, solve_triangular
from emopt_jax.linalg.products import symmetric_product, transpose
from emopt_jax.linalg.replace_where import replace_where

# From here on Q^T Q - I has entries of at most 12 eps, those of Householder's Q of the same matrices; below, they grow
# as the inverse square.
_SHORTEST_REST = 0.5


def orthonormal_columns(x: Float[Array, '*batch n n']) -> Float[Array, '*batch n n']:
  """Returns the Q of X = QR whose R has a positive diagonal.

  With D the lengths of the columns, D^-1 X^T X D^-1 = L L^T and Q = X D^-1 L^-T: the same Q as that of Householder's
  reflections, at half their cost. L_jj is what is left of column j, of length 1, outside the span of the columns before
  it. A matrix with one below 0.5 gets reflections instead, in a loop over such matrices. In orthogonal iteration, where
  X = AQ for a Q that nearly diagonalises A, those are the exception.

  Args:
    x: Square matrices.

  Returns:
    Q, continuous in X where X has full rank.

  Example:
    >>> orthonormal_columns(jnp.array([[3.0, 1.0], [0.0, 2.0]]))
    Array([[1., 0.],
           [0., 1.]], dtype=float32)

  References:
    Yamamoto et al., Roundoff error analysis of the CholeskyQR2 algorithm, ETNA 44, 2015.
  """
  # By rows, which is what a product takes fastest from memory.
  rows = transpose(x)
  lengths = jnp.sqrt(jnp.sum(jnp.square(rows), axis=-1, keepdims=True))
  unit = rows / jnp.where(lengths > 0, lengths, 1)
  lower = cholesky(symmetric_product(unit, unit))
  # Not-a-number, from columns that depend on each other, compares as false.
  independent = jnp.all(jnp.diagonal(lower, axis1=-2, axis2=-1) >= _SHORTEST_REST, axis=-1)
  # The rows, too, for the branch: it would otherwise keep a transposed copy that is hardly ever read.
  return replace_where(~independent, _by_reflections, rows, otherwise=transpose(solve_triangular(lower, unit)))


def _by_reflections(rows: jax.Array) -> jax.Array:
  q, r = qr(transpose(rows))
  return q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1).astype(q.dtype)[..., None, :]
