"""Gradients inside `jax.shard_map`, as `layerwise` takes them."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from emopt_jax.distributed import entries
from emopt_jax.distributed.plan import Plan
from emopt_jax.distributed.transport import as_varying
from emopt_jax.matrices import leaf_path


def value_and_grad(loss: Callable[..., Any], plan: Plan, *, has_aux: bool = False) -> Callable[..., Any]:
  """Returns `jax.value_and_grad` of the mean of the ranks' losses, with its reductions left to `layerwise`.

  Inside `shard_map`, `jax.grad` sums the gradients of replicated parameters over all ranks by itself: an all-reduce
  where a reduce-scatter would do, and N times too large where each rank's loss is a mean. Here parameters are marked
  as varying first, so that their gradients stay local. Gradients of sharded parameters, which arrive summed, are
  divided by the number of ranks. The loss is averaged.

  Args:
    loss: Function of the parameters and further arguments that returns the mean loss of this rank's batch.
    plan: The plan of the optimizer.
    has_aux: As in `jax.value_and_grad`; what the function returns beside the loss stays local.

  Returns:
    A function of the same arguments that returns the loss and the gradients. Outside of `shard_map` it is
    `jax.value_and_grad`.

  Example:
    >>> from emopt_jax.distributed import plan_layerwise
    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.ones((2, 2))}
    >>> plan = plan_layerwise(params, jax.make_mesh((1,), ('data',)), 'data')
    >>> value, gradients = value_and_grad(lambda params: jnp.sum(params['kernel'] ** 2), plan)(params)
  """
  differentiate = jax.value_and_grad(loss, has_aux=has_aux)
  data = plan.axis + plan.replicas

  def local_value_and_grad(params, *args, **kwargs):
    if not entries.inside_shard_map(plan):
      return differentiate(params, *args, **kwargs)

    def mark(keys, leaf):
      return as_varying(leaf, entries.data_axes(plan, leaf_path(keys)))

    def average(keys, gradient):
      sharded = plan.sharded_axes(leaf_path(keys))
      ranks = math.prod(plan.mesh.shape[axis] for axis in data if axis in sharded)
      return gradient / ranks if ranks > 1 else gradient

    value, gradients = differentiate(jax.tree_util.tree_map_with_path(mark, params), *args, **kwargs)
    gradients = jax.tree_util.tree_map_with_path(average, gradients)
    if has_aux:
      return (lax.pmean(as_varying(value[0], data), data), value[1]), gradients
    return lax.pmean(as_varying(value, data), data), gradients

  return local_value_and_grad
