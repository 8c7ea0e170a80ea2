"""Staggered work: every matrix has its turn once in a round, and a step takes its share and no more."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax.transforms.staggered import staggered


@pytest.mark.parametrize('k, every', [(1, 1), (1, 3), (4, 2), (5, 2), (5, 3), (7, 10), (12, 10), (3, 3)])
def test_every_matrix_has_its_turn_once_in_a_round(k, every):
  values = jnp.arange(2.0 * k).reshape(k, 2)
  others = {'factor': values, 'none': None}
  shares = []

  def advance(before, others):
    shares.append(before['x'].shape[0])
    return {'x': before['x'] + others['factor'], 'n': before['n'] + 1}

  @jax.jit
  def run(step, state):
    return staggered(advance, step, every)(state, others)

  state = {'x': values, 'n': jnp.zeros((k,), jnp.int32)}
  for step in range(3 * every):
    before, state = state, run(jnp.int32(step), state)
    moved = np.asarray(state['n'] - before['n'])
    assert moved.sum() <= -(-k // every)
    if (step + 1) % every == 0:
      chex.assert_trees_all_equal(state['n'], jnp.full(k, (step + 1) // every, jnp.int32))
      chex.assert_trees_all_equal(state['x'], values * (1 + (step + 1) // every))
  assert set(shares) == {-(-k // every)}


def test_a_traced_number_of_steps_gives_all_matrices_one_turn():
  @jax.jit
  def run(step, every):
    return staggered(lambda x: x + 1, step, every)(jnp.zeros(3))

  for step in range(6):
    chex.assert_trees_all_equal(run(step, 3), jnp.full(3, float(step % 3 == 0)))
