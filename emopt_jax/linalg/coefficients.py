"""Named Newton-Schulz coefficient tables, each with its source.

A row (a, b, c) is one step X <- aX + (bA + cA^2)X with A = X X^T.
"""

import itertools
from typing import NamedTuple

import numpy as np


class Coefficients(NamedTuple):
  """Rows (a, b, c) of a Newton-Schulz iteration and what follows the last row.

  Attributes:
    rows: The steps in order.
    converges: Whether the last row has a fixed point near 1, so that more steps repeat it; otherwise the rows start
      again.
    rescales_rows: Whether every row is first divided by the square root of its row sum of |X X^T| (AOL). This bounds
      the singular values more tightly than the Frobenius norm, and bends the singular vectors slightly.
  """

  rows: tuple[tuple[float, float, float], ...]
  converges: bool
  rescales_rows: bool = False

  def schedule(self, steps: int | None = None) -> np.ndarray:
    """Returns the rows of `steps` steps as an array [steps, 3]; by default every row once."""
    if steps is None:
      steps = len(self.rows)
    if steps < 1:
      raise ValueError(f'steps must be at least 1, got {steps}')
    tail = itertools.repeat(self.rows[-1]) if self.converges else itertools.cycle(self.rows)
    return np.array(list(itertools.islice(itertools.chain(self.rows, tail), steps)), np.float64)


# Keller Jordan, https://kellerjordan.github.io/posts/muon/: the steepest slope at zero; singular values end in about
# [0.7, 1.2] and never settle.
KELLER_JORDAN = Coefficients(((3.4445, -4.7750, 2.0315),), converges=False)

# You Jiacheng in modded-nanogpt, derived at https://leloykun.github.io/ponder/muon-opt-coeffs/.
QUINTIC = Coefficients(
  (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
  ),
  converges=False,
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
  ),
  converges=True,
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
  ),
  converges=True,
)

# Boissin et al., "Turbo-Muon", arXiv 2512.04632, whose first step comes after the row rescaling.
AOL = Coefficients(
  (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
  ),
  converges=True,
  rescales_rows=True,
)

# DeepSeek-V4 technical report: eight fast steps, then two that converge.
DEEPSEEK_V4 = Coefficients(((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2, converges=True)

# Relaxed cubic schedule, arXiv 2606.00371: no A^2, two products a step instead of three.
CUBIC5 = Coefficients(
  (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
  ),
  converges=True,
)
