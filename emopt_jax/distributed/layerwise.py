"""The wrapper that runs an optimizer of matrices on their owners."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from emopt_jax.distributed import entries
from emopt_jax.distributed.branches import check_branches, check_whole, refuse_wrappers
from emopt_jax.distributed.owners import init_owned, reduced_row, square_of_owned, update_owned
from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.transport import give_back, pack, send, unpack
from emopt_jax.matrices import leaf_path
from emopt_jax.transforms.clip_by_finite_norm import clip_by_factors, clipping_factors
from emopt_jax.transforms.hyperparameters import check_positive


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
  wrapper: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Runs an optimizer of matrices with every matrix whole on one owner: exact, at 1/N of the work and state.

  Gradients travel to the owners of the plan, one collective per bundle and mesh axis; each owner updates its matrices;
  the updates travel back. Inside `jax.shard_map` gradients are those of each rank's mean loss over its own batch, and
  the wrapper averages them (`value_and_grad` makes them). In plain `jit` they are those of the whole batch.

  What stands before or around it in Optax has the gradients that the caller has. In plain `jit` these are whole, and
  anything may stand there. Inside `shard_map` each rank would clip, accumulate or judge its own: clip by `max_norm`;
  put `optax.clip` into `inner` and `others`, which have averaged gradients; give `MultiSteps`, `apply_if_finite` and
  the like as `wrapper`, and with unreduced gradients too. Around `layerwise` these raise there. What is chained before
  it, as in `optax.chain(optax.clip(1.0), layerwise(...))`, cannot be seen there, and clips wrongly. A `lax.cond` of
  your own around the update needs a predicate that is the same on all ranks; `check_vma` sees to that.

  Args:
    inner: Optimizer of one `[in, out]` matrix: `muon(0.02)`, `kl_soap(...)` or your own chain, without `axes`, which
      the plan has. It may use the parameters, for weight decay. On an Explicit mesh outside of `shard_map` it may not
      close over traced values: `optax.inject_hyperparams(muon)(0.02)` stands here, not around `layerwise`.
    plan: What `plan_layerwise` returns for the parameters.
    others: Optimizer of the leaves that are no matrices; needed where there are any.
    max_norm: Largest global norm of the gradients, over all leaves and ranks, as in `clip_by_finite_norm`.
    wrapper: Function of a transformation that returns one, `lambda optimizer: optax.apply_if_finite(optimizer, 5)`,
      whose gradients are averaged. Inside `shard_map` they are all-reduced for it rather than reduce-scattered; it has
      the shards of sharded leaves, so that what it decides from them must not differ from rank to rank.

  Returns:
    An optax transformation for all parameters. Its state is made sharded: no device holds all of it.

  Raises:
    ValueError: If parameters or gradients are not those of the plan, or a gradient is missing; if the surrounding
      `shard_map` lacks an axis of the plan; if gradients inside it are reduced already; in a branch that ranks may take
      differently; if max_norm is not positive.

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
  if max_norm is not None:
    check_positive('max_norm', max_norm)
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

  def update_reduced(updates, state, params, averaged, extra_args):
    inside = entries.inside_shard_map(plan)
    gradients = entries.select(plan, updates, inside=inside, what='gradients')
    matrices = None if params is None else entries.select(plan, params, inside=inside, what='parameters')
    entries.check_complete(plan, updates, params)
    _check_state(plan, state, inside=inside)
    if inside:
      local = not averaged and any(entries.data_axes(plan, path) for path in (*plan.leaves, *plan.others))
      check_branches(plan, averaged=averaged, local=local)
    if averaged:
      summed = ()
    else:
      summed = plan.axis + plan.replicas if inside else entries.unreduced_axes(*gradients.values())
      if summed and not inside:
        refuse_wrappers()
      updates = entries.reduce_gradients(plan, updates, inside=inside, matrices=False)
    if averaged and inside:
      entries.check_averaged(plan, updates)
    square = None if max_norm is None else entries.square_of_others(plan, updates, inside=inside)
    arrays, others_args = _split_arrays(extra_args)

    def step(gradients, matrices, classes, square, arrays):
      rows = [reduced_row(plan, bundle, gradients, summed, average=inside) for bundle in plan.bundles]
      factors = None if max_norm is None else clipping_factors(square_of_owned(plan, rows, square), max_norm)
      step_update = functools.partial(inner_update, **arrays, **others_args)
      parts, new_classes = {}, {}
      for bundle, row in zip(plan.bundles, rows, strict=True):
        clipped = row if factors is None else clip_by_factors(row, factors)
        own = None if matrices is None else send(bundle, pack(plan, bundle, matrices), ())
        out, states = update_owned(step_update, plan, bundle, clipped, own, classes)
        new_classes |= states
        parts |= unpack(plan, bundle, give_back(bundle, out))
      return _leaves(plan, parts, gradients), new_classes, factors

    if inside:
      new, classes, factors = step(gradients, matrices, state.classes, square, arrays)
    else:
      gradient_specs = {path: entries.gradient_spec(specs[path], gradient) for path, gradient in gradients.items()}
      state_specs = _state_specs(plan, state.classes)
      new, classes, factors = entries.on_mesh(
        plan,
        step,
        (
          _placed(plan, gradients, gradient_specs),
          None if matrices is None else _placed(plan, matrices, specs),
          state.classes,
          square,
          jax.tree.map(lambda array: entries.placed(plan, jnp.asarray(array), PartitionSpec()), arrays),
        ),
        (gradient_specs, None if matrices is None else specs, state_specs, PartitionSpec(), PartitionSpec()),
        (specs, state_specs, PartitionSpec()),
      )
    if factors is not None:
      updates = jax.tree_util.tree_map_with_path(
        lambda keys, g: g if leaf_path(keys) in new else clip_by_factors(g, factors), updates
      )
    rest, other_state = other_optimizer.update(updates, state.others, params, **extra_args)
    merged = jax.tree_util.tree_map_with_path(lambda keys, leaf: new.get(leaf_path(keys), leaf), rest)
    return merged, LayerwiseState(classes, other_state)

  def update(updates, state, params=None, **extra_args):
    return update_reduced(updates, state, params, False, extra_args)

  if wrapper is None:
    return optax.GradientTransformationExtraArgs(init, update)

  def update_averaged(updates, state, params=None, **extra_args):
    return update_reduced(updates, state, params, True, extra_args)

  wrapped = wrapper(optax.GradientTransformationExtraArgs(init, update_averaged))

  def update_wrapped(updates, state, params=None, **extra_args):
    inside = entries.inside_shard_map(plan)
    entries.select(plan, updates, inside=inside, what='gradients')
    entries.check_complete(plan, updates, params)
    if inside:
      check_whole(plan)
      check_branches(plan, averaged=False, local=True)
    updates = entries.reduce_gradients(plan, updates, inside=inside, matrices=True)
    return wrapped.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(wrapped.init, update_wrapped)


def _leaves(plan: Plan, parts: dict[tuple[str, int], jax.Array], like: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the leaves of matrices, by path, from the parcels of their parts."""
  leaves = {}
  for path, leaf in plan.leaves.items():
    parcels = [parts[path, part] for part in range(len(leaf.parts))]
    leaves[path] = leaf.from_parcels(parcels, like[path].shape).astype(like[path].dtype)
  return leaves


def _split_arrays(extra_args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the extra arguments that are trees of arrays and numbers, and the rest.

  A `shard_map` takes arrays of an Explicit mesh as arguments only.
  """
  is_array = lambda leaf: isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float))  # noqa: E731
  arrays = {name: value for name, value in extra_args.items() if all(map(is_array, jax.tree.leaves(value)))}
  return arrays, {name: value for name, value in extra_args.items() if name not in arrays}


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
