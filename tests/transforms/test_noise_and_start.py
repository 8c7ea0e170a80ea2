"""The start is continuous in the gradients, and rounding noise never becomes an update."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import MatrixAxes, eigh_refresh, kl_soap, soap

STACKED = MatrixAxes(-2, -1)


@functools.partial(jax.jit, static_argnums=0)
def run(optimizer, gradients):
  """Returns the updates of every step: scan over the first axis."""
  zero = jnp.zeros_like(gradients[0])
  step = lambda state, gradient: optimizer.update(gradient, state, zero)[::-1]  # noqa: E731
  return jax.lax.scan(step, optimizer.init(zero), gradients)[1]


@pytest.mark.parametrize('shape', [(32, 48), (48, 32), (40, 40)])
@pytest.mark.parametrize('make', [soap, kl_soap])
def test_start_is_continuous(make, shape):
  """Relative perturbations of 1e-7 change the sum of ten updates by at most 1e-5, at default settings."""
  rng = np.random.default_rng(0)
  gradients = rng.standard_normal((10, 1, *shape))
  # Six perturbed copies beside the original, in one stack: matrices do not meet.
  copies = gradients * (1 + 1e-7 * rng.standard_normal((10, 7, *shape)) * (np.arange(7) > 0)[:, None, None])
  total = np.sum(np.asarray(run(make(1.0, axes=STACKED), copies.astype(np.float32)), np.float64), axis=0)
  change = np.linalg.norm(total - total[0], axis=(1, 2)) / np.linalg.norm(total[0])
  # DESIGN's figure.
  assert change.max() <= 1e-5


def outside(updates, gradients):
  """Returns the share of each update that lies outside the row and column spaces of its gradient."""
  shares = []
  for update, gradient in zip(np.asarray(updates, np.float64), gradients.astype(np.float64), strict=True):
    u, s, vt = np.linalg.svd(gradient, full_matrices=False)
    rank = np.sum(s > 1e-5 * s[0])
    u, vt = u[:, :rank], vt[:rank]
    signal = u @ (u.T @ update @ vt.T) @ vt
    shares.append(np.linalg.norm(update - signal) / np.linalg.norm(update))
  return np.array(shares)


def low_rank(rank):
  """Returns gradients [200, 3, 32, 48] of one direction that grow by 2 % a step, at scales 1e-3, 1 and 1e3."""
  rng = np.random.default_rng(rank)
  one = rng.standard_normal((32, rank)) @ rng.standard_normal((rank, 48))
  growing = 1.02 ** np.arange(200)[:, None, None, None] * np.array([1e-3, 1.0, 1e3])[:, None, None]
  return (growing * one).astype(np.float32)


@functools.cache  # one compilation for all gradients
def started_by_eigh(make):
  """Returns the optimizer whose first bases are exact and whose later ones follow by QR."""
  covariance = emopt_jax.kronecker_covariance if make is soap else emopt_jax.kl_covariance
  refresh = emopt_jax.eigh_at_start(emopt_jax.qr_refresh)
  adam = optax.scale_by_adam(0.9, 0.95, 1e-15)
  return emopt_jax.eigenbasis_rotate(adam, covariance=covariance(axes=STACKED), refresh=refresh, axes=STACKED)


@functools.cache
def with_refresh(make, refresh):
  return make(-1.0, weight_decay=0.0, axes=STACKED, refresh=refresh)


def two_units():
  """Returns gradients as `low_rank(1)`, of two columns only, whose errors of rounding no rotation spreads."""
  gradients = low_rank(1)
  gradients[..., 2:] = 0
  return gradients


# Bases that start from the identity have found the gradient's spaces, to rounding, after 20 steps.
@pytest.mark.parametrize(
  ('optimizer', 'first'),
  [
    (lambda make: with_refresh(make, emopt_jax.qr_refresh), 19),
    (lambda make: with_refresh(make, emopt_jax.jacobi_refresh), 19),
    (lambda make: with_refresh(make, eigh_refresh), 0),
    (started_by_eigh, 0),
  ],
  ids=['qr', 'jacobi', 'eigh', 'eigh at start'],
)
@pytest.mark.parametrize('make', [soap, kl_soap])
def test_noise_is_no_update(make, optimizer, first):
  """Outside the gradient's row and column spaces there is nothing of the update but its own rounding."""
  for gradients in (low_rank(1), low_rank(3), two_units()):
    updates = np.asarray(run(optimizer(make), gradients))
    for scale in range(3):
      # The design asks for 1e-4; entries of noise would make it 0.5 and more, float32 alone makes 2e-7 to 1e-6.
      assert outside(updates[first:, scale], gradients[first:, scale]).max() <= 1e-5


@pytest.mark.parametrize('make', [soap, kl_soap])
def test_low_rank_update_has_the_size_of_its_signal(make):
  """A rank-1 gradient has one entry in its eigenbasis, so Adam's first step has norm 1; noise would make it 78."""
  gradients = low_rank(1)[:1]
  updates = run(make(1.0, weight_decay=0.0, axes=STACKED, refresh=eigh_refresh), gradients)
  # Float32 rotations.
  chex.assert_trees_all_close(jnp.linalg.norm(updates[0], axis=(1, 2)), jnp.ones(3), rtol=1e-3)


@pytest.mark.parametrize('make', [soap, kl_soap])
def test_units_that_wake_up_do_not_explode(make):
  """Columns of a low-rank gradient that are zero until their step, as behind rectified units that were dead.

  The first moment turns into entries where the second has seen nothing; divided by its root it would be up to 1e15.
  """
  rng = np.random.default_rng(0)
  awake = np.arange(60)[:, None, None] >= rng.integers(0, 30, 48)
  gradients = (rng.standard_normal((60, 32, 4)) @ rng.standard_normal((60, 4, 48)) * awake).astype(np.float32)
  updates = np.asarray(run(make(1.0, weight_decay=0.0), gradients))
  # Adam's entries are at most 1.165, by Cauchy-Schwarz, in a basis that stands still, and a rotation keeps the mean
  # square. A turning basis alone made 15 of it, and without a floor under the second moment 1e15.
  assert np.sqrt(np.mean(updates**2, axis=(1, 2))).max() < 1.17
  transform = emopt_jax.eigenbasis_rotate(optax.scale_by_adam(0.9, 0.95, 1e-15))
  assert np.abs(np.asarray(run(transform, gradients))).max() < 1000
