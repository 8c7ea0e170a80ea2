"""Which leaf goes to which optimizer."""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from emopt_jax.matrices import leaf_path

MATRIX, OTHER = 'matrix', 'other'
Rules = Sequence[tuple[str, str]]

# Names, of one component of a path, that keep a leaf from a matrix optimizer: one row or column of these is looked up,
# compared or scaled by itself, so that the singular values of the whole mean nothing.
_NOT_A_MATRIX = re.compile(
  r'(^|_)emb(_|$)|embed|^w[tp]e$|^(pos|position)s?(_|$)|_table$'
  r'|(^|_)head(_\d+|_proj)?$|^classifier|^logits|^readout|vocab|norm|^ln(_|\d|$)|conv|router',
  re.IGNORECASE,
)
# Names of leaves that hold one number a feature, and look like a matrix when they are stacked over layers.
_VECTOR = re.compile(r'(^|_)(b|bias|beta|gamma|gain|scale)$', re.IGNORECASE)
# Names of leaves that stay matrices when they are stacked over layers or experts.
_KERNEL = re.compile(r'(^|_)(kernel|weight|w\d?|proj|up|down|gate)(_|$)', re.IGNORECASE)


def default_is_matrix(path: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
  """Returns whether a leaf belongs in a matrix optimizer, judged by its path and shape.

  Embeddings, heads, norms, biases, convolution filters and routers do not. Of the others, leaves of two dimensions
  do, and leaves of more if they are named as a kernel: `[layers, in, out]`. Unit dimensions are not counted. Names can
  mislead, a router called 'gate' or a head called 'output' say: read the table of `describe_routing`.

  Args:
    path: Path of the leaf, 'block_0/attn/qkv/kernel'.
    leaf: The parameter, of which only shape and dtype are looked at.

  Returns:
    True for a matrix.

  Example:
    >>> default_is_matrix('block_0/mlp/kernel', jnp.ones((64, 256)))
    True
    >>> default_is_matrix('embed/embedding', jnp.ones((50257, 64)))
    False
  """
  components = path.split('/')
  dimensions = sum(size != 1 for size in leaf.shape)
  if dimensions < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
    return False
  if _VECTOR.search(components[-1]) or any(_NOT_A_MATRIX.search(component) for component in components):
    return False
  return dimensions == 2 or _KERNEL.search(components[-1]) is not None


def route(
  matrix_optimizer: optax.GradientTransformation,
  other_optimizer: optax.GradientTransformation,
  *,
  is_matrix: Callable[[str, jax.Array], bool] = default_is_matrix,
  rules: Rules = (),
) -> optax.GradientTransformationExtraArgs:
  """Sends matrices to one optimizer and everything else to another.

  `describe_routing` with the same arguments prints who gets what.

  Args:
    matrix_optimizer: `muon`, `soap`, ... Scanned `[layers, in, out]` kernels need its `axes=MatrixAxes(-2, -1)`.
    other_optimizer: `optax.adamw`, usually.
    is_matrix: Function of a leaf's path and the leaf.
    rules: Pairs of a regular expression and 'matrix' or 'other'; the first that matches somewhere in the path decides,
      before `is_matrix`.

  Returns:
    An optax transformation.

  Raises:
    ValueError: If a rule names neither 'matrix' nor 'other' or is no regular expression.

  Example:
    >>> import emopt_jax
    >>> optimizer = route(emopt_jax.muon(0.02), optax.adamw(3e-3), rules=[('lm_head', 'matrix')])
  """
  check_rules(rules)
  return optax.partition(
    {MATRIX: matrix_optimizer, OTHER: other_optimizer},
    lambda params: jax.tree_util.tree_map_with_path(
      lambda keys, leaf: label(leaf_path(keys), leaf, is_matrix, rules), params
    ),
  )


def label(path: str, leaf: jax.Array, is_matrix: Callable[[str, jax.Array], bool], rules: Rules) -> str:
  """Returns 'matrix' or 'other' for one leaf."""
  for pattern, name in rules:
    if re.search(pattern, path):
      return name
  return MATRIX if is_matrix(path, leaf) else OTHER


def check_rules(rules: Rules) -> None:
  """Raises a ValueError for a rule that names no optimizer or is no regular expression."""
  for pattern, name in rules:
    if name not in (MATRIX, OTHER):
      raise ValueError(f"rule {pattern!r} -> {name!r}: the name must be '{MATRIX}' or '{OTHER}'")
    try:
      re.compile(pattern)
    except re.error as error:
      raise ValueError(f'rule {pattern!r} -> {name!r} is no regular expression: {error}') from error
