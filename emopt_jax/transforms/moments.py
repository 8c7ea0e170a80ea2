"""The moments inside the state of any optax transformation: its fields of the parameters' structure, by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from emopt_jax.matrices import Axes, Stacks, from_stacks, to_stacks

FIRST, SECOND = 'mu', 'nu'


def moment_stacks(like: PyTree, state: PyTree, axes: Axes) -> list[tuple[str, Stacks]]:
  """Returns the name and the stacks of every moment in the state.

  Args:
    like: Parameters or updates, whose structure and shapes tell a moment from other fields.
    state: State of an optax transformation.
    axes: Which axes of each leaf make the matrix.

  Returns:
    Pairs of the field's name, 'mu' or 'nu', and its stacks by path, in the order of the state's fields.
  """
  found = []
  _map_moments(lambda name, field: found.append((name, to_stacks(field, axes))) or field, like, state)
  return found


def with_moment_stacks(like: PyTree, state: PyTree, axes: Axes, moments: list[Stacks]) -> PyTree:
  """Returns the state with its moments replaced, in the order of `moment_stacks`."""
  remaining = iter(moments)
  return _map_moments(lambda name, field: from_stacks(next(remaining), field, axes), like, state)


def keep_moments(like: PyTree, new: PyTree, old: PyTree, axes: Axes, changed: dict[str, jax.Array]) -> PyTree:
  """Returns the new state with the old moments of the matrices that have not `changed`, bool `[batch]` by path."""
  kept = [
    {path: jnp.where(changed[path][:, None, None], stack, olds[path]) for path, stack in news.items()}
    for (_, news), (_, olds) in zip(moment_stacks(like, new, axes), moment_stacks(like, old, axes), strict=True)
  ]
  return with_moment_stacks(like, new, axes, kept)


def check_moment_names(like: PyTree, state: PyTree) -> None:
  """Raises a ValueError if the state has a moment that is neither a first nor a second one by its name."""

  def check(name: str, field: PyTree) -> PyTree:
    if name not in (FIRST, SECOND):
      raise ValueError(
        f"the inner transformation keeps a moment '{name}', and only '{FIRST}' (first moments) and '{SECOND}' "
        '(second moments) can be moved to a new eigenbasis: rename the field of its state'
      )
    return field

  _map_moments(check, like, state)


def _map_moments(function: Callable[[str, PyTree], PyTree], like: PyTree, state: PyTree) -> PyTree:
  structure = jax.tree.structure(like)
  shapes = [leaf.shape for leaf in jax.tree.leaves(like)]

  def is_moment(node: PyTree) -> bool:
    return jax.tree.structure(node) == structure and [leaf.shape for leaf in jax.tree.leaves(node)] == shapes

  def replace(keys: tuple, node: PyTree) -> PyTree:
    if not shapes or not is_moment(node):
      return node
    names = [key.name for key in keys if isinstance(key, jax.tree_util.GetAttrKey)]
    return function(names[-1] if names else '', node)

  return jax.tree_util.tree_map_with_path(replace, state, is_leaf=is_moment)
