"""The table that a plan prints."""

import math
from typing import TYPE_CHECKING

import numpy as np

from emopt_jax.distributed import traffic
from emopt_jax.distributed.dealing import lower_bound
from emopt_jax.text_table import text_table, thousands

if TYPE_CHECKING:
  from emopt_jax.distributed.plan import Plan


def plan_table(plan: 'Plan') -> str:
  """Returns the classes of a plan, who owns them, how even the load is, and what state and traffic it makes.

  Args:
    plan: The plan.
  """
  header = ('class', 'dtype', 'dealt over', 'bundle', 'matrices', 'per rank', 'share of load')
  total, rows = float(plan.loads.sum()), []
  for number, bundle in enumerate(plan.bundles):
    homes = math.prod(plan.mesh.shape[axis] for axis in bundle.home)
    ranks = math.prod(plan.mesh.shape[axis] for axis in bundle.owners)
    repeated = plan.loads.size / homes / ranks
    over = ' x '.join(f'{axis}={plan.mesh.shape[axis]}' for axis in bundle.owners) or 'stay at home'
    for one in bundle.classes:
      matrices = sum(one.counts) * len(one.parcel.matrices) * homes
      low, high = min(one.counts), max(one.counts)
      per_rank = str(low) if low == high else f'{low} to {high}'
      share = one.cost * sum(one.counts) * homes * repeated / total
      rows.append((one.name, one.parcel.dtype, over, str(number), str(matrices), per_rank, f'{share:.0%}'))
  mesh = ' x '.join(f'{axis}={size}' for axis, size in plan.mesh.shape.items())
  lines = [f'mesh {mesh}', text_table(header, rows, numbers=4)]
  mean = total / plan.loads.size
  lines.append(f'load: max/mean {plan.loads.max() / mean:.3f}; whole matrices allow {_bound(plan) / mean:.3f}')
  if plan.state_bytes:
    ranks = plan.loads.size
    owned, whole = plan.state_bytes
    lines.append(
      f'state: {thousands(owned)} bytes a device, of {thousands(whole)} in all ({owned * ranks / whole:.2f} / N)'
    )
  for entry, sent in (
    ('inside shard_map', traffic.traffic_inside_shard_map(plan)),
    ('plain jit', traffic.traffic_in_jit(plan)),
  ):
    parts = ', '.join(f'{name.replace("_", "-")} {thousands(size)}' for name, size in sent._asdict().items() if size)
    lines.append(f'bytes sent a device and step, {entry}: {thousands(sum(sent))} ({parts})')
  return '\n'.join(lines)


def _bound(plan: 'Plan') -> float:
  """Returns a load that no dealing gets below: per team of owners, and the mean of all."""
  teams: dict = {}
  for bundle in plan.bundles:
    teams.setdefault((bundle.owners, bundle.home), []).extend(bundle.classes)
  bounds = [float(np.mean(plan.loads))]
  for (owners, _), classes in teams.items():
    ranks = math.prod(plan.mesh.shape[axis] for axis in owners)
    bounds.append(lower_bound([sum(one.counts) for one in classes], [one.cost for one in classes], ranks))
  return max(bounds)
