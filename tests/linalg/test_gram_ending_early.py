"""Newton-Schulz steps that would change nothing are left out, and only those."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import newton_schulz
from emopt_jax.linalg.gram import restarted_steps
from emopt_jax.linalg.products import symmetric_product
from tests.linalg.test_gram import MATRICES, TABLES, M, N, compiled, with_values


@pytest.mark.parametrize('row', [(1.875, -1.25, 0.375), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)])
@pytest.mark.parametrize('size', [0.1, 0.9, 1.1])
def test_what_is_near_its_polar_factor_takes_one_step(row, size):
  """Of the steps that follow, any would have made it not-a-number."""
  broken = lambda y: jnp.nan * symmetric_product(y, y)  # noqa: E731
  eps = np.finfo(np.float32).eps
  reach = eps ** (1 / 3 if row[2] == 0.375 else 1 / 2)
  # A - I has rank one and the size times the reach for its norm.
  x = jnp.asarray(with_values(np.r_[(1 + size * reach) ** 0.5, np.ones(M - 1)]))
  y = restarted_steps(x, symmetric_product(x, x), np.array([row] * 8), (4, 4), broken, None)
  if size > 1:
    assert np.all(np.isnan(y))
  else:
    # What one step leaves is at most eps of a singular value; the rest is rounding in sums of 32 and 256 numbers.
    chex.assert_trees_all_close(y, with_values(np.ones(M)), rtol=0, atol=1e-6)


def test_only_single_matrices_and_steps_that_lead_to_the_polar_factor_end_early():
  def branches(name, steps, *batch):
    run = functools.partial(newton_schulz, coefficients=TABLES[name], steps=steps)
    return str(jax.make_jaxpr(run)(jnp.zeros((*batch, M, N)))).count(' cond[')

  assert branches('POLAR_EXPRESS', 16) == branches('POLAR_EXPRESS', 16, 1) == 2
  assert branches('POLAR_EXPRESS', 16, 2) == branches('QUINTIC', 16) == branches('POLAR_EXPRESS', 7) == 0


@pytest.mark.parametrize('matrix', MATRICES)
def test_ending_early_changes_nothing(matrix):
  """Beside the same matrix in a batch, which takes all 16 steps."""
  x = MATRICES[matrix]
  every_step = compiled('POLAR_EXPRESS', 16)(jnp.stack([x, x]))[0]
  chex.assert_trees_all_close(compiled('POLAR_EXPRESS', 16)(x), every_step, rtol=0, atol=1e-5)
