"""How a parameter leaf is a stack of matrices, and back.

Every transform works on stacks `[batch, in, out]` in a dict keyed by the leaf's path, never on the leaf itself:
`to_stacks` makes the dict of a pytree, `from_stacks` puts one back into the pytree's form.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

Stacks = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
  """Which axes of a leaf are contracted and which are produced; all others are batch axes (layers, experts, heads).

  Attributes:
    inputs: Axis or axes that the layer contracts; their sizes multiply to the fan-in. Negative axes count from the end.
    outputs: Axis or axes that the layer produces; their sizes multiply to the fan-out.
    split: `(axis, sizes)` where one leaf holds several matrices side by side, as a fused query-key-value kernel does:
      `MatrixAxes(0, 1, split=(1, (64, 64, 64)))`. Sizes are those of the whole leaf, however it is sharded.

  Example:
    >>> scanned_layers = MatrixAxes(-2, -1)
    >>> convolution = MatrixAxes((0, 1, 2), 3)
  """

  inputs: int | tuple[int, ...] = 0
  outputs: int | tuple[int, ...] = 1
  split: tuple[int, tuple[int, ...]] | None = None


Axes = MatrixAxes | None | PyTree | Callable[[Any], PyTree]


def leaf_path(key_path: tuple[Any, ...]) -> str:
  """Returns the path of a leaf, 'block_0/attn/qkv/kernel', without the metadata boxes around the leaf.

  Flax boxes (`nnx.Param`, `nn.Partitioned`) appear as an attribute `value`, other boxes as a first unnamed child, at
  the end of the path; at init but not always at update. Later unnamed children are no box: they keep their number.
  """
  keys = list(key_path)
  while keys and (
    (isinstance(keys[-1], jax.tree_util.FlattenedIndexKey) and keys[-1].key == 0)
    or (isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name in ('value', 'raw_value'))
  ):
    keys.pop()
  return jax.tree_util.keystr(tuple(keys), simple=True, separator='/') or 'params'


def to_stacks(tree: PyTree, axes: Axes = None) -> Stacks:
  """Returns the matrices of every leaf as stacks `[batch, in, out]` in float32 or wider, keyed by the leaf's path.

  Args:
    tree: Parameters, gradients or moments. `None`, `optax.MaskedNode` and leaves with a zero-sized dimension hold no
      matrices.
    axes: A `MatrixAxes`, a pytree prefix of them, or a function of the tree that returns one. `None` stands for (0, 1)
      on leaves of two dimensions, unit dimensions not counted.

  Returns:
    A dict of stacks. A split leaf has one stack for each distinct block size; the second and later are keyed
    `path:1`, `path:2`.

  Raises:
    ValueError: If a leaf is no matrix or not of a real floating dtype, or its axes do not fit; the message names the
      leaf, its shape and the mend.

  Example:
    >>> stacks = to_stacks({'kernel': jnp.ones((12, 64, 256))}, MatrixAxes(-2, -1))
    >>> {path: stack.shape for path, stack in stacks.items()}
    {'kernel': (12, 64, 256)}
  """
  stacks = {}
  for path, leaf, leaf_axes in _matrix_leaves(tree, axes):
    layout = _Layout(path, leaf.shape, leaf_axes)
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    for key, stack in zip(layout.keys, layout.split(wide), strict=True):
      if key in stacks:
        raise ValueError(
          f"leaf '{path}' of shape {leaf.shape}: its part '{key}' has the path of another leaf; rename that"
        )
      stacks[key] = stack
  return stacks


def from_stacks(stacks: Stacks, like: PyTree, axes: Axes = None) -> PyTree:
  """Returns the stacks as a tree of the structure, shapes and dtypes of `like`: the inverse of `to_stacks`.

  Leaves of `like` that hold no matrices are returned as they are.
  """
  joined = {}
  for path, leaf, leaf_axes in _matrix_leaves(like, axes):
    layout = _Layout(path, leaf.shape, leaf_axes)
    joined[path] = layout.join([stacks[key] for key in layout.keys]).astype(leaf.dtype)
  return jax.tree_util.tree_map_with_path(lambda keys, leaf: joined.get(leaf_path(keys), leaf), like)


def stack_shapes(tree: PyTree, axes: Axes = None) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes and dtypes that `to_stacks` would give, for arrays or `ShapeDtypeStruct`s."""
  return jax.eval_shape(lambda tree: to_stacks(tree, axes), tree)


def single_matrices(tree: PyTree, axes: Axes = None) -> frozenset[str]:
  """Returns the paths of the stacks whose leaf is one matrix, or one split into several: it has no batch axis.

  A batch axis can be sharded, and an array that is sharded over it cannot be joined with others without traffic.
  """
  layouts = [_Layout(path, leaf.shape, leaf_axes) for path, leaf, leaf_axes in _matrix_leaves(tree, axes)]
  return frozenset(key for layout in layouts if layout.batch_size == 1 for key in layout.keys)


def resolve_axes(tree: PyTree, axes: Axes = None) -> dict[str, MatrixAxes]:
  """Returns the axes of every leaf that holds matrices, keyed by path, after defaults and checks."""
  return {path: leaf_axes for path, _, leaf_axes in _matrix_leaves(tree, axes)}


def _matrix_leaves(tree: PyTree, axes: Axes) -> list[tuple[str, jax.Array, MatrixAxes]]:
  given = axes(tree) if callable(axes) else axes
  try:
    spread = jax.tree.map(
      lambda leaf_axes, subtree: jax.tree.map(lambda _: (leaf_axes,), subtree),
      given,
      tree,
      is_leaf=lambda node: node is None or isinstance(node, MatrixAxes),
    )
  except ValueError as error:
    raise ValueError(
      'axes is no pytree prefix of the parameters: give one MatrixAxes for all leaves, or a tree of the same structure '
      'with MatrixAxes or None at its leaves'
    ) from error
  leaf_axes = jax.tree.leaves(spread, is_leaf=lambda node: isinstance(node, tuple) and len(node) == 1)
  found, paths = [], set()
  for (keys, leaf), (one,) in zip(jax.tree_util.tree_leaves_with_path(tree), leaf_axes, strict=True):
    path = leaf_path(keys)
    if path in paths:
      raise ValueError(
        f"leaf '{path}' of shape {leaf.shape}: another leaf has this path, by which the state is keyed; rename one of "
        "the dict keys that hold a '/'"
      )
    paths.add(path)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
        f"leaf '{path}' of shape {leaf.shape} has dtype {leaf.dtype}: matrix optimizers take real floating leaves; "
        'route it to another optimizer or mask it'
      )
    if 0 in leaf.shape:
      continue
    found.append((path, leaf, _check_axes(path, leaf.shape, one)))
  return found


def _check_axes(path: str, shape: tuple[int, ...], axes: MatrixAxes | None) -> MatrixAxes:
  """Returns the axes as sorted-out, non-negative tuples, or raises."""
  where = f"leaf '{path}' of shape {shape}"
  if axes is None:
    return _default_axes(where, shape)
  if not isinstance(axes, MatrixAxes):
    raise ValueError(f'{where}: its axes are {axes!r}; give a MatrixAxes, or None for the default')
  inputs, outputs = (tuple(side) if isinstance(side, tuple | list) else (side,) for side in (axes.inputs, axes.outputs))
  for axis in inputs + outputs + ((axes.split[0],) if axes.split else ()):
    if not -len(shape) <= axis < len(shape):
      raise ValueError(f'{where}: axis {axis} of {axes} is out of range; use axes from 0 to {len(shape) - 1}')
  inputs, outputs = (tuple(axis % len(shape) for axis in side) for side in (inputs, outputs))
  if len(set(inputs + outputs)) < len(inputs + outputs):
    raise ValueError(f'{where}: inputs and outputs of {axes} overlap; name every axis once')
  split = None
  if axes.split:
    axis, sizes = axes.split[0] % len(shape), tuple(axes.split[1])
    if min(sizes, default=0) < 1:
      raise ValueError(f'{where}: split sizes {sizes} must be positive')
    if sum(sizes) != shape[axis]:
      raise ValueError(
        f'{where}: split sizes {sizes} add up to {sum(sizes)}, not to the {shape[axis]} of axis {axis}; '
        'give the sizes of the whole, unsharded leaf'
      )
    split = (axis, sizes)
  return MatrixAxes(inputs, outputs, split)


def _default_axes(where: str, shape: tuple[int, ...]) -> MatrixAxes:
  # Unit dimensions are squeezed, but never below two: [1, 64] is a matrix of one row.
  kept = [axis for axis, size in enumerate(shape) if size != 1]
  kept += [axis for axis, size in enumerate(shape) if size == 1][: max(0, 2 - len(kept))]
  kept.sort()
  if len(shape) < 2 or len(kept) != 2:
    raise ValueError(
      f'{where} is not a matrix: give its axes, as in axes=MatrixAxes(inputs=-2, outputs=-1) for stacked [in, out] '
      'kernels, or route it to another optimizer'
    )
  return MatrixAxes((kept[0],), (kept[1],))


class _Layout:
  """The static reshaping of one leaf into stacks."""

  def __init__(self, path: str, shape: tuple[int, ...], axes: MatrixAxes):
    inputs, outputs = tuple(axes.inputs), tuple(axes.outputs)  # pyright: ignore[reportArgumentType]
    self._axis, sizes = axes.split or (0, (shape[0],))
    self._sizes = tuple(sizes)
    self._batch = tuple(axis for axis in range(len(shape)) if axis not in inputs + outputs)
    self.batch_size = math.prod(shape[axis] for axis in self._batch)
    self._order = self._batch + inputs + outputs
    self._inverse = tuple(sorted(range(len(shape)), key=self._order.__getitem__))
    self._shape, self._inputs, self._outputs = shape, inputs, outputs
    # Blocks of one size share a stack, so that 32 heads cost one batched product and not 32.
    self._classes = tuple(dict.fromkeys(self._sizes))
    self.keys = [path if i == 0 else f'{path}:{i}' for i in range(len(self._classes))]

  def split(self, leaf: jax.Array) -> list[jax.Array]:
    starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
    stacks = []
    for size in self._classes:
      blocks = [
        self._to_stack(jax.lax.slice_in_dim(leaf, start, start + size, axis=self._axis))
        for start, this in zip(starts, self._sizes, strict=True)
        if this == size
      ]
      stacks.append(blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks))
    return stacks

  def join(self, stacks: list[jax.Array]) -> jax.Array:
    remaining = {}
    for size, stack in zip(self._classes, stacks, strict=True):
      count = self._sizes.count(size)
      remaining[size] = iter(jnp.split(stack, count) if count > 1 else [stack])
    blocks = [self._from_stack(next(remaining[size]), size) for size in self._sizes]
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=self._axis)

  def _to_stack(self, block: jax.Array) -> jax.Array:
    def size(axes: tuple[int, ...]) -> int:
      return math.prod(block.shape[axis] for axis in axes)

    return block.transpose(self._order).reshape(size(self._batch), size(self._inputs), size(self._outputs))

  def _from_stack(self, stack: jax.Array, size: int) -> jax.Array:
    shape = [size if axis == self._axis else full for axis, full in enumerate(self._shape)]
    return stack.reshape([shape[axis] for axis in self._order]).transpose(self._inverse)
