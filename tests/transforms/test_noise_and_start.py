"""DESIGN 3.6: the start is continuous in the gradients, and rounding noise never becomes an update (fault 12)."""

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


@functools.cache  # one compilation for both ranks
def optimizers(make):
  """Returns the default start, eigh at every step, and eigh at the first step only."""
  covariance = emopt_jax.kronecker_covariance if make is soap else emopt_jax.kl_covariance
  refresh = emopt_jax.eigh_at_start(emopt_jax.qr_refresh)
  adam = optax.scale_by_adam(0.9, 0.95, 1e-15)
  recipe = functools.partial(make, -1.0, weight_decay=0.0, axes=STACKED)
  started = emopt_jax.eigenbasis_rotate(adam, covariance=covariance(axes=STACKED), refresh=refresh, axes=STACKED)
  return recipe(), recipe(refresh=eigh_refresh), started


@pytest.mark.parametrize('rank', [1, 3])
@pytest.mark.parametrize('make', [soap, kl_soap])
def test_noise_is_no_update(make, rank):
  """Outside the gradient's spaces at most 1e-4 of the update: from step 1 with eigh, from step 20 with the default."""
  gradients = low_rank(rank)
  for optimizer, first in zip(optimizers(make), (19, 0, 0), strict=True):
    updates = np.asarray(run(optimizer, gradients))
    for scale in range(3):
      # DESIGN's figure.
      assert outside(updates[first:, scale], gradients[first:, scale]).max() <= 1e-4


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
