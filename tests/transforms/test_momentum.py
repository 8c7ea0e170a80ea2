"""`momentum` alone, and its policy for matrices without gradient."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import MatrixAxes, momentum
from emopt_jax.diagnostics import skipped_gradients
from tests import references


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def run(transform, gradients):
  """Returns the updates of all steps and the last state."""
  state, updates = jax.lax.scan(lambda s, g: transform.update(g, s)[::-1], transform.init(gradients[0]), gradients)
  return updates, state


@pytest.mark.parametrize('nesterov', [False, True])
def test_how_to_test_one_alone(nesterov):
  """M <- b M + (1-b) G; with the look-ahead the update is b M + (1-b) G."""
  gradients = normal(5, 3, 4)
  transform = momentum(0.9, nesterov=nesterov)
  state = transform.init(gradients[0])
  average = np.zeros((3, 4))
  for gradient in gradients:
    updates, state = transform.update(gradient, state)
    average = 0.9 * average + 0.1 * np.asarray(gradient, np.float64)
    expected = 0.9 * average + 0.1 * gradient if nesterov else average
    # A few float32 roundings of numbers below 1.
    chex.assert_trees_all_close(updates, expected, atol=1e-6)
    chex.assert_trees_all_close(state.mu, average, atol=1e-6)


def test_recorded():
  for name in references.names('muon_default', 'muon_nesterov'):
    case = references.load(name)
    _, state = run(momentum(0.95, nesterov='nesterov' in name), jnp.asarray(case['grads']))
    # Eight float32 roundings of numbers near 1.
    chex.assert_trees_all_close(state.mu, case['state_momentum_buffer'], atol=1e-6)


@pytest.mark.parametrize('nesterov', [False, True])
def test_idle_matrix_does_not_move(nesterov):
  """Fault 30: an expert without gradient for 50 steps gets zero updates, and resumes from the average it had."""
  gradients = normal(60, 2, 3, 4)
  idle = gradients.at[5:55, 1].set(0)
  transform = momentum(0.9, nesterov=nesterov, axes=MatrixAxes(-2, -1))
  updates, state = run(transform, idle)
  chex.assert_trees_all_equal(updates[5:55, 1], jnp.zeros((50, 3, 4)))
  active = jnp.concatenate([gradients[:5, 1:], gradients[55:, 1:]])
  expected, _ = run(transform, active)
  # The same sums in a stack of another size.
  chex.assert_trees_all_close(updates[55:, 1:], expected[5:], rtol=1e-6, atol=1e-7)
  _, other = run(transform, gradients)
  chex.assert_trees_all_equal(state.mu[0], other.mu[0])
  assert skipped_gradients(state) == 0


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_not_finite_matrix_skips_one_step(bad):
  """Fault 13: the others go on, the average stays, and the step is counted."""
  gradients = normal(8, 3, 4, 5)
  poisoned = gradients.at[5, 1, 2, 3].set(bad)
  transform = momentum(0.9, axes=MatrixAxes(-2, -1))
  updates, state = run(transform, poisoned)
  expected, clean = run(transform, gradients)
  chex.assert_trees_all_equal(updates[:, ::2], expected[:, ::2])
  chex.assert_trees_all_equal(state.mu[::2], clean.mu[::2])
  chex.assert_trees_all_equal(updates[5, 1], jnp.zeros((4, 5)))
  _, skipping = run(transform, jnp.delete(gradients, 5, axis=0))
  chex.assert_trees_all_close(state.mu[1], skipping.mu[1], atol=1e-7)  # scans of other lengths fuse alike or nearly so
  chex.assert_trees_all_equal(state.skipped['params'], jnp.array([0, 1, 0]))


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.bfloat16])
def test_half_precision_averages_in_float32(dtype):
  """Fault 8: (1-b) G below half a unit of M in the last place must not be lost."""
  gradients = jnp.ones((400, 2, 2), dtype)
  updates, state = run(momentum(0.995, nesterov=False), gradients)
  assert updates.dtype == dtype and state.mu.dtype == jnp.float32
  # 400 float32 roundings.
  chex.assert_trees_all_close(state.mu, jnp.full((2, 2), 1 - 0.995**400), rtol=1e-4)


def test_float64():
  with jax.enable_x64(True):
    gradients = jnp.asarray(np.random.default_rng(0).standard_normal((10, 2, 3)))
    _, state = run(momentum(0.9), gradients)
    weights = 0.1 * 0.9 ** np.arange(9, -1, -1)
    # float64's rounding; 0.9 itself must be a float64.
    chex.assert_trees_all_close(state.mu, jnp.einsum('t,tij->ij', weights, gradients), atol=1e-15)


def test_state_is_not_changed_in_place():
  """Fault 27: the same state twice gives the same result."""
  transform = momentum()
  state = transform.init(normal(2, 3))
  chex.assert_trees_all_equal(transform.update(normal(2, 3), state), transform.update(normal(2, 3), state))


@pytest.mark.parametrize('decay', [-0.1, 1.0, 1.5])
def test_decay_out_of_range_raises(decay):
  with pytest.raises(ValueError, match=rf'^decay must be in \[0, 1\), got {decay}$'):
    momentum(decay)
