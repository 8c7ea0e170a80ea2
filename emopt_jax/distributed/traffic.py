"""What a plan sends: bytes per device and step, by kind of collective, from ring formulas.

A ring of n devices sends (n-1)/n of the whole for a reduce-scatter, an all-gather and an all-to-all, and twice that for
an all-reduce. Nothing here needs the devices: a plan on a `jax.sharding.AbstractMesh` will do.
"""

import functools  # noqa: F401, for the example
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax  # noqa: F401, for the examples
import jax.numpy as jnp

from emopt_jax.distributed.bundles import Bundle
from emopt_jax.text_table import text_table

if TYPE_CHECKING:
  from emopt_jax.distributed.plan import Plan


class Traffic(NamedTuple):
  """Bytes that one device sends in a step.

  Attributes:
    reduce_scatter: Gradients on their way to owners.
    all_gather: Updates on their way back.
    all_to_all: Shards on their way to owners and back.
    all_reduce: Gradients that every rank needs, of leaves that are no matrices for one.
    parameters: All-to-all of sharded parameters, if the optimizer reads them, as for weight decay.
  """

  reduce_scatter: int = 0
  all_gather: int = 0
  all_to_all: int = 0
  all_reduce: int = 0
  parameters: int = 0


def traffic_inside_shard_map(plan: 'Plan') -> Traffic:
  """Returns what `layerwise` sends inside the caller's `shard_map`, where gradients are local (entries A and C).

  Args:
    plan: The plan; gradients count in the dtype of the parameters.

  Example:
    >>> from emopt_jax import MatrixAxes
    >>> from emopt_jax.distributed import plan_layerwise
    >>> mesh = jax.sharding.AbstractMesh((4,), ('data',))
    >>> params = {'kernel': jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)}
    >>> traffic_inside_shard_map(plan_layerwise(params, mesh, 'data', axes=MatrixAxes(-2, -1))).reduce_scatter
    768
  """
  return _total([*(_dealt(plan, bundle, local=True) for bundle in plan.bundles), _of_others(plan)])


def traffic_in_jit(plan: 'Plan') -> Traffic:
  """Returns what is sent in plain `jit` (entry B), the compiler's all-reduce of the gradients included.

  Args:
    plan: As in `traffic_inside_shard_map`.
  """
  dealt = [_dealt(plan, bundle, local=False) for bundle in plan.bundles]
  return _total([*dealt, *(_all_reduced(plan, bundle) for bundle in plan.bundles), _of_others(plan)])


def traffic_on_every_rank(plan: 'Plan') -> Traffic:
  """Returns what plain data parallelism sends, in which every rank updates every leaf: all gradients, all-reduced.

  Args:
    plan: As in `traffic_inside_shard_map`.
  """
  return _total([*(_all_reduced(plan, bundle) for bundle in plan.bundles), _of_others(plan)])


def compare_traffic(plans: Mapping[str, 'Plan']) -> str:
  """Returns a table of what optimizers send, keep and compute per device and step, on every rank and layer-wise.

  Args:
    plans: Per optimizer, its plan, made with its `inner` and `cost`; AdamW's with `elementwise_cost`.

  Returns:
    The table: MiB sent, MiB of state for the matrices, and 10^9 operations for them.

  Example:
    >>> import emopt_jax, optax
    >>> from emopt_jax import distributed
    >>> params = {'kernel': jax.ShapeDtypeStruct((64, 128, 128), jnp.float32)}
    >>> plan = functools.partial(
    ...   distributed.plan_layerwise, params, jax.sharding.AbstractMesh((8,), ('data',)), 'data',
    ...   axes=emopt_jax.MatrixAxes(-2, -1))
    >>> adamw = plan(inner=optax.adamw(1e-3), cost=distributed.elementwise_cost)
    >>> print(compare_traffic({'adamw': adamw, 'muon': plan(inner=emopt_jax.muon(0.02))}))
    optimizer  matrices         MiB sent  MiB of state  10^9 operations
    ---------  ---------------  --------  ------------  ---------------
    adamw      on every rank         7.0           8.0             0.01
    adamw      layer-wise, jit      10.5           1.0             0.00
    adamw      layer-wise            7.0           1.0             0.00
    muon       on every rank         7.0           4.0             6.44
    muon       layer-wise, jit      10.5           0.5             0.81
    muon       layer-wise            7.0           0.5             0.81
  """
  rows = []
  for name, plan in plans.items():
    per_device, whole = plan.state_bytes or (None, None)
    work = sum(
      one.cost * sum(one.counts) * _ranks(plan, bundle.home) for bundle in plan.bundles for one in bundle.classes
    )
    for how, traffic, state, operations in (
      ('on every rank', traffic_on_every_rank(plan), whole, work),
      ('layer-wise, jit', traffic_in_jit(plan), per_device, plan.loads.max()),
      ('layer-wise', traffic_inside_shard_map(plan), per_device, plan.loads.max()),
    ):
      state_cell = '-' if state is None else f'{state / 2**20:,.1f}'
      rows.append((name, how, f'{sum(traffic) / 2**20:,.1f}', state_cell, f'{operations / 1e9:,.2f}'))
  return text_table(('optimizer', 'matrices', 'MiB sent', 'MiB of state', '10^9 operations'), rows, numbers=3)


def _dealt(plan: 'Plan', bundle: Bundle, *, local: bool) -> Traffic:
  """Returns what a bundle sends: its gradients to the owners, and the updates back."""
  itemsize = jnp.dtype(bundle.classes[0].parcel.dtype).itemsize
  size = _ranks(plan, bundle.owners) * bundle.length * itemsize
  scattered = gathered = exchanged = 0.0
  for axis in bundle.owners:
    ranks = plan.mesh.shape[axis]
    if axis in bundle.exchanged:
      exchanged += size * (ranks - 1) / ranks
    else:
      gathered += size * (ranks - 1) / ranks
      scattered += size * (ranks - 1) / ranks * local
      size /= ranks
  repeated = _ranks(plan, bundle.replicas)
  reduced = 2 * size * (repeated - 1) / repeated * local
  return Traffic(round(scattered), round(gathered), round(2 * exchanged), round(reduced), round(exchanged))


def _all_reduced(plan: 'Plan', bundle: Bundle) -> Traffic:
  """Returns what an all-reduce of a bundle's gradients sends, over the data axes that do not shard them."""
  axes = [axis for axis in plan.axis + plan.replicas if axis not in bundle.exchanged + bundle.home]
  ranks = _ranks(plan, axes)
  numbers = sum(sum(one.counts) * size for one, size in zip(bundle.classes, bundle.piece_sizes, strict=True))
  itemsize = jnp.dtype(bundle.classes[0].parcel.dtype).itemsize
  return Traffic(all_reduce=round(2 * numbers * itemsize * (ranks - 1) / ranks))


def _of_others(plan: 'Plan') -> Traffic:
  """Returns what the all-reduce of the gradients that are no matrices sends."""
  total = 0.0
  for path, leaf in plan.others.items():
    sharded = plan.sharded_axes(path)
    ranks = _ranks(plan, [axis for axis in plan.axis + plan.replicas if axis not in sharded])
    size = math.prod(leaf.shape) * leaf.dtype.itemsize / _ranks(plan, sharded)
    total += 2 * size * (ranks - 1) / ranks
  return Traffic(all_reduce=round(total))


def _total(parts: Sequence[Traffic]) -> Traffic:
  return Traffic(*(sum(numbers) for numbers in zip(*parts, strict=True)))


def _ranks(plan: 'Plan', axes: Sequence[str]) -> int:
  return math.prod(plan.mesh.shape[axis] for axis in axes)
