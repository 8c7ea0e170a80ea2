"""Muon, with Newton-Schulz or with the exact polar factor, and the preset of the paper."""

import functools
from collections.abc import Callable

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from emopt_jax.linalg.coefficients import POLAR_EXPRESS
from emopt_jax.linalg.polar import newton_schulz, polar_svd
from emopt_jax.matrices import Axes
from emopt_jax.transforms.hyperparameters import check_decay, check_not_negative
from emopt_jax.transforms.momentum import momentum as average_gradients
from emopt_jax.transforms.orthogonalize import orthogonalize
from emopt_jax.transforms.rms_match import adam_rms, rms_match


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: ArrayLike = 0.95,
  nesterov: bool = True,
  method: Callable[[jax.Array], jax.Array] | None = None,
  rms: ArrayLike = 0.2,
  weight_decay: optax.ScalarOrSchedule = 0.1,
  mu_dtype: DTypeLike | None = None,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Muon: the polar factor of the averaged gradient, at AdamW's update size.

  W <- W - lr (rms sqrt(max(fan_in, fan_out)) polar(M) + weight_decay W), M <- b M + (1-b) G.

  Give it matrices only; `route` sends embeddings, heads, norms and biases to another optimizer.

  Args:
    learning_rate: lr, a number or a schedule; one tuned for AdamW is a good start, 2 to 5 times that usually better.
    momentum: b in [0, 1).
    nesterov: Whether the update looks ahead: b M + (1-b) G.
    method: How the polar factor is found: `newton_schulz` (the default), `polar_svd`, or a partial of either.
    rms: RMS of the update before the learning rate.
    weight_decay: Decoupled weight decay, a number or a schedule, multiplied by the learning rate.
    mu_dtype: Dtype that M is kept in, by default float32 or wider; `jnp.bfloat16` halves the state.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If a hyperparameter is out of range; at init, if a leaf is no matrix.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = muon(0.02)
    >>> params = {'kernel': jnp.zeros((4, 8))}
    >>> updates, state = optimizer.update({'kernel': jnp.ones((4, 8))}, optimizer.init(params), params)

  References:
    Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., arXiv 2502.16982.
  """
  check_decay('momentum', momentum)
  check_not_negative('rms', rms)
  check_not_negative('weight_decay', weight_decay)
  return optax.chain(
    average_gradients(momentum, nesterov=nesterov, mu_dtype=mu_dtype, axes=axes),
    orthogonalize(newton_schulz if method is None else method, axes=axes),
    rms_match(rms, axes=axes),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def mop(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: ArrayLike = 0.95,
  nesterov: bool = True,
  rms: ArrayLike = 0.2,
  weight_decay: optax.ScalarOrSchedule = 0.1,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Muon with the exact polar factor, by singular value decomposition: slower, and the measure of Newton-Schulz.

  Args:
    learning_rate: As in `muon`.
    momentum: As in `muon`.
    nesterov: As in `muon`.
    rms: As in `muon`.
    weight_decay: As in `muon`.
    axes: As in `muon`.

  Returns:
    An optax transformation.

  Example:
    >>> optimizer = mop(0.02)

  References:
    "SOAP, Muon, and Beyond", arXiv 2607.20548.
  """
  return muon(
    learning_rate,
    momentum=momentum,
    nesterov=nesterov,
    method=polar_svd,
    rms=rms,
    weight_decay=weight_decay,
    axes=axes,
  )


def paper_muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  weight_decay: optax.ScalarOrSchedule = 0.1,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Muon as the paper trains large models with it: 16 Polar Express steps, no look-ahead, AdamW's RMS at that momentum.

  Args:
    learning_rate: As in `muon`.
    momentum: b in [0, 1); the update's RMS is sqrt((1-b)/(1+b)).
    weight_decay: As in `muon`.
    axes: As in `muon`.

  Returns:
    An optax transformation.

  Example:
    >>> optimizer = paper_muon(1e-3)

  References:
    "SOAP, Muon, and Beyond", arXiv 2607.20548.
  """
  check_decay('momentum', momentum)
  return muon(
    learning_rate,
    momentum=momentum,
    nesterov=False,
    method=functools.partial(newton_schulz, coefficients=POLAR_EXPRESS, steps=16),
    rms=adam_rms(momentum),
    weight_decay=weight_decay,
    axes=axes,
  )
