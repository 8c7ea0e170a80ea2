"""The refresh made of matrix products only, beside QR and eigh: what it reaches, where it falls back, what it holds."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import Eigenbasis, qr_refresh, sort_by_magnitude
from emopt_jax.diagnostics import basis_staleness
from emopt_jax.linalg.product_refresh import jacobi_refresh

SPECTRA = ['steep', 'flat', 'power law', 'rank-deficient', 'half-zero rows']
N, SPIKE, STEPS = 32, 900, 1000
refresh, by_qr = jax.jit(jacobi_refresh), jax.jit(qr_refresh)


def orthogonal(n, seed=0):
  return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def factor(values, seed=0):
  q = orthogonal(len(values), seed)
  return (q * np.asarray(values, np.float64)) @ q.T


def start(n, *batch):
  return Eigenbasis(jnp.broadcast_to(jnp.eye(n), (*batch, n, n)), jnp.zeros((*batch, n)))


def converged(a, steps=40):
  """Returns the basis after some refreshes of one factor, or of a stack of them."""
  a = jnp.asarray(a, jnp.float32)
  advance = lambda _, basis: jacobi_refresh(a, basis)  # noqa: E731
  return jax.jit(lambda basis: jax.lax.fori_loop(0, steps, advance, basis))(start(a.shape[-1], *a.shape[:-2]))


def test_converges_to_eigenvalues_and_invariant_subspaces():
  """Against float64: simple, threefold and zero eigenvalues, in a stack."""
  values = np.array([9, 5, 5, 5, 2, 1, 0.25, 0.01, 0, 0, 0, 0])
  stack = np.stack([factor(values, seed) for seed in range(4)])
  new = converged(stack)
  # Float32's rounding of the factor, relative to the largest eigenvalue.
  chex.assert_trees_all_close(np.sort(new.values)[:, ::-1], np.stack([values] * 4), atol=2e-5)
  for seed in range(4):
    q = orthogonal(len(values), seed)
    for value in np.unique(values):
      exact = q[:, values == value]
      found = np.asarray(new.vectors[seed], np.float64)[:, np.abs(new.values[seed] - value) < max(value / 10, 1e-3)]
      # Rounding of 1e-6 over the smallest gap, 0.01, between the last two groups.
      chex.assert_trees_all_close(found @ found.T, exact @ exact.T, atol=1e-3)
  chex.assert_trees_all_close(new.vectors.mT @ new.vectors, start(12, 4).vectors, atol=1e-5)


def test_converges_faster_than_the_ratio_of_eigenvalues():
  """QR gains a factor 0.9 a step on neighbours 10 % apart; angles gain digits."""
  a = factor(0.9 ** np.arange(8)).astype(np.float32)
  assert basis_staleness(a, converged(a, 10)) < 1e-5  # float32's rounding
  old = start(8)
  for _ in range(10):
    old = by_qr(a, old)
  assert basis_staleness(a, old) > 1e-2


def test_column_continues_column():
  basis = Eigenbasis(jnp.eye(3), jnp.array([3.0, 2.0, 1.0]))
  new = refresh(jnp.diag(jnp.array([2.0, 5.0, 1.0])), basis)
  # A diagonal matrix needs no rotation: exact up to the normalisation's rounding.
  chex.assert_trees_all_close(new.vectors, jnp.eye(3), atol=1e-6)
  chex.assert_trees_all_close(new.values, jnp.array([2.0, 5.0, 1.0]), rtol=1e-6)


@pytest.mark.parametrize('kind', ['ones', 'pairs'])
def test_equal_columns_part(kind):
  """Equal diagonal, S_ij != 0, as for a gradient of ones: no gap says which way to turn, and the order does."""
  square = np.ones((16, 16)) / 16 if kind == 'ones' else np.kron(np.eye(8), np.ones((2, 2))) / 2
  a = np.float32(0.8 * np.eye(16) / 16 + 0.2 * square)
  # Converged to float32's rounding.
  assert basis_staleness(a, converged(a, 20)) < 1e-5


@functools.cache
def courses():
  """Follows A <- 0.95 A + 0.05 G G^T for 1000 steps, one spectrum a matrix; the gradient of step 900 is x 1000.

  Returns, for QR and for Jacobi, residuals [steps, spectra] and errors of orthogonality [steps].
  """
  rng = np.random.default_rng(0)
  index = np.arange(N)
  power = 1 / (index + 1)
  values = [10.0 ** (-6 * index / (N - 1)), np.ones(N), power, np.where(index < N // 4, power, 0), power]
  root = np.linalg.qr(rng.standard_normal((5, N, N)))[0] * np.sqrt(values)[:, None, :]
  root[4, ::2] = 0
  root = jnp.asarray(root / N**0.5, jnp.float32)

  def step(carry, count):
    a, bases = carry
    gradient = root @ jax.random.normal(jax.random.fold_in(jax.random.key(0), count), root.shape)
    square = gradient @ gradient.mT * jnp.where(count == SPIKE, 1e6, 1)
    trace = jnp.trace(square, axis1=1, axis2=2)[:, None, None]
    a = 0.95 * jnp.where(count == 0, trace / N * jnp.eye(N), a) + 0.05 * square
    bases = [sort_by_magnitude(f(a, basis))[0] for f, basis in zip((qr_refresh, jacobi_refresh), bases, strict=True)]
    residuals = jnp.stack([basis_staleness(a, basis) for basis in bases])
    errors = jnp.stack([jnp.max(jnp.abs(basis.vectors.mT @ basis.vectors - jnp.eye(N))) for basis in bases])
    return (a, bases), (residuals, errors)

  first = (jnp.zeros((5, N, N)), [start(N, 5)] * 2)
  residuals, errors = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(STEPS))[1])(first)
  return (np.asarray(residuals[:, 0]), np.asarray(errors[:, 0])), (
    np.asarray(residuals[:, 1]),
    np.asarray(errors[:, 1]),
  )


@pytest.mark.parametrize('spectrum', range(5), ids=SPECTRA)
def test_steady_residual_and_recovery_no_worse_than_qr(spectrum):
  (qr, _), (own, _) = courses()
  steady = np.median(qr[100:SPIKE, spectrum])
  assert np.median(own[100:SPIKE, spectrum]) <= 0.6 * steady
  recovery = [np.argmax(course[SPIKE:, spectrum] <= 1.5 * steady) for course in (qr, own)]
  assert own[SPIKE, spectrum] > 1.5 * steady  # the spike is felt
  assert 0 < recovery[1] <= recovery[0]


def test_orthonormal_at_every_one_of_a_thousand_steps():
  # The figure of the issue.
  assert courses()[1][1].max() < 1e-5


@pytest.mark.parametrize('rank', [1, 4])
def test_first_steps_follow_low_rank_gradients(rank):
  """From the identity, with a multiple of the identity plus a low-rank term: as near as QR within ten steps."""
  rng = np.random.default_rng(rank)
  direction = rng.standard_normal((N, rank))
  square = direction @ direction.T
  scale = np.trace(square) / N * np.eye(N)
  bases = [start(N), start(N)]
  for count in range(1, 21):
    a = jnp.asarray(0.95**count * scale + (1 - 0.95**count) * square, jnp.float32)
    bases = [sort_by_magnitude(f(a, b))[0] for f, b in zip((by_qr, refresh), bases, strict=True)]
    qr, own = (float(basis_staleness(a, basis)) for basis in bases)
    assert own < 0.65  # QR reaches 0.35
    if count >= 10:
      assert own <= max(qr, 1e-4)


def test_far_off_is_qr():
  """Above the threshold the result is that of `qr_refresh`, and the neighbour in the batch keeps its own."""
  near, far = np.diag([4.0, 3.0, 2.0, 1.0]) + 0.05, np.full((4, 4), 1.0) + 0.1 * np.eye(4)
  stack = jnp.asarray(np.stack([near, far]), jnp.float32)
  new = refresh(stack, start(4, 2))
  # A batch may round otherwise than a lone matrix.
  chex.assert_trees_all_close(jax.tree.map(lambda x: x[1], new), by_qr(stack[1], start(4)), atol=1e-5)
  chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], new), refresh(stack[0], start(4)), atol=1e-6)
  assert jnp.max(jnp.abs(new.vectors[0] - by_qr(stack[0], start(4)).vectors)) > 1e-3


@pytest.mark.parametrize('scale', [1e-30, 1e-6, 1e6, 1e30])
def test_any_scale_batched_and_alone(scale):
  stack = np.stack([np.diag([4, 3, 2, 1]) + 0.3 * factor([1, 1, 0, 0], seed) for seed in range(3)]).astype(np.float32)
  scaled = stack * np.float32(scale)
  new, expected = refresh(scaled, start(4, 3)), refresh(stack, start(4, 3))
  chex.assert_trees_all_close(new.vectors.mT @ new.vectors, start(4, 3).vectors, atol=1e-5)
  # scale * A rounds A by 6e-8, over eigenvalue gaps of 1/4 of the largest.
  chex.assert_trees_all_close(new.vectors, expected.vectors, atol=1e-5)
  chex.assert_trees_all_close(new.values / np.float32(scale), expected.values, rtol=1e-5)
  for i in range(3):
    chex.assert_trees_all_close(refresh(scaled[i], start(4)).vectors, new.vectors[i], atol=1e-5)


def test_zero_factor_keeps_the_basis():
  basis = Eigenbasis(jnp.asarray(orthogonal(3), jnp.float32), jnp.zeros(3))
  chex.assert_trees_all_equal(refresh(jnp.zeros((3, 3)), basis), basis)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_not_finite_factor_shows_and_stays_alone(bad):
  good = jnp.diag(jnp.array([3.0, 2.0, 1.0])) + 0.1
  new = refresh(jnp.stack([good.at[0, 0].set(bad), good]), start(3, 2))
  assert not jnp.all(jnp.isfinite(new.vectors[0])) and not jnp.all(jnp.isfinite(new.values[0]))
  chex.assert_trees_all_close(new.vectors[1], refresh(good, start(3)).vectors, atol=1e-6)


def common_path(text):
  """Returns the lines of a compiled program without the loops that may go no round."""
  computations, name, entry = {}, '', ''
  for line in text.splitlines():
    if header := re.match(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$', line):
      name = header[2]
      computations[name] = []
      entry = name if header[1] else entry
    elif name:
      computations[name].append(line)

  def walk(name):
    for line in computations[name]:
      yield line
      if ' while(' not in line or 'known_trip_count' in line:
        for other in re.findall(r'(?:calls=|to_apply=|body=|condition=)%?([\w.\-]+)', line):
          yield from walk(other)

  return list(walk(entry))


def factorizations(lines):
  return [line for line in lines if re.search(r'custom_call_target="[^"]*(?:lapack|solver|Qr|House|Chol|Eigh)', line)]


def test_nine_products_and_no_factorization_on_the_common_path():
  basis = start(N, 2)
  text = refresh.lower(basis.vectors, basis).compile().as_text()
  assert 'geqrf' in text  # the fallback is in the program
  lines = common_path(text)
  assert not factorizations(lines)
  products = [line for line in lines if re.search(r' dot\(|custom_call_target="[^"]*(?:gemm|matmul|dot)', line)]
  assert len(products) == 9
  # The search finds what it looks for.
  assert factorizations(common_path(jax.jit(qr_refresh).lower(basis.vectors, basis).compile().as_text()))
