"""The Q of X = LQ by Cholesky: Householder's Q where it is called accurate, and elsewhere reflections find it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax.linalg.orthonormal import lq_by_cholesky, q_by_reflections

EPS = np.finfo(np.float32).eps


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape)


def leaning(n, rest, seed=0):
  """Rows of length 1, of which the last has only `rest` of its length outside the span of the others."""
  q = np.linalg.qr(normal(n, n, seed=seed))[0]
  inside = np.full(n - 1, (n - 1) ** -0.5) @ q[:-1]
  return np.vstack([q[:-1], rest * q[-1] + (1 - rest**2) ** 0.5 * inside])


def oracle(x):
  """Householder's L and Q in float64, L with a positive diagonal."""
  q, r = np.linalg.qr(np.swapaxes(np.float64(x), -1, -2))
  sign = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1)[..., None, :]
  return np.swapaxes(r, -1, -2) * sign, np.swapaxes(q * sign, -1, -2)


def orthogonality_error(q):
  q = np.float64(q)
  return np.max(np.abs(q @ np.swapaxes(q, -1, -2) - np.eye(q.shape[-1])))


def run(x):
  """Returns L and Q in one piece each, and whether they are called accurate."""
  factors = jax.jit(lq_by_cholesky)(x)
  n = x.shape[-1]
  below = lambda part: [(0, 0)] * (x.ndim - 2) + [(n - part.shape[-2], 0), (0, 0)]  # noqa: E731
  lower = np.concatenate([np.pad(part, below(part)) for part in factors.lower], axis=-1)
  return lower, np.concatenate(factors.rows, axis=-2), np.asarray(factors.accurate)


NEAR = {
  'near orthogonal': np.eye(64) + 0.3 * normal(64, 64) / 8,
  'half of a row is left': leaning(48, 0.51),
  'lengths from 1 to 1e-12': (np.eye(64) + 0.2 * normal(64, 64) / 8) * np.geomspace(1, 1e-12, 64)[:, None],
  'of one row': np.array([[-3.0]]),
  'stack': np.eye(16) + 0.2 * normal(3, 2, 16, 16) / 4,
  'two blocks of 150 rows': np.eye(300) + 0.3 * normal(300, 300) / 300**0.5,
  'four blocks, not all of one height': np.eye(1030) + 0.3 * normal(1030, 1030) / 1030**0.5,
  'half of a row is left in the last block': leaning(256, 0.51),
}
FAR = {
  'a tenth of a row is left': leaning(48, 0.1),
  'a tenth of a row is left in the last block': leaning(300, 0.1),
  'nearly dependent': leaning(48, 1e-5),
  'random': normal(32, 32),
  'stack': normal(3, 2, 16, 16),
}


@pytest.mark.parametrize('name', NEAR)
def test_cholesky_against_float64(name):
  x = np.float32(NEAR[name])
  lower, q, accurate = run(x)
  assert np.all(accurate)
  expected_lower, expected_q = oracle(x)
  # Householder's own error on these matrices is 3e-7 to 1e-6; the condition number is at most 10.
  chex.assert_trees_all_close(np.float64(q), expected_q, rtol=0, atol=2e-6)
  assert orthogonality_error(q) < 12 * EPS
  lengths = np.linalg.norm(np.float64(x), axis=-1, keepdims=True)
  chex.assert_trees_all_close(np.float64(lower) / lengths, expected_lower / lengths, rtol=0, atol=4e-6)
  assert np.all(np.triu(lower, 1) == 0)


@pytest.mark.parametrize('name', FAR)
def test_where_rows_depend_on_each_other_reflections_are_needed(name):
  x = np.float32(FAR[name])
  assert not np.any(run(x)[2])
  q = jax.jit(q_by_reflections)(x)
  assert orthogonality_error(q) < 12 * EPS
  # L is lower triangular to rounding, and its diagonal positive.
  lower = x @ np.swapaxes(np.float64(q), -1, -2)
  assert np.max(np.abs(np.triu(lower, 1))) < 1e-5 * np.max(np.abs(x))
  assert np.all(np.diagonal(lower, axis1=-2, axis2=-1) > 0)


def test_each_matrix_of_a_stack_by_itself():
  stack = np.stack([NEAR['near orthogonal'], leaning(64, 0.4), np.full((64, 64), np.nan), NEAR['near orthogonal'].T])
  _, q, accurate = run(np.float32(stack))
  assert accurate.tolist() == [True, False, False, True]
  chex.assert_trees_all_close(np.float64(q)[[0, 3]], oracle(stack[[0, 3]])[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize('x', [np.zeros((4, 4)), np.diag([1.0, 0.0, 2.0, 0.0])], ids=['zero', 'zero rows'])
def test_zero_rows_are_for_reflections_which_give_some_orthonormal_ones(x):
  x = np.float32(x)
  assert not run(x)[2]
  assert orthogonality_error(q_by_reflections(x)) < 4 * EPS


def test_under_vmap():
  stack = np.float32(np.stack([NEAR['near orthogonal'], leaning(64, 0.1)]))
  mapped, together = jax.vmap(lq_by_cholesky)(stack), lq_by_cholesky(stack)
  assert mapped.accurate.tolist() == together.accurate.tolist() == [True, False]
  chex.assert_trees_all_close(mapped.rows, together.rows, rtol=0, atol=1e-6)


def test_float64():
  with jax.enable_x64(True):
    factors = lq_by_cholesky(jnp.asarray(NEAR['two blocks of 150 rows'], jnp.float64))
  q = np.concatenate(factors.rows)
  chex.assert_trees_all_close(q, oracle(NEAR['two blocks of 150 rows'])[1], rtol=0, atol=1e-14)
