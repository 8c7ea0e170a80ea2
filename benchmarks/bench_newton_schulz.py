"""Times Newton-Schulz on one matrix against Optax's function with as many steps, and measures its accuracy.

    OPENBLAS_NUM_THREADS=1 python benchmarks/bench_newton_schulz.py [--shapes 256x1024 512x512] [--rounds 15]

Both take turns in one process, so that a machine that slows down slows both; read the ratios, not the milliseconds.
`ratio` is the median over the rounds of ours / Optax's (float32, same rows). On a machine that others use too, --clock
cpu measures the seconds that the process computed instead of those that passed; with
XLA_FLAGS=--xla_cpu_multi_thread_eigen=false, or waiting threads count. GFLOP/s are on the operations of our steps,
where their number does not depend on the matrix, of the machine's rate: that of a float32 (bfloat16) product of the
matrix's own shape, in the same rounds. `error` is the spectral norm |U U^T - I|.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from measure import alternate, compile_timed, header, make_parser, median_ratio, print_table
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
COLUMNS = {
  'shape': '',
  'steps': 'd',
  'table': '',
  'operands': '',
  'steps between restarts': '',
  'ms': '.2f',
  'ratio': '.3f',
  'error': '.0e',
  'GFLOP/s': '>',
  'compile s': '.1f',
}
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}


def matrix_product(a, b, dtype):
  return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32, precision='highest')


def spectral_norm(symmetric: np.ndarray) -> float:
  """Returns it to a few percent, by power iteration: the singular values of 4096 rows would take minutes."""
  vector, norm = np.random.default_rng(0).standard_normal(len(symmetric)), 0.0
  for _ in range(100):
    vector = symmetric @ (vector / np.linalg.norm(vector))
    norm = float(np.linalg.norm(vector))
    if not norm > 0:
      break
  return norm


def bench(m: int, n: int, clock, rounds: int):
  """Yields the rows of one shape."""
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

    product = functools.partial(matrix_product, dtype=dtype or jnp.float32)
    functions = {'optax': (optax_function, x), 'ours': (our_function, x), 'product': (product, square, x)}
    compiled = {name: compile_timed(function, *operands) for name, (function, *operands) in functions.items()}
    turns = {name: functools.partial(compiled[name].program, *operands) for name, (_, *operands) in functions.items()}
    times = alternate(turns, rounds, clock)
    y = np.asarray(compiled['ours'].program(x), np.float64)
    lengths = restart_lengths(m, n, rows, dtype)
    seconds = {name: statistics.median(measured) for name, measured in times.items()}
    rate = step_cost(m, n, rows, lengths) / seconds['ours'] / 1e9
    machine = 2 * m**2 * n / seconds['product'] / 1e9
    may_end_early = len(lengths) < steps and coefficients is emopt_jax.POLAR_EXPRESS
    yield (
      f'{m} x {n}',
      steps,
      table,
      jnp.dtype(dtype or jnp.float32).name,
      'plain' if len(lengths) == steps else '+'.join(map(str, lengths)),
      1e3 * seconds['ours'],
      median_ratio(times['ours'], times['optax']),
      spectral_norm(y @ y.T - np.eye(m)),
      None if may_end_early else f'{rate:.0f} of {machine:.0f}',
      compiled['ours'].seconds,
    )


def main() -> None:
  parser = make_parser(__doc__)
  parser.add_argument('--shapes', nargs='*', default=SHAPES, help='rows x columns, as in 256x1024')
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--clock', choices=CLOCKS, default='wall')
  arguments = parser.parse_args()

  print(header())
  print(f'median of {arguments.rounds} rounds, {arguments.clock} clock\n')
  shapes = [sorted(map(int, shape.split('x'))) for shape in arguments.shapes]
  rows = (row for m, n in shapes for row in bench(m, n, CLOCKS[arguments.clock], arguments.rounds))
  settings = {'rounds': arguments.rounds, 'clock': arguments.clock}
  print_table('bench_newton_schulz', COLUMNS, rows, settings=settings, json_file=arguments.json)


if __name__ == '__main__':
  main()
