"""Exact refreshes where eigenvalues coincide: the basis moves continuously, and as little as it can."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import Eigenbasis, eigh_refresh

refresh = jax.jit(eigh_refresh)


def orthogonal(n, seed=0):
  return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def singular_values(n):
  """Spectra with ties, of all or of some: of an orthogonal matrix, and of some without full rank."""
  spectra = {
    'orthogonal': np.full(n, 3.0),
    'one larger': np.r_[4, np.ones(n - 1)],
    'rank 1': np.r_[1, np.zeros(n - 1)],
    'two groups': np.r_[np.full(n // 2, 2.0), np.ones(n - n // 2)],
    'half of the rank': np.r_[np.ones(n // 2), np.zeros(n - n // 2)],
  }
  if n >= 4:
    spectra |= {'two larger': np.r_[2, 2, np.ones(n - 2)], 'three missing': np.r_[np.ones(n - 3), 0, 0, 0]}
  return spectra


def factor(gradient):
  """Returns a factor as its first step leaves it, in float32."""
  square = gradient @ gradient.T
  return np.float32(0.95 * np.trace(square) / len(square)) * np.eye(len(square), dtype=np.float32) + 0.05 * square


@pytest.mark.parametrize('n', [2, 3, 16, 128])
@pytest.mark.parametrize('old', ['identity', 'another'])
def test_moves_continuously_where_eigenvalues_coincide(n, old):
  """One ulp in every entry of a gradient, or 1e-7 of it."""
  basis = (
    Eigenbasis(np.eye(n), np.zeros(n)) if old == 'identity' else Eigenbasis(orthogonal(n, 7), np.arange(1.0, n + 1))
  )
  basis = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), basis)
  rng = np.random.default_rng(3)
  for name, values in singular_values(n).items():
    gradient = np.float32(orthogonal(n, 1) * values @ orthogonal(n, 2))
    ulp = np.nextafter(gradient, np.float32(10) * np.sign(rng.standard_normal((n, n)), dtype=np.float32))
    other = np.float32(gradient * (1 + 1e-7 * rng.standard_normal((n, n))))
    vectors = [np.float64(refresh(factor(x), basis).vectors) for x in (gradient, ulp, other)]
    for moved in vectors[1:]:
      moved *= np.sign(np.sum(moved * vectors[0], axis=0))
      # Numbers of columns, 2/n apart, tell the vectors of a space apart, and eigh rounds by a few eps: n eps a vector.
      # Where a space is left out, two that are nearly tied are up to ten times as far off. Arbitrary vectors: 1.4.
      assert np.linalg.norm(moved - vectors[0]) / np.sqrt(n) < max(1e-5, 10 * n * 1.2e-7), name


@pytest.mark.parametrize('n', [2, 16, 128])
def test_is_an_eigenbasis(n):
  for name, values in singular_values(n).items():
    a = factor(np.float32(orthogonal(n, 1) * values @ orthogonal(n, 2)))
    new = refresh(a, Eigenbasis(jnp.asarray(orthogonal(n, 7), jnp.float32), jnp.arange(1.0, n + 1)))
    exact = np.linalg.eigvalsh(np.float64(a))
    q = np.float64(new.vectors)
    # Two float32 eigenvector matrices, multiplied: some eps, more of them for longer sums.
    chex.assert_trees_all_close(q.T @ q, np.eye(n), atol=3e-6)
    assert np.linalg.norm(q.T @ a @ q - np.diag(new.values)) < 1e-5 * np.linalg.norm(a), name
    chex.assert_trees_all_close(np.sort(new.values), np.float32(exact), rtol=0, atol=3e-6 * exact.max())


@pytest.mark.parametrize('n', [2, 16, 64])
@pytest.mark.parametrize('started', [False, True])
def test_old_columns_stay_where_they_span_the_space(n, started):
  """Of I only the old basis is left; of two spaces, which come by falling eigenvalue at the start, each its columns."""
  old = orthogonal(n, 5)
  half = n // 2
  for values, order in ((np.ones(n), np.arange(n)), (np.r_[np.ones(half), np.full(n - half, 3.0)], None)):
    if order is None:
      order = np.arange(n) if started else np.r_[half:n, :half]
    a = np.float32((old * values) @ old.T)
    new = refresh((a + a.T) / 2, Eigenbasis(jnp.asarray(old, jnp.float32), jnp.full(n, float(started))))
    # As above: n eps.
    chex.assert_trees_all_close(np.abs(old.T @ new.vectors), np.eye(n)[:, order], atol=10 * n * 1.2e-7)
    chex.assert_trees_all_close(new.values, np.float32(values[order]), rtol=3e-6)


def test_a_multiple_of_the_identity_costs_no_digits():
  """Eigenvectors are those of what is left of the factor, which has gaps of 1 here, within float32's rounding of it."""
  n = 8
  q = orthogonal(n)
  # Entries that float32 holds exactly beside 1000.
  part = np.round((q * np.arange(1.0, n + 1)) @ q.T * 2**10) / 2**10
  expected = np.linalg.eigh(part)[1][:, ::-1]
  start = Eigenbasis(jnp.eye(n), jnp.zeros(n))
  new = refresh(jnp.asarray(part + 1000 * np.eye(n), jnp.float32), start)
  # eps 8 over gaps of 1. With 1000 in it they would be 1e-4 off.
  chex.assert_trees_all_close(np.abs(expected.T @ new.vectors), np.eye(n), atol=5e-6)


@pytest.mark.parametrize('rest', [0.0, 1e-35, 1e-6])
@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e30])
def test_what_is_lost_beside_the_identity_does_no_harm(scale, rest):
  a = scale * (np.eye(4) + rest * (1 - np.eye(4)))
  new = refresh(jnp.asarray(a, jnp.float32), Eigenbasis(jnp.eye(4), jnp.zeros(4)))
  chex.assert_trees_all_close(
    new.values / np.float32(scale), np.float32(1 + rest * np.array([3, -1, -1, -1])), rtol=5e-7
  )
  # Orthonormal to float32's rounding.
  chex.assert_trees_all_close(new.vectors.T @ new.vectors, jnp.eye(4), atol=1e-6)


def test_columns_tied_before_are_not_told_apart_by_rounding():
  """Two columns of one eigenvalue, to rounding, that no eigenvector continues."""
  turned = np.linalg.qr(np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2 + 0.1 * np.eye(4))[
    0
  ]
  a = np.float32((turned * np.array([9.0, 5.0, 3.0, 1.0])) @ turned.T)
  values = np.array([4.0, 4.0, 2.0, 1.0], np.float32)
  first, second = (refresh(a, Eigenbasis(jnp.eye(4), jnp.asarray(values).at[i].multiply(1 + 2e-7))) for i in (0, 1))
  chex.assert_trees_all_equal(first, second)


def test_in_a_batch_matrix_by_matrix():
  """Ties in some of them, a zero factor, and one that is not finite."""
  n = 6
  old = Eigenbasis(jnp.asarray(orthogonal(n, 5), jnp.float32), jnp.arange(1.0, n + 1))
  tied, plain = (
    factor(np.float32(orthogonal(n, 1) * s @ orthogonal(n, 2))) for s in (np.ones(n), np.arange(1.0, n + 1))
  )
  stack = np.stack([tied, plain, np.zeros((n, n)), np.full((n, n), np.nan), tied]).astype(np.float32)
  basis = jax.tree.map(lambda x: jnp.broadcast_to(x, (5, *x.shape)), old)
  new = refresh(stack, basis)
  mapped = jax.vmap(eigh_refresh)(stack, basis)
  chex.assert_trees_all_equal(new.vectors[2], old.vectors)
  chex.assert_trees_all_equal(new.values[2], jnp.zeros(n))
  assert np.isnan(new.values[3]).all()
  for i in (0, 1, 4):
    # A batch may round otherwise than a lone matrix.
    for other in (refresh(stack[i], old), jax.tree.map(lambda x, i=i: x[i], mapped)):
      chex.assert_trees_all_close(np.abs(new.vectors[i]), np.abs(other.vectors), atol=1e-5)
      chex.assert_trees_all_close(new.values[i], other.values, rtol=1e-5)
