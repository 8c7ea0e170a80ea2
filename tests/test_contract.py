"""The contract of every public optimizer: what its updates and its state are, in every dtype and mode."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from tests.contract_cases import (
  LEARNING_RATE,
  WEIGHT_DECAY,
  Case,
  assert_close,
  every_optimizer,
  gradients,
  normal,
  optimizer,
  parameters,
  run,
  run_without_jit,
)


def least_squares(case: Case):
  """Returns the mean square of X (W - W*), summed over the leaves."""
  inputs, targets = normal((16, 6), 7), normal(case.shapes, 8)

  def loss(params):
    residuals = jax.tree.map(lambda w, target: inputs[:, : w.shape[0]] @ (w - target), params, targets)
    return sum(jnp.mean(jnp.square(residual)) for residual in jax.tree.leaves(residuals))

  return loss


def matrix_part(case: Case, state):
  """Returns the state without that of the optimizer of the other leaves, which is optax's own."""
  return state.inner_states['matrix'] if case.name == 'routed' else state


def float_dtypes(tree) -> set[str]:
  return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


def assert_same_layout(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)


@every_optimizer
def test_converges_without_retracing(case):
  built, update = optimizer(case.build)
  value_and_grad = jax.jit(jax.value_and_grad(least_squares(case)))
  params = parameters(case)
  state, first = built.init(params), value_and_grad(params)[0]
  for _ in range(200):
    _, grads = value_and_grad(params)
    updates, state = update(grads, state, params)  # fails inside when it is traced a second time
    params = optax.apply_updates(params, updates)
  # The loss starts at 20; at a constant rate the last steps go back and forth, with an RMS of 0.2 * 0.3 in every entry
  # and its square, 0.0036, in each of the 10 inputs; Lion, which averages over ten steps, overshoots by several steps.
  assert value_and_grad(params)[0] < 0.02 * first
  assert update._cache_size() == 1


@every_optimizer
def test_state_is_stable_and_the_same_without_jit(case):
  built, update = optimizer(case.build)
  params, start = parameters(case), built.init(parameters(case))
  eager_state = jitted_state = start
  for grads in gradients(case, 2):
    eager, eager_state = built.update(grads, eager_state, params)
    jitted, jitted_state = update(grads, jitted_state, params)
    assert_same_layout(eager_state, start)
    assert_same_layout(jitted_state, start)
    assert_close(eager, jitted)
    chex.assert_trees_all_equal_shapes_and_dtypes(eager, params)
  # QR and eigh amplify a difference of rounding by the inverse gap of neighbouring eigenvalues.
  assert_close(eager_state, jitted_state, 1e-3)


@every_optimizer
def test_init_on_shapes_alone(case):
  built, _ = optimizer(case.build)
  params = parameters(case)
  shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
  state = built.init(params)
  chex.assert_trees_all_equal(built.init(shapes), state)
  assert_same_layout(jax.eval_shape(built.init, shapes), state)
  assert_same_layout(jax.eval_shape(built.init, params), state)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16], ids=['bfloat16', 'float16'])
@every_optimizer
def test_half_precision(case, dtype):
  built, update = optimizer(case.build)
  params, grads = parameters(case, dtype), gradients(case, 3, dtype)
  start = built.init(params)
  updates, state = run_without_jit(built, params, grads)
  chex.assert_trees_all_equal_shapes_and_dtypes(updates[-1], params)
  assert_same_layout(state, start)
  assert float_dtypes(matrix_part(case, state)) == {'float32'}
  chex.assert_tree_all_finite(updates)

  wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(np.float32), tree)  # noqa: E731
  expected, expected_state = run(built.init, update, wide(params), [wide(step) for step in grads])
  # The update is rounded after every transform of the chain; the polar factor multiplies the rounding of its argument
  # by the condition number of these matrices, at most 10.
  assert_close(wide(updates), expected, 20 * float(jnp.finfo(dtype).eps))
  assert_close(matrix_part(case, state), matrix_part(case, expected_state), 20 * float(jnp.finfo(dtype).eps))


@every_optimizer
def test_float64(case):
  with jax.enable_x64(True):
    params, grads = parameters(case, np.float64), gradients(case, 2, np.float64)
    built = case.build(LEARNING_RATE)
    updates, state = run_without_jit(built, params, grads)
    assert float_dtypes((updates, matrix_part(case, state))) == {'float64'}
    assert_same_layout(state, built.init(params))
    # Every one of these updates is the transpose of that for the transposed problem: to the digits of float64 only if
    # nothing inside is float32.
    transposed = lambda tree: jax.tree.map(jnp.transpose, tree)  # noqa: E731
    mirrored, _ = run_without_jit(built, transposed(params), transposed(grads))
    assert_close(transposed(mirrored), updates, 1e-12)
  built, update = optimizer(case.build)
  single, _ = run(built.init, update, parameters(case), gradients(case, 2))
  assert_close(single, jax.tree.map(lambda leaf: leaf.astype(np.float32), updates), 1e-4)


@every_optimizer
def test_update_does_not_change_its_arguments(case):
  built, update = optimizer(case.build)
  params = parameters(case)
  first, second = gradients(case, 2)
  _, state = update(first, built.init(params), params)
  before = jax.tree.map(np.array, state)
  with jax.disable_jit():
    one = built.update(second, state, params)
    two = built.update(second, state, params)
  chex.assert_trees_all_equal(one, two)
  chex.assert_trees_all_equal(state, before)
  assert jax.tree.structure(state) == jax.tree.structure(before)


@every_optimizer
def test_a_gradient_with_nan_skips_one_step_of_its_matrix(case):
  built, update = optimizer(case.build)
  params, grads = parameters(case), gradients(case, 8)
  clean, _ = run(built.init, update, params, grads)
  broken_step = 4
  grads[broken_step]['mlp']['kernel'] = grads[broken_step]['mlp']['kernel'].at[1, 2].set(jnp.nan)
  broken, state = run(built.init, update, params, grads)

  def others(updates):
    return {key: value for key, value in updates.items() if key != 'mlp'}

  chex.assert_trees_all_equal([others(updates) for updates in broken], [others(updates) for updates in clean])
  decay_alone = -LEARNING_RATE * (WEIGHT_DECAY * params['mlp']['kernel'])
  np.testing.assert_allclose(broken[broken_step]['mlp']['kernel'], decay_alone, rtol=1e-6)  # two roundings
  chex.assert_trees_all_equal(broken[:broken_step], clean[:broken_step])
  chex.assert_tree_all_finite((broken, state))
  assert emopt_jax.diagnostics.skipped_gradients(state) == 1
  assert emopt_jax.diagnostics.rejected_refreshes(state) == 0
  # After the gap the matrix moves on at its usual size.
  rms = [float(jnp.sqrt(jnp.mean(jnp.square(step['mlp']['kernel'])))) for step in (broken[-1], clean[-1])]
  assert 0.5 < rms[0] / rms[1] < 2


@every_optimizer
def test_leaves_without_entries_pass_through(case):
  built, _ = optimizer(case.build)
  empty = jnp.zeros((0, 4))
  add = lambda tree: {**tree, 'empty': {'kernel': empty}, 'nothing': None}  # noqa: E731
  grads = gradients(case, 1)
  expected, _ = run_without_jit(built, parameters(case), grads)
  actual, state = run_without_jit(built, add(parameters(case)), [add(step) for step in grads])
  chex.assert_trees_all_equal(actual, [add(step) for step in expected])
  assert_same_layout(state, built.init(add(parameters(case))))
