"""Refreshes that diagonalise the factor exactly: at every refresh, or at the first only."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from emopt_jax.linalg.eigenbasis import Eigenbasis, Refresh, take_columns
from emopt_jax.linalg.factorizations import eigh
from emopt_jax.linalg.products import largest_magnitude, product, transpose
from emopt_jax.linalg.replace_where import replace_where


def eigh_refresh(factor: Float[Array, '*batch n n'], eigenbasis: Eigenbasis) -> Eigenbasis:
  """Diagonalises the factor: A = Q diag(w) Q^T.

  The first time the columns are by falling eigenvalue. From then on an eigenvector that overlaps an old column by more
  than half continues it, and the others fill the remaining columns by falling eigenvalue.

  Where eigenvalues coincide, within 8 eps |A|_F, any basis of their space diagonalises A, and the one that moves least
  against the numbering of the old columns is taken, so that the result moves continuously with that space. Eigenvectors
  of gaps g from there up move by about eps |A|_F / g with the last digit of A: so do those of any exact method.

  Args:
    factor: Symmetric positive semi-definite A `[*batch, n, n]`. A zero factor keeps the basis.
    eigenbasis: The basis whose columns are continued.

  Returns:
    The eigenbasis of the factor; not-a-number where the factor is not finite.

  Example:
    >>> import jax.numpy as jnp
    >>> start = Eigenbasis(jnp.eye(2), jnp.zeros(2))
    >>> eigh_refresh(jnp.diag(jnp.array([1.0, 4.0])), start).values
    Array([4., 1.], dtype=float32)
  """
  new = diagonalize(factor)
  tied = _tied(new.values)
  new = replace_where(jnp.any(tied, axis=-1), _follow_old_columns, new, tied, eigenbasis.vectors, otherwise=new)
  order = _continuing_order(eigenbasis, new.vectors)
  zero = jnp.all(factor == 0, axis=(-2, -1))[..., None]
  return Eigenbasis(
    jnp.where(zero[..., None], eigenbasis.vectors, take_columns(new.vectors, order)),
    jnp.take_along_axis(new.values, order, -1),
  )


def diagonalize(factor: Float[Array, '*batch n n']) -> Eigenbasis:
  """Returns an eigenbasis of each symmetric matrix, by falling eigenvalue."""
  # Without the multiple of the identity that a factor starts from, rounding errors are relative to what is left.
  shift = jnp.min(jnp.diagonal(factor, axis1=-2, axis2=-1), axis=-1)[..., None]
  rest = jnp.where(jnp.eye(factor.shape[-1], dtype=bool), factor - shift[..., None], factor)
  scale = jnp.maximum(largest_magnitude(rest), jnp.finfo(factor.dtype).eps * jnp.abs(shift[..., None]))
  values, vectors = eigh(rest / scale)
  scale = scale[..., 0]
  return Eigenbasis(jnp.flip(vectors, -1), (jnp.flip(values, -1) + shift / scale) * scale)


def _tied(values: Float[Array, '*batch n']) -> Bool[Array, '*batch n']:
  """Returns which of falling eigenvalues equals the one before it to rounding."""
  largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
  norm = largest * jnp.sqrt(jnp.sum(jnp.square(values / jnp.where(largest > 0, largest, 1)), axis=-1, keepdims=True))
  gaps = values[..., :-1] - values[..., 1:]
  # Of equal ones, LAPACK and the rounding of the factor leave up to 4.5 eps |A|_F, measured from 2 to 128 rows.
  return jnp.pad(gaps <= 8 * jnp.finfo(values.dtype).eps * norm, [(0, 0)] * (values.ndim - 1) + [(1, 0)])


def _follow_old_columns(new: Eigenbasis, tied: Bool[Array, '*batch n'], old: Float[Array, '*batch n n']) -> Eigenbasis:
  """Returns the eigenbasis that diagonalises, in each space of tied eigenvalues, the numbering of the old columns.

  With W = V^T Q_old and numbers d the blocks of W diag(d) W^T that belong to such spaces are diagonalised, all at once,
  as O; V O is Q_old wherever that spans the space. No column has to be assigned to another, which would jump.
  """
  n = tied.shape[-1]
  shared = tied | jnp.pad(tied[..., 1:], [(0, 0)] * (tied.ndim - 1) + [(0, 1)])
  group = jnp.cumsum(~tied, axis=-1)
  together = (group[..., :, None] == group[..., None, :]) & shared[..., None]
  numbers = jnp.linspace(-1, 1, n, dtype=old.dtype)
  w = product(transpose(new.vectors), old)
  blocks = jnp.where(together, product(w * numbers, transpose(w)), 0)
  # Eigenvalues of a block are from -1 to 1. The others, run by run, only keep their places.
  run = jnp.cumsum(~tied & (shared | jnp.roll(shared, 1, -1)), axis=-1).astype(old.dtype)
  diagonal = 3 * (run - jnp.mean(run, axis=-1, keepdims=True)) + jnp.where(shared, 0, numbers)
  identity = jnp.eye(n, dtype=old.dtype)
  turn = eigh(blocks + diagonal[..., None] * identity)[1]
  turn = jnp.where(shared[..., None, :], jnp.where(together, turn, 0), identity)
  values = jnp.sum(jnp.square(turn) * new.values[..., None], axis=-2)
  return Eigenbasis(product(new.vectors, turn), values)


def _continuing_order(old: Eigenbasis, vectors: jax.Array) -> Int[Array, '*batch n']:
  """Returns which new eigenvector goes to each old column."""
  overlap = jnp.square(product(transpose(old.vectors), vectors))
  # At most one entry of a row and of a column exceeds 1/2, since rows and columns sum to 1. Before the first refresh
  # (all eigenvalues zero) there is nothing to follow, and the order is that of falling eigenvalues.
  started = jnp.any(old.values != 0, axis=-1)[..., None, None]
  follows = (overlap > 0.5) & started
  claimed = jnp.any(follows, axis=-1)
  taken = jnp.any(follows, axis=-2)
  # Free columns, ranked by their own old eigenvalue, meet free eigenvectors, which are sorted already. Tied columns
  # have one rank: rounding must not tell them apart.
  falling = jnp.argsort(-old.values, axis=-1, stable=True)
  ranks = jnp.cumsum(~_tied(jnp.take_along_axis(old.values, falling, -1)), axis=-1)
  ranks = jnp.take_along_axis(ranks, jnp.argsort(falling, axis=-1), -1)
  free_columns = jnp.argsort(jnp.where(claimed, ranks.shape[-1] + 1, ranks), axis=-1, stable=True)
  free_vectors = jnp.argsort(taken, axis=-1, stable=True)
  rank = jnp.argsort(free_columns, axis=-1)
  filler = jnp.take_along_axis(free_vectors, rank, -1)
  return jnp.where(claimed, jnp.argmax(follows, axis=-1), filler)


def eigh_at_start(refresh: Refresh) -> Refresh:
  """Returns a refresh that diagonalises exactly the first time, by `eigh_refresh`, and calls `refresh` from then on.

  The first time is when the eigenvalues are all zero. The recorded SOAP of other libraries starts so.
  """

  def refresh_after_eigh(factor: jax.Array, eigenbasis: Eigenbasis) -> Eigenbasis:
    untouched = jnp.all(eigenbasis.values == 0, axis=-1)
    return replace_where(untouched, eigh_refresh, factor, eigenbasis, otherwise=refresh(factor, eigenbasis))

  return refresh_after_eigh
