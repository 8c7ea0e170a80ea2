"""A function of the matrices that need it costs nothing for the others."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax.linalg.eigenbasis import Eigenbasis, qr_refresh
from emopt_jax.linalg.replace_where import replace_where

STACK = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)


def exchanged(x):
  return jnp.swapaxes(x, -1, -2) + 1


@pytest.mark.parametrize('shape', [(), (1,), (1, 1), (3,), (2, 3)])
@pytest.mark.parametrize('share', [0.0, 0.5, 1.0])
def test_matrix_by_matrix(shape, share):
  x = STACK.reshape(-1, 4, 4)[: np.prod(shape, dtype=int)].reshape(*shape, 4, 4)
  needed = np.random.default_rng(1).random(shape) < share
  expected = np.where(needed[..., None, None], exchanged(x), x)
  run = lambda needed, x: replace_where(needed, lambda x: exchanged(x), x, otherwise=x)  # noqa: E731
  chex.assert_trees_all_equal(jax.jit(run)(needed, x), expected)


@pytest.mark.parametrize('inner', [(1,), (3,)])
def test_under_vmap(inner):
  x = STACK[:, : inner[0]]
  needed = np.array([[True, False, False], [False, False, True]])[:, : inner[0]]
  run = lambda needed, x: replace_where(needed, lambda x: exchanged(x), x, otherwise=x)  # noqa: E731
  chex.assert_trees_all_equal(jax.vmap(run)(needed, x), np.where(needed[..., None, None], exchanged(x), x))


@pytest.mark.parametrize('batch', [1, 3])
def test_the_compiled_program_does_nothing_beforehand(batch):
  """For one matrix all rounds of a loop would be equal, and XLA would do the work before it."""
  factor, basis = jnp.zeros((batch, 8, 8)), Eigenbasis(jnp.zeros((batch, 8, 8)), jnp.zeros((batch, 8)))
  program = jax.jit(qr_refresh).lower(factor, basis).compile().as_text()
  main = program[program.index('ENTRY') :]
  assert 'geqrf' in program and 'geqrf' not in main
  assert 'potrf' in program
