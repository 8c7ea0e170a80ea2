"""How the parcels of a bundle reach their owners and how updates come back. Called inside `jax.shard_map`.

A bundle is packed into one row of numbers for each owner, so that one collective per mesh axis moves all of it: where
the gradients of the ranks are summed a reduce-scatter, where the parcels are sharded an all-to-all, where every rank
holds them whole none. Back go an all-gather or an all-to-all.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from emopt_jax.distributed.bundles import TILE, Bundle, MatrixClass
from emopt_jax.distributed.parcels import AxisNames
from emopt_jax.distributed.plan import Plan

Leaves = Mapping[str, jax.Array]


def checks_varying(axis: str) -> bool:
  """Returns whether the surrounding `shard_map` tracks over which axes a value varies (`check_vma`)."""
  return axis in varying_axes(lax.axis_index(axis))


def varying_axes(x: jax.Array) -> frozenset[str]:
  """Returns the mesh axes over which a value varies inside a `shard_map` that tracks them."""
  return jax.typeof(x).mat.varying


def as_varying(x: jax.Array, axes: AxisNames) -> jax.Array:
  """Returns the value, marked as varying over the axes where the surrounding `shard_map` tracks them."""
  missing = tuple(axis for axis in axes if axis not in varying_axes(x) and checks_varying(axis))
  return lax.pcast(x, missing, to='varying') if missing else x


def pack(plan: Plan, bundle: Bundle, leaves: Leaves) -> jax.Array:
  """Returns the local shards of a bundle's leaves as one row for each owner, `[*owners, length]`."""
  stacks = [_stack(plan, one, leaves) for one in bundle.classes]
  dtype = jnp.result_type(*stacks)
  if all(len(set(one.counts)) == 1 for one in bundle.classes):
    rows = jnp.concatenate([stack.astype(dtype).reshape(len(bundle.offsets[0]), -1) for stack in stacks], axis=1)
    rows = jnp.concatenate([rows, _padding((rows.shape[0], bundle.length - rows.shape[1]), rows)], axis=1)
  else:
    rows = jnp.stack([_row(bundle, stacks, rank, dtype) for rank in range(len(bundle.offsets[0]))])
  return rows.reshape(*(plan.mesh.shape[axis] for axis in bundle.owners), bundle.length)


def send(bundle: Bundle, rows: jax.Array, summed: AxisNames) -> jax.Array:
  """Returns the pieces of the parcels that this rank owns, `[*ranks of the exchanged axes, length]`.

  Args:
    bundle: The bundle.
    rows: What `pack` returns.
    summed: Axes over which the rows of the ranks are added up.
  """
  for axis in bundle.owners:
    if axis in bundle.exchanged:
      rows = lax.all_to_all(rows, axis, split_axis=0, concat_axis=rows.ndim - 2, tiled=False)
    elif axis in summed:
      tiles = (-1, TILE) if bundle.length % TILE == 0 else (-1,)
      tiled = rows.reshape(*rows.shape[:-1], *tiles)
      rows = lax.psum_scatter(tiled, axis, scatter_dimension=0, tiled=False).reshape(rows.shape[1:])
    else:
      rows = lax.dynamic_index_in_dim(rows, lax.axis_index(axis), 0, keepdims=False)
  repeated = tuple(axis for axis in bundle.replicas if axis in summed)
  return lax.psum(rows, repeated) if repeated else rows


def give_back(bundle: Bundle, row: jax.Array) -> jax.Array:
  """Returns the rows of all owners, `[*owners, length]`, from what each of them owns: the way back of `send`."""
  for axis in reversed(bundle.owners):
    if axis in bundle.exchanged:
      row = lax.all_to_all(row, axis, split_axis=row.ndim - 2, concat_axis=0, tiled=False)
    elif checks_varying(axis):
      row = lax.all_gather(row, axis, axis=0, tiled=False, to='invarying')
    else:
      row = lax.all_gather(row, axis, axis=0, tiled=False)
  return row


def unpack(plan: Plan, bundle: Bundle, rows: jax.Array) -> dict[tuple[str, int], jax.Array]:
  """Returns the parcels of each leaf's parts, `[batch, size of a piece]`: the inverse of `pack`."""
  rows = rows.reshape(-1, bundle.length)
  parts = {}
  for one, offsets, size in zip(bundle.classes, bundle.offsets, bundle.piece_sizes, strict=True):
    if len(set(one.counts)) == 1 and len(set(offsets)) == 1:
      stack = rows[:, offsets[0] : offsets[0] + one.slots * size].reshape(-1, size)
    else:
      owned = [rows[rank, offsets[rank] : offsets[rank] + n * size] for rank, n in enumerate(one.counts)]
      stack = jnp.concatenate(owned).reshape(-1, size)
    start = 0
    for path, part in one.members:
      batch = plan.leaves[path].parts[part].batch
      parts[path, part] = stack[start : start + batch]
      start += batch
  return parts


def owner_rank(bundle: Bundle) -> jax.Array:
  """Returns the rank of this device among the owners of a bundle."""
  rank = jnp.zeros((), jnp.int32)
  for axis in bundle.owners:
    rank = rank * lax.axis_size(axis) + lax.axis_index(axis)
  return rank


def for_each_owned(
  bundle: Bundle, index: int, body: Callable[[jax.Array | int, jax.Array | int, tuple], tuple], carry: tuple
) -> tuple:
  """Runs `body(slot, offset, carry)` for each parcel of a class that this rank owns, and for no padding.

  The number of rounds may depend on the rank, so that `body` must not communicate: the ranks would wait for each other
  for ever.
  """
  one, size = bundle.classes[index], bundle.piece_sizes[index]
  even = len(set(one.counts)) == 1 and len(set(bundle.offsets[index])) == 1
  rank = None if even else owner_rank(bundle)
  start = bundle.offsets[index][0] if rank is None else jnp.asarray(bundle.offsets[index], jnp.int32)[rank]
  count = one.slots if rank is None else jnp.asarray(one.counts, jnp.int32)[rank]
  if rank is None and one.slots == 1:
    return body(0, start, carry)
  return lax.fori_loop(0, count, lambda slot, carry: body(slot, start + slot * size, carry), carry)


def _stack(plan: Plan, one: MatrixClass, leaves: Leaves) -> jax.Array:
  parcels = [plan.leaves[path].to_parcels(leaves[path])[part] for path, part in one.members]
  return jnp.concatenate(parcels)


def _row(bundle: Bundle, stacks: list[jax.Array], rank: int, dtype) -> jax.Array:
  pieces = []
  for one, stack in zip(bundle.classes, stacks, strict=True):
    start = sum(one.counts[:rank])
    pieces.append(stack[start : start + one.counts[rank]].astype(dtype).ravel())
  padding = bundle.length - sum(piece.size for piece in pieces)
  return jnp.concatenate([*pieces, _padding((padding,), stacks[0].astype(dtype))])


def _padding(shape: tuple[int, ...], like: jax.Array) -> jax.Array:
  """Returns zeros that can be joined with an array, of which the sum over some mesh axes may be due."""
  zeros, axes = jnp.zeros(shape, like.dtype), tuple(sorted(jax.typeof(like).mat.unreduced))
  return lax.pcast(lax.pcast(zeros, axes, to='varying'), axes, to='unreduced') if axes else zeros
