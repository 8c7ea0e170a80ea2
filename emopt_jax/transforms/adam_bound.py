"""The transform that holds Adam's update to what it can be in a basis that stands still."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from emopt_jax.transforms.hyperparameters import check_decay


def clip_to_adam_bound(b1: ArrayLike = 0.9, b2: ArrayLike = 0.95) -> optax.GradientTransformation:
  """Clips each entry to the largest that Adam gives: |mu| / sqrt(nu) <= (1-b1) / sqrt((1-b2) (1 - b1^2/b2)).

  The bound is that of the Cauchy-Schwarz inequality over the weights of the two averages, 1.17 at the default decays,
  so behind `optax.scale_by_adam` alone this changes nothing. Inside `eigenbasis_rotate` the first moment turns with the
  basis and the second does not, and the quotient of an entry that has seen little gradient would be 10 to 1000.

  Args:
    b1: Decay of the first moment, in [0, 1).
    b2: Decay of the second moment, in [0, 1). From b2 = b1^2 down there is no bound, and nothing is clipped.

  Returns:
    A stateless optax transformation, to be chained behind `optax.scale_by_adam(b1, b2)`.

  Raises:
    ValueError: If a decay is out of range.

  Example:
    >>> transform = clip_to_adam_bound(b1=0.0, b2=0.75)
    >>> updates, _ = transform.update({'kernel': jnp.array([0.5, -30.0])}, optax.EmptyState())
    >>> updates['kernel']
    Array([ 0.5, -2. ], dtype=float32)
  """
  check_decay('b1', b1)
  check_decay('b2', b2)

  def clip(update: jax.Array) -> jax.Array:
    first, second = jnp.asarray(b1, update.dtype), jnp.asarray(b2, update.dtype)
    rest = (1 - second) * (second - jnp.square(first))
    bound = jnp.where(rest > 0, (1 - first) * jnp.sqrt(second / jnp.where(rest > 0, rest, 1)), jnp.inf)
    return jnp.clip(update, -bound, bound)

  return optax.stateless(lambda updates, params: jax.tree.map(clip, updates))
