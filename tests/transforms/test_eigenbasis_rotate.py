"""`eigenbasis_rotate` alone: any elementwise transformation inside, its moments moved along, its failures."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import (
  Eigenbasis,
  MatrixAxes,
  eigenbasis_rotate,
  eigh_refresh,
  kl_covariance,
  kronecker_covariance,
  qr_refresh,
)
from emopt_jax.diagnostics import rejected_refreshes, skipped_gradients
from tests.references import oracles

REFRESHES = {'qr': qr_refresh, 'eigh': eigh_refresh}
STACKED = MatrixAxes(-2, -1)


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def adam(**settings):
  return eigenbasis_rotate(optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-15), **settings)


@functools.partial(jax.jit, static_argnums=0)
def run(transform, gradients):
  """Returns the updates and the states of all steps."""
  zero = jax.tree.map(lambda g: jnp.zeros_like(g[0]), gradients)

  def step(state, gradient):
    updates, state = transform.update(gradient, state)
    return state, (updates, state)

  return jax.lax.scan(step, transform.init(zero), gradients)[1]


def test_how_to_test_one_alone():
  """A linear inner transformation does not see the rotation: Q_L (2 Q_L^T G Q_R) Q_R^T = 2 G."""
  gradient = {'kernel': normal(4, 6)}
  transform = eigenbasis_rotate(optax.scale(2.0))
  updates, _ = transform.update(gradient, transform.init(gradient))
  # Four float32 products of numbers near 1.
  chex.assert_trees_all_close(updates, {'kernel': 2 * gradient['kernel']}, atol=1e-5)


def test_any_elementwise_transformation():
  """Lion inside the eigenbasis: the update's entries there are +-1, so each matrix has RMS 1."""
  gradients = normal(5, 4, 6)
  updates, states = run(eigenbasis_rotate(optax.scale_by_lion(b1=0.9, b2=0.99)), gradients)
  bases = states.eigenbasis['params']
  rotated = bases.left.vectors[:, 0].mT @ updates @ bases.right.vectors[:, 0]
  # Four float32 products of numbers near 1.
  chex.assert_trees_all_close(jnp.abs(rotated), jnp.ones((5, 4, 6)), atol=1e-5)


@pytest.mark.parametrize('arrange', [emopt_jax.sort_by_magnitude, emopt_jax.sort_descending])
@pytest.mark.parametrize('refresh', REFRESHES.values(), ids=REFRESHES)
def test_second_moment_follows_its_columns(refresh, arrange):
  """Fault 9: a diagonal G whose two largest entries swap after 3 steps, so that the sorted columns swap at some step.

  The bases stay signed permutations of the identity throughout, so the update is Adam's on the diagonal.
  """
  diagonals = np.array([[3, 2, 1]] * 3 + [[2, 3, 1]] * 40, np.float32)
  gradients = np.stack([np.diag(d) for d in diagonals])
  updates, states = run(adam(refresh=refresh, arrange=arrange), gradients)
  plain = optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-15)
  _, expected = jax.lax.scan(lambda s, g: plain.update(g, s)[::-1], plain.init(gradients[0]), gradients)
  # Float32 rounding of products with a permutation.
  chex.assert_trees_all_close(updates, expected, atol=1e-5)
  vectors = np.abs(states.eigenbasis['params'].left.vectors[:, 0])
  chex.assert_trees_all_close(vectors[2], np.eye(3), atol=1e-5)
  chex.assert_trees_all_close(vectors[-1], np.eye(3)[:, [1, 0, 2]], atol=1e-5)


def test_first_moment_is_the_same_matrix_in_every_basis():
  gradients = normal(12, 4, 6)
  _, states = run(adam(), gradients)
  bases = states.eigenbasis['params']
  in_place = bases.left.vectors[:, 0] @ states.inner.mu @ bases.right.vectors[:, 0].mT
  average = np.zeros((4, 6))
  for step, gradient in enumerate(gradients):
    average = 0.9 * average + 0.1 * gradient
    # Twelve rotations in float32.
    chex.assert_trees_all_close(in_place[step], average, atol=1e-5)


@pytest.mark.parametrize('covariance', [kronecker_covariance, kl_covariance])
def test_not_finite_gradient_skips_that_matrix(covariance):
  """Fault 13: zero update, factors, bases and moments as they were; the others unaffected; counted."""
  gradients = normal(9, 3, 4, 6)
  poisoned = gradients.copy()
  poisoned[0, 2, 0, 0], poisoned[5, 1, 2, 3] = np.inf, np.nan
  transform = adam(covariance=covariance(axes=STACKED), axes=STACKED)
  updates, states = run(transform, poisoned)
  clean, _ = run(transform, gradients)
  chex.assert_trees_all_equal(updates[:, 0], clean[:, 0])
  chex.assert_trees_all_equal(updates[5, 1], jnp.zeros((4, 6)))
  chex.assert_trees_all_equal(updates[0, 2], jnp.zeros((4, 6)))
  kept = states.covariance.factors, states.eigenbasis, {'mu': states.inner.mu, 'nu': states.inner.nu}
  # Equal up to the last bit of nu: XLA may compute what a scan carries and what it returns separately.
  chex.assert_trees_all_close(*(jax.tree.map(lambda s, t=t: s[t, 1], kept) for t in (4, 5)), rtol=1e-6)
  assert jnp.all(jnp.isfinite(updates)) and jnp.all(updates[6:] != 0)
  chex.assert_trees_all_equal(states.covariance.skipped['params'][-1], jnp.array([0, 1, 1]))
  last = jax.tree.map(lambda s: s[-1], states)
  assert skipped_gradients(last) == 2 and rejected_refreshes(last) == 0


@pytest.mark.parametrize('refresh', REFRESHES.values(), ids=REFRESHES)
def test_refresh_that_is_not_finite_keeps_the_old_basis(refresh):
  """Fault 26: a factor with Inf."""
  gradients = normal(3, 2, 4, 6)
  transform = adam(refresh=refresh, covariance=kronecker_covariance(axes=STACKED), axes=STACKED)
  update = jax.jit(transform.update)
  state = transform.init(gradients[0])
  for gradient in gradients[:2]:
    _, state = update(gradient, state)
  factors = state.covariance.factors['params']
  broken = factors._replace(left=factors.left.at[1, 0, 0].set(jnp.inf))
  state = state._replace(covariance=state.covariance._replace(factors={'params': broken}))
  updates, after = update(gradients[2], state)
  first = lambda tree: jax.tree.map(lambda leaf: leaf[1], tree)  # noqa: E731
  chex.assert_trees_all_equal(first(after.eigenbasis['params'].left), first(state.eigenbasis['params'].left))
  chex.assert_trees_all_equal(after.rejected['params'], jnp.array([0, 1]))
  assert rejected_refreshes(after) == 1 and skipped_gradients(after) == 0
  assert jnp.all(jnp.isfinite(updates)) and jnp.all(updates != 0)


def test_own_refresh():
  """A refresh is any function of a factor and a basis: here one that never moves, which leaves plain Adam."""
  gradients = normal(6, 4, 6)
  still = lambda factor, basis: Eigenbasis(basis.vectors, jnp.ones_like(basis.values))  # noqa: E731
  updates, _ = run(adam(refresh=still), gradients)
  plain = optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-15)
  _, expected = jax.lax.scan(lambda s, g: plain.update(g, s)[::-1], plain.init(gradients[0]), gradients)
  # Products with the identity are exact.
  chex.assert_trees_all_close(updates, expected, atol=1e-6)


def test_stack_split_and_leaves_agree():
  """Faults 5 and 6: a scanned stack, a fused kernel and separate kernels give the same updates."""
  parts = {str(i): normal(8, 4, 6, seed=i) for i in range(3)}
  separate, _ = run(adam(), parts)
  joined = list(separate.values())
  split = MatrixAxes(0, 1, split=(1, (6, 6, 6)))
  fused, _ = run(adam(covariance=kronecker_covariance(axes=split), axes=split), np.concatenate(list(parts.values()), 2))
  stacked, _ = run(adam(covariance=kronecker_covariance(axes=STACKED), axes=STACKED), np.stack(list(parts.values()), 1))
  # Batched and single QR round differently.
  chex.assert_trees_all_close(stacked, jnp.stack(joined, 1), atol=1e-4)
  chex.assert_trees_all_close(fused, jnp.concatenate(joined, 2), atol=1e-4)


def test_one_sided():
  """A side longer than max_dim keeps the identity."""
  gradients = normal(4, 4, 9)
  updates, states = run(adam(covariance=kronecker_covariance(max_dim=5)), gradients)
  assert states.eigenbasis['params'].right is None
  left, q = oracles.kronecker_start(gradients[0].astype(np.float64))[0], np.eye(4)
  for gradient in gradients[:1].astype(np.float64):
    left = 0.95 * left + 0.05 * gradient @ gradient.T
    q, w = oracles.orthogonal_iteration(left, q)
  q = q[:, np.argsort(-w)]
  # Adam's first step is a sign, in the one-sided basis; float32 QR.
  chex.assert_trees_all_close(updates[0], q @ np.sign(q.T @ gradients[0]), atol=1e-4)


def test_half_precision():
  """Fault 8: float32 inside, gradient dtype out."""
  dtype = jnp.bfloat16
  gradients = jnp.asarray(normal(4, 4, 6), dtype)
  transform = adam()
  updates, states = run(transform, gradients)
  expected, wide = run(transform, gradients.astype(jnp.float32))
  assert updates.dtype == dtype
  chex.assert_trees_all_equal_shapes_and_dtypes(states, wide)
  # One rounding at the end, of numbers up to 2.
  chex.assert_trees_all_close(updates.astype(jnp.float32), expected, atol=2 * float(jnp.finfo(dtype).eps))


def test_zero_and_huge_and_tiny():
  """Faults 1 and 2: zero gives zero; scaled gradients give the same update."""
  gradients = normal(6, 3, 4, 6)
  gradients[:, 1] = gradients[:, 0] * np.float32(1e10)
  gradients[:, 2] = gradients[:, 0] * np.float32(1e-6)
  transform = adam(covariance=kl_covariance(axes=STACKED), axes=STACKED)
  updates, _ = run(transform, gradients)
  # The scaling rounds by 6e-8; a rotated entry of 1e-3 of the largest feels that a thousandfold.
  chex.assert_trees_all_close(updates[:, 1], updates[:, 0], atol=1e-3)
  chex.assert_trees_all_close(updates[:, 2], updates[:, 0], atol=1e-3)
  zeros, states = run(transform, np.zeros_like(gradients))
  chex.assert_trees_all_equal(zeros, jnp.zeros_like(zeros))
  assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(states))


def test_state_is_not_changed_in_place():
  """Fault 27."""
  transform, gradient = adam(), normal(3, 4)
  update, state = jax.jit(transform.update), transform.init(gradient)
  chex.assert_trees_all_equal(update(gradient, state), update(gradient, state))


def test_mistakes_raise():
  gradient = {'kernel': jnp.ones((2, 4, 6))}
  with pytest.raises(ValueError, match=r'^refresh_every must be at least 1, got 0$'):
    adam(refresh_every=0)
  with pytest.raises(ValueError, match=r"leaf 'kernel' of shape \(2, 4, 6\) is not a matrix"):
    adam(axes=STACKED, covariance=kronecker_covariance()).init(gradient)
  with pytest.raises(ValueError, match=r'pass the same axes to eigenbasis_rotate and to its covariance$'):
    adam(axes=STACKED, covariance=kronecker_covariance(axes=MatrixAxes(0, 1))).init(gradient)
  with pytest.raises(ValueError, match=r"^the inner transformation keeps a moment 'trace'"):
    eigenbasis_rotate(optax.trace(0.9)).init({'kernel': jnp.ones((4, 6))})
