"""Newton-Schulz steps on a matrix and on its Gram matrix A = X X^T of the shorter side, and what either costs.

A step is X <- QX with Q = aI + bA + cA^2, so that any number of them is one matrix P, found without X: P <- QP and
A <- QAQ. But A squares the singular values, and float32 loses those below 3e-4 |X|_F: what is lost there, t |A| in A,
becomes t g^2 of a singular value after steps whose slopes at 0 multiply to g, and beyond t g^2 = 1 A turns indefinite
and the iteration diverges. So X is formed, and A anew from it, as often as keeps g small. Restarted at every step, this
is the plain iteration.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from emopt_jax.linalg.coefficients import Coefficients
from emopt_jax.linalg.products import frobenius_norm, product, symmetric_product, symmetric_share, trace


def row_scale(matrix: Float[Array, '*batch m m'], coefficients: Coefficients) -> jax.Array:
  """Returns what the rows of X are multiplied by before the first step, `[*batch, 1 or m, 1]`, from A = X X^T.

  1 / |X|_F; for tables that rescale rows `coefficients.largest` / sqrt(sum_j |A_ij|). 1 for what is zero.
  """
  squared = jnp.sum(jnp.abs(matrix), axis=-1, keepdims=True) if coefficients.rescales_rows else trace(matrix)
  return coefficients.largest * lax.rsqrt(jnp.where(squared > 0, squared, 1))


def plain_steps(
  x: Float[Array, '*batch m n'],
  matrix: Float[Array, '*batch m m'],
  rows: np.ndarray,
  form_gram: Callable[[jax.Array], jax.Array],
  dtype: DTypeLike | None,
) -> Float[Array, '*batch m n']:
  """Runs X <- aX + (bA + cA^2)X for each row (a, b, c).

  Args:
    x: Normalised matrices.
    matrix: A of x.
    rows: `[steps, 3]`.
    form_gram: Returns A of the X after each step.
    dtype: Dtype of the operands of the products, by default that of x.
  """
  cubic = not rows[:, 2].any()
  table = jnp.asarray(rows, x.dtype)

  def step(x, matrix, row):
    return row[0] * x + product(_polynomial(matrix, row, cubic, dtype), x, dtype)

  x = step(x, matrix, table[0])
  return lax.scan(lambda x, row: (step(x, form_gram(x), row), None), x, table[1:])[0]


def gram_steps(
  x: Float[Array, '*batch m n'],
  matrix: Float[Array, '*batch m m'],
  rows: np.ndarray,
  dtype: DTypeLike | None,
) -> Float[Array, '*batch m n']:
  """Runs the steps of `plain_steps` on A, and multiplies X once.

  Args:
    x: Normalised matrices.
    matrix: A of x.
    rows: `[steps, 3]`, with slopes a that multiply to at most about 100 in float32.
    dtype: As in `plain_steps`.
  """
  cubic = not rows[:, 2].any()
  table = jnp.asarray(rows, x.dtype)
  identity = jnp.eye(matrix.shape[-1], dtype=x.dtype)

  def factor(matrix, row):
    return row[0] * identity + _polynomial(matrix, row, cubic, dtype)

  def advance(matrix, q):
    return symmetric_product(symmetric_product(q, matrix, dtype), q, dtype)

  def step(carry, row):
    p, matrix = carry
    q = factor(matrix, row)
    return (symmetric_product(q, p, dtype), advance(matrix, q)), None

  p = factor(matrix, table[0])
  if len(rows) > 1:
    (p, matrix), _ = lax.scan(step, (p, advance(matrix, p)), table[1:-1])
    p = symmetric_product(factor(matrix, table[-1]), p, dtype)
  return product(p, x, dtype)


def restarted_steps(
  x: Float[Array, '*batch m n'],
  matrix: Float[Array, '*batch m m'],
  rows: np.ndarray,
  lengths: tuple[int, ...],
  form_gram: Callable[[jax.Array], jax.Array],
  dtype: DTypeLike | None,
) -> Float[Array, '*batch m n']:
  """Runs the steps of `plain_steps` by `gram_steps`, `lengths` of them from one A of X to the next.

  A single matrix that a restart finds so near its polar factor that one of the steps left ends there, takes that one
  only. A batch takes all: it would wait for its slowest matrix, and a sharded one for other devices.

  Args:
    x, matrix, rows, form_gram, dtype: As in `plain_steps`.
    lengths: Numbers of steps, which sum to the number of rows.
  """
  count, others = lengths[0], lengths[1:]

  def every_step() -> jax.Array:
    y = gram_steps(x, matrix, rows[:count], dtype)
    return restarted_steps(y, form_gram(y), rows[count:], others, form_gram, dtype) if others else y

  reach = _reach(rows, float(jnp.finfo(matrix.dtype).eps))
  if not reach or math.prod(x.shape[:-2]) != 1:
    return every_step()
  distance = frobenius_norm(matrix - jnp.eye(matrix.shape[-1], dtype=matrix.dtype))
  return lax.cond(jnp.all(distance < reach), lambda: plain_steps(x, matrix, rows[:1], form_gram, dtype), every_step)


def _reach(rows: np.ndarray, eps: float) -> float:
  """Returns the |A - I| from which any of the rows ends at A = I, within eps; 0 if one of them does not lead there.

  sqrt(1+e) (a + b (1+e) + c (1+e)^2) is 1 + O(e^2) if a + b + c = 1 and b + 2c = -1/2, and 1 + O(e^3) if c is 3/8 too.
  """
  a, b, c = rows.T
  if np.any(np.abs(a + b + c - 1) > 1e-6) or np.any(np.abs(b + 2 * c + 0.5) > 1e-5):
    return 0.0
  return eps ** (1 / 3 if np.all(np.abs(c - 3 / 8) < 1e-5) else 1 / 2)


def partition(rows: np.ndarray, growth: float) -> tuple[int, ...]:
  """Returns the numbers of steps between two restarts: the fewest, of nearly equal growth of at most about `growth`.

  Args:
    rows: Rows (a, b, c) `[steps, 3]`.
    growth: Product of the slopes a at 0 of the steps from one restart to the next.

  Example:
    >>> import emopt_jax
    >>> partition(emopt_jax.POLAR_EXPRESS.schedule(16), 100)
    (3, 6, 7)
  """
  logarithms = np.log(np.maximum(rows[:, 0], 1))
  total = logarithms.sum()
  parts = max(math.ceil(total / math.log(growth)), 1) if growth > 1 else len(rows)
  if parts >= len(rows) or total == 0:
    return (1,) * len(rows)
  centres = (np.cumsum(logarithms) - logarithms / 2) / total
  # A part that no step falls into is left out.
  counts = np.bincount(np.minimum((parts * centres).astype(int), parts - 1))
  return tuple(int(count) for count in counts if count)


def step_cost(m: int, n: int, rows: np.ndarray, lengths: tuple[int, ...]) -> float:
  """Returns the operations of the steps on one matrix `[m, n]`, m <= n, restarted after each of `lengths`.

  A restart costs (2 + 2s) m^2 n, a square and each of the three products of a step without one 2s m^3, where s is
  `symmetric_share(m)`.

  Example:
    >>> import emopt_jax
    >>> rows = emopt_jax.QUINTIC.schedule()
    >>> step_cost(100, 400, rows, (2, 3)) / step_cost(100, 400, rows, (1,) * 5)
    0.6666666666666666
  """
  share = symmetric_share(m)
  squares = len(rows) if rows[:, 2].any() else 0
  return 2 * share * m**3 * (squares + 3 * (len(rows) - len(lengths))) + (2 + 2 * share) * float(m) ** 2 * n * len(
    lengths
  )


def cheapest_lengths(m: int, n: int, rows: np.ndarray, growth: float) -> tuple[int, ...]:
  """Returns `partition(rows, growth)` where it saves a fifth of the operations or more, else (1, 1, ...).

  The plain iteration rounds less, and the last bits of a gradient, in which one device and many differ, weigh less.
  """
  plain, fewer = (1,) * len(rows), partition(rows, growth)
  return fewer if step_cost(m, n, rows, fewer) <= 0.8 * step_cost(m, n, rows, plain) else plain


def _polynomial(matrix: jax.Array, row: jax.Array, cubic: bool, dtype: DTypeLike | None) -> jax.Array:
  if cubic:
    return row[1] * matrix
  return row[1] * matrix + row[2] * symmetric_product(matrix, matrix, dtype)
