"""Transforms that give the update of every matrix a chosen root mean square, and the rules they scale by."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from emopt_jax.linalg.products import root_mean_square
from emopt_jax.matrices import Axes
from emopt_jax.transforms.hyperparameters import check_decay, check_not_negative
from emopt_jax.transforms.stateless import stateless_on_stacks


def spectral(fan_in: int, fan_out: int) -> float:
  """Returns sqrt(max(fan_in, fan_out)): an orthogonal matrix then has RMS 1 (Liu et al., arXiv 2502.16982)."""
  return max(fan_in, fan_out) ** 0.5


def shape(fan_in: int, fan_out: int) -> float:
  """Returns sqrt(max(1, fan_out / fan_in)), the rule of Muon's first implementation."""
  return max(1.0, fan_out / fan_in) ** 0.5


def unit_rms(fan_in: int, fan_out: int) -> float:
  """Returns sqrt(fan_out / fan_in): unit norm from RMS to RMS (Bernstein and Newhouse, arXiv 2409.20325)."""
  return (fan_out / fan_in) ** 0.5


def adam_rms(b1: float) -> float:
  """Returns sqrt((1-b1)/(1+b1)), the RMS of AdamW's own update on noise: 0.229 at b1 = 0.9."""
  check_decay('b1', b1)
  return ((1 - b1) / (1 + b1)) ** 0.5


def rms_match(
  target: ArrayLike = 0.2, *, rule: Callable[[int, int], float] = spectral, axes: Axes = None
) -> optax.GradientTransformation:
  """Multiplies each matrix by target * rule(fan_in, fan_out).

  An orthogonal matrix has RMS 1/sqrt(max(fan_in, fan_out)); with the `spectral` rule the result has RMS `target`, so a
  learning rate tuned for AdamW carries over.

  Args:
    target: RMS of the update before the learning rate; AdamW's is about 0.2.
    rule: Function of fan-in and fan-out: `spectral`, `shape`, `unit_rms` or your own.
    axes: Which axes of each leaf are inputs and outputs, as in `MatrixAxes`.

  Returns:
    A stateless optax transformation.

  Raises:
    ValueError: If target is negative; at init, if a leaf is no matrix.

  Example:
    >>> transform = rms_match(0.2)
    >>> updates, _ = transform.update({'kernel': jnp.eye(4)}, transform.init({'kernel': jnp.eye(4)}))
    >>> updates['kernel'][0, 0]
    Array(0.4, dtype=float32)

  References:
    Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982.
  """

  check_not_negative('target', target)

  def scale(stack: jax.Array) -> jax.Array:
    return stack * jnp.asarray(target * rule(stack.shape[1], stack.shape[2]), stack.dtype)

  return stateless_on_stacks(scale, axes)


def rms_normalize(target: ArrayLike = 0.2, *, axes: Axes = None) -> optax.GradientTransformation:
  """Rescales each matrix to RMS `target` by its own measured RMS; a zero matrix stays zero.

  Args:
    target: RMS of the update before the learning rate.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    A stateless optax transformation.

  Example:
    >>> transform = rms_normalize(0.5)
    >>> updates, _ = transform.update({'kernel': jnp.ones((2, 3))}, transform.init({'kernel': jnp.ones((2, 3))}))
    >>> updates['kernel'][0, 0].round(4)
    Array(0.5, dtype=float32)
  """

  check_not_negative('target', target)

  def scale(stack: jax.Array) -> jax.Array:
    rms = root_mean_square(stack)
    return stack / jnp.where(rms > 0, rms, 1) * jnp.asarray(target, stack.dtype)

  return stateless_on_stacks(scale, axes)
