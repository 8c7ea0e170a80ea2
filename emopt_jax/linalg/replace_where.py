"""A costly function of those matrices of a batch that need it, one after another: the others cost nothing."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

Result = TypeVar('Result')


def replace_where(
  needed: Bool[Array, '*batch'], function: Callable[..., Result], *operands: object, otherwise: Result
) -> Result:
  """Returns `function(*operands)` of the matrices that need it, and `otherwise` of the rest.

  A loop of as many rounds as there are such matrices, so that none costs nothing; for a single matrix a branch. Under
  `jax.vmap` the loop goes on as long as any of the mapped batches needs it.

  Args:
    needed: Which matrices.
    function: Takes trees of arrays `[1, ...]` and returns one, like `otherwise` in structure and dtypes.
    *operands: Trees of arrays `[*batch, ...]`.
    otherwise: Tree of arrays `[*batch, ...]`: what the other matrices get.

  Returns:
    A tree like `otherwise`.

  Example:
    >>> stack = jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
    >>> replace_where(jnp.array([True, False]), jnp.negative, stack, otherwise=stack)[:, 0, 0]
    Array([-1.,  2.], dtype=float32)
  """
  batch = needed.shape
  if math.prod(batch) == 1:
    # XLA would move what every round of a loop has in common, and so all of it, before the loop.
    return _one_branch(function)(needed.reshape(()), operands, otherwise)
  flat = lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :])  # noqa: E731
  stacks, results = jax.tree.map(flat, operands), jax.tree.map(flat, otherwise)
  order = jnp.argsort(~needed.ravel(), stable=True)

  def one(i: jax.Array, results: Result) -> Result:
    new = function(*jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, order[i], 1), stacks))
    return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, order[i], 0), results, new)

  results = lax.fori_loop(0, jnp.sum(needed), one, results)
  return jax.tree.map(lambda x, like: x.reshape(like.shape), results, otherwise)


def _one_branch(function: Callable[..., Result]) -> Callable[[jax.Array, tuple, Result], Result]:
  # Under a caller's `jax.vmap` one after another, since a batched branch is a choice between two results.
  @jax.custom_batching.sequential_vmap
  def branch(needed: jax.Array, operands: tuple, otherwise: Result) -> Result:
    return lax.cond(needed, lambda: function(*operands), lambda: otherwise)

  return branch
