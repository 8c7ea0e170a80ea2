"""One step of the two covariance factors of a matrix: the plain Kronecker form and the Kullback-Leibler form."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from emopt_jax.linalg.blocks import multiply_right, outer_product
from emopt_jax.linalg.eigenbasis import Eigenbases, Eigenbasis
from emopt_jax.linalg.products import transpose


class Factors(NamedTuple):
  """Covariance factors of the two sides of a matrix; `None` stands for the identity, kept for a side that is too long.

  Attributes:
    left: L `[*batch, m, m]`, or its diagonal blocks `[*batch, blocks, m / blocks, m / blocks]`.
    right: R `[*batch, n, n]`, or its diagonal blocks.
  """

  left: jax.Array | None
  right: jax.Array | None


def kronecker_update(factors: Factors, gradient: Float[Array, '*batch m n'], *, decay: jax.Array | float) -> Factors:
  """Averages the outer products: L <- b L + (1-b) G G^T, R <- b R + (1-b) G^T G.

  Args:
    factors: L and R, in float32 or wider.
    gradient: G `[*batch, m, n]`.
    decay: b in [0, 1).

  Returns:
    The new factors.

  Example:
    >>> import jax.numpy as jnp
    >>> kronecker_update(Factors(jnp.zeros((1, 1)), None), jnp.ones((1, 2)), decay=0.5).left
    Array([[1.]], dtype=float32)

  References:
    Gupta et al., Shampoo, arXiv 1802.09568.
  """
  left, right = factors
  if left is not None:
    left = decay * left + (1 - decay) * outer_product(gradient, left)
  if right is not None:
    right = decay * right + (1 - decay) * outer_product(transpose(gradient), right)
  return Factors(left, right)


def kl_update(
  factors: Factors, gradient: Float[Array, '*batch m n'], bases: Eigenbases, *, decay: jax.Array | float
) -> Factors:
  """Averages outer products whitened by the other side, which minimises the Kullback-Leibler divergence.

  L <- b L + (1-b)/n G Q_R diag(1/w_R) Q_R^T G^T, R <- b R + (1-b)/m G^T Q_L diag(1/w_L) Q_L^T G

  Args:
    factors: L and R, in float32 or wider.
    gradient: G `[*batch, m, n]`.
    bases: Q and w of both sides from before this step. A side without basis counts as the identity. Eigenvalues are
      floored at eps times the largest.
    decay: b in [0, 1).

  Returns:
    The new factors.

  Example:
    >>> import jax.numpy as jnp
    >>> bases = Eigenbases(None, Eigenbasis(jnp.eye(2), jnp.array([1.0, 2.0])))
    >>> kl_update(Factors(jnp.zeros((1, 1)), None), jnp.ones((1, 2)), bases, decay=0.0).left
    Array([[0.75]], dtype=float32)

  References:
    Lin et al., KL-Shampoo, arXiv 2509.03378.
  """
  left, right = factors
  m, n = gradient.shape[-2:]
  if left is not None:
    whitened = gradient if bases.right is None else _whiten(gradient, bases.right)
    left = decay * left + (1 - decay) / n * outer_product(whitened, left)
  if right is not None:
    whitened = transpose(gradient) if bases.left is None else _whiten(transpose(gradient), bases.left)
    right = decay * right + (1 - decay) / m * outer_product(whitened, right)
  return Factors(left, right)


def _whiten(x: jax.Array, basis: Eigenbasis) -> jax.Array:
  """Returns X Q diag(w^-1/2): its outer product is symmetric to the last bit, that of two different halves is not."""
  # Of the whole side, also where it is cut into blocks.
  largest = jnp.max(basis.values, axis=tuple(range(x.ndim - 2, basis.values.ndim)), keepdims=True)
  values = jnp.maximum(basis.values, jnp.finfo(x.dtype).eps * largest)
  inverse_root = jnp.where(values > 0, jax.lax.rsqrt(values), 0)
  scales = inverse_root.reshape(*x.shape[:-2], 1, x.shape[-1])
  return multiply_right(x, basis.vectors) * scales
