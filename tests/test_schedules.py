"""Learning-rate and batch-size rules, in numbers worked out by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax


def test_wsd_schedule_rises_stays_and_falls():
  schedule = emopt_jax.wsd_schedule(2.0, warmup_steps=4, stable_steps=10, decay_steps=5)
  steps = [0, 1, 4, 5, 13, 14, 15, 18, 19, 1000]
  # The fall from 2 to 0.02 takes five steps of 0.396.
  expected = [0, 0.5, 2, 2, 2, 2, 1.604, 0.416, 0.02, 0.02]
  np.testing.assert_allclose([schedule(step) for step in steps], expected, rtol=1e-5, atol=1e-7)  # float32 schedules


def test_wsd_schedule_ends_at_one_percent_of_the_peak_by_default():
  schedule = emopt_jax.wsd_schedule(0.5, warmup_steps=1, stable_steps=1, decay_steps=1)
  np.testing.assert_allclose(schedule(3), 0.005, rtol=1e-5)
  to_zero = emopt_jax.wsd_schedule(0.5, warmup_steps=1, stable_steps=1, decay_steps=1, minimum=0.0)
  np.testing.assert_allclose(to_zero(3), 0, atol=1e-7)


@pytest.mark.parametrize(
  'lengths, expected',
  [
    ((0, 2, 2), [1, 1, 1, 0.505, 0.01, 0.01]),
    ((2, 0, 2), [0, 0.5, 1, 0.505, 0.01, 0.01]),
    ((2, 2, 0), [0, 0.5, 1, 1, 1, 1]),
    ((0, 0, 0), [1, 1, 1, 1, 1, 1]),
  ],
)
def test_wsd_schedule_without_one_of_its_parts(lengths, expected):
  names = ('warmup_steps', 'stable_steps', 'decay_steps')
  schedule = emopt_jax.wsd_schedule(1.0, **dict(zip(names, lengths, strict=True)))
  np.testing.assert_allclose([schedule(step) for step in range(6)], expected, rtol=1e-5, atol=1e-7)


def test_wsd_schedule_under_jit_and_in_an_optimizer():
  schedule = emopt_jax.wsd_schedule(0.4, warmup_steps=2, stable_steps=1, decay_steps=2)
  np.testing.assert_allclose(jax.jit(schedule)(jnp.int32(1)), 0.2, rtol=1e-6)
  optimizer = optax.chain(emopt_jax.orthogonalize(), optax.scale_by_learning_rate(schedule))
  params = {'kernel': jnp.eye(3)}
  state = optimizer.init(params)
  sizes = []
  for _ in range(4):
    updates, state = optimizer.update(params, state, params)
    sizes.append(-float(updates['kernel'][0, 0]))
  # Newton-Schulz with its eight default steps leaves singular values 1 off by at most 1e-3.
  np.testing.assert_allclose(sizes, [0, 0.2, 0.4, 0.4], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize('name', ['warmup_steps', 'stable_steps', 'decay_steps'])
def test_wsd_schedule_of_negative_length(name):
  lengths = {'warmup_steps': 1, 'stable_steps': 1, 'decay_steps': 1, name: -2}
  with pytest.raises(ValueError, match=f'^{name} must not be negative, got -2$'):
    emopt_jax.wsd_schedule(1.0, **lengths)


@pytest.mark.parametrize('minimum', [-0.1, 1.5])
def test_wsd_schedule_with_a_minimum_out_of_range(minimum):
  with pytest.raises(ValueError, match=re.escape(f'minimum must be in [0, 1], got {minimum}')):
    emopt_jax.wsd_schedule(1.0, warmup_steps=1, stable_steps=1, decay_steps=1, minimum=minimum)


@pytest.mark.parametrize('batch_size, expected', [(1024, 3e-3), (4096, 6e-3), (256, 1.5e-3), (2048, 3e-3 * 2**0.5)])
def test_scale_learning_rate_goes_with_the_root_of_the_batch(batch_size, expected):
  rate = emopt_jax.scale_learning_rate(3e-3, batch_size=batch_size, reference_batch_size=1024)
  np.testing.assert_allclose(rate, expected, rtol=1e-12)  # float64


def test_scale_learning_rate_without_a_batch():
  with pytest.raises(ValueError, match=r'^batch sizes must be at least 1, got 0 and 8$'):
    emopt_jax.scale_learning_rate(1.0, batch_size=0, reference_batch_size=8)
  with pytest.raises(ValueError, match=r'^batch sizes must be at least 1, got 8 and -1$'):
    emopt_jax.scale_learning_rate(1.0, batch_size=8, reference_batch_size=-1)


def test_expert_batch_size():
  assert emopt_jax.expert_batch_size(4096, experts_per_token=2, experts=64) == 128
  assert emopt_jax.expert_batch_size(100, experts_per_token=8, experts=8) == 100
  assert emopt_jax.expert_batch_size(10, experts_per_token=1, experts=4) == 2.5
  expert = emopt_jax.expert_batch_size(4096, experts_per_token=4, experts=64)
  assert emopt_jax.scale_learning_rate(0.1, batch_size=expert, reference_batch_size=4096) == pytest.approx(0.025)


@pytest.mark.parametrize('experts_per_token', [0, 5])
def test_expert_batch_size_out_of_range(experts_per_token):
  with pytest.raises(ValueError, match=f'^experts_per_token must be from 1 to 4, got {experts_per_token}$'):
    emopt_jax.expert_batch_size(8, experts_per_token=experts_per_token, experts=4)
