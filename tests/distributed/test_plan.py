"""Who owns what, how even that is, and what the table says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed
from emopt_jax.distributed.dealing import deal, lower_bound


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def gpt2_small():
  sizes = {'qkv': (768, 2304), 'proj': (768, 768), 'up': (768, 3072), 'down': (3072, 768)}
  return {f'block_{i}': {name: {'kernel': array(*shape)} for name, shape in sizes.items()} for i in range(12)}


def llama(layers: int = 32):
  sizes = {'q_proj': (4096, 4096), 'k_proj': (4096, 1024), 'v_proj': (4096, 1024), 'o_proj': (4096, 4096)}
  sizes |= {'gate_proj': (4096, 14336), 'up_proj': (4096, 14336), 'down_proj': (14336, 4096)}
  return {name: {'kernel': array(layers, *shape)} for name, shape in sizes.items()}


def imbalance(plan) -> float:
  return float(plan.loads.max() / plan.loads.mean())


def test_gpt2_small_on_8_is_even_in_work_and_in_bytes():
  plan = distributed.plan_layerwise(gpt2_small(), AbstractMesh((8,), ('data',)), 'data')
  assert imbalance(plan) <= 1.06
  assert len(plan.bundles) <= 4
  numbers = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(gpt2_small()))
  assert 8 * sum(bundle.length for bundle in plan.bundles) <= 1.05 * numbers


def matrix_product_cost(rows: int, columns: int) -> float:
  return float(min(rows, columns) ** 2 * max(rows, columns))


@pytest.mark.parametrize('cost', [distributed.newton_schulz_cost, matrix_product_cost], ids=lambda cost: cost.__name__)
def test_llama_on_64_is_as_even_as_whole_matrices_allow(cost):
  axes = emopt_jax.MatrixAxes(-2, -1)
  plan = distributed.plan_layerwise(llama(), AbstractMesh((64,), ('data',)), 'data', axes=axes, cost=cost)
  assert imbalance(plan) <= 1.12
  bound = lower_bound([sum(one.counts) for one in plan.classes], [one.cost for one in plan.classes], 64)
  assert plan.loads.max() == pytest.approx(bound, rel=1e-6)
  assert f'max/mean {imbalance(plan):.3f}; whole matrices allow {imbalance(plan):.3f}' in str(plan)


def test_every_matrix_has_one_owner():
  plan = distributed.plan_layerwise(gpt2_small(), AbstractMesh((5,), ('data',)), 'data')
  assert {one.name: sum(one.counts) for one in plan.classes} == dict.fromkeys(
    ('768x3072', '3072x768', '768x2304', '768x768'), 12
  )
  members = [member for one in plan.classes for member in one.members]
  assert len(members) == len(set(members)) == 48


def test_state_bytes_where_n_divides_well():
  params = {f'layer_{i}': {'kernel': array(64, 128)} for i in range(16)}
  mesh = AbstractMesh((8,), ('data',))
  plan = distributed.plan_layerwise(params, mesh, 'data', inner=emopt_jax.kl_soap(0.1), cost=distributed.soap_cost)
  owned, whole = plan.state_bytes
  assert whole / 8 <= owned <= 1.10 * whole / 8
  assert '1.00 / N' in str(plan)


@pytest.mark.parametrize('seed', range(20))
def test_no_dealing_is_below_the_bound(seed):
  rng = np.random.default_rng(seed)
  units, ranks = [int(n) for n in rng.integers(1, 9, 4)], int(rng.integers(1, 9))
  costs = sorted((float(cost) for cost in rng.integers(1, 50, 4)), reverse=True)
  counts, groups = deal(units, costs, [int(cost) for cost in costs], [0.0] * ranks)
  loads = sum(np.array(its) * cost for its, cost in zip(counts, costs, strict=True))
  assert [sum(its) for its in counts] == units
  assert sorted(index for group in groups for index in group) == list(range(4))
  bound = lower_bound(units, costs, ranks)
  assert bound <= loads.max() * (1 + 1e-9)
  assert loads.max() <= 4 / 3 * bound + max(costs) / 3  # dearest first is within 4/3 of the best (Graham 1969)


def test_table_says_who_owns_what_and_what_is_sent():
  params = {f'layer_{i}': {'kernel': array(64, 128)} for i in range(3)} | {'bias': array(128)}
  plan = distributed.plan_layerwise(params, AbstractMesh((2,), ('data',)), 'data', inner=emopt_jax.muon(0.1))
  assert str(plan).splitlines() == [
    'mesh data=2',
    'class   dtype    dealt over  bundle  matrices  per rank  share of load',
    '------  -------  ----------  ------  --------  --------  -------------',
    '64x128  float32  data=2           0         3    1 to 2           100%',
    'load: max/mean 1.333; whole matrices allow 1.333',
    'state: 65,544 bytes a device, of 98,316 in all (1.33 / N)',
    'bytes sent a device and step, inside shard_map: 131,584 '
    '(reduce-scatter 65,536, all-gather 65,536, all-reduce 512)',
    'bytes sent a device and step, plain jit: 164,352 (all-gather 65,536, all-reduce 98,816)',
  ]


def test_replicas_repeat_owners_and_sum_gradients():
  params = {f'layer_{i}': {'kernel': array(64, 128)} for i in range(4)}
  mesh = AbstractMesh((16, 4), ('replica', 'owner'))
  plan = distributed.plan_layerwise(params, mesh, 'owner', replicas='replica')
  (bundle,) = plan.bundles
  assert (bundle.owners, bundle.replicas, bundle.classes[0].counts) == (('owner',), ('replica',), (1, 1, 1, 1))
  size = 64 * 128 * 4
  # Reduce-scatter of four matrices over four owners, then an all-reduce of the one that each owns over 16 replicas.
  assert distributed.traffic_inside_shard_map(plan)[:4] == (3 * size, 3 * size, 0, 2 * size * 15 // 16)


def test_sharded_leaves_are_dealt_over_the_axes_that_shard_them():
  params = {'up': array(8, 16), 'down': array(16, 8), 'proj': array(8, 8)}
  specs = {'up': P(None, 'model'), 'down': P(('model', 'data')), 'proj': P()}
  plan = distributed.plan_layerwise(params, AbstractMesh((2, 4), ('data', 'model')), 'data', specs=specs)
  owners = {bundle.classes[0].name: (bundle.owners, bundle.exchanged) for bundle in plan.bundles}
  assert owners == {
    '8x16': (('data', 'model'), ('model',)),
    '16x8': (('data', 'model'), ('data', 'model')),  # the minor axis of a dimension is passed first
    '8x8': (('data',), ()),
  }


def test_specs_default_to_the_parameters_own_shardings():
  mesh = jax.make_mesh((8,), ('data',))
  params = {'kernel': jax.device_put(np.ones((8, 16), np.float32), jax.NamedSharding(mesh, P('data')))}
  plan = distributed.plan_layerwise(params, mesh, 'data')
  assert plan.leaves['kernel'].spec == P('data')


def test_compare_traffic_prints_a_row_for_each_optimizer_and_way():
  def plan(inner, cost):
    return distributed.plan_layerwise(gpt2_small(), AbstractMesh((8,), ('data',)), 'data', inner=inner, cost=cost)

  plans = {
    'adamw': plan(optax.adamw(1e-3), distributed.elementwise_cost),
    'muon': plan(emopt_jax.muon(0.1), distributed.newton_schulz_cost),
    'soap': plan(emopt_jax.soap(0.1), distributed.soap_cost),
    'kl_soap': plan(emopt_jax.kl_soap(0.1), distributed.soap_cost),
  }
  lines = distributed.compare_traffic(plans).splitlines()
  assert len(lines) == 2 + 3 * 4
  rows = {(cells[0], ' '.join(cells[1:-3])): cells[-3:] for cells in (line.split() for line in lines[2:])}
  # 12 layers of 12 * 768^2 numbers of 4 bytes; an all-reduce over 8 sends 7/4 of them.
  sent = 12 * 12 * 768**2 * 4 * 7 / 4 / 2**20
  assert rows['adamw', 'on every rank'][0] == f'{sent:,.1f}'
  assert rows['muon', 'layer-wise'][0] == f'{sent:,.1f}'
  assert rows['kl_soap', 'layer-wise, jit'][0] == f'{1.5 * sent:,.1f}'
