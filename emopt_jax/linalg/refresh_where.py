"""A refresh of those matrices of a batch that need it, one after another: the others cost nothing."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from emopt_jax.linalg.eigenbasis import Eigenbasis, Refresh


def refresh_where(
  needed: Bool[Array, '*batch'],
  refresh: Refresh,
  factor: Float[Array, '*batch n n'],
  eigenbasis: Eigenbasis,
  otherwise: Eigenbasis,
) -> Eigenbasis:
  """Returns `refresh(factor, eigenbasis)` of the matrices that need it, and `otherwise` of the rest.

  A loop of as many rounds as there are such matrices, so that none costs nothing. Under `jax.vmap` it goes on as long
  as any of the mapped batches needs it.

  Args:
    needed: Which matrices.
    refresh: A refresh.
    factor: Their factors.
    eigenbasis: Their bases.
    otherwise: What the others get.

  Returns:
    The eigenbases.

  Example:
    >>> from emopt_jax.linalg.eigenbasis import qr_refresh
    >>> start = Eigenbasis(jnp.stack([jnp.eye(2)] * 2), jnp.zeros((2, 2)))
    >>> factor = jnp.stack([jnp.diag(jnp.array([1.0, 4.0]))] * 2)
    >>> refresh_where(jnp.array([True, False]), qr_refresh, factor, start, start).values
    Array([[1., 4.],
           [0., 0.]], dtype=float32)
  """
  batch = needed.shape
  flat = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), (factor, eigenbasis, otherwise))
  factors, old, results = flat
  order = jnp.argsort(~needed.ravel(), stable=True)

  def one(i: jax.Array, results: Eigenbasis) -> Eigenbasis:
    take = lambda x: lax.dynamic_slice_in_dim(x, order[i], 1)  # noqa: E731
    new = refresh(take(factors), jax.tree.map(take, old))
    return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, order[i], 0), results, new)

  results = lax.fori_loop(0, jnp.sum(needed), one, results)
  return jax.tree.map(lambda x, like: x.reshape(like.shape), results, otherwise)
