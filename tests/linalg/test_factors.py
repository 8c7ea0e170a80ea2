"""One step of the two covariance factors, against recorded numbers and the equations in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import Eigenbases, Eigenbasis, Factors
from emopt_jax.linalg.factors import kl_update, kronecker_update
from tests import references
from tests.references import oracles


def recorded_factors(case, suffix=''):
  return Factors(case['L' + suffix], case['R' + suffix])


def random_case(seed=0, m=4, n=7):
  rng = np.random.default_rng(seed)
  roots = [rng.standard_normal((size, size)) for size in (m, n)]
  factors = [root @ root.T for root in roots]
  bases = [np.linalg.eigh(factor)[::-1] for factor in factors]
  return rng.standard_normal((m, n)), factors, bases


def test_kronecker_recorded():
  case = references.load('kronecker_covariance_step')
  new = kronecker_update(recorded_factors(case), case['grad'], decay=0.9)
  # The tolerance: sums in another order in float32.
  chex.assert_trees_all_close(new, recorded_factors(case, '_new'), atol=2e-5, rtol=0)


def test_kl_recorded():
  case = references.load('kl_covariance_step')
  bases = Eigenbases(Eigenbasis(case['Q_L'], case['eigvals_L']), Eigenbasis(case['Q_R'], case['eigvals_R']))
  new = kl_update(recorded_factors(case), case['grad'], bases, decay=0.9)
  # The tolerance. The record floors eigenvalues at 1e-8, far below those of this case, and we relatively.
  chex.assert_trees_all_close(new, recorded_factors(case, '_new'), atol=2e-5, rtol=0)


def test_equations_in_float64():
  gradient, (left, right), bases = random_case()
  with jax.enable_x64(True):
    factors = Factors(jnp.asarray(left), jnp.asarray(right))
    plain = kronecker_update(factors, jnp.asarray(gradient), decay=0.7)
    kl_bases = Eigenbases(*(Eigenbasis(jnp.asarray(q), jnp.asarray(w)) for q, w in bases))
    kl = kl_update(factors, jnp.asarray(gradient), kl_bases, decay=0.7)
    # Rounding of float64, times a condition number of about 1e3.
    chex.assert_trees_all_close(plain, Factors(*oracles.kronecker_step(left, right, gradient, 0.7)), rtol=1e-11)
    chex.assert_trees_all_close(kl, Factors(*oracles.kl_step(left, right, gradient, 0.7, *bases)), rtol=1e-9)


def test_batch_is_each_matrix_on_its_own():
  cases = [random_case(seed) for seed in range(3)]
  gradients = jnp.stack([jnp.asarray(gradient, jnp.float32) for gradient, _, _ in cases])
  factors = Factors(*(jnp.stack([jnp.asarray(f[side], jnp.float32) for _, f, _ in cases]) for side in (0, 1)))
  bases = Eigenbases(
    *(
      Eigenbasis(*(jnp.stack([jnp.asarray(b[side][part], jnp.float32) for _, _, b in cases]) for part in (0, 1)))
      for side in (0, 1)
    )
  )
  batched = kl_update(factors, gradients, bases, decay=0.9)
  for i in range(3):
    one = jax.tree.map(lambda leaf, i=i: leaf[i], (factors, gradients, bases))
    separate = kl_update(*one, decay=0.9)
    # Another product kernel for a batch: rounding, relative to the largest entry.
    chex.assert_trees_all_close(jax.tree.map(lambda leaf, i=i: leaf[i], batched), separate, rtol=1e-5, atol=1e-5)


def test_kl_result_is_symmetric_to_the_last_bit():
  gradient, (left, right), bases = random_case(1, 16, 24)
  factors = Factors(jnp.asarray((left + left.T) / 2, jnp.float32), jnp.asarray((right + right.T) / 2, jnp.float32))
  kl_bases = Eigenbases(*(Eigenbasis(jnp.asarray(q, jnp.float32), jnp.asarray(w, jnp.float32)) for q, w in bases))
  for factor in kl_update(factors, jnp.asarray(gradient, jnp.float32), kl_bases, decay=0.5):
    chex.assert_trees_all_equal(factor, factor.T)


def test_kl_floors_eigenvalues_relative_to_the_largest():
  """A null direction counts as eps times the largest eigenvalue, at any scale of the factors."""
  eps = float(jnp.finfo(jnp.float32).eps)
  for scale in (1e-12, 1.0, 1e12):
    bases = Eigenbases(None, Eigenbasis(jnp.eye(2), jnp.array([scale, 0.0], jnp.float32)))
    new = kl_update(Factors(jnp.zeros((1, 1)), None), jnp.ones((1, 2)), bases, decay=0.0)
    # One division.
    chex.assert_trees_all_close(new.left, jnp.full((1, 1), (1 + 1 / eps) / 2 / scale), rtol=1e-5)


@pytest.mark.parametrize('kept', ['left', 'right'])
def test_missing_side_counts_as_identity(kept):
  gradient, (left, right), bases = random_case()
  gradient = jnp.asarray(gradient, jnp.float32)
  q, w = bases[0 if kept == 'left' else 1]
  basis = Eigenbasis(jnp.asarray(q, jnp.float32), jnp.asarray(w, jnp.float32))
  m, n = gradient.shape
  if kept == 'left':
    factors, bases, expected = (
      Factors(left.astype(np.float32), None),
      Eigenbases(basis, None),
      gradient @ gradient.T / n,
    )
  else:
    factors, bases, expected = (
      Factors(None, right.astype(np.float32)),
      Eigenbases(None, basis),
      gradient.T @ gradient / m,
    )
  new = kl_update(factors, gradient, bases, decay=0.0)
  plain = kronecker_update(factors, gradient, decay=0.0)
  # The identity on the other side whitens nothing; sums in another order.
  chex.assert_trees_all_close(getattr(new, kept), expected, atol=1e-5)
  chex.assert_trees_all_close(getattr(plain, kept), expected * (n if kept == 'left' else m), atol=1e-5)
  assert new[kept == 'left'] is None and plain[kept == 'left'] is None
