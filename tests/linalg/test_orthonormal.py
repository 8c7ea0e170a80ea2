"""The Q of X = QR by Cholesky: Householder's Q, and Householder's where Cholesky would lose digits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax.linalg import orthonormal
from emopt_jax.linalg.orthonormal import orthonormal_columns

EPS = np.finfo(np.float32).eps


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape)


def leaning(n, rest, seed=0):
  """Columns of length 1, of which the last has only `rest` of its length outside the span of the others."""
  q = np.linalg.qr(normal(n, n, seed=seed))[0]
  inside = q[:, :-1] @ np.full(n - 1, (n - 1) ** -0.5)
  return np.column_stack([q[:, :-1], rest * q[:, -1] + (1 - rest**2) ** 0.5 * inside])


def oracle(x):
  q, r = np.linalg.qr(np.float64(x))
  return q * np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1)[..., None, :]


def orthogonality_error(q):
  q = np.float64(q)
  return np.max(np.abs(np.swapaxes(q, -1, -2) @ q - np.eye(q.shape[-1])))


def run(x):
  return jax.jit(lambda x: orthonormal_columns(x))(x)  # traced anew, with or without the reflections below


@pytest.fixture
def broken_reflections(monkeypatch):
  monkeypatch.setattr(orthonormal, '_by_reflections', lambda x: jnp.nan * x)


NEAR = {
  'near orthogonal': np.eye(64) + 0.3 * normal(64, 64) / 8,
  'half of a column is left': leaning(48, 0.51),
  'lengths from 1 to 1e-12': (np.eye(64) + 0.2 * normal(64, 64) / 8) * np.geomspace(1, 1e-12, 64),
  'of one row': np.array([[-3.0]]),
  'stack': np.eye(16) + 0.2 * normal(3, 2, 16, 16) / 4,
}
FAR = {
  'a tenth of a column is left': leaning(48, 0.1),
  'nearly dependent': leaning(48, 1e-5),
  'random': normal(32, 32),
  'stack': normal(3, 2, 16, 16),
}


@pytest.mark.parametrize('name', NEAR)
def test_cholesky_against_float64(name, broken_reflections):
  x = np.float32(NEAR[name])
  q = run(x)
  # Householder's own error on these matrices is 3e-7 to 1e-6; the condition number is at most 10.
  chex.assert_trees_all_close(np.float64(q), oracle(x), rtol=0, atol=2e-6)
  assert orthogonality_error(q) < 12 * EPS


@pytest.mark.parametrize('name', FAR)
def test_reflections_where_columns_depend_on_each_other(name):
  x = np.float32(FAR[name])
  q = run(x)
  assert orthogonality_error(q) < 12 * EPS
  # R is upper triangular to rounding, and its diagonal positive.
  r = np.swapaxes(np.float64(q), -1, -2) @ x
  assert np.max(np.abs(np.tril(r, -1))) < 1e-5 * np.max(np.abs(x))
  assert np.all(np.diagonal(r, axis1=-2, axis2=-1) > 0)


def test_only_what_needs_reflections_gets_them(broken_reflections):
  stack = np.stack([NEAR['near orthogonal'], leaning(64, 0.4), np.full((64, 64), np.nan), NEAR['near orthogonal'].T])
  q = run(np.float32(stack))
  assert np.all(np.isnan(q), axis=(-2, -1)).tolist() == [False, True, True, False]
  chex.assert_trees_all_close(np.float64(q)[[0, 3]], oracle(stack[[0, 3]]), rtol=0, atol=2e-6)


@pytest.mark.parametrize('x', [np.zeros((4, 4)), np.diag([1.0, 0.0, 2.0, 0.0])], ids=['zero', 'zero columns'])
def test_zero_columns_give_some_orthonormal_ones(x):
  q = orthonormal_columns(jnp.asarray(x, jnp.float32))
  assert orthogonality_error(q) < 4 * EPS


def test_under_vmap():
  stack = np.float32(np.stack([NEAR['near orthogonal'], leaning(64, 0.1)]))
  chex.assert_trees_all_close(jax.vmap(orthonormal_columns)(stack), orthonormal_columns(stack), rtol=0, atol=1e-6)


def test_float64():
  with jax.enable_x64(True):
    q = orthonormal_columns(jnp.asarray(NEAR['near orthogonal'], jnp.float64))
  chex.assert_trees_all_close(q, oracle(NEAR['near orthogonal']), rtol=0, atol=1e-14)
