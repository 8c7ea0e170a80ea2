"""What the stateless transforms of matrices have in common."""

from collections.abc import Callable

import jax
import optax

from emopt_jax.batching import map_by_shape
from emopt_jax.matrices import Axes, Stacks, from_stacks, single_matrices, stack_shapes, to_stacks

OnStack = Callable[[jax.Array], jax.Array]


def stateless_on_stacks(function: OnStack, axes: Axes) -> optax.GradientTransformation:
  """Returns the transformation that applies a function `[batch, m, n] -> [batch, m, n]` to every stack of matrices."""
  return _stateless(lambda stacks, single: {path: function(stack) for path, stack in stacks.items()}, axes)


def stateless_by_shape(function: OnStack, axes: Axes) -> optax.GradientTransformation:
  """Does as `stateless_on_stacks`, but joins the matrices of one shape in one batch: for products, not for scalings."""
  return _stateless(lambda stacks, single: map_by_shape(function, single, stacks), axes)


def _stateless(function: Callable[[Stacks, frozenset[str]], Stacks], axes: Axes) -> optax.GradientTransformation:
  def init(params):
    stack_shapes(params, axes)  # raises now rather than at the first update
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params
    stacks = function(to_stacks(updates, axes), single_matrices(updates, axes))
    return from_stacks(stacks, updates, axes), state

  return optax.GradientTransformation(init, update)
