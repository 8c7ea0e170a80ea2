"""The exponential moving average that matrix optimizers act on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from emopt_jax.matrices import Axes, from_stacks, stack_shapes, to_stacks
from emopt_jax.transforms.hyperparameters import check_decay
from emopt_jax.transforms.keyed_state import check_known, keyed_by_path


class MomentumState(NamedTuple):
  """State of `momentum`.

  Attributes:
    mu: The average, in the structure of the parameters, in float32 or wider unless `mu_dtype` says otherwise.
    skipped: Per path, how many gradients of each matrix were not finite, int32 `[batch]`.
  """

  mu: optax.Updates
  skipped: Any


def momentum(
  decay: ArrayLike = 0.95, *, nesterov: bool = True, mu_dtype: DTypeLike | None = None, axes: Axes = None
) -> optax.GradientTransformation:
  """Averages gradients: M <- b M + (1-b) G; the update is M, or b M + (1-b) G with Nesterov's look-ahead.

  A matrix whose gradient is zero or not finite gets a zero update, and its average stays as it was. An optimizer that
  normalises the update, as Muon does, would otherwise move an idle expert at full speed on old momentum for ever.

  Args:
    decay: b in [0, 1).
    nesterov: Whether to look ahead.
    mu_dtype: Dtype that the average is kept in, `jnp.bfloat16` for half the memory; it is computed in float32 or wider.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If decay is out of range; at init, if a leaf is no matrix.

  Example:
    >>> transform = momentum(0.5, nesterov=False)
    >>> gradient = {'kernel': jnp.ones((2, 2))}
    >>> transform.update(gradient, transform.init(gradient))[0]['kernel'][0]
    Array([0.5, 0.5], dtype=float32)
  """
  check_decay('decay', decay)

  def init(params):
    mu = jax.tree.map(lambda p: jnp.zeros_like(p, mu_dtype or jnp.promote_types(p.dtype, jnp.float32)), params)
    skipped = {path: jnp.zeros(shape.shape[:1], jnp.int32) for path, shape in stack_shapes(params, axes).items()}
    return MomentumState(mu, keyed_by_path(skipped))

  def update(updates, state, params=None):
    del params
    gradients = to_stacks(updates, axes)
    check_known(gradients, state.skipped)
    averages = to_stacks(state.mu, axes)
    skipped, outputs = {}, {}
    largest_kept = min((float(jnp.finfo(mu.dtype).max) for mu in jax.tree.leaves(state.mu)), default=jnp.inf)
    for path, gradient in gradients.items():
      # One reduction answers both questions: a maximum with not-a-number is not-a-number, and not below any limit.
      largest = jnp.max(jnp.abs(gradient), axis=(1, 2))
      finite = largest <= largest_kept
      active = (finite & (largest > 0))[:, None, None]
      b = jnp.asarray(decay, gradient.dtype)
      average = b * averages[path] + (1 - b) * gradient
      output = b * average + (1 - b) * gradient if nesterov else average
      averages[path] = jnp.where(active, average, averages[path])
      outputs[path] = jnp.where(active, output, 0)
      skipped[path] = state.skipped[path] + ~finite
    mu = from_stacks(averages, state.mu, axes)
    return from_stacks(outputs, updates, axes), MomentumState(mu, keyed_by_path(skipped))

  return optax.GradientTransformation(init, update)
