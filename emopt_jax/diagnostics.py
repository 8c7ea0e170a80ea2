"""What a training run can watch of its matrix optimizers: arrays or states in, scalars out."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from emopt_jax.linalg.eigenbasis import Eigenbasis
from emopt_jax.linalg.factorizations import eigh
from emopt_jax.linalg.product_refresh import off_diagonal_share, rotated_factor
from emopt_jax.linalg.products import product, root_mean_square, transpose
from emopt_jax.matrices import leaf_path


def orthogonality_error(x: Float[Array, '*batch m n']) -> Float[Array, '*batch']:
  """Returns max |X X^T - I| over the entries of the smaller side: 0 for a polar factor of full rank.

  Example:
    >>> orthogonality_error(2 * jnp.eye(3))
    Array(3., dtype=float32)
  """
  x = x if x.shape[-2] <= x.shape[-1] else transpose(x)
  identity = jnp.eye(x.shape[-2], dtype=x.dtype)
  return jnp.max(jnp.abs(product(x, transpose(x)) - identity), axis=(-2, -1))


def update_rms(updates: PyTree) -> dict[str, jax.Array]:
  """Returns the root mean square of every leaf that is not empty, by path; AdamW's is about 0.2 times its rate.

  Example:
    >>> update_rms({'kernel': -0.5 * jnp.ones((2, 3))})['kernel'].round(4)
    Array(0.5, dtype=float32)
  """
  return {
    leaf_path(keys): root_mean_square(leaf.reshape(1, -1))[0, 0]
    for keys, leaf in jax.tree_util.tree_leaves_with_path(updates)
    if leaf.size
  }


def basis_staleness(factor: Float[Array, '*batch n n'], eigenbasis: Eigenbasis) -> Float[Array, '*batch']:
  """Returns the off-diagonal share |S - diag(S)|_F / |S|_F of S = Q^T A Q: 0 for an exact eigenbasis, at most 1.

  Example:
    >>> basis_staleness(jnp.diag(jnp.array([1.0, 2.0])), Eigenbasis(jnp.eye(2), jnp.ones(2)))
    Array(0., dtype=float32)
  """
  return off_diagonal_share(rotated_factor(factor, eigenbasis.vectors))


def factor_condition(factor: Float[Array, '*batch n n']) -> Float[Array, '*batch']:
  """Returns the largest over the smallest eigenvalue of a factor, infinite where it has not full rank to rounding.

  Example:
    >>> factor_condition(jnp.diag(jnp.array([1.0, 4.0])))
    Array(4., dtype=float32)
  """
  values = eigh(factor)[0]
  smallest, largest = values[..., 0], values[..., -1]
  singular = smallest <= jnp.finfo(factor.dtype).eps * largest
  return jnp.where(singular, jnp.inf, largest / jnp.where(singular, 1, smallest))


def skipped_gradients(state: PyTree) -> jax.Array:
  """Returns how many gradient matrices were not finite and skipped, summed over the transforms of an optimizer.

  Example:
    >>> import emopt_jax
    >>> optimizer = emopt_jax.soap(0.01)
    >>> gradient = {'kernel': jnp.full((2, 2), jnp.nan)}
    >>> _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    >>> skipped_gradients(state)
    Array(1, dtype=int32)
  """
  return _total(state, 'skipped')


def rejected_refreshes(state: PyTree) -> jax.Array:
  """Returns how many refreshed eigenbases were not finite and rejected, summed over the state of an optimizer.

  Example:
    >>> import emopt_jax
    >>> rejected_refreshes(emopt_jax.soap(0.01).init({'kernel': jnp.ones((2, 2))}))
    Array(0, dtype=int32)
  """
  return _total(state, 'rejected')


def _total(state: PyTree, field: str) -> jax.Array:
  total = jnp.zeros((), jnp.int32)
  for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
    if any(isinstance(key, jax.tree_util.GetAttrKey) and key.name == field for key in keys):
      total += jnp.sum(leaf, dtype=jnp.int32)
  return total
