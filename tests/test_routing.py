"""Which leaf goes to which optimizer, and the report of it."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import MatrixAxes

# Path -> shape, for models as they come out of different libraries. True: a matrix.
FLAX_GPT = {
  'wte/embedding': ((512, 64), False),
  'wpe/embedding': ((128, 64), False),
  'block_0/ln_1/scale': ((64,), False),
  'block_0/attn/qkv/kernel': ((64, 192), True),
  'block_0/attn/qkv/bias': ((192,), False),
  'block_0/attn/out/kernel': ((64, 64), True),
  'block_0/mlp/up/kernel': ((64, 256), True),
  'block_0/mlp/down/kernel': ((256, 64), True),
  'ln_f/scale': ((64,), False),
  'ln_f/bias': ((64,), False),
  'lm_head/kernel': ((64, 512), False),
}
NNX = {
  'embed/embedding': ((512, 64), False),
  'blocks/0/attention/query/kernel': ((64, 4, 16), True),
  'blocks/0/attention/out/kernel': ((4, 16, 64), True),
  'blocks/0/attention/query/bias': ((4, 16), False),
  'blocks/0/norm1/scale': ((64,), False),
  'blocks/0/linear1/kernel': ((64, 256), True),
  'final_norm/scale': ((64,), False),
  'head/kernel': ((64, 512), False),
}
LINEN_SCANNED = {
  'params/Embed_0/embedding': ((512, 64), False),
  'params/layers/Dense_0/kernel': ((12, 64, 256), True),
  'params/layers/Dense_0/bias': ((12, 256), False),
  'params/layers/LayerNorm_0/scale': ((12, 64), False),
  'params/layers/RMSNorm_0/scale': ((12, 64), False),
  'params/logits_dense/kernel': ((64, 512), False),
}
TORCH = {
  'transformer/wte/weight': ((512, 64), False),
  'transformer/tok_emb/weight': ((512, 64), False),
  'transformer/h/0/attn/c_attn/weight': ((192, 64), True),
  'transformer/h/0/attn/c_attn/bias': ((192,), False),
  'transformer/h/0/mlp/c_fc/weight': ((256, 64), True),
  'transformer/h/0/ln_1/weight': ((64,), False),
  'model/embed_tokens/weight': ((512, 64), False),
  'model/layers/0/self_attn/q_proj/weight': ((64, 64), True),
  'model/layers/0/input_layernorm/weight': ((64,), False),
  'lm_head/weight': ((512, 64), False),
}
OTHERS = {
  'moe/router/kernel': ((64, 8), False),
  'moe/experts/w1': ((8, 64, 256), True),
  'moe/experts/w2': ((8, 256, 64), True),
  'patch_embed/kernel': ((16, 16, 3, 64), False),
  'stem/conv/kernel': ((3, 3, 3, 64), False),
  'mamba/conv1d/kernel': ((4, 1, 128), False),
  'Conv_0/kernel': ((3, 3, 16, 64), False),
  'pos_embedding': ((1, 128, 64), False),
  'classifier/kernel': ((64, 10), False),
  'multi_head_attention/query/kernel': ((64, 64), True),
  'unit/kernel': ((64, 1), False),
  'unembed/kernel': ((64, 512), False),
  'haiku/scanned/linear/w': ((12, 64, 64), True),
  'haiku/scanned/linear/b': ((12, 64), False),
  'scanned/layer_scale/gamma': ((12, 64), False),
}
MODELS = {'flax': FLAX_GPT, 'nnx': NNX, 'linen': LINEN_SCANNED, 'torch': TORCH, 'others': OTHERS}


def tree_of(paths):
  """Returns nested dicts of ShapeDtypeStructs."""
  tree = {}
  for path, (shape, _) in paths.items():
    *parents, name = path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return tree


@pytest.mark.parametrize('paths', MODELS.values(), ids=MODELS)
def test_default_routing(paths):
  table = emopt_jax.describe_routing(tree_of(paths), axes=MatrixAxes(-2, -1))
  assert {leaf.path: leaf.optimizer for leaf in table.leaves} == {
    path: 'matrix' if matrix else 'other' for path, (_, matrix) in paths.items()
  }
  assert {leaf.path: leaf.shape for leaf in table.leaves} == {path: shape for path, (shape, _) in paths.items()}


def test_integers_are_no_matrices():
  assert not emopt_jax.default_is_matrix('mlp/kernel', jax.ShapeDtypeStruct((64, 64), jnp.int32))


def test_printed_table():
  params = tree_of({'embed/embedding': ((256, 8), 0), 'mlp/kernel': ((8, 32), 1), 'mlp/bias': ((32,), 0)})
  table = emopt_jax.describe_routing(params, emopt_jax.muon(0.1), optax.adamw(0.1), rules=[('lm_head', 'matrix')])
  # Adam keeps two float32 numbers a parameter; Muon one, and an int32 count of skipped gradients.
  assert str(table).splitlines() == [
    'path             shape     matrices     optimizer          state bytes',
    '---------------  --------  -----------  -----------------  -----------',
    'embed/embedding  (256, 8)               other                   16,384',
    'mlp/bias         (32,)                  other                      256',
    'mlp/kernel       (8, 32)   1 x (8, 32)  matrix                   1,028',
    '---------------  --------  -----------  -----------------  -----------',
    '3 leaves                                1 matrix, 2 other       17,668',
    "rule matches no leaf: 'lm_head' -> 'matrix'",
  ]


def test_state_bytes_of_the_table_are_those_of_the_state():
  params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), tree_of(LINEN_SCANNED | {'w/kernel': ((6, 4), True)}))
  axes = lambda tree: jax.tree.map(lambda leaf: MatrixAxes(-2, -1), tree)  # noqa: E731
  matrix, other = emopt_jax.kl_soap(0.1, axes=axes), optax.adamw(0.1)
  table = emopt_jax.describe_routing(params, matrix, other, axes=axes)
  state = emopt_jax.route(matrix, other).init(params)
  counts = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim == 0)
  assert sum(leaf.state_bytes for leaf in table.leaves) == sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - counts
  (kernel,) = [leaf for leaf in table.leaves if leaf.path == 'w/kernel']
  # Two moments, two factors, two bases with eigenvalues in float32; three counts in int32.
  assert kernel.state_bytes == 4 * (2 * 24 + 2 * (36 + 16) + (6 + 4) + 2)
  (scanned,) = [leaf for leaf in table.leaves if leaf.path.endswith('Dense_0/kernel')]
  assert scanned.matrices == '12 x (64, 256)'


def test_table_says_where_axes_are_needed():
  params = tree_of({'layers/kernel': ((12, 64, 256), True), 'qkv/kernel': ((64, 192), True)})
  table = emopt_jax.describe_routing(params)
  assert {leaf.path: leaf.matrices for leaf in table.leaves} == {
    'layers/kernel': 'needs axes=',
    'qkv/kernel': '1 x (64, 192)',
  }
  split = {'layers': MatrixAxes(-2, -1), 'qkv': MatrixAxes(0, 1, split=(1, (128, 64)))}
  split = emopt_jax.describe_routing(params, axes=split)
  assert [leaf.matrices for leaf in split.leaves] == ['12 x (64, 256)', '1 x (64, 128), 1 x (64, 64)']
  assert all(leaf.state_bytes is None for leaf in split.leaves)


def test_first_matching_rule_decides():
  rules = [(r'block_0/mlp', 'other'), (r'lm_head/kernel$', 'matrix'), (r'mlp|head', 'other'), ('nowhere', 'matrix')]
  table = emopt_jax.describe_routing(tree_of(FLAX_GPT), rules=rules)
  matrices = {leaf.path for leaf in table.leaves if leaf.optimizer == 'matrix'}
  assert matrices == {'block_0/attn/qkv/kernel', 'block_0/attn/out/kernel', 'lm_head/kernel'}
  assert table.unused_rules == (('nowhere', 'matrix'),)


def test_own_rule_for_matrices():
  table = emopt_jax.describe_routing(tree_of(FLAX_GPT), is_matrix=lambda path, leaf: leaf.shape == (64, 64))
  assert [leaf.path for leaf in table.leaves if leaf.optimizer == 'matrix'] == ['block_0/attn/out/kernel']


@pytest.mark.parametrize(
  'rules, message',
  [
    ([('mlp', 'muon')], "rule 'mlp' -> 'muon': the name must be 'matrix' or 'other'"),
    (
      [('(', 'matrix')],
      "rule '(' -> 'matrix' is no regular expression: missing ), unterminated subpattern at position 0",
    ),
  ],
)
def test_bad_rules(rules, message):
  with pytest.raises(ValueError, match=f'^{re.escape(message)}$'):
    emopt_jax.route(optax.identity(), optax.identity(), rules=rules)
  with pytest.raises(ValueError, match=f'^{re.escape(message)}$'):
    emopt_jax.describe_routing({}, rules=rules)


def test_route_equals_a_partition_by_hand():
  draw = np.random.default_rng(0).standard_normal
  params = {
    'wte': {'embedding': jnp.asarray(draw((8, 4)), jnp.float32)},
    'up': {'kernel': jnp.asarray(draw((4, 6)), jnp.float32), 'bias': jnp.asarray(draw(6), jnp.float32)},
    'down': {'kernel': jnp.asarray(draw((6, 4)), jnp.float32)},
  }
  matrix, other = emopt_jax.muon(0.1), optax.adamw(0.01)
  routed = emopt_jax.route(matrix, other, rules=[('down', 'other')])
  state, by_hand, rest = routed.init(params), None, None
  kernel = lambda tree: {'up': {'kernel': tree['up']['kernel']}}  # noqa: E731
  others = lambda tree: {'wte': tree['wte'], 'bias': tree['up']['bias'], 'down': tree['down']}  # noqa: E731
  by_hand, rest = matrix.init(kernel(params)), other.init(others(params))
  gradients = params
  for _ in range(3):
    updates, state = routed.update(gradients, state, params)
    expected, by_hand = matrix.update(kernel(gradients), by_hand, kernel(params))
    expected_others, rest = other.update(others(gradients), rest, others(params))
    chex.assert_trees_all_equal(kernel(updates), expected)
    chex.assert_trees_all_equal(others(updates), expected_others)
    gradients = jax.tree.map(lambda g, u: 0.9 * g - u, gradients, updates)
