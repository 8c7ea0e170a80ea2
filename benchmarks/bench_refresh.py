"""Times the refreshes of an eigenbasis and shows how well each follows the factor, on five spectra and after a spike.

    OPENBLAS_NUM_THREADS=1 python benchmarks/bench_refresh.py [--sizes 128] [--batch 2] [--steps 150] [--tolerance 0.02]

Each spectrum is followed as an optimizer meets it: A <- 0.95 A + 0.05 G G^T with G = U diag(s)^(1/2) noise, from a
multiple of the identity, every refresh from its own last basis. One gradient, after `--steps` steps, is 1000 times as
large. The competitors take turns at every step in one process; read the ratios, not the milliseconds.

- ms: median over the last 50 steps before the spike, the first runs and the compilation not counted.
- n^3 products: matrix products in the program, path by path, and the factorizations that a path holds besides.
- residual: median of |S - diag(S)|_F / |S|_F over the same steps and the batch, S = Q^T A Q after the refresh.
- recovery: steps from the spike until the residual of every matrix is at most 1.5 times the steady residual of QR, or
  within the tolerance where that is all that a gated refresh promises.
- refreshed: share of these 50 steps in which any basis moved.
"""

import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure import compile_timed, header, make_parser, median_ratio, print_table, timed

from emopt_jax import Eigenbasis, eigh_refresh, qr_refresh, sort_by_magnitude
from emopt_jax.diagnostics import basis_staleness
from emopt_jax.linalg.eigenbasis import Refresh
from emopt_jax.linalg.gated import gated
from emopt_jax.linalg.product_refresh import jacobi_refresh
from emopt_jax.linalg.products import product, transpose

SPECTRA = ('steep', 'flat', 'power law', 'rank-deficient', 'half-zero rows')
STEADY = 50  # steps before the spike that count as steady state
PATIENCE = 60  # steps after the spike
COLUMNS = {
  'n': 'd',
  'spectrum': '',
  'refresh': '',
  'ms': '.2f',
  'of qr': '.2f',
  'n^3 products': '',
  'residual': '.1e',
  'recovery': '>',
  'refreshed': '.2f',
  'compile s': '.1f',
}
FACTORIZATIONS = {'geqrf': 'QR', 'qr': 'QR', 'eigh': 'eigh', 'cholesky': 'Cholesky', 'svd': 'SVD'}


class Course(NamedTuple):
  """What one refresh did on one spectrum, step by step."""

  seconds: list[float]
  residuals: list[np.ndarray]
  moved: list[bool]


def roots(spectrum: str, n: int, batch: int) -> jax.Array:
  """Returns U diag(s)^(1/2) `[batch, n, n]`."""
  rng = np.random.default_rng(0)
  index = np.arange(n)
  values = {
    'steep': 10.0 ** (-6 * index / (n - 1)),
    'flat': np.ones(n),
    'rank-deficient': (index < n // 4) / (index + 1),
  }.get(spectrum, 1 / (index + 1))
  root = np.linalg.qr(rng.standard_normal((batch, n, n)))[0] * np.sqrt(values)
  if spectrum == 'half-zero rows':
    root[:, ::2] = 0
  return jnp.asarray(root, jnp.float32)


@jax.jit
def next_factor(factor: jax.Array, root: jax.Array, count: jax.Array, size: jax.Array) -> jax.Array:
  noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), root.shape)
  gradient = size * product(root, noise) / root.shape[-1] ** 0.5
  square = product(gradient, transpose(gradient))
  trace = jnp.trace(square, axis1=-2, axis2=-1)[:, None, None]
  started = jnp.where(count == 0, trace / root.shape[-1] * jnp.eye(root.shape[-1]), factor)
  return 0.95 * started + 0.05 * square


@jax.jit
def settle(factor: jax.Array, new: Eigenbasis, old: Eigenbasis) -> tuple[Eigenbasis, jax.Array, jax.Array]:
  """Returns the basis arranged for the next step, its residuals and whether any vector moved."""
  return sort_by_magnitude(new)[0], basis_staleness(factor, new), jnp.any(new.vectors != old.vectors)


def follow(compiled: dict, spectrum: str, n: int, batch: int, steps: int) -> dict[str, Course]:
  root = roots(spectrum, n, batch)
  start = Eigenbasis(jnp.broadcast_to(jnp.eye(n), (batch, n, n)), jnp.zeros((batch, n)))
  bases = dict.fromkeys(compiled, start)
  courses = {name: Course([], [], []) for name in compiled}
  factor = jnp.zeros((batch, n, n))
  for count in range(steps + PATIENCE):
    factor = jax.block_until_ready(next_factor(factor, root, count, 1000.0 if count == steps else 1.0))
    for name, refresh in compiled.items():
      new, seconds = timed(refresh, factor, bases[name])
      courses[name].seconds.append(seconds)
      bases[name], residual, moved = settle(factor, new, bases[name])
      courses[name].residuals.append(np.asarray(residual))
      courses[name].moved.append(bool(moved))
  return courses


def paths(jaxpr) -> set[tuple[int, frozenset[str]]]:
  """Returns the number of matrix products and the kinds of factorizations of each path through a program."""
  found = {(0, frozenset())}
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name in FACTORIZATIONS:
      options = {(0, frozenset({FACTORIZATIONS[name]}))}
    elif name == 'cond':
      options = set().union(*(paths(branch.jaxpr) for branch in equation.params['branches']))
    elif name == 'while':
      # A loop without a fixed number of rounds, over the matrices that need it, may go none.
      options = {(0, frozenset())} | paths(equation.params['body_jaxpr'].jaxpr)
    else:
      options = {(int(name == 'dot_general'), frozenset())}
      for inner in equation.params.values():
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          options = {(a + b, kinds | more) for a, kinds in options for b, more in paths(inner)}
    found = {(a + b, kinds | more) for a, kinds in found for b, more in options}
  return found


def count(refresh: Refresh, n: int) -> str:
  program = jax.make_jaxpr(refresh)(jnp.zeros((1, n, n)), Eigenbasis(jnp.zeros((1, n, n)), jnp.zeros((1, n))))
  ordered = sorted((products, *sorted(kinds)) for products, kinds in paths(program.jaxpr))
  return ' or '.join(' + '.join(str(part) for part in path) for path in ordered)


def recovery(residuals: np.ndarray, target: float) -> str:
  there = np.flatnonzero(residuals.max(axis=1) <= target)
  return str(there[0]) if there.size else f'over {PATIENCE}'


def bench(refreshes: dict[str, Refresh], n: int, arguments):
  """Yields the rows of one size."""
  factor = jnp.broadcast_to(jnp.eye(n), (arguments.batch, n, n))
  compiled = {
    name: compile_timed(refresh, factor, Eigenbasis(factor, factor[:, 0])) for name, refresh in refreshes.items()
  }
  programs = {name: each.program for name, each in compiled.items()}
  steady = slice(arguments.steps - STEADY, arguments.steps)
  for spectrum in arguments.spectra:
    courses = follow(programs, spectrum, n, arguments.batch, arguments.steps)
    target = 1.5 * float(np.median(courses['qr'].residuals[steady]))
    for name, course in courses.items():
      goal = max(target, arguments.tolerance) if name.startswith('gated') else target
      yield (
        n,
        spectrum,
        name,
        1e3 * statistics.median(course.seconds[steady]),
        median_ratio(course.seconds[steady], courses['qr'].seconds[steady]),
        count(refreshes[name], n),
        np.median(course.residuals[steady]),
        recovery(np.array(course.residuals[arguments.steps :]), goal),
        np.mean(course.moved[steady]),
        compiled[name].seconds,
      )


def main() -> None:
  parser = make_parser(__doc__)
  parser.add_argument('--sizes', type=int, nargs='*', default=[128])
  parser.add_argument('--batch', type=int, default=2)
  parser.add_argument('--steps', type=int, default=150)
  parser.add_argument('--tolerance', type=float, default=0.02)
  parser.add_argument('--spectra', nargs='*', choices=SPECTRA, default=SPECTRA)
  parser.add_argument('--only', nargs='*', help='names of refreshes besides qr; by default all')
  arguments = parser.parse_args()
  if arguments.steps <= STEADY:
    parser.error(f'--steps must be above {STEADY}')

  refreshes = {
    'qr': qr_refresh,
    'jacobi': jacobi_refresh,
    f'gated(qr, {arguments.tolerance})': gated(qr_refresh, arguments.tolerance),
    f'gated(jacobi, {arguments.tolerance})': gated(jacobi_refresh, arguments.tolerance),
    'eigh': eigh_refresh,
  }
  refreshes = {k: v for k, v in refreshes.items() if k == 'qr' or not arguments.only or k in arguments.only}
  print(header())
  print(f'float32, batches of {arguments.batch}, {arguments.steps} steps before the spike\n')
  rows = (row for n in arguments.sizes for row in bench(refreshes, n, arguments))
  settings = {'batch': arguments.batch, 'steps': arguments.steps}
  print_table('bench_refresh', COLUMNS, rows, settings=settings, json_file=arguments.json)


if __name__ == '__main__':
  main()
