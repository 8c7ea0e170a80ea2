"""Make your own optimizer from the parts: `python examples/03_compose.py`

Three of them: another orthogonalizer, another optimizer inside the eigenbasis, and the linear algebra on its own.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import emopt_jax
from emopt_jax.diagnostics import orthogonality_error

STEPS = 300

# --- The parts of `linalg` are functions of arrays -------------------------------------------------------------------
# Newton-Schulz reaches the polar factor U V^T of G = U S V^T by products alone. How near it comes depends on its table
# of coefficients, the number of steps, and the smallest singular value of G relative to the largest.
gradient = jax.random.normal(jax.random.key(0), (64, 64))
print('distance from orthogonal, max |X X^T - I|')
for name, method in {
  'polar_svd': emopt_jax.polar_svd,
  'Polar Express, 8 steps': emopt_jax.newton_schulz,
  'Polar Express, 5 steps': functools.partial(emopt_jax.newton_schulz, steps=5),
  'Keller Jordan, 5 steps': functools.partial(emopt_jax.newton_schulz, coefficients=emopt_jax.KELLER_JORDAN, steps=5),
}.items():
  print(f'  {name:24} {orthogonality_error(method(gradient)):.1e}')


# --- An orthogonalizer is a function of a stack of matrices [batch, m, n] --------------------------------------------
# Muon forgets how large the gradient was. Steepest descent under the spectral norm does not: its step is the polar
# factor times the nuclear norm, the sum of the singular values, which is the inner product of factor and matrix.
def scaled_polar(x):
  factor = emopt_jax.polar_svd(x)
  return factor * jnp.sum(factor * x, axis=(-2, -1), keepdims=True)


def spectral_descent(learning_rate):
  return optax.chain(
    emopt_jax.momentum(0.9),
    emopt_jax.orthogonalize(scaled_polar),
    optax.scale_by_learning_rate(learning_rate),  # no rms_match: the size of the step is the point
  )


# --- `eigenbasis_rotate` takes any elementwise optimizer -------------------------------------------------------------
# SOAP is Adam in the eigenbasis of the gradient's covariance. Lion takes the sign of its momentum; in the eigenbasis
# that is nearly the sign of each singular direction. Its one moment, `mu`, is rotated along with the basis.
def rotated_lion(learning_rate):
  return optax.chain(
    emopt_jax.eigenbasis_rotate(optax.scale_by_lion(), covariance=emopt_jax.kronecker_covariance(0.95)),
    optax.scale_by_learning_rate(learning_rate),
  )


# --- The problem: learn the function of another network, from inputs of unequal sizes --------------------------------
def network(params, x):
  return jnp.tanh(jnp.tanh(x @ params['first']) @ params['second']) @ params['third'] + params['bias']


def init(key):
  kernels = jax.random.normal(key, (3, 64, 64)) / 8
  return {'first': kernels[0], 'second': kernels[1], 'third': kernels[2], 'bias': jnp.zeros(64)}


def loss_of(params, key):
  x = jax.random.normal(key, (256, 64)) * 3 / jnp.arange(1, 65) ** 0.5
  target = network(init(jax.random.key(1)), x)
  return jnp.mean((network(params, x) - target) ** 2) / jnp.mean(target**2)


@functools.partial(jax.jit, static_argnames='optimizer')
def train(optimizer):
  def step(carry, key):
    params, state = carry
    loss, gradients = jax.value_and_grad(loss_of)(params, key)
    updates, state = optimizer.update(gradients, state, params)
    return (optax.apply_updates(params, updates), state), loss

  params = init(jax.random.key(0))
  keys = jax.random.split(jax.random.key(2), STEPS)
  return jax.lax.scan(step, (params, optimizer.init(params)), keys)[1]


def schedule(peak):
  return optax.linear_schedule(peak, 0.01 * peak, STEPS)


# Each at the best of four or more learning rates. Chains of your own are routed like the recipes: AdamW has the bias.
adamw = optax.adamw(schedule(0.05), b2=0.95)
print(f'\nrelative error, mean of the last 20 of {STEPS} steps')
for name, optimizer in {
  'AdamW': adamw,
  'spectral descent': emopt_jax.route(spectral_descent(schedule(1.0)), adamw),
  'Lion': optax.lion(schedule(0.01)),
  'Lion in the eigenbasis': emopt_jax.route(rotated_lion(schedule(0.02)), adamw),
}.items():
  print(f'  {name:24} {train(optimizer)[-20:].mean():.4f}', flush=True)
