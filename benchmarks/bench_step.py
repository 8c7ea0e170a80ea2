"""Times one optimizer step, ours against Optax's, on the matrices of a four-layer transformer.

    python benchmarks/bench_step.py [--width 256] [--layers 4] [--rounds 15]

All competitors run in one process and take turns, so that a machine that slows down slows all of them; read the ratios,
not the milliseconds. Compile time and run time are apart, and the first run after compiling is not counted.
"""

import argparse
import functools
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import emopt_jax
from emopt_jax import QUINTIC, newton_schulz


def make_parameters(width: int, layers: int) -> dict[str, jax.Array]:
  """Returns the matrices of a transformer: fused qkv, attention output, and the two of the feed-forward part."""
  shapes = {
    'qkv': (width, 3 * width),
    'out': (width, width),
    'up': (width, 4 * width),
    'down': (4 * width, width),
  }
  key = jax.random.key(0)
  return {
    f'layer_{i}/{name}': jax.random.normal(jax.random.fold_in(key, 10 * i + j), shape)
    for i in range(layers)
    for j, (name, shape) in enumerate(shapes.items())
  }


def kl_soap_with(**sizes: int) -> optax.GradientTransformation:
  """Returns `kl_soap(0.01)` with smaller factors for long sides."""
  rotated = emopt_jax.scale_by_soap(emopt_jax.kl_covariance(**sizes))
  return optax.chain(rotated, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.01))


def competitors(width: int) -> dict[str, optax.GradientTransformation]:
  # The same table, steps, precision and scale on both sides of the first pair.
  five_steps = functools.partial(newton_schulz, coefficients=QUINTIC)
  return {
    'optax.contrib.muon': optax.contrib.muon(0.01, ns_coeffs='dion', consistent_rms=0.2, weight_decay=0.1),
    'muon': emopt_jax.muon(0.01, method=five_steps),
    'muon, default (8 steps)': emopt_jax.muon(0.01),
    'optax.adamw': optax.adamw(0.01),
    'soap': emopt_jax.soap(0.01),
    'kl_soap': emopt_jax.kl_soap(0.01),
    'kl_soap, blocks of the width': kl_soap_with(block_size=width),
    'kl_soap, one-sided': kl_soap_with(max_dim=width),
    'shampoo': emopt_jax.shampoo(0.01),
  }


def compile_step(optimizer: optax.GradientTransformation, parameters: dict[str, jax.Array]):
  """Returns the compiled step, its state and the seconds that compiling took."""
  state = jax.jit(optimizer.init)(parameters)
  start = time.perf_counter()
  step = jax.jit(optimizer.update).lower(parameters, state, parameters).compile()
  return step, state, time.perf_counter() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--only', nargs='*', help='names of competitors; by default all')
  arguments = parser.parse_args()

  parameters = make_parameters(arguments.width, arguments.layers)
  gradients = jax.tree.map(lambda p: 1e-3 * jnp.sin(1e3 * p), parameters)
  chosen = {name: o for name, o in competitors(arguments.width).items() if not arguments.only or name in arguments.only}
  compiled = {name: compile_step(optimizer, parameters) for name, optimizer in chosen.items()}
  states = {name: state for name, (_, state, _) in compiled.items()}
  times: dict[str, list[float]] = {name: [] for name in compiled}
  for _ in range(arguments.rounds + 1):
    for name, (step, _, _) in compiled.items():
      start = time.perf_counter()
      _, states[name] = jax.block_until_ready(step(gradients, states[name], parameters))
      times[name].append(time.perf_counter() - start)

  device = jax.devices()[0].device_kind
  print(f'{device}, Python {platform.python_version()}, jax {jax.__version__}, optax {optax.__version__}')
  print(f'width {arguments.width}, {arguments.layers} layers, float32, median of {arguments.rounds} rounds\n')
  print('| optimizer | ms a step | against optax.contrib.muon | state bytes per parameter | compile s |')
  print('| --- | ---: | ---: | ---: | ---: |')
  size = sum(p.size for p in parameters.values())
  reference = times.get('optax.contrib.muon')
  for name, measured in times.items():
    median = statistics.median(measured[1:])
    # Round by round, since both sides of a ratio should have met the same machine.
    ratio = statistics.median(a / b for a, b in zip(measured[1:], reference[1:], strict=True)) if reference else 1.0
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(states[name]))
    print(f'| {name} | {1e3 * median:.1f} | {ratio:.3f} | {state_bytes / size:.1f} | {compiled[name][2]:.1f} |')


if __name__ == '__main__':
  main()
