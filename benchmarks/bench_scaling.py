"""How optimizers grow: a step's time with the width, the program with the layers, the memory with the parameters.

    OPENBLAS_NUM_THREADS=1 python benchmarks/bench_scaling.py [--tables time program memory] [--widths 64 128 256 512]

- time: a step on the matrices of two layers of each width, as in bench_step.py.
- program: seconds of tracing and lowering and of compiling, from empty caches, for layers (--layers) that are separate
  leaves or, as scanned layers are, stacks [layers, in, out], and what the compiled program holds; a product or a
  factorization of a whole batch counts once.
- memory: bytes of the state, of the temporaries of a step, and of the donated state that the step does not reuse.
"""

import collections
import itertools
import re
import statistics

import hlo
import jax
import jax.numpy as jnp
import measure
import optax
from bench_step import REFERENCE, competitors, kl_soap_with, measure_steps

import emopt_jax

TABLES = ('time', 'program', 'memory')
TIMED = ('optax.adamw', REFERENCE, 'muon', 'kl_soap', 'kl_soap, blocks of the width', 'kl_soap, one-sided')
TIMED_LAYERS = 2

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PRODUCT = re.compile(r'gemm|matmul')
_FACTORIZATION = re.compile(r'(lapack|cusolver).*_[a-z]*(geqrf|syevd|syevj|heevd|potrf|gesdd|gesvd|gesvdj)')


def count_operations(text: str) -> dict[str, int]:
  """Returns how many products, factorizations and loops the text of a compiled program holds."""
  counts: dict[str, int] = collections.Counter()
  for instructions in hlo.parse(text)[0].values():
    for one in instructions:
      target = _TARGET.search(one.text)
      name = target[1] if target and one.opcode == 'custom-call' else ''
      counts['products'] += one.opcode in ('dot', 'convolution') or bool(_PRODUCT.search(name))
      counts['factorizations'] += bool(_FACTORIZATION.search(name))
      counts['loops'] += one.opcode == 'while'
  return dict(counts)


def time_rows(width: int, rounds: int):
  """Yields the rows of one width in the table of times."""
  parameters = measure.transformer_matrices(width, TIMED_LAYERS)
  optimizers = {name: one for name, one in competitors(width).items() if name in TIMED}
  measured = measure_steps(optimizers, {}, parameters, measure.gradients_of(parameters), rounds)
  for name in TIMED:
    seconds = measured[name][0]
    yield name, width, 1e3 * statistics.median(seconds), measure.median_ratio(seconds, measured[REFERENCE][0])


def layers_of(width: int, layers: int, leaves: str) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of as many layers, as separate leaves or stacked `[layers, in, out]`."""
  if leaves == 'separate':
    return jax.eval_shape(lambda: measure.transformer_matrices(width, layers))
  return jax.eval_shape(jax.vmap(lambda _: measure.transformer_matrices(width, 1)), jnp.arange(layers))


def program_rows(width: int, layer_counts: list[int]):
  """Yields the rows of the table of programs."""
  jax.jit(jnp.sin).lower(1.0).compile()  # what a process does once is nobody's
  axes = emopt_jax.MatrixAxes(-2, -1)
  optimizers = {
    'optax.adamw': optax.adamw(0.01),
    'muon': emopt_jax.muon(0.01, axes=axes),
    'kl_soap': emopt_jax.kl_soap(0.01, axes=axes),
  }
  for name, leaves in itertools.product(optimizers, ('separate', 'stacked')):
    first = None
    for layers in layer_counts:
      parameters = layers_of(width, layers, leaves)
      state = jax.eval_shape(optimizers[name].init, parameters)
      jax.clear_caches()
      compiled = measure.compile_timed(optimizers[name].update, parameters, state, parameters)
      first = first or compiled.seconds
      counts = count_operations(compiled.program.as_text())
      seconds = compiled.lower_seconds, compiled.compile_seconds, compiled.seconds / first
      yield name, leaves, layers, *seconds, counts['products'], counts['factorizations'], counts['loops']


def memory_recipes(width: int) -> dict[str, optax.GradientTransformation]:
  return {
    'optax.adamw': optax.adamw(0.01),
    'muon': emopt_jax.muon(0.01),
    'muon, mu_dtype=bfloat16': emopt_jax.muon(0.01, mu_dtype=jnp.bfloat16),
    'soap': emopt_jax.soap(0.01),
    'kl_soap': emopt_jax.kl_soap(0.01),
    'scale_by_soap, mu_dtype=bfloat16': emopt_jax.scale_by_soap(mu_dtype=jnp.bfloat16),
    'kl_soap, block_size=width': kl_soap_with(block_size=width),
    'kl_soap, max_dim=width (one-sided)': kl_soap_with(max_dim=width),
    'shampoo': emopt_jax.shampoo(0.01),
  }


def memory_rows(width: int, layers: int):
  """Yields the rows of the table of memory."""
  parameters = jax.eval_shape(lambda: measure.transformer_matrices(width, layers))
  size = sum(p.size for p in parameters.values())
  for name, optimizer in memory_recipes(width).items():
    state = jax.eval_shape(optimizer.init, parameters)
    memory = measure.compile_timed(optimizer.update, parameters, state, parameters, donate=1).program.memory_analysis()
    kept = max(measure.nbytes(state) - memory.alias_size_in_bytes, 0)
    yield name, measure.nbytes(state) / size, memory.temp_size_in_bytes, memory.temp_size_in_bytes / size, kept


def main() -> None:
  parser = measure.make_parser(__doc__)
  parser.add_argument('--tables', nargs='+', choices=TABLES, default=TABLES)
  parser.add_argument('--widths', type=int, nargs='+', default=[64, 128, 256, 512], help='of the table of times')
  parser.add_argument('--rounds', type=int, default=7, help='of the table of times')
  parser.add_argument('--layers', type=int, nargs='+', default=[4, 48], help='of the programs; memory takes the first')
  parser.add_argument('--width', type=int, default=64, help='of the programs and of memory')
  arguments = parser.parse_args()

  print(measure.header())
  if 'time' in arguments.tables:
    print(f'\nStep time, {TIMED_LAYERS} layers, float32, median of {arguments.rounds} rounds\n')
    columns = {'optimizer': '', 'width': 'd', 'ms a step': '.2f', f'against {REFERENCE}': '.3f'}
    rows = (row for width in arguments.widths for row in time_rows(width, arguments.rounds))
    settings = {'layers': TIMED_LAYERS, 'rounds': arguments.rounds}
    measure.print_table('bench_scaling time', columns, rows, settings=settings, json_file=arguments.json)
  if 'program' in arguments.tables:
    print(f'\nPrograms, layers of width {arguments.width}\n')
    columns = {'optimizer': '', 'leaves': '', 'layers': 'd', 'trace + lower s': '.2f', 'compile s': '.2f'}
    columns |= {'both of the first': '.2f', 'products': 'd', 'factorizations': 'd', 'loops': 'd'}
    rows = program_rows(arguments.width, arguments.layers)
    settings = {'width': arguments.width}
    measure.print_table('bench_scaling program', columns, rows, settings=settings, json_file=arguments.json)
  if 'memory' in arguments.tables:
    print(f'\nMemory, {arguments.layers[0]} layers of width {arguments.width}, float32 parameters\n')
    columns = {'optimizer': '', 'state bytes per parameter': '.2f', 'bytes of temporaries': ',d'}
    columns |= {'of these per parameter': '.2f', 'donated bytes not reused': ',d'}
    rows = memory_rows(arguments.width, arguments.layers[0])
    settings = {'width': arguments.width, 'layers': arguments.layers[0]}
    measure.print_table('bench_scaling memory', columns, rows, settings=settings, json_file=arguments.json)


if __name__ == '__main__':
  main()
