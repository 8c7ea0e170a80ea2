"""What bad input gets: a ValueError that names the leaf, its shape and the mend, word for word."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import emopt_jax
from emopt_jax import MatrixAxes

OPTIMIZERS = {
  'muon': emopt_jax.muon,
  'soap': emopt_jax.soap,
  'kl_soap': emopt_jax.kl_soap,
  'shampoo': emopt_jax.shampoo,
}
every_recipe = pytest.mark.parametrize('build', OPTIMIZERS.values(), ids=OPTIMIZERS)


@contextlib.contextmanager
def raises(message: str):
  """Asserts a ValueError with this very message; JAX adds a note on its own frames, which `match=` would see too."""
  with pytest.raises(ValueError) as error:
    yield
  assert str(error.value) == message


NOT_A_MATRIX = (
  "leaf 'block/{name}' of shape {shape} is not a matrix: give its axes, as in axes=MatrixAxes(inputs=-2, outputs=-1) "
  'for stacked [in, out] kernels, or route it to another optimizer'
)
WRONG_DTYPE = (
  "leaf 'block/kernel' of shape (4, 6) has dtype {dtype}: matrix optimizers take real floating leaves; "
  'route it to another optimizer or mask it'
)
BAD_LEAVES = {
  'bias': ({'bias': jnp.ones(4)}, NOT_A_MATRIX.format(name='bias', shape=(4,))),
  'scalar': ({'scale': jnp.ones(())}, NOT_A_MATRIX.format(name='scale', shape=())),
  'stack': ({'kernel': jnp.ones((3, 4, 6))}, NOT_A_MATRIX.format(name='kernel', shape=(3, 4, 6))),
  'integer': ({'kernel': jnp.ones((4, 6), jnp.int32)}, WRONG_DTYPE.format(dtype='int32')),
  'boolean': ({'kernel': jnp.ones((4, 6), bool)}, WRONG_DTYPE.format(dtype='bool')),
  'complex': ({'kernel': jnp.ones((4, 6), jnp.complex64)}, WRONG_DTYPE.format(dtype='complex64')),
}
every_bad_leaf = pytest.mark.parametrize('leaves, message', BAD_LEAVES.values(), ids=BAD_LEAVES)


@every_bad_leaf
@every_recipe
def test_leaf_that_is_no_matrix(build, leaves, message):
  params = {'block': leaves}
  optimizer = build(0.1)
  with raises(message):
    optimizer.init(params)
  with raises(message):
    jax.eval_shape(optimizer.init, params)
  good = {'block': {name: jnp.ones((4, 6)) for name in leaves}}
  with raises(message):
    optimizer.update(params, optimizer.init(good), good)
  with raises(message):
    jax.eval_shape(optimizer.update, params, optimizer.init(good), good)


@pytest.mark.parametrize(
  'transform',
  [
    emopt_jax.orthogonalize,
    emopt_jax.rms_match,
    emopt_jax.rms_normalize,
    emopt_jax.momentum,
    emopt_jax.kronecker_covariance,
    emopt_jax.kl_covariance,
    lambda: emopt_jax.kronecker_precondition(emopt_jax.kronecker_covariance()),
    lambda: emopt_jax.eigenbasis_rotate(optax.scale_by_adam()),
  ],
)
@every_bad_leaf
def test_transform_alone(transform, leaves, message):
  good = {'block': {name: jnp.ones((4, 6)) for name in leaves}}
  state = transform().init(good)
  with raises(message):
    transform().update({'block': leaves}, state)


BAD_AXES = {
  'out of range': (
    MatrixAxes(0, 2),
    "leaf 'block/kernel' of shape (4, 6): axis 2 of MatrixAxes(inputs=0, outputs=2, split=None) is out of range; "
    'use axes from 0 to 1',
  ),
  'negative out of range': (
    MatrixAxes(-3, 1),
    "leaf 'block/kernel' of shape (4, 6): axis -3 of MatrixAxes(inputs=-3, outputs=1, split=None) is out of range; "
    'use axes from 0 to 1',
  ),
  'split out of range': (
    MatrixAxes(0, 1, split=(2, (3, 3))),
    "leaf 'block/kernel' of shape (4, 6): axis 2 of MatrixAxes(inputs=0, outputs=1, split=(2, (3, 3))) is out of "
    'range; use axes from 0 to 1',
  ),
  'overlap': (
    MatrixAxes(1, -1),
    "leaf 'block/kernel' of shape (4, 6): inputs and outputs of MatrixAxes(inputs=1, outputs=-1, split=None) overlap; "
    'name every axis once',
  ),
  'split': (
    MatrixAxes(0, 1, split=(1, (2, 2, 3))),
    "leaf 'block/kernel' of shape (4, 6): split sizes (2, 2, 3) add up to 7, not to the 6 of axis 1; "
    'give the sizes of the whole, unsharded leaf',
  ),
  'structure': (
    {'other': MatrixAxes()},
    'axes is no pytree prefix of the parameters: give one MatrixAxes for all leaves, or a tree of the same structure '
    'with MatrixAxes or None at its leaves',
  ),
}


@pytest.mark.parametrize('axes, message', BAD_AXES.values(), ids=BAD_AXES)
@pytest.mark.parametrize('form', ['value', 'function'])
@every_recipe
def test_axes_that_do_not_fit(build, form, axes, message):
  params = {'block': {'kernel': jnp.ones((4, 6))}}
  with raises(message):
    build(0.1, axes=axes if form == 'value' else lambda tree: axes).init(params)


@every_recipe
def test_state_of_other_parameters(build):
  optimizer = build(0.1)
  gradients = {'new': jnp.ones((4, 6))}
  with pytest.raises(ValueError, match=r"leaf 'new' of shape \(4, 6\)"):
    optimizer.update(gradients, optimizer.init({'old': jnp.ones((4, 6))}), gradients)


def test_covariance_with_other_axes():
  rotate = emopt_jax.eigenbasis_rotate(optax.scale_by_adam(), covariance=emopt_jax.kronecker_covariance())
  other = emopt_jax.eigenbasis_rotate(
    optax.scale_by_adam(), covariance=emopt_jax.kronecker_covariance(axes=MatrixAxes(1, 0))
  )
  rotate.init({'kernel': jnp.ones((4, 6))})
  with raises(
    "leaf 'kernel' is 1 matrices of shape (4, 6), for which the covariance keeps no fitting factors: "
    'pass the same axes to eigenbasis_rotate and to its covariance'
  ):
    other.init({'kernel': jnp.ones((4, 6))})


def test_moment_of_unknown_name():
  with raises(
    "the inner transformation keeps a moment 'trace', and only 'mu' (first moments) and 'nu' (second moments) can be "
    'moved to a new eigenbasis: rename the field of its state'
  ):
    emopt_jax.eigenbasis_rotate(optax.trace(0.9)).init({'kernel': jnp.ones((4, 6))})


OUT_OF_RANGE = [
  *[
    (build, {'momentum': value}) for build in (emopt_jax.muon, emopt_jax.mop, emopt_jax.paper_muon) for value in (1, -1)
  ],
  *[(build, {name: 1.0}) for build in (emopt_jax.soap, emopt_jax.kl_soap) for name in ('b1', 'b2', 'decay')],
  *[(build, {name: -0.1}) for build in (emopt_jax.shampoo, emopt_jax.kl_shampoo) for name in ('momentum', 'decay')],
  (emopt_jax.soap, {'decay': float('nan')}),
  (emopt_jax.soap, {'b2': jnp.float32(1.5)}),
]


@pytest.mark.parametrize('build, arguments', OUT_OF_RANGE)
def test_decay_out_of_range(build, arguments):
  ((name, value),) = arguments.items()
  with raises(f'{name} must be in [0, 1), got {value}'):
    build(0.1, **arguments)


@pytest.mark.parametrize(
  'build, message',
  [
    (lambda: emopt_jax.soap(0.1, eps=-1e-8), 'eps must not be negative, got -1e-08'),
    (lambda: emopt_jax.kl_soap(0.1, eps=-1.0), 'eps must not be negative, got -1.0'),
    (lambda: emopt_jax.soap(0.1, refresh_every=0), 'refresh_every must be at least 1, got 0'),
    (lambda: emopt_jax.momentum(1.0), 'decay must be in [0, 1), got 1.0'),
    (lambda: emopt_jax.kronecker_covariance(1.0), 'decay must be in [0, 1), got 1.0'),
    (lambda: emopt_jax.kl_covariance(-0.5), 'decay must be in [0, 1), got -0.5'),
    (lambda: emopt_jax.kl_covariance(max_dim=0), 'max_dim must be at least 1, got 0'),
    (
      lambda: emopt_jax.kronecker_precondition(emopt_jax.kronecker_covariance(), floor=0.0),
      'floor must be in (0, 1), got 0.0',
    ),
    (lambda: emopt_jax.newton_schulz(jnp.eye(2), steps=0), 'steps must be at least 1, got 0'),
    (
      lambda: emopt_jax.orthogonalize(functools.partial(emopt_jax.newton_schulz, steps=0)).update(
        jnp.eye(2), optax.EmptyState()
      ),
      'steps must be at least 1, got 0',
    ),
  ],
)
def test_other_hyperparameters_out_of_range(build, message):
  with raises(message):
    build()


@pytest.mark.parametrize('build, arguments', OUT_OF_RANGE)
def test_traced_hyperparameters_are_not_compared(build, arguments):
  ((name, value),) = arguments.items()
  params = {'kernel': jnp.ones((4, 6))}
  injected = optax.inject_hyperparams(build, static_args={'method', 'refresh', 'refresh_every'} & _names(build))(0.1)
  state = injected.init(params)
  state.hyperparams[name] = jnp.asarray(value, jnp.float32)
  updates, _ = jax.eval_shape(injected.update, params, state, params)
  assert updates['kernel'].shape == (4, 6)
  jax.eval_shape(lambda traced: build(0.1, **{name: traced}).init(params), jnp.float32(value))


def _names(function) -> set[str]:
  return set(function.__kwdefaults__)
