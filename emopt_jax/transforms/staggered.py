"""Work that is due every so many steps, spread over the steps matrix by matrix."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from emopt_jax.linalg.blocks import per_matrix


def staggered(function: Callable[..., PyTree], step: jax.Array, every: ArrayLike) -> Callable[..., PyTree]:
  """Returns the function applied, at each step, to the share of the matrices of a batch that is due.

  Of k matrices ceil(k / every) are due together, at the steps 0, every, ...; the next ones a step later.

  Args:
    function: Takes the tree that it changes, arrays `[k, ...]`, and others of k matrices, and returns the changed tree.
    step: Number of the step, int32.
    every: Steps between two turns of a matrix. If it is traced, as by `optax.inject_hyperparams`, the share would have
      no static size, and all matrices are due together.

  Returns:
    A function of the same arguments.

  Example:
    >>> half = staggered(lambda x: x + 1, jnp.array(1), 2)
    >>> half(jnp.zeros(4))
    Array([0., 0., 1., 1.], dtype=float32)
  """
  if isinstance(every, int) and every == 1:
    return function

  def apply(before: PyTree, *others: Any) -> PyTree:
    k = jax.tree.leaves(before)[0].shape[0]
    share = -(-k // every) if isinstance(every, int) else k
    turn = step % every
    # The last share starts early if it is short, and leaves alone what has had its turn.
    start = jnp.minimum(turn * share, k - share)

    def take_turn(before: PyTree) -> PyTree:
      due = start + jnp.arange(share) >= turn * share
      old, *inputs = (
        jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, share), tree) for tree in (before, *others)
      )
      new = jax.tree.map(lambda x, y: jnp.where(per_matrix(due, x), x, y), function(old, *inputs), old)
      return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), before, new)

    return lax.cond(turn * share < k, take_turn, lambda before: before, before)

  return apply
