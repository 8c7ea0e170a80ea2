"""Shampoo and KL-Shampoo: the averaged gradient between inverse roots of its covariance factors."""

import optax
from jax.typing import ArrayLike

from emopt_jax.matrices import Axes
from emopt_jax.transforms.covariance import kl_covariance, kronecker_covariance
from emopt_jax.transforms.hyperparameters import check_decay, check_not_negative
from emopt_jax.transforms.kronecker_precondition import kronecker_precondition
from emopt_jax.transforms.momentum import momentum as average_gradients
from emopt_jax.transforms.rms_match import rms_normalize


def shampoo(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: ArrayLike = 0.9,
  nesterov: bool = False,
  decay: ArrayLike = 0.95,
  rms: ArrayLike = 0.2,
  weight_decay: optax.ScalarOrSchedule = 0.1,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Shampoo at AdamW's update size: L^(-1/4) G R^(-1/4), averaged and rescaled to a chosen RMS.

  Give it matrices only; `route` sends embeddings, heads, norms and biases to another optimizer.

  Args:
    learning_rate: lr, a number or a schedule.
    momentum: Decay of the average of preconditioned gradients, in [0, 1).
    nesterov: Whether the update looks ahead.
    decay: Decay of L and R, in [0, 1).
    rms: RMS of the update before the learning rate.
    weight_decay: Decoupled weight decay, a number or a schedule, multiplied by the learning rate.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If a hyperparameter is out of range; at init, if a leaf is no matrix.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = shampoo(0.01)
    >>> params = {'kernel': jnp.zeros((4, 8))}
    >>> updates, state = optimizer.update({'kernel': jnp.ones((4, 8))}, optimizer.init(params), params)

  References:
    Gupta et al., arXiv 1802.09568; Shi et al., A Distributed Data-Parallel PyTorch Implementation of the Distributed
    Shampoo Optimizer, arXiv 2309.06497.
  """
  return optax.chain(
    kronecker_precondition(kronecker_covariance(decay, axes=axes), exponent=-1 / 4, axes=axes),
    *_averaged_step(learning_rate, momentum, nesterov, rms=rms, weight_decay=weight_decay, axes=axes),
  )


def kl_shampoo(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: ArrayLike = 0.9,
  nesterov: bool = False,
  decay: ArrayLike = 0.95,
  rms: ArrayLike = 0.2,
  weight_decay: optax.ScalarOrSchedule = 0.1,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """KL-Shampoo: L^(-1/2) G R^(-1/2) with the factors of `kl_covariance`, averaged and rescaled to a chosen RMS.

  Args:
    learning_rate: As in `shampoo`.
    momentum: As in `shampoo`.
    nesterov: As in `shampoo`.
    decay: As in `shampoo`.
    rms: As in `shampoo`.
    weight_decay: As in `shampoo`.
    axes: As in `shampoo`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: As in `shampoo`.

  Example:
    >>> optimizer = kl_shampoo(0.01)

  References:
    Lin et al., arXiv 2509.03378.
  """
  return optax.chain(
    kronecker_precondition(kl_covariance(decay, axes=axes), exponent=-1 / 2, axes=axes),
    *_averaged_step(learning_rate, momentum, nesterov, rms=rms, weight_decay=weight_decay, axes=axes),
  )


def _averaged_step(
  learning_rate: optax.ScalarOrSchedule,
  momentum: ArrayLike,
  nesterov: bool,
  *,
  rms: ArrayLike,
  weight_decay: optax.ScalarOrSchedule,
  axes: Axes,
) -> tuple[optax.GradientTransformation, ...]:
  check_decay('momentum', momentum)
  check_not_negative('rms', rms)
  check_not_negative('weight_decay', weight_decay)
  return (
    average_gradients(momentum, nesterov=nesterov, axes=axes),
    rms_normalize(rms, axes=axes),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )
