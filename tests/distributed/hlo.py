"""Collectives of a compiled program, as `benchmarks/communication.py` reads them."""

import collections

from communication import KINDS, Collective
from communication import collectives as collectives_of_text


def collectives(compiled) -> list[Collective]:
  return collectives_of_text(compiled.as_text())


def in_loops(compiled) -> list[Collective]:
  return [one for one in collectives(compiled) if one.loops]


def count(compiled) -> dict[str, int]:
  return dict(collections.Counter(one.kind for one in collectives(compiled)))


def sent(compiled, kinds=KINDS) -> float:
  """Returns the bytes that a device sends."""
  return sum(one.sent for one in collectives(compiled) if one.kind in kinds)
