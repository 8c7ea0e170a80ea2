"""The transform that replaces every matrix by its polar factor."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from emopt_jax.linalg.polar import newton_schulz
from emopt_jax.linalg.products import all_finite
from emopt_jax.matrices import Axes
from emopt_jax.transforms.stateless import stateless_by_shape


def orthogonalize(
  method: Callable[[jax.Array], jax.Array] = newton_schulz, *, axes: Axes = None
) -> optax.GradientTransformation:
  """Replaces each matrix G = U S V^T by its polar factor U V^T.

  Stateless. A zero matrix gives a zero update, and so does one that is not finite.

  Args:
    method: Function `[batch, m, n] -> [batch, m, n]`, for instance `polar_svd` or
      `functools.partial(newton_schulz, steps=16)`.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: At init, if a leaf is no matrix.

  Example:
    >>> import optax
    >>> optimizer = optax.chain(optax.trace(0.9), orthogonalize(), optax.scale_by_learning_rate(0.02))
    >>> state = optimizer.init({'kernel': jax.numpy.ones((4, 8))})

  References:
    Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/.
  """

  def finite_polar(stack: jax.Array) -> jax.Array:
    return method(jnp.where(all_finite(stack)[:, None, None], stack, 0))

  return stateless_by_shape(finite_polar, axes)
