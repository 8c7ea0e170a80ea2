"""State as a checkpoint holds it, per matrix and without owners, and as the mesh holds it.

The logical state is that of the undistributed optimizer, so that a run goes on with another number of devices, another
plan, or without a mesh at all.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from emopt_jax.distributed.addresses import MEND, Counterpart, counterparts_of
from emopt_jax.distributed.layerwise import LayerwiseState
from emopt_jax.distributed.matrix_part import matrix_part
from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.state_specs import logical_specs, state_specs
from emopt_jax.matrices import from_stacks, leaf_path, to_stacks


def logical_state(state: PyTree, plan: Plan, like: PyTree) -> PyTree:
  """Returns a state that holds a `LayerwiseState` as the state that the undistributed optimizer would have.

  Args:
    state: State of `layerwise`, alone or anywhere in a chain or a train state.
    plan: The plan it was made by.
    like: Abstract state of the undistributed optimizer, `jax.eval_shape(optimizer.init, params)`: the inner optimizer
      with the plan's `axes`, and `route(inner, others)` where there are others.

  Returns:
    The state in the structure of `like`, sharded as `logical_shardings` says: no device holds all of it.

  Raises:
    ValueError: If `like` has a leaf that this state lacks.

  Example:
    >>> import emopt_jax
    >>> from emopt_jax.distributed import layerwise, plan_layerwise
    >>> params, optimizer = {'kernel': jnp.ones((4, 8))}, emopt_jax.muon(0.02)
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> state = layerwise(optimizer, plan).init(params)
    >>> logical_state(state, plan, jax.eval_shape(optimizer.init, params))[0].mu['kernel'].shape
    (4, 8)
  """
  leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, LayerwiseState))
  targets = structure.flatten_up_to(like)
  pairs = zip(leaves, targets, strict=True)
  return structure.unflatten(
    [_to_logical(leaf, plan, target) if isinstance(leaf, LayerwiseState) else leaf for leaf, target in pairs]
  )


def physical_state(state: PyTree, plan: Plan, like: PyTree) -> PyTree:
  """Returns a logical state as the state of `layerwise` on a plan: the inverse of `logical_state`.

  Args:
    state: What `logical_state` returned, or the state of the undistributed optimizer.
    plan: The plan to go on with.
    like: Abstract state of the distributed optimizer, `jax.eval_shape(optimizer.init, params)`.

  Returns:
    The state in the structure of `like`, sharded over the owners.

  Raises:
    ValueError: If the state is of other parameters or of another optimizer.

  Example:
    >>> import emopt_jax
    >>> from emopt_jax.distributed import layerwise, plan_layerwise
    >>> params, inner = {'kernel': jnp.ones((4, 8))}, emopt_jax.muon(0.02)
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> like = jax.eval_shape(layerwise(inner, plan).init, params)
    >>> state = physical_state(inner.init(params), plan, like)
  """
  targets, structure = jax.tree.flatten(like, is_leaf=lambda node: isinstance(node, LayerwiseState))
  leaves = structure.flatten_up_to(state)
  pairs = zip(leaves, targets, strict=True)
  return structure.unflatten(
    [_to_physical(leaf, plan, target) if isinstance(target, LayerwiseState) else leaf for leaf, target in pairs]
  )


def _to_logical(state: LayerwiseState, plan: Plan, like: PyTree) -> PyTree:
  target, _, put = matrix_part(plan, state.classes, like)
  classes = jax.tree.map(jax.device_put, state.classes, _shardings(state_specs(state, plan).classes, plan))
  shardings = _shardings(logical_specs(target, plan), plan)
  return put(jax.jit(functools.partial(_gather, plan, target), out_shardings=shardings)(classes), state.others)


def _to_physical(state: PyTree, plan: Plan, like: LayerwiseState) -> LayerwiseState:
  matrices, others, _ = matrix_part(plan, like.classes, state)
  specs = state_specs(like, plan)
  matrices = jax.tree.map(jax.device_put, matrices, _shardings(logical_specs(matrices, plan), plan))
  deal = functools.partial(_deal, plan, like.classes)
  classes = jax.jit(deal, out_shardings=_shardings(specs.classes, plan))(matrices)
  if others is None:
    # Without optimizer of its own, the state of the other leaves holds no arrays.
    others = like.others
  placed = LayerwiseState(classes, others)
  return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(plan.mesh, spec)), placed, specs)


def _gather(plan: Plan, like: PyTree, classes: dict[str, PyTree]) -> PyTree:
  """Returns the state in the structure of the undistributed optimizer's."""
  found: dict[str, Any] = {}
  parts: dict[str, list[tuple[Counterpart, jax.Array]]] = {}
  for name, tree in classes.items():
    for keys, stacked in jax.tree_util.tree_leaves_with_path(tree):
      counterparts = counterparts_of(plan, name, keys, stacked.shape[1:])
      if not counterparts:
        # Counts are those of any matrix; a row of a rank that owns none is padding, whose counts stand still.
        one = next(one for one in plan.classes if one.name == name)
        owner = next(rank for rank, count in enumerate(one.counts) if count)
        found.setdefault(leaf_path(keys), stacked[owner * one.slots])
      values = _exchange(plan, name, stacked) if counterparts else stacked
      for one in counterparts:
        # A stack has a batch of one in the state of a parcel.
        matrices = values[one.block.rows] if one.by_axes else values[one.block.rows][:, 0]
        parts.setdefault(one.path, []).append((one, matrices))

  def leaf_of(keys, target):
    path = leaf_path(keys)
    if path in parts:
      one = parts[path][0][0]
      stacks: dict[str, list[jax.Array]] = {}
      for part, matrices in sorted(parts[path], key=lambda pair: pair[0].block.start):
        stacks.setdefault(part.block.stack, []).append(matrices)
      joined = {stack: jnp.concatenate(pieces) for stack, pieces in stacks.items()}
      if not one.by_axes:
        value = joined[one.block.stack]
      elif target.shape != plan.leaves[one.parameter].shape:
        value = None
      else:
        value = from_stacks(joined, {one.parameter: target}, plan.leaves[one.parameter].axes)[one.parameter]
    else:
      # Where there is no matrix there is no count of its steps either.
      value = found.get(path) if plan.leaves else jnp.zeros(target.shape)
    if value is None or value.shape != target.shape:
      raise ValueError(f"leaf '{path}' of shape {target.shape}: the distributed state holds nothing for it; {MEND}")
    return value.astype(target.dtype)

  return jax.tree_util.tree_map_with_path(leaf_of, like)


def _deal(plan: Plan, like: dict[str, PyTree], matrices: PyTree) -> dict[str, PyTree]:
  """Returns the states of all matrices, stacked by class and dealt to their owners."""
  given = {leaf_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(matrices)}

  def leaf_of(name, keys, target):
    counterparts = counterparts_of(plan, name, keys, target.shape[1:])
    path = leaf_path(keys)
    if not counterparts:
      if path not in given or given[path].shape != target.shape[1:]:
        raise ValueError(f"leaf '{path}' of shape {target.shape[1:]} is not in the checkpoint; {MEND}")
      return jnp.broadcast_to(given[path], target.shape).astype(target.dtype)
    stacked = jnp.zeros(target.shape, target.dtype)
    for one in counterparts:
      leaf = plan.leaves[one.parameter]
      if one.path not in given:
        raise ValueError(
          f"leaf '{one.path}', of the parameter '{one.parameter}' of shape {leaf.shape}, is not in the undistributed "
          f'state; {MEND}'
        )
      value = given[one.path]
      rows = slice(one.block.start, one.block.start + len(one.block.rows))
      if one.by_axes and value.shape == leaf.shape:
        values = to_stacks({one.parameter: value}, leaf.axes)[one.block.stack][rows]
      else:
        values = value[rows][:, None]
      if (one.by_axes and value.shape != leaf.shape) or values.shape != (len(one.block.rows), *target.shape[1:]):
        raise ValueError(
          f"leaf '{one.path}' of the checkpoint has shape {value.shape}, which does not fit '{one.parameter}' of shape "
          f'{leaf.shape}; {MEND}'
        )
      stacked = stacked.at[one.block.rows].set(values.astype(target.dtype))
    return stacked

  return {name: jax.tree_util.tree_map_with_path(functools.partial(leaf_of, name), tree) for name, tree in like.items()}


def _exchange(plan: Plan, class_name: str, stacked: jax.Array, *, to_owners: bool = False) -> jax.Array:
  """Returns a stacked leaf of owners sharded on another dimension, so that taking rows moves nothing; or the inverse.

  An all-to-all by hand: left to the compiler, several mesh axes end in full copies on every device.
  """
  axes = plan.state_axes[class_name]
  ranks = math.prod(plan.mesh.shape[axis] for axis in axes)
  mesh, owned = _auto_mesh(plan), PartitionSpec(axes)
  divisible = [i for i, size in enumerate(stacked.shape) if i and size and size % ranks == 0]
  if not divisible:
    target = owned if to_owners else PartitionSpec()
    return jax.lax.with_sharding_constraint(stacked, NamedSharding(mesh, target))
  dimension = divisible[0]
  spread = PartitionSpec(*[None] * dimension, axes)
  source, target, split, concat = (spread, owned, 0, dimension) if to_owners else (owned, spread, dimension, 0)
  move = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=split, concat_axis=concat, tiled=True)
  return jax.shard_map(move, mesh=mesh, in_specs=source, out_specs=target)(stacked)


def _shardings(specs: PyTree, plan: Plan) -> PyTree:
  is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
  return jax.tree.map(lambda spec: NamedSharding(_auto_mesh(plan), spec), specs, is_leaf=is_spec)


def _auto_mesh(plan: Plan) -> Mesh:
  """Returns the mesh with Auto axes, on which the compiler finds the way from one layout to the other."""
  return Mesh(plan.mesh.devices, plan.mesh.axis_names)
