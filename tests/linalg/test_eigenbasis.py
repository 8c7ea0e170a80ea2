"""Refreshes, column order and rotations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import Eigenbases, Eigenbasis, eigh_at_start, eigh_refresh, qr_refresh
from emopt_jax.linalg import eigenbasis
from emopt_jax.linalg.eigenbasis import rotate, rotate_back, select, sort_descending
from tests import references
from tests.references import oracles

REFRESHES = [qr_refresh, eigh_refresh]


def orthogonal(n, seed=0):
  return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def factor(values, seed=0):
  q = orthogonal(len(values), seed)
  return (q * np.asarray(values, np.float64) @ q.T).astype(np.float32)


def start(n):
  return Eigenbasis(jnp.eye(n), jnp.zeros(n))


def test_orthogonal_iteration_recorded():
  case = references.load('orthogonal_iteration')
  new, _ = sort_descending(qr_refresh(case['A'], Eigenbasis(case['Q0'], jnp.zeros(7))))
  # The tolerance.
  chex.assert_trees_all_close(new.values, case['eigvals'], atol=2e-5, rtol=0)
  signs = np.sign(np.sum(new.vectors * case['Q'], axis=0))
  chex.assert_trees_all_close(new.vectors * signs, case['Q'], atol=2e-5, rtol=0)


def test_qr_against_oracle():
  a = factor([9, 5, 2, 1, 0.5])
  basis = Eigenbasis(jnp.asarray(orthogonal(5, 1), jnp.float32), jnp.ones(5))
  new = qr_refresh(a, basis)
  q, w = oracles.orthogonal_iteration(a.astype(np.float64), orthogonal(5, 1))
  # Float32 QR of a matrix of condition 20.
  chex.assert_trees_all_close(new, Eigenbasis(q, w), atol=1e-4)


@pytest.fixture
def broken_reflections(monkeypatch):
  monkeypatch.setattr(
    eigenbasis, '_by_reflections', lambda rows, *_: Eigenbasis(jnp.nan * rows, jnp.nan * rows[..., 0])
  )


@pytest.mark.parametrize('n', [300, 1024])
def test_qr_in_blocks_of_rows_against_oracle(n, broken_reflections):
  """An eigenbasis of a spectrum from 1 to 0.01, and a factor that has moved on by a twentieth."""
  old, other = orthogonal(n, 1), orthogonal(n, 2)
  values = np.geomspace(1, 1e-2, n)
  a = 0.95 * (old * values) @ old.T + 0.05 * (other * values) @ other.T
  a = np.float32(a + a.T) / 2
  # A new function, which is traced anew without reflections.
  new = jax.jit(lambda a, basis: qr_refresh(a, basis))(a, Eigenbasis(jnp.asarray(old, jnp.float32), jnp.ones(n)))
  q, w = oracles.orthogonal_iteration(np.float64(a), old)
  # LAPACK's QR in float32 is 3e-7 off, and sums of n numbers a few times eps.
  chex.assert_trees_all_close(new, Eigenbasis(q, w), rtol=0, atol=1e-6)


def test_only_what_needs_reflections_gets_them(broken_reflections):
  """The basis of the second matrix of the stack is far from an eigenbasis."""
  a = factor(np.geomspace(1, 1e-3, 8))
  near = orthogonal(8)
  basis = Eigenbasis(jnp.asarray(np.stack([near, orthogonal(8, 5), near]), jnp.float32), jnp.ones((3, 8)))
  new = jax.jit(lambda a, basis: qr_refresh(a, basis))(jnp.stack([a, a, 2 * a]), basis)
  assert np.isnan(new.vectors).all(axis=(-2, -1)).tolist() == [False, True, False]
  assert np.isnan(new.values).all(axis=-1).tolist() == [False, True, False]


def test_qr_iteration_converges_to_the_eigenbasis():
  values = [16.0, 8.0, 4.0, 2.0, 1.0]
  a = factor(values)
  basis = start(5)
  for _ in range(40):
    basis = qr_refresh(a, basis)
  # Convergence like 2^-40, then float32's rounding relative to the largest eigenvalue.
  chex.assert_trees_all_close(basis.values, jnp.array(values), atol=1e-4)
  chex.assert_trees_all_close(jnp.abs(basis.vectors.T @ orthogonal(5)), jnp.eye(5), atol=1e-4)


@pytest.mark.parametrize('scale', [1e-30, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize('refresh', REFRESHES)
def test_orthonormal_at_any_scale_in_a_batch(refresh, scale):
  stack = np.stack([factor([4, 3, 2, 1], seed) for seed in range(3)])
  basis = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (3, *leaf.shape)), start(4))
  new = jax.jit(refresh)(stack * np.float32(scale), basis)
  chex.assert_trees_all_close(new.vectors.mT @ new.vectors, jnp.broadcast_to(jnp.eye(4), (3, 4, 4)), atol=1e-5)
  expected = jax.jit(refresh)(stack, basis)
  # scale * A rounds A by 6e-8, over eigenvalue gaps of 1/4 of the largest.
  chex.assert_trees_all_close(new.vectors, expected.vectors, atol=1e-5)
  chex.assert_trees_all_close(new.values / np.float32(scale), expected.values, rtol=1e-5)
  for i in range(3):
    one = refresh(stack[i] * np.float32(scale), start(4))
    chex.assert_trees_all_close(jnp.abs(one.vectors), jnp.abs(new.vectors[i]), atol=1e-4)


@pytest.mark.parametrize('refresh', REFRESHES)
def test_column_continues_column(refresh):
  """Fault 9: when two eigenvalues swap their order, the columns stay and `sort_descending` tells the new order."""
  basis = Eigenbasis(jnp.eye(3), jnp.array([3.0, 2.0, 1.0]))
  new = refresh(jnp.diag(jnp.array([2.0, 5.0, 1.0])), basis)
  # A diagonal matrix needs no rotation: exact up to the normalisation's rounding.
  chex.assert_trees_all_close(jnp.abs(new.vectors), jnp.eye(3), atol=1e-6)
  chex.assert_trees_all_close(new.values, jnp.array([2.0, 5.0, 1.0]), rtol=1e-6)
  ordered, order = sort_descending(new)
  chex.assert_trees_all_equal(order, jnp.array([1, 0, 2]))
  chex.assert_trees_all_close(ordered.values, jnp.array([5.0, 2.0, 1.0]), rtol=1e-6)


def test_eigh_continues_columns_and_fills_the_others_by_falling_eigenvalue():
  """Two vectors stay (one of them with a small eigenvalue), two turn by 45 degrees and follow nobody."""
  turned = np.sqrt(0.5) * np.array([[1, 1], [1, -1]])
  q = np.eye(4)
  q[np.ix_([1, 3], [1, 3])] = turned
  a = (q * np.array([1.0, 7.0, 9.0, 4.0])) @ q.T
  new = eigh_refresh(jnp.asarray(a, jnp.float32), Eigenbasis(jnp.eye(4), jnp.array([4.0, 3.0, 2.0, 1.0])))
  # Float32 eigh, gaps of a third of the largest eigenvalue.
  chex.assert_trees_all_close(new.values[jnp.array([0, 2])], jnp.array([1.0, 9.0]), atol=1e-5)
  chex.assert_trees_all_close(jnp.sort(new.values), jnp.array([1.0, 4.0, 7.0, 9.0]), atol=1e-5)
  chex.assert_trees_all_close(new.vectors @ (new.values[:, None] * new.vectors.T), a, atol=1e-5)


def test_eigh_order_is_always_a_permutation():
  """Any old basis, also of clustered and zero eigenvalues: every eigenvector has one column."""
  for seed in range(20):
    values = np.random.default_rng(seed).choice([0.0, 0.0, 1.0, 1.0, 2.0, 5.0], 6)
    basis = Eigenbasis(
      jnp.asarray(orthogonal(6, seed + 100), jnp.float32), jnp.asarray(np.roll(values, 1), jnp.float32)
    )
    new = eigh_refresh(factor(values, seed), basis)
    # Float32 eigh.
    chex.assert_trees_all_close(new.vectors.T @ new.vectors, jnp.eye(6), atol=1e-5)
    chex.assert_trees_all_close(jnp.sort(new.values), np.sort(values), atol=1e-5)


@pytest.mark.parametrize('refresh', REFRESHES)
def test_zero_factor(refresh):
  """No gradient yet: no eigenvalues, and the basis as it was."""
  basis = Eigenbasis(jnp.asarray(orthogonal(3), jnp.float32), jnp.zeros(3))
  new = refresh(jnp.zeros((3, 3)), basis)
  chex.assert_trees_all_equal(new, basis)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('refresh', REFRESHES)
def test_not_finite_factor_shows(refresh, bad):
  """Fault 26: the caller can tell, because something in the result is not finite."""
  a = jnp.eye(3).at[0, 0].set(bad)
  new = refresh(a, Eigenbasis(jnp.eye(3), jnp.ones(3)))
  assert not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in new)


def test_eigh_at_start_only_at_the_start():
  a = factor([4, 3, 2, 1])
  refresh = eigh_at_start(qr_refresh)
  first = refresh(a, start(4))
  chex.assert_trees_all_equal(first, eigh_refresh(a, start(4)))
  b = factor([4, 3, 2, 1], seed=1)
  chex.assert_trees_all_equal(refresh(b, first), qr_refresh(b, first))
  both = jax.tree.map(lambda x, y: jnp.stack([x, y]), first, start(4))
  mixed = refresh(jnp.stack([b, b]), both)
  # A batch may round otherwise than a lone matrix.
  chex.assert_trees_all_close(mixed.values[0], qr_refresh(b, first).values, rtol=1e-4)
  chex.assert_trees_all_close(mixed.values[1], eigh_refresh(b, start(4)).values, rtol=1e-4)


def test_select_is_matrix_by_matrix():
  ones = Eigenbasis(jnp.ones((2, 3, 3)), jnp.ones((2, 3)))
  zeros = jax.tree.map(jnp.zeros_like, ones)
  chosen = select(jnp.array([True, False]), ones, zeros)
  chex.assert_trees_all_equal(chosen, Eigenbasis(ones.vectors.at[1].set(0), ones.values.at[1].set(0)))


def test_rotation_round_trip_and_sides():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)
  left = Eigenbasis(jnp.asarray(orthogonal(4), jnp.float32), jnp.ones(4))
  right = Eigenbasis(jnp.asarray(orthogonal(6, 1), jnp.float32), jnp.ones(6))
  for bases in (Eigenbases(left, right), Eigenbases(left, None), Eigenbases(None, right)):
    expected = x
    expected = expected if bases.left is None else left.vectors.T @ expected
    expected = expected if bases.right is None else expected @ right.vectors
    # Float32 products of numbers near 1.
    chex.assert_trees_all_close(rotate(x, bases), expected, atol=1e-5)
    chex.assert_trees_all_close(rotate_back(rotate(x, bases), bases), x, atol=1e-5)


@pytest.mark.parametrize('scale', [1e-20, 1.0, 1e20])
def test_rotation_masks_its_own_rounding_and_no_more(scale):
  """Beside an entry 1 to the left 16 eps is noise; below it 16 eps, and 2 eps of the product with the left basis."""
  eps = float(jnp.finfo(jnp.float32).eps)
  identity = Eigenbases(start(2), start(2))
  noise = jnp.array([[1.0, 15 * eps], [-17 * eps, 0.0]]) * scale
  chex.assert_trees_all_equal(rotate(noise, identity), jnp.diag(jnp.array([scale, 0.0])))
  signal = jnp.array([[1.0, 17 * eps], [-19 * eps, 0.0]]) * scale
  chex.assert_trees_all_equal(rotate(signal, identity), signal)
