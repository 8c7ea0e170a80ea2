"""A wrapper of refreshes that leaves a basis alone while it is near enough to the eigenbasis."""

import jax
import jax.numpy as jnp

from emopt_jax.linalg.eigenbasis import Eigenbasis, Refresh
from emopt_jax.linalg.product_refresh import off_diagonal_share, rotated_factor
from emopt_jax.linalg.products import largest_magnitude
from emopt_jax.linalg.replace_where import replace_where


def gated(refresh: Refresh, tolerance: float) -> Refresh:
  """Skips a matrix's refresh while |S - diag(S)|_F <= tolerance |S|_F, with S = Q^T A Q of the basis that it has.

  A matrix that is skipped keeps its vectors, and its eigenvalues become diag(S). The check costs two matrix products.

  The wrapped refresh stands in a loop over the matrices that are beyond the tolerance. A matrix right at the tolerance
  may be refreshed or not by the last digit of its gradient, and its basis differs by what the tolerance allows.

  Args:
    refresh: The refresh to skip, such as `qr_refresh`.
    tolerance: Share of the factor that may stand off the diagonal, from 0 (refresh whatever is not exact) to 1 (never).

  Returns:
    A refresh.

  Raises:
    ValueError: If tolerance is not between 0 and 1.

  Example:
    >>> from emopt_jax.linalg.eigenbasis import qr_refresh
    >>> start = Eigenbasis(jnp.eye(2), jnp.zeros(2))
    >>> new = gated(qr_refresh, 0.1)(jnp.array([[4.0, 0.1], [0.1, 1.0]]), start)
    >>> bool(jnp.all(new.vectors == start.vectors)), new.values
    (True, Array([4., 1.], dtype=float32))
  """
  if not 0 <= tolerance <= 1:
    raise ValueError(f'tolerance must be between 0 and 1, not {tolerance}')

  def refresh_where_stale(factor: jax.Array, eigenbasis: Eigenbasis) -> Eigenbasis:
    scale = largest_magnitude(factor)
    rotated = rotated_factor(factor / scale, eigenbasis.vectors)
    kept = Eigenbasis(eigenbasis.vectors, jnp.diagonal(rotated, axis1=-2, axis2=-1) * scale[..., 0])
    # Not-a-number compares as false: the values then show that the factor is not finite.
    stale = off_diagonal_share(rotated) > tolerance
    return replace_where(stale, refresh, factor, eigenbasis, otherwise=kept)

  return refresh_where_stale
