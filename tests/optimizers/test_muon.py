"""Muon and MOP against recorded trajectories, and as chains of their parts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import MatrixAxes, mop, muon
from tests import references

quintic = functools.partial(emopt_jax.newton_schulz, coefficients=emopt_jax.QUINTIC)
plain = functools.partial(muon, nesterov=False, method=quintic, rms=1.0, weight_decay=0.01)


def by_rule(rule):
  return optax.chain(
    emopt_jax.momentum(0.95, nesterov=False),
    emopt_jax.orthogonalize(quintic),
    emopt_jax.rms_match(1.0, rule=rule),
    optax.add_decayed_weights(0.01),
    optax.scale_by_learning_rate(0.02),
  )


def times_nuclear_norm(x):
  polar = emopt_jax.polar_svd(x)
  return polar * jnp.sum(polar * x, axis=(-2, -1), keepdims=True)


OPTIMIZERS = {
  'muon_default': plain(0.02),
  'muon_nesterov': plain(0.02, nesterov=True),
  'muon_shape_scaling': by_rule(emopt_jax.shape),
  'muon_unit_rms_norm': by_rule(emopt_jax.unit_rms),
  'muon_paper': muon(
    1e-3, momentum=0.9, nesterov=False, method=functools.partial(emopt_jax.newton_schulz, steps=16), rms=0.2
  ),
  'muon_wd_l2': optax.chain(optax.add_decayed_weights(0.05), plain(0.02, weight_decay=0.0)),
  'mop_spectral': mop(0.02, nesterov=False, rms=0.2, weight_decay=0.01),
  'mop_nuclear': optax.chain(
    emopt_jax.momentum(0.95, nesterov=False),
    emopt_jax.orthogonalize(times_nuclear_norm),
    optax.add_decayed_weights(0.01),
    optax.scale_by_learning_rate(0.002),
  ),
}


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def trajectory(optimizer, params, gradients):
  """Returns the parameters after every step."""

  def step(carry, gradient):
    params, state = carry
    updates, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), params

  return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]


@pytest.mark.parametrize('name', references.names('muon_', 'mop_'))
def test_recorded(name):
  case = references.load(name)
  optimizer = OPTIMIZERS[name.removesuffix('_wide').removesuffix('_tall')]
  params = trajectory(optimizer, jnp.asarray(case['p0'].T), jnp.asarray(case['grads'].mT))
  # The tolerance.
  chex.assert_trees_all_close(params.mT, case['params'], atol=2e-5, rtol=0)


@pytest.mark.parametrize('make', [muon, mop])
@pytest.mark.parametrize('shape', [(8, 24), (24, 8), (16, 16)])
def test_update_rms_is_that_asked_for(make, shape):
  gradient = normal(*shape)
  optimizer = make(1.0, rms=0.2, weight_decay=0.0)
  updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
  # POLAR_EXPRESS leaves singular values within 1e-3 of 1.
  assert np.sqrt(np.mean(np.square(updates))) == pytest.approx(0.2, rel=2e-3)


@pytest.mark.parametrize('name', ['KELLER_JORDAN', 'QUINTIC', 'POLAR_EXPRESS', 'CANS', 'AOL', 'DEEPSEEK_V4', 'CUBIC5'])
def test_every_table_has_the_update_size_by_default(name):
  """Without a number of steps a table takes as many as singular values need to come near 1."""
  method = functools.partial(emopt_jax.newton_schulz, coefficients=getattr(emopt_jax, name))
  optimizer = muon(1.0, method=method, rms=0.2, weight_decay=0.0)
  gradient = normal(24, 40)
  updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
  # Singular values of such a gradient, above 0.05 of its norm, end within 0.7 and 1.3.
  assert 0.16 < np.sqrt(np.mean(np.square(updates))) < 0.24


@pytest.mark.parametrize('c', [1e-30, 1e-20, 1e-10, 1e20])
def test_scale_of_the_gradient_does_not_matter(c):
  """Fault 1, through the whole recipe."""
  params, gradients = normal(6, 10), normal(4, 6, 10, seed=1)
  optimizer = muon(0.1)
  expected = trajectory(optimizer, params, gradients)
  # The scaling rounds each gradient by 6e-8, amplified by the first rows, times a learning rate of 0.1.
  chex.assert_trees_all_close(trajectory(optimizer, params, gradients * np.float32(c)), expected, atol=1e-5)


def test_idle_and_broken_experts_keep_still():
  """Faults 2, 13 and 30, through the whole recipe."""
  params, gradients = normal(3, 4, 5), normal(10, 3, 4, 5, seed=1)
  gradients[4:, 1] = 0
  gradients[4:, 2, 0, 0] = np.nan
  steps = trajectory(muon(0.1, weight_decay=0.0, axes=MatrixAxes(-2, -1)), params, gradients)
  chex.assert_trees_all_equal(steps[4:, 1:], jnp.broadcast_to(steps[3, 1:], (6, 2, 4, 5)))
  assert jnp.all(jnp.any(steps[1:, 0] != steps[:-1, 0], axis=(1, 2)))


def test_learning_rate_may_become_a_schedule():
  """Fault 28: the state of the matrix part has the same structure either way; only the count is new."""
  params = {'kernel': normal(3, 4)}
  fixed, scheduled = muon(0.1).init(params), muon(lambda count: 0.1).init(params)
  chex.assert_trees_all_equal(fixed[:3], scheduled[:3])
  assert isinstance(scheduled[-1], optax.ScaleByScheduleState) and isinstance(fixed[-1], optax.EmptyState)


def test_paper_preset():
  params, gradients = normal(6, 4), normal(4, 6, 4, seed=1)
  polar = functools.partial(emopt_jax.newton_schulz, steps=16)
  expected = muon(0.1, momentum=0.9, nesterov=False, method=polar, rms=(0.1 / 1.9) ** 0.5, weight_decay=0.1)
  actual = trajectory(emopt_jax.paper_muon(0.1), params, gradients)
  chex.assert_trees_all_equal(actual, trajectory(expected, params, gradients))
