"""Block-diagonal matrices, kept as stacks of their blocks, beside full ones.

A side of n rows has one factor `[*batch, n, n]`, or `[*batch, blocks, n / blocks, n / blocks]`. What is elementwise or
matrix by matrix (a refresh, a root) takes either as it is; what multiplies or adds up over a side is here.
"""

import jax
from jaxtyping import Array, Float

from emopt_jax.linalg.products import product, rows_by_rows, symmetric_product, transpose


def number_of_blocks(size: int, block_size: int | None) -> int | None:
  """Returns into how many equal blocks of at most that size a side is cut, the fewest; None for an uncut side.

  Example:
    >>> number_of_blocks(1536, 1000), number_of_blocks(512, 512)
    (2, None)
  """
  if block_size is None or size <= block_size:
    return None
  return next(blocks for blocks in range(-(-size // block_size), size + 1) if size % blocks == 0)


def multiply_left(q: jax.Array, x: Float[Array, '*batch m n']) -> Float[Array, '*batch m n']:
  """Returns Q X.

  Args:
    q: Full `[*batch, m, m]`, or the diagonal blocks `[*batch, blocks, m / blocks, m / blocks]`.
    x: The matrix.

  Example:
    >>> import jax.numpy as jnp
    >>> multiply_left(jnp.array([[[2.0]], [[3.0]]]), jnp.ones((2, 1)))
    Array([[2.],
           [3.]], dtype=float32)
  """
  if q.ndim == x.ndim:
    return product(q, x)
  blocks = x.reshape(*x.shape[:-2], q.shape[-3], q.shape[-1], x.shape[-1])
  return product(q, blocks).reshape(x.shape)


def multiply_right(x: Float[Array, '*batch m n'], q: jax.Array) -> Float[Array, '*batch m n']:
  """Returns X Q; Q as in `multiply_left`.

  Args:
    x: The matrix.
    q: Full, or the diagonal blocks.
  """
  if q.ndim == x.ndim:
    return product(x, q)
  return transpose(multiply_left(transpose(q), transpose(x)))


def multiply_right_transposed(x: Float[Array, '*batch m n'], q: jax.Array) -> Float[Array, '*batch m n']:
  """Returns X Q^T; Q as in `multiply_left`.

  Args:
    x: The matrix.
    q: Full, or the diagonal blocks.
  """
  return rows_by_rows(x, q) if q.ndim == x.ndim else multiply_right(x, transpose(q))


def outer_product(x: Float[Array, '*batch m n'], like: jax.Array) -> jax.Array:
  """Returns X X^T, or the diagonal blocks of it that `like` has.

  Args:
    x: The matrix.
    like: A factor of its rows, full or in blocks.
  """
  if like.ndim == x.ndim:
    return symmetric_product(x, x)
  blocks = x.reshape(*x.shape[:-2], like.shape[-3], like.shape[-1], x.shape[-1])
  return symmetric_product(blocks, blocks)


def per_matrix(numbers: jax.Array, like: jax.Array) -> jax.Array:
  """Returns one number for each matrix of a batch, `[*batch]`, shaped to meet an array with more dimensions."""
  return numbers.reshape(*numbers.shape, *(1,) * (like.ndim - numbers.ndim))
