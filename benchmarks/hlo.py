"""Reads the instructions of a compiled program from its text."""

import math
import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_CALLED = re.compile(r'(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'(?:branch_computations|called_computations)=\{([^}]*)\}')
_SHAPE = re.compile(r'\b([a-z]+\d\w*|pred)\[([\d,]*)\]')


class Instruction(NamedTuple):
  """One instruction, in the order in which it runs.

  Attributes:
    name, opcode: As in the program.
    shape: Shape of its result, as text.
    operands, called: Names of its operands, and of the computations that it runs.
    scope: The `op_name` that JAX gave it, '' where the compiler made it.
    text: All of its arguments and attributes.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  called: tuple[str, ...]
  scope: str
  text: str


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Returns the instructions of each computation, and the name of the computation that the program starts with."""
  computations: dict[str, list[Instruction]] = {}
  current, entry = '', ''
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      current = header[2]
      computations[current] = []
      entry = current if header[1] else entry
    elif current and (found := _INSTRUCTION.match(line)):
      name, shape, opcode, rest = found.groups()
      called = _CALLED.findall(rest) + [n.strip(' %') for names in _BRANCHES.findall(rest) for n in names.split(',')]
      scope = re.search(r'op_name="([^"]*)"', rest)
      operands = tuple(re.findall(r'%([\w.\-]+)', rest.split(')')[0]))
      instruction = Instruction(name, shape, opcode, operands, tuple(called), scope[1] if scope else '', rest)
      computations[current].append(instruction)
  return computations, entry


def size_of(shape: str) -> float:
  """Returns the bytes of a shape or a tuple of shapes.

  Example:
    >>> size_of('(f32[2,3]{1,0}, bf16[4]{0})')
    32.0
  """
  total = 0.0
  for dtype, dimensions in _SHAPE.findall(shape):
    bits = re.search(r'\d+', dtype)
    total += (int(bits[0]) if bits else 8) / 8 * math.prod(int(size) for size in dimensions.split(',') if size)
  return total
