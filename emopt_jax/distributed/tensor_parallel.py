"""Newton-Schulz on matrices sharded over one mesh axis, called inside `jax.shard_map`: for fewer matrices than ranks.

Three functions with one signature, which equal `newton_schulz` of the whole matrix. They differ in what they send:
`duplicated` the matrix, `gram` the Gram matrix of the unsharded side once, `per_step` that Gram matrix at every step.
`cheapest` chooses. Inside, columns are sharded: y is `[*batch, m, n_local]` and A = Y Y^T is summed over the ranks.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from emopt_jax.distributed.costs import newton_schulz_cost
from emopt_jax.linalg.coefficients import POLAR_EXPRESS, Coefficients
from emopt_jax.linalg.factorizations import cholesky, solve_triangular
from emopt_jax.linalg.gram import plain_steps, row_scale
from emopt_jax.linalg.polar import check_matrices, newton_schulz, widened
from emopt_jax.linalg.products import frobenius_norm, product, symmetric_product, transpose


def duplicated(
  x: Float[Array, '*batch m n'],
  axis: str,
  *,
  dim: int = -1,
  coefficients: Coefficients = POLAR_EXPRESS,
  steps: int | None = None,
  dtype: DTypeLike | None = None,
) -> Float[Array, '*batch m n']:
  """Gathers the matrix on every rank, runs `newton_schulz` there, and keeps the own slice: one all-gather.

  Args:
    x: Local shards `[*batch, m, n_local]`, or `[*batch, m_local, n]` for `dim=-2`.
    axis: Mesh axis that the matrices are sharded over.
    dim: The sharded side, -1 (columns) or -2 (rows).
    coefficients, steps, dtype: As for `newton_schulz`.

  Returns:
    The shard of the result, in the shape and dtype of x, varying over `axis`.

  Raises:
    ValueError: If `axis` is no manual mesh axis here or `dim` is neither -1 nor -2, and as `newton_schulz`.

  Example:
    >>> mesh, split = jax.make_mesh((1,), ('model',)), jax.P(None, 'model')
    >>> run = jax.shard_map(lambda x: duplicated(x, 'model', steps=16), mesh=mesh, in_specs=split, out_specs=split)
    >>> run(jax.device_put(jnp.array([[2.0, 0.0]]), jax.NamedSharding(mesh, split))).round(3)
    Array([[1., 0.]], dtype=float32)
  """
  x = _check(x, axis, dim)
  whole = lax.all_gather(x, axis, axis=x.ndim + dim, tiled=True)
  whole = newton_schulz(whole, coefficients=coefficients, steps=steps, dtype=dtype)
  return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * x.shape[dim], x.shape[dim], x.ndim + dim)


def gram(
  x: Float[Array, '*batch m n'],
  axis: str,
  *,
  dim: int = -1,
  coefficients: Coefficients = POLAR_EXPRESS,
  steps: int | None = None,
  dtype: DTypeLike | None = None,
  refinements: int = 0,
) -> Float[Array, '*batch m n']:
  """Sums one Gram matrix over the ranks, and iterates on its Cholesky factor: two all-reduces for any number of steps.

  A = sum_r X_r X_r^T = L L^T, Q = L^-1 X; since every step multiplies from the left, NS(X) = NS(L) Q. The iterates
  L L^T cannot turn indefinite, as those of the recurrence A <- q(A)^2 A do for a matrix without full rank.

  A Gram matrix squares the condition number: float32 loses what is below about 1e-3 |X|_F. Measured, relative to the
  result: 1e-6 for wide random matrices, 3e-6 at condition number 30, 3e-5 at 100; at 1000 and for square random ones
  2e-4 with five-step tables and 2e-2 with `POLAR_EXPRESS`, as with bfloat16 products; 0.2 from 1e4, where the least
  directions come out shrunk, never blown up. Momentum is often so: one refinement is as accurate as `per_step`.
  If the sharded side is the shorter one, A is singular (1e-4) and larger than X, so that `duplicated` sends less.

  Args:
    x: Local shards `[*batch, m, n_local]`, or `[*batch, m_local, n]` for `dim=-2`.
    axis, dim, coefficients, steps: As for `duplicated`.
    dtype: As for `newton_schulz`, of the steps; the Gram matrix of X is in float32 or wider.
    refinements: Times that Q is factored again, each with one more all-reduce.

  Returns: As `duplicated`.

  Raises:
    ValueError: As `duplicated`, and for a table that rescales rows if the sharded side is the shorter one.

  Example:
    >>> mesh, split = jax.make_mesh((1,), ('model',)), jax.P(None, 'model')
    >>> run = jax.shard_map(lambda x: gram(x, 'model', steps=16), mesh=mesh, in_specs=split, out_specs=split)
    >>> run(jax.device_put(jnp.array([[2.0, 0.0]]), jax.NamedSharding(mesh, split))).round(3)
    Array([[1., 0.]], dtype=float32)

  References:
    Fukaya et al., Shifted Cholesky QR, SIAM J. Sci. Comput. 42 (2020).
  """
  y, matrix, rows = _start(x, axis, dim, coefficients, steps)
  lower = _cholesky(matrix)
  y = solve_triangular(lower, y)
  for _ in range(refinements):
    correction = _cholesky(lax.psum(symmetric_product(y, y), axis))
    y, lower = solve_triangular(correction, y), product(lower, correction)
  matrix = symmetric_product(lower, lower)
  factor = plain_steps(lower, matrix, rows, lambda z: symmetric_product(z, z, dtype), dtype)
  y = product(factor, y, dtype)
  return (y if dim == -1 else transpose(y)).astype(x.dtype)


def per_step(
  x: Float[Array, '*batch m n'],
  axis: str,
  *,
  dim: int = -1,
  coefficients: Coefficients = POLAR_EXPRESS,
  steps: int | None = None,
  dtype: DTypeLike | None = None,
) -> Float[Array, '*batch m n']:
  """Sums the Gram matrix over the ranks at every step: `steps` + 1 all-reduces, and as accurate as `newton_schulz`.

  X_r <- a X_r + (bA + cA^2) X_r with A = sum_r X_r X_r^T, of the unsharded side even where it is the longer one.

  Args:
    x: Local shards `[*batch, m, n_local]`, or `[*batch, m_local, n]` for `dim=-2`.
    axis, dim, coefficients, steps, dtype: As for `duplicated`.

  Returns: As `duplicated`.

  Raises:
    ValueError: As `duplicated`, and for a table that rescales rows if the sharded side is the shorter one.

  Example:
    >>> mesh, split = jax.make_mesh((1,), ('model',)), jax.P(None, 'model')
    >>> run = jax.shard_map(lambda x: per_step(x, 'model', steps=16), mesh=mesh, in_specs=split, out_specs=split)
    >>> run(jax.device_put(jnp.array([[2.0, 0.0]]), jax.NamedSharding(mesh, split))).round(3)
    Array([[1., 0.]], dtype=float32)
  """
  y, matrix, rows = _start(x, axis, dim, coefficients, steps)
  y = plain_steps(y, matrix, rows, lambda z: lax.psum(symmetric_product(z, z, dtype), axis), dtype)
  return (y if dim == -1 else transpose(y)).astype(x.dtype)


def cheapest(
  shape: tuple[int, ...],
  ranks: int,
  *,
  steps: int,
  dim: int = -1,
  itemsize: int = 4,
  bandwidth: float = 4.5e11,
  rate: float = 5e13,
  latency: float = 2e-5,
) -> Callable[..., jax.Array]:
  """Returns the one of `duplicated`, `gram` and `per_step` with the least estimated time.

  seconds = collectives * latency + bytes / bandwidth + operations / rate, of one device in a ring. With the unsharded
  side m, the whole sharded side n, s <= l the same in order and r = (ranks - 1) / ranks:
  `duplicated`: 1 collective, r m n itemsize bytes, steps (4 s^2 l + 2 s^3) operations;
  `gram`: 2 collectives, 8 r m^2 bytes, 5 m^2 n / ranks + (6 steps + 2) m^3 operations;
  `per_step`: steps + 1 collectives, 8 r m^2 steps bytes, steps (4 m^2 n / ranks + 2 m^3) operations.

  Args:
    shape: Shape `(*batch, m, n)` of the whole matrices.
    ranks: Devices along the mesh axis, at least 1.
    steps: Newton-Schulz steps, at least 1.
    dim: The sharded side, -1 (columns) or -2 (rows).
    itemsize: Bytes of a number of the matrix as it is gathered; Gram matrices are float32.
    bandwidth: Bytes a second that a device sends; by default an H100 over NVLink.
    rate: Operations a second; by default an H100 in float32 (bfloat16: about 5e14).
    latency: Seconds that a collective takes at least.

  Raises:
    ValueError: If `ranks` or `steps` is below 1, or `dim` is neither -1 nor -2.

  Example:
    >>> cheapest((1024, 65536), 8, steps=8).__name__
    'gram'
  """
  if min(ranks, steps) < 1 or dim not in (-1, -2):
    raise ValueError(f'ranks and steps must be at least 1 and dim -1 or -2, got {ranks}, {steps} and {dim}')
  *batch, m, n = shape if dim == -1 else (*shape[:-2], shape[-1], shape[-2])
  ring, shared, matrices = (ranks - 1) / ranks, m**2 * n / ranks, math.prod(batch)
  costs = {
    duplicated: (1, ring * m * n * itemsize, newton_schulz_cost(m, n, steps=steps)),
    gram: (2, 8 * ring * m**2, 5 * shared + (6 * steps + 2) * m**3),
    per_step: (steps + 1, 8 * ring * m**2 * steps, steps * (4 * shared + 2 * m**3)),
  }
  seconds = {f: c * latency + matrices * (sent / bandwidth + flops / rate) for f, (c, sent, flops) in costs.items()}
  return min(seconds, key=lambda function: seconds[function])


def _check(x: jax.Array, axis: str, dim: int) -> jax.Array:
  """Returns x, marked as varying over the axis where the `shard_map` tracks that."""
  check_matrices(x)
  if dim not in (-1, -2):
    raise ValueError(f'dim must be -1 (columns sharded) or -2 (rows sharded), got {dim}')
  manual = jax.sharding.get_abstract_mesh().manual_axes
  if axis not in manual:
    raise ValueError(f'axis {axis!r} is none of the manual mesh axes {manual}: call inside jax.shard_map over it')
  return x if axis in jax.typeof(x).mat.varying else lax.pcast(x, axis, to='varying')


def _start(x: jax.Array, axis: str, dim: int, coefficients: Coefficients, steps: int | None):
  """Returns the normalised y with sharded columns, its Gram matrix summed over the ranks, and the rows of the steps."""
  y = widened(_check(x, axis, dim))
  y = y if dim == -1 else transpose(y)
  if coefficients.rescales_rows and y.shape[-2] > y.shape[-1] * lax.axis_size(axis):
    raise ValueError(
      f'coefficients that rescale rows mean those of the shorter side, here the sharded one, whose Gram matrix no sum '
      f'over the ranks gives: use duplicated for shards {x.shape} with dim={dim}'
    )
  # As in newton_schulz: squares of numbers beyond 1e19 would leave float32. A shard of zeros must not count as 1 here.
  largest = lax.pmax(jnp.max(jnp.abs(y), axis=(-2, -1), keepdims=True), axis)
  y = y / jnp.where(largest > 0, largest, 1)
  matrix = lax.psum(symmetric_product(y, y), axis)
  scale = row_scale(matrix, coefficients)
  return scale * y, scale * matrix * transpose(scale), coefficients.schedule(steps)


def _cholesky(matrix: jax.Array) -> jax.Array:
  """Returns the Cholesky factor of A + t^2 (A + tI)^-1, t just above the rounding errors of A.

  The plain shift A + tI changes an eigenvalue w by t / w of itself, this one by (t / w)^2 and still by t where w is 0.
  """
  size = matrix.shape[-1]
  # Least shifts that factored rank-one matrices of 64 to 2048 rows were size / 128 in this unit; twice that.
  unit = jnp.finfo(matrix.dtype).eps * frobenius_norm(matrix)
  shift = jnp.where(unit > 0, (2 + size / 64) * unit, 1)
  identity = jnp.eye(size, dtype=matrix.dtype)
  lower = cholesky(matrix + shift * identity)
  root = solve_triangular(lower, shift * identity)
  return cholesky(matrix + product(transpose(root), root))
