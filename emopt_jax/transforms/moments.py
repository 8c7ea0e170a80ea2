"""The moments inside the state of any optax transformation: its fields of the parameters' structure, by name."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from emopt_jax.matrices import Axes, from_stacks, to_stacks

FIRST, SECOND = 'mu', 'nu'


class Moments(NamedTuple):
  """The moments of one stack of matrices.

  Attributes:
    first: The fields named `mu`, each `[batch, m, n]`, in the order of the state.
    second: The fields named `nu`, likewise.
  """

  first: list[jax.Array]
  second: list[jax.Array]


def moment_stacks(like: PyTree, state: PyTree, axes: Axes) -> dict[str, Moments]:
  """Returns the moments of every stack, keyed by path.

  Args:
    like: Parameters or updates, whose structure and shapes tell a moment from other fields.
    state: State of an optax transformation.
    axes: Which axes of each leaf make the matrix.
  """
  found = {FIRST: [], SECOND: []}
  _map_moments(lambda name, field: found[name].append(to_stacks(field, axes)) or field, like, state)
  paths = to_stacks(like, axes)
  return {path: Moments(*([stacks[path] for stacks in found[name]] for name in (FIRST, SECOND))) for path in paths}


def with_moment_stacks(like: PyTree, state: PyTree, axes: Axes, moments: dict[str, Moments]) -> PyTree:
  """Returns the state with its moments replaced: the inverse of `moment_stacks`."""
  taken = {FIRST: itertools.count(), SECOND: itertools.count()}

  def replace(name: str, field: PyTree) -> PyTree:
    index = next(taken[name])
    side = (FIRST, SECOND).index(name)
    return from_stacks({path: each[side][index] for path, each in moments.items()}, field, axes)

  return _map_moments(replace, like, state)


def keep_moments(like: PyTree, new: PyTree, old: PyTree, axes: Axes, changed: dict[str, jax.Array]) -> PyTree:
  """Returns the new state with the old moments of the matrices that have not `changed`, bool `[batch]` by path."""
  olds, news = moment_stacks(like, old, axes), moment_stacks(like, new, axes)
  kept = {
    path: jax.tree.map(functools.partial(jnp.where, changed[path][:, None, None]), news[path], olds[path])
    for path in changed
  }
  return with_moment_stacks(like, new, axes, kept)


def consistent_moments(before: Moments, after: Moments, gradient: jax.Array) -> Moments:
  """Returns the moved moments, with the second raised where the first has moved and it has seen next to nothing.

  The first moment turns with the basis and the second does not, so that mu may arrive where nu is zero, behind a
  rectified unit that was dead say; mu / (sqrt(nu) + eps) would then be as large as 1 / eps. Where the rotated gradient
  is zero too, |mu| / sqrt(nu) is held to its largest value before the move, at least 1 (a mean is at most a root mean
  square); elsewhere the gradient itself fills nu within the step, and the ratio is held to 1000. A basis that stands
  still changes nothing.
  """
  second = list(after.second)
  # A first moment without its second, and the reverse, moves alone: Lion has no second, RMSProp no first.
  for i, (old_mu, old_nu, mu, nu) in enumerate(
    zip(before.first, before.second, after.first, after.second, strict=False)
  ):
    ratio = jnp.where(old_nu > 0, jnp.square(old_mu) / jnp.where(old_nu > 0, old_nu, 1), 0)
    largest = jnp.maximum(1, jnp.max(ratio, axis=(-2, -1), keepdims=True))
    second[i] = jnp.maximum(nu, jnp.square(mu) / jnp.where(gradient == 0, largest, jnp.maximum(largest, 1e6)))
  return Moments(after.first, second)


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
