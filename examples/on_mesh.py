"""What `train_lm.py --mesh` needs: the mesh, and checkpoints that fit any mesh."""

import math
import sys

import jax
import orbax.checkpoint as ocp

from emopt_jax import distributed


def make_mesh(text, batch):
  """Returns the mesh of `--mesh data=4,model=2`, or None for an empty text; before anything runs on a device."""
  if not text:
    return None
  try:
    sizes = {name: int(size) for name, size in (axis.split('=') for axis in text.split(','))}
  except ValueError:
    sizes = {}
  if 'data' not in sizes or set(sizes) - {'data', 'model'} or min(sizes.values()) < 1 or batch % sizes['data']:
    sys.exit(f'error: --mesh must be data=N or data=N,model=M, with --batch a multiple of N, not {text}')
  jax.config.update('jax_num_cpu_devices', math.prod(sizes.values()))
  if jax.device_count() < math.prod(sizes.values()):
    sys.exit(f'error: --mesh {text} needs {math.prod(sizes.values())} devices, here are {jax.device_count()}')
  axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)


def place(tree, plan):
  """Returns parameters or state on the devices of the plan."""
  return tree if plan is None else jax.device_put(tree, distributed.state_shardings(tree, plan))


def to_checkpoint(state, plain, plan):
  """Returns the state as it is saved: as it would be without a mesh, so that a run resumes on any."""
  if plan is None:
    return state
  like = jax.eval_shape(plain.init, state['params'])
  return state | {'opt_state': distributed.logical_state(state['opt_state'], plan, like)}


def restore(checkpoints, step, state, plain, plan):
  """Returns the state saved after a step, in the form of the given one."""
  if plan is None:
    return checkpoints.restore(step, args=ocp.args.StandardRestore(state))
  like = {'params': state['params'], 'opt_state': jax.eval_shape(plain.init, state['params'])}
  shardings = {
    'params': distributed.state_shardings(state['params'], plan),
    'opt_state': distributed.logical_shardings(like['opt_state'], plan),
  }
  like = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, shardings)
  saved = checkpoints.restore(step, args=ocp.args.StandardRestore(like))
  return saved | {'opt_state': distributed.physical_state(saved['opt_state'], plan, state['opt_state'])}
