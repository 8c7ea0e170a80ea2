"""Times Newton-Schulz on one matrix against Optax's function with as many steps, and measures its accuracy.

    OPENBLAS_NUM_THREADS=1 python benchmarks/bench_newton_schulz.py [--shapes 256x1024 512x512] [--rounds 15]

Both take turns in one process, so that a machine that slows down slows both; read the ratios, not the milliseconds.
`ratio` is the median over the rounds of ours / Optax's (float32, same rows). On a machine that others use too, --clock
cpu measures the seconds that the process computed instead of those that passed; with
XLA_FLAGS=--xla_cpu_multi_thread_eigen=false, or waiting threads count. GFLOP/s are on the operations of the steps that
were really done, of the machine's rate: that of a float32 (bfloat16) product of the matrix's own shape, in the same
rounds. `error` is the spectral norm |U U^T - I|.
"""

import argparse
import platform
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib._muon import MuonDimensionNumbers, orthogonalize_via_newton_schulz

import emopt_jax
from emopt_jax import newton_schulz
from emopt_jax.linalg.gram import step_cost
from emopt_jax.linalg.polar import restart_lengths

SHAPES = ('256x256', '256x1024', '512x2048', '768x3072')
CASES = (
  ('QUINTIC', 5, None),
  ('QUINTIC', 5, jnp.bfloat16),
  ('POLAR_EXPRESS', 16, None),
  ('POLAR_EXPRESS', 16, jnp.bfloat16),
)
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}


def matrix_product(a, b, dtype):
  return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32, precision='highest')


def measure(functions, clock, rounds):
  """Returns for each name the seconds of compiling and of every round, and the result."""
  times, compiling, results = {name: [] for name in functions}, {}, {}
  compiled = {}
  for name, (function, *operands) in functions.items():
    start = time.perf_counter()
    compiled[name] = jax.jit(function).lower(*operands).compile(), operands
    compiling[name] = time.perf_counter() - start
  for _ in range(rounds + 1):
    for name, (function, operands) in compiled.items():
      start = clock()
      results[name] = jax.block_until_ready(function(*operands))
      times[name].append(clock() - start)
  # The first run after compiling is not counted.
  return compiling, {name: measured[1:] for name, measured in times.items()}, results


def bench(m: int, n: int, clock, rounds: int) -> None:
  x = jax.random.normal(jax.random.key(0), (m, n))
  square = jax.random.normal(jax.random.key(1), (m, m))
  for table, steps, dtype in CASES:
    coefficients = getattr(emopt_jax, table)
    rows = coefficients.schedule(steps)

    def optax_function(x, rows=rows, steps=steps):
      return orthogonalize_via_newton_schulz(
        x, jnp.asarray(rows, jnp.float32), steps, 'frobenius', 1e-8, MuonDimensionNumbers()
      )

    def our_function(x, coefficients=coefficients, steps=steps, dtype=dtype):
      return newton_schulz(x, coefficients=coefficients, steps=steps, dtype=dtype)

    compiling, times, results = measure(
      {
        'optax': (optax_function, x),
        'ours': (our_function, x),
        'product': (lambda a, b, dtype=dtype: matrix_product(a, b, dtype or jnp.float32), square, x),
      },
      clock,
      rounds,
    )
    lengths = restart_lengths(m, n, rows, dtype)
    y = np.asarray(results['ours'], np.float64)
    error = np.linalg.norm(y @ y.T - np.eye(m), 2)
    rate = step_cost(m, n, rows, lengths) / statistics.median(times['ours']) / 1e9
    machine = 2 * m**2 * n / statistics.median(times['product']) / 1e9
    ratio = statistics.median(a / b for a, b in zip(times['ours'], times['optax'], strict=True))
    restarts = 'plain' if len(lengths) == steps else '+'.join(map(str, lengths))
    print(
      f'| {m} x {n} | {steps} | {table} | {jnp.dtype(dtype or jnp.float32).name} | {restarts} '
      f'| {1e3 * statistics.median(times["ours"]):.2f} | {ratio:.3f} | {error:.0e} '
      f'| {rate:.0f} of {machine:.0f} | {compiling["ours"]:.1f} |',
      flush=True,
    )


def commit() -> str:
  result = subprocess.run(['git', 'describe', '--always', '--dirty'], capture_output=True, text=True, check=False)
  return result.stdout.strip() or 'unknown'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--shapes', nargs='*', default=SHAPES, help='rows x columns, as in 256x1024')
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--clock', choices=CLOCKS, default='wall')
  arguments = parser.parse_args()

  device = jax.devices()[0].device_kind
  print(f'{device}, Python {platform.python_version()}, jax {jax.__version__}, optax {optax.__version__}, {commit()}')
  print(f'median of {arguments.rounds} rounds, {arguments.clock} clock\n')
  print('| shape | steps | table | operands | steps between restarts | ms | ratio | error | GFLOP/s | compile s |')
  print('| --- | ---: | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |')
  for shape in arguments.shapes:
    m, n = sorted(map(int, shape.split('x')))
    bench(m, n, CLOCKS[arguments.clock], arguments.rounds)


if __name__ == '__main__':
  main()
