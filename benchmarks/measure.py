"""What the benchmarks share: what ran where, compile times, competitors in turns, and tables for people and programs.

    python benchmarks/bench_step.py --json results.jsonl    # every row also as a line of JSON

A line holds the name of the benchmark, its settings, the columns and the values of one row.
"""

import argparse
import functools
import json
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# A thread pool whose turn is over can wait busily for some milliseconds, and would do so in the next one's time.
PAUSE = 0.01


def make_parser(description: str | None) -> argparse.ArgumentParser:
  """Returns a parser that shows the script's docstring and knows `--json`."""
  parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--json', type=pathlib.Path, help='file to which every row is appended as a line of JSON')
  return parser


@functools.cache
def commit() -> str:
  """Returns the commit of the scripts, with `-dirty` where files differ from it."""
  command = ['git', 'describe', '--always', '--dirty']
  try:
    result = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False)
  except FileNotFoundError:  # no git on this machine
    return 'unknown'
  return result.stdout.strip() or 'unknown'


def header() -> str:
  """Returns the device, the versions and the commit in one line."""
  device = jax.devices()[0].device_kind
  versions = f'Python {platform.python_version()}, jax {jax.__version__}, optax {optax.__version__}'
  return f'{device}, {versions}, commit {commit()}'


def transformer_matrices(width: int, layers: int) -> dict[str, jax.Array]:
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


def gradients_of(parameters: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns gradients of full rank, small and of no structure."""
  return jax.tree.map(lambda p: 1e-3 * jnp.sin(1e3 * p), parameters)


def nbytes(tree: Any) -> int:
  """Returns the bytes of all arrays of a tree, or of the shapes that stand for them."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class Compiled(NamedTuple):
  """A compiled program, the seconds of tracing and lowering, and those of compiling."""

  program: jax.stages.Compiled
  lower_seconds: float
  compile_seconds: float

  @property
  def seconds(self) -> float:
    return self.lower_seconds + self.compile_seconds


def compile_timed(function: Callable[..., Any], *operands: Any, donate: int | tuple[int, ...] = ()) -> Compiled:
  """Returns the program for these operands, which may be shapes."""
  start = time.perf_counter()
  lowered = jax.jit(function, donate_argnums=donate).lower(*operands)
  lowered_at = time.perf_counter()
  program = lowered.compile()
  return Compiled(program, lowered_at - start, time.perf_counter() - lowered_at)


def timed(function: Callable[..., Any], *operands: Any, clock: Callable[[], float] = time.perf_counter):
  """Returns the result, once it is there, and the seconds until then."""
  start = clock()
  result = jax.block_until_ready(function(*operands))
  return result, clock() - start


def alternate(
  turns: Mapping[str, Callable[[], Any]],
  rounds: int,
  clock: Callable[[], float] = time.perf_counter,
  pause: float = PAUSE,
) -> dict[str, list[float]]:
  """Runs all in turns and returns the seconds of each in every round but the first, which is not counted."""
  seconds: dict[str, list[float]] = {name: [] for name in turns}
  for _ in range(rounds + 1):
    for name, turn in turns.items():
      time.sleep(pause)
      seconds[name].append(timed(turn, clock=clock)[1])
  return {name: measured[1:] for name, measured in seconds.items()}


def median_ratio(seconds: Sequence[float], reference: Sequence[float] | None) -> float | None:
  """Returns the median of the ratios round by round, as both sides of a ratio should have met the same machine.

  Example:
    >>> median_ratio([2.0, 30.0, 2.0], [1.0, 10.0, 1.0])
    2.0
  """
  if not reference:
    return None
  return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))


def print_table(
  benchmark: str,
  columns: Mapping[str, str],
  rows: Iterable[Sequence[Any]],
  *,
  settings: Mapping[str, Any] | None = None,
  json_file: pathlib.Path | None = None,
) -> None:
  """Prints a Markdown table row by row, as they come, and appends the rows to a file of JSON lines.

  Args:
    benchmark: Its name in the file.
    columns: The format of the values of each column; '' for text, which is aligned to the left.
    rows: One value a column; None where there is none.
    settings: What all rows have in common, for the file.
    json_file: The file, made if need be.

  Example:
    >>> print_table('sums', {'name': '', 'seconds': '.1f'}, [('one', 1.25), ('two', None)])
    | name | seconds |
    | --- | ---: |
    | one | 1.2 |
    | two | - |
  """
  print(f'| {" | ".join(columns)} |')
  print(f'| {" | ".join("---:" if style else "---" for style in columns.values())} |', flush=True)
  if json_file:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    settings = {'device': jax.devices()[0].device_kind, 'commit': commit()} | dict(settings or {})
  for row in rows:
    pairs = zip(row, columns.values(), strict=True)
    print(f'| {" | ".join("-" if value is None else format(value, style) for value, style in pairs)} |', flush=True)
    if json_file:
      line = {'benchmark': benchmark, 'settings': settings, 'columns': list(columns), 'values': list(row)}
      with json_file.open('a') as file:
        file.write(json.dumps(line, default=float) + '\n')


def read_rows(*files: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows that `print_table` appended, each with its settings and the name of its benchmark."""
  lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
  return [
    {'benchmark': line['benchmark'], **line['settings'], **dict(zip(line['columns'], line['values'], strict=True))}
    for line in lines
  ]
