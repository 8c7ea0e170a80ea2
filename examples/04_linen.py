"""A Linen train state, stopped and continued from an Orbax checkpoint: `python examples/04_linen.py`

An autoencoder learns to draw small pictures through a bottleneck of 8 numbers, a classic on which AdamW is slow.
"""

import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import emopt_jax

STEPS, SAVE_AT, SIDE = 200, 150, 12


def pictures(key, count=128):
  """Returns pictures [count, SIDE * SIDE] of two round spots at random places: 4 numbers tell one from another."""
  pixels = jnp.stack(jnp.meshgrid(jnp.arange(SIDE), jnp.arange(SIDE)), axis=-1)
  centres = jax.random.uniform(key, (count, 2, 1, 1, 2), maxval=SIDE)
  spots = jnp.exp(-jnp.sum((pixels - centres) ** 2, axis=-1) / 4)
  return spots.sum(axis=1).reshape(count, SIDE * SIDE)


class Autoencoder(nn.Module):
  @nn.compact
  def __call__(self, x):
    for width in (64, 8, 64):
      x = nn.tanh(nn.Dense(width)(x))
    return nn.Dense(SIDE * SIDE)(x)


# The state carries its own step, from which data and learning rate follow: a run that continues sees what it would have
# seen, without the checkpoint having to know about either.
@jax.jit
def train_step(state):
  batch = pictures(jax.random.fold_in(jax.random.key(1), state.step))

  def loss_of(params):
    return jnp.mean((state.apply_fn({'params': params}, batch) - batch) ** 2) / jnp.var(batch)

  loss, gradients = jax.value_and_grad(loss_of)(state.params)
  return state.apply_gradients(grads=gradients), loss


model = Autoencoder()


def create(optimizer):
  params = model.init(jax.random.key(0), jnp.zeros((1, SIDE * SIDE)))['params']
  state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
  return state.replace(step=jnp.zeros((), jnp.int32))  # an array from the start, or the second step compiles again


def train(state, last_step):
  loss = jnp.nan
  while state.step < last_step:
    state, loss = train_step(state)
    if state.step % 50 == 0:
      print(f'  step {state.step}  share of variance not explained {loss:.4f}')
  return state


# Each at the best of four learning rates.
def schedule(peak):
  return optax.linear_schedule(peak, 0.01 * peak, STEPS)


adamw = optax.adamw(schedule(0.01), b2=0.95, weight_decay=1e-4)
kl_soap = emopt_jax.route(emopt_jax.kl_soap(schedule(0.03), weight_decay=1e-4), adamw)
print(emopt_jax.describe_routing(create(kl_soap).params, emopt_jax.kl_soap(0.01), adamw))

print('AdamW')
train(create(adamw), STEPS)
print('KL-SOAP')
whole = train(create(kl_soap), STEPS)

with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as checkpoints:
  print(f'KL-SOAP, stopped at step {SAVE_AT}')
  stopped = train(create(kl_soap), SAVE_AT)
  checkpoints.save(SAVE_AT, args=ocp.args.StandardSave(stopped))
  checkpoints.wait_until_finished()  # saving goes on in the background otherwise

  # The target tells Orbax the structure: with it, NamedTuples come back as what they were. Shapes are enough.
  target = jax.eval_shape(lambda: create(kl_soap))
  restored = checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(target))
  print(f'KL-SOAP, continued from step {restored.step}')
  continued = train(restored, STEPS)

same = jax.tree.map(lambda a, b: bool((a == b).all()), continued, whole)
print(f'every bit of parameters and state as without the stop: {all(jax.tree.leaves(same))}')
