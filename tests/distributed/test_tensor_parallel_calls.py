"""Tensor-parallel Newton-Schulz: the collectives that each way promises, which way is cheapest, and wrong calls."""

import chex
import numpy as np
import pytest

import emopt_jax
from emopt_jax import newton_schulz
from emopt_jax.distributed.tensor_parallel import cheapest, duplicated, gram, per_step
from tests.distributed.hlo import count, in_loops
from tests.distributed.test_tensor_parallel import apply, normal, refined, sharded


def collectives(method, steps, **options):
  """Counts (all-reduces, all-gathers, other collectives) in the compiled program and all-reduces in its loops."""
  run, x = sharded(method, normal((8, 32)), steps=steps, **options)
  compiled = run.lower(x).compile()
  counts = count(compiled)
  reduces, gathers = (counts.pop(kind, 0) for kind in ('all-reduce', 'all-gather'))
  return reduces, gathers, sum(counts.values()), sum(one.kind == 'all-reduce' for one in in_loops(compiled))


def test_collectives():
  for steps, check_vma in ((5, True), (16, True), (5, False)):
    assert collectives(gram, steps, check_vma=check_vma) == (2, 0, 0, 0)
  assert collectives(gram, 5, coefficients=emopt_jax.AOL) == (2, 0, 0, 0)
  assert collectives(refined, 5) == (3, 0, 0, 0)
  assert collectives(duplicated, 5) == (0, 1, 0, 0)
  # The largest magnitude, the first step's Gram matrix, and one in the loop over the other steps.
  assert collectives(per_step, 5) == (3, 0, 0, 1)


def test_cheapest():
  # A Gram matrix much smaller than X; both alike and a small one; a long local product against one of m^3.
  assert cheapest((1024, 65536), 8, steps=8) is gram
  assert cheapest((64, 64), 8, steps=8) is duplicated
  assert cheapest((8192, 8192), 64, steps=8) is per_step
  # The sharded side counts, not the order of the dimensions.
  assert cheapest((65536, 1024), 8, steps=8, dim=-2) is gram
  assert cheapest((65536, 1024), 8, steps=8) is duplicated
  # A slow network against one of slow devices.
  assert cheapest((8192, 16384), 64, steps=8, bandwidth=1e9) is gram
  assert cheapest((2, 4096, 4096), 8, steps=5, rate=1e12) is per_step


@pytest.mark.parametrize(
  'wrong', [{'ranks': 0, 'steps': 5}, {'ranks': 2, 'steps': 0}, {'ranks': 2, 'steps': 5, 'dim': 1}]
)
def test_cheapest_raises(wrong):
  with pytest.raises(ValueError, match=r'^ranks and steps must be at least 1 and dim -1 or -2, got '):
    cheapest((8, 8), **wrong)


@pytest.mark.parametrize('method', [duplicated, gram, per_step])
def test_wrong_calls(method):
  x = normal((8, 32))
  with pytest.raises(ValueError, match=r"^axis 'model' is none of the manual mesh axes .*call inside jax.shard_map"):
    method(x, 'model')
  with pytest.raises(ValueError, match=r"^axis 'data' is none of the manual mesh axes .*'model'"):
    apply(lambda x, axis, dim: method(x, 'data'), x)
  with pytest.raises(ValueError, match=r'^dim must be -1 .* or -2 .*, got 1\b'):
    apply(lambda x, axis, dim: method(x, axis, dim=1), x)
  with pytest.raises(ValueError, match=r'^steps must be at least 1, got 0\b'):
    apply(method, x, steps=0)


def test_row_scales_of_the_sharded_side():
  x = normal((32, 8))
  expected = newton_schulz(x, coefficients=emopt_jax.AOL)
  chex.assert_trees_all_close(apply(duplicated, x, coefficients=emopt_jax.AOL), np.asarray(expected), atol=1e-5)
  for method in (gram, per_step):
    with pytest.raises(ValueError, match=r'use duplicated for shards \(32, 2\) with dim=-1\b'):
      apply(method, x, coefficients=emopt_jax.AOL)


@pytest.mark.parametrize('method', [duplicated, gram, per_step])
def test_what_is_no_real_floating_matrix_raises(method):
  for x, message in (
    (np.ones((8, 32), np.int32), r'^polar factors are of floating matrices, got int32 of shape \(8, 8\)'),
    (np.ones((8, 32), np.complex64), r'^polar factors are of real matrices, got complex64 of shape \(8, 8\)'),
    (np.ones(32, np.float32), r'^polar factors are of matrices .* got shape \(8,\)'),
  ):
    with pytest.raises(ValueError, match=message):
      apply(method, x)
  with pytest.raises(ValueError, match=r'^coefficients take one row'):
    apply(method, normal((8, 32)), coefficients=emopt_jax.Coefficients((), converges=True))
