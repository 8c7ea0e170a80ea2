"""`skip_spikes` alone, and what it spares the averages behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import MatrixAxes, skip_spikes
from emopt_jax.diagnostics import skipped_gradients

STACKED = MatrixAxes(-2, -1)


def run(transform, gradients):
  """Returns the updates of all steps and the last state."""
  state, updates = jax.lax.scan(
    lambda s, g: transform.update(g, s, jnp.zeros_like(g))[::-1], transform.init(gradients[0]), gradients
  )
  return np.asarray(updates), state


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e10])
def test_level_is_the_average_rms(scale):
  gradients = normal(6, 2, 3, 4) * np.float32(scale)
  updates, state = run(skip_spikes(decay=0.8, axes=STACKED), gradients)
  rms = np.sqrt(np.mean(np.square(gradients, dtype=np.float64), axis=(2, 3)))
  level = rms[0]
  for step in rms[1:]:
    level = 0.8 * level + 0.2 * step
  np.testing.assert_array_equal(updates, gradients)
  np.testing.assert_allclose(state.level['params'], level, rtol=1e-6)  # a few roundings of float32
  assert skipped_gradients(state) == 0


@pytest.mark.parametrize('spike', [1e3, 1e18, 1e30, np.inf, np.nan])
def test_a_spike_costs_its_matrix_one_step(spike):
  gradients = normal(6, 2, 3, 4)
  spiked = gradients.copy()
  spiked[3, 1] *= np.float32(spike)
  updates, state = run(skip_spikes(axes=STACKED), spiked)
  expected = gradients.copy()
  expected[3, 1] = 0
  np.testing.assert_array_equal(updates, expected)
  np.testing.assert_array_equal(state.skipped['params'], [0, 1])


def test_lasting_growth_is_accepted():
  """After log2(1e6 / 100) = 13.3 steps, so that 14 are skipped."""
  gradients = np.ones((40, 2, 2), np.float32)
  gradients[5:] *= 1e6
  updates, state = run(skip_spikes(100.0), gradients)
  np.testing.assert_array_equal(updates[:5], gradients[:5])
  assert not updates[5:19].any()
  np.testing.assert_array_equal(updates[19:], gradients[19:])
  assert skipped_gradients(state) == 14


def test_zero_gradients_change_nothing():
  gradients = np.ones((6, 2, 2), np.float32)
  gradients[[0, 1, 3]] = 0
  updates, state = run(skip_spikes(), gradients)
  np.testing.assert_array_equal(updates, gradients)
  np.testing.assert_array_equal(state.level['params'], [1.0])


def test_half_precision():
  gradients = jnp.asarray(normal(4, 2, 2), jnp.float16).at[2].mul(60000)
  updates, state = run(skip_spikes(), gradients)
  assert updates.dtype == jnp.float16 and state.level['params'].dtype == jnp.float32
  assert not updates[2].any() and skipped_gradients(state) == 1


@pytest.mark.parametrize('make', [emopt_jax.muon, emopt_jax.soap, emopt_jax.kl_soap, emopt_jax.shampoo])
def test_behind_it_a_run_goes_on_as_if_the_step_had_not_been(make):
  """A zero gradient changes neither momentum nor factors; Adam's moments fade by one step."""
  gradients = normal(12, 4, 6)
  spiked = np.insert(gradients, 8, gradients[3] * np.float32(1e12), axis=0)
  without = np.insert(gradients, 8, 0, axis=0)
  optimizer = optax.chain(skip_spikes(), make(1.0, weight_decay=0.0))
  actual, state = run(optimizer, spiked)
  expected, _ = run(optimizer, without)
  np.testing.assert_array_equal(actual, expected)
  assert skipped_gradients(state) == 1


def test_out_of_range():
  with pytest.raises(ValueError, match=r'^ratio must not be negative, got -1$'):
    skip_spikes(-1)
  with pytest.raises(ValueError, match=r'^decay must be in \[0, 1\), got 1.0$'):
    skip_spikes(decay=1.0)
