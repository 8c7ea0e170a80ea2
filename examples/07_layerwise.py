"""Whole matrices over eight devices, exactly as on one, here eight virtual ones: `python examples/07_layerwise.py`

KL-SOAP with every matrix on one owner: an eighth of the work and of the state on each device. Twice, with and without
`shard_map`, then from a checkpoint of eight devices on four.
"""

import os

os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # its threads beside XLA's make QR on a CPU up to 20 times slower

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import emopt_jax
from emopt_jax import distributed

jax.config.update('jax_num_cpu_devices', 8)  # on GPUs or TPUs, take what is there

WIDTH, LAYERS, BATCH, STEPS = 32, 8, 64, 30
WHOLE, ROWS = PartitionSpec(), PartitionSpec('data')


def init_params():
  keys = jax.random.split(jax.random.key(0), LAYERS)
  kernels = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
  return {f'layer_{i}': {'kernel': kernel, 'bias': jnp.zeros(WIDTH)} for i, kernel in enumerate(kernels)}


def loss_of(params, x, targets):
  for layer in params.values():
    x = x + jnp.tanh(x) @ layer['kernel'] + layer['bias']
  return jnp.mean((x - targets) ** 2)


def batch_of(step):
  teacher = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
  x = np.random.default_rng((0, step)).normal(size=(BATCH, WIDTH))
  return x.astype(np.float32), np.sin(x @ teacher).astype(np.float32)


INNER, OTHERS = emopt_jax.kl_soap(1e-2), optax.adamw(3e-3)
# What runs on one device, and what checkpoints are in.
PLAIN = optax.chain(optax.clip_by_global_norm(1.0), emopt_jax.route(INNER, OTHERS))


class Run:
  """Parameters, optimizer and state on a mesh of the first devices, or on one device without a mesh."""

  def __init__(self, devices, *, inside_shard_map=False):
    self.mesh = jax.sharding.Mesh(jax.devices()[:devices], ('data',))
    self.params = jax.device_put(init_params(), NamedSharding(self.mesh, WHOLE))
    self.plan = distributed.plan_layerwise(self.params, self.mesh, 'data', cost=distributed.soap_cost, inner=INNER)
    self.optimizer = distributed.layerwise(INNER, self.plan, others=OTHERS, max_norm=1.0)
    self.abstract = jax.eval_shape(self.optimizer.init, self.params)
    self.state = jax.jit(self.optimizer.init)(self.params)

    # The same step for both ways: in `shard_map` it sees one rank's rows, in plain `jit` all of them.
    def step(params, state, batch):
      loss, gradients = distributed.value_and_grad(loss_of, self.plan)(params, *batch)
      updates, state = self.optimizer.update(gradients, state, params)
      return optax.apply_updates(params, updates), state, loss

    if inside_shard_map:  # gradients are reduce-scattered to their owners, instead of all-reduced
      specs = distributed.state_specs(self.abstract, self.plan)
      step = jax.shard_map(step, mesh=self.mesh, in_specs=(WHOLE, specs, ROWS), out_specs=(WHOLE, specs, WHOLE))
    self.step = jax.jit(step, donate_argnums=(0, 1))

  def train(self, first, last):
    for number in range(first, last):
      batch = jax.device_put(batch_of(number), NamedSharding(self.mesh, ROWS))
      self.params, self.state, loss = self.step(self.params, self.state, batch)
    return float(loss)


def train_on_one_device():
  params, state = init_params(), PLAIN.init(init_params())

  @jax.jit
  def step(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
    updates, state = PLAIN.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  for number in range(STEPS):
    params, state, loss = step(params, state, batch_of(number))
  return float(loss)


on_eight = Run(8, inside_shard_map=True)
print(on_eight.plan)
print(f'\none device               loss {train_on_one_device():.6f}')
print(f'eight, in plain jit      loss {Run(8).train(0, STEPS):.6f}')
on_eight.train(0, STEPS // 2)

# A checkpoint holds the state as it would be on one device; Orbax saves and restores it as any other.
like = jax.eval_shape(PLAIN.init, on_eight.params)
saved = jax.device_get((on_eight.params, distributed.logical_state(on_eight.state, on_eight.plan, like)))
print(f'eight, in shard_map      loss {on_eight.train(STEPS // 2, STEPS):.6f}')

on_four = Run(4, inside_shard_map=True)
on_four.params = jax.device_put(saved[0], NamedSharding(on_four.mesh, WHOLE))
on_four.state = distributed.physical_state(saved[1], on_four.plan, on_four.abstract)
print(f'four, from a checkpoint  loss {on_four.train(STEPS // 2, STEPS):.6f}')
