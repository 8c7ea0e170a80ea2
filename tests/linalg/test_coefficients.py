"""The Newton-Schulz tables: what follows their last row, and what they are for."""

import chex
import jax
import numpy as np
import pytest

import emopt_jax
from tests.references import oracles

TABLES = {
  name: getattr(emopt_jax, name)
  for name in ('KELLER_JORDAN', 'QUINTIC', 'POLAR_EXPRESS', 'CANS', 'AOL', 'DEEPSEEK_V4', 'CUBIC5')
}


def test_converging_tables_repeat_their_last_row():
  schedule = emopt_jax.POLAR_EXPRESS.schedule(11)
  chex.assert_trees_all_equal(schedule[:8], np.array(emopt_jax.POLAR_EXPRESS.rows))
  chex.assert_trees_all_equal(schedule[8:], np.tile([1.875, -1.25, 0.375], (3, 1)))
  chex.assert_trees_all_equal(emopt_jax.DEEPSEEK_V4.schedule(13)[8:], np.tile([2.0, -1.5, 0.5], (5, 1)))
  for table in (emopt_jax.CANS, emopt_jax.AOL, emopt_jax.CUBIC5):
    rows = np.array(table.rows)
    chex.assert_trees_all_equal(table.schedule(len(rows) + 2), np.concatenate([rows, rows[-1:], rows[-1:]]))


def test_other_tables_cycle():
  for table in (emopt_jax.KELLER_JORDAN, emopt_jax.QUINTIC):
    rows = np.array(table.rows)
    chex.assert_trees_all_equal(table.schedule(2 * len(rows) + 1), np.concatenate([rows, rows, rows[:1]]))


def test_default_is_every_row_once():
  for table in TABLES.values():
    chex.assert_trees_all_equal(table.schedule(), np.array(table.rows))


@pytest.mark.parametrize('steps', [0, -1])
def test_fewer_than_one_step_raises(steps):
  with pytest.raises(ValueError, match=rf'^steps must be at least 1, got {steps}$'):
    emopt_jax.QUINTIC.schedule(steps)


def iterate(table, values, steps):
  for a, b, c in table.schedule(steps):
    values = a * values + b * values**3 + c * values**5
  return values


@pytest.mark.parametrize('name', TABLES)
def test_maps_singular_values_near_one(name):
  """Every singular value from 1/10 of the norm to the norm ends near 1."""
  # How near is the table's own: the three that never settle swing within these margins, by their authors' choice.
  margin = {'KELLER_JORDAN': 0.35, 'POLAR_EXPRESS': 0.01, 'DEEPSEEK_V4': 0.01, 'CUBIC5': 0.31}.get(name, 0.2)
  largest = 0.8 if name == 'AOL' else 1.0  # what its row rescaling leaves
  values = iterate(TABLES[name], np.linspace(0.1, largest, 50), 5 if name == 'KELLER_JORDAN' else None)
  assert np.abs(values - 1).max() < margin


@pytest.mark.parametrize('name', TABLES)
def test_any_number_of_steps_stays_bounded_and_keeps_the_sign(name):
  """More steps than rows must not diverge, nor turn a descent direction into an ascent."""
  for steps in range(len(TABLES[name].rows), 25):
    largest = 0.8 if name == 'AOL' else 1.0  # what its row rescaling leaves
    values = iterate(TABLES[name], np.linspace(0.05, largest, 50), steps)
    assert values.min() > 0 and values.max() < 1.5, steps


@pytest.mark.parametrize('name', TABLES)
def test_rank_one_matrix_keeps_its_sign(name):
  """The one singular value of a rank-one matrix is 1 after any normalisation; its polar factor must not flip."""
  x = np.outer([1.0, 2.0, 3.0], [1.0, -1.0, 2.0, 0.5]).astype(np.float32)
  y = np.asarray(emopt_jax.newton_schulz(x, coefficients=TABLES[name], steps=5 if name == 'KELLER_JORDAN' else None))
  # The margins of the tables that never settle, as above; AOL's row rescaling turns the left vector a little.
  assert 0.6 < np.sum(y * oracles.polar(x)) < 1.4


def test_fixed_point_of_converging_tables_is_one():
  for table in (emopt_jax.POLAR_EXPRESS, emopt_jax.DEEPSEEK_V4):
    assert sum(table.rows[-1]) == pytest.approx(1, abs=1e-12)  # exact decimals, one rounding each


def test_aol_rescales_rows_and_orthogonalizes():
  """AOL first divides row i by the root of its row sum of |X X^T|, times 0.8; the rest is the usual iteration."""
  x = np.random.default_rng(0).standard_normal((8, 20)).astype(np.float32)
  wide = x.astype(np.float64)
  wide = 0.8 * wide / np.sqrt(np.abs(wide @ wide.T).sum(1, keepdims=True))
  for a, b, c in emopt_jax.AOL.rows:
    gram = wide @ wide.T
    wide = a * wide + (b * gram + c * gram @ gram) @ wide
  # Twelve float32 products of numbers near 1, each with a rounding of 1e-7 amplified by a <= 4.
  chex.assert_trees_all_close(emopt_jax.newton_schulz(x, coefficients=emopt_jax.AOL), wide, atol=2e-5)
  chex.assert_trees_all_close(emopt_jax.newton_schulz(x.T, coefficients=emopt_jax.AOL), wide.T, atol=2e-5)


def test_all_tables_agree_with_oracle_in_float64():
  x = np.random.default_rng(1).standard_normal((6, 9))
  with jax.enable_x64(True):
    for table in TABLES.values():
      if table.rescales_rows:
        continue
      # Same sums in another order: a few units of 1e-16, amplified by the slopes of the rows.
      expected = oracles.newton_schulz(x, table.schedule())
      chex.assert_trees_all_close(emopt_jax.newton_schulz(x, coefficients=table), expected, atol=1e-9)
