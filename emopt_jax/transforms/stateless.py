"""What the stateless transforms of matrices have in common."""

from collections.abc import Callable

import jax
import optax

from emopt_jax.batching import map_by_shape
from emopt_jax.matrices import Axes, Stacks, from_stacks, single_matrices, stack_shapes, to_stacks

OnStack = Callable[[jax.Array], jax.Array]


def stateless_on_stacks(function: OnStack, axes: Axes) -> optax.GradientTransformation:
  """Returns the transformation that applies a function `[batch, m, n] -> [batch, m, n]` to every stack of matrices."""
  return _stateless(lambda updates: {p: function(stack) for p, stack in to_stacks(updates, axes).items()}, axes)


def stateless_by_shape(function: OnStack, axes: Axes) -> optax.GradientTransformation:
  """Does as `stateless_on_stacks`, but joins the matrices of one shape in one batch: for products, not for scalings."""
  return _stateless(
    lambda updates: map_by_shape(function, single_matrices(updates, axes), to_stacks(updates, axes)), axes
  )


def _stateless(function: Callable[[optax.Updates], Stacks], axes: Axes) -> optax.GradientTransformation:
  def init(params):
    stack_shapes(params, axes)  # raises now rather than at the first update
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params
    return from_stacks(function(updates), updates, axes), state

  return optax.GradientTransformation(init, update)
