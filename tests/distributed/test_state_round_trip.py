"""State on a mesh and in a checkpoint, for leaves whose axes, sizes and splits leave no order to be guessed."""

import math
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import MatrixAxes, distributed
from emopt_jax.matrices import to_stacks
from tests.distributed import problems

# Few and equal sizes, so that a stack often has the shape of its leaf in another order of axes.
SIZES = st.sampled_from([4, 4, 2, 1])
MESHES = (((4,), ('data',)), ((2, 2), ('data', 'model')))


class Copies(NamedTuple):
  """What matrix optimizers keep, made from the parameters alone: moments, stacks of matrices, of rows, of numbers."""

  mu: Any
  factors: Any
  values: Any
  skipped: Any


def copying(axes=None) -> optax.GradientTransformation:
  """Returns an optimizer whose fresh state holds every number of the parameters, under its own matrix."""

  def init(params):
    stacks = to_stacks(params, axes)
    rows = {path: jnp.sum(stack, axis=2) for path, stack in stacks.items()}
    counts = {path: jnp.sum(stack, axis=(1, 2)).astype(jnp.int32) for path, stack in stacks.items()}
    return Copies(jax.tree.map(lambda leaf: leaf + 0, params), stacks, rows, counts)

  return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


@st.composite
def leaves(draw, mesh_shape: dict[str, int]) -> tuple[tuple[int, ...], MatrixAxes, P]:
  """Returns a shape, its axes and its spec: three or four dimensions, in any order, one of them split perhaps."""
  shape = tuple(draw(st.lists(SIZES, min_size=3, max_size=4)))
  order = draw(st.permutations(range(len(shape))))
  inputs = draw(st.integers(1, len(shape) - 1))
  outputs = draw(st.integers(1, len(shape) - inputs))
  sides = tuple(order[:inputs]), tuple(order[inputs : inputs + outputs])
  split = None
  if draw(st.booleans()):
    axis = draw(st.sampled_from(sides[0] + sides[1]))
    sizes = draw(
      st.sampled_from([(shape[axis],), *([(1, shape[axis] - 1), (shape[axis] // 2,) * 2] * (shape[axis] > 1))])
    )
    split = (axis, sizes)
  spec = [None] * len(shape)
  for name, size in mesh_shape.items():
    free = [axis for axis in range(len(shape)) if spec[axis] is None and shape[axis] % size == 0]
    if free and draw(st.booleans()):
      spec[draw(st.sampled_from(free))] = name
  return shape, MatrixAxes(*sides, split), P(*spec)


@st.composite
def trees(draw) -> tuple[Any, list[tuple[tuple[int, ...], MatrixAxes, P]]]:
  mesh = problems.mesh_of(*draw(st.sampled_from(MESHES)))
  return mesh, draw(st.lists(leaves(dict(mesh.shape)), min_size=1, max_size=3))


@hypothesis.given(trees())
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
def test_any_layout_is_put_back_as_one_device_has_it(tree):
  mesh, drawn = tree
  names = [f'block_{i}' for i in range(len(drawn))]
  numbers, start = {}, 1
  for name, (shape, _, _) in zip(names, drawn, strict=True):
    size = math.prod(shape)
    numbers[name] = {'kernel': np.arange(start, start + size, dtype=np.float32).reshape(shape)}
    start += size
  axes = {name: {'kernel': leaf_axes} for name, (_, leaf_axes, _) in zip(names, drawn, strict=True)}
  specs = {name: {'kernel': spec} for name, (_, _, spec) in zip(names, drawn, strict=True)}
  expected = copying(axes).init(numbers)

  plan = distributed.plan_layerwise(
    numbers, mesh, 'data', specs=specs, axes=axes, is_matrix=lambda path, leaf: True, cost=distributed.elementwise_cost
  )
  optimizer = distributed.layerwise(copying(), plan)
  # The fresh state is made on the owners, from what travels to them: another way than that of checkpoints.
  state = jax.jit(optimizer.init)(problems.place(problems.Problem(numbers, specs, mesh), numbers))
  like = jax.eval_shape(copying(axes).init, numbers)
  logical = distributed.logical_state(state, plan, like)
  jax.tree.map(np.testing.assert_array_equal, logical, expected)

  physical = distributed.physical_state(logical, plan, jax.eval_shape(optimizer.init, numbers))
  for one in plan.classes:
    bundle = next(bundle for bundle in plan.bundles if one in bundle.classes)
    homes = math.prod(mesh.shape[name] for name in bundle.home)
    owned = [rank * one.slots + slot for rank, count in enumerate(one.counts * homes) for slot in range(count)]
    rows = lambda tree, owned=owned: jax.tree.map(lambda leaf: np.asarray(leaf)[owned], tree)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, rows(physical.classes[one.name]), rows(state.classes[one.name]))


@pytest.mark.parametrize(
  ('shape', 'axes'),
  [((8, 4, 4), MatrixAxes(-1, -2)), ((4, 4, 6), MatrixAxes(0, 2)), ((3, 8, 3), MatrixAxes(1, 0))],
  ids=['[batch, out, in]', '[in, layers, out]', 'convolution [out, in, width]'],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(shape, axes):
  params = {'kernel': np.random.default_rng(0).standard_normal(shape, np.float32)}
  mesh = problems.mesh_of((8,), ('data',))
  plan = distributed.plan_layerwise(params, mesh, 'data', axes=axes, is_matrix=lambda path, leaf: True)
  plain = emopt_jax.soap(0.1, axes=axes)
  optimizer = distributed.layerwise(emopt_jax.soap(0.1), plan)
  update, like = jax.jit(optimizer.update), jax.eval_shape(plain.init, params)

  def steps(params, state, numbers):
    for number in numbers:
      updates, state = update(problems.mean(problems.local_gradients(params, number, 8)), state, params)
      params = jax.tree.map(np.asarray, optax.apply_updates(params, updates))
    return params, state

  params, state = steps(params, jax.jit(optimizer.init)(params), range(2))
  resumed = distributed.physical_state(
    distributed.logical_state(state, plan, like), plan, jax.eval_shape(optimizer.init, params)
  )
  expected, _ = steps(params, state, range(2, 5))
  actual, _ = steps(params, resumed, range(2, 5))
  np.testing.assert_array_equal(actual['kernel'], expected['kernel'])


@pytest.mark.parametrize('max_norm', [None, 1.0])
def test_a_tree_without_matrices(max_norm):
  params = {'bias': np.arange(8, dtype=np.float32)}
  plan = distributed.plan_layerwise(params, problems.mesh_of((8,), ('data',)), 'data')
  optimizer = distributed.layerwise(emopt_jax.muon(0.02), plan, others=optax.adamw(0.01), max_norm=max_norm)
  plain = emopt_jax.route(emopt_jax.muon(0.02), optax.adamw(0.01))
  gradients = {'bias': np.full(8, 0.1, np.float32)}  # of a norm that is not clipped
  _, state = optimizer.update(gradients, optimizer.init(params), params)
  _, expected = plain.update(gradients, plain.init(params), params)
  logical = distributed.logical_state(state, plan, jax.eval_shape(plain.init, params))
  problems.assert_close(*(jax.tree.map(np.asarray, x) for x in (logical, expected)), 1e-6)  # a rounding or two
  physical = distributed.physical_state(logical, plan, jax.eval_shape(optimizer.init, params))
  jax.tree.map(np.testing.assert_array_equal, physical, state)


def test_clipping_in_front_of_matrices_alone():
  """The undistributed form of `max_norm` is a chain, in which the optimizer of the matrices comes second."""
  params = {'kernel': np.random.default_rng(0).standard_normal((8, 4), np.float32)}
  plan = distributed.plan_layerwise(params, problems.mesh_of((2,), ('data',)), 'data')
  optimizer = distributed.layerwise(emopt_jax.muon(0.02), plan, max_norm=1.0)
  plain = optax.chain(optax.clip_by_global_norm(1.0), emopt_jax.muon(0.02))
  gradients = {'kernel': np.ones((8, 4), np.float32)}
  _, state = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(params), params)
  _, expected = plain.update(gradients, plain.init(params), params)
  like = jax.eval_shape(plain.init, params)
  logical = distributed.logical_state(state, plan, like)
  problems.assert_close(*(jax.tree.map(np.asarray, x) for x in (logical, expected)), 1e-6)  # a rounding or two
  physical = distributed.physical_state(logical, plan, jax.eval_shape(optimizer.init, params))
  again = distributed.logical_state(physical, plan, like)
  jax.tree.map(np.testing.assert_array_equal, again, logical)
