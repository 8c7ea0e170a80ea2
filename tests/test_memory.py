"""What the state takes: the bytes that each recipe keeps per parameter, a first moment in bfloat16, donation."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import emopt_jax

PARAMETERS = {'up': jnp.zeros((16, 64)), 'down': jnp.zeros((64, 16))}
SIZE = 2 * 16 * 64
SOAP_BYTES = 2 * 4 + 2 * 4 * (16**2 + 64**2 + 0.0) / (16 * 64)  # two moments; a factor and a basis for each side


def nbytes(tree):
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
  'optimizer, bytes_per_parameter',
  [
    (emopt_jax.muon(0.1), 4),
    (emopt_jax.muon(0.1, mu_dtype=jnp.bfloat16), 2),
    (emopt_jax.kl_soap(0.1), SOAP_BYTES),
    (emopt_jax.scale_by_soap(mu_dtype=jnp.bfloat16), SOAP_BYTES - 2),
    (emopt_jax.scale_by_soap(emopt_jax.kl_covariance(max_dim=16)), 8 + 8 * 16**2 / (16 * 64)),
    (emopt_jax.scale_by_soap(emopt_jax.kl_covariance(block_size=16)), 8 + 8 * (16**2 + 4 * 16**2) / (16 * 64)),
    (emopt_jax.shampoo(0.1), 4 + 4 * (16**2 + 64**2) / (16 * 64)),
  ],
  ids=['muon', 'muon bfloat16', 'kl_soap', 'soap bfloat16', 'one-sided', 'blocks', 'shampoo'],
)
def test_state_is_moments_factors_and_bases_and_no_more(optimizer, bytes_per_parameter):
  state = jax.eval_shape(optimizer.init, PARAMETERS)
  # Beside them eigenvalues and counters, of one number a row, a column or a matrix.
  small = 4 * 2 * (16 + 64 + 4) + 16
  assert 0 <= nbytes(state) - SIZE * bytes_per_parameter <= small


@pytest.mark.parametrize('make', [emopt_jax.muon, emopt_jax.kl_soap, emopt_jax.shampoo], ids=lambda make: make.__name__)
def test_donated_state_is_overwritten(make):
  optimizer = make(0.1)
  state = jax.eval_shape(optimizer.init, PARAMETERS)
  program = jax.jit(optimizer.update, donate_argnums=1).lower(PARAMETERS, state, PARAMETERS).compile()
  assert program.memory_analysis().alias_size_in_bytes >= nbytes(state)


@pytest.mark.parametrize(
  'make',
  [
    lambda mu_dtype: emopt_jax.muon(1.0, weight_decay=0.0, mu_dtype=mu_dtype),
    lambda mu_dtype: emopt_jax.scale_by_soap(emopt_jax.kl_covariance(), mu_dtype=mu_dtype),
  ],
  ids=['muon', 'kl_soap'],
)
def test_first_moment_in_bfloat16(make):
  random = np.random.default_rng(0)
  gradients = [{'kernel': jnp.asarray(random.standard_normal((8, 12)), jnp.float32)} for _ in range(10)]
  results = {}
  for dtype in (jnp.float32, jnp.bfloat16):
    optimizer = make(dtype)
    update = jax.jit(optimizer.update)
    state = optimizer.init(gradients[0])
    for gradient in gradients:
      before, (updates, state) = state, update(gradient, state, gradient)
      chex.assert_trees_all_equal_shapes_and_dtypes(before, state)
    assert any(leaf.dtype == dtype and leaf.shape == (8, 12) for leaf in jax.tree.leaves(state))
    results[dtype] = updates['kernel']
  difference = jnp.linalg.norm(results[jnp.bfloat16] - results[jnp.float32]) / jnp.linalg.norm(results[jnp.float32])
  # Ten roundings to 2^-9 of each entry, which add up like noise, and a polar factor that is less sensitive than that.
  assert 0 < difference < 0.02
