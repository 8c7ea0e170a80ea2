"""Layer-wise KL-SOAP, the same on one host and on many: `python examples/08_multihost.py`

  python examples/08_multihost.py                                                   # one host, all its devices
  sbatch examples/launch/slurm.sh                                                   # several hosts: Slurm
  kubectl apply -f examples/launch/kubernetes.yaml                                  # several hosts: Kubernetes
  python examples/launch/local.py -n 4 -- python examples/08_multihost.py           # four processes on this machine
  python examples/08_multihost.py --coordinator HOST:PORT --processes 4 --process 0 # by hand, one command per process

The run goes on from the last checkpoint in `--out`, a folder that all hosts share, on any number of processes and
devices: the numbers do not depend on it, but for the order in which the gradients of the ranks are added up.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import traceback

os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # its threads beside XLA's make QR on a CPU up to 20 times slower

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import emopt_jax
from emopt_jax import distributed

WIDTH, LAYERS, BATCH = 32, 6, 64  # the batch of all devices together
CHILD = 'EMOPT_MULTIHOST_CHILD'


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, default in {'steps': 100, 'save-every': 20, 'seed': 0}.items():
    parser.add_argument(f'--{name}', type=int, default=default, help=f'(default: {default})')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('runs', 'multihost'))
  parser.add_argument('--timeout', type=int, default=30, help='seconds until a silent process counts as dead')
  # What is not given, JAX finds out itself where it knows the cluster, as it does Slurm.
  index = os.environ.get('JOB_COMPLETION_INDEX')  # of an Indexed Job of Kubernetes
  parser.add_argument('--coordinator', help='HOST:PORT of process 0, with a free port')
  parser.add_argument('--processes', type=int, default=os.environ.get('SLURM_STEP_NUM_TASKS', 1))
  parser.add_argument('--process', type=int, default=index, help='0, 1, ...: the number of this one')
  return parser.parse_args()


def supervise(args):
  """Runs this script in a child process, and says how to go on where that fails; returns the exit status.

  No `except` could: JAX ends a process whose peer is dead with SIGABRT.
  """
  child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, CHILD: '1'})
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: child.send_signal(number))
  status = child.wait()
  if status:
    name = os.environ.get('SLURM_PROCID') if args.process is None else args.process
    how = signal.Signals(-status).name if status < 0 else f'exit status {status}'
    saved = [int(folder.name) for folder in args.out.glob('checkpoints/*') if folder.name.isdigit()]
    print(
      f'error: process {name} of {args.processes} ended with {how}. Where the lines above tell of connections, '
      f'heartbeats or unhealthy tasks, another process died or was cut off, and its own output says why. To go on from '
      f'step {max(saved, default=0)}, start all processes again, as many as you like, with the same --out {args.out}',
      file=sys.stderr,
      flush=True,
    )
  return 128 - status if status < 0 else status


def connect(args):
  by_hand = None not in (args.coordinator, args.process)
  jax.distributed.initialize(
    args.coordinator,
    args.processes,
    args.process,
    cluster_detection_method='deactivate' if by_hand else None,
    initialization_timeout=300,  # hosts of a cluster start minutes apart; one that never comes ends the others then
    heartbeat_timeout_seconds=args.timeout,
    shutdown_timeout_seconds=args.timeout,
  )


def init_params(seed):
  keys = jax.random.split(jax.random.key(seed), LAYERS)
  kernels = jax.vmap(lambda key: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5)(keys)
  return {f'layer_{i}': {'kernel': kernel, 'bias': jnp.zeros(WIDTH)} for i, kernel in enumerate(kernels)}


def loss_of(params, x, targets):
  for layer in params.values():
    x = x + jnp.tanh(x) @ layer['kernel'] + layer['bias']
  return ((x - targets) ** 2).mean()


def load_batch(seed, step, sharding):
  """Returns the batch of a step, of which each process makes only the rows of its own devices."""
  here = sharding.addressable_devices_indices_map((BATCH,)).values()
  rows = sorted({row for (index,) in here for row in range(*index.indices(BATCH))})
  # Every row has a generator of its own, so that it does not matter who makes it.
  inputs = np.stack([np.random.default_rng((seed, step, row)).normal(size=WIDTH) for row in rows])
  teacher = np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
  return [
    jax.make_array_from_process_local_data(sharding, x.astype(np.float32), (BATCH, WIDTH))
    for x in (inputs, np.sin(inputs @ teacher))
  ]


def train(args):
  mesh = jax.make_mesh((jax.device_count(),), ('data',))
  everywhere, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec('data'))
  params = jax.jit(init_params, static_argnums=0, out_shardings=everywhere)(args.seed)

  inner, others = emopt_jax.kl_soap(1e-2), optax.adamw(3e-3)
  plan = distributed.plan_layerwise(params, mesh, 'data', cost=distributed.soap_cost, inner=inner)
  optimizer = distributed.layerwise(inner, plan, others=others, max_norm=1.0)
  abstract_state = jax.eval_shape(optimizer.init, params)
  specs = distributed.state_specs(abstract_state, plan)

  def step_of(params, state, batch):
    loss, gradients = distributed.value_and_grad(loss_of, plan)(params, *batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  whole, rows = PartitionSpec(), PartitionSpec('data')
  mapped = jax.shard_map(step_of, mesh=mesh, in_specs=(whole, specs, rows), out_specs=(whole, specs, whole))
  train_step = jax.jit(mapped, donate_argnums=(0, 1))

  # Checkpoints hold the state of the optimizer without a mesh, which fits any number of devices.
  plain = optax.chain(optax.clip_by_global_norm(1.0), emopt_jax.route(inner, others))
  logical = jax.eval_shape(plain.init, params)
  # Saving is synchronous because the next step reuses (donates) the very buffers that are being written.
  options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
  checkpoints = ocp.CheckpointManager((args.out / 'checkpoints').absolute(), options=options)
  first = jax.process_index() == 0
  if first:
    print(f'{jax.process_count()} processes, {jax.device_count()} devices\n{plan}', flush=True)
  if done := checkpoints.latest_step() or 0:
    shardings = {
      'params': jax.tree.map(lambda _: everywhere, params),
      'opt_state': distributed.logical_shardings(logical, plan),
    }
    like = jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      {'params': params, 'opt_state': logical},
      shardings,
    )
    restored = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
    params, state = restored['params'], distributed.physical_state(restored['opt_state'], plan, abstract_state)
    if first:
      print(f'goes on from step {done}', flush=True)
  else:
    state = jax.jit(optimizer.init, out_shardings=distributed.state_shardings(abstract_state, plan))(params)

  for step in range(done + 1, args.steps + 1):
    params, state, loss = train_step(params, state, load_batch(args.seed, step, by_rows))
    if step % 10 == 0 or step == args.steps:
      loss = float(loss)
      if first:
        print(f'step {step}  loss {loss:.6f}', flush=True)
    if step % args.save_every == 0 or step == args.steps:
      saved = {'params': params, 'opt_state': distributed.logical_state(state, plan, logical)}
      checkpoints.save(step, args=ocp.args.StandardSave(saved))
  if first:
    print(f'done: {max(done, args.steps)} steps, checkpoints in {args.out}', flush=True)


def main():
  args = parse_arguments()
  if args.processes > 1 and CHILD not in os.environ:
    sys.exit(supervise(args))
  try:
    if args.processes > 1:
      connect(args)
    train(args)
  except BaseException:
    # An orderly exit would wait for the other processes, which wait for this one.
    traceback.print_exc()
    os._exit(1)


if __name__ == '__main__':
  main()
