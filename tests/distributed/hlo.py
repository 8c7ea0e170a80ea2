"""Collectives of a compiled program: how many, of what size, and whether in a loop."""

import math
import re
from typing import NamedTuple

BYTES = {'f32': 4, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'pred': 1}
KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# What a ring of n devices sends for one byte of the result.
SENT = {
  'all-reduce': lambda n: 2 * (n - 1) / n,
  'all-gather': lambda n: (n - 1) / n,
  'reduce-scatter': lambda n: n - 1,
  'all-to-all': lambda n: (n - 1) / n,
  'collective-permute': lambda n: 1,
}


class Collective(NamedTuple):
  kind: str
  bytes: int  # of the result
  computation: str


def collectives(compiled) -> list[Collective]:
  """Returns the collectives of a compiled program, asynchronous ones at their start."""
  found, computation = [], ''
  for line in compiled.as_text().splitlines():
    if header := re.match(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$', line):
      computation = header.group(1)
    match = re.match(rf'\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({"|".join(KINDS)})(?:-start)?\(', line)
    if match:
      found.append(Collective(match.group(2), _bytes(match.group(1)), computation))
  return found


def in_loops(compiled) -> list[Collective]:
  """Returns the collectives in the bodies of loops, or in what these call."""
  text = compiled.as_text()
  calls, computation = {}, ''
  for line in text.splitlines():
    if header := re.match(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$', line):
      computation = header.group(1)
    calls.setdefault(computation, set()).update(re.findall(r'(?:calls|to_apply|body|condition)=%?([\w.\-]+)', line))
    for branches in re.findall(r'branch_computations=\{([^}]*)\}', line):
      calls[computation].update(name.strip(' %') for name in branches.split(','))
  reached = set(re.findall(r'body=%?([\w.\-]+)', text))
  while True:
    more = {name for computation in reached for name in calls.get(computation, ())} - reached
    if not more:
      break
    reached |= more
  return [one for one in collectives(compiled) if one.computation in reached]


def count(compiled) -> dict[str, int]:
  """Returns how many arrays each kind of collective moves; XLA may merge several of them into one collective."""
  found = {}
  for one in collectives(compiled):
    found[one.kind] = found.get(one.kind, 0) + 1
  return found


def sent(compiled, ranks: int, kinds=KINDS) -> float:
  """Returns the bytes that a device sends, all collectives being over so many ranks."""
  return sum(SENT[one.kind](ranks) * one.bytes for one in collectives(compiled) if one.kind in kinds)


def _bytes(shapes: str) -> int:
  total = 0
  for dtype, dimensions in re.findall(r'\b([a-z]+\d*|pred)\[([\d,]*)\]', shapes):
    total += BYTES.get(dtype, 0) * math.prod(int(size) for size in dimensions.split(',') if size)
  return total
