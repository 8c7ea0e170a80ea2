"""Times one optimizer step, ours against Optax's and PyTorch's, on the matrices of a four-layer transformer.

    OPENBLAS_NUM_THREADS=1 python benchmarks/bench_step.py [--width 256] [--layers 4] [--rounds 15]

All competitors run in one process and take turns, so that a machine that slows down slows all of them; read the ratios,
not the milliseconds. Compile time and run time are apart, and the first run after compiling is not counted. PyTorch's,
where torch and pytorch_optimizer are installed, run eagerly on the same numbers and device, and their step adds the
update to the parameters too.
"""

import functools
import statistics

import jax
import jax.numpy as jnp
import optax
import torch_peers
from measure import (
  alternate,
  compile_timed,
  gradients_of,
  header,
  make_parser,
  median_ratio,
  nbytes,
  print_table,
  transformer_matrices,
)

import emopt_jax
from emopt_jax import QUINTIC, jacobi_refresh, newton_schulz

REFERENCE = 'optax.contrib.muon'


def kl_soap_with(**sizes: int) -> optax.GradientTransformation:
  """Returns `kl_soap(0.01)` with smaller factors for long sides."""
  rotated = emopt_jax.scale_by_soap(emopt_jax.kl_covariance(**sizes))
  return optax.chain(rotated, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.01))


def competitors(width: int) -> dict[str, optax.GradientTransformation]:
  # The same table, steps, precision and scale on both sides of the first pair.
  five_steps = functools.partial(newton_schulz, coefficients=QUINTIC)
  return {
    REFERENCE: optax.contrib.muon(0.01, ns_coeffs='dion', consistent_rms=0.2, weight_decay=0.1),
    'muon': emopt_jax.muon(0.01, method=five_steps),
    'muon, bfloat16 operands': emopt_jax.muon(0.01, method=functools.partial(five_steps, dtype=jnp.bfloat16)),
    'muon, default (8 steps)': emopt_jax.muon(0.01),
    'optax.adamw': optax.adamw(0.01),
    'soap': emopt_jax.soap(0.01),
    'kl_soap': emopt_jax.kl_soap(0.01),
    'kl_soap, matrix products only': emopt_jax.kl_soap(0.01, refresh=jacobi_refresh),
    'kl_soap, blocks of the width': kl_soap_with(block_size=width),
    'kl_soap, one-sided': kl_soap_with(max_dim=width),
    'shampoo': emopt_jax.shampoo(0.01),
  }


def make_turn(step, state, gradients, parameters):
  """Returns a function without arguments that does one step from where the last one ended."""

  def turn():
    nonlocal state
    updates, state = step(gradients, state, parameters)
    return updates, state

  return turn


def measure_steps(optimizers, torch_optimizers, parameters, gradients, rounds: int):
  """Returns for every competitor its seconds in each round, its bytes of state and its seconds of compiling."""
  turns, state_bytes, compile_seconds = {}, {}, {}
  for name, optimizer in optimizers.items():
    state = jax.jit(optimizer.init)(parameters)
    compiled = compile_timed(optimizer.update, parameters, state, parameters)
    turns[name] = make_turn(compiled.program, state, gradients, parameters)
    state_bytes[name], compile_seconds[name] = nbytes(state), compiled.seconds
  for name, optimizer in torch_optimizers.items():
    turns[name], compile_seconds[name] = functools.partial(torch_peers.step, optimizer), None
  seconds = alternate(turns, rounds)
  state_bytes |= {name: torch_peers.state_bytes(optimizer) for name, optimizer in torch_optimizers.items()}
  return {name: (seconds[name], state_bytes[name], compile_seconds[name]) for name in turns}


def main() -> None:
  parser = make_parser(__doc__)
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--only', nargs='*', help='names of competitors; by default all')
  arguments = parser.parse_args()

  parameters = transformer_matrices(arguments.width, arguments.layers)
  gradients = gradients_of(parameters)
  peers = torch_peers.make_optimizers(parameters, gradients)
  optimizers = competitors(arguments.width)
  if arguments.only:
    if unknown := set(arguments.only) - optimizers.keys() - set(torch_peers.NAMES):
      parser.error(f'no competitors: {", ".join(sorted(unknown))}')
    peers, optimizers = (
      {name: one for name, one in each.items() if name in arguments.only} for each in (peers, optimizers)
    )

  print(f'{header()}{torch_peers.versions()}')
  print(f'width {arguments.width}, {arguments.layers} layers, float32, median of {arguments.rounds} rounds\n')
  measured = measure_steps(optimizers, peers, parameters, gradients, arguments.rounds)
  size = sum(p.size for p in parameters.values())
  reference = measured[REFERENCE][0] if REFERENCE in measured else None
  columns = {
    'optimizer': '',
    'ms a step': '.1f',
    f'against {REFERENCE}': '.3f',
    'state bytes per parameter': '.1f',
    'compile s': '.1f',
  }
  rows = (
    (name, 1e3 * statistics.median(seconds), median_ratio(seconds, reference), state_bytes / size, compile_seconds)
    for name, (seconds, state_bytes, compile_seconds) in measured.items()
  )
  settings = {'width': arguments.width, 'layers': arguments.layers, 'rounds': arguments.rounds}
  print_table('bench_step', columns, rows, settings=settings, json_file=arguments.json)


if __name__ == '__main__':
  main()
