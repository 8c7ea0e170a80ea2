"""State on one mesh, in a checkpoint, on another mesh and on none."""

import functools

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed
from tests.distributed import problems

INNER = problems.INNERS['kl_soap']
RANKS = 8


class Run:
  """A run on some devices: its plan, its optimizer and one jitted step of whole gradients."""

  def __init__(self, problem: problems.Problem, inner=INNER):
    self.problem = problem
    self.plan = distributed.plan_layerwise(problem.params, problem.mesh, 'data', specs=problem.specs, axes=problem.axes)
    self.optimizer = problems.distributed_optimizer(inner, self.plan)
    self.plain = problems.undistributed(inner, problem.axes)
    self.abstract = jax.eval_shape(self.optimizer.init, problem.params)
    self.like = jax.eval_shape(self.plain.init, problem.params)
    self.update = jax.jit(self.optimizer.update)

  def start(self):
    params = problems.place(self.problem, self.problem.params)
    shardings = distributed.state_shardings(self.abstract, self.plan)
    return params, jax.jit(self.optimizer.init, out_shardings=shardings)(params)

  def step(self, params, state, number: int):
    gradients = problems.mean(problems.local_gradients(self.problem.params, number, RANKS))
    updates, state = self.update(problems.place(self.problem, gradients), state, params)
    return optax.apply_updates(params, updates), state

  def checkpoint(self, params, state):
    return {'params': params, 'opt_state': distributed.logical_state(state, self.plan, self.like)}

  def target(self):
    """What Orbax restores into."""
    shardings = {
      'params': distributed.state_shardings(self.problem.params, self.plan),
      'opt_state': distributed.logical_shardings(self.like, self.plan),
    }
    shapes = {'params': jax.eval_shape(lambda: self.problem.params), 'opt_state': self.like}
    return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )

  def resume(self, checkpoint):
    state = distributed.physical_state(checkpoint['opt_state'], self.plan, self.abstract)
    return checkpoint['params'], state


def on_devices(number: int, layout=None) -> problems.Problem:
  if layout is not None:
    return problems.problem('5', layout)
  return problems.problem('5')._replace(mesh=problems.mesh_of((number,), ('data',)))


@functools.cache
def saved(folder):
  """Saves after 7 steps on 8 devices; returns the parameters after each of the next 3."""
  run = Run(on_devices(8))
  params, state = run.start()
  for number in range(7):
    params, state = run.step(params, state, number)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / 'step_7', run.checkpoint(params, state))
  later = []
  for number in range(7, 10):
    params, state = run.step(params, state, number)
    later.append(jax.tree.map(np.asarray, params))
  return later


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('checkpoints')


@pytest.mark.parametrize(
  'problem',
  [on_devices(8), on_devices(4), on_devices(5), on_devices(1), on_devices(8, 'FSDP x tensor parallel')],
  ids=['8', '4', '5', '1', 'FSDP x tensor parallel'],
)
def test_saved_on_8_goes_on_elsewhere(problem, folder):
  later, run = saved(folder), Run(problem)
  with ocp.StandardCheckpointer() as checkpointer:
    params, state = run.resume(checkpointer.restore(folder / 'step_7', run.target()))
  assert jax.tree.structure(state) == jax.tree.structure(run.abstract)
  for number, expected in zip(range(7, 10), later, strict=True):
    params, state = run.step(params, state, number)
    if problem.mesh.shape == {'data': 8}:
      jax.tree.map(np.testing.assert_array_equal, params, expected)  # nothing is lost
    else:
      problems.assert_close(jax.tree.map(np.asarray, params), expected, 1e-6)


def test_saved_on_8_goes_on_without_a_mesh(folder):
  later, run = saved(folder), Run(on_devices(8))
  with ocp.StandardCheckpointer() as checkpointer:
    restored = jax.tree.map(np.asarray, checkpointer.restore(folder / 'step_7', run.target()))
  params, state = restored['params'], restored['opt_state']
  assert jax.tree.structure(state) == jax.tree.structure(run.like)  # tuples are tuples, masked nodes are there
  update = jax.jit(run.plain.update)
  for number, expected in zip(range(7, 10), later, strict=True):
    gradients = problems.mean(problems.local_gradients(params, number, RANKS))
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    problems.assert_close(jax.tree.map(np.asarray, params), expected, 1e-6)


def test_from_no_mesh_to_8():
  run = Run(on_devices(8))
  params, state = run.problem.params, run.plain.init(run.problem.params)
  update = jax.jit(run.plain.update)
  for number in range(3):
    updates, state = update(problems.mean(problems.local_gradients(params, number, RANKS)), state, params)
    params = optax.apply_updates(params, updates)
  physical = distributed.physical_state(state, run.plan, run.abstract)
  after, _ = run.step(problems.place(run.problem, params), physical, 3)
  updates, _ = update(problems.mean(problems.local_gradients(params, 3, RANKS)), state, params)
  problems.assert_close(*(jax.tree.map(np.asarray, x) for x in (after, optax.apply_updates(params, updates))), 1e-6)


@pytest.mark.parametrize(
  ('inner', 'kind', 'layout'),
  [('soap', 'Auto', 'replicated'), ('soap', 'Auto', 'FSDP x tensor parallel')]
  + [('muon', 'Explicit', layout) for layout in problems.LAYOUTS],
)
def test_there_and_back_is_the_identity(inner, layout, kind):
  run = Run(problems.problem('48 in 4 classes', layout, kind), problems.INNERS[inner])
  _, state = run.start()
  # Different numbers everywhere, so that no two matrices can be confused; padding has none.
  numbers = jax.tree.map(lambda leaf: np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), state)
  logical = distributed.logical_state(numbers, run.plan, run.like)
  physical = distributed.physical_state(logical, run.plan, run.abstract)
  again = distributed.logical_state(physical, run.plan, run.like)
  jax.tree.map(np.testing.assert_array_equal, again, logical)
  for leaf, sharding in zip(
    jax.tree.leaves(physical), jax.tree.leaves(distributed.state_shardings(physical, run.plan)), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_split_leaves_keep_their_blocks_apart():
  """Split before they travel, or whole where the split axis is sharded: one logical state."""
  params = {'qkv': np.random.default_rng(0).standard_normal((8, 24), np.float32)}
  axes = emopt_jax.MatrixAxes(0, 1, split=(1, (8, 8, 8)))
  mesh = problems.mesh_of((4,), ('data',))
  inner = functools.partial(emopt_jax.soap, 0.02)
  plain = inner(axes=axes)
  update, like = jax.jit(plain.update), jax.eval_shape(plain.init, params)
  expected_params, expected_state = params, plain.init(params)
  for number in range(3):
    gradients = problems.mean(problems.local_gradients(params, number, 4))
    updates, expected_state = update(gradients, expected_state, expected_params)
    expected_params = jax.tree.map(np.asarray, optax.apply_updates(expected_params, updates))
  for spec in (P(), P('data'), P(None, 'data')):
    plan = distributed.plan_layerwise(params, mesh, 'data', specs=spec, axes=axes)
    optimizer = distributed.layerwise(inner(), plan)
    actual = {'qkv': jax.device_put(params['qkv'], NamedSharding(mesh, spec))}
    state = jax.jit(optimizer.init)(actual)
    for number in range(3):
      gradients = problems.mean(problems.local_gradients(params, number, 4))
      updates, state = jax.jit(optimizer.update)(gradients, state, actual)
      actual = optax.apply_updates(actual, updates)
    logical = distributed.logical_state(state, plan, like)
    problems.assert_close(
      *(jax.tree.map(np.asarray, x) for x in ((actual, logical), (expected_params, expected_state)))
    )


def test_logical_state_is_on_no_device_whole():
  problem = problems.problem('48 in 4 classes')
  run = Run(problem)
  _, state = run.start()
  logical = distributed.logical_state(state, run.plan, run.like)
  matrices = logical[1].inner_states['matrix']
  whole = sum(leaf.nbytes for leaf in jax.tree.leaves(matrices))
  on_first = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(matrices))
  assert on_first <= 1.10 * whole / 8


def test_another_tree_is_an_error():
  run = Run(on_devices(8))
  state = run.plain.init(run.problem.params)
  renamed = {('other_' + name if name == '8x16_2' else name): leaf for name, leaf in run.problem.params.items()}
  with pytest.raises(ValueError, match=r"leaf '.*8x16_2/kernel'.*the plan, the parameters and the optimizer"):
    distributed.physical_state(run.plain.init(renamed), run.plan, run.abstract)
  larger = jax.tree.map(
    lambda p: np.zeros((24, *p.shape[1:]), p.dtype) if p.shape == (8, 16) else p, run.problem.params
  )
  with pytest.raises(ValueError, match=r"leaf '.*8x16_0/kernel.*'.*(24, 16|does not fit)"):
    distributed.physical_state(run.plain.init(larger), run.plan, run.abstract)
  other = emopt_jax.route(emopt_jax.muon(0.02), optax.adamw(0.01)).init(run.problem.params)
  with pytest.raises(ValueError, match=r'is not in the'):
    distributed.physical_state(other, run.plan, run.abstract)
  del state
