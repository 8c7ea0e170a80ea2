"""Matrix products and norms at full precision: the arithmetic that the rest of `linalg` is written in."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product(a: Float[Array, '*batch m k'], b: Float[Array, '*batch k n']) -> Float[Array, '*batch m n']:
  """Returns `a @ b` without the TF32 or bfloat16 shortcut that accelerators take by default.

  Eigenbases and orthogonality errors live at the last digits of float32; three decimal digits are not enough.
  """
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def transpose(x: Float[Array, '*batch m n']) -> Float[Array, '*batch n m']:
  """Returns each matrix transposed."""
  return jnp.swapaxes(x, -1, -2)


def largest_magnitude(x: Float[Array, '*batch m n']) -> Float[Array, '*batch 1 1']:
  """Returns max |x_ij| of each matrix, and 1 for a zero matrix so that it can be divided by."""
  largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
  return jnp.where(largest > 0, largest, 1)


def frobenius_norm(x: Float[Array, '*batch m n']) -> Float[Array, '*batch 1 1']:
  """Returns |x|_F of each matrix, safe from overflow and underflow of the squares."""
  scale = largest_magnitude(x)
  return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale), axis=(-2, -1), keepdims=True))


def root_mean_square(x: Float[Array, '*batch m n']) -> Float[Array, '*batch 1 1']:
  """Returns |x|_F / sqrt(m n) of each matrix."""
  return frobenius_norm(x) / (x.shape[-2] * x.shape[-1]) ** 0.5


def all_finite(x: Float[Array, 'batch ...']) -> jax.Array:
  """Returns, for each entry of the leading axis, whether all its numbers are finite."""
  return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))
