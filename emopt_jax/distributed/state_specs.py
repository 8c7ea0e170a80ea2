"""How a state lies on the mesh of a plan."""

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from emopt_jax.distributed.layerwise import LayerwiseState
from emopt_jax.distributed.plan import Plan
from emopt_jax.matrices import leaf_path


def state_specs(state: PyTree, plan: Plan) -> PyTree:
  """Returns the `PartitionSpec` of every leaf of a state, for `jax.shard_map`.

  A `LayerwiseState` lies on the owners. Leaves of the shape of a parameter, under its path, lie as that does. The rest
  is replicated.

  Args:
    state: Any state, parameters included, or its `ShapeDtypeStruct`s.
    plan: The plan.

  Example:
    >>> import emopt_jax
    >>> from emopt_jax.distributed import layerwise, plan_layerwise
    >>> params = {'kernel': jax.numpy.ones((4, 8))}
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> optimizer = layerwise(emopt_jax.muon(0.02), plan)
    >>> specs = state_specs(jax.eval_shape(optimizer.init, params), plan)
    >>> specs.classes['4x8'][0].mu['matrix']['0'] == PartitionSpec('data')
    True
  """

  def of_node(keys, node):
    if not isinstance(node, LayerwiseState):
      return _leaf_spec(leaf_path(keys), node.shape, plan)
    owners = {name: PartitionSpec(axes) for name, axes in plan.state_axes.items()}
    if set(owners) != set(node.classes):
      raise ValueError(
        f'the state has the classes {sorted(node.classes)}, the plan {sorted(owners)}: give its own plan'
      )
    return LayerwiseState(
      {name: jax.tree.map(lambda _, name=name: owners[name], tree) for name, tree in node.classes.items()},
      jax.tree_util.tree_map_with_path(lambda keys, leaf: _leaf_spec(leaf_path(keys), leaf.shape, plan), node.others),
    )

  return jax.tree_util.tree_map_with_path(of_node, state, is_leaf=lambda node: isinstance(node, LayerwiseState))


def logical_specs(state: PyTree, plan: Plan) -> PyTree:
  """Returns the `PartitionSpec` of every leaf of an undistributed optimizer's state, for checkpoints.

  What belongs to a matrix is sharded over the plan's axis on the first dimension that the axis divides, so that no
  device holds all of it. The rest lies as in `state_specs`.

  Args:
    state: State of the undistributed optimizer, or its `ShapeDtypeStruct`s.
    plan: The plan.

  Example:
    >>> import emopt_jax
    >>> from emopt_jax.distributed import plan_layerwise
    >>> params = {'kernel': jax.numpy.ones((4, 8))}
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> logical_specs(jax.eval_shape(emopt_jax.muon(0.02).init, params), plan)[0].mu['kernel'] == PartitionSpec('data')
    True
  """
  ranks = math.prod(plan.mesh.shape[axis] for axis in plan.axis)

  def of_leaf(keys, leaf):
    spec = _leaf_spec(leaf_path(keys), leaf.shape, plan)
    if any(spec) or parameter_of(leaf_path(keys), plan) not in plan.leaves:
      return spec
    divisible = [i for i, size in enumerate(leaf.shape) if size % ranks == 0 and size]
    return PartitionSpec(*[None] * divisible[0], plan.axis) if divisible else spec

  return jax.tree_util.tree_map_with_path(of_leaf, state)


def parameter_of(path: str, plan: Plan) -> str | None:
  """Returns the path of the parameter that a leaf of a state belongs to, or None."""
  wrapped = f'/{path}/'
  names = [name for name in (*plan.leaves, *plan.others) if f'/{name}/' in wrapped or f'/{name}:' in wrapped]
  return max(names, key=len, default=None)


def _leaf_spec(path: str, shape: tuple[int, ...], plan: Plan) -> PartitionSpec:
  name = parameter_of(path, plan)
  if name is None:
    return PartitionSpec()
  leaf = plan.leaves.get(name) or plan.others[name]
  return leaf.spec if tuple(shape) == leaf.shape else PartitionSpec()


def state_shardings(state: PyTree, plan: Plan) -> PyTree:
  """Returns `state_specs` as shardings, for `jax.jit` and Orbax.

  Args:
    state: As in `state_specs`.
    plan: The plan.

  Example:
    >>> import emopt_jax
    >>> from emopt_jax.distributed import layerwise, plan_layerwise
    >>> params = {'kernel': jax.numpy.ones((4, 8))}
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> optimizer = layerwise(emopt_jax.muon(0.02), plan)
    >>> shardings = state_shardings(jax.eval_shape(optimizer.init, params), plan)
    >>> state = jax.jit(optimizer.init, out_shardings=shardings)(params)
  """
  return _on(plan, state_specs(state, plan))


def logical_shardings(state: PyTree, plan: Plan) -> PyTree:
  """Returns `logical_specs` as shardings, for restoring a checkpoint with Orbax.

  Args:
    state: As in `logical_specs`.
    plan: The plan.

  Example:
    >>> import emopt_jax
    >>> from emopt_jax.distributed import plan_layerwise
    >>> params = {'kernel': jax.numpy.ones((4, 8))}
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> shardings = logical_shardings(jax.eval_shape(emopt_jax.muon(0.02).init, params), plan)
  """
  return _on(plan, logical_specs(state, plan))


def _on(plan: Plan, specs: PyTree) -> PyTree:
  is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
  return jax.tree.map(lambda spec: NamedSharding(plan.mesh, spec), specs, is_leaf=is_spec)
