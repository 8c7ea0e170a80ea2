"""Finite gradients of any size, in any order: finite updates, a state that works, and spikes that are forgotten."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import emopt_jax
from emopt_jax import MatrixAxes
from tests.contract_cases import (
  LEARNING_RATE,
  WEIGHT_DECAY,
  every_optimizer,
  every_recipe,
  normal,
  optimizer,
  parameters,
)

STEPS = 6
# Powers of ten from below the smallest normal float32 to the largest number; repeated ones are drawn often.
EXPONENTS = st.lists(
  st.one_of(st.sampled_from([-42.0, -30.0, -20.0, 0.0, 9.0, 18.0, 19.0, 20.0, 25.0, 38.5]), st.floats(-42, 38.5)),
  min_size=STEPS,
  max_size=STEPS,
)


def scaled(shapes, seed: int, exponent: float):
  """Returns a tree of entries up to 10^exponent; those beyond float32 become its largest number, not infinity."""
  largest = float(np.finfo(np.float32).max)
  unit = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) / np.max(np.abs(leaf)), normal(shapes, seed))
  return jax.tree.map(lambda leaf: jnp.asarray(np.clip(leaf * 10.0**exponent, -largest, largest), jnp.float32), unit)


@every_optimizer
def test_finite_gradients_give_finite_updates(case):
  built, update = optimizer(case.build)
  params = parameters(case)

  @hypothesis.given(EXPONENTS)
  @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
  def holds(exponents):
    state = built.init(params)
    for seed, exponent in enumerate(exponents):
      updates, state = update(scaled(case.shapes, seed, exponent), state, params)
      decay = jax.tree.map(lambda p: LEARNING_RATE * WEIGHT_DECAY * np.abs(p), params)
      for leaf, decayed in zip(jax.tree.leaves(updates), jax.tree.leaves(decay), strict=True):
        assert np.isfinite(leaf).all()
        # An update has AdamW's size, whose entries are at most 1 / sqrt(1 - b2) before the rate, 32 at b2 = 0.999.
        assert (np.abs(leaf) <= 50 * LEARNING_RATE + decayed).all()
    # Adam's second moment of the leaves that are no matrices overflows, as Optax's own does.
    matrices = state.inner_states['matrix'] if case.name == 'routed' else state
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(matrices))
    if case.name == 'covariance_alone':
      return  # its covariance skips the average in front of it for as long as that keeps a gradient too large to square
    # Gradients of the largest size that every optimizer takes in move the matrices, whatever came before.
    for seed in range(3):
      updates, state = update(scaled(case.shapes, 100 + seed, 17.0), state, params)
    moved = jax.tree.map(lambda update, p: update + LEARNING_RATE * WEIGHT_DECAY * p, updates, params)
    for name in ('attn', 'mlp'):
      assert np.sqrt(np.mean(np.square(moved[name]['kernel']))) > 0.1 * 0.2 * LEARNING_RATE

  holds()


@pytest.mark.parametrize('spike', [1e19, 1e25, 1e30])
@every_recipe
def test_what_is_counted_as_skipped_is_skipped(recipe, spike):
  """Squares that overflow: the step does nothing but weight decay, and the next is that of a run without it."""
  built = recipe(1.0, weight_decay=0.0)
  params = {'kernel': normal((4, 6), 0)}
  gradients = [{'kernel': normal((4, 6), 1 + i)} for i in range(4)]
  with jax.disable_jit():
    state = built.init(params)
    for gradient in gradients[:2]:
      _, state = built.update(gradient, state, params)
    before = state
    update, state = built.update({'kernel': spike * gradients[2]['kernel']}, state, params)
  if emopt_jax.diagnostics.skipped_gradients(state) == 0:
    assert recipe in (emopt_jax.muon, emopt_jax.mop, emopt_jax.paper_muon)  # nothing is squared
    return
  np.testing.assert_array_equal(update['kernel'], np.zeros((4, 6)))
  assert emopt_jax.diagnostics.skipped_gradients(state) == 1
  counters = ('count', 'skipped')
  for (keys, new), old in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(before), strict=True):
    if not any(getattr(key, 'name', None) in counters for key in keys):
      np.testing.assert_array_equal(new, old, err_msg=jax.tree_util.keystr(keys))


SPIKES = (1e2, 1e4, 1e8, 1e16, 1e20, 1e30)
STEP_OF_SPIKE, RUN = 30, 1500


@functools.cache
def spiked_gradients() -> np.ndarray:
  """Returns gradients [1500, 1 + spikes, 8, 12] of a direction and noise, the first run without a spike."""
  rng = np.random.default_rng(0)
  clean = rng.standard_normal((8, 12)) + 0.5 * rng.standard_normal((RUN, 8, 12))
  gradients = np.repeat(clean[:, None], 1 + len(SPIKES), axis=1).astype(np.float32)
  direction = rng.standard_normal((8, 12))
  for run, spike in enumerate(SPIKES, 1):
    gradients[STEP_OF_SPIKE, run] = spike * direction
  return gradients


def recovery(updates: np.ndarray) -> np.ndarray:
  """Returns, for each spike, after how many steps size and direction are again those of the run without it.

  Within 10 %, and a cosine of 0.9.
  """
  clean, spiked = updates[:, :1], updates[:, 1:]
  norm = lambda x: np.sqrt(np.sum(np.square(x), axis=(2, 3)))  # noqa: E731
  size = np.abs(norm(spiked) / norm(clean) - 1) > 0.1
  cosine = np.sum(spiked * clean, axis=(2, 3)) / np.maximum(norm(spiked) * norm(clean), 1e-300)
  away = (size | (cosine < 0.9))[STEP_OF_SPIKE + 1 :]
  return np.array([int(np.max(np.flatnonzero(away[:, run]), initial=-1)) + 1 for run in range(len(SPIKES))])


def run_all(transform, gradients) -> np.ndarray:
  def step(state, gradient):
    return transform.update(gradient, state, jnp.zeros_like(gradient))[::-1]

  return np.asarray(jax.jit(lambda g: jax.lax.scan(step, transform.init(g[0]), g)[1])(gradients), np.float64)


@functools.cache
def recovery_of_adamw() -> np.ndarray:
  """Returns that of AdamW with b2 = 0.95, in float64, where no square overflows."""
  with jax.enable_x64(True):
    return recovery(run_all(optax.scale_by_adam(0.9, 0.95), jnp.asarray(spiked_gradients(), jnp.float64)))


# How much longer than AdamW each takes, as its docstring says. Its bases and roots have to forget the spike's direction
# too, before the moments that live in them can.
LONGER = {
  emopt_jax.muon: 1.0,
  emopt_jax.shampoo: 1.0,
  emopt_jax.kl_shampoo: 1.1,
  emopt_jax.soap: 1.5,
  emopt_jax.kl_soap: 2.1,
}


@pytest.mark.parametrize('recipe', LONGER, ids=lambda recipe: recipe.__name__)
def test_a_spike_is_forgotten(recipe):
  stacked = recipe(1.0, weight_decay=0.0, axes=MatrixAxes(-2, -1))
  actual, adamw = recovery(run_all(stacked, spiked_gradients())), recovery_of_adamw()
  assert (actual <= LONGER[recipe] * adamw).all(), (actual, adamw)
  if recipe is not emopt_jax.muon:  # those whose square overflows are skipped
    assert (actual[-2:] <= 3).all(), actual


@pytest.mark.parametrize('recipe', LONGER, ids=lambda recipe: recipe.__name__)
def test_spikes_can_be_skipped(recipe):
  axes = MatrixAxes(-2, -1)
  chained = optax.chain(emopt_jax.skip_spikes(50.0, axes=axes), recipe(1.0, weight_decay=0.0, axes=axes))
  gradients = spiked_gradients()[:60]
  assert (recovery(run_all(chained, gradients)) <= 3).all()
