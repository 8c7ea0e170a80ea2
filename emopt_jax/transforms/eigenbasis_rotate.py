"""The transform that runs any elementwise optimizer in the eigenbasis of the covariance factors."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from emopt_jax.batching import map_by_shape
from emopt_jax.linalg.eigenbasis import (
  Arrange,
  Eigenbases,
  Eigenbasis,
  Refresh,
  move,
  qr_refresh,
  rotate,
  rotate_back,
  select,
  sort_by_magnitude,
  take_columns,
)
from emopt_jax.linalg.factors import Factors
from emopt_jax.linalg.products import all_finite
from emopt_jax.matrices import Axes, from_stacks, single_matrices, stack_shapes, to_stacks
from emopt_jax.transforms.covariance import kronecker_covariance
from emopt_jax.transforms.hyperparameters import check_at_least_one
from emopt_jax.transforms.keyed_state import keyed_by_path
from emopt_jax.transforms.moments import (
  Moments,
  check_moment_names,
  consistent_moments,
  keep_moments,
  moment_stacks,
  with_moment_stacks,
)
from emopt_jax.transforms.staggered import staggered


class EigenbasisRotateState(NamedTuple):
  """State of `eigenbasis_rotate`.

  Attributes:
    count: Number of updates, int32.
    covariance: State of the covariance transformation.
    eigenbasis: Per path, the `Eigenbases` of the stack.
    rejected: Per path, how many refreshes of each matrix were not finite, int32 `[batch]`.
    inner: State of the inner transformation, whose moments are in the eigenbasis, in the dtype that it asks for.
  """

  count: jax.Array
  covariance: PyTree
  eigenbasis: Any
  rejected: Any
  inner: PyTree


class _Frame(NamedTuple):
  """What a refresh of one stack changes together: its bases and the moments that live in them."""

  bases: Eigenbases
  moments: Moments
  rejected: jax.Array


def eigenbasis_rotate(
  inner: optax.GradientTransformation,
  *,
  covariance: optax.GradientTransformationExtraArgs | None = None,
  refresh: Refresh = qr_refresh,
  arrange: Arrange = sort_by_magnitude,
  refresh_every: ArrayLike = 1,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Runs an elementwise transformation in the eigenbasis of the covariance factors: Q_L f(Q_L^T G Q_R) Q_R^T.

  One step: the factors take in the gradient G; the bases are refreshed from them; the inner state moves to the new
  bases (fields named `mu` are rotated; fields named `nu` go with their columns, and are raised where they have seen
  nothing); the rotated gradient goes to `inner`, and its update is rotated back. Entries of a rotated matrix below the
  rounding error of the rotation are zero.

  A matrix whose gradient is not finite, or so large that its squares would overflow, gets a zero update, and its
  factors, bases and moments stay as they were. A refresh that is not finite keeps the old basis.

  Args:
    inner: Elementwise optax transformation, `optax.scale_by_adam(...)` for SOAP.
    covariance: `kronecker_covariance` (the default) or `kl_covariance`, with the same axes. A side for which it keeps
      no factor is not rotated.
    refresh: Function `(factor, eigenbasis) -> Eigenbasis`: `qr_refresh`, `eigh_refresh` or your own.
    arrange: Function of the refreshed `Eigenbasis` that returns it with its columns in another order, and the order:
      `sort_by_magnitude` or `sort_descending`.
    refresh_every: Steps between two refreshes of a matrix, staggered over the matrices so that no step pays for all.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If refresh_every is below 1; at init, if a leaf is no matrix, if the covariance has other axes, or if
      `inner` keeps a moment of another name.

  Example:
    >>> soap = eigenbasis_rotate(optax.scale_by_adam(b2=0.95, eps=1e-15))
    >>> gradient = {'kernel': jnp.eye(2)}
    >>> soap.update(gradient, soap.init(gradient))[0]['kernel'].round(3)
    Array([[1., 0.],
           [0., 1.]], dtype=float32)

  References:
    Vyas et al., SOAP, arXiv 2409.11321; Lin et al., KL-Shampoo, arXiv 2509.03378.
  """
  check_at_least_one('refresh_every', refresh_every)
  if covariance is None:
    covariance = kronecker_covariance(axes=axes)
  inner_update = optax.with_extra_args_support(inner).update

  def init(params):
    shapes = stack_shapes(params, axes)
    covariance_state: Any = covariance.init(params)
    if shapes:
      _check_factors(shapes, covariance_state.factors)
    inner_state = inner.init(jax.tree.map(_widen, params))
    check_moment_names(params, inner_state)
    return EigenbasisRotateState(
      jnp.zeros((), jnp.int32),
      covariance_state,
      keyed_by_path({path: _identity_bases(covariance_state.factors[path]) for path in shapes}),
      keyed_by_path({path: jnp.zeros(shape.shape[:1], jnp.int32) for path, shape in shapes.items()}),
      inner_state,
    )

  def update(updates, state, params=None, **extra_args):
    gradients = to_stacks(updates, axes)
    covariance_state: Any = covariance.update(updates, state.covariance, params, eigenbasis=state.eigenbasis)[1]

    # The covariance knows which gradients are finite and leave room for their squares.
    finite = {path: covariance_state.skipped[path] == state.covariance.skipped[path] for path in gradients}
    moments = moment_stacks(updates, state.inner, axes)
    before = {path: _Frame(state.eigenbasis[path], moments[path], state.rejected[path]) for path in gradients}
    single = single_matrices(updates, axes)
    # Counted from the same place at every step, and in the order in which the batches are traced.
    firsts = itertools.count()

    def move(gradient: jax.Array, factors: Factors, finite: jax.Array, before: _Frame) -> tuple[_Frame, jax.Array]:
      turn = functools.partial(_refreshed, refresh, arrange)
      after = staggered(turn, state.count + next(firsts), refresh_every)(before, factors, finite)
      rotated = rotate(jnp.where(finite[:, None, None], gradient, 0), after.bases)
      return after._replace(moments=consistent_moments(before.moments, after.moments, rotated)), rotated

    moved = map_by_shape(move, single, gradients, covariance_state.factors, finite, before)
    frames, rotated = ({path: result[i] for path, result in moved.items()} for i in (0, 1))
    bases = {path: frame.bases for path, frame in frames.items()}
    inner_state = with_moment_stacks(updates, state.inner, axes, {path: each.moments for path, each in frames.items()})
    wide_updates = from_stacks(rotated, jax.tree.map(_widen, updates), axes)
    directions, new_inner_state = inner_update(wide_updates, inner_state, params, **extra_args)
    new_inner_state = keep_moments(updates, new_inner_state, inner_state, axes, finite)

    def move_back(direction: jax.Array, bases: Eigenbases, finite: jax.Array) -> jax.Array:
      return jnp.where(finite[:, None, None], rotate_back(direction, bases), 0)

    outputs = map_by_shape(move_back, single, to_stacks(directions, axes), bases, finite)
    return from_stacks(outputs, updates, axes), EigenbasisRotateState(
      jnp.asarray(optax.safe_increment(state.count)),
      covariance_state,
      keyed_by_path(bases),
      keyed_by_path({path: frame.rejected for path, frame in frames.items()}),
      new_inner_state,
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _widen(leaf):
  """Returns the leaf in float32 or wider: moments and rotations need the digits."""
  dtype = jnp.promote_types(leaf.dtype, jnp.float32)
  if leaf.dtype == dtype:
    return leaf
  return jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)


def _identity_bases(factors: Factors) -> Eigenbases:
  def identity(factor: jax.Array | None) -> Eigenbasis | None:
    if factor is None:
      return None
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return Eigenbasis(eye, jnp.zeros(factor.shape[:-1], factor.dtype))

  return Eigenbases(identity(factors.left), identity(factors.right))


def _refreshed(refresh: Refresh, arrange: Arrange, before: _Frame, factors: Factors, finite: jax.Array) -> _Frame:
  """Returns the refreshed bases and the moments moved along."""
  sides, orders, rejected = [], [], before.rejected
  for factor, old in zip(factors, before.bases, strict=True):
    if factor is None or old is None:
      sides.append(None)
      orders.append(None)
      continue
    new = refresh(factor, old)
    valid = all_finite(new.vectors) & all_finite(new.values)
    rejected = rejected + (finite & ~valid)
    # An old basis is arranged already, so that one which is kept keeps the order of its moments too.
    basis, order = arrange(select(valid & finite, new, old))
    sides.append(basis)
    orders.append(order)
  bases = Eigenbases(*sides)

  first = [
    jnp.where(finite[:, None, None], move(moment, before.bases, bases), moment) for moment in before.moments.first
  ]
  second = [_permute(moment, *orders) for moment in before.moments.second]
  return _Frame(bases, Moments(first, second), rejected)


def _permute(moment: jax.Array, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
  if rows is not None:
    moment = jnp.take_along_axis(moment, _of_side(rows)[:, :, None], axis=1)
  if columns is not None:
    moment = take_columns(moment, _of_side(columns))
  return moment


def _of_side(order: jax.Array) -> jax.Array:
  """Returns an order of a side, from those inside its blocks where it is cut into blocks."""
  if order.ndim == 2:
    return order
  batch, blocks, size = order.shape
  return (order + size * jnp.arange(blocks)[:, None]).reshape(batch, blocks * size)


def _check_factors(shapes: dict[str, jax.ShapeDtypeStruct], factors: dict[str, Factors]) -> None:
  for path, shape in shapes.items():
    sides = factors.get(path, (None, None))
    sizes = [None if side is None else (side.shape[0], math.prod(side.shape[1:-1])) for side in sides]
    batch, m, n = shape.shape
    if path not in factors or sizes[0] not in (None, (batch, m)) or sizes[1] not in (None, (batch, n)):
      raise ValueError(
        f"leaf '{path}' is {batch} matrices of shape ({m}, {n}), for which the covariance keeps no fitting factors: "
        'pass the same axes to eigenbasis_rotate and to its covariance'
      )
