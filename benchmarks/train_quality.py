"""Trains the GPT of `examples/train_lm.py` with each optimizer and prints the final validation losses.

    python benchmarks/train_quality.py [--seeds 0 1 2] [--steps 200] [--json runs/quality/results.jsonl]

Every run has the same model, text, batches and schedule for its seed; AdamW gets the best of several learning rates.
Finished runs are kept in runs/quality and not repeated; nothing else should run on the machine, as QR suffers most.
"""

import json
import pathlib
import statistics
import subprocess
import sys

from measure import make_parser, print_table

TRAIN = pathlib.Path(__file__).parents[1] / 'examples' / 'train_lm.py'
RUNS = pathlib.Path('runs', 'quality')
MATRIX_OPTIMIZERS = ('muon', 'soap', 'kl_soap', 'kl_soap_blocks', 'kl_soap_one_sided', 'kl_soap_jacobi')
CANDIDATES = [('adamw', rate) for rate in (1e-3, 3e-3, 1e-2)] + [(name, 1e-2) for name in MATRIX_OPTIMIZERS]


def train(optimizer: str, learning_rate: float, seed: int, steps: int) -> list[dict]:
  """Returns the metrics of one run, from its folder if it is finished."""
  out = RUNS / f'{optimizer}_{learning_rate:g}_seed{seed}_{steps}steps'
  metrics = out / 'metrics.jsonl'
  if not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
    options = {'optimizer': optimizer, 'learning-rate': learning_rate, 'seed': seed, 'steps': steps, 'out': out}
    command = [sys.executable, str(TRAIN), *(f'--{name}={value}' for name, value in options.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
  return [json.loads(line) for line in metrics.read_text().splitlines()]


def main() -> None:
  parser = make_parser(__doc__)
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
  parser.add_argument('--steps', type=int, default=200)
  arguments = parser.parse_args()

  losses, seconds = {}, {}
  for candidate in CANDIDATES:
    runs = [train(*candidate, seed, arguments.steps) for seed in arguments.seeds]
    losses[candidate] = [run[-1]['val_loss'] for run in runs]
    seconds[candidate] = statistics.median(entry['seconds'] for run in runs for entry in run)
  best = min(statistics.mean(losses[candidate]) for candidate in losses if candidate[0] == 'adamw')

  columns = {'optimizer': '', 'peak learning rate': 'g', **{f'seed {seed}': '.3f' for seed in arguments.seeds}}
  columns |= {'mean': '.3f', 'of the best AdamW': '.2f', 's a step': '.2f'}
  rows = (
    (name, rate, *values, statistics.mean(values), statistics.mean(values) / best, seconds[name, rate])
    for (name, rate), values in losses.items()
  )
  print_table('train_quality', columns, rows, settings={'steps': arguments.steps}, json_file=arguments.json)


if __name__ == '__main__':
  main()
