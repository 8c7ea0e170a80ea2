"""Draws what the benchmarks measured: step time against width, ratios of one step, loss against step time.

    python benchmarks/plots.py [FILE ...] [--out benchmarks/plots]

The files hold the rows that benchmarks append with `--json`: by default runs/bench/results.jsonl, and
runs/quality/results.jsonl where it exists. Of rows for the same point the last is drawn, and what has no rows is not.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import matplotlib.figure
from measure import read_rows

FILES = (pathlib.Path('runs', 'bench', 'results.jsonl'), pathlib.Path('runs', 'quality', 'results.jsonl'))
REFERENCE = 'optax.contrib.muon'
MARKERS = 'os^Dv<>P'
FONT_SIZE = 11


def new_axes(title: str, x_label: str, y_label: str, height: float = 4.5):
  figure = matplotlib.figure.Figure(figsize=(8, height), layout='constrained')
  axes = figure.add_subplot()
  axes.set_title(title, fontsize=FONT_SIZE + 1)
  axes.set_xlabel(x_label, fontsize=FONT_SIZE)
  axes.set_ylabel(y_label, fontsize=FONT_SIZE)
  axes.tick_params(labelsize=FONT_SIZE - 1)
  axes.grid(True, which='major', alpha=0.4)
  axes.set_axisbelow(True)
  return figure, axes


def of(rows: list[dict[str, Any]], benchmark: str) -> list[dict[str, Any]]:
  return [row for row in rows if row['benchmark'] == benchmark]


def step_time_against_width(rows: list[dict[str, Any]]):
  """Draws one line an optimizer, both axes logarithmic."""
  points = {(row['optimizer'], row['width']): row['ms a step'] for row in of(rows, 'bench_scaling time')}
  if not points:
    return None
  last = of(rows, 'bench_scaling time')[-1]
  title = f'One optimizer step against the width ({last["layers"]} layers, float32, {last["device"]})'
  figure, axes = new_axes(title, 'width of the transformer', 'time of a step, ms')
  for name, marker in zip(dict.fromkeys(name for name, _ in points), MARKERS * len(points), strict=False):
    line = sorted((width, value) for (other, width), value in points.items() if other == name)
    axes.plot(*zip(*line, strict=True), marker=marker, label=name)
  axes.set_xscale('log', base=2)
  axes.set_yscale('log')
  widths = sorted({width for _, width in points})
  axes.set_xticks(widths, [str(width) for width in widths])
  axes.minorticks_off()
  figure.legend(loc='outside right center', fontsize=FONT_SIZE - 1)
  return figure


def step_ratios(rows: list[dict[str, Any]]):
  """Draws a bar for each optimizer and width, on a logarithmic axis that starts at Optax's Muon."""
  column = f'against {REFERENCE}'
  found = [row for row in of(rows, 'bench_step') if row[column] is not None]
  if not found:
    return None
  ratios = {(row['optimizer'], row['width']): row[column] for row in found}
  names = list(dict.fromkeys(row['optimizer'] for row in found))
  widths = sorted({width for _, width in ratios})
  title = f'One optimizer step against {REFERENCE} ({found[-1]["layers"]} layers, float32, {found[-1]["device"]})'
  height = 1.5 + len(names) * (0.2 + 0.2 * len(widths))
  figure, axes = new_axes(title, f'time of a step / that of {REFERENCE} (log scale, left is faster)', '', height)
  thickness = 0.8 / len(widths)
  for index, width in enumerate(widths):
    places = [(row, ratios[name, width]) for row, name in enumerate(names) if (name, width) in ratios]
    centers = [row + (index - (len(widths) - 1) / 2) * thickness for row, _ in places]
    values = [value for _, value in places]
    bars = axes.barh(centers, [value - 1 for value in values], thickness, left=1, label=f'width {width}')
    for bar, value in zip(bars, values, strict=True):
      label = {'ha': 'left', 'xytext': (3, 0)} if value >= 1 else {'ha': 'right', 'xytext': (-3, 0)}
      place = (value, bar.get_y() + thickness / 2)
      axes.annotate(f'{value:.2g}', place, textcoords='offset points', va='center', fontsize=FONT_SIZE - 2, **label)
  axes.axvline(1, color='black', linewidth=1)
  axes.set_xscale('log')
  # Room for the numbers beside the longest bars.
  axes.set_xlim(min(*ratios.values(), 1) / 2, max(*ratios.values(), 1) * 2)
  axes.set_yticks(range(len(names)), names)
  axes.invert_yaxis()
  figure.legend(loc='outside lower center', ncols=len(widths), fontsize=FONT_SIZE - 1)
  return figure


def loss_against_step_time(rows: list[dict[str, Any]]):
  """Draws a point for each optimizer at its best learning rate."""
  found = of(rows, 'train_quality')
  found = [row for row in found if row['steps'] == found[-1]['steps']]
  if not found:
    return None
  runs = {(row['optimizer'], row['peak learning rate']): row for row in found}
  best: dict[str, dict[str, Any]] = {}
  for (name, _), row in runs.items():
    if name not in best or row['mean'] < best[name]['mean']:
      best[name] = row
  title = f'Validation loss after {found[-1]["steps"]} steps against the time of a step ({found[-1]["device"]})'
  figure, axes = new_axes(title, 'time of a training step, s', 'validation loss, nats per byte')
  for (name, row), marker in zip(best.items(), MARKERS * len(best), strict=False):
    # Names are in the legend, since points of near relatives lie close together.
    axes.plot(row['s a step'], row['mean'], marker, markersize=9, label=f'{name}, {row["peak learning rate"]:g}')
  axes.margins(0.1)
  figure.legend(loc='outside right center', fontsize=FONT_SIZE - 1, title='optimizer, learning rate')
  return figure


PLOTS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
  'step_time_against_width.png': step_time_against_width,
  'step_ratios.png': step_ratios,
  'loss_against_step_time.png': loss_against_step_time,
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('files', nargs='*', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path(__file__).parent / 'plots')
  arguments = parser.parse_args()
  files = arguments.files or [file for file in FILES if file.exists()]
  if not files:
    parser.error(f'no results: {" and ".join(map(str, FILES))} are missing; run `make bench` or name a file')
  if missing := [str(file) for file in files if not file.exists()]:
    parser.error(f'no file {", ".join(missing)}')
  rows = read_rows(*files)
  arguments.out.mkdir(parents=True, exist_ok=True)
  for name, draw in PLOTS.items():
    if figure := draw(rows):
      figure.savefig(arguments.out / name, dpi=110)
      print(arguments.out / name)


if __name__ == '__main__':
  main()
