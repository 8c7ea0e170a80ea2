"""Compiles train steps for GPUs and TPUs that are not there, and reads what they communicate, and when.

    python benchmarks/aot_compile.py gpu [--only gpt2/8 7b/256] [--optimizer muon kl_soap] [--flags default separate]
    python benchmarks/aot_compile.py tpu

A step is `layerwise` inside `jax.shard_map` (entry A) on a transformer's loss, all of it abstract: parameters, state
and batch are shapes on the mesh of a described machine. It needs jax[cuda12] or jax[tpu], and no accelerator.
"""

import argparse
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# libtpu otherwise asks the cloud's metadata server what machine it is on.
os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}
os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-16')

import communication
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
from decoder import Decoder
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import emopt_jax
from emopt_jax import distributed

OPTIMIZER = 'optimizer'  # the scope of the update's instructions in a program
OPTIMIZERS = {
  'muon': (emopt_jax.muon(0.02), distributed.newton_schulz_cost),
  'kl_soap': (emopt_jax.kl_soap(0.01), distributed.soap_cost),
}
# Compiler options. GPU: XLA merges small reduce-scatters, and what is merged waits for the last gradient. TPU: nothing
# runs beside an all-to-all by default.
FLAGS = {
  'default': {},
  'separate': {'xla_gpu_reduce_scatter_combine_threshold_bytes': 1},
  'async-all-to-all': {'xla_tpu_enable_async_all_to_all': True},
}

MODELS = {
  'gpt2': Decoder(12, 768, 3072, 12, 50257, gated=False, scanned=False, batch=8, context=1024),
  'gpt2-scanned': Decoder(12, 768, 3072, 12, 50257, gated=False, scanned=True, batch=8, context=1024),
  '7b': Decoder(32, 4096, 11008, 32, 32000, gated=True, scanned=True, batch=1, context=2048),
}


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices, and how a model lies on them.

  Attributes:
    topology: Their name for XLA.
    mesh: Mesh axes and sizes.
    owners: Axes over which matrices are dealt.
    replicas: Axes over which owners are repeated.
    shards: Axes that shard the parameters (FSDP); none where they are replicated.
    flags: Sets of compiler options that are worth a look, of `FLAGS`.
  """

  topology: str
  mesh: Mapping[str, int]
  owners: tuple[str, ...]
  replicas: tuple[str, ...] = ()
  shards: tuple[str, ...] = ()
  flags: tuple[str, ...] = ('default', 'separate')

  def make_mesh(self, platform: str) -> Mesh:
    if platform == 'gpu':
      description = topologies.get_topology_desc(
        platform='cuda', topology_name='h100', target_config=H100, topology=self.topology
      )
      devices = np.array(description.devices).reshape(*self.mesh.values())
    else:
      description = topologies.get_topology_desc(platform='tpu', topology_name=self.topology)
      devices = topologies.make_mesh(description, tuple(self.mesh.values()), tuple(self.mesh)).devices
    return Mesh(devices, tuple(self.mesh), axis_types=(AxisType.Auto,) * len(self.mesh))


# A GPT-2 is small enough to be whole on every device. The 7B model is sharded over the GPUs of a host and, on several
# hosts, repeated (HSDP); its 224 matrices are dealt to 4 hosts, 7 to a GPU, and those 4 are repeated too.
MACHINES = {
  'gpu': {
    'gpt2/8': Machine('1x1x8', {'data': 8}, ('data',)),
    'gpt2/256': Machine('1x32x8', {'replica': 32, 'data': 8}, ('data',), ('replica',)),
    '7b/8': Machine('1x1x8', {'data': 8}, ('data',), shards=('data',)),
    '7b/256': Machine('1x32x8', {'replica': 8, 'owner': 4, 'data': 8}, ('owner', 'data'), ('replica',), ('data',)),
  },
  'tpu': {
    'gpt2-scanned/16': Machine('v5e:4x4', {'x': 4, 'y': 4}, ('x', 'y'), flags=('default',)),
    '7b/16': Machine('v5e:4x4', {'x': 4, 'y': 4}, ('x', 'y'), shards=('x', 'y'), flags=('default', 'async-all-to-all')),
  },
}

# An H100 SXM in the text format of XLA's GpuTargetConfigProto: its published limits.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 9 patch: 0 }
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def lower_step(model: Decoder, machine: Machine, mesh: Mesh, optimizer: str):
  """Returns the lowered step and the plan; all of it from shapes."""
  inner, cost = OPTIMIZERS[optimizer]

  def parameter(shape):
    stacked = model.scanned and shape[0] == model.layers
    is_vector = len(shape) - stacked == 1
    spec = PartitionSpec(*[None] * stacked, machine.shards) if machine.shards and not is_vector else PartitionSpec()
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

  params = jax.tree.map(parameter, model.shapes(), is_leaf=lambda node: isinstance(node, tuple))
  axes = emopt_jax.MatrixAxes(-2, -1)
  plan = distributed.plan_layerwise(params, mesh, machine.owners, replicas=machine.replicas, axes=axes, cost=cost)
  update = distributed.layerwise(inner, plan, others=optax.adamw(3e-4), max_norm=1.0)
  state = jax.eval_shape(update.init, params)
  jax.jit(update.init).lower(params)

  place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
  state = jax.tree.map(place, state, distributed.state_shardings(state, plan))
  specs, state_specs = distributed.state_specs(params, plan), distributed.state_specs(state, plan)
  ranks = machine.replicas + machine.owners
  tokens = jax.ShapeDtypeStruct(
    (model.batch * mesh.size, model.context + 1), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(ranks))
  )

  def body(params, state, tokens):
    loss, gradients = distributed.value_and_grad(lambda p, t: model.loss(p, t, specs), plan)(params, tokens)
    with jax.named_scope(OPTIMIZER):
      updates, state = update.update(gradients, state, params)
      return optax.apply_updates(params, updates), state, loss

  in_specs = (specs, state_specs, PartitionSpec(ranks))
  step = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=(specs, state_specs, PartitionSpec()))
  return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens), plan


def phase(scope: str) -> str:
  if f'/{OPTIMIZER}/' in scope:
    return OPTIMIZER
  return 'backward' if 'transpose(' in scope else 'forward'


def table(found: list[communication.Collective]) -> str:
  """Returns the collectives by phase, kind and whether they are in a loop."""
  lines = ['| phase | collective | count | runs a step | MiB sent | asynchronous | over products | of | MiB of these |']
  lines.append('| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |')
  groups: dict[tuple[str, str, bool], list[communication.Collective]] = {}
  for one in found:
    groups.setdefault((phase(one.scope), one.kind, bool(one.loops)), []).append(one)
  for (name, kind, in_loop), group in groups.items():
    hidden = [one for one in group if one.products]
    during = sorted({phase(scope) for one in hidden for scope in one.products})
    cells = [name, kind + ' in a loop' * in_loop, len(group), sum(one.runs for one in group), mebibytes(group)]
    cells += [sum(one.asynchronous for one in group), len(hidden), ', '.join(during), mebibytes(hidden)]
    lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
  return '\n'.join(lines)


def mebibytes(group: list[communication.Collective]) -> str:
  return f'{sum(one.sent for one in group) / 2**20:.1f}'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('platform', choices=list(MACHINES))
  programs = [name for machines in MACHINES.values() for name in machines]
  parser.add_argument('--only', nargs='*', choices=programs, help='by default all of the platform')
  parser.add_argument('--optimizer', nargs='*', default=['muon'], choices=list(OPTIMIZERS))
  parser.add_argument('--flags', nargs='*', choices=list(FLAGS), help='by default those that matter to the program')
  parser.add_argument('--dump', type=pathlib.Path, help='folder for the compiled programs')
  arguments = parser.parse_args()
  versions = f'jax {jax.__version__}, jaxlib {jaxlib.__version__}'
  for name, machine in MACHINES[arguments.platform].items():
    if arguments.only and name not in arguments.only:
      continue
    mesh = machine.make_mesh(arguments.platform)
    kind = mesh.devices.flat[0].device_kind
    for optimizer in arguments.optimizer:
      lowered, plan = lower_step(MODELS[name.split('/')[0]], machine, mesh, optimizer)
      for flags in arguments.flags or machine.flags:
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=FLAGS[flags] or None)
        seconds = time.perf_counter() - start
        report(f'{name}, {optimizer}, {flags} flags ({kind}, {versions})', plan, compiled, seconds)
        if arguments.dump:
          file = arguments.dump / f'{arguments.platform}_{name.replace("/", "_")}_{optimizer}_{flags}.hlo'
          file.write_text(compiled.as_text())


def report(title: str, plan: distributed.Plan, compiled, seconds: float) -> None:
  found = communication.collectives(compiled.as_text())
  memory = compiled.memory_analysis()
  inside = [one for one in found if any(phase(loop) == OPTIMIZER for loop in one.loops)]
  parts = [' + '.join(f'{one.name} {min(one.counts)}-{max(one.counts)}' for one in b.classes) for b in plan.bundles]
  print(f'\n{title}\n')
  print(
    f'mesh {dict(plan.mesh.shape)}, owners {plan.axis}, replicas {plan.replicas}; matrices an owner: {"; ".join(parts)}'
  )
  print(
    f'per device: arguments {memory.argument_size_in_bytes / 2**30:.2f} GiB, temporaries '
    f'{memory.temp_size_in_bytes / 2**30:.2f} GiB; compiled in {seconds:.0f} s; '
    f'collectives in loops of the optimizer: {len(inside) or "none"}'
  )
  sent = [one for one in found if phase(one.scope) == OPTIMIZER]
  hidden = mebibytes([one for one in sent if one.products])
  planned = sum(distributed.traffic_inside_shard_map(plan)) / 2**20
  print(
    f'the optimizer sends {mebibytes(sent)} MiB, by the plan {planned:.1f}; {hidden} of them beside matrix products\n'
  )
  print(table(found), flush=True)


if __name__ == '__main__':
  main()
