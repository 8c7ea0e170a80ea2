"""The report of a routing: which leaf goes to which optimizer, as which matrices, at what cost in state."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jaxtyping import PyTree

from emopt_jax.matrices import Axes, leaf_path, stack_shapes
from emopt_jax.routing import MATRIX, OTHER, Rules, check_rules, default_is_matrix, label, route
from emopt_jax.text_table import text_table, thousands


class RoutedLeaf(NamedTuple):
  """One row of a routing table.

  Attributes:
    path: Path of the leaf.
    shape: Shape of the leaf.
    matrices: What the matrix optimizer makes of it, '12 x (64, 256)'; empty for other leaves.
    optimizer: 'matrix' or 'other'.
    state_bytes: Bytes of optimizer state that belong to this leaf; None where no optimizer was given.
  """

  path: str
  shape: tuple[int, ...]
  matrices: str
  optimizer: str
  state_bytes: int | None


class RoutingTable(NamedTuple):
  """Which leaf goes to which optimizer; `print` it.

  Attributes:
    leaves: One row a leaf.
    unused_rules: Rules that matched no leaf.
  """

  leaves: tuple[RoutedLeaf, ...]
  unused_rules: tuple[tuple[str, str], ...]

  def __str__(self) -> str:
    header = ('path', 'shape', 'matrices', 'optimizer', 'state bytes')
    rows = [
      (leaf.path, str(leaf.shape), leaf.matrices, leaf.optimizer, thousands(leaf.state_bytes)) for leaf in self.leaves
    ]
    known = [leaf.state_bytes for leaf in self.leaves if leaf.state_bytes is not None]
    counts = ', '.join(f'{sum(leaf.optimizer == name for leaf in self.leaves)} {name}' for name in (MATRIX, OTHER))
    rows.append((f'{len(self.leaves)} leaves', '', '', counts, thousands(sum(known) if known else None)))
    lines = [text_table(header, rows, total=True)]
    lines += [f'rule matches no leaf: {pattern!r} -> {name!r}' for pattern, name in self.unused_rules]
    return '\n'.join(lines)


def describe_routing(
  params: PyTree,
  matrix_optimizer: optax.GradientTransformation | None = None,
  other_optimizer: optax.GradientTransformation | None = None,
  *,
  is_matrix: Callable[[str, jax.Array], bool] = default_is_matrix,
  rules: Rules = (),
  axes: Axes = None,
) -> RoutingTable:
  """Returns a table of what `route` does with each parameter, and of the state that it costs.

  Args:
    params: Parameters, or their `ShapeDtypeStruct`s.
    matrix_optimizer: As in `route`; without both optimizers the table has no state bytes.
    other_optimizer: As in `route`.
    is_matrix: As in `route`.
    rules: As in `route`.
    axes: The axes that the matrix optimizer was given, for the column `matrices`.

  Returns:
    A table that prints well.

  Raises:
    ValueError: As in `route`.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'embedding': jnp.ones((256, 8)), 'mlp': {'kernel': jnp.ones((8, 32)), 'bias': jnp.ones(32)}}
    >>> print(describe_routing(params))
    path        shape     matrices     optimizer          state bytes
    ----------  --------  -----------  -----------------  -----------
    embedding   (256, 8)               other                        -
    mlp/bias    (32,)                  other                        -
    mlp/kernel  (8, 32)   1 x (8, 32)  matrix                       -
    ----------  --------  -----------  -----------------  -----------
    3 leaves                           1 matrix, 2 other            -
  """
  check_rules(rules)
  leaves = [(leaf_path(keys), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(params)]
  labels = {path: label(path, leaf, is_matrix, rules) for path, leaf in leaves}
  descriptions = _describe_matrices(params, axes, labels)
  sizes = {}
  if matrix_optimizer is not None and other_optimizer is not None:
    optimizer = route(matrix_optimizer, other_optimizer, is_matrix=is_matrix, rules=rules)
    sizes = _bytes_by_path(jax.eval_shape(optimizer.init, params), [path for path, _ in leaves])
  rows = tuple(
    RoutedLeaf(path, tuple(leaf.shape), descriptions.get(path, ''), labels[path], sizes.get(path))
    for path, leaf in leaves
  )
  unused = tuple((p, name) for p, name in rules if not any(re.search(p, path) for path in labels))
  return RoutingTable(rows, unused)


def _describe_matrices(params: PyTree, axes: Axes, labels: dict[str, str]) -> dict[str, str]:
  def only(path: str) -> PyTree:
    return jax.tree_util.tree_map_with_path(
      lambda keys, leaf: leaf if leaf_path(keys) == path else optax.MaskedNode(), params
    )

  def describe(path: str) -> str:
    try:
      shapes = [shape.shape for shape in stack_shapes(only(path), axes).values()]
    except ValueError:
      return 'needs axes='
    return ', '.join(f'{batch} x ({m}, {n})' for batch, m, n in shapes)

  return {path: describe(path) for path, name in labels.items() if name == MATRIX}


def _bytes_by_path(state: PyTree, paths: list[str]) -> dict[str, int]:
  """Returns the bytes of the state's arrays that sit under each parameter's path; counts belong to none."""
  sizes = dict.fromkeys(paths, 0)
  for keys, array in jax.tree_util.tree_leaves_with_path(state):
    where = f'/{leaf_path(keys)}/'
    owners = [path for path in paths if f'/{path}/' in where or f'/{path}:' in where]
    if owners:
      sizes[max(owners, key=len)] += math.prod(array.shape) * array.dtype.itemsize
  return sizes
