"""The wrapper that runs an optimizer of matrices on their owners."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from emopt_jax.distributed import entries
from emopt_jax.distributed.bundles import Bundle, unit_shapes
from emopt_jax.distributed.parcels import AxisNames
from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.transport import as_varying, for_each_owned, give_back, owner_rank, pack, send, unpack
from emopt_jax.matrices import leaf_path


class LayerwiseState(NamedTuple):
  """State of `layerwise`.

  Attributes:
    classes: Per class of the plan, the states of the optimizer for each of its parcels, stacked on a first dimension
      that is sharded over the owners.
    others: State of the optimizer of the other leaves.
  """

  classes: dict[str, PyTree]
  others: PyTree


def layerwise(
  inner: optax.GradientTransformation,
  plan: Plan,
  *,
  others: optax.GradientTransformation | None = None,
  max_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Runs an optimizer of matrices with every matrix whole on one owner: exact, at 1/N of the work and state.

  Gradients travel to the owners of the plan, one collective per bundle and mesh axis; each owner updates its matrices;
  the updates travel back. Inside `jax.shard_map` gradients are those of each rank's mean loss over its own batch, and
  the wrapper averages them (`value_and_grad` makes them). In plain `jit` they are those of the whole batch.

  Args:
    inner: Optimizer of one `[in, out]` matrix: `muon(0.02)`, `kl_soap(...)` or your own chain, without `axes`, which
      the plan has. It may use the parameters, for weight decay.
    plan: What `plan_layerwise` returns for the parameters.
    others: Optimizer of the leaves that are no matrices; needed where there are any.
    max_norm: Largest global norm of the gradients, over all leaves and ranks; larger ones are scaled down to it.

  Returns:
    An optax transformation for all parameters. Its state is made sharded: no device holds all of it.

  Raises:
    ValueError: If parameters or gradients are not those of the plan; if the surrounding `shard_map` lacks an axis of
      the plan; if gradients inside it are reduced already.

  Example:
    >>> import emopt_jax
    >>> from emopt_jax.distributed.plan import plan_layerwise
    >>> params = {'kernel': jnp.ones((4, 8)), 'bias': jnp.ones(8)}
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> optimizer = layerwise(emopt_jax.muon(0.02), plan, others=optax.adamw(3e-3), max_norm=1.0)
    >>> updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)

  References:
    "SOAP, Muon, and Beyond", arXiv 2607.20548, section on the layer-wise distributed optimizer.
  """
  if plan.others and others is None:
    path, leaf = next(iter(plan.others.items()))
    raise ValueError(
      f"leaf '{path}' of shape {leaf.shape} is no matrix of the plan: give layerwise(..., others=optax.adamw(...))"
    )
  # A leaf that another optimizer has, as under `optax.partition`, is masked already.
  other_optimizer = optax.with_extra_args_support(
    optax.masked(others or optax.set_to_zero(), lambda tree: _is_other(plan, tree))
  )
  specs = {path: leaf.spec for path, leaf in plan.leaves.items()}

  def init(params):
    inside = entries.inside_shard_map(plan)
    matrices = entries.select(plan, params, inside=inside, what='parameters')
    other_state = other_optimizer.init(params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in matrices.values()):
      matrices = None
    make = functools.partial(_init_classes, inner, plan)
    if inside:
      return LayerwiseState(make(matrices), other_state)
    state_specs = _state_specs(plan, {one.name: PartitionSpec() for one in plan.classes})
    arguments = () if matrices is None else (_placed(plan, matrices, specs),)
    classes = entries.on_mesh(plan, make, arguments, () if matrices is None else (specs,), state_specs)
    return LayerwiseState(classes, other_state)

  def update(updates, state, params=None, **extra_args):
    inside = entries.inside_shard_map(plan)
    gradients = entries.select(plan, updates, inside=inside, what='gradients')
    matrices = None if params is None else entries.select(plan, params, inside=inside, what='parameters')
    _check_state(plan, state, inside=inside)
    summed = plan.axis + plan.replicas if inside else entries.unreduced_axes(*gradients.values())
    updates = entries.reduce_others(plan, updates, inside=inside)
    square = entries.square_of_others(plan, updates, inside=inside)
    step = functools.partial(_update_classes, inner, plan, summed, inside, max_norm, extra_args)
    if inside:
      new, classes, scale = step(gradients, matrices, state.classes, square)
    else:
      gradient_specs = {path: entries.gradient_spec(specs[path], gradient) for path, gradient in gradients.items()}
      state_specs = _state_specs(plan, state.classes)
      new, classes, scale = entries.on_mesh(
        plan,
        step,
        (
          _placed(plan, gradients, gradient_specs),
          None if matrices is None else _placed(plan, matrices, specs),
          state.classes,
          square,
        ),
        (gradient_specs, None if matrices is None else specs, state_specs, PartitionSpec()),
        (specs, state_specs, PartitionSpec()),
      )
    updates = jax.tree_util.tree_map_with_path(
      lambda keys, g: g if max_norm is None or leaf_path(keys) in new else g * scale.astype(g.dtype), updates
    )
    rest, other_state = other_optimizer.update(updates, state.others, params, **extra_args)
    merged = jax.tree_util.tree_map_with_path(lambda keys, leaf: new.get(leaf_path(keys), leaf), rest)
    return merged, LayerwiseState(classes, other_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _init_classes(inner: optax.GradientTransformation, plan: Plan, matrices: dict | None = None) -> dict[str, PyTree]:
  classes = {}
  for bundle in plan.bundles:
    row = None if matrices is None else send(bundle, pack(plan, bundle, matrices), ())
    for index, one in enumerate(bundle.classes):

      def unit(slot, row=row, bundle=bundle, index=index, one=one):
        if row is None:
          return {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in unit_shapes(one.parcel).items()}
        start = jnp.asarray(bundle.offsets[index], jnp.int32)[owner_rank(bundle)]
        return _unit(plan, bundle, index, row, start + slot * bundle.piece_sizes[index])

      states = jax.vmap(lambda slot, unit=unit: inner.init(unit(slot)))(jnp.arange(one.slots))
      classes[one.name] = jax.tree.map(functools.partial(as_varying, axes=bundle.state_axes), states)
  return classes


def _update_classes(
  inner: optax.GradientTransformation,
  plan: Plan,
  summed: AxisNames,
  average: bool,
  max_norm: float | None,
  extra_args: dict[str, Any],
  gradients: dict[str, jax.Array],
  params: dict[str, jax.Array] | None,
  classes: dict[str, PyTree],
  square: jax.Array,
) -> tuple[dict[str, jax.Array], dict[str, PyTree], jax.Array]:
  """Returns the updates by path, the new states by class and the factor that clips the gradients."""
  update_unit: Any = optax.with_extra_args_support(inner).update
  rows = []
  for bundle in plan.bundles:
    row = send(bundle, pack(plan, bundle, gradients), summed)
    reduced = [axis for axis in bundle.owners + bundle.replicas if axis in summed and axis not in bundle.exchanged]
    rows.append(row / math.prod(plan.mesh.shape[axis] for axis in reduced) if average and reduced else row)
  scale = jnp.ones((), jnp.float32)
  if max_norm is not None:
    for bundle, row in zip(plan.bundles, rows, strict=True):
      square = square + lax.psum(jnp.sum(jnp.square(row.astype(jnp.float32))), bundle.state_axes)
    norm = jnp.sqrt(square)
    scale = jnp.where(norm < max_norm, 1, max_norm / norm)
  parts, new_classes = {}, {}
  for bundle, row in zip(plan.bundles, rows, strict=True):
    own = None if params is None else send(bundle, pack(plan, bundle, params), ())
    out = as_varying(jnp.zeros_like(row), bundle.state_axes)
    for index, one in enumerate(bundle.classes):

      def body(slot, offset, carry, bundle=bundle, index=index, row=row, own=own):
        states, out = carry
        unit = jax.tree.map(lambda g: g * scale.astype(g.dtype), _unit(plan, bundle, index, row, offset))
        unit_params = None if own is None else _unit(plan, bundle, index, own, offset)
        state = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False), states)
        update, new = update_unit(unit, state, unit_params, **extra_args)
        pieces = bundle.classes[index].parcel.take_apart(update, bundle.exchanged, plan.mesh.shape)
        out = lax.dynamic_update_slice_in_dim(out, pieces.astype(out.dtype), offset, axis=out.ndim - 1)
        put = lambda leaf, value: lax.dynamic_update_index_in_dim(  # noqa: E731
          leaf, as_varying(value, bundle.state_axes), slot, 0
        )
        return jax.tree.map(put, states, new), out

      new_classes[one.name], out = for_each_owned(bundle, index, body, (classes[one.name], out))
    parts |= unpack(plan, bundle, give_back(bundle, out))
  updates = {}
  for path, leaf in plan.leaves.items():
    update = leaf.from_parcels([parts[path, part] for part in range(len(leaf.parts))], gradients[path].shape)
    updates[path] = update.astype(gradients[path].dtype)
  return updates, new_classes, scale


def _unit(plan: Plan, bundle: Bundle, index: int, row: jax.Array, offset: jax.Array | int) -> dict[str, jax.Array]:
  """Returns the matrices of the parcel of a class that starts at an offset of this rank's row."""
  pieces = lax.dynamic_slice_in_dim(row, offset, bundle.piece_sizes[index], axis=row.ndim - 1)
  return bundle.classes[index].parcel.assemble(pieces, bundle.exchanged, plan.mesh.shape)


def _is_other(plan: Plan, tree: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(lambda keys, _: leaf_path(keys) not in plan.leaves, tree)


def _check_state(plan: Plan, state: LayerwiseState, *, inside: bool) -> None:
  expected = {one.name: (one, bundle) for bundle in plan.bundles for one in bundle.classes}
  mend = 'it was made by another plan; carry it over with logical_state and physical_state'
  if set(state.classes) != set(expected):
    raise ValueError(f'the state has the classes {sorted(state.classes)}, the plan {sorted(expected)}: {mend}')
  for name, (one, bundle) in expected.items():
    ranks = math.prod(plan.mesh.shape[axis] for axis in bundle.state_axes)
    rows = one.slots * (1 if inside else ranks)
    found = jax.tree.leaves(state.classes[name])[0].shape[0]
    if found != rows:
      raise ValueError(f"the state of class '{name}' has {found} rows, that of the plan {rows}: {mend}")


def _state_specs(plan: Plan, classes: dict[str, PyTree]) -> dict[str, PyTree]:
  """Returns the specs of the classes' states, in the structure of what is given."""
  specs = {one.name: PartitionSpec(bundle.state_axes) for bundle in plan.bundles for one in bundle.classes}
  is_leaf = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
  return {name: jax.tree.map(lambda _, name=name: specs[name], tree, is_leaf=is_leaf) for name, tree in classes.items()}


def _placed(plan: Plan, leaves: dict[str, jax.Array], specs: dict[str, PartitionSpec]) -> dict[str, jax.Array]:
  return {path: entries.placed(plan, leaf, specs[path]) for path, leaf in leaves.items()}
