"""Tables of plain text."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 1, total: bool = False) -> str:
  """Returns rows of cells in aligned columns under a header.

  Args:
    header: Names of the columns.
    rows: The cells of each row.
    numbers: How many of the last columns hold numbers, which are aligned to the right.
    total: Whether the last row is set apart by a rule.

  Example:
    >>> print(text_table(('fruit', 'price'), [('apple', '1'), ('pear', '20')]))
    fruit  price
    -----  -----
    apple      1
    pear      20
  """
  widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
  first_number = len(header) - numbers

  def line(row: Sequence[str]) -> str:
    cells = [
      cell.rjust(width) if i >= first_number else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return '  '.join(cells).rstrip()

  rule = '  '.join('-' * width for width in widths)
  lines = [line(header), rule, *map(line, rows)]
  if total:
    lines.insert(-1, rule)
  return '\n'.join(lines)


def thousands(number: int | None) -> str:
  """Returns a number with its thousands set apart, '-' for None."""
  return '-' if number is None else f'{number:,}'
