"""Where each matrix of a leaf lies in the stacked state of its class."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from emopt_jax.distributed.bundles import Bundle, MatrixClass
from emopt_jax.distributed.parcels import MATRIX, Leaf, sharding_axes
from emopt_jax.distributed.plan import Plan
from emopt_jax.matrices import leaf_path

MEND = 'give the plan, the parameters and the optimizer that the state was made with'


class Block(NamedTuple):
  """The matrices of a leaf that one block of its split makes, or all of them.

  Attributes:
    class_name: Class of the parcels.
    matrix: Number of the matrix in a parcel.
    rows: Row of the class's state for each matrix, in the order of the leaf's batch.
    stack: Key of the stack that `to_stacks` puts the matrices in.
    start: Where they start in that stack.
  """

  class_name: str
  matrix: int
  rows: np.ndarray
  stack: str
  start: int


def blocks_of(plan: Plan, path: str) -> list[Block]:
  """Returns where the matrices of a leaf are."""
  leaf = plan.leaves[path]
  sizes = leaf.axes.split[1] if leaf.axes.split else (1,)
  distinct = list(dict.fromkeys(sizes))
  blocks, seen = [], dict.fromkeys(distinct, 0)
  for part in range(len(leaf.parts)):
    bundle, one = next((b, c) for b in plan.bundles for c in b.classes if (path, part) in c.members)
    rows = _rows(plan, bundle, one, leaf, part)
    for index in range(len(one.parcel.matrices)):
      size = sizes[len(blocks)]
      number = distinct.index(size)
      stack = path if number == 0 else f'{path}:{number}'
      blocks.append(Block(one.name, index, rows, stack, seen[size]))
      seen[size] += len(rows)
  return blocks


class Counterpart(NamedTuple):
  """A leaf of the undistributed state, and which of its matrices are in a leaf of the distributed one.

  Attributes:
    parameter: Path of the parameter.
    path: Path of the leaf of the undistributed state.
    block: Where its matrices are.
    by_axes: Whether the leaf is laid out as the parameter; else it is a stack `[batch, ...]`.
  """

  parameter: str
  path: str
  block: Block
  by_axes: bool


def counterparts_of(plan: Plan, class_name: str, unit_keys: tuple[Any, ...], unit_shape) -> list[Counterpart]:
  """Returns the counterparts of a leaf of a class's state; none for a leaf that belongs to no matrix, as a count.

  Args:
    plan: The plan.
    class_name: The class.
    unit_keys: Key path of the leaf in the state of one parcel.
    unit_shape: Its shape there.

  Raises:
    ValueError: If the leaf is kept for each parameter in another shape than the matrix's, which no axes put back.
  """
  one = next(one for one in plan.classes if one.name == class_name)
  unit_path, names = leaf_path(unit_keys), [getattr(key, 'key', None) for key in unit_keys]
  found = []
  for parameter in dict.fromkeys(path for path, _ in one.members):
    for block in blocks_of(plan, parameter):
      # The keys tell a moment of the parameters' structure from a stack; by their shapes they can be the same.
      unit, matrix = f'{MATRIX}/{block.matrix}', one.parcel.matrices[block.matrix]
      by_axes = (MATRIX, str(block.matrix)) in itertools.pairwise(names)
      if block.class_name != class_name or not (by_axes or unit in names):
        continue
      path = f'/{unit_path}/'.replace(f'/{unit}/', f'/{parameter if by_axes else block.stack}/')[1:-1]
      if by_axes and tuple(unit_shape) != matrix:
        raise ValueError(
          f"leaf '{path}' of the state: {tuple(unit_shape)} for a matrix {matrix} of the parameter '{parameter}' of "
          f'shape {plan.leaves[parameter].shape} is laid out neither as the parameter nor as a stack and cannot be put '
          'back: keep it in one of these forms'
        )
      found.append(Counterpart(parameter, path, block, by_axes))
  return found


def _rows(plan: Plan, bundle: Bundle, one: MatrixClass, leaf: Leaf, part: int) -> np.ndarray:
  """Returns the row of every parcel that a part of a leaf gives, over all shards of the leaf's batch."""
  start = sum(plan.leaves[p].parts[i].batch for p, i in one.members[: one.members.index((leaf.path, part))])
  owned = [rank * one.slots + slot for rank, count in enumerate(one.counts) for slot in range(count)]
  of_home = np.array(owned[start : start + leaf.parts[part].batch])
  per_home = len(one.counts) * one.slots
  shape = [leaf.shape[i] for i in leaf.batch_axes]
  rows = np.zeros(shape, int)
  home_shape = [plan.mesh.shape[name] for name in bundle.home]
  for home, position in enumerate(np.ndindex(*home_shape)):
    coordinates = dict(zip(bundle.home, position, strict=True))
    shard = tuple(_shard(plan, leaf, i, coordinates) for i in leaf.batch_axes)
    rows[shard] = (home * per_home + of_home).reshape(rows[shard].shape)
  return rows.ravel()


def _shard(plan: Plan, leaf: Leaf, dimension: int, coordinates: dict[str, int]) -> slice:
  """Returns the part of a dimension that lies at a position of the mesh."""
  names = sharding_axes(leaf.path, leaf.shape, leaf.spec, plan.mesh.shape)[dimension]
  index = 0
  for name in names:
    index = index * plan.mesh.shape[name] + coordinates[name]
  size = leaf.shape[dimension] // math.prod(plan.mesh.shape[name] for name in names)
  return slice(index * size, (index + 1) * size)
