"""A transformer as it is trained: in the shape of a GPT-2 or of a Llama, whole on every device or sharded (FSDP)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec


class Decoder(NamedTuple):
  """A decoder: attention with rotary positions, a feed-forward part, RMS norms; float32 parameters, bfloat16 products.

  Attributes:
    layers, width, hidden, heads, vocabulary: Its shape.
    gated: Whether the feed-forward part is SwiGLU, with a third matrix, and the head not the embedding (Llama).
    scanned: Whether the layers are stacked, `[layers, in, out]`, and scanned.
    batch: Sequences per device.
    context: Tokens in a sequence.
  """

  layers: int
  width: int
  hidden: int
  heads: int
  vocabulary: int
  gated: bool
  scanned: bool
  batch: int
  context: int

  def shapes(self) -> dict:
    d, f = self.width, self.hidden
    block = {name: (d, d) for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj')}
    block |= {'up_proj': (d, f), 'down_proj': (f, d), 'norm_1': (d,), 'norm_2': (d,)}
    block |= {'gate_proj': (d, f)} if self.gated else {}
    shapes = {'embedding': (self.vocabulary, d), 'norm': (d,)} | ({'head': (self.vocabulary, d)} if self.gated else {})
    if self.scanned:
      return shapes | {'blocks': {name: (self.layers, *shape) for name, shape in block.items()}}
    return shapes | {f'block_{i}': dict(block) for i in range(self.layers)}

  def loss(self, params, tokens: jax.Array, specs) -> jax.Array:
    """Returns the mean loss of a batch `[batch, context + 1]`; every layer is gathered when it is needed, and again."""
    embedding = whole(params['embedding'], specs['embedding'])
    x = embedding[tokens[:, :-1]]
    if self.scanned:
      of_layer = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs['blocks'], is_leaf=is_spec)
      block = jax.checkpoint(lambda x, layer: self.block(x, gather(layer, of_layer)))
      x, _ = lax.scan(lambda x, layer: (block(x, layer), None), x, params['blocks'])
    else:
      for i in range(self.layers):
        block = jax.checkpoint(lambda x, layer, i=i: self.block(x, gather(layer, specs[f'block_{i}'])))
        x = block(x, params[f'block_{i}'])
    head = whole(params['head'], specs['head']) if self.gated else embedding
    logits = rms_norm(x, params['norm']) @ head.T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

  def block(self, x: jax.Array, layer) -> jax.Array:
    y = rms_norm(x, layer['norm_1'])
    q, k, v = ((y @ layer[f'{n}_proj']).reshape(*y.shape[:2], self.heads, -1) for n in 'qkv')
    y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = x + y.reshape(x.shape) @ layer['o_proj']
    y = rms_norm(x, layer['norm_2'])
    up = y @ layer['up_proj']
    return x + (jax.nn.silu(y @ layer['gate_proj']) * up if self.gated else jax.nn.gelu(up)) @ layer['down_proj']


def is_spec(node) -> bool:
  return isinstance(node, PartitionSpec)


def whole(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Returns a parameter in bfloat16, gathered: one collective per mesh axis, which a torus does along its rings."""
  leaf = leaf.astype(jnp.bfloat16)
  for dimension, axes in enumerate(spec):
    for axis in reversed((axes,) if isinstance(axes, str) else axes or ()):
      leaf = lax.all_gather(leaf, axis, axis=dimension, tiled=True)
  return leaf


def gather(layer, specs):
  return jax.tree.map(whole, layer, specs)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  y = x.astype(jnp.float32)
  return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
  """Rotary positions of `[batch, context, heads, features]`."""
  half = x.shape[-1] // 2
  angle = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
