"""What travels between ranks: the matrices of a leaf as parcels, and a parcel as the matrices it holds.

A parcel is one matrix, or the matrices of a split leaf whose split axis is sharded: their shards hold parts of several
matrices, so that the parcel travels whole and is split where it arrives. Inside `jax.shard_map` a leaf is a local
shard, and so is a parcel until its owner has put the pieces of all shards together.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from emopt_jax.matrices import MatrixAxes

AxisNames = tuple[str, ...]
# What an optimizer sees of a parcel: its matrices as `{'matrix': {'0': ..., '1': ...}}`. Two keys, so that in its state
# moments, which have this structure, are told from what is kept as a stack under the one key 'matrix/0'.
UnitTree = dict[str, dict[str, Any]]
MATRIX = 'matrix'


@dataclasses.dataclass(frozen=True)
class Parcel:
  """The form of a parcel; parcels of one form make a class.

  Attributes:
    shape: Whole shape: the input dimensions of the leaf, then its output dimensions.
    inputs: How many of the dimensions are inputs.
    split: Dimension and sizes of the matrices inside, or None for one matrix.
    sharded: Per dimension, the mesh axes that shard it, major first.
    home: Mesh axes that shard the leaf's batch: parcels stay within them.
    dtype: Name of the parameter's dtype.
  """

  shape: tuple[int, ...]
  inputs: int
  split: tuple[int, tuple[int, ...]] | None
  sharded: tuple[AxisNames, ...]
  home: AxisNames
  dtype: str

  @property
  def matrices(self) -> tuple[tuple[int, int], ...]:
    """Rows and columns of each matrix inside."""
    dimension, sizes = self.split or (0, (self.shape[0],))
    shapes = [self._block_shape(dimension, size) for size in sizes]
    return tuple((math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])) for shape in shapes)

  def piece_shape(self, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one shard."""
    return tuple(
      size // math.prod(mesh_shape[axis] for axis in axes) for size, axes in zip(self.shape, self.sharded, strict=True)
    )

  def assemble(self, pieces: jax.Array, exchanged: AxisNames, mesh_shape: Mapping[str, int]) -> UnitTree:
    """Returns the matrices of a parcel from its pieces `[*ranks of the exchanged axes, size of a piece]`."""
    pieces = pieces.reshape(*pieces.shape[:-1], *self.piece_shape(mesh_shape))
    whole = pieces.transpose(self._order(exchanged)).reshape(self.shape)
    dimension, sizes = self.split or (0, (self.shape[0],))
    blocks = [whole] if len(sizes) == 1 else jnp.split(whole, _starts(sizes)[1:], axis=dimension)
    return unit_tree([block.reshape(matrix) for block, matrix in zip(blocks, self.matrices, strict=True)])

  def take_apart(self, matrices: UnitTree, exchanged: AxisNames, mesh_shape: Mapping[str, int]) -> jax.Array:
    """Returns the pieces of a parcel: the inverse of `assemble`."""
    dimension, sizes = self.split or (0, (self.shape[0],))
    blocks = [matrices[MATRIX][str(i)].reshape(self._block_shape(dimension, size)) for i, size in enumerate(sizes)]
    whole = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=dimension)
    expanded = []
    for size, axes in zip(self.piece_shape(mesh_shape), self.sharded, strict=True):
      expanded += [mesh_shape[axis] for axis in axes] + [size]
    order = self._order(exchanged)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    ranks = [mesh_shape[axis] for axis in exchanged]
    return whole.reshape(expanded).transpose(inverse).reshape(*ranks, -1)

  def _block_shape(self, dimension: int, size: int) -> tuple[int, ...]:
    return (*self.shape[:dimension], size, *self.shape[dimension + 1 :])

  def _order(self, exchanged: AxisNames) -> list[int]:
    """Returns where each dimension of the whole comes from: its shards, major first, and then the piece's own."""
    order = []
    for dimension, axes in enumerate(self.sharded):
      order += [exchanged.index(axis) for axis in axes] + [len(exchanged) + dimension]
    return order


class Part(NamedTuple):
  """A slice of a leaf along its split axis, or the whole leaf, that makes parcels of one form.

  Attributes:
    parcel: The form.
    start: Where the slice starts.
    size: How long it is.
    batch: How many parcels one shard of the leaf gives.
  """

  parcel: Parcel
  start: int
  size: int
  batch: int


@dataclasses.dataclass(frozen=True)
class Leaf:
  """How one leaf makes parcels.

  Attributes:
    path: Its path.
    shape: Its whole shape.
    spec: How it is sharded.
    axes: Its axes, checked.
    parts: Its parts.
  """

  path: str
  shape: tuple[int, ...]
  spec: PartitionSpec
  axes: MatrixAxes
  parts: tuple[Part, ...]

  def to_parcels(self, shard: jax.Array) -> list[jax.Array]:
    """Returns the parcels of each part, `[batch, size of a piece]`."""
    if len(self.parts) == 1:
      slices = [shard]
    else:
      axis = self.axes.split[0]  # pyright: ignore[reportOptionalSubscript]
      slices = [jax.lax.slice_in_dim(shard, part.start, part.start + part.size, axis=axis) for part in self.parts]
    return [
      block.transpose(self._order).reshape(part.batch, -1) for block, part in zip(slices, self.parts, strict=True)
    ]

  def from_parcels(self, parcels: list[jax.Array], shard_shape: tuple[int, ...]) -> jax.Array:
    """Returns the shard of the leaf: the inverse of `to_parcels`."""
    axis = self.axes.split[0] if self.axes.split else 0
    inverse = sorted(range(len(shard_shape)), key=self._order.__getitem__)
    blocks = []
    for block, part in zip(parcels, self.parts, strict=True):
      shape = list(shard_shape)
      if len(self.parts) > 1:
        shape[axis] = part.size
      blocks.append(block.reshape([shape[i] for i in self._order]).transpose(inverse))
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=axis)

  @property
  def batch_axes(self) -> tuple[int, ...]:
    """Dimensions that are neither inputs nor outputs."""
    return tuple(i for i in range(len(self.shape)) if i not in (*self.axes.inputs, *self.axes.outputs))  # pyright: ignore

  @property
  def _order(self) -> tuple[int, ...]:
    return self.batch_axes + tuple(self.axes.inputs) + tuple(self.axes.outputs)  # pyright: ignore


def make_leaf(
  path: str,
  leaf: jax.Array | jax.ShapeDtypeStruct,
  axes: MatrixAxes,
  spec: PartitionSpec,
  mesh_shape: Mapping[str, int],
) -> Leaf:
  """Returns how a leaf makes parcels.

  Args:
    path: Path of the leaf.
    leaf: Anything with a shape and a dtype.
    axes: Its axes, as `resolve_axes` returns them.
    spec: How it is sharded.
    mesh_shape: Sizes of the mesh axes.

  Raises:
    ValueError: If the mesh lacks an axis of the spec, or an axis does not divide its dimension.
  """
  per_dimension = sharding_axes(path, leaf.shape, spec, mesh_shape)
  inputs, outputs = tuple(axes.inputs), tuple(axes.outputs)  # pyright: ignore[reportArgumentType]
  kept = inputs + outputs
  batch_axes = [i for i in range(len(leaf.shape)) if i not in kept]
  home = tuple(axis for i in batch_axes for axis in per_dimension[i])
  batch = math.prod(leaf.shape[i] // math.prod(mesh_shape[axis] for axis in per_dimension[i]) for i in batch_axes)
  shape = tuple(leaf.shape[i] for i in kept)
  sharded = tuple(per_dimension[i] for i in kept)
  split = (kept.index(axes.split[0]), axes.split[1]) if axes.split else None

  def part(start: int, size: int, split) -> Part:
    part_shape = shape if axes.split is None else (*shape[:axis], size, *shape[axis + 1 :])
    parcel = Parcel(part_shape, len(inputs), split, sharded, home, jnp.dtype(leaf.dtype).name)
    return Part(parcel, start, size, batch)

  axis = split[0] if split else 0
  if split is None or sharded[axis]:
    parts = (part(0, shape[axis], split),)
  else:
    parts = tuple(part(start, size, None) for start, size in zip(_starts(split[1]), split[1], strict=True))
  return Leaf(path, tuple(leaf.shape), spec, axes, parts)


def sharding_axes(
  path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh_shape: Mapping[str, int]
) -> tuple[AxisNames, ...]:
  """Returns, for each dimension of a leaf, the mesh axes that shard it, or raises for a spec that does not fit."""
  where = f"leaf '{path}' of shape {tuple(shape)}"
  if len(spec) > len(shape):
    raise ValueError(f'{where}: its spec {spec} has more entries than it has dimensions; shorten the spec')
  entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
  entries += [()] * (len(shape) - len(entries))
  for size, axes in zip(shape, entries, strict=True):
    for axis in axes:
      if axis not in mesh_shape:
        raise ValueError(f"{where}: its spec {spec} names the axis '{axis}', the mesh has {tuple(mesh_shape)}")
    if size % math.prod(mesh_shape[axis] for axis in axes):
      raise ValueError(
        f'{where}: a dimension of {size} cannot be sharded evenly over {axes}; leave it whole or change its size'
      )
  return tuple(entries)


def unit_tree(matrices: Sequence[Any]) -> UnitTree:
  """Returns the matrices of a parcel as the parameters of an optimizer."""
  return {MATRIX: {str(i): matrix for i, matrix in enumerate(matrices)}}


def _starts(sizes: tuple[int, ...]) -> list[int]:
  return [sum(sizes[:i]) for i in range(len(sizes))]
