"""An eigenbasis refresh made of matrix products only, for accelerators, where QR and eigh cost tens of products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from emopt_jax.linalg.eigenbasis import Eigenbasis, qr_refresh, rayleigh_quotients
from emopt_jax.linalg.products import frobenius_norm, largest_magnitude, product, transpose
from emopt_jax.linalg.replace_where import replace_where

# With a larger off-diagonal share the basis is too far off for first-order angles, and one QR gains more. In steady
# state the share stays below 0.35, for gradients of rank one too; after a large spike it is above 0.5.
_FALLBACK_ABOVE = 0.4
# The share of |S_ij| by which the gap counts in favour of the earlier column.
_TIE_SHIFT = 0.25
# Below this norm of K the rotation is orthogonal to 1e-3, and one Newton-Schulz step leaves 2e-6.
_LARGEST_TURN = 1.75

# C = I + K^2/2 + b K^4 and S = I + c K^2 + d K^4 with C^2 - K^2 S^2 = I - d^2 K^10: of all polynomials of this degree
# the nearest to orthogonal, with d^2 = 8e-6. The rotation C + K S equals exp(K) up to 0.012 K^3.
_C = (5**0.5 - 1) / 8
_B = _C - 1 / 8
_D = (_B - _C**2) / 2


def jacobi_refresh(factor: Float[Array, '*batch n n'], eigenbasis: Eigenbasis) -> Eigenbasis:
  """Turns all pairs of columns at once towards the eigenvectors, by nine matrix products and no factorization.

  With S = Q^T A Q, gaps d_ij = S_jj - S_ii and couplings r_i^2 = sum_j S_ij^2 over j != i,
  K_ij = S_ij d_ij / (d_ij^2 + r_i^2 + r_j^2 + noise^2), Q <- Q exp(K) to third order, made orthonormal by one
  Newton-Schulz step, and w = diag(Q^T A Q).

  Where the gap is large K_ij is Jacobi's angle; where columns are coupled more than they are apart it goes to zero, so
  that Q moves continuously with A and no column turns by more than 1/2 radian. Columns with equal eigenvalues and
  S_ij != 0 are told apart by their order: the gap counts |S_ij| / 4 in favour of the earlier column. Angles that are
  rounding error, as in a null space, are damped by noise = 4 eps |S|_F.

  A matrix whose old basis leaves more than 0.4 |S|_F off the diagonal gets `qr_refresh` instead: after a spike, and
  sometimes in the first steps. The program holds that QR in a loop over the matrices that are so far off.

  Args:
    factor: Symmetric positive semi-definite A `[*batch, n, n]`. A zero factor keeps the basis.
    eigenbasis: The basis to start from.

  Returns:
    The new basis, column j continuing column j; not-a-number where the factor is not finite.

  Example:
    >>> import jax.numpy as jnp
    >>> basis = Eigenbasis(jnp.eye(2), jnp.zeros(2))
    >>> for _ in range(4):
    ...   basis = jax.jit(jacobi_refresh)(jnp.array([[4.0, 1.0], [1.0, 1.0]]), basis)
    >>> basis.values.round(3)
    Array([4.303, 0.697], dtype=float32)

  References:
    Golub and Van Loan, Matrix Computations, section 8.5 (Jacobi methods) and 8.1.2 (first-order perturbation).
  """
  scale = largest_magnitude(factor)
  normalized = factor / scale
  rotated = rotated_factor(normalized, eigenbasis.vectors)
  vectors = _newton_schulz_step(product(eigenbasis.vectors, _rotation(_turns(rotated))))
  zero = jnp.all(factor == 0, axis=(-2, -1), keepdims=True)
  vectors = jnp.where(zero, eigenbasis.vectors, vectors)
  values = rayleigh_quotients(normalized, vectors) * scale[..., 0]
  turned = Eigenbasis(vectors, values)
  # Not-a-number compares as false: a broken matrix does not send its neighbours to QR.
  far = off_diagonal_share(rotated) > _FALLBACK_ABOVE
  return replace_where(far, qr_refresh, factor, eigenbasis, otherwise=turned)


def rotated_factor(factor: Float[Array, '*batch n n'], vectors: Float[Array, '*batch n n']) -> Float[Array, '*b n n']:
  """Returns S = Q^T A Q, symmetric to the last digit: rounding must not turn one of a pair further than the other."""
  rotated = product(transpose(vectors), product(factor, vectors))
  return (rotated + transpose(rotated)) / 2


def off_diagonal_share(rotated: Float[Array, '*batch n n']) -> Float[Array, '*batch']:
  """Returns |S - diag(S)|_F / |S|_F: 0 for an exact eigenbasis and for a zero matrix, at most 1."""
  total = frobenius_norm(rotated)
  return (frobenius_norm(_off_diagonal(rotated)) / jnp.where(total > 0, total, 1))[..., 0, 0]


def _off_diagonal(s: jax.Array) -> jax.Array:
  # A mask and not a product with 0, which would make not-a-number of an infinity.
  return jnp.where(jnp.eye(s.shape[-1], dtype=bool), 0, s)


def _turns(s: jax.Array) -> jax.Array:
  """Returns the antisymmetric K, in radians."""
  off = _off_diagonal(s)
  squares = jnp.sum(jnp.square(off), axis=-1)
  couplings = squares[..., :, None] + squares[..., None, :]
  noise = 4 * jnp.finfo(s.dtype).eps * frobenius_norm(s)
  values = jnp.diagonal(s, axis1=-2, axis2=-1)
  index = jnp.arange(s.shape[-1])
  # Without the shift, columns that see the same, such as the rows of a gradient of ones, would never part.
  gaps = values[..., None, :] - values[..., :, None] - _TIE_SHIFT * jnp.abs(off) * jnp.sign(index - index[:, None])
  # The couplings bound the norm of each row of K by 1/2. With less damping the residual of a flat spectrum falls by a
  # third, but rounding errors of the first steps, where all gaps are small, grow tenfold in ten steps.
  denominator = jnp.square(gaps) + couplings + jnp.square(noise)
  return off * gaps / jnp.where(denominator > 0, denominator, 1)


def _rotation(k: jax.Array) -> jax.Array:
  """Returns C + K S, near exp(K), after K is scaled down to a norm at which that is nearly orthogonal."""
  second = product(k, k)
  fourth = product(second, second)
  # |K|_2 <= |K^4|_F^(1/4), which exceeds it by n^(1/8) at most.
  bound = jnp.sqrt(jnp.sqrt(frobenius_norm(fourth)))
  shrink = jnp.where(bound > _LARGEST_TURN, _LARGEST_TURN / bound, 1)
  k, second, fourth = shrink * k, shrink**2 * second, shrink**4 * fourth
  identity = jnp.eye(k.shape[-1], dtype=k.dtype)
  return identity + second / 2 + _B * fourth + product(k, identity + _C * second + _D * fourth)


def _newton_schulz_step(x: jax.Array) -> jax.Array:
  return 1.5 * x - 0.5 * product(x, product(transpose(x), x))
