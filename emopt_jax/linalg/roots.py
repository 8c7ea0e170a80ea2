"""Real powers of positive semi-definite matrices, the inverse p-th roots of Shampoo among them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from emopt_jax.linalg.factorizations import eigh
from emopt_jax.linalg.products import largest_magnitude, rows_by_rows


def matrix_power(
  factor: Float[Array, '*batch n n'], exponent: float, *, floor: float = 1e-6
) -> Float[Array, '*batch n n']:
  """Returns A^p = Q diag(max(w, floor w_max)^p) Q^T of each symmetric positive semi-definite matrix.

  Args:
    factor: A `[*batch, n, n]`, symmetric positive semi-definite, in float32 or wider.
    exponent: p, for instance -1/4.
    floor: Smallest eigenvalue relative to the largest, in (0, 1): directions that carry no gradient would otherwise
      be multiplied by an arbitrarily large number.

  Returns:
    A^p `[*batch, n, n]`. A zero matrix gives zero, so that no gradient means no update.

  Example:
    >>> import jax.numpy as jnp
    >>> matrix_power(jnp.diag(jnp.array([16.0, 81.0])), -1 / 4).diagonal().round(4)
    Array([0.5   , 0.3333], dtype=float32)

  References:
    Gupta et al., Shampoo, arXiv 1802.09568.
  """
  scale = largest_magnitude(factor)
  values, vectors = eigh(factor / scale)
  largest = values[..., -1:]
  floored = jnp.maximum(values, floor * largest)
  # scale^p apart from the eigenvalues' power: the factor of gradients near 1e-15 has eigenvalues near 1e-30.
  powers = jnp.where(largest > 0, floored**exponent, 0) * scale[..., 0] ** exponent
  return rows_by_rows(vectors * powers[..., None, :], vectors)
