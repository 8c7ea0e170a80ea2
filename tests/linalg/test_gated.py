"""The wrapper that skips refreshes: which matrices it skips, what they keep, and what the program saves."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emopt_jax import Eigenbasis, eigenbasis_rotate, eigh_refresh, kronecker_covariance, qr_refresh
from emopt_jax.diagnostics import basis_staleness
from emopt_jax.linalg.gated import gated
from emopt_jax.linalg.product_refresh import jacobi_refresh

START = Eigenbasis(jnp.stack([jnp.eye(4)] * 2), jnp.zeros((2, 4)))
NEAR = jnp.diag(jnp.array([4.0, 3.0, 2.0, 1.0])) + 0.01  # off-diagonal share 0.006
FAR = jnp.diag(jnp.array([4.0, 3.0, 2.0, 1.0])) + 0.2  # 0.12


@pytest.mark.parametrize('refresh', [qr_refresh, eigh_refresh, jacobi_refresh])
def test_skips_matrix_by_matrix(refresh):
  stack = jnp.stack([NEAR, FAR])
  new = jax.jit(gated(refresh, 0.05))(stack, START)
  chex.assert_trees_all_equal(new.vectors[0], jnp.eye(4))
  # The diagonal of the factor, divided and multiplied by its largest entry.
  chex.assert_trees_all_close(new.values[0], jnp.diagonal(NEAR), rtol=1e-6)
  expected = jax.jit(refresh)(stack, START)
  # The same arithmetic in another program.
  chex.assert_trees_all_close((new.vectors[1], new.values[1]), (expected.vectors[1], expected.values[1]), atol=1e-5)


def test_skipped_values_are_those_of_the_vectors():
  q = jnp.asarray(np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0], jnp.float32)
  a = 1e-20 * q @ NEAR @ q.T
  new = jax.jit(gated(qr_refresh, 0.05))(a, Eigenbasis(q, jnp.ones(4)))
  chex.assert_trees_all_equal(new.vectors, q)
  # Float32 products.
  chex.assert_trees_all_close(new.values, 1e-20 * jnp.diagonal(NEAR), rtol=1e-5)


def test_refresh_runs_once_for_each_stale_matrix():
  """A callback in the wrapped refresh counts."""
  runs = []

  def counted(factor, eigenbasis):
    jax.debug.callback(lambda: runs.append(1))
    return qr_refresh(factor, eigenbasis)

  refresh = jax.jit(gated(counted, 0.05))
  for stack, expected in [((NEAR, NEAR), 0), ((NEAR, FAR), 1), ((FAR, FAR), 3), ((NEAR, NEAR), 3)]:
    jax.block_until_ready(refresh(jnp.stack(stack), START))
    jax.effects_barrier()
    assert len(runs) == expected


def test_tolerance_bounds():
  """At 0 whatever is not exact is refreshed, at 1 nothing."""
  stack = jnp.stack([NEAR, FAR])
  chex.assert_trees_all_close(
    jax.jit(gated(qr_refresh, 0.0))(stack, START), jax.jit(qr_refresh)(stack, START), atol=1e-6
  )
  chex.assert_trees_all_equal(jax.jit(gated(qr_refresh, 1.0))(stack, START).vectors, START.vectors)
  for tolerance in (-0.1, 1.1, float('nan')):
    with pytest.raises(ValueError, match='tolerance'):
      gated(qr_refresh, tolerance)


def test_zero_and_not_finite():
  new = jax.jit(gated(qr_refresh, 0.05))(jnp.stack([jnp.zeros((4, 4)), FAR.at[0, 1].set(jnp.nan)]), START)
  chex.assert_trees_all_equal((new.vectors[0], new.values[0]), (jnp.eye(4), jnp.zeros(4)))
  assert not jnp.all(jnp.isfinite(new.values[1]))  # the caller rejects it


def test_bases_stay_within_the_tolerance_in_the_optimizer():
  rng = np.random.default_rng(0)
  root = np.linalg.qr(rng.standard_normal((12, 12)))[0] * np.logspace(0, -2, 12)
  gradients = jnp.asarray(rng.standard_normal((60, 16, 12)) @ root.T, jnp.float32)
  # One side, which is compiled in half the time.
  covariance = kronecker_covariance(max_dim=12)
  optimizer = eigenbasis_rotate(optax.scale_by_adam(), covariance=covariance, refresh=gated(jacobi_refresh, 0.1))

  def step(state, gradient):
    state = optimizer.update(gradient, state)[1]
    (factors,), (bases,) = state.covariance.factors.values(), state.eigenbasis.values()
    return state, (basis_staleness(factors.right, bases.right)[0], bases.right.vectors)

  residuals, vectors = jax.jit(lambda s: jax.lax.scan(step, s, gradients)[1])(optimizer.init(jnp.zeros((16, 12))))
  moved = np.any(vectors[1:] != vectors[:-1], axis=(1, 2, 3))
  assert 0.05 < moved.mean() < 0.95
  # A refresh lowers the residual, and what is skipped is within the tolerance.
  assert residuals[20:].max() <= 0.1
