"""Fault 6: a fused kernel that is sharded gives the update of its three matrices, whatever the sharding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from emopt_jax import MatrixAxes, muon, soap

AXES = MatrixAxes(0, 1, split=(1, (64, 64, 64)))


@pytest.mark.skipif(jax.device_count() < 4, reason='needs the four virtual devices that conftest.py asks for')
@pytest.mark.parametrize('make', [muon, soap])
def test_sharded_on_outputs_or_inputs(make):
  kernel = np.random.default_rng(0).standard_normal((64, 192)).astype(np.float32)
  fused, single = make(1.0, weight_decay=0.0, axes=AXES), make(1.0, weight_decay=0.0)
  parts = {str(i): part for i, part in enumerate(np.split(kernel, 3, axis=1))}
  separate, _ = jax.jit(single.update)(parts, single.init(parts), parts)
  expected = np.concatenate([np.asarray(part) for part in separate.values()], axis=1)
  mesh = jax.make_mesh((4,), ('x',), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
  for spec in (PartitionSpec(), PartitionSpec(None, 'x'), PartitionSpec('x', None)):
    sharded = jax.device_put(jnp.asarray(kernel), NamedSharding(mesh, spec))
    updates, _ = jax.jit(fused.update)(sharded, fused.init(sharded), sharded)
    # Sums over shards in another order. Adam's first step is a sign in the eigenbasis: a flip would show as 2.
    chex.assert_trees_all_close(np.asarray(updates), expected, atol=1e-3)
