"""Adam's update in one basis never reaches the bound that it is clipped to, and nearly attains it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax


def test_alone():
  transform = emopt_jax.clip_to_adam_bound(0.9, 0.95)
  updates = {'kernel': jnp.array([[0.5, -30.0, jnp.inf]])}
  clipped, _ = transform.update(updates, transform.init(updates))
  bound = 0.1 / np.sqrt(0.05 * (1 - 0.81 / 0.95))
  chex.assert_trees_all_close(clipped['kernel'], np.array([[0.5, -bound, bound]]), rtol=1e-6)  # float32


@pytest.mark.parametrize('b1, b2', [(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.0, 0.95)])
def test_changes_nothing_behind_adam(b1, b2):
  """Not even behind the gradients that attain the bound: growing by b2 / b1 a step, in exact arithmetic for ever."""
  adam = optax.scale_by_adam(b1, b2, eps=0.0)
  random = np.random.default_rng(0).standard_normal((150, 8))
  # Not below 1e-12, whose square float32 still has.
  steepest = np.maximum((b1 / b2) ** np.arange(150)[::-1][:, None], 1e-12) * np.ones(8)
  for gradients in (random, steepest):
    _, updates = jax.lax.scan(
      lambda s, g: adam.update(g, s)[::-1], adam.init(jnp.zeros(8)), jnp.asarray(gradients, jnp.float32)
    )
    clipped, _ = emopt_jax.clip_to_adam_bound(b1, b2).update(updates, optax.EmptyState())
    # The bias-corrected quotient may exceed the bound by rounding alone.
    chex.assert_trees_all_close(clipped, updates, rtol=1e-5)


def test_without_a_bound_nothing_is_clipped():
  updates = {'kernel': jnp.array([1e30, -2.0])}
  for b1, b2 in ((0.95, 0.9), (0.5, 0.25), (0.0, 0.0)):
    chex.assert_trees_all_equal(emopt_jax.clip_to_adam_bound(b1, b2).update(updates, optax.EmptyState())[0], updates)


@pytest.mark.parametrize('name', ['b1', 'b2'])
def test_decay_out_of_range(name):
  with pytest.raises(ValueError, match=rf'^{name} must be in \[0, 1\), got 1.0$'):
    emopt_jax.clip_to_adam_bound(**{name: 1.0})
