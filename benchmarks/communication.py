"""Reads from a compiled, scheduled program what it communicates, how often, and what it computes in the meantime."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from hlo import Instruction, parse, size_of

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
FREE = ('bitcast', 'tuple', 'get-tuple-element', 'parameter', 'constant')  # opcodes that take no time
_PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|conv)', re.IGNORECASE)


class Collective(NamedTuple):
  """One collective of a program.

  Attributes:
    kind: One of `KINDS`.
    scope: Its `op_name`; that of what it takes or gives, where the compiler has merged several.
    loops: The `op_name` of each loop around it, outermost first.
    runs: How often it runs in a step.
    sent: Bytes that a device sends in all runs together, by rings.
    asynchronous: Whether other work is scheduled between its start and its end.
    products: Scopes of the matrix products scheduled in between; a loop or call with products counts as one.
  """

  kind: str
  scope: str
  loops: tuple[str, ...]
  runs: int
  sent: float
  asynchronous: bool
  products: tuple[str, ...]


def sent_bytes(kind: str, operands: float, ranks: int) -> float:
  """Returns the bytes that each rank of a ring sends, from those that it puts in.

  Example:
    >>> sent_bytes('all-reduce', 8.0, 4), sent_bytes('reduce-scatter', 8.0, 4), sent_bytes('all-gather', 2.0, 4)
    (12.0, 6.0, 6.0)
  """
  others = ranks - 1
  factors = {'collective-permute': 1, 'all-gather': others, 'all-reduce': 2 * others / ranks}
  return operands * factors.get(kind, others / ranks)


def collectives(text: str) -> list[Collective]:
  """Returns the collectives of a program."""
  computations, entry = parse(text)
  products = _with_products(computations)
  return list(_walk(computations, products, entry, 1, ()))


class _Start(NamedTuple):
  """Where a collective starts: the collective, what its operands are among, and the index at which it is awaited."""

  kind: str
  one: Instruction
  among: list[Instruction]
  end: int


def _walk(computations, products: set[str], name: str, runs: int, loops: tuple[str, ...]) -> Iterator[Collective]:
  instructions = computations[name]
  for index, one in enumerate(instructions):
    start = _start(computations, instructions, index)
    if start:
      put_in = sum(size_of(other.shape) for other in start.among if other.name in start.one.operands)
      between = [other for other in instructions[index + 1 : start.end] if other.opcode not in FREE]
      asynchronous = bool(between) and '"is_sync":true' not in one.text
      during = [_scope_inside(computations, other) or other.name for other in between if _is_product(other, products)]
      yield Collective(
        start.kind,
        start.one.scope or one.scope or _scope(instructions, index),
        loops,
        runs,
        runs * sent_bytes(start.kind, put_in, _ranks(start.one.text)),
        asynchronous,
        tuple(during) if asynchronous else (),
      )
    elif one.opcode == 'while':
      inner = (*loops, _scope_inside(computations, one) or one.name)
      for called in one.called:
        yield from _walk(computations, products, called, runs * _trips(computations, one), inner)
    elif one.opcode in ('call', 'conditional'):
      for called in one.called:
        yield from _walk(computations, products, called, runs, loops)


def _start(computations, instructions: list[Instruction], index: int) -> _Start | None:
  """Returns the collective that an instruction is, starts or has in it, if any.

  On TPUs asynchronous collectives are a chain of fusions: one that starts it, those that go on with it beside a matrix
  product, and one that awaits it; each has a copy of the collective in it.
  """
  one = instructions[index]
  kind = one.opcode.removesuffix('-start')
  if kind in KINDS:
    return _Start(kind, one, instructions, _done(instructions, index) if one.opcode != kind else index + 1)
  if one.opcode not in ('fusion', 'async-start'):
    return None
  for name in one.called:
    inner = computations.get(name, [])
    own = next((other for other in inner if other.opcode in KINDS), None)
    if own and one.opcode == 'async-start':
      return _Start(own.opcode, own, inner, _done(instructions, index))
    if own and name.startswith('all-reduce-scatter'):
      return _Start('reduce-scatter', own, inner, index + 1)
    if own and _mentions(inner, 'AsyncCollectiveStart'):
      return _Start(own.opcode, own, inner, _fused_done(computations, instructions, index, own))
    if own and not _chain(own) and not _mentions(inner, 'AsyncCollectiveDone'):
      return _Start(own.opcode, own, inner, index + 1)
  return None


def _done(instructions: list[Instruction], start: int) -> int:
  name, opcode = instructions[start].name, instructions[start].opcode.replace('-start', '-done')
  return next(i for i, other in enumerate(instructions) if other.opcode == opcode and other.operands[:1] == (name,))


def _fused_done(computations, instructions: list[Instruction], start: int, own: Instruction) -> int:
  for index in range(start + 1, len(instructions)):
    for name in instructions[index].called if instructions[index].opcode == 'fusion' else ():
      inner = computations.get(name, [])
      same = any(other.opcode == own.opcode and _chain(other) == _chain(own) for other in inner)
      if same and _mentions(inner, 'AsyncCollectiveDone'):
        return index
  return start + 1


def _mentions(instructions: list[Instruction], target: str) -> bool:
  return any(target in one.text for one in instructions)


def _chain(one: Instruction) -> list[str]:
  return re.findall(r'chain_id="(\w+)"', one.text)


def _trips(computations, loop: Instruction) -> int:
  """Returns how often a loop runs: as the compiler says, or the one constant in its condition; 1 where neither is."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
    return int(known[1])
  condition = re.search(r'condition=%?([\w.\-]+)', loop.text)
  constants = [one.text for one in computations[condition[1]] if one.opcode == 'constant'] if condition else []
  return int(constants[0].split(')')[0]) if len(constants) == 1 else 1


def _scope_inside(computations, one: Instruction) -> str:
  """Returns the scope of an instruction, or of the first with a scope in what it calls."""
  inside = (_scope_inside(computations, other) for name in one.called for other in computations.get(name, ()))
  return one.scope or next(filter(None, inside), '')


def _scope(instructions: list[Instruction], index: int) -> str:
  """Returns the scope of what an instruction takes, or of the first one with a scope that uses its result."""
  for other in instructions[:index]:
    if other.scope and other.name in instructions[index].operands:
      return other.scope
  names = {instructions[index].name}
  for other in instructions[index + 1 :]:
    if names.intersection(other.operands):
      if other.scope:
        return other.scope
      names.add(other.name)
  return ''


def _ranks(text: str) -> int:
  """Returns how many ranks take part in each group of a collective."""
  if iota := re.search(r'replica_groups=\[\d+,(\d+)\]', text):
    return int(iota[1])
  if groups := re.search(r'replica_groups=\{\{([\d,]+)\}', text):
    return groups[1].count(',') + 1
  if mesh := re.search(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}', text):
    return math.prod(int(re.search(rf"'{axis}'=(\d+)", mesh[1])[1]) for axis in re.findall(r"'([^']*)'", mesh[2]))
  if 'source_target_pairs' in text:
    return 2
  raise ValueError(f'a collective without replica groups, or in a form not known here: {text[:200]}')


def _is_product(one: Instruction, products: set[str]) -> bool:
  if one.opcode in ('dot', 'convolution') or _PRODUCT_CALL.search(one.text):
    return True
  return any(called in products for called in one.called)


def _with_products(computations) -> set[str]:
  """Returns the computations that multiply matrices, themselves or in what they call, which stands before them."""
  found: set[str] = set()
  for name, instructions in computations.items():
    if any(_is_product(one, found) for one in instructions):
      found.add(name)
  return found
