"""What the stateless transforms of matrices have in common."""

from collections.abc import Callable

import jax
import optax

from emopt_jax.matrices import Axes, from_stacks, stack_shapes, to_stacks


def stateless_on_stacks(function: Callable[[jax.Array], jax.Array], axes: Axes) -> optax.GradientTransformation:
  """Returns the transformation that applies a function `[batch, m, n] -> [batch, m, n]` to every stack of matrices."""

  def init(params):
    stack_shapes(params, axes)  # raises now rather than at the first update
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params
    stacks = to_stacks(updates, axes)
    return from_stacks({path: function(stack) for path, stack in stacks.items()}, updates, axes), state

  return optax.GradientTransformation(init, update)
