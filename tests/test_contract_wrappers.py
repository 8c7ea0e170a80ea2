"""The contract of every public optimizer with Optax's wrappers and JAX's transformations."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import emopt_jax
from tests.contract_cases import (
  CASES,
  LEARNING_RATE,
  RECIPES,
  SMALL,
  WEIGHT_DECAY,
  assert_close,
  every_optimizer,
  every_recipe,
  gradients,
  normal,
  optimizer,
  parameters,
  run,
  run_without_jit,
)

FALLING = optax.linear_schedule(LEARNING_RATE, 0.0, 10)
# What `optax.inject_hyperparams` makes a part of the state: every number, and nothing else.
NUMERIC = {
  recipe: {
    name
    for name, parameter in inspect.signature(recipe).parameters.items()
    if name == 'learning_rate' or (type(parameter.default) in (int, float))
  }
  for recipe in RECIPES
}


@every_optimizer
def test_learning_rate_schedule_scales_the_updates(case):
  params, grads = parameters(case), gradients(case, 3)
  built, update = optimizer(case.build)
  constant, _ = run(built.init, update, params, grads)
  scheduled = case.build(FALLING)
  actual, state = run_without_jit(scheduled, params, grads)
  rates = [float(FALLING(step)) / LEARNING_RATE for step in range(3)]
  expected = [
    jax.tree.map(lambda leaf, rate=rate: leaf * rate, step) for rate, step in zip(rates, constant, strict=True)
  ]
  assert_close(actual, expected)
  assert jax.tree.structure(state) == jax.tree.structure(scheduled.init(params))


@pytest.mark.parametrize('case', [case for case in CASES if case.name != 'routed'], ids=lambda case: case.name)
def test_state_of_a_constant_rate_continues_under_a_schedule(case):
  """Only the last entry of the chain's state changes, from EmptyState to a count: exchange it in a restored state."""
  params, grads = parameters(case), gradients(case, 3)
  built, update = optimizer(case.build)
  _, state = run(built.init, update, params, grads[:2])
  expected, _ = update(grads[2], state, params)

  scheduled = case.build(optax.constant_schedule(LEARNING_RATE))
  fresh = scheduled.init(params)
  assert jax.tree.structure(fresh[:-1]) == jax.tree.structure(state[:-1])
  chex.assert_trees_all_equal_shapes_and_dtypes(fresh[:-1], state[:-1])
  assert isinstance(state[-1], optax.EmptyState)
  assert isinstance(fresh[-1], optax.ScaleByScheduleState)
  with jax.disable_jit():
    actual, _ = scheduled.update(grads[2], (*state[:-1], fresh[-1]), params)
  assert_close(actual, expected)


@every_recipe
def test_inject_hyperparams(recipe):
  injected = optax.inject_hyperparams(recipe)(learning_rate=FALLING)
  params, grads = normal(SMALL, 0), [normal(SMALL, 1 + i) for i in range(3)]
  state = injected.init(params)
  assert set(state.hyperparams) == NUMERIC[recipe]
  actual, state = run(injected.init, jax.jit(injected.update), params, grads)
  plain = recipe(FALLING)
  expected, plain_state = run_without_jit(plain, params, grads)
  assert_close(actual, expected)
  assert_close(state.inner_state[:-1], plain_state[:-1], 1e-4)
  np.testing.assert_allclose(state.hyperparams['learning_rate'], FALLING(2), rtol=1e-6)


@every_recipe
def test_injected_hyperparameters_act(recipe):
  functions = tuple({'method', 'refresh', 'refresh_every'} & set(inspect.signature(recipe).parameters))
  injected = optax.inject_hyperparams(recipe, static_args=functions)(LEARNING_RATE)
  params, grads = normal(SMALL, 0), normal(SMALL, 1)
  state = injected.init(params)
  with jax.disable_jit():
    expected, _ = injected.update(grads, state, params)
    state.hyperparams['weight_decay'] = jnp.asarray(WEIGHT_DECAY + 0.5)
    actual, _ = injected.update(grads, state, params)
  more_decay = jax.tree.map(lambda update, param: update - LEARNING_RATE * 0.5 * param, expected, params)
  assert_close(actual, more_decay)


@every_optimizer
def test_multi_steps_take_the_mean_gradient(case):
  params, grads = normal(case.small, 0), [normal(case.small, 1 + i) for i in range(4)]
  multi = optax.MultiSteps(case.build(LEARNING_RATE), every_k_schedule=2)
  actual, state = run_without_jit(multi, params, grads)
  means = [jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in (grads[:2], grads[2:])]
  built = case.build(LEARNING_RATE)
  expected, inner_state = run_without_jit(built, params, means)
  zero = jax.tree.map(jnp.zeros_like, params)
  assert_close(actual, [zero, expected[0], zero, expected[1]])
  assert_close(state.inner_opt_state, inner_state, 1e-4)
  # Under jit the step that updates and the step that waits are branches, which must agree on every shape and dtype.
  traced = jax.eval_shape(multi.update, grads[0], state, params)
  chex.assert_trees_all_equal_shapes_and_dtypes(traced, (zero, state))


@every_optimizer
def test_partition_and_masked(case):
  add = lambda tree, leaf: {**tree, 'vector': leaf}  # noqa: E731
  params, grads = parameters(case), gradients(case, 1)[0]
  built, _ = optimizer(case.build)
  (expected,), _ = run_without_jit(built, params, [grads])
  vector = jnp.arange(3.0)
  labels = add(jax.tree.map(lambda _: 'matrix', params), 'other')

  partitioned = optax.partition({'matrix': built, 'other': optax.sgd(0.5)}, labels)
  (updates,), _ = run_without_jit(partitioned, add(params, vector), [add(grads, vector)])
  chex.assert_trees_all_equal(updates, add(expected, -0.5 * vector))

  masked = optax.masked(built, jax.tree.map(lambda label: label == 'matrix', labels))
  (updates,), new = run_without_jit(masked, add(params, vector), [add(grads, vector)])
  chex.assert_trees_all_equal(updates, add(expected, vector))
  assert jax.tree.structure(new) == jax.tree.structure(masked.init(add(params, vector)))


@every_optimizer
def test_map_params(case):
  built, update = optimizer(case.build)
  params = parameters(case)
  _, state = run(built.init, update, params, gradients(case, 1))
  same = optax.tree.map_params(built, lambda leaf: leaf, state)
  chex.assert_trees_all_equal(same, state)
  assert jax.tree.structure(same) == jax.tree.structure(state)

  specs = jax.tree.map(lambda leaf: PartitionSpec(*'xy'[: leaf.ndim]), params)
  specs['mlp']['kernel'] = PartitionSpec('y', 'x')
  is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
  mapped = optax.tree.map_params(
    built,
    lambda leaf, spec: leaf if is_masked(leaf) else spec,
    state,
    specs,
    transform_non_params=lambda _: PartitionSpec(),
    is_leaf=is_masked,
  )
  # One spec may stand for all the factors: a prefix of the state, as `jit(out_shardings=...)` takes it.
  mapped = jax.tree.broadcast(mapped, state)
  for keys, spec in jax.tree_util.tree_leaves_with_path(mapped):
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    leaf = next((leaf for leaf in ('attn/kernel', 'mlp/kernel', 'norm/scale') if path.endswith(leaf)), None)
    is_moment = any(f'/{name}/' in path for name in ('mu', 'nu'))
    expected = functools.reduce(lambda tree, key: tree[key], leaf.split('/'), specs) if is_moment else PartitionSpec()
    assert spec == expected, path


@every_optimizer
def test_donated_scan_under_vmap_equals_separate_runs(case):
  built = case.build(LEARNING_RATE)

  def train(params, state, grads):
    def step(carry, grads):
      updates, state = built.update(grads, carry[1], carry[0])
      return (optax.apply_updates(carry[0], updates), state), updates

    return jax.lax.scan(step, (params, state), grads)

  problems = [(normal(case.small, 10 * i), [normal(case.small, 10 * i + j) for j in (1, 2, 3)]) for i in range(2)]
  stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
  params = stack([params for params, _ in problems])
  grads = stack([stack(grads) for _, grads in problems])
  state = jax.vmap(built.init)(params)
  donated = jax.tree.leaves((params, state))
  (params, state), updates = jax.jit(jax.vmap(train), donate_argnums=(0, 1))(params, state, grads)
  assert all(leaf.is_deleted() for leaf in donated)

  for i, (expected, grads) in enumerate(problems):
    expected_state = built.init(expected)
    for j, step in enumerate(grads):
      with jax.disable_jit():
        expected_updates, expected_state = built.update(step, expected_state, expected)
      expected = optax.apply_updates(expected, expected_updates)
      assert_close(jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], updates), expected_updates)
    assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], params), expected)
    assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], state), expected_state, 1e-3)


@every_optimizer
def test_fresh_state_can_be_donated(case):
  """Two leaves of a fresh state may not be one buffer."""
  built, _ = optimizer(case.build)
  params = parameters(case)
  state = built.init(params)
  before = jax.tree.map(np.array, state)
  moved = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 0, state), donate_argnums=0)(state)
  chex.assert_trees_all_equal(moved, before)
  assert emopt_jax.diagnostics.skipped_gradients(moved) == 0
