"""Orthonormal rows: the Q of X = LQ, by Cholesky where that is as accurate as by reflections."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from emopt_jax.linalg.factorizations import cholesky, qr, solve_triangular
from emopt_jax.linalg.products import product, rows_by_rows, symmetric_product, transpose

# From here on Q Q^T - I has entries of at most 12 eps, those of Householder's Q of the same matrices; below, they grow
# as the inverse square.
_SHORTEST_REST = 0.5


class LQ(NamedTuple):
  """X = LQ with a lower triangular L of positive diagonal and orthonormal rows in Q, in blocks of rows of Q.

  Attributes:
    lower: The columns of L that belong to each block, from the block on the diagonal down.
    rows: The blocks of Q, `[*batch, h, n]` each.
    accurate: Whether Q is orthonormal to rounding. Elsewhere reflections have to find it.
  """

  lower: list[Float[Array, '*batch k h']]
  rows: list[Float[Array, '*batch h n']]
  accurate: Bool[Array, '*batch']


def lq_by_cholesky(x: Float[Array, '*batch n n']) -> LQ:
  """Factors X = LQ block by block: of its rows, made unit length, each block is orthonormalised by Cholesky.

  With Y the first block, Y Y^T = L_11 L_11^T and Q_1 = L_11^-1 Y; the rows Z below give L_21 = Z Q_1^T and go on as
  Z - L_21 Q_1. This is the Q of Householder's reflections, at a fraction of their cost. The diagonal of L is what is
  left of each row, of length 1, outside the span of the rows before it. A matrix with one below 0.5 is not accurate. In
  orthogonal iteration, where X^T = AQ for a Q that nearly diagonalises A, such matrices are the exception.

  Args:
    x: Square matrices.

  Returns:
    The factors, continuous in X where X has full rank.

  Example:
    >>> factors = lq_by_cholesky(jnp.array([[3.0, 0.0], [1.0, 2.0]]))
    >>> factors.rows[0]
    Array([[1., 0.],
           [0., 1.]], dtype=float32)

  References:
    Yamamoto et al., Roundoff error analysis of the CholeskyQR2 algorithm, ETNA 44, 2015; Carson et al., Block
    Gram-Schmidt algorithms and their stability properties, Linear Algebra and its Applications 638, 2022.
  """
  lengths = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
  rest = x / jnp.where(lengths > 0, lengths, 1)
  lower, rows, shortest = [], [], []
  for start, end in itertools.pairwise(_edges(x.shape[-1])):
    block, rest = rest[..., : end - start, :], rest[..., end - start :, :]
    column = cholesky(symmetric_product(block, block))
    shortest.append(jnp.min(jnp.diagonal(column, axis1=-2, axis2=-1), axis=-1))
    rows.append(solve_triangular(column, block))
    if rest.shape[-2] > 0:
      below = rows_by_rows(rest, rows[-1])
      rest = rest - product(below, rows[-1])
      column = jnp.concatenate([column, below], axis=-2)
    lower.append(column * lengths[..., start:, :])
  # Not-a-number, from rows that depend on each other, compares as false.
  return LQ(lower, rows, jnp.all(jnp.stack(shortest) >= _SHORTEST_REST, axis=0))


def q_by_reflections(x: Float[Array, '*batch n n']) -> Float[Array, '*batch n n']:
  """Returns the Q of X = LQ whose L has a positive diagonal, orthonormal for any X.

  Args:
    x: Square matrices.
  """
  q, r = qr(transpose(x))
  return transpose(q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1).astype(q.dtype)[..., None, :])


def _edges(n: int) -> list[int]:
  """Returns where blocks start, and n: more of them leave more to products, and lengthen the program."""
  blocks = 1 if n < 256 else 2 if n < 1024 else 4
  return [n * i // blocks for i in range(blocks + 1)]
