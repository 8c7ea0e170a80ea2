"""The wrapper that runs an optimizer of matrices on their owners."""

import functools
import math
from typing import NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from emopt_jax.distributed import entries
from emopt_jax.distributed.owners import clipping_scale, init_owned, reduced_row, update_owned
from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.transport import give_back, pack, send, unpack
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
    >>> params = {'kernel': jax.numpy.ones((4, 8)), 'bias': jax.numpy.ones(8)}
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
  inner_update = optax.with_extra_args_support(inner).update
  specs = {path: leaf.spec for path, leaf in plan.leaves.items()}

  def init(params):
    inside = entries.inside_shard_map(plan)
    matrices = entries.select(plan, params, inside=inside, what='parameters')
    other_state = other_optimizer.init(params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in matrices.values()):
      matrices = None
    make = functools.partial(init_owned, inner, plan)
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

    def step(gradients, matrices, classes, square):
      rows = [reduced_row(plan, bundle, gradients, summed, average=inside) for bundle in plan.bundles]
      scale = clipping_scale(plan, rows, square, max_norm)
      parts, new_classes = {}, {}
      for bundle, row in zip(plan.bundles, rows, strict=True):
        clipped = row if max_norm is None else row * scale.astype(row.dtype)
        own = None if matrices is None else send(bundle, pack(plan, bundle, matrices), ())
        out, states = update_owned(functools.partial(inner_update, **extra_args), plan, bundle, clipped, own, classes)
        new_classes |= states
        parts |= unpack(plan, bundle, give_back(bundle, out))
      return _leaves(plan, parts, gradients), new_classes, scale

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


def _leaves(plan: Plan, parts: dict[tuple[str, int], jax.Array], like: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the leaves of matrices, by path, from the parcels of their parts."""
  leaves = {}
  for path, leaf in plan.leaves.items():
    parcels = [parts[path, part] for part in range(len(leaf.parts))]
    leaves[path] = leaf.from_parcels(parcels, like[path].shape).astype(like[path].dtype)
  return leaves


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
    for leaf in jax.tree.leaves(state.classes[name]):
      if leaf.shape[0] != rows:
        raise ValueError(f"the state of class '{name}' has {leaf.shape[0]} rows, that of the plan {rows}: {mend}")


def _state_specs(plan: Plan, classes: dict[str, PyTree]) -> dict[str, PyTree]:
  """Returns the specs of the classes' states, in the structure of what is given."""
  specs = {name: PartitionSpec(axes) for name, axes in plan.state_axes.items()}
  is_leaf = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
  return {name: jax.tree.map(lambda _, name=name: specs[name], tree, is_leaf=is_leaf) for name, tree in classes.items()}


def _placed(plan: Plan, leaves: dict[str, jax.Array], specs: dict[str, PartitionSpec]) -> dict[str, jax.Array]:
  return {path: entries.placed(plan, leaf, specs[path]) for path, leaf in leaves.items()}
