"""What a training run can watch, against numbers worked out by hand or by NumPy in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import diagnostics


def draw(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize('shape', [(4, 6), (6, 4), (5, 5), (3, 4, 6)])
def test_orthogonality_error(shape):
  x = draw(*shape)
  small = x if shape[-2] <= shape[-1] else np.swapaxes(x, -1, -2)
  expected = np.abs(small @ np.swapaxes(small, -1, -2) - np.eye(small.shape[-2])).max((-2, -1))
  actual = diagnostics.orthogonality_error(jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)  # sums of 6 products in float32
  chex.assert_shape(actual, shape[:-2])
  assert np.all(diagnostics.orthogonality_error(emopt_jax.polar_svd(jnp.asarray(x, jnp.float32))) < 1e-5)


def test_update_rms_of_a_muon_step_is_its_target():
  params = {'block': {'kernel': jnp.asarray(draw(16, 32), jnp.float32)}}
  optimizer = emopt_jax.mop(0.5, rms=0.2, weight_decay=0.0)
  updates, _ = optimizer.update(params, optimizer.init(params), params)
  rms = diagnostics.update_rms(updates)
  assert list(rms) == ['block/kernel']
  np.testing.assert_allclose(rms['block/kernel'], 0.5 * 0.2, rtol=1e-5)  # rounding of the SVD


def test_update_rms_of_any_leaf():
  rms = diagnostics.update_rms({'a': jnp.array([3.0, -4.0]), 'b': (jnp.array(2.0), jnp.full((2, 2, 2), 1e-30))})
  np.testing.assert_allclose(rms['a'], 12.5**0.5, rtol=1e-6)
  np.testing.assert_allclose(rms['b/0'], 2, rtol=1e-6)
  np.testing.assert_allclose(rms['b/1'], 1e-30, rtol=1e-6)  # its square leaves float32


def test_update_rms_passes_over_leaves_without_entries():
  rms = diagnostics.update_rms({'a': jnp.ones(2), 'empty': jnp.zeros((0, 3))})
  chex.assert_tree_all_finite(rms)


def test_basis_staleness():
  # Q^T A Q of a rotation by t has the entries (1 - 4) sin(t) cos(t) beside its diagonal.
  angle = 0.3
  rotation = jnp.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
  factor = jnp.diag(jnp.array([1.0, 4.0]))
  eigenbasis = emopt_jax.Eigenbasis(rotation, jnp.array([1.0, 4.0]))
  expected = 2**0.5 * 3 * np.sin(angle) * np.cos(angle) / 17**0.5
  np.testing.assert_allclose(diagnostics.basis_staleness(factor, eigenbasis), expected, rtol=1e-5)
  np.testing.assert_allclose(diagnostics.basis_staleness(0 * factor, eigenbasis), 0)


def test_basis_staleness_falls_with_every_refresh():
  vectors, _ = np.linalg.qr(draw(3, 6, 6))
  factor = jnp.asarray(vectors * 4.0 ** np.arange(6) @ np.swapaxes(vectors, -1, -2), jnp.float32)
  eigenbasis = emopt_jax.Eigenbasis(jnp.broadcast_to(jnp.eye(6), factor.shape), jnp.zeros((3, 6)))
  for _ in range(6):
    eigenbasis = emopt_jax.qr_refresh(factor, eigenbasis)
  before = diagnostics.basis_staleness(factor, eigenbasis)
  for _ in range(3):
    eigenbasis = emopt_jax.qr_refresh(factor, eigenbasis)
  # Orthogonal iteration gains the ratio of neighbouring eigenvalues, 4, with every refresh.
  ratio = before / diagnostics.basis_staleness(factor, eigenbasis)
  assert np.all((ratio > 30) & (ratio < 130))
  exact = emopt_jax.eigh_refresh(factor, eigenbasis)
  assert np.all(diagnostics.basis_staleness(factor, exact) < 1e-5)


def test_factor_condition():
  factors = jnp.stack([jnp.diag(jnp.array(values)) for values in ([1.0, 4.0], [2.0, 2.0], [0.0, 1.0], [0.0, 0.0])])
  np.testing.assert_allclose(diagnostics.factor_condition(factors), [4, 1, np.inf, np.inf], rtol=1e-6)


def run_with(optimizer, gradients):
  state = optimizer.init(gradients[0])
  update = jax.jit(optimizer.update)
  for gradient in gradients:
    _, state = update(gradient, state, gradients[0])
  return state


def test_skipped_gradients_of_stacks_and_several_leaves():
  axes = emopt_jax.MatrixAxes(-2, -1)
  stack = jnp.asarray(draw(3, 4, 4), jnp.float32)
  clean = {'a': stack, 'b': stack[0]}
  broken = {'a': stack.at[0, 0, 0].set(jnp.nan).at[2, 1, 1].set(jnp.inf), 'b': stack[0].at[0, 0].set(-jnp.inf)}
  optimizer = optax.chain(optax.identity(), emopt_jax.soap(0.1, axes=axes))
  state = run_with(optimizer, [clean, broken, clean, broken])
  assert diagnostics.skipped_gradients(state) == 6
  assert diagnostics.rejected_refreshes(state) == 0
  np.testing.assert_array_equal(state[1][0].covariance.skipped['a'], [2, 0, 2])


def test_skipped_gradients_of_a_routed_and_wrapped_optimizer():
  params = {'kernel': jnp.ones((4, 4)), 'bias': jnp.ones(4)}
  broken = {'kernel': params['kernel'].at[0, 0].set(jnp.nan), 'bias': params['bias']}
  routed = emopt_jax.route(emopt_jax.muon(0.1), optax.adamw(0.1))
  assert diagnostics.skipped_gradients(run_with(routed, [params, broken])) == 1
  assert diagnostics.skipped_gradients(optax.adam(0.1).init(params)) == 0


def test_rejected_refreshes():
  def refresh(factor, eigenbasis, *, limit):
    new = emopt_jax.qr_refresh(factor, eigenbasis)
    return new._replace(vectors=jnp.where(factor[:, :1, :1] > limit, jnp.nan, new.vectors))

  rotate = functools.partial(emopt_jax.eigenbasis_rotate, optax.scale_by_adam())
  gradients = [{'kernel': jnp.asarray(draw(4, 6, seed=seed), jnp.float32)} for seed in range(3)]
  never = run_with(rotate(refresh=functools.partial(refresh, limit=1e9)), gradients)
  always = run_with(rotate(refresh=functools.partial(refresh, limit=-1.0)), gradients)
  assert diagnostics.rejected_refreshes(never) == 0
  assert diagnostics.rejected_refreshes(always) == 3 * 2  # three steps, two sides
  np.testing.assert_array_equal(always.eigenbasis['kernel'].left.vectors[0], np.eye(4))
  assert diagnostics.skipped_gradients(always) == 0
