"""The ways into `layerwise`: inside the caller's `shard_map`, or in plain `jit`, where it opens one of its own.

Entry A, inside `shard_map`: gradients are local, of each rank's own batch, and are averaged. Entry B, plain `jit`:
gradients are those of the whole batch. Entry C, experimental, `jit` on an Explicit mesh: gradients are unreduced, and
are summed.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from emopt_jax.distributed.parcels import AxisNames, sharding_axes
from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.transport import checks_varying, varying_axes
from emopt_jax.matrices import leaf_path
from emopt_jax.transforms.clip_by_finite_norm import finite_squares, norm_dtype


def inside_shard_map(plan: Plan) -> bool:
  """Returns whether the caller is inside a `shard_map` over the plan's axes, or raises where only some are."""
  manual = jax.sharding.get_abstract_mesh().manual_axes
  missing = [axis for axis in plan.axes if axis not in manual]
  if manual and missing:
    raise ValueError(
      f"inside a shard_map that is manual over {tuple(manual)}, but the plan communicates over '{missing[0]}' too: "
      f'give shard_map axis_names={set(plan.axes)}, or call the optimizer outside of it'
    )
  return bool(manual)


def data_axes(plan: Plan, path: str) -> AxisNames:
  """Returns the data-parallel axes over which a leaf is whole, so that the ranks' gradients of it are to be reduced."""
  sharded = plan.sharded_axes(path)
  return tuple(axis for axis in plan.axis + plan.replicas if axis not in sharded)


def select(plan: Plan, tree: Any, *, inside: bool, what: str) -> dict[str, jax.Array]:
  """Returns the leaves of matrices by path, or raises for a tree of other parameters than the plan's."""
  found = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = leaf_path(keys)
    known = plan.leaf(path)
    if known is None:
      raise ValueError(
        f"leaf '{path}' of shape {leaf.shape} of the {what} is not in the plan: make the plan from these parameters"
      )
    expected = shard_shape(plan, path) if inside else known.shape
    if leaf.shape != expected:
      raise ValueError(
        f"leaf '{path}' of the {what} has shape {leaf.shape}, the plan was made for {expected}"
        + (f', the shard of {known.shape} by {known.spec}' if inside else '')
        + ': make the plan from these parameters and their specs'
      )
    if path in plan.leaves:
      found[path] = leaf
  missing = [path for path in plan.leaves if path not in found]
  if missing and what == 'gradients':
    raise ValueError(_without_gradient(plan, missing[0]))
  if missing:
    raise ValueError(f"leaf '{missing[0]}' of the plan is not in the {what}: make the plan from these parameters")
  return found


def check_complete(plan: Plan, gradients: Any, params: Any) -> None:
  """Raises for a leaf that is no matrix, not masked, and has a parameter but no gradient."""

  def paths(tree) -> set[str]:
    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    return {leaf_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=masked)}

  known = set(plan.others) if params is None else paths(params) & set(plan.others)
  for path in sorted(known - paths(gradients)):
    raise ValueError(_without_gradient(plan, path))


def _without_gradient(plan: Plan, path: str) -> str:
  leaf = plan.leaves.get(path) or plan.others[path]
  return (
    f"leaf '{path}' of shape {leaf.shape} has no gradient: give zeros, or freeze it with optax.partition and a plan "
    'that is made without it'
  )


def shard_shape(plan: Plan, path: str) -> tuple[int, ...]:
  """Returns the shape of one shard of a leaf."""
  leaf = plan.leaves.get(path) or plan.others[path]
  per_dimension = sharding_axes(path, leaf.shape, leaf.spec, plan.mesh.shape)
  shards = [math.prod(plan.mesh.shape[axis] for axis in axes) for axes in per_dimension]
  return tuple(size // number for size, number in zip(leaf.shape, shards, strict=True))


def reduce_gradients(plan: Plan, gradients: Any, *, inside: bool, matrices: bool) -> Any:
  """Returns the gradients, all of them checked, reduced over the data-parallel ranks where they are no matrices.

  Args:
    plan: The plan.
    gradients: Each rank's own inside `shard_map`, unreduced on an Explicit mesh, whole otherwise.
    inside: Whether the caller is inside `shard_map`.
    matrices: Whether those of matrices are reduced too.
  """

  def reduce(keys, gradient):
    path = leaf_path(keys)
    kept = path in plan.leaves and not matrices
    if inside:
      _check_local(plan, path, gradient)
      axes = () if kept else data_axes(plan, path)
      return lax.pmean(gradient, axes) if axes else gradient
    if kept or not unreduced_axes(gradient):
      return gradient
    return placed(plan, gradient, plan.leaf(path).spec)  # pyright: ignore[reportOptionalMemberAccess]

  return jax.tree_util.tree_map_with_path(reduce, gradients)


def square_of_others(plan: Plan, gradients: Any, *, inside: bool) -> jax.Array:
  """Returns the `finite_squares` of all reduced gradients that are no matrices, over all ranks."""
  dtype = norm_dtype(jax.tree.leaves(gradients))
  total = jnp.zeros(2, dtype)
  for keys, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    if (path := leaf_path(keys)) not in plan.leaves:
      squares = finite_squares(gradient, dtype)
      sharded = plan.sharded_axes(path) if inside else ()
      total = total + (lax.psum(squares, sharded) if sharded else squares)
  return total


def check_averaged(plan: Plan, gradients: Any) -> None:
  """Raises where a wrapper inside `shard_map` gave gradients that vary where their parameters do not."""
  if checks_varying(plan.axis[0]):
    for keys, gradient in jax.tree_util.tree_leaves_with_path(gradients):
      _check_strays(plan, leaf_path(keys), gradient, ())


def _check_local(plan: Plan, path: str, gradient: jax.Array) -> None:
  """Raises for a gradient inside `shard_map` that is reduced already, or varies where its parameter does not."""
  if not checks_varying(plan.axis[0]):
    return
  expected, varying = data_axes(plan, path), varying_axes(gradient)
  reduced = [axis for axis in expected if axis not in varying]
  if reduced:
    raise ValueError(
      f"the gradient of leaf '{path}' of shape {gradient.shape} is reduced over '{reduced[0]}' already, and may be too "
      'large by the number of ranks: differentiate with distributed.value_and_grad, or mark the parameters with '
      f"jax.lax.pcast(params, '{reduced[0]}', to='varying') before jax.grad"
    )
  _check_strays(plan, path, gradient, expected)


def _check_strays(plan: Plan, path: str, gradient: jax.Array, expected: AxisNames) -> None:
  stray = sorted(varying_axes(gradient) - {*plan.sharded_axes(path), *expected})
  if stray:
    raise ValueError(
      f"the gradient of leaf '{path}' of shape {gradient.shape} varies over '{stray[0]}', over which the plan holds it "
      'replicated: name the axis in the plan (axis, replicas or specs), or reduce the gradient over it'
    )


def unreduced_axes(*gradients: jax.Array) -> AxisNames:
  """Returns the axes of an Explicit mesh over which gradients still have to be summed."""
  specs = [jax.typeof(gradient).sharding.spec for gradient in gradients]
  return tuple(sorted({axis for spec in specs for axis in spec.unreduced}))


def gradient_spec(spec: PartitionSpec, gradient: jax.Array) -> PartitionSpec:
  """Returns the spec of a parameter with what its gradient still has to be summed over."""
  unreduced = unreduced_axes(gradient)
  return PartitionSpec(*spec, unreduced=frozenset(unreduced)) if unreduced else spec


def placed(plan: Plan, x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Returns the array in the sharding that `shard_map` is told of; on an Auto mesh the compiler sees to that."""
  if AxisType.Explicit in plan.mesh.axis_types:
    return jax.reshard(x, NamedSharding(plan.mesh, spec))
  return x


def on_mesh(plan: Plan, function: Callable[..., Any], arguments: tuple, in_specs: tuple, out_specs: Any) -> Any:
  """Returns what the function gives inside a `shard_map` over the plan's mesh.

  The function gathers all that is declared replicated, so that nothing is left for `check_vma` to check, which would
  refuse optimizers whose loops start from constants; only unreduced inputs cannot do without it.
  """
  is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
  unreduced = any(getattr(spec, 'unreduced', None) for spec in jax.tree.leaves(in_specs, is_leaf=is_spec))
  mapped = jax.shard_map(function, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=unreduced)
  try:
    return mapped(*arguments)
  except NotImplementedError as error:
    if 'Closing over inputs to shard_map' not in str(error):
      raise
    raise ValueError(
      'on an Explicit mesh the optimizer of matrices cannot close over traced values, as it does with '
      'optax.inject_hyperparams around layerwise: write layerwise(optax.inject_hyperparams(muon)(0.02), ...), make the '
      'mesh of Auto axes, or call the optimizer inside shard_map'
    ) from error
