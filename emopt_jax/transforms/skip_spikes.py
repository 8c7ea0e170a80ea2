"""The transform that keeps a sudden, far too large gradient away from every average behind it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from emopt_jax.linalg.blocks import per_matrix
from emopt_jax.linalg.products import root_mean_square
from emopt_jax.matrices import Axes, from_stacks, stack_shapes, to_stacks
from emopt_jax.transforms.hyperparameters import check_decay, check_not_negative
from emopt_jax.transforms.keyed_state import check_known, keyed_by_path

# A matrix that goes on at a larger size is skipped for the logarithm to this base of how much larger it is.
_GROWTH = 2.0


class SkipSpikesState(NamedTuple):
  """State of `skip_spikes`.

  Attributes:
    level: Per path, the usual RMS of the gradient of each matrix, `[batch]` in float32 or wider; 0 before the first.
    skipped: Per path, how many gradients of each matrix were skipped, int32 `[batch]`.
  """

  level: Any
  skipped: Any


def skip_spikes(ratio: ArrayLike = 100.0, *, decay: ArrayLike = 0.9, axes: Axes = None) -> optax.GradientTransformation:
  """Replaces by zero the gradient of a matrix whose RMS r exceeds `ratio` times its usual level a.

  a <- b a + (1-b) r, or 2 a where a finite gradient is skipped. One spike of any size costs its matrix one step, and a
  lasting growth by a factor k is accepted after log2(k / ratio) steps. A gradient that is not finite is skipped too; a
  zero gradient changes nothing.

  Averages keep a spike for as long as they take to forget it: of 1e25 times the usual size `muon` with momentum 0.95
  points along the spike for 1100 steps, and AdamW with b2 = 0.95 stands still for 2200. Put this in front of either.

  Args:
    ratio: Largest size of a gradient relative to the usual one, above 1. Those of an expert that sees few tokens vary
      by 10 and more.
    decay: b in [0, 1).
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If ratio is negative or decay is out of range; at init, if a leaf is no matrix.

  Example:
    >>> import optax
    >>> optimizer = optax.chain(skip_spikes(), optax.trace(0.9))
    >>> gradient = {'kernel': jnp.ones((2, 2))}
    >>> _, state = optimizer.update(gradient, optimizer.init(gradient))
    >>> optimizer.update({'kernel': 1e25 * jnp.ones((2, 2))}, state)[0]['kernel'][0]
    Array([0.9, 0.9], dtype=float32)
  """
  check_not_negative('ratio', ratio)
  check_decay('decay', decay)

  def init(params):
    shapes = stack_shapes(params, axes)
    level = {path: jnp.zeros(shape.shape[:1], shape.dtype) for path, shape in shapes.items()}
    skipped = {path: jnp.zeros(shape.shape[:1], jnp.int32) for path, shape in shapes.items()}
    return SkipSpikesState(keyed_by_path(level), keyed_by_path(skipped))

  def update(updates, state, params=None):
    del params
    gradients = to_stacks(updates, axes)
    check_known(gradients, state.skipped)
    outputs, levels, skipped = {}, {}, {}
    for path, gradient in gradients.items():
      rms, level = root_mean_square(gradient)[:, 0, 0], state.level[path]
      finite = rms < jnp.inf
      usual = finite & ((level == 0) | (rms <= jnp.asarray(ratio, rms.dtype) * level))
      b = jnp.where(level == 0, 0, jnp.asarray(decay, rms.dtype))
      taken_in = jnp.where(rms > 0, b * level + (1 - b) * rms, level)
      levels[path] = jnp.where(usual, taken_in, jnp.where(finite, _GROWTH * level, level))
      outputs[path] = jnp.where(per_matrix(usual, gradient), gradient, 0)
      skipped[path] = state.skipped[path] + (~usual).astype(jnp.int32)
    return from_stacks(outputs, updates, axes), SkipSpikesState(keyed_by_path(levels), keyed_by_path(skipped))

  return optax.GradientTransformation(init, update)
