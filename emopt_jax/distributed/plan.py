"""Who owns which matrix: made once, in Python, from shapes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from emopt_jax.distributed.bundles import Bundle, Cost, MatrixClass, make_bundles, unit_shapes
from emopt_jax.distributed.costs import newton_schulz_cost
from emopt_jax.distributed.parcels import AxisNames, Leaf, make_leaf, sharding_axes
from emopt_jax.distributed.plan_table import plan_table
from emopt_jax.matrices import Axes, leaf_path, resolve_axes
from emopt_jax.routing import default_is_matrix


class OtherLeaf(NamedTuple):
  """A leaf that is no matrix.

  Attributes:
    shape: Its whole shape.
    spec: How it is sharded.
    dtype: Its dtype.
  """

  shape: tuple[int, ...]
  spec: PartitionSpec
  dtype: Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """Owners, cost and traffic of every matrix; made by `plan_layerwise`, and printed by `print`.

  Attributes:
    mesh: The mesh.
    axis: Data-parallel axes over which matrices are dealt.
    replicas: Further data-parallel axes, over which owners are repeated.
    leaves: Per path, how a leaf of matrices makes parcels.
    others: Per path, every other leaf.
    bundles: What travels together.
    loads: Operations per device.
    state_bytes: Bytes of optimizer state of the matrices per device, and of all matrices once; None without `inner`.
  """

  mesh: Mesh
  axis: AxisNames
  replicas: AxisNames
  leaves: Mapping[str, Leaf]
  others: Mapping[str, OtherLeaf]
  bundles: tuple[Bundle, ...]
  loads: np.ndarray
  state_bytes: tuple[int, int] | None

  @property
  def classes(self) -> tuple[MatrixClass, ...]:
    """All classes."""
    return tuple(one for bundle in self.bundles for one in bundle.classes)

  def leaf(self, path: str) -> Leaf | OtherLeaf | None:
    """Returns the leaf at a path, or None."""
    return self.leaves.get(path) or self.others.get(path)

  def sharded_axes(self, path: str) -> AxisNames:
    """Returns the mesh axes that shard a leaf."""
    leaf = self.leaves.get(path) or self.others[path]
    return tuple(axis for axes in sharding_axes(path, leaf.shape, leaf.spec, self.mesh.shape) for axis in axes)

  @property
  def state_axes(self) -> dict[str, AxisNames]:
    """Per class, the mesh axes that shard the first dimension of its state."""
    return {one.name: bundle.state_axes for bundle in self.bundles for one in bundle.classes}

  @property
  def axes(self) -> AxisNames:
    """All mesh axes that the plan communicates over."""
    used = [*self.axis, *self.replicas]
    for bundle in self.bundles:
      used += [*bundle.state_axes, *bundle.replicas]
    return tuple(dict.fromkeys(used))

  def __str__(self) -> str:
    return plan_table(self)


def plan_layerwise(
  params: PyTree,
  mesh: Mesh,
  axis: str | Sequence[str],
  *,
  replicas: str | Sequence[str] = (),
  specs: PyTree = None,
  axes: Axes = None,
  is_matrix: Callable[[str, Any], bool] = default_is_matrix,
  cost: Cost = newton_schulz_cost,
  inner: optax.GradientTransformation | None = None,
) -> Plan:
  """Deals whole matrices to ranks, the dearest first, each to the rank with the least work.

  Args:
    params: Parameters, or their `ShapeDtypeStruct`s.
    mesh: The device mesh.
    axis: The data-parallel axis, or axes, over which matrices are dealt. Where a leaf is sharded over other axes too,
      its matrices are dealt over those as well.
    replicas: Data-parallel axes over which owners are repeated, for more ranks than matrices: a mesh of `replica` and
      `owner` axes, with owners not many more than matrices.
    specs: `PartitionSpec` of every leaf: one for all, or a tree of them (`nn.get_partition_spec`,
      `nnx.get_partition_spec`). By default that of each parameter's own sharding, and replicated where it has none.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.
    is_matrix: Function of a leaf's path and the leaf; the others are not dealt.
    cost: Function of rows and columns that weighs a matrix: `newton_schulz_cost`, `soap_cost`, `elementwise_cost`.
    inner: The optimizer, for the state bytes in the table.

  Returns:
    A `Plan`; print it before a run.

  Raises:
    ValueError: If the mesh lacks an axis, an axis does not divide a sharded dimension, or a leaf is no matrix.

  Example:
    >>> mesh = jax.make_mesh((1,), ('data',))
    >>> plan = plan_layerwise({'kernel': jnp.ones((64, 128))}, mesh, 'data')
    >>> plan.classes[0].name, plan.classes[0].counts
    ('64x128', (1,))
  """
  axis, replicas = ((names,) if isinstance(names, str) else tuple(names) for names in (axis, replicas))
  for name in axis + replicas:
    if name not in mesh.shape:
      raise ValueError(f"the mesh has no axis '{name}': its axes are {tuple(mesh.shape)}")
  if not axis or len(set(axis + replicas)) < len(axis + replicas):
    raise ValueError(f'axis {axis} and replicas {replicas}: name at least one axis, and none twice')
  by_path = {leaf_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}
  by_path_specs = _specs_by_path(params, specs)
  matrices = jax.tree_util.tree_map_with_path(
    lambda keys, leaf: leaf if is_matrix(leaf_path(keys), leaf) else optax.MaskedNode(), params
  )
  leaves = {
    path: make_leaf(path, by_path[path], leaf_axes, by_path_specs[path], mesh.shape)
    for path, leaf_axes in resolve_axes(matrices, axes).items()
  }
  others = {
    path: OtherLeaf(tuple(leaf.shape), by_path_specs[path], jnp.dtype(leaf.dtype))
    for path, leaf in by_path.items()
    if path not in leaves
  }
  for path, leaf in others.items():
    sharding_axes(path, leaf.shape, leaf.spec, mesh.shape)  # raises now for a spec that does not fit
  bundles, loads = make_bundles(leaves, mesh, axis, replicas, cost)
  state_bytes = None if inner is None else _state_bytes(bundles, mesh.shape, inner)
  return Plan(mesh, axis, replicas, leaves, others, bundles, loads, state_bytes)


def _specs_by_path(params: PyTree, specs: PyTree) -> Mapping[str, Any]:
  def own(leaf) -> PartitionSpec:
    sharding = getattr(leaf, 'sharding', None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()

  by_path = {leaf_path(keys): own(leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}
  if specs is None:
    return by_path
  is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
  given = {leaf_path(keys): spec for keys, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)}
  if is_spec(specs):
    return dict.fromkeys(by_path, specs)
  found = {}
  for path in by_path:
    # A spec may stand for a whole subtree, and a metadata box may stand between the two.
    names = [path.rsplit('/', i)[0] for i in range(path.count('/') + 1)]
    named = [given[name] for name in names if name in given]
    if not named:
      raise ValueError(f"leaf '{path}' has no spec: give specs for every leaf, PartitionSpec() where it is replicated")
    found[path] = named[0]
  return found


def _state_bytes(bundles, mesh_shape: Mapping[str, int], inner: optax.GradientTransformation) -> tuple[int, int]:
  per_device = total = 0
  for bundle in bundles:
    homes = math.prod(mesh_shape[name] for name in bundle.home)
    for one in bundle.classes:
      state = jax.eval_shape(inner.init, unit_shapes(one.parcel))
      size = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))
      per_device += one.slots * size
      total += homes * sum(one.counts) * size
  return per_device, total
