"""Swap the optimizer: `python examples/01_quickstart.py`"""

import jax
import jax.numpy as jnp
import optax

import emopt_jax

keys = jax.random.split(jax.random.key(0))
x = 3 * jax.random.normal(keys[0], (512, 64)) / jnp.arange(1, 65) ** 0.5  # features of unequal sizes, as real ones are
kernels = jax.random.normal(keys[1], (4, 64, 64)) / 8
y = jnp.tanh(x @ kernels[0]) @ kernels[1]


def loss_of(params):
  return jnp.mean((jnp.tanh(x @ params['in'] + params['bias']) @ params['out'] - y) ** 2) / jnp.mean(y**2)


adamw = optax.adamw(optax.linear_schedule(0.05, 0.0005, 300))
kl_soap = emopt_jax.kl_soap(optax.linear_schedule(0.05, 0.0005, 300), weight_decay=1e-4)
for name, optimizer in {'AdamW': adamw, 'KL-SOAP': emopt_jax.route(kl_soap, adamw)}.items():  # the bias to AdamW
  params = {'in': kernels[2], 'out': kernels[3], 'bias': jnp.zeros(64)}
  state = optimizer.init(params)
  update, value_and_grad = jax.jit(optimizer.update), jax.jit(jax.value_and_grad(loss_of))
  for step in range(1, 301):
    loss, gradients = value_and_grad(params)
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    if step % 100 == 0:
      print(f'{name:8} step {step}  relative error {loss:.4f}')
