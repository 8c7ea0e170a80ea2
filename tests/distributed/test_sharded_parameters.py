"""Parameters of Flax and of GSPMD, experts that stay where they are, and more ranks than matrices."""

import functools
import json
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed
from tests.distributed import hlo, problems
from tests.environment import with_devices


@pytest.mark.parametrize('kind', ['Auto', 'Explicit'])
def test_sharded_matrices_in_jit_take_as_many_collectives_for_12_as_for_4(kind):
  counts = []
  for number in (4, 12):
    specs = {f'{name}_{i}': spec for i in range(number) for name, spec in SPECS.items()}
    params = {name: np.random.default_rng(0).standard_normal((64, 128), np.float32) for name in specs}
    mesh = problems.mesh_of((4, 2), ('x', 'y'), kind)
    plan = distributed.plan_layerwise(params, mesh, 'x', specs=specs)
    optimizer = distributed.layerwise(emopt_jax.muon(0.1), plan)
    placed = jax.tree.map(lambda p, spec, mesh=mesh: jax.device_put(p, NamedSharding(mesh, spec)), params, specs)
    state = jax.jit(optimizer.init)(placed)
    shardings = distributed.state_shardings(placed, plan), distributed.state_shardings(state, plan)
    compiled = jax.jit(optimizer.update, out_shardings=shardings).lower(placed, state, placed).compile()
    updates = compiled(placed, state, placed)[0]
    expected, _ = emopt_jax.muon(0.1).update(params, emopt_jax.muon(0.1).init(params), params)
    problems.assert_close(jax.tree.map(np.asarray, updates), jax.tree.map(np.asarray, expected), 1e-5)
    counts.append(hlo.count(compiled))
  assert counts[0] == counts[1]
  assert sum(counts[0].values()) <= 3 * 3 * 2  # three placements; gradients, parameters and updates; two mesh axes


SPECS = {'rows': P('x', None), 'columns': P(None, 'y'), 'both': P('x', 'y')}


@pytest.mark.parametrize('entry', ['A', 'B'])
def test_experts_stay_where_they_are_and_an_idle_one_stands_still(entry):
  """Experts sharded over the data axis: nothing is sent; one of them gets no token for 50 steps."""
  params = {'experts': {'kernel': np.random.default_rng(0).standard_normal((16, 8, 16), np.float32)}}
  mesh, specs = problems.mesh_of((8,), ('data',)), {'experts': {'kernel': P('data')}}
  axes, inner = emopt_jax.MatrixAxes(-2, -1), functools.partial(emopt_jax.muon, 0.01, weight_decay=0.0)
  plan = distributed.plan_layerwise(params, mesh, 'data', specs=specs, axes=axes)
  assert distributed.traffic_inside_shard_map(plan) == distributed.Traffic()
  optimizer = distributed.layerwise(inner(), plan)

  placed = jax.device_put(params, NamedSharding(mesh, P('data')))
  state = jax.jit(optimizer.init)(placed)
  update = optimizer.update
  if entry == 'A':
    state_specs = distributed.state_specs(state, plan)
    update = jax.shard_map(update, mesh=mesh, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs))
  compiled = jax.jit(update).lower(placed, state, placed).compile()
  assert hlo.count(compiled) == {}

  def gradients(step: int, idle: bool):
    values = np.random.default_rng(step).standard_normal((16, 8, 16), np.float32)
    values[5] *= not idle
    return jax.device_put({'experts': {'kernel': values}}, NamedSharding(mesh, P('data')))

  updates, state = compiled(gradients(0, idle=False), state, placed)
  assert np.any(np.asarray(updates['experts']['kernel'][5]))
  before = jax.tree.map(np.asarray, state)
  for step in range(1, 51):
    updates, state = compiled(gradients(step, idle=True), state, placed)
    assert not np.any(np.asarray(updates['experts']['kernel'][5]))
    assert np.all(np.any(np.asarray(updates['experts']['kernel'])[np.arange(16) != 5], axis=(1, 2)))
  mu = [s.classes['8x16'][0].mu['matrix']['0'][5] for s in (before, state)]
  np.testing.assert_array_equal(*mu)


def test_experts_over_their_own_axis_are_dealt_within_it():
  params = {'experts': {'kernel': np.random.default_rng(0).standard_normal((4, 8, 16), np.float32)}}
  mesh = problems.mesh_of((4, 2), ('data', 'expert'))
  axes, spec = emopt_jax.MatrixAxes(-2, -1), P('expert')
  plan = distributed.plan_layerwise(params, mesh, 'data', specs=spec, axes=axes)
  optimizer, plain = distributed.layerwise(emopt_jax.soap(0.1), plan), emopt_jax.soap(0.1, axes=axes)
  placed = jax.device_put(params, NamedSharding(mesh, spec))
  state, plain_state = jax.jit(optimizer.init)(placed), plain.init(params)
  for step in range(3):
    gradients = problems.mean(problems.local_gradients(params, step, 4))
    updates, state = jax.jit(optimizer.update)(jax.device_put(gradients, NamedSharding(mesh, spec)), state, placed)
    expected, plain_state = jax.jit(plain.update)(gradients, plain_state, params)
  logical = distributed.logical_state(state, plan, jax.eval_shape(plain.init, params))
  problems.assert_close(*(jax.tree.map(np.asarray, x) for x in ((updates, logical), (expected, plain_state))), 1e-5)


def test_nnx_parameters_with_shardings_of_their_own():
  mesh = problems.mesh_of((4, 2), ('data', 'model'))

  class Model(nnx.Module):
    def __init__(self, rngs, sharded=True):
      column = nnx.initializers.lecun_normal()
      column = nnx.with_partitioning(column, (None, 'model')) if sharded else column
      self.up = nnx.Linear(8, 16, kernel_init=column, rngs=rngs)
      self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
      return self.down(jnp.tanh(self.up(x)))

  with jax.set_mesh(mesh):
    model = Model(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    plan = distributed.plan_layerwise(state, mesh, 'data', specs=nnx.get_partition_spec(state))
    assert plan.leaves['up/kernel'].spec == P(None, 'model')
    optimizer = nnx.Optimizer(
      model, distributed.layerwise(emopt_jax.soap(0.1), plan, others=optax.adamw(0.1)), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, optimizer, x):
      loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(jnp.square(model(x) - x)))(model)
      optimizer.update(model, gradients)
      return loss

    x = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    losses = [float(step(model, optimizer, x)) for _ in range(3)]
  plain = Model(nnx.Rngs(0), sharded=False)
  reference = nnx.Optimizer(plain, emopt_jax.route(emopt_jax.soap(0.1), optax.adamw(0.1)), wrt=nnx.Param)
  np.testing.assert_allclose(losses, [float(step(plain, reference, x)) for _ in range(3)], rtol=1e-5)


@pytest.mark.parametrize('box', [nn.with_partitioning, nn.with_logical_partitioning])
def test_linen_boxes(box):
  mesh = problems.mesh_of((4, 2), ('data', 'model'))
  model = nn.Dense(16, use_bias=False, kernel_init=box(nn.initializers.lecun_normal(), (None, 'model')))
  x = np.random.default_rng(0).standard_normal((16, 8), np.float32)
  params = model.init(jax.random.key(0), x)['params']
  specs = nn.get_partition_spec(params)
  plan = distributed.plan_layerwise(params, mesh, 'data', specs=specs)
  assert plan.leaves['kernel'].spec == P(None, 'model')
  optimizer, plain = distributed.layerwise(emopt_jax.muon(0.1), plan), emopt_jax.muon(0.1)
  gradients = jax.grad(lambda params: jnp.mean(jnp.square(model.apply({'params': nn.unbox(params)}, x))))(params)
  state = optimizer.init(params)
  assert distributed.state_specs(state, plan).classes['8x16'][0].mu['matrix']['0'] == P(('data', 'model'))
  plain_state = plain.init(params)
  for _ in range(2):
    updates, state = jax.jit(optimizer.update)(gradients, state, params)
    expected, plain_state = plain.update(gradients, plain_state, params)
  problems.assert_close(*(jax.tree.map(np.asarray, x) for x in (updates, expected)), 1e-5)


MANY_RANKS = """
import json, jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import emopt_jax
from emopt_jax import distributed

params = {f'layer_{i}': jax.ShapeDtypeStruct((64, 128), 'float32') for i in range(24)}
found = {}
for ranks in (8, 512):
  mesh = Mesh(np.array(jax.devices()[:ranks]).reshape(-1, 8), ('replica', 'owner'))
  plan = distributed.plan_layerwise(params, mesh, 'owner', replicas='replica', is_matrix=lambda path, leaf: True)
  optimizer = distributed.layerwise(emopt_jax.muon(0.1), plan)
  state = jax.eval_shape(optimizer.init, params)
  specs = distributed.state_specs(state, plan)

  def step(gradients, state, params):
    gradients = jax.tree.map(lambda g: jax.lax.pcast(g, ('replica', 'owner'), to='varying'), gradients)
    return optimizer.update(gradients, state, params)

  step = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
  memory = jax.jit(step).lower(params, state, params).compile().memory_analysis()
  state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) // 8
  found[ranks] = [memory.temp_size_in_bytes, state_bytes]
print(json.dumps(found))
"""


def test_memory_does_not_grow_with_the_number_of_ranks():
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, '-c', MANY_RANKS], env=with_devices(512), cwd=root, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  (few, few_state), (many, many_state) = json.loads(done.stdout).values()
  assert many <= 2 * few
  assert many_state == few_state == 3 * (64 * 128 + 1) * 4
