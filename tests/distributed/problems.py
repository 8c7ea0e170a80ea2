"""Small problems for the distributed tests, and the same steps with and without a mesh."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed

# Per name, how many matrices of each shape. 48 in 4 classes are those of a transformer of 12 layers.
COUNTS = {
  '48 in 4 classes': {(8, 24): 12, (8, 8): 12, (8, 32): 12, (32, 8): 12},
  '13': {(8, 16): 9, (16, 8): 4},
  '3': {(8, 16): 3},
  '1': {(8, 16): 1},
  '5': {(8, 16): 3, (16, 8): 2},
}
LAYOUTS = {
  'replicated': ((8,), ('data',), lambda i: P()),
  'FSDP': ((8,), ('data',), lambda i: P('data') if i % 2 else P(None, 'data')),
  'tensor parallel': ((4, 2), ('data', 'model'), lambda i: P(None, 'model') if i % 2 else P('model')),
  'FSDP x tensor parallel': ((4, 2), ('data', 'model'), lambda i: P('data', 'model') if i % 2 else P('model', 'data')),
}
MAX_NORM = 5.0


class Problem(NamedTuple):
  """Parameters, their specs and a mesh.

  Attributes:
    params: Tree of NumPy arrays.
    specs: Tree of specs.
    mesh: The mesh.
    axes: Axes of the matrices.
  """

  params: Any
  specs: Any
  mesh: Mesh
  axes: Any = None


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: str = 'Auto', start: int = 0) -> Mesh:
  devices = np.array(jax.devices()[start : start + int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, names, axis_types=(getattr(AxisType, kind),) * len(names))


def problem(count: str, layout: str = 'replicated', kind: str = 'Auto') -> Problem:
  """Returns a problem; the 48 matrices are leaves of scanned layers, `[12, m, n]`, the others are leaves each."""
  rng, params, specs = np.random.default_rng(0), {}, {}
  shape, names, spec = LAYOUTS[layout]
  scanned = count == '48 in 4 classes'
  for index, ((m, n), number) in enumerate(COUNTS[count].items()):
    for i in range(1 if scanned else number):
      leaf_shape = (number, m, n) if scanned else (m, n)
      params[f'{m}x{n}_{i}'] = {'kernel': rng.standard_normal(leaf_shape, np.float32)}
      specs[f'{m}x{n}_{i}'] = {'kernel': P(*[None] * scanned, *spec(i + index))}
  params['norm'] = {'scale': rng.standard_normal(8, np.float32)}
  specs['norm'] = {'scale': P()}
  return Problem(params, specs, mesh_of(shape, names, kind), emopt_jax.MatrixAxes(-2, -1) if scanned else None)


def local_gradients(params: Any, step: int, ranks: int) -> Any:
  """Returns the gradients of all ranks, `[ranks, *shape]`."""
  rng = np.random.default_rng(step)
  return jax.tree.map(lambda p: rng.standard_normal((ranks, *p.shape), np.float32), params)


def mean(gradients: Any) -> Any:
  return jax.tree.map(lambda g: g.mean(0), gradients)


def undistributed(inner, axes=None) -> optax.GradientTransformationExtraArgs:
  optimizer = emopt_jax.route(inner(axes=axes), optax.adamw(0.01))
  return optax.chain(optax.clip_by_global_norm(MAX_NORM), optimizer)


def distributed_optimizer(inner, plan) -> optax.GradientTransformationExtraArgs:
  return distributed.layerwise(inner(), plan, others=optax.adamw(0.01), max_norm=MAX_NORM)


def run_undistributed(inner, params, steps: int, ranks: int, axes=None):
  """Returns parameters and state after some steps on one device."""
  optimizer = undistributed(inner, axes)
  update, state = jax.jit(optimizer.update), optimizer.init(params)
  for step in range(steps):
    updates, state = update(mean(local_gradients(params, step, ranks)), state, params)
    params = jax.tree.map(np.asarray, optax.apply_updates(params, updates))
  return params, jax.tree.map(np.asarray, state)


def make_step(entry: str, optimizer, problem: Problem, plan, state, check_vma: bool = True):
  """Returns a jitted step of local gradients `[ranks, *shape]`, state and parameters."""
  mesh, specs = problem.mesh, problem.specs
  replicated = {'data'} if entry == 'C' else ()

  def update(gradients, state, params):
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  if entry == 'B':
    return jax.jit(lambda gradients, state, params: update(mean(gradients), state, params))
  if entry == 'C':

    def step(gradients, state, params):
      marked = jax.tree.map(lambda p: jax.reshard(p, NamedSharding(mesh, P(reduced=replicated))), params)
      loss = lambda p: sum(  # noqa: E731
        jnp.mean(jnp.tensordot(g, leaf, leaf.ndim))
        for g, leaf in zip(jax.tree.leaves(gradients), jax.tree.leaves(p), strict=True)
      )
      return update(jax.grad(loss)(marked), state, params)

    return jax.jit(step)

  def inside(gradients, state, params):
    # A leaf that the data axis shards gets its gradient reduced, as the transpose of its all-gather gives it.
    local = jax.tree.map(lambda g, s: g if 'data' in jax.tree.leaves(tuple(s)) else g[0], gradients, specs)
    return update(local, state, params)

  def gradient_spec(spec):
    return spec if 'data' in jax.tree.leaves(tuple(spec)) else P('data', *spec)

  state_specs = distributed.state_specs(state, plan)
  in_specs = (jax.tree.map(gradient_spec, specs), state_specs, specs)
  mapped = jax.shard_map(inside, mesh=mesh, in_specs=in_specs, out_specs=(specs, state_specs), check_vma=check_vma)

  def step(gradients, state, params):
    gradients = jax.tree.map(lambda g, s: g.mean(0) if 'data' in jax.tree.leaves(tuple(s)) else g, gradients, specs)
    if AxisType.Explicit in mesh.axis_types:
      gradients = jax.tree.map(lambda g, s: jax.reshard(g, NamedSharding(mesh, gradient_spec(s))), gradients, specs)
    return mapped(gradients, state, params)

  return jax.jit(step)


def place(problem: Problem, tree: Any) -> Any:
  return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(problem.mesh, spec)), tree, problem.specs)


def place_gradients(problem: Problem, gradients: Any, entry: str) -> Any:
  def spec_of(spec):
    inner = [None if entry == 'B' or 'data' in jax.tree.leaves(tuple(spec)) else 'data', *spec]
    return P(*inner)

  return jax.tree.map(
    lambda g, spec: jax.device_put(g, NamedSharding(problem.mesh, spec_of(spec))), gradients, problem.specs
  )


def run_distributed(inner, problem: Problem, steps: int, entry: str, check_vma: bool = True):
  """Returns parameters and logical state after some steps on the mesh."""
  plan = distributed.plan_layerwise(problem.params, problem.mesh, 'data', specs=problem.specs, axes=problem.axes)
  optimizer = distributed_optimizer(inner, plan)
  params = place(problem, problem.params)
  state = jax.jit(optimizer.init)(params)
  step = make_step(entry, optimizer, problem, plan, state, check_vma)
  ranks = problem.mesh.shape['data']
  for number in range(steps):
    gradients = place_gradients(problem, local_gradients(problem.params, number, ranks), entry)
    params, state = step(gradients, state, params)
  like = jax.eval_shape(undistributed(inner, problem.axes).init, problem.params)
  return jax.tree.map(np.asarray, (params, distributed.logical_state(state, plan, like)))


def assert_equals_one_device(optimizer, plain, problem: Problem, plan, entry: str, gradients: list, check_vma=True):
  """Runs an optimizer on the mesh and another on one device on the same gradients of all ranks, and compares them."""
  params = place(problem, problem.params)
  state = jax.jit(optimizer.init)(params)
  step = make_step(entry, optimizer, problem, plan, state, check_vma)
  plain_params, plain_state, plain_update = problem.params, plain.init(problem.params), jax.jit(plain.update)
  for local in gradients:
    params, state = step(place_gradients(problem, local, entry), state, params)
    updates, plain_state = plain_update(mean(local), plain_state, plain_params)
    plain_params = jax.tree.map(np.asarray, optax.apply_updates(plain_params, updates))
  logical = distributed.logical_state(state, plan, jax.eval_shape(plain.init, problem.params))
  # A few steps of sums in another order, 1e-7 each, which Newton-Schulz and the rotations magnify a few times.
  assert_close(*jax.tree.map(np.asarray, ((params, logical), (plain_params, plain_state))), 1e-5)


@functools.cache
def reference(optimizer: str, count: str, ranks: int, steps: int):
  """Returns what one device gives."""
  whole = problem(count)
  return run_undistributed(INNERS[optimizer], whole.params, steps, ranks, whole.axes)


INNERS = {
  'muon': functools.partial(emopt_jax.muon, 0.02),
  'soap': functools.partial(emopt_jax.soap, 0.02),
  'kl_soap': functools.partial(emopt_jax.kl_soap, 0.02),
}


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
  """Compares trees leaf by leaf, each relative to its largest entry."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
  for (keys, x), y in pairs:
    assert x.shape == y.shape and x.dtype == y.dtype, jax.tree_util.keystr(keys)
    np.testing.assert_allclose(
      x, y, rtol=0, atol=tolerance * max(float(np.max(np.abs(y), initial=0)), 1e-30), err_msg=jax.tree_util.keystr(keys)
    )
