"""Matrices of one shape from different leaves, worked on in one batch.

A model of many layers holds few shapes. One batched product instead of one per layer keeps the compiled program as long
as the list of shapes, and an accelerator busy.
"""

from collections.abc import Callable, Collection, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Numbers in a batch, which is a copy of what it joins. A larger matrix, or a leaf that is a stack, is its own batch. On
# CPUs large matrices are faster one by one, in the cache, and XLA works on several of them at a time.
LARGEST_BATCH = 2**27
LARGEST_BATCH_ON_CPU = 2**21


def map_by_shape(function: Callable[..., Any], single: Collection[str], *entries: dict[str, Any]) -> dict[str, Any]:
  """Applies a function of stacks to the leaves of each path, those of one shape joined along their leading axis.

  Args:
    function: Takes one tree of arrays `[batch, ...]` for each of `entries`, and returns such a tree; the matrices of a
      batch do not meet.
    single: Paths that may be joined, as from `matrices.single_matrices`.
    *entries: Dicts by path of trees of arrays `[batch, ...]`, all of the same paths.

  Returns:
    Dict by path of what the function returns.

  Example:
    >>> double = lambda x: 2 * x
    >>> leaves = {'a': jnp.ones((1, 2, 3)), 'b': jnp.ones((1, 2, 3)), 'c': jnp.ones((1, 2))}
    >>> str(jax.make_jaxpr(lambda leaves: map_by_shape(double, {'a', 'b', 'c'}, leaves))(leaves)).count('mul')
    2
  """
  results = {}
  for paths in batches(single, *entries):
    trees = [tuple(entry[path] for entry in entries) for path in paths]
    if len(paths) == 1:
      results[paths[0]] = function(*trees[0])
      continue
    sizes = [jax.tree.leaves(tree)[0].shape[0] for tree in trees]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)
    values, structure = jax.tree.flatten(function(*joined))
    parts = zip(*(lax.split(value, sizes) for value in values), strict=True)
    results |= {path: jax.tree.unflatten(structure, part) for path, part in zip(paths, parts, strict=True)}
  return {path: results[path] for path in entries[0]}


def batches(single: Collection[str], *entries: dict[str, Any]) -> list[list[str]]:
  """Returns the paths that `map_by_shape` joins, in the order of their first one."""
  groups: dict[Hashable, list[str]] = {}
  for path in entries[0]:
    key = _kind([entry[path] for entry in entries]) if path in single else path
    groups.setdefault(key, []).append(path)
  largest = LARGEST_BATCH_ON_CPU if jax.default_backend() == 'cpu' else LARGEST_BATCH
  chunks = []
  for paths in groups.values():
    numbers = sum(leaf.size for leaf in jax.tree.leaves([entry[paths[0]] for entry in entries]))
    together = max(1, largest // numbers)
    chunks += [paths[start : start + together] for start in range(0, len(paths), together)]
  return chunks


def _kind(trees: list[Any]) -> Hashable:
  """Returns what trees that can be joined have in common: structure, shapes but for the batch, dtypes, shardings."""
  leaves, structure = jax.tree.flatten(trees)
  types = [jax.typeof(leaf) for leaf in leaves]
  return structure, tuple((t.shape[1:], t.dtype, t.sharding, getattr(t, 'vma', None)) for t in types)
