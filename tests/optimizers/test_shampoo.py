"""Shampoo and KL-Shampoo against float64 oracles."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import MatrixAxes, kl_shampoo, shampoo
from tests.references import oracles


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(optimizer, gradients):
  zero = jax.tree.map(lambda g: jnp.zeros_like(g[0]), gradients)
  step = lambda state, gradient: optimizer.update(gradient, state, zero)[::-1]  # noqa: E731
  return jax.lax.scan(step, optimizer.init(zero), gradients)[1]


@pytest.mark.parametrize('make, kl', [(shampoo, False), (kl_shampoo, True)])
def test_against_oracle(make, kl):
  gradients = {'wide': normal(20, 6, 9), 'tall': normal(20, 9, 6, seed=1)}
  expected = {key: 0.5 * oracles.shampoo(leaf, kl=kl) for key, leaf in gradients.items()}
  # Inverse roots of factors of condition up to 1e3 in float32; entries have RMS 0.1.
  chex.assert_trees_all_close(run(make(-0.5, weight_decay=0.0), gradients), expected, atol=1e-3)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda g: jnp.asarray(g, jnp.float64), gradients)
    # The same in float64.
    chex.assert_trees_all_close(run(make(-0.5, weight_decay=0.0), wide), expected, atol=1e-9)


@pytest.mark.parametrize('make', [shampoo, kl_shampoo])
def test_recipe_faults_in_one_stack(make):
  """Faults 1, 2, 13, 30: tiny, zero, broken and idle matrices beside a healthy one, at the RMS asked for."""
  gradients = normal(12, 4, 5, 6)
  gradients[:, 1] = gradients[:, 0] * np.float32(1e-10)
  gradients[:3, 2] = gradients[8:, 2] = 0
  gradients[5, 3, 0, 0] = np.nan
  updates = run(make(-1.0, rms=0.2, weight_decay=0.0, axes=MatrixAxes(-2, -1)), gradients)
  # The scaling rounds by 6e-8, through inverse roots.
  chex.assert_trees_all_close(updates[:, 1], updates[:, 0], atol=1e-3)
  chex.assert_trees_all_equal(updates[:3, 2], jnp.zeros((3, 5, 6)))
  chex.assert_trees_all_equal(updates[8:, 2], jnp.zeros((4, 5, 6)))
  chex.assert_trees_all_equal(updates[5, 3], jnp.zeros((5, 6)))
  moving = np.sqrt(np.mean(np.square(updates), axis=(2, 3)))
  # A float32 sum of 30 squares.
  chex.assert_trees_all_close(moving[6:8], np.full((2, 4), 0.2, np.float32), rtol=1e-5)
