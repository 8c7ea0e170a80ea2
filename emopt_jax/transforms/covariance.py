"""The transforms that keep the two covariance factors of every matrix: L of its rows, R of its columns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from emopt_jax.batching import map_by_shape
from emopt_jax.linalg.blocks import number_of_blocks, per_matrix
from emopt_jax.linalg.eigenbasis import Eigenbases, Eigenbasis
from emopt_jax.linalg.exact_refresh import diagonalize
from emopt_jax.linalg.factors import Factors, kl_update, kronecker_update
from emopt_jax.linalg.products import ROOM, leaves_room_for_squares, trace
from emopt_jax.matrices import Axes, from_stacks, single_matrices, stack_shapes, to_stacks
from emopt_jax.transforms.covariance_start import Start, frobenius_start, rms_start, started
from emopt_jax.transforms.hyperparameters import check_at_least_one, check_decay
from emopt_jax.transforms.keyed_state import check_known, keyed_by_path

Decay = ArrayLike | Callable[[jax.Array], jax.Array]


class CovarianceState(NamedTuple):
  """State of `kronecker_covariance` and `kl_covariance`.

  Attributes:
    count: Number of updates, int32.
    factors: Per path, the `Factors` of the stack, in float32 or wider.
    skipped: Per path, how many gradients of each matrix were not finite or too large, int32 `[batch]`.
  """

  count: jax.Array
  factors: Any
  skipped: Any


def bias_corrected(decay: float) -> Callable[[jax.Array], jax.Array]:
  """Returns the schedule 1 - (1-b) / (1-b^t) of the step t = 1, 2, ...: the average of a zero start, made unbiased."""
  return lambda count: 1 - (1 - decay) / (1 - decay ** count.astype(jnp.float32))


def kronecker_covariance(
  decay: Decay = 0.95,
  *,
  start: Start = frobenius_start,
  max_dim: int = 8192,
  block_size: int | None = None,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Keeps L <- b L + (1-b) G G^T and R <- b R + (1-b) G^T G and passes updates through.

  Args:
    decay: b in [0, 1), or a function of the step 1, 2, ... such as `bias_corrected(0.95)`.
    start: Function of the first non-zero gradient `[batch, m, n]` and the untouched factors that returns the multiples
      of the identity (each `[batch, 1, 1]`) which L and R start from.
    max_dim: A longer side has no factor and counts as the identity: its factor would be that many numbers squared.
    block_size: A longer side keeps only the diagonal blocks of its factor, the fewest equal ones of at most this size.
      With the width of the model all blocks of a transformer have one size.
    axes: Which axes of each leaf make the matrix, as in `MatrixAxes`.

  Returns:
    An optax transformation. A gradient that is not finite, or so large that its squares would overflow (in float32 a
    norm of 1e18), leaves its factors as they were, is counted, and is passed on as zero. A zero gradient leaves them
    too: the factors of an idle expert would fade, and its next gradient with them.

  Raises:
    ValueError: If decay is out of range or max_dim below 1; at init, if a leaf is no matrix.

  Example:
    >>> transform = kronecker_covariance(0.5)
    >>> gradient = {'kernel': jnp.ones((2, 4))}
    >>> _, state = transform.update(gradient, transform.init(gradient))
    >>> state.factors['kernel'].left[0]
    Array([[4., 2.],
           [2., 4.]], dtype=float32)

  References:
    Gupta et al., Shampoo, arXiv 1802.09568; Vyas et al., SOAP, arXiv 2409.11321.
  """

  def advance(factors, gradient, bases, decay):
    del bases
    return kronecker_update(factors, gradient, decay=decay)

  return _covariance(advance, decay, start=start, sizes=(max_dim, block_size), axes=axes)


def kl_covariance(
  decay: Decay = 0.95,
  *,
  start: Start = rms_start,
  max_dim: int = 8192,
  block_size: int | None = None,
  axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
  """Keeps the factors whose Kronecker product is nearest to the gradient's covariance, and passes updates through.

  L <- b L + (1-b)/n G Q_R diag(1/w_R) Q_R^T G^T, R <- b R + (1-b)/m G^T Q_L diag(1/w_L) Q_L^T G, with the bases and
  eigenvalues from before this step.

  Alone in a chain it diagonalises its factors itself, by eigh at every step. L and R are defined up to a factor c and
  1/c, which drifts on rank-deficient gradients; when they have drifted 2^40 apart they are brought together by a power
  of two, which changes no digit of any update.

  Args:
    decay: As in `kronecker_covariance`.
    start: As in `kronecker_covariance`.
    max_dim: As in `kronecker_covariance`.
    block_size: As in `kronecker_covariance`.
    axes: As in `kronecker_covariance`.

  Returns:
    An optax transformation, whose update takes the keyword `eigenbasis`: a dict of `Eigenbases` by path.

  Raises:
    ValueError: As in `kronecker_covariance`.

  Example:
    >>> transform = kl_covariance(0.9)
    >>> gradient = {'kernel': 2 * jnp.eye(2)}
    >>> _, state = transform.update(gradient, transform.init(gradient))
    >>> state.factors['kernel'].left[0].round(3)
    Array([[1.414, 0.   ],
           [0.   , 1.414]], dtype=float32)

  References:
    Lin et al., KL-Shampoo, arXiv 2509.03378.
  """
  return _covariance(_advance_kl, decay, start=start, sizes=(max_dim, block_size), axes=axes)


def _covariance(advance, decay: Decay, *, start: Start, sizes: tuple[int, int | None], axes: Axes):
  max_dim, block_size = sizes
  if not callable(decay):
    check_decay('decay', decay)
  check_at_least_one('max_dim', max_dim)
  check_at_least_one('block_size', 1 if block_size is None else block_size)

  def init(params):
    shapes = stack_shapes(params, axes)

    def zeros(shape: jax.ShapeDtypeStruct, axis: int):
      batch, size = shape.shape[0], shape.shape[axis]
      if size > max_dim:
        return None
      blocks = number_of_blocks(size, block_size)
      return jnp.zeros((batch, size, size) if blocks is None else (batch, blocks, *[size // blocks] * 2), shape.dtype)

    factors = {path: Factors(zeros(shape, 1), zeros(shape, 2)) for path, shape in shapes.items()}
    skipped = {path: jnp.zeros(shape.shape[:1], jnp.int32) for path, shape in shapes.items()}
    return CovarianceState(jnp.zeros((), jnp.int32), keyed_by_path(factors), keyed_by_path(skipped))

  def update(updates, state, params=None, *, eigenbasis=None, **extra_args):
    del params, extra_args
    count = jnp.asarray(optax.safe_increment(state.count))
    current_decay = jnp.asarray(decay(count) if callable(decay) else decay)
    gradients = to_stacks(updates, axes)
    check_known(gradients, state.skipped)
    entries = {
      path: _Entry(state.factors[path], state.skipped[path], None if eigenbasis is None else eigenbasis[path])
      for path in gradients
    }

    def take_in(gradient: jax.Array, before: _Entry) -> tuple[Factors, jax.Array]:
      largest = jnp.max(jnp.abs(gradient), axis=(1, 2))
      usable = leaves_room_for_squares(largest, gradient)
      clean = jnp.where(usable[:, None, None], gradient, 0)
      old = started(before.factors, clean, start)
      new = advance(old, clean, before.bases, current_decay.astype(clean.dtype))
      # Squares whitened by factors that are far too small for this gradient overflow: those factors start anew.
      batch = gradient.shape[0]
      lost = _all_have_room(before.factors, batch) & ~_all_have_room(new, batch)
      fresh = started(jax.tree.map(jnp.zeros_like, new), clean, start)
      new = jax.tree.map(lambda x, y: jnp.where(per_matrix(lost, x), x, y), fresh, new)
      taken = usable & (largest > 0)
      factors = jax.tree.map(lambda x, y: jnp.where(per_matrix(taken, x), x, y), new, before.factors)
      return factors, before.skipped + ~usable

    results = map_by_shape(take_in, single_matrices(updates, axes), gradients, entries)
    factors, skipped = ({path: result[i] for path, result in results.items()} for i in (0, 1))
    new_state = CovarianceState(count, keyed_by_path(factors), keyed_by_path(skipped))
    passed = {
      path: jnp.where((skipped[path] == state.skipped[path])[:, None, None], gradient, 0)
      for path, gradient in gradients.items()
    }
    return from_stacks(passed, updates, axes), new_state

  return optax.GradientTransformationExtraArgs(init, update)


def _all_have_room(factors: Factors, batch: int) -> jax.Array:
  """Returns whether the trace of each factor, which bounds every entry and eigenvalue, is far from overflow."""
  room = jnp.ones(batch, bool)
  for factor in jax.tree.leaves(factors):
    diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
    room &= jnp.sum(diagonal, axis=tuple(range(1, diagonal.ndim))) < ROOM * float(jnp.finfo(factor.dtype).max)
  return room


class _Entry(NamedTuple):
  """What is known of one stack before a step."""

  factors: Factors
  skipped: jax.Array
  bases: Eigenbases | None


def _advance_kl(factors: Factors, gradient: jax.Array, bases: Eigenbases | None, decay: jax.Array) -> Factors:
  if bases is None:
    bases = Eigenbases(*(None if factor is None else diagonalize(factor) for factor in factors))
  current = Eigenbases(
    *(
      None if factor is None or basis is None else Eigenbasis(basis.vectors, _current_values(factor, basis))
      for factor, basis in zip(factors, bases, strict=True)
    )
  )
  return _balanced(kl_update(factors, gradient, current, decay=decay))


def _current_values(factor: jax.Array, basis: Eigenbasis) -> jax.Array:
  """Returns the eigenvalues brought, by a power of two, to the trace of a factor that changed since the last refresh.

  Right after a refresh the power is 2^0. Before the first refresh the eigenvalues are zero and the factor is a multiple
  of the identity, whose eigenvalues its trace gives.
  """
  new = trace(factor)[..., 0]
  old = jnp.sum(basis.values, axis=-1, keepdims=True)
  known = (old > 0) & (new > 0)
  exponent = jnp.round(jnp.log2(jnp.where(known, new, 1)) - jnp.log2(jnp.where(known, old, 1)))
  return jnp.where(known, basis.values * jnp.exp2(exponent), new / factor.shape[-1])


def _balanced(factors: Factors) -> Factors:
  left, right = factors
  if left is None or right is None:
    return factors
  diagonals = [jnp.diagonal(factor, axis1=-2, axis2=-1) for factor in (left, right)]
  traces = [jnp.mean(diagonal, axis=tuple(range(1, diagonal.ndim))) for diagonal in diagonals]
  apart = jnp.where((traces[0] > 0) & (traces[1] > 0), jnp.log2(traces[0]) - jnp.log2(traces[1]), 0)
  exponent = jnp.where(jnp.abs(apart) > 40, jnp.round(apart / 2), 0)
  return Factors(left * per_matrix(jnp.exp2(-exponent), left), right * per_matrix(jnp.exp2(exponent), right))
