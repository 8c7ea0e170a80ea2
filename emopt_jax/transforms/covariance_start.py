"""What the covariance factors of a matrix start from."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from emopt_jax.linalg.blocks import per_matrix
from emopt_jax.linalg.factors import Factors
from emopt_jax.linalg.products import frobenius_norm, root_mean_square, trace

Start = Callable[[jax.Array, Factors], tuple[jax.Array, jax.Array]]


def frobenius_start(gradient: jax.Array, factors: Factors) -> tuple[jax.Array, jax.Array]:
  """Returns |G|_F^2 / m and |G|_F^2 / n, so that the first factors have the trace of G G^T but no direction."""
  square = jnp.square(frobenius_norm(gradient))
  return square / gradient.shape[-2], square / gradient.shape[-1]


def rms_start(gradient: jax.Array, factors: Factors) -> tuple[jax.Array, jax.Array]:
  """Returns the RMS of G twice, or its square for a lone factor, so that L x R has the size of G's covariance."""
  rms = root_mean_square(gradient)
  multiple = jnp.square(rms) if any(factor is None for factor in factors) else rms
  return multiple, multiple


def zero_start(gradient: jax.Array, factors: Factors) -> tuple[jax.Array, jax.Array]:
  """Returns zeros: the start of libraries that bias-correct the decay."""
  del factors
  zero = jnp.zeros_like(frobenius_norm(gradient))
  return zero, zero


def started(factors: Factors, gradient: jax.Array, start: Start) -> Factors:
  """Returns the factors, or a multiple of the identity for those that have seen no gradient and are still zero."""

  def identity_of(factor: jax.Array | None, multiple: jax.Array) -> jax.Array | None:
    if factor is None:
      return None
    untouched = trace(factor) == 0
    identity = jnp.eye(factor.shape[-1], dtype=factor.dtype)
    return jnp.where(untouched, per_matrix(multiple[:, 0, 0], factor) * identity, factor)

  left, right = start(gradient, factors)
  return Factors(identity_of(factors.left, left), identity_of(factors.right, right))
