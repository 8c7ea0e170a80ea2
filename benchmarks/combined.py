"""Prints one table of the rows that bench_newton_schulz.py, bench_refresh.py and bench_step.py appended with `--json`.

python benchmarks/combined.py results.jsonl
"""

import argparse
import pathlib
from typing import Any

from measure import print_table, read_rows

COLUMNS = {'benchmark': '', 'case': '', 'ms': '.2f', 'ratio': '.3f', 'against': '', 'error': '.0e', 'compile s': '.1f'}


def combined_row(row: dict[str, Any]) -> tuple[Any, ...] | None:
  """Returns the row in the columns of the combined table, or None for a benchmark that has no place there."""
  benchmark, compile_seconds = row['benchmark'], row.get('compile s')
  if benchmark == 'bench_newton_schulz':
    case = f'{row["shape"]}, {row["steps"]} steps of {row["table"]}, {row["operands"]}'
    return benchmark, case, row['ms'], row['ratio'], 'Optax, float32', row['error'], compile_seconds
  if benchmark == 'bench_refresh':
    case = f'n = {row["n"]}, {row["spectrum"]}, {row["refresh"]}'
    return benchmark, case, row['ms'], row['of qr'], 'qr', row['residual'], compile_seconds
  if benchmark == 'bench_step':
    column = next(name for name in row if name.startswith('against '))
    case = f'{row["optimizer"]}, width {row["width"]}'
    return benchmark, case, row['ms a step'], row[column], column.removeprefix('against '), None, compile_seconds
  return None


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('files', nargs='+', type=pathlib.Path)
  rows = (combined_row(row) for row in read_rows(*parser.parse_args().files))
  print_table('combined', COLUMNS, (row for row in rows if row))


if __name__ == '__main__':
  main()
