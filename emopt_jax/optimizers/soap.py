"""SOAP and KL-SOAP: Adam in the eigenbasis of the gradient's covariance factors, and the preset of the paper."""

import optax
from jax.typing import ArrayLike, DTypeLike

from emopt_jax.linalg.eigenbasis import Refresh, qr_refresh
from emopt_jax.matrices import Axes
from emopt_jax.transforms.adam_bound import clip_to_adam_bound
from emopt_jax.transforms.covariance import kl_covariance, kronecker_covariance
from emopt_jax.transforms.eigenbasis_rotate import eigenbasis_rotate
from emopt_jax.transforms.hyperparameters import check_not_negative


def soap(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.95,
  eps: ArrayLike = 1e-15,
  decay: ArrayLike = 0.95,
  refresh: Refresh | None = None,
  refresh_every: ArrayLike = 1,
  weight_decay: optax.ScalarOrSchedule = 0.1,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """SOAP: Adam in the eigenbasis of L = E[G G^T] and R = E[G^T G].

  W <- W - lr (Q_L adam(Q_L^T G Q_R) Q_R^T + weight_decay W).

  Give it matrices only; `route` sends embeddings, heads, norms and biases to another optimizer.

  Args:
    learning_rate: lr, a number or a schedule; one tuned for AdamW is a good start, 3 times that usually better.
    b1: Decay of Adam's first moment, in [0, 1).
    b2: Decay of Adam's second moment, in [0, 1).
    eps: Added to the root of the second moment. Rounding noise is masked, so it can stay below any gradient.
    decay: Decay of L and R, in [0, 1).
    refresh: How the eigenbases follow L and R: `qr_refresh` (the default), `eigh_refresh` or your own.
    refresh_every: Steps between two refreshes of a matrix.
    weight_decay: Decoupled weight decay, a number or a schedule, multiplied by the learning rate.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If a hyperparameter is out of range; at init, if a leaf is no matrix.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = soap(0.01)
    >>> params = {'kernel': jnp.zeros((4, 8))}
    >>> updates, state = optimizer.update({'kernel': jnp.ones((4, 8))}, optimizer.init(params), params)

  References:
    Vyas et al., arXiv 2409.11321.
  """
  return optax.chain(
    scale_by_soap(
      kronecker_covariance(decay, axes=axes),
      b1=b1,
      b2=b2,
      eps=eps,
      refresh=refresh,
      refresh_every=refresh_every,
      axes=axes,
    ),
    _decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def kl_soap(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.95,
  eps: ArrayLike = 1e-15,
  decay: ArrayLike = 0.95,
  refresh: Refresh | None = None,
  refresh_every: ArrayLike = 1,
  weight_decay: optax.ScalarOrSchedule = 0.1,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """KL-SOAP: SOAP whose factors are those nearest to the gradient's covariance in Kullback-Leibler divergence.

  Args:
    learning_rate: As in `soap`.
    b1: As in `soap`.
    b2: As in `soap`.
    eps: As in `soap`.
    decay: As in `soap`.
    refresh: As in `soap`.
    refresh_every: As in `soap`.
    weight_decay: As in `soap`.
    axes: As in `soap`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: As in `soap`.

  Example:
    >>> optimizer = kl_soap(0.01)

  References:
    Lin et al., arXiv 2509.03378; "SOAP, Muon, and Beyond", arXiv 2607.20548.
  """
  return optax.chain(
    scale_by_soap(
      kl_covariance(decay, axes=axes),
      b1=b1,
      b2=b2,
      eps=eps,
      refresh=refresh,
      refresh_every=refresh_every,
      axes=axes,
    ),
    _decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def paper_kl_soap(
  learning_rate: optax.ScalarOrSchedule, *, weight_decay: optax.ScalarOrSchedule = 0.1, axes: Axes = None
) -> optax.GradientTransformationExtraArgs:
  """KL-SOAP as the paper trains large models with it: b1 = 0.9, b2 = 0.95, eps = 1e-7, a refresh by QR every step.

  Args:
    learning_rate: As in `soap`.
    weight_decay: As in `soap`.
    axes: As in `soap`.

  Returns:
    An optax transformation.

  Example:
    >>> optimizer = paper_kl_soap(1e-3)

  References:
    "SOAP, Muon, and Beyond", arXiv 2607.20548.
  """
  return kl_soap(learning_rate, b1=0.9, b2=0.95, eps=1e-7, weight_decay=weight_decay, axes=axes)


def scale_by_soap(
  covariance: optax.GradientTransformationExtraArgs | None = None,
  *,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.95,
  eps: ArrayLike = 1e-15,
  refresh: Refresh | None = None,
  refresh_every: ArrayLike = 1,
  mu_dtype: DTypeLike | None = None,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """The part of SOAP and KL-SOAP before weight decay and learning rate, with any covariance.

  Args:
    covariance: `kronecker_covariance()` (the default) or `kl_covariance()`, with the same axes. Where full factors of
      long sides are too dear: `kl_covariance(block_size=width)`, or `max_dim=width` for one-sided preconditioning.
    b1: As in `soap`.
    b2: As in `soap`.
    eps: As in `soap`.
    refresh: As in `soap`.
    refresh_every: As in `soap`.
    mu_dtype: Dtype that the first moment is kept in, by default float32 or wider; rotations are in float32.
    axes: As in `soap`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: As in `soap`.

  Example:
    >>> from emopt_jax import kl_covariance
    >>> transforms = scale_by_soap(kl_covariance(block_size=512)), optax.add_decayed_weights(0.1)
    >>> optimizer = optax.chain(*transforms, optax.scale_by_learning_rate(0.01))

  References:
    Vyas et al., SOAP, arXiv 2409.11321; Lin et al., KL-Shampoo, arXiv 2509.03378.
  """
  check_not_negative('eps', eps)
  return eigenbasis_rotate(
    optax.chain(optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype), clip_to_adam_bound(b1, b2)),
    covariance=kronecker_covariance(axes=axes) if covariance is None else covariance,
    refresh=qr_refresh if refresh is None else refresh,
    refresh_every=refresh_every,
    axes=axes,
  )


def _decayed_weights(weight_decay: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  check_not_negative('weight_decay', weight_decay)
  return optax.add_decayed_weights(weight_decay)
