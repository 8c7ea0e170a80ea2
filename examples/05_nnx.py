"""A transformer in Flax NNX, with a look inside its optimizer: `python examples/05_nnx.py`

It learns to predict the next byte of real text, the source of Python's argparse module.
"""

import argparse
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import emopt_jax
from emopt_jax import diagnostics

STEPS, BATCH, CONTEXT, WIDTH, HEADS = 100, 16, 32, 64, 4
TEXT = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8)


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norm_1, self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
    self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
    self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
    self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
    self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

  def __call__(self, x):
    qkv = self.qkv(self.norm_1(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    heads = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    x = x + self.out(heads.reshape(x.shape))
    return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
  def __init__(self, rngs):
    self.token_embed = nnx.Embed(256, WIDTH, rngs=rngs)
    self.position_embed = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
    self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

  def __call__(self, tokens):
    x = self.token_embed(tokens) + self.position_embed(jnp.arange(CONTEXT))
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))


@nnx.jit
def train_step(model, optimizer, batch):
  def loss_of(model):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()

  loss, gradients = nnx.value_and_grad(loss_of)(model)
  updates = optimizer.update(model, gradients)
  return loss, updates


def train(transformation):
  """Trains a new model; returns it with its optimizer, the updates of the last step and the mean of the last losses."""
  model = Transformer(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
  losses, random = [], np.random.default_rng(0)
  for _ in range(STEPS):
    starts = random.integers(len(TEXT) - CONTEXT, size=(BATCH, 1))
    loss, updates = train_step(model, optimizer, TEXT[starts + np.arange(CONTEXT + 1)].astype(np.int32))
    losses.append(float(loss))
  return model, optimizer, updates, np.mean(losses[-20:])


def schedule(peak):
  return optax.warmup_cosine_decay_schedule(0.0, peak, STEPS // 10, STEPS, 0.01 * peak)


# Each at the best of 0.001, 0.003, 0.01 and 0.03.
adamw = optax.adamw(schedule(0.01), b2=0.95, weight_decay=0.1)
kl_soap = emopt_jax.kl_soap(schedule(0.01))

# NNX passes boxed parameters at init and plain arrays at update; paths, routing and state are the same for both.
print(emopt_jax.describe_routing(nnx.state(Transformer(nnx.Rngs(0)), nnx.Param), kl_soap, adamw))

print(f'\nloss in nats per byte, mean of the last 20 of {STEPS} steps')
print(f'  AdamW    {train(adamw)[-1]:.3f}', flush=True)
model, optimizer, updates, loss = train(emopt_jax.route(kl_soap, adamw))
print(f'  KL-SOAP  {loss:.3f}')

# The state of `route` is that of both optimizers, and KL-SOAP is a chain whose first part holds the bases. NNX keeps
# every array in a Variable; `nnx.as_pure` takes them out.
rotation = nnx.as_pure(optimizer.opt_state).inner_states['matrix'].inner_state[0]
rms = diagnostics.update_rms(updates)
print('\nafter the last step        update RMS / rate    basis staleness     factor condition')
for path, (left, right) in rotation.eigenbasis.items():
  factors = rotation.covariance.factors[path]
  staleness = [diagnostics.basis_staleness(factors.left, left), diagnostics.basis_staleness(factors.right, right)]
  condition = [diagnostics.factor_condition(factor) for factor in factors]
  print(
    f'  {path:26}{rms[path] / float(schedule(0.01)(STEPS - 1)):14.2f}'
    f'{staleness[0][0]:14.3f}{staleness[1][0]:8.3f}{condition[0][0]:14.1e}{condition[1][0]:10.1e}'
  )

# Both are zero in a healthy run: no gradient held a NaN, and every refresh of a basis was finite.
print(f'\nskipped gradients {diagnostics.skipped_gradients(optimizer.opt_state)}', end=', ')
print(f'rejected refreshes {diagnostics.rejected_refreshes(optimizer.opt_state)}')
