"""What is small in a gradient and larger than rounding is kept: spectra that fall steeply, columns of any scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emopt_jax import Eigenbases, Eigenbasis, eigh_refresh, jacobi_refresh, kl_soap, qr_refresh, soap
from emopt_jax.linalg.eigenbasis import rotate

SIZE = 256


@functools.cache
def steep() -> np.ndarray:
  """Returns a gradient [256, 256] with singular values i^-3, which end at the rounding error of the first, 6e-8."""
  rng = np.random.default_rng(0)
  left, right = (np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0] for _ in range(2))
  return ((left * np.arange(1, SIZE + 1) ** -3.0) @ right.T).astype(np.float32)


@functools.cache
def eigenbases() -> Eigenbases:
  """Returns the bases that the covariance of that gradient has after one step."""

  def side(gradient: np.ndarray) -> Eigenbasis:
    outer = gradient.astype(np.float64) @ gradient.T.astype(np.float64)
    factor = 0.05 * outer + 0.95 * np.trace(outer) / SIZE * np.eye(SIZE)
    return eigh_refresh(jnp.asarray(factor, jnp.float32), Eigenbasis(jnp.eye(SIZE), jnp.zeros(SIZE)))

  return Eigenbases(side(steep()), side(steep().T))


def test_rotation_of_a_steep_spectrum():
  bases, gradient = eigenbases(), steep()
  rotated = np.asarray(rotate(jnp.asarray(gradient), bases), np.float64)
  left, right = (np.asarray(side.vectors, np.float64) for side in bases)
  expected = left.T @ gradient.astype(np.float64) @ right
  # Rounding alone turns some signs, an RMS error of 0.08; a threshold of 8 eps |G|_F cuts 58 %, an RMS error of 0.76.
  assert np.mean((rotated == 0) & (expected != 0)) < 0.05
  assert np.sqrt(np.mean(np.square(np.sign(rotated) - np.sign(expected)))) < 0.2


@pytest.mark.parametrize('refresh', [qr_refresh, jacobi_refresh], ids=['qr', 'jacobi'])
@pytest.mark.parametrize('make', [soap, kl_soap])
def test_updates_of_a_steep_spectrum_are_those_of_float64(make, refresh):
  optimizer = make(-1.0, weight_decay=0.0, refresh=refresh)
  update = jax.jit(optimizer.update)

  def updates(dtype) -> list[np.ndarray]:
    gradient = {'kernel': jnp.asarray(steep(), dtype)}
    state, found = optimizer.init(gradient), []
    for _ in range(4):
      direction, state = update(gradient, state, gradient)
      found.append(np.asarray(direction['kernel'], np.float64))
    return found

  single = updates(jnp.float32)
  with jax.enable_x64(True):
    double = updates(jnp.float64)
  errors = [np.sqrt(np.mean(np.square(x - y)) / np.mean(np.square(y))) for x, y in zip(single, double, strict=True)]
  # The first update is the sign of each entry, of which some are rounding; from then on Adam weighs them by their size.
  # A threshold of 8 eps |G|_F makes 0.05, and 7e-3 from then on.
  assert errors[0] < 0.02
  assert max(errors[1:]) < 3e-3


@pytest.mark.parametrize('small', [5e-7, 1e-10, 1e-30])
def test_columns_that_nothing_mixes_keep_any_scale(small):
  """Bases that are the identity add no error, so that no entry is too small beside another."""
  identity = Eigenbasis(jnp.eye(2), jnp.ones(2))
  gradient = jnp.diag(jnp.array([1.0, small]))
  np.testing.assert_array_equal(rotate(gradient, Eigenbases(identity, identity)), gradient)


def test_a_side_that_is_not_rotated_keeps_rows_of_any_scale():
  """One-sided preconditioning: with the right side rotated, a row's error is relative to that row."""
  rng = np.random.default_rng(1)
  gradient = rng.standard_normal((4, 8)) * 10.0 ** np.array([[0], [-8], [-16], [-24]])
  right = np.linalg.qr(rng.standard_normal((8, 8)))[0]
  for bases, x, expected in (
    (Eigenbases(None, Eigenbasis(jnp.float32(right), jnp.ones(8))), gradient, gradient @ right),
    (Eigenbases(Eigenbasis(jnp.float32(right), jnp.ones(8)), None), gradient.T, right.T @ gradient.T),
  ):
    actual = np.asarray(rotate(jnp.asarray(x, jnp.float32), bases), np.float64)
    # Eight products of float32; no entry here is below 1e-2 of its row or column.
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
