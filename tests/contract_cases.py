"""The one table of optimizers that the contract suite runs, and the small problem it runs them on."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax

# One tall and one wide matrix whose factors have the same two sizes: small, and few programs to compile.
SHAPES = {'attn': {'kernel': (6, 4)}, 'mlp': {'kernel': (4, 6)}}
SMALL = {'kernel': (4, 6)}
WEIGHT_DECAY = 0.1  # of every recipe by default, and of the chains below
LEARNING_RATE = 0.3


class Case(NamedTuple):
  """One row of the table.

  Attributes:
    name: Name of the test.
    build: Function of a learning rate, float or schedule, that returns the optimizer.
    shapes: Tree of the shapes of its parameters.
    small: The same with one matrix, for programs that are compiled for one test only.
  """

  name: str
  build: Callable[..., Any]
  shapes: Any = SHAPES
  small: Any = SMALL


def _chain(*transforms, learning_rate):
  return optax.chain(*transforms, optax.add_decayed_weights(WEIGHT_DECAY), optax.scale_by_learning_rate(learning_rate))


def orthogonalized_momentum(learning_rate: optax.ScalarOrSchedule):
  method = functools.partial(emopt_jax.newton_schulz, coefficients=emopt_jax.CANS)
  transforms = emopt_jax.momentum(0.9), emopt_jax.orthogonalize(method), emopt_jax.rms_match(0.2)
  return _chain(*transforms, learning_rate=learning_rate)


def lion_in_eigenbasis(learning_rate: optax.ScalarOrSchedule):
  rotated = emopt_jax.eigenbasis_rotate(optax.scale_by_lion(), covariance=emopt_jax.kl_covariance())
  return _chain(rotated, optax.scale(0.3), learning_rate=learning_rate)


def one_sided_soap(learning_rate: optax.ScalarOrSchedule):
  covariance = emopt_jax.kronecker_covariance(max_dim=5)
  rotated = emopt_jax.eigenbasis_rotate(optax.scale_by_adam(), covariance=covariance, refresh_every=2)
  return _chain(rotated, learning_rate=learning_rate)


def covariance_alone(learning_rate: optax.ScalarOrSchedule):
  transforms = emopt_jax.momentum(0.9), emopt_jax.kl_covariance(), emopt_jax.rms_normalize(0.2)
  return _chain(*transforms, learning_rate=learning_rate)


def routed(learning_rate: optax.ScalarOrSchedule):
  return emopt_jax.route(emopt_jax.muon(learning_rate), optax.adamw(learning_rate, weight_decay=WEIGHT_DECAY))


RECIPES = (
  emopt_jax.muon,
  emopt_jax.mop,
  emopt_jax.paper_muon,
  emopt_jax.soap,
  emopt_jax.kl_soap,
  emopt_jax.paper_kl_soap,
  emopt_jax.shampoo,
  emopt_jax.kl_shampoo,
)
CHAINS = (orthogonalized_momentum, lion_in_eigenbasis, one_sided_soap, covariance_alone)
CASES = (
  *(Case(build.__name__, build) for build in RECIPES + CHAINS),
  Case('routed', routed, {**SHAPES, 'norm': {'scale': (4,)}}, {**SMALL, 'scale': (4,)}),
)

every_optimizer = pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
every_recipe = pytest.mark.parametrize('recipe', RECIPES, ids=lambda recipe: recipe.__name__)


def normal(shapes: Any, seed: int, dtype: Any = jnp.float32) -> Any:
  """Returns a tree of N(0, 1) entries."""
  random = np.random.default_rng(seed)
  draw = lambda shape: jnp.asarray(random.standard_normal(shape), dtype)  # noqa: E731
  return jax.tree.map(draw, shapes, is_leaf=lambda node: isinstance(node, tuple))


def parameters(case: Case, dtype: Any = jnp.float32) -> Any:
  return normal(case.shapes, 0, dtype)


def gradients(case: Case, steps: int, dtype: Any = jnp.float32) -> list[Any]:
  return [normal(case.shapes, 1 + step, dtype) for step in range(steps)]


@functools.cache
def optimizer(build: Callable[..., Any]) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
  """Returns an optimizer at the constant rate and its jitted update, which fails when it is traced a second time."""
  built = build(LEARNING_RATE)

  def update(updates, state, params):
    return built.update(updates, state, params)

  update.__name__ = build.__name__  # chex counts traces by name
  return built, jax.jit(chex.assert_max_traces(update, n=1))


def run(init: Callable[..., Any], update: Callable[..., Any], params: Any, steps: list[Any]) -> tuple[list[Any], Any]:
  """Returns the updates of all steps, with the parameters held where they are, and the last state."""
  state, outputs = init(params), []
  for updates in steps:
    updates, state = update(updates, state, params)
    outputs.append(updates)
  return outputs, state


def run_without_jit(built: Any, params: Any, steps: list[Any]) -> tuple[list[Any], Any]:
  """As `run`, operation by operation: loops and branches run in Python, so that nothing is compiled for one test."""
  with jax.disable_jit():
    return run(built.init, built.update, params, steps)


def assert_close(actual: Any, expected: Any, digits: float = 3e-5) -> None:
  """Asserts that two trees agree to `digits` of the largest entry of each leaf.

  The same operations in two programs differ by a few roundings of 1e-7. Adam's 1 - b2^t with b2 = 0.999 multiplies them
  by 300 at step 3, and Newton-Schulz and QR by the condition number of these matrices, at most about 10.
  """
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  scale = lambda leaf: max(float(np.max(np.abs(np.float64(leaf)), initial=0)), 1e-30)  # noqa: E731
  scaled = lambda tree: jax.tree.map(lambda x, y: np.float64(x) / scale(y), tree, expected)  # noqa: E731
  chex.assert_trees_all_close(scaled(actual), scaled(expected), rtol=0, atol=digits)
