"""What is refused, and that the message names the leaf or the axis and the mend."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import emopt_jax
from emopt_jax import distributed
from tests.distributed import problems

PARAMS = {'up': np.ones((8, 16), np.float32), 'down': np.ones((16, 8), np.float32), 'bias': np.ones(16, np.float32)}


def mesh():
  return problems.mesh_of((4, 2), ('data', 'model'))


def make(params=PARAMS, **arguments):
  plan = distributed.plan_layerwise(params, mesh(), 'data', **arguments)
  return plan, distributed.layerwise(emopt_jax.muon(0.1), plan, others=optax.sgd(0.1))


@pytest.mark.parametrize('arguments', [{'axis': 'batch'}, {'axis': ('data', 'batch')}, {'replicas': 'batch'}])
def test_unknown_axis(arguments):
  with pytest.raises(ValueError, match=r"no axis 'batch'.*\('data', 'model'\)"):
    distributed.plan_layerwise(PARAMS, mesh(), **({'axis': 'data'} | arguments))


@pytest.mark.parametrize('arguments', [{'axis': ()}, {'axis': 'data', 'replicas': 'data'}])
def test_axis_missing_or_twice(arguments):
  with pytest.raises(ValueError, match='name at least one axis, and none twice'):
    distributed.plan_layerwise(PARAMS, mesh(), **arguments)


def test_spec_that_does_not_fit():
  with pytest.raises(ValueError, match=r"leaf 'up' of shape \(8, 16\).*names the axis 'batch'"):
    make(specs={'up': P('batch'), 'down': P(), 'bias': P()})
  with pytest.raises(ValueError, match=r"leaf 'bias' of shape \(16,\).*more entries"):
    make(specs={'up': P(), 'down': P(), 'bias': P(None, 'data')})
  with pytest.raises(ValueError, match=r"leaf 'up' of shape \(6, 16\): a dimension of 6 cannot be sharded evenly"):
    make(PARAMS | {'up': np.ones((6, 16), np.float32)}, specs={'up': P('data'), 'down': P(), 'bias': P()})
  with pytest.raises(ValueError, match=r"leaf 'bias' has no spec: give specs for every leaf"):
    make(specs={'up': P(), 'down': P()})


def test_leaf_without_axes():
  with pytest.raises(ValueError, match=r"leaf 'layers/kernel' of shape \(3, 8, 16\) is not a matrix: give its axes"):
    make({'layers': {'kernel': np.ones((3, 8, 16), np.float32)}})


def test_no_optimizer_for_others():
  plan, _ = make()
  with pytest.raises(ValueError, match=r"leaf 'bias' of shape \(16,\) is no matrix of the plan: .*others=optax.adamw"):
    distributed.layerwise(emopt_jax.muon(0.1), plan)


def test_parameters_of_another_plan():
  _, optimizer = make()
  state = optimizer.init(PARAMS)
  with pytest.raises(ValueError, match=r"leaf 'side' of shape \(8, 8\) of the gradients is not in the plan"):
    optimizer.update(PARAMS | {'side': np.ones((8, 8), np.float32)}, state, PARAMS)
  with pytest.raises(
    ValueError, match=r"leaf 'down' of the gradients has shape \(8, 8\), the plan was made for \(16, 8"
  ):
    optimizer.update(PARAMS | {'down': np.ones((8, 8), np.float32)}, state, PARAMS)
  with pytest.raises(ValueError, match=r"leaf 'up' of the plan is not in the parameters"):
    optimizer.init({'down': PARAMS['down'], 'bias': PARAMS['bias']})


@pytest.mark.parametrize('missing', ['bias', 'up'])
def test_leaf_without_gradient(missing):
  _, optimizer = make()
  state = optimizer.init(PARAMS)
  match = rf"leaf '{missing}' of shape \({PARAMS[missing].shape[0]},.* has no gradient: give zeros, or freeze it"
  for gradients in (PARAMS | {missing: None}, {path: leaf for path, leaf in PARAMS.items() if path != missing}):
    for params in (PARAMS, None):
      with pytest.raises(ValueError, match=match):
        optimizer.update(gradients, state, params)


def test_leaf_that_another_optimizer_has_needs_no_gradient():
  _, optimizer = make()
  both = optax.partition({'here': optimizer, 'there': optax.sgd(0.5)}, {'up': 'here', 'down': 'here', 'bias': 'there'})
  updates, _ = both.update(PARAMS, both.init(PARAMS), PARAMS)
  np.testing.assert_array_equal(updates['bias'], -0.5 * PARAMS['bias'])


@pytest.mark.parametrize('max_norm', [0.0, -1.0, float('nan')])
def test_norm_that_is_not_positive(max_norm):
  plan, _ = make()
  with pytest.raises(ValueError, match='max_norm must be positive'):
    distributed.layerwise(emopt_jax.muon(0.1), plan, others=optax.sgd(0.1), max_norm=max_norm)


def test_state_of_another_plan():
  _, optimizer = make()
  other = {'up': np.ones((8, 24), np.float32), 'bias': PARAMS['bias']}
  _, other_optimizer = make(other)
  with pytest.raises(ValueError, match=r"classes \['8x24'\], the plan \['16x8', '8x16'\].*physical_state"):
    optimizer.update(PARAMS, other_optimizer.init(other), PARAMS)
  # The same classes, but dealt to another number of ranks.
  plan = distributed.plan_layerwise(PARAMS, problems.mesh_of((8,), ('data',)), 'data')
  on_eight = distributed.layerwise(emopt_jax.muon(0.1), plan, others=optax.sgd(0.1))
  with pytest.raises(ValueError, match=r"class '8x16'.*has 8 rows, that of the plan 4.*physical_state"):
    optimizer.update(PARAMS, on_eight.init(PARAMS), PARAMS)


def inside(optimizer, plan, gradients_of, axis_names=None):
  state = jax.jit(optimizer.init)(PARAMS)
  specs = distributed.state_specs(state, plan)
  update = lambda p, s: optimizer.update(gradients_of(p), s, p)[0]  # noqa: E731
  mapped = jax.shard_map(
    update, mesh=mesh(), in_specs=(P(), specs), out_specs=P(), **({'axis_names': axis_names} if axis_names else {})
  )
  return jax.jit(mapped)(PARAMS, state)


def test_gradients_already_reduced():
  plan, optimizer = make()
  with pytest.raises(ValueError, match=r"the gradient of leaf 'bias' of shape \(16,\) is reduced over 'data' already"):
    inside(optimizer, plan, lambda params: params)


def test_gradients_that_vary_where_parameters_do_not():
  plan, optimizer = make()
  mark = lambda p: jax.tree.map(lambda x: jax.lax.pcast(x, ('data', 'model'), to='varying'), p)  # noqa: E731
  with pytest.raises(ValueError, match=r"leaf 'bias' of shape \(16,\) varies over 'model'.*name the axis in the plan"):
    inside(optimizer, plan, mark)


def test_axis_that_is_not_manual():
  _, optimizer = make()
  with pytest.raises(ValueError, match=r"manual over \('model',\), but the plan communicates over 'data'"):
    state = jax.eval_shape(optimizer.init, PARAMS)
    update = lambda p: optimizer.update(p, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state), p)[0]  # noqa: E731
    jax.jit(jax.shard_map(update, mesh=mesh(), in_specs=P(), out_specs=P(), axis_names={'model'}))(PARAMS)


def test_more_numbers_on_a_device_than_int32_counts():
  params = {f'layer_{i}': {'kernel': jax.ShapeDtypeStruct((32768, 32768), jnp.bfloat16)} for i in range(4)}
  with pytest.raises(ValueError, match=r'own 2,147,483,648 numbers of 32768x32768, .*: deal them over more devices'):
    distributed.plan_layerwise(params, jax.sharding.AbstractMesh((2,), ('data',)), 'data')
