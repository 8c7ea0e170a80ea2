"""An exact first basis is continuous in the gradient where eigenvalues of the factors coincide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import MatrixAxes, eigh_refresh, kl_soap, scale_by_soap, soap

SIZE, COPIES = 12, 5
started = emopt_jax.eigh_at_start(emopt_jax.qr_refresh)


def orthogonal(seed):
  return np.linalg.qr(np.random.default_rng(seed).standard_normal((SIZE, SIZE)))[0]


def gradients():
  """Returns `[10, copies * kinds, n, n]` of one direction each: as they are, and changed by 1e-7 or one ulp."""
  n = SIZE
  spectra = [np.ones(n), np.r_[4, np.ones(n - 1)], np.r_[2, 2, np.ones(n - 2)], np.r_[np.ones(n - 3), 0, 0, 0]]
  kinds = [np.eye(n), *(orthogonal(1) * s @ orthogonal(2) for s in [*spectra, np.r_[1, np.zeros(n - 1)]])]
  rng = np.random.default_rng(0)
  exact = np.stack(kinds) * (1 + 0.3 * rng.standard_normal(10))[:, None, None, None]
  copies = [np.float32(exact)]
  copies += [np.float32(exact * (1 + 1e-7 * rng.standard_normal(exact.shape))) for _ in range(2)]
  ulps = (np.float32(exact) * (1 + 6e-8 * np.sign(rng.standard_normal(exact.shape))) for _ in range(2))
  return np.concatenate([*copies, *(np.float32(x) for x in ulps)], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def run(optimizer, gradients):
  """Returns the updates of every step."""
  zero = jnp.zeros_like(gradients[0])
  step = lambda state, gradient: optimizer.update(gradient, state, zero)[::-1]  # noqa: E731
  return jax.lax.scan(step, optimizer.init(zero), gradients)[1]


def change(total):
  """Returns how far the copies are from each other, relative to their size: the worst of all kinds."""
  total = total.reshape(COPIES, -1, SIZE, SIZE)
  norm = functools.partial(np.linalg.norm, axis=(-2, -1))
  return np.max(norm(total - total[0]) / norm(total[0]))


@pytest.mark.parametrize('refresh, ten', [(eigh_refresh, 1e-3), (started, 1e-4)], ids=['eigh', 'eigh at start'])
@pytest.mark.parametrize('make', [soap, kl_soap, scale_by_soap])
def test_start_is_continuous_where_eigenvalues_coincide(make, refresh, ten):
  stacked = MatrixAxes(-2, -1)
  if make is scale_by_soap:
    optimizer = optax.chain(scale_by_soap(refresh=refresh, axes=stacked), optax.scale(-1.0))
  else:
    optimizer = make(1.0, weight_decay=0.0, axes=stacked, refresh=refresh)
  updates = np.asarray(run(optimizer, gradients()), np.float64)
  # The bases of a space that is not spanned by old columns move by up to 100 eps. An arbitrary basis: 0.9.
  assert change(updates[0]) < 1e-4
  # Where the basis moves at each step, Adam divides entries that are a thousandth of the others by their own size.
  assert change(np.sum(updates, axis=0)) < ten
