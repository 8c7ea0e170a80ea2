"""Optax's own contract suite, shipped in its wheel, on our optimizers, and its dtype tests on matrices.

The suite is parameterized over Optax's tables when it is imported. Its undecorated test functions run here on our
table instead: `functools.wraps` leaves each under `__wrapped__` of the tests that were made of it.
"""

import inspect

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import _common_test as suite

import emopt_jax

RECIPES = {
  'muon': emopt_jax.muon,
  'soap': emopt_jax.soap,
  'kl_soap': emopt_jax.kl_soap,
  'shampoo': emopt_jax.shampoo,
}
# At a constant rate Muon's update keeps an RMS of 0.2, so the last steps move by 0.2 times the rate; the suite accepts
# 3e-2. Rosenbrock's valley is a vector and goes to Adam.
LEARNING_RATE = 1e-2
TARGETS = (
  suite._setup_parabola,
  suite._setup_rosenbrock,
  suite._setup_matrix_parabola,
  suite._setup_mixed_tensor_target,
)

every_recipe = pytest.mark.parametrize('name', RECIPES)


def routed_factory(name):
  """Returns the factory of a recipe for trees that hold vectors too, as the suite's do."""

  def factory(learning_rate: optax.ScalarOrSchedule):
    return emopt_jax.route(RECIPES[name](learning_rate, weight_decay=0.0), optax.adam(learning_rate))

  return factory


def suite_functions() -> dict:
  """Returns the test functions of the suite by name, without their parameters."""
  tests = [test for name, test in vars(suite.ContribTest).items() if name.startswith('test_')]
  return {test.__wrapped__.__name__: test.__wrapped__ for test in tests}


def suite_cases() -> list:
  """Returns a pytest parameter for each test function and each combination of the parameters it was written for."""
  choices = {
    'test_optimizers_accept_extra_args': [{'wrap': wrap} for wrap in (True, False)],
    'test_optimizers': [{'target': target, 'dtype': 'float32'} for target in TARGETS],
    'test_optimizers_can_be_wrapped_in_inject_hyperparams': [{}],
    'test_preserve_dtype': [{'dtype': dtype} for dtype in ('bfloat16', 'float32')],
    'test_gradient_accumulation': [{'dtype': dtype} for dtype in ('bfloat16', 'float32')],
    'test_state_shape_dtype_shard_stability': [
      {'dtype': dtype} for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
    ],
    'test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such': [{}],
  }
  return [
    pytest.param(name, arguments, id='-'.join([name, *(getattr(v, '__name__', str(v)) for v in arguments.values())]))
    for name, parameters in choices.items()
    for arguments in parameters
  ]


def run_suite(monkeypatch, factory, function: str, arguments: dict) -> None:
  monkeypatch.setattr(suite, '_get_opt_factory', lambda opt_name: factory)
  table_row = {'opt_name': 'ours', 'opt_kwargs': {'learning_rate': LEARNING_RATE}}
  suite_functions()[function](suite.ContribTest(), **table_row, wrapper_name=None, wrapper_kwargs=None, **arguments)


def test_the_whole_suite_runs():
  assert set(suite_functions()) == {case.values[0] for case in suite_cases()}
  for name, arguments in (case.values for case in suite_cases()):
    table_row = {'self', 'opt_name', 'opt_kwargs', 'wrapper_name', 'wrapper_kwargs'}
    assert set(inspect.signature(suite_functions()[name]).parameters) == table_row | set(arguments)


@pytest.mark.parametrize('function, arguments', suite_cases())
@every_recipe
def test_optax_suite(monkeypatch, name, function, arguments):
  run_suite(monkeypatch, routed_factory(name), function, arguments)


def takes_no_extra_arguments(learning_rate: optax.ScalarOrSchedule):
  plain = optax.sgd(learning_rate)
  return optax.GradientTransformation(plain.init, lambda updates, state, params=None: plain.update(updates, state))


def stands_still(learning_rate: optax.ScalarOrSchedule):
  del learning_rate
  return optax.with_extra_args_support(optax.set_to_zero())


def understands_floats_only(learning_rate: optax.ScalarOrSchedule):
  return optax.sgd(learning_rate if isinstance(learning_rate, float) else 1.0)


def returns_float16(learning_rate: optax.ScalarOrSchedule):
  del learning_rate
  return optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: leaf.astype(jnp.float16), updates))


def changes_its_state(learning_rate: optax.ScalarOrSchedule):
  del learning_rate
  return optax.GradientTransformationExtraArgs(
    lambda params: jnp.zeros(()), lambda updates, state, params=None, **extra_args: (updates, {'count': state})
  )


BROKEN = {
  'test_optimizers_accept_extra_args': (takes_no_extra_arguments, TypeError),
  'test_optimizers': (stands_still, AssertionError),
  'test_optimizers_can_be_wrapped_in_inject_hyperparams': (understands_floats_only, AssertionError),
  'test_preserve_dtype': (returns_float16, AssertionError),
  'test_gradient_accumulation': (changes_its_state, TypeError),
  'test_state_shape_dtype_shard_stability': (changes_its_state, TypeError),
  'test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such': (understands_floats_only, AssertionError),
}


@pytest.mark.parametrize('function, arguments', suite_cases())
def test_optax_suite_fails_a_broken_optimizer(monkeypatch, function, arguments):
  """Shows that the suite's functions really assert when they are called from here."""
  factory, error = BROKEN[function]
  with pytest.raises(error):
    run_suite(monkeypatch, factory, function, arguments)


MATRIX = [[1.0, 2.0, -0.5], [-3.0, 0.25, 1.5]]


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@every_recipe
def test_matrices_keep_the_dtype_of_updates_and_state(name, dtype):
  optimizer = RECIPES[name](LEARNING_RATE)
  params = jnp.array(MATRIX, dtype)
  state = optimizer.init(params)

  @jax.jit
  def step(updates, state, params, active):
    # A branch of `cond` must have the shapes and dtypes of the other one, to the letter.
    return jax.lax.cond(
      active, lambda: optimizer.update(updates, state, params), lambda: (jnp.zeros_like(params), state)
    )

  updates, new = step(2 * params, state, params, True)
  still, same = step(2 * params, state, params, False)
  assert updates.dtype == dtype
  chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
  chex.assert_trees_all_equal((still, same), (jnp.zeros_like(params), state))
  # The gradient of |W|^2 is twice W, and no preconditioner with positive factors turns a step uphill.
  assert float(jnp.vdot(updates.astype(jnp.float32), params.astype(jnp.float32))) < 0


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
@every_recipe
def test_matrices_accumulate_gradients(name, dtype):
  optimizer = RECIPES[name](LEARNING_RATE)
  multi = optax.MultiSteps(optimizer, every_k_schedule=4)
  params = jnp.array(MATRIX, dtype)
  gradients = jnp.stack([params * scale for scale in (0.5, 1.0, 2.5, 4.0)])  # mean and partial sums exact in bfloat16
  updates, state = [], multi.init(params)
  step = jax.jit(multi.update)
  for gradient in gradients:
    update, state = step(gradient, state, params)
    updates.append(update)
  chex.assert_trees_all_equal(updates[:3], [jnp.zeros_like(params)] * 3)
  with jax.disable_jit():
    expected, _ = optimizer.update(2 * params, optimizer.init(params), params)
  assert updates[3].dtype == dtype
  # MultiSteps keeps a running mean in the gradient's dtype, and rounds it four times.
  chex.assert_trees_all_close(
    updates[3].astype(jnp.float32), expected.astype(jnp.float32), atol=8 * float(jnp.finfo(dtype).eps) * LEARNING_RATE
  )
