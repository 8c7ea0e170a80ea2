"""Who gets which optimizer, and at what cost: `python examples/02_routing.py`

Shapes are enough for the report, so that it can be read before a large model is ever built.
"""

import jax
import jax.numpy as jnp
import optax

import emopt_jax

LAYERS, WIDTH, VOCABULARY = 12, 768, 50257


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


# A GPT-2 of the smallest size as `nn.scan` keeps it: every leaf of a block is stacked over the layers.
gpt = {
  'token_embed': {'embedding': shape(VOCABULARY, WIDTH)},
  'position_embed': {'embedding': shape(1024, WIDTH)},
  'blocks': {
    'norm_1': {'scale': shape(LAYERS, WIDTH)},
    'attention': {'qkv': {'kernel': shape(LAYERS, WIDTH, 3 * WIDTH)}, 'out': {'kernel': shape(LAYERS, WIDTH, WIDTH)}},
    'norm_2': {'scale': shape(LAYERS, WIDTH)},
    'mlp': {'up': {'kernel': shape(LAYERS, WIDTH, 4 * WIDTH)}, 'down': {'kernel': shape(LAYERS, 4 * WIDTH, WIDTH)}},
  },
  'final_norm': {'scale': shape(WIDTH)},
  'lm_head': {'kernel': shape(WIDTH, VOCABULARY)},
}
adamw = optax.adamw(3e-3)

# The batch axis is not to be guessed: [12, 768, 768] may be 12 matrices or a convolution. Count axes from the end, and
# the same declaration fits kernels that are not stacked.
stacked = emopt_jax.MatrixAxes(inputs=-2, outputs=-1)
print('Muon keeps one moment per entry; embeddings, norms and the head stay with AdamW, which keeps two:\n')
print(emopt_jax.describe_routing(gpt, emopt_jax.muon(0.02, axes=stacked), adamw, axes=stacked))


# A fused query-key-value kernel is three matrices side by side. Axes may also be a function of the parameters: the
# transforms call it with a tree in which the leaves of the other optimizer are masked out.
def axes_of(params):
  def axes(path, leaf):
    fused = 'qkv' in jax.tree_util.keystr(path)
    return emopt_jax.MatrixAxes(-2, -1, split=(-1, (WIDTH, WIDTH, WIDTH)) if fused else None)

  return jax.tree_util.tree_map_with_path(axes, params)


# Rules overrule the default, the first that matches a path decides: here the MLP goes back to AdamW. The last rule is
# misspelt, and the report says so instead of ignoring it.
rules = [('mlp/', 'other'), ('lm_heads', 'matrix')]
kl_soap = emopt_jax.kl_soap(0.01, axes=axes_of)
table = emopt_jax.describe_routing(gpt, kl_soap, adamw, rules=rules, axes=axes_of)
print('\nKL-SOAP on attention alone, with queries, keys and values apart:\n')
print(table)

# The table is data too. A training script can refuse to start when something went the wrong way.
assert {leaf.path for leaf in table.leaves if leaf.optimizer == 'matrix'} == {
  'blocks/attention/qkv/kernel',
  'blocks/attention/out/kernel',
}

# `route` takes the same arguments, and is an optax transformation like any other.
optimizer = optax.chain(optax.clip_by_global_norm(1.0), emopt_jax.route(kl_soap, adamw, rules=rules))
state = jax.eval_shape(optimizer.init, gpt)
gigabytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(state)) / 1e9
print(f'\nThe whole state of this optimizer takes {gigabytes:.2f} GB.')
