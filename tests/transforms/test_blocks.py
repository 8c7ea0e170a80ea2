"""Block-diagonal factors: the long side of a matrix keeps only the diagonal blocks of its covariance."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import MatrixAxes, kl_covariance, kronecker_covariance, kronecker_precondition
from emopt_jax.linalg.blocks import number_of_blocks
from tests.references import oracles

COVARIANCES = {'kronecker': kronecker_covariance, 'kl': kl_covariance}
STACKED = MatrixAxes(-2, -1)


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(transform, gradients):
  """Returns the updates of all steps and the last state."""
  state, updates = jax.lax.scan(lambda s, g: transform.update(g, s)[::-1], transform.init(gradients[0]), gradients)
  return updates, state


@pytest.mark.parametrize('shape', [(4, 12), (12, 4), (12, 12), (12, 8)])
@pytest.mark.parametrize('covariance', COVARIANCES)
def test_soap_with_blocks_is_soap_with_the_rest_of_the_factors_zero(covariance, shape):
  gradients = normal(8, *shape)
  updates, _ = run(emopt_jax.scale_by_soap(COVARIANCES[covariance](0.95, block_size=6)), gradients)
  # A side of 8 has blocks of 4: the fewest equal ones of at most 6.
  right_block_size = 4 if shape[1] == 8 else 6
  expected = oracles.soap(gradients, kl=covariance == 'kl', block_size=6, right_block_size=right_block_size)
  # Float32 QR over eight steps, of Adam's normalised update.
  chex.assert_trees_all_close(updates, expected, atol=2e-4)


def test_state_holds_the_blocks_only():
  state = kronecker_covariance(block_size=512).init({'kernel': jax.ShapeDtypeStruct((512, 2048), jnp.float32)})
  left, right = state.factors['kernel']
  assert left.shape == (1, 512, 512) and right.shape == (1, 4, 512, 512)


@pytest.mark.parametrize(
  ('size', 'block_size', 'expected'),
  [(512, 512, None), (512, None, None), (1536, 512, 3), (1000, 300, 4), (1100, 512, 4), (7, 3, 7)],
)
def test_number_of_blocks(size, block_size, expected):
  assert number_of_blocks(size, block_size) == expected


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_batch_equals_separate(covariance):
  gradients = normal(6, 3, 4, 8)
  make = COVARIANCES[covariance]
  transform = functools.partial(emopt_jax.scale_by_soap, axes=STACKED)
  stacked, _ = run(transform(make(0.9, block_size=4, axes=STACKED)), gradients)
  for i in range(3):
    alone, _ = run(emopt_jax.scale_by_soap(make(0.9, block_size=4)), gradients[:, i])
    # Batched and single QR round differently.
    chex.assert_trees_all_close(stacked[:, i], alone, atol=1e-4)


@pytest.mark.parametrize('covariance', COVARIANCES)
def test_a_gradient_that_is_not_finite_changes_no_block_of_its_matrix_and_no_other(covariance):
  transform = emopt_jax.scale_by_soap(COVARIANCES[covariance](0.9, block_size=2, axes=STACKED), axes=STACKED)
  gradients = normal(4, 3, 4, 2)
  _, before = run(transform, gradients[:3])
  bad = gradients[3].copy()
  bad[1, 0, 0] = np.nan
  updates, after = jax.jit(transform.update)(bad, before)
  good_updates, good = jax.jit(transform.update)(gradients[3], before)
  assert not np.any(np.asarray(updates[1]))
  for leaf, old, other in zip(*map(jax.tree.leaves, (after, before, good)), strict=True):
    if np.ndim(leaf) > 1:
      np.testing.assert_array_equal(leaf[1], old[1])
      np.testing.assert_array_equal(leaf[::2], other[::2])
  np.testing.assert_array_equal(updates[::2], good_updates[::2])


def test_shampoo_with_blocks():
  gradients = normal(1, 3, 6)
  updates, state = run(kronecker_precondition(kronecker_covariance(0.9, block_size=3), exponent=-1 / 4), gradients)
  left, right = (np.asarray(factor[0], np.float64) for factor in state.covariance.factors['params'])
  gradient = gradients[0].astype(np.float64)
  left_power, right_power = (
    jax.scipy.linalg.block_diag(*(oracles.power(block, -1 / 4) for block in side)) for side in (left[None], right)
  )
  expected = left_power @ gradient @ right_power
  chex.assert_trees_all_close(updates[0], expected, atol=1e-4)  # float32 eigh


def test_blocks_survive_a_mesh_and_a_checkpoint():
  from emopt_jax import distributed

  params = {f'layer_{i}': normal(4, 8, seed=i) for i in range(3)}
  inner = optax.chain(emopt_jax.scale_by_soap(kl_covariance(0.9, block_size=4)), optax.scale_by_learning_rate(0.1))
  plan = distributed.plan_layerwise(params, jax.make_mesh((2,), ('data',), devices=jax.devices()[:2]), 'data')
  optimizer = distributed.layerwise(inner, plan)
  state, plain = jax.jit(optimizer.init)(params), inner.init(params)
  for _ in range(3):
    updates, state = jax.jit(optimizer.update)(params, state, params)
    expected, plain = jax.jit(inner.update)(params, plain, params)
  logical = distributed.logical_state(state, plan, jax.eval_shape(inner.init, params))
  # Batched and single QR round differently.
  chex.assert_trees_all_close((updates, logical), (expected, plain), atol=1e-4)
