"""How the matrices of all classes are dealt to ranks, and which classes travel together."""

import numpy as np

# Largest share of padding for which a class, or several, get a collective of their own.
PADDING = 0.05


def deal(
  units: list[int], costs: list[float], sizes: list[int], start: list[float]
) -> tuple[list[tuple[int, ...]], list[list[int]]]:
  """Deals the units of each class, the dearest first, each to the rank with the least work, and groups the classes.

  Args:
    units: Per class, how many units there are; classes in falling cost.
    costs: Per class, the work of one unit.
    sizes: Per class, the numbers that one unit sends.
    start: Per rank, the work that it has already.

  Returns:
    Per class, how many units each rank gets; and the classes, by index, that share a collective. All ranks send rows of
    one length in a collective: classes of uneven counts are joined until at most 5 % of their rows is padding.

  Example:
    >>> deal([4, 4], [3.0, 1.0], [3, 1], [0.0, 0.0])
    ([(2, 2), (2, 2)], [[0], [1]])
  """
  loads = np.array(start)
  counts = []
  for number, cost in zip(units, costs, strict=True):
    counts.append(_deal_class(number, cost, loads))
    loads += np.array(counts[-1]) * cost
  groups, group = [], []
  for index in range(len(units)):
    group.append(index)
    if _padding(group, counts, sizes) <= PADDING:
      groups.append(group)
      group = []
  # What is left is too uneven: it is joined with earlier groups as long as that makes fewer rows of padding.
  while group and groups and _padding(group, counts, sizes) > PADDING:
    joined = groups[-1] + group
    if _row_length(joined, counts, sizes) >= sum(_row_length(part, counts, sizes) for part in (groups[-1], group)):
      break
    groups.pop()
    group = joined
  return counts, groups + [group] * bool(group)


def _deal_class(number: int, cost: float, loads: np.ndarray) -> tuple[int, ...]:
  counts = np.zeros(len(loads), int)
  for _ in range(number):
    counts[np.argmin(loads + counts * cost)] += 1
  return tuple(int(count) for count in counts)


def _padding(group: list[int], counts: list[tuple[int, ...]], sizes: list[int]) -> float:
  """Returns the share of padding in the rows of a group of classes."""
  numbers = sum(sum(counts[index]) * sizes[index] for index in group)
  return 1 - numbers / (_row_length(group, counts, sizes) * len(counts[0]))


def _row_length(group: list[int], counts: list[tuple[int, ...]], sizes: list[int]) -> int:
  return int(np.max(np.sum([np.array(counts[index]) * sizes[index] for index in group], axis=0)))


def lower_bound(units: list[int], costs: list[float], ranks: int) -> float:
  """Returns a load that no dealing of whole units to ranks can get below.

  The mean; and, since among the (t-1) * ranks + 1 dearest units t meet on one rank, t times the cheapest of those.

  Example:
    >>> lower_bound([3], [1.0], 2)
    2.0
  """
  dearest = sorted(((cost, number) for cost, number in zip(costs, units, strict=True)), reverse=True)
  bound, seen = sum(cost * number for cost, number in dearest) / ranks, 0
  for cost, number in dearest:
    seen += number
    bound = max(bound, cost * ((seen - 1) // ranks + 1))
  return bound
