"""The transform that multiplies every matrix by powers of its covariance factors."""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from emopt_jax.batching import map_by_shape
from emopt_jax.linalg.blocks import multiply_left, multiply_right
from emopt_jax.linalg.factors import Factors
from emopt_jax.linalg.products import all_finite
from emopt_jax.linalg.roots import matrix_power
from emopt_jax.matrices import Axes, from_stacks, single_matrices, to_stacks


class KroneckerPreconditionState(NamedTuple):
  """State of `kronecker_precondition`.

  Attributes:
    covariance: State of the covariance transformation.
  """

  covariance: PyTree


def kronecker_precondition(
  covariance: optax.GradientTransformationExtraArgs,
  *,
  exponent: float = -1 / 4,
  floor: float = 1e-6,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Multiplies each matrix by powers of its covariance factors: L^e G R^e.

  The factors take in the current gradient first. A matrix whose gradient they skip, because it is not finite or its
  squares would overflow, gets a zero update.

  Args:
    covariance: `kronecker_covariance` (with e = -1/4, Shampoo) or `kl_covariance` (with e = -1/2, KL-Shampoo), with the
      same axes. A side for which it keeps no factor is not preconditioned.
    exponent: e, usually negative.
    floor: Smallest eigenvalue of a factor relative to its largest, in (0, 1).
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If floor is not in (0, 1); at init, if a leaf is no matrix.

  Example:
    >>> from emopt_jax.transforms.covariance import kronecker_covariance
    >>> shampoo = kronecker_precondition(kronecker_covariance())
    >>> gradient = {'kernel': 5 * jnp.eye(2)}
    >>> shampoo.update(gradient, shampoo.init(gradient))[0]['kernel'].round(3)
    Array([[1., 0.],
           [0., 1.]], dtype=float32)

  References:
    Gupta et al., Shampoo, arXiv 1802.09568; Lin et al., KL-Shampoo, arXiv 2509.03378.
  """
  if not 0 < floor < 1:
    raise ValueError(f'floor must be in (0, 1), got {floor}')

  def init(params):
    return KroneckerPreconditionState(covariance.init(params))

  def update(updates, state, params=None, **extra_args):
    del extra_args
    # What the covariance skips it passes on as zero.
    passed, covariance_state = cast(Any, covariance.update(updates, state.covariance, params))
    precondition = functools.partial(_precondition, exponent=exponent, floor=floor)
    gradients = to_stacks(passed, axes)
    outputs = map_by_shape(precondition, single_matrices(updates, axes), gradients, covariance_state.factors)
    return from_stacks(outputs, updates, axes), KroneckerPreconditionState(covariance_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _precondition(gradient: jax.Array, factors: Factors, *, exponent: float, floor: float) -> jax.Array:
  for factor, from_left in zip(factors, (True, False), strict=True):
    if factor is None:
      continue
    power = matrix_power(factor, exponent, floor=floor)
    # A factor whose roots are not finite leaves that side alone for the step; the factors themselves are never lost.
    preconditioned = multiply_left(power, gradient) if from_left else multiply_right(gradient, power)
    gradient = jnp.where(all_finite(power)[:, None, None], preconditioned, gradient)
  return gradient
