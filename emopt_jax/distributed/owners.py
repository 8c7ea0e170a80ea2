"""What an owner does with its matrices. Called inside `jax.shard_map`."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import PyTree

from emopt_jax.distributed.bundles import Bundle, unit_shapes
from emopt_jax.distributed.parcels import AxisNames, UnitTree
from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.transport import as_varying, for_each_owned, owner_rank, pack, send
from emopt_jax.transforms.clip_by_finite_norm import finite_squares


def init_owned(
  inner: optax.GradientTransformation, plan: Plan, matrices: Mapping[str, jax.Array] | None = None
) -> dict[str, PyTree]:
  """Returns the optimizer's first states of this rank's matrices, by class, from the parameters or from zeros."""
  classes = {}
  for bundle in plan.bundles:
    row = None if matrices is None else send(bundle, pack(plan, bundle, matrices), ())
    for index, one in enumerate(bundle.classes):

      def init(slot, row=row, bundle=bundle, index=index, one=one):
        if row is None:
          return inner.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), unit_shapes(one.parcel)))
        start = jnp.asarray(bundle.offsets[index], jnp.int32)[owner_rank(bundle)]
        return inner.init(_matrices_at(plan, bundle, index, row, start + slot * bundle.piece_sizes[index]))

      states = jax.vmap(init)(jnp.arange(one.slots))
      classes[one.name] = jax.tree.map(functools.partial(as_varying, axes=bundle.state_axes), states)
  return classes


def reduced_row(
  plan: Plan, bundle: Bundle, gradients: Mapping[str, jax.Array], summed: AxisNames, *, average: bool
) -> jax.Array:
  """Returns the gradients of this rank's matrices, summed or averaged over the axes named."""
  row = send(bundle, pack(plan, bundle, gradients), summed)
  reduced = [axis for axis in bundle.owners + bundle.replicas if axis in summed and axis not in bundle.exchanged]
  ranks = math.prod(plan.mesh.shape[axis] for axis in reduced)
  return row / ranks if average and ranks > 1 else row


def square_of_owned(plan: Plan, rows: list[jax.Array], square: jax.Array) -> jax.Array:
  """Returns the squares of all gradients of all ranks, as `finite_squares` gives them.

  Args:
    plan: The plan.
    rows: The reduced gradients of this rank's matrices.
    square: Squares of all gradients that are no matrices.
  """
  own: dict[AxisNames, jax.Array] = {}
  for bundle, row in zip(plan.bundles, rows, strict=True):
    squares = finite_squares(row, square.dtype)
    own[bundle.state_axes] = own[bundle.state_axes] + squares if bundle.state_axes in own else squares
  for axes, squares in own.items():
    square = square + (lax.psum(squares, axes) if axes else squares)
  return square


def update_owned(
  update: Callable[..., Any],
  plan: Plan,
  bundle: Bundle,
  row: jax.Array,
  params: jax.Array | None,
  classes: Mapping[str, PyTree],
) -> tuple[jax.Array, dict[str, PyTree]]:
  """Updates this rank's matrices of a bundle, one after the other; returns the updates as a row, and the new states."""
  out = as_varying(jnp.zeros_like(row), bundle.state_axes)
  new_classes = {}
  for index, one in enumerate(bundle.classes):

    def body(slot, offset, carry, index=index, one=one):
      states, out = carry
      gradient = _matrices_at(plan, bundle, index, row, offset)
      owned_params = None if params is None else _matrices_at(plan, bundle, index, params, offset)
      state = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False), states)
      directions, new = update(gradient, state, owned_params)
      pieces = one.parcel.take_apart(directions, bundle.exchanged, plan.mesh.shape)
      out = lax.dynamic_update_slice_in_dim(out, pieces.astype(out.dtype), offset, axis=out.ndim - 1)

      def put(leaf, value):
        return lax.dynamic_update_index_in_dim(leaf, as_varying(value, bundle.state_axes), slot, 0)

      return jax.tree.map(put, states, new), out

    new_classes[one.name], out = for_each_owned(bundle, index, body, (classes[one.name], out))
  return out, new_classes


def _matrices_at(plan: Plan, bundle: Bundle, index: int, row: jax.Array, offset: jax.Array | int) -> UnitTree:
  """Returns the matrices of the parcel of a class that starts at an offset of this rank's row."""
  pieces = lax.dynamic_slice_in_dim(row, offset, bundle.piece_sizes[index], axis=row.ndim - 1)
  return bundle.classes[index].parcel.assemble(pieces, bundle.exchanged, plan.mesh.shape)
