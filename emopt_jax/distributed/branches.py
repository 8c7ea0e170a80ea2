"""Branches of `lax.cond` around `layerwise` inside `jax.shard_map`.

`layerwise` communicates. A branch that only some ranks take would wait for the others for ever, and a wrapper of Optax
that branches, accumulates or hands on gradients would do so with each rank's own. Neither can be read from the values
in the branch, so that the functions that are being traced around it are looked at.
"""

import inspect
import sys
from typing import Any, NamedTuple

import jax

from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.transport import checks_varying, varying_axes

_PREDICATES = {inspect.unwrap(jax.lax.cond).__code__: 'pred', inspect.unwrap(jax.lax.switch).__code__: 'index'}
_SHARD_MAP = inspect.unwrap(jax.shard_map).__globals__
_WRAP = (
  'layerwise(..., wrapper=lambda optimizer: optax.apply_if_finite(optimizer, 5)), say, whose gradients are averaged'
)
_OUTSIDE = 'call the optimizer outside of shard_map, with whole gradients'


class Branch(NamedTuple):
  """A branch that is being traced.

  Attributes:
    predicate: What decides whether it is taken.
    module: Module of the function that branches.
  """

  predicate: Any
  module: str


def branches_around() -> list[Branch]:
  """Returns the branches that are being traced around here, within a surrounding `shard_map`, the innermost first."""
  found, predicate, frame = [], None, sys._getframe(1)
  while frame is not None and frame.f_globals is not _SHARD_MAP:
    if frame.f_code in _PREDICATES:
      predicate = frame.f_locals[_PREDICATES[frame.f_code]]
    elif predicate is not None and not frame.f_globals.get('__name__', '').startswith('jax.'):
      found.append(Branch(predicate, frame.f_globals.get('__name__', '')))
      predicate = None
    frame = frame.f_back
  return found


def check_branches(plan: Plan, *, averaged: bool, local: bool) -> None:
  """Raises in a branch of whose predicate the ranks may differ, or of a wrapper that has local gradients.

  Args:
    plan: The plan.
    averaged: Whether the wrapper is that of `layerwise`, which has averaged gradients.
    local: Whether some leaf's gradients are each rank's own.
  """
  tracked = checks_varying(plan.axis[0])
  if not averaged and (local or not tracked):
    refuse_wrappers()
  for branch in branches_around():
    varying = sorted(varying_axes(branch.predicate)) if tracked and isinstance(branch.predicate, jax.Array) else []
    if varying:
      raise ValueError(
        f"layerwise is in a branch whose predicate varies over '{varying[0]}', so that ranks that take it would wait "
        f'for the others for ever: reduce the predicate over it; or {_OUTSIDE}'
      )


def refuse_wrappers() -> None:
  """Raises in a branch of a wrapper of Optax."""
  for branch in branches_around():
    if branch.module.split('.')[0] == 'optax':
      raise ValueError(
        f'a wrapper of {branch.module} around layerwise has gradients that differ from rank to rank, and may branch on '
        f'them where ranks then wait for each other for ever: write {_WRAP}; or {_OUTSIDE}'
      )


def check_whole(plan: Plan) -> None:
  """Raises where a wrapper would decide from shards, and nothing tells whether the ranks decide alike."""
  if checks_varying(plan.axis[0]):
    return
  for path in (*plan.leaves, *plan.others):
    if plan.sharded_axes(path):
      leaf = plan.leaves.get(path) or plan.others[path]
      raise ValueError(
        f"leaf '{path}' of shape {leaf.shape} is sharded by {leaf.spec}, and without check_vma nothing tells whether a "
        f"wrapper decides alike on all ranks' shards: give shard_map check_vma=True; or {_OUTSIDE}"
      )
