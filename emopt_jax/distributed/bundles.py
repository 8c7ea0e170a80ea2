"""Which matrices are alike, who owns them, and which travel together."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from emopt_jax.distributed.dealing import deal
from emopt_jax.distributed.parcels import AxisNames, Leaf, Parcel, UnitTree, unit_tree

Cost = Callable[[int, int], float]

# Numbers in a tile of a TPU's memory, 8 x 128. A reduce-scatter of rows of whole tiles stays one there; of others it
# becomes an all-reduce, of twice the bytes.
TILE = 1024


@dataclasses.dataclass(frozen=True)
class MatrixClass:
  """Parcels of one form, and how many of them each rank owns.

  Attributes:
    name: Shape of the matrices, as in '768x3072'; the key of the class in the state.
    parcel: The form.
    members: Path and part of each leaf that gives parcels, in order.
    counts: Per rank, how many it owns: rank 0 the first ones, rank 1 the next.
    cost: Operations for one parcel.
  """

  name: str
  parcel: Parcel
  members: tuple[tuple[str, int], ...]
  counts: tuple[int, ...]
  cost: float

  @property
  def slots(self) -> int:
    """Parcels for which each rank has room."""
    return max(self.counts)


@dataclasses.dataclass(frozen=True)
class Bundle:
  """Classes that travel in one collective.

  Attributes:
    classes: The classes.
    owners: Mesh axes over which they are dealt, in the order in which they are passed; the first is major.
    exchanged: Those of them that shard the parcels, passed by all-to-all.
    replicas: Axes over which gradients are summed and owners repeated.
    home: Axes that shard the batch: parcels stay within them.
    piece_sizes: Per class, numbers in one shard of a parcel.
    offsets: Per class and rank, where the rank's first parcel starts in its row.
    length: Numbers in a row, the same for all ranks.
  """

  classes: tuple[MatrixClass, ...]
  owners: AxisNames
  exchanged: AxisNames
  replicas: AxisNames
  home: AxisNames
  piece_sizes: tuple[int, ...]
  offsets: tuple[tuple[int, ...], ...]
  length: int

  @property
  def state_axes(self) -> AxisNames:
    """Mesh axes that shard the first dimension of the state."""
    return self.home + self.owners


def unit_shapes(parcel: Parcel) -> UnitTree:
  """Returns the parameters of the optimizer that a parcel has of its own, as `ShapeDtypeStruct`s."""
  return unit_tree([jax.ShapeDtypeStruct(shape, parcel.dtype) for shape in parcel.matrices])


def make_bundles(
  leaves: Mapping[str, Leaf], mesh: Mesh, axis: AxisNames, replicas: AxisNames, cost: Cost
) -> tuple[tuple[Bundle, ...], np.ndarray]:
  """Returns the bundles, and the operations per device."""
  members: dict[Parcel, list[tuple[str, int]]] = {}
  units: dict[Parcel, int] = {}
  for path, leaf in leaves.items():
    for index, part in enumerate(leaf.parts):
      members.setdefault(part.parcel, []).append((path, index))
      units[part.parcel] = units.get(part.parcel, 0) + part.batch
  costs = {parcel: sum(cost(*matrix) for matrix in parcel.matrices) for parcel in members}
  names: dict[str, int] = {}
  teams: dict[Any, list[Parcel]] = {}
  for parcel in sorted(members, key=lambda parcel: (-costs[parcel], parcel.shape)):
    exchanged = tuple(dict.fromkeys(name for shards in parcel.sharded for name in reversed(shards)))
    rest = [name for name in axis if name not in exchanged + parcel.home]
    repeated = tuple(name for name in replicas if name not in exchanged + parcel.home)
    team = ((*rest, *exchanged), exchanged, repeated, parcel.home, parcel.dtype)
    teams.setdefault(team, []).append(parcel)

  loads, bundles = np.zeros(tuple(mesh.shape.values())), []
  for (owners, exchanged, repeated, home, _), parcels in teams.items():
    rank_of_device = _rank_of_device(mesh, owners)
    ranks = math.prod(mesh.shape[name] for name in owners)
    start = [float(loads[rank_of_device == rank].max()) for rank in range(ranks)]
    sizes = [math.prod(parcel.piece_shape(mesh.shape)) for parcel in parcels]
    counts, groups = deal([units[p] for p in parcels], [costs[p] for p in parcels], sizes, start)
    classes = []
    for parcel, its_counts in zip(parcels, counts, strict=True):
      loads += np.asarray(its_counts)[rank_of_device] * costs[parcel]
      name = '+'.join('x'.join(map(str, matrix)) for matrix in parcel.matrices)
      names[name] = names.get(name, 0) + 1
      name += f':{names[name]}' if names[name] > 1 else ''
      classes.append(MatrixClass(name, parcel, tuple(members[parcel]), its_counts, costs[parcel]))
    for group in groups:
      table = np.array([counts[i] for i in group]) * np.array([[sizes[i]] for i in group])
      offsets = np.cumsum(table, axis=0) - table
      length = _whole_tiles(int(table.sum(axis=0).max()))
      if length >= 2**31:
        raise ValueError(
          f'a device would own {length:,} numbers of {", ".join(classes[i].name for i in group)}, more than int32 '
          'counts: deal them over more devices'
        )
      bundles.append(
        Bundle(
          tuple(classes[i] for i in group),
          owners,
          exchanged,
          repeated,
          home,
          tuple(sizes[i] for i in group),
          tuple(tuple(map(int, row)) for row in offsets),
          length,
        )
      )
  return tuple(bundles), loads


def _whole_tiles(length: int) -> int:
  """Returns the length rounded up to whole tiles, where that adds no more than 1 %."""
  rounded = -(-length // TILE) * TILE
  return rounded if rounded <= 1.01 * length else length


def _rank_of_device(mesh: Mesh, owners: AxisNames) -> np.ndarray:
  """Returns the owner rank of each position in the mesh, counted over the owner axes, the first of them major."""
  positions = dict(zip(mesh.shape, np.indices(tuple(mesh.shape.values())), strict=True))
  rank = np.zeros(tuple(mesh.shape.values()), int)
  for name in owners:
    rank = rank * mesh.shape[name] + positions[name]
  return rank
