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


def test_tables_whose_last_row_leads_to_one_repeat_it():
  schedule = emopt_jax.POLAR_EXPRESS.schedule(11)
  chex.assert_trees_all_equal(schedule[:8], np.array(emopt_jax.POLAR_EXPRESS.rows))
  chex.assert_trees_all_equal(schedule[8:], np.tile([1.875, -1.25, 0.375], (3, 1)))
  chex.assert_trees_all_equal(emopt_jax.DEEPSEEK_V4.schedule(13)[8:], np.tile([2.0, -1.5, 0.5], (5, 1)))
  for table in (emopt_jax.QUINTIC, emopt_jax.CANS, emopt_jax.AOL):
    rows = np.array(table.rows)
    chex.assert_trees_all_equal(table.schedule(len(rows) + 2), np.concatenate([rows, rows[-1:], rows[-1:]]))


def test_others_start_again_where_they_stay_in_bounds():
  chex.assert_trees_all_equal(emopt_jax.KELLER_JORDAN.schedule(11), np.tile([3.4445, -4.7750, 2.0315], (11, 1)))
  # 1.3, where CUBIC5 ends, would become -3 in its first row.
  chex.assert_trees_all_equal(emopt_jax.CUBIC5.schedule(7)[5:], np.tile([1.5, -0.5, 0.0], (2, 1)))


def test_own_tables_may_say_what_follows():
  rows = ((3.0, -3.0, 1.0), (2.0, -1.5, 0.5))
  for converges, following in ((None, [1, 1]), (True, [1, 1]), (False, [0, 1])):
    schedule = emopt_jax.Coefficients(rows, converges=converges).schedule(4)
    chex.assert_trees_all_equal(schedule, np.array(rows)[[0, 1, *following]])


def ends(table, steps=None, smallest=1e-3):
  """Returns what singular values up to the bound of the normalisation become."""
  # 0.8 is what the row rescaling of AOL leaves.
  return iterate(table, (0.8 if table.rescales_rows else 1.0) * np.geomspace(smallest, 1, 400), steps)


@pytest.mark.parametrize('name', TABLES)
@pytest.mark.parametrize('more', [1, 2, 3, 4])
def test_more_steps_never_leave_the_interval_of_the_table(name, more):
  """Of singular values from 1e-3 to 1. Those from 0.1 up end no farther from 1 than after the table's own steps."""
  table = TABLES[name]
  steps = len(table.schedule()) + more
  own, values = ends(table), ends(table, steps)
  # Between two of the 400 values the interval may be a little wider.
  assert own.min() * 0.99 < values.min() and values.max() < own.max() * 1.01
  margin = np.abs(ends(table, smallest=0.1) - 1).max()
  assert np.abs(ends(table, steps, smallest=0.1) - 1).max() < max(margin * 1.01, 1e-6)


@pytest.mark.parametrize('name', [name for name in TABLES if name != 'KELLER_JORDAN'])
def test_four_more_steps_settle(name):
  """Fixed points are up to 0.028 from 1, and the slowest row, of CANS, leaves 0.62^4 of 0.12 around its own."""
  table = TABLES[name]
  assert np.abs(ends(table, len(table.schedule()) + 4, smallest=0.1) - 1).max() < 0.05


@pytest.mark.parametrize('name', TABLES)
def test_singular_values_of_a_matrix_after_more_steps(name):
  """As the map of singular values has it: those of a matrix stay where the table itself leaves them, or nearer to 1."""
  table = TABLES[name]
  rng = np.random.default_rng(4)
  u, v = (np.linalg.qr(rng.standard_normal((n, 8)))[0] for n in (8, 12))
  x = ((u * np.geomspace(1, 3e-3, 8)) @ v.T).astype(np.float32)
  own = ends(table)
  for more in (1, 4):
    y = emopt_jax.newton_schulz(x, coefficients=table, steps=len(table.schedule()) + more)
    # Float32 products, and a grid of singular values; x has all of them above 1e-3 of its norm.
    values = np.linalg.svd(y, compute_uv=False)
    assert own.min() * 0.98 < values.min() and values.max() < own.max() * 1.02


def test_default_is_every_row_once():
  for table in TABLES.values():
    chex.assert_trees_all_equal(table.schedule(), np.array(table.rows))


@pytest.mark.parametrize('rows', [(), np.zeros((0, 3)), ((1.5, -0.5),)])
@pytest.mark.parametrize('steps', [None, 5])
def test_no_rows_raise(rows, steps):
  table = emopt_jax.Coefficients(rows, converges=True)
  for call in (lambda: table.schedule(steps), lambda: emopt_jax.newton_schulz(np.eye(2), coefficients=table)):
    with pytest.raises(ValueError, match=r'^coefficients take one row \(a, b, c\) or more, got '):
      call()


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
  values = iterate(TABLES[name], np.linspace(0.1, largest, 50), None)
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
  y = np.asarray(emopt_jax.newton_schulz(x, coefficients=TABLES[name]))
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
