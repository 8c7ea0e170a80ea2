"""Factorizations of stacks of matrices: XLA's own, except on CPUs.

On CPUs jaxlib 0.10 hands the matrices of a batch to XLA's thread pool, from a thread of that pool,
and waits for them: as many batched factorizations at once as there are threads wait for each other for ever. A batch of
one is done where it is called. So a loop goes through the stack, a few matrices at a time, which XLA runs side by side.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from emopt_jax.linalg.products import transpose

# More would only lengthen the program.
_SIDE_BY_SIDE = min(os.cpu_count() or 1, 8)


def qr(x: Float[Array, '*batch m n']) -> tuple[jax.Array, jax.Array]:
  """Returns Q and R, as `jnp.linalg.qr` does."""
  return _of_stack(lambda x: tuple(jnp.linalg.qr(x)), x)


def eigh(x: Float[Array, '*batch n n']) -> tuple[jax.Array, jax.Array]:
  """Returns rising eigenvalues and eigenvectors of symmetric matrices, as `jnp.linalg.eigh` does."""
  return _of_stack(lambda x: tuple(jnp.linalg.eigh(x)), x)


def svd(x: Float[Array, '*batch m n']) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns U, the falling singular values and V^T, as `jnp.linalg.svd(full_matrices=False)` does."""
  return _of_stack(lambda x: tuple(jnp.linalg.svd(x, full_matrices=False)), x)


def cholesky(x: Float[Array, '*batch n n']) -> jax.Array:
  """Returns the lower triangular factor of positive definite matrices, of which it reads the lower triangle."""
  return _of_stack(lambda x: lax.linalg.cholesky(x, symmetrize_input=False), x)


def solve_triangular(lower: Float[Array, '*batch m m'], x: Float[Array, '*batch m n']) -> jax.Array:
  """Returns L^-1 X, as `lax.linalg.triangular_solve` does."""
  # BLAS keeps matrices by columns and XLA by rows: the transposed problem is the one that takes and leaves no copy.
  return _of_stack(lambda lower, x: transpose(_solve_transposed(lower, transpose(x))), lower, x)


def _solve_transposed(lower: jax.Array, x: jax.Array) -> jax.Array:
  """Returns X L^-T."""
  return lax.linalg.triangular_solve(lower, x, left_side=False, lower=True, transpose_a=True)


def _of_stack(function: Callable[..., Any], *arrays: jax.Array) -> Any:
  # Under a caller's `jax.vmap`, too, the matrices come one after another.
  alone = jax.custom_batching.sequential_vmap(function)

  def loop(*stacks: jax.Array) -> Any:
    together = min(_SIDE_BY_SIDE, len(stacks[0]))
    return lax.scan(lambda _, matrices: (None, alone(*matrices)), None, stacks, unroll=together)[1]

  batch = arrays[0].shape[:-2]
  stacks = [x.reshape(-1, *x.shape[-2:]) for x in arrays]
  results = lax.platform_dependent(*stacks, cpu=loop, default=function)
  return jax.tree.map(lambda result: result.reshape(*batch, *result.shape[1:]), results)
