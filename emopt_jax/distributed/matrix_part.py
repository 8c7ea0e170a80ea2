"""Which part of an undistributed optimizer's state is that of the matrices."""

from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from emopt_jax.distributed.addresses import counterparts_of
from emopt_jax.distributed.plan import Plan
from emopt_jax.matrices import leaf_path
from emopt_jax.routing import MATRIX


def matrix_part(
  plan: Plan, classes: dict[str, PyTree], state: PyTree
) -> tuple[PyTree, PyTree, Callable[[PyTree, PyTree], PyTree]]:
  """Returns what an undistributed state holds for matrices and for others, and a function that puts new ones there."""
  is_routed = lambda node: isinstance(node, optax.transforms.PartitionState)  # noqa: E731
  leaves, structure = jax.tree.flatten(state, is_leaf=is_routed)
  routed = [i for i, leaf in enumerate(leaves) if is_routed(leaf)]
  if not routed:
    matrices, put_matrices = _inner_part(plan, classes, state)
    return matrices, None, lambda new_matrices, _: put_matrices(new_matrices)
  index, partition = routed[0], leaves[routed[0]]
  states = dict(partition.inner_states)
  matrices, others = states[MATRIX].inner_state, {name: state for name, state in states.items() if name != MATRIX}

  def put(new_matrices, new_others):
    new = {name: new_others if name in others else optax.MaskedState(new_matrices) for name in states}
    return structure.unflatten([*leaves[:index], partition._replace(inner_states=new), *leaves[index + 1 :]])

  return matrices, next(iter(others.values()), None), put


def _inner_part(plan: Plan, classes: dict[str, PyTree], state: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
  """Returns the state of the inner optimizer in a state that may chain it behind others, as a clipping by norm."""
  expected = set()
  for name, tree in classes.items():
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
      counterparts = counterparts_of(plan, name, keys, leaf.shape[1:])
      expected |= {one.path for one in counterparts} or {leaf_path(keys)}

  def search(node: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]] | None:
    if {leaf_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(node)} == expected:
      return node, lambda new: new
    for i, child in enumerate(node) if type(node) is tuple else ():
      if within := search(child):
        return within[0], lambda new, i=i, put=within[1]: (*node[:i], put(new), *node[i + 1 :])
    return None

  # Where nothing fits, the leaf that is missing is found, and named, leaf by leaf.
  return search(state) or (state, lambda new: new)
