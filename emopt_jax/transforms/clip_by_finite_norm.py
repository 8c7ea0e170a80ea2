"""Clipping by the norm of what is finite, and the norm that `distributed.layerwise` clips by."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from emopt_jax.transforms.hyperparameters import check_positive

Factors = tuple[jax.Array, jax.Array]


def clip_by_finite_norm(max_norm: ArrayLike) -> optax.GradientTransformation:
  """Scales all updates by min(1, max_norm / |G|), with |G| the global norm of the entries that are finite.

  As `optax.clip_by_global_norm`, but one entry that is not a number, or whose square overflows, does not spoil the
  scale of all others. Entries that are not finite stay so, for the optimizer to skip their matrix.

  Args:
    max_norm: Largest norm, positive.

  Returns:
    A stateless optax transformation.

  Raises:
    ValueError: If max_norm is not positive.

  Example:
    >>> transform = clip_by_finite_norm(1.0)
    >>> gradient = {'kernel': jnp.array([[3.0, 4.0]]), 'bias': jnp.array([jnp.nan])}
    >>> transform.update(gradient, transform.init(gradient))[0]['kernel']
    Array([[0.6, 0.8]], dtype=float32)
  """
  check_positive('max_norm', max_norm)

  def update(updates, state, params=None):
    del params
    dtype = norm_dtype(jax.tree.leaves(updates))
    total = jnp.zeros(2, dtype)
    for leaf in jax.tree.leaves(updates):
      total = total + finite_squares(leaf, dtype)
    factors = clipping_factors(total, max_norm)
    return jax.tree.map(lambda leaf: clip_by_factors(leaf, factors), updates), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def norm_dtype(leaves: Sequence[jax.Array]) -> DTypeLike:
  """Returns the dtype that the norm of leaves is computed in, float32 or wider."""
  double = any(leaf.dtype in (jnp.float64, jnp.complex128) for leaf in leaves)
  return jnp.float64 if double else jnp.float32


def finite_squares(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns the sums of |x|^2 and |s x|^2 over the finite entries, `[2]`: the second where the first overflows.

  s is 2^-100 in float32: the square of the largest number times s^2 is 2^56, so that sums of it stay finite too.
  """
  sizes = jnp.abs(x).astype(dtype)
  sizes = jnp.where(jnp.isfinite(sizes), sizes, 0)
  return jnp.stack([jnp.sum(jnp.square(sizes)), jnp.sum(jnp.square(sizes * _shrinkage(dtype)))])


def clipping_factors(squares: jax.Array, max_norm: ArrayLike) -> Factors:
  """Returns two factors to be applied one after the other, since their product may be below the smallest number.

  Args:
    squares: Sum over all entries of what `finite_squares` returns.
    max_norm: Largest norm.
  """
  plain, shrunk = squares
  shrinkage = _shrinkage(squares.dtype)
  first = jnp.where(jnp.isfinite(plain), 1, shrinkage).astype(squares.dtype)
  norm = jnp.sqrt(jnp.where(jnp.isfinite(plain), plain, shrunk))  # of the gradients times the first factor
  largest = jnp.asarray(max_norm, squares.dtype)
  fits = norm < largest * first
  second = jnp.where(fits, 1, largest / jnp.where(fits, 1, norm))
  return jnp.where(fits, 1, first), second


def clip_by_factors(x: jax.Array, factors: Factors) -> jax.Array:
  """Returns the gradient times both factors, in its own dtype."""
  dtype = jnp.promote_types(x.dtype, factors[0].dtype)
  first, second = (factor.astype(dtype) for factor in factors)
  return (x.astype(dtype) * first * second).astype(x.dtype)


def _shrinkage(dtype: DTypeLike) -> float:
  """Returns 2^-100 in float32, 2^-800 in float64."""
  return 2.0 ** -(jnp.finfo(dtype).maxexp * 25 // 32)
