"""Named Newton-Schulz coefficient tables, each with its source.

A row (a, b, c) is one step X <- aX + (bA + cA^2)X with A = X X^T.
"""

import itertools
from typing import NamedTuple

import numpy as np

Row = tuple[float, float, float]

# Newton and Schulz's own: it leads everything in (0, sqrt 3) to 1.
_CUBIC: Row = (1.5, -0.5, 0.0)


class Coefficients(NamedTuple):
  """Rows (a, b, c) of a Newton-Schulz iteration: by default every row is one step, as many as the source takes.

  Attributes:
    rows: The steps in order.
    converges: Whether more steps repeat the last row (true) or start again with the first (false). By default the last
      row repeats if it leads all singular values that the rows leave to a fixed point near 1. Otherwise the rows start
      again, unless singular values would leave the interval that they end in; then (3/2, -1/2, 0) follows.
    rescales_rows: Whether every row is first divided by the square root of its row sum of |X X^T| (AOL). This bounds
      the singular values more tightly than the Frobenius norm, and bends the singular vectors slightly.
  """

  rows: tuple[Row, ...]
  converges: bool | None = None
  rescales_rows: bool = False

  @property
  def largest(self) -> float:
    """The bound of the singular values before the first step.

    With rescaled rows a matrix of rank one reaches it, and above 0.88 the first AOL row turns the sign round.
    """
    return 0.8 if self.rescales_rows else 1.0

  def schedule(self, steps: int | None = None) -> np.ndarray:
    """Returns the rows of `steps` steps as an array [steps, 3]; by default every row once.

    Raises:
      ValueError: If there is no row, or `steps` is below 1.
    """
    if np.shape(self.rows)[1:] != (3,) or len(self.rows) == 0:
      raise ValueError(f'coefficients take one row (a, b, c) or more, got {self.rows}')
    if steps is None:
      steps = len(self.rows)
    if steps < 1:
      raise ValueError(f'steps must be at least 1, got {steps}')
    further = itertools.cycle(self._further_rows()) if steps > len(self.rows) else ()
    return np.array(list(itertools.islice(itertools.chain(self.rows, further), steps)), np.float64)

  def _further_rows(self) -> tuple[Row, ...]:
    """Returns the rows that follow the last one, again and again."""
    if self.converges is not None:
      return self.rows[-1:] if self.converges else self.rows
    ends = _singular_values(self.rows, self.largest * np.geomspace(1e-3, 1, 1000))[-1]
    # A hundred steps settle whatever settles; the fixed points of published tables are up to 0.03 from 1.
    if np.all(np.abs(_singular_values(self.rows[-1:] * 100, ends)[-1] - 1) < 0.05):
      return self.rows[-1:]
    again = _singular_values(self.rows * 2, ends)
    # Between two of the thousand values the interval may be a little wider.
    stays = np.all((again > 0.99 * np.min(ends)) & (again < 1.01 * np.max(ends)))
    return self.rows if stays else (_CUBIC,)


def _singular_values(rows: tuple[Row, ...], values: np.ndarray) -> np.ndarray:
  """Returns what singular values have become after each of the rows, `[len(rows), *values.shape]`."""
  results = []
  with np.errstate(over='ignore', invalid='ignore'):
    for a, b, c in rows:
      values = a * values + b * values**3 + c * values**5
      results.append(values)
  return np.stack(results)


# Keller Jordan, https://kellerjordan.github.io/posts/muon/: the steepest slope at zero; singular values end in about
# [0.7, 1.2] and never settle. Five steps.
KELLER_JORDAN = Coefficients(((3.4445, -4.7750, 2.0315),) * 5)

# You Jiacheng in modded-nanogpt, derived at https://leloykun.github.io/ponder/muon-opt-coeffs/.
QUINTIC = Coefficients(
  (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
  )
)

# Amsel et al., "The Polar Express", arXiv 2505.16932, algorithm 1, with its safety factor 1.01 divided in.
POLAR_EXPRESS = Coefficients(
  (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
  )
)

# Grishina et al., "Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type Polynomials",
# arXiv 2506.10935 (Remez, adaptive interval).
CANS = Coefficients(
  (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
  )
)

# Boissin et al., "Turbo-Muon", arXiv 2512.04632, whose first step comes after the row rescaling.
AOL = Coefficients(
  (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
  ),
  rescales_rows=True,
)

# DeepSeek-V4 technical report: eight fast steps, then two that converge.
DEEPSEEK_V4 = Coefficients(((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2)

# Relaxed cubic schedule, arXiv 2606.00371: no A^2, two products a step instead of three. Singular values end in
# [0.7, 1.3], where its last row would keep them wandering, and which its first row cannot take.
CUBIC5 = Coefficients(
  (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
  )
)
