"""The small GPT that `train_lm.py` trains."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

# Tensor parallelism: a layer that widens is sharded by its outputs, and the one that follows by its inputs.
BY_OUTPUTS, BY_INPUTS = ('qkv', 'up'), ('attention_out', 'down')


class Block(nnx.Module):
  def __init__(self, args, rngs):
    norm = functools.partial(nnx.RMSNorm, args.width, rngs=rngs)
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    # 2 * layers branches add up in the residual stream: each starts with that share of its variance.
    branch_end = nnx.initializers.variance_scaling(0.5 / args.layers, 'fan_in', 'truncated_normal')
    self.heads, self.attention_norm, self.mlp_norm = args.heads, norm(), norm()
    self.qkv = linear(args.width, 3 * args.width)
    self.attention_out = linear(args.width, args.width, kernel_init=branch_end)
    self.up = linear(args.width, 4 * args.width)
    self.down = linear(4 * args.width, args.width, kernel_init=branch_end)

  def __call__(self, x):
    qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3, self.heads, -1)
    query, key, value = jnp.unstack(qkv, axis=2)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + self.attention_out(mixed.reshape(x.shape))
    # Squared ReLU learns as well as GELU here, and spares a CPU a quarter of the step, which GELU's tanh takes.
    return x + self.down(jnp.square(jax.nn.relu(self.up(self.mlp_norm(x)))))


class GPT(nnx.Module):
  def __init__(self, args, rngs):
    self.embed = nnx.Embed(256, args.width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
    self.position = nnx.Embed(args.context, args.width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
    self.blocks = nnx.Sequential(*(Block(args, rngs) for _ in range(args.layers)))
    self.norm = nnx.RMSNorm(args.width, rngs=rngs)
    self.head = nnx.Linear(args.width, 256, use_bias=False, rngs=rngs)

  def __call__(self, tokens):  # bytes [batch, context] -> logits of the next bytes [batch, context, 256]
    return self.head(self.norm(self.blocks(self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])))))


def spec_of(path, axis='model'):
  """Returns how a parameter is sharded over the axis of a mesh."""
  name = path.split('/')[-2] if '/' in path else ''
  if name in BY_OUTPUTS:
    return PartitionSpec(None, axis)
  return PartitionSpec(axis) if name in BY_INPUTS else PartitionSpec()
