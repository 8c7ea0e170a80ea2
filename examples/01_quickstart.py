"""Swap the optimizer: `python examples/01_quickstart.py`

A small network learns the function of another one, with AdamW and then with KL-SOAP: one line differs.
"""

import jax
import jax.numpy as jnp
import optax

import emopt_jax


def network(params, x):
  return jnp.tanh(jnp.tanh(x @ params['first']) @ params['second']) @ params['third'] + params['bias']


def init(key):
  kernels = jax.random.normal(key, (3, 64, 64)) / 8
  return {'first': kernels[0], 'second': kernels[1], 'third': kernels[2], 'bias': jnp.zeros(64)}


def loss_of(params, key):
  # Inputs of unequal sizes, as real features have them: the loss is steep along some directions and flat along others.
  x = jax.random.normal(key, (256, 64)) * 3 / jnp.arange(1, 65) ** 0.5
  target = network(init(jax.random.key(1)), x)
  return jnp.mean((network(params, x) - target) ** 2) / jnp.mean(target**2)


learning_rate = optax.linear_schedule(0.05, 0.0005, 300)  # of 0.01, 0.03, 0.05 and 0.1 the best for both
adamw = optax.adamw(learning_rate, b2=0.95)
kl_soap = emopt_jax.route(emopt_jax.kl_soap(learning_rate, weight_decay=1e-4), adamw)  # matrices; the bias to AdamW

for name, optimizer in (('AdamW', adamw), ('KL-SOAP', kl_soap)):
  params = init(jax.random.key(0))
  state = optimizer.init(params)
  update, value_and_grad = jax.jit(optimizer.update), jax.jit(jax.value_and_grad(loss_of))
  for step, key in enumerate(jax.random.split(jax.random.key(2), 300), start=1):
    loss, gradients = value_and_grad(params, key)
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    if step % 100 == 0:
      print(f'{name:8} step {step}  relative error {loss:.4f}')
