"""Factorizations of stacks: right, and never a batch in one call of LAPACK, whose batches can wait for each other."""

import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import emopt_jax
from emopt_jax.linalg.factorizations import cholesky, eigh, qr, svd

KEY = jax.random.key(0)
SHAPES = [(3, 3), (1, 5, 5), (7, 4, 4), (2, 3, 6, 4), (3, 4, 6)]


@pytest.mark.parametrize('shape', SHAPES)
def test_stack_is_factorized_matrix_by_matrix(shape):
  x = jax.random.normal(KEY, shape)
  q, r = jax.jit(qr)(x)
  # LAPACK too, in float64; 1e-4 is a hundred roundings of float32.
  chex.assert_trees_all_close((q, r), tuple(np.linalg.qr(np.asarray(x, np.float64))), atol=1e-4)
  u, s, vt = jax.jit(svd)(x)
  np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False), atol=1e-4)
  np.testing.assert_allclose(u * s[..., None, :] @ vt, x, atol=1e-4)


@pytest.mark.parametrize('shape', [shape for shape in SHAPES if shape[-1] == shape[-2]])
def test_symmetric_stack(shape):
  x = jax.random.normal(KEY, shape)
  gram = x @ x.swapaxes(-1, -2) + jnp.eye(shape[-1])
  values, vectors = eigh(gram)
  np.testing.assert_allclose(vectors * values[..., None, :] @ vectors.swapaxes(-1, -2), gram, atol=1e-4)
  lower = cholesky(gram)
  np.testing.assert_allclose(lower @ lower.swapaxes(-1, -2), gram, atol=1e-4)


def test_vmap_is_a_batch():
  x = jax.random.normal(KEY, (3, 2, 5, 4))
  chex.assert_trees_all_equal(jax.vmap(qr)(x), qr(x))


@pytest.mark.parametrize(
  'optimizer',
  [
    emopt_jax.kl_soap(0.01, axes=emopt_jax.MatrixAxes(-2, -1)),
    emopt_jax.shampoo(0.01, axes=emopt_jax.MatrixAxes(-2, -1)),
    emopt_jax.mop(0.01, axes=emopt_jax.MatrixAxes(-2, -1)),
    emopt_jax.scale_by_soap(
      emopt_jax.kl_covariance(block_size=4, axes=emopt_jax.MatrixAxes(-2, -1)), axes=emopt_jax.MatrixAxes(-2, -1)
    ),
  ],
  ids=['kl_soap', 'shampoo', 'mop', 'blocks'],
)
def test_programs_for_cpus_hold_no_batched_factorization(optimizer):
  parameters = {'layers': jnp.ones((3, 4, 8)), 'experts': jnp.ones((5, 4, 8))}
  state = optimizer.init(parameters)
  program = jax.jit(optimizer.update).lower(parameters, state, parameters).as_text(dialect='hlo')
  calls = re.findall(r'= \(?\w+\[([\d,]*)\].*custom_call_target="lapack_', program)
  assert calls
  assert all(shape.count(',') <= 1 or re.match(r'(1,)*\d+,\d+$', shape) for shape in calls), calls


def test_many_batches_at_once_do_not_wait_for_each_other():
  # XLA's own Cholesky factorization of this hangs on two cores. A process of its own, that a hang can be ended.
  program = """
import jax, jax.numpy as jnp
from emopt_jax.linalg.factorizations import cholesky
stacks = [jnp.broadcast_to((i + 1) * jnp.eye(512), (4, 512, 512)) for i in range(8)]
print([float(x[0, 0, 0]) ** 2 for x in jax.jit(lambda stacks: [cholesky(x) for x in stacks])(stacks)])
"""
  result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=300, check=True)
  np.testing.assert_allclose(eval(result.stdout), np.arange(1, 9), rtol=1e-6)
