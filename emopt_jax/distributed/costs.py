"""What one step costs for one matrix, in floating-point operations: how work is weighed when it is dealt to ranks."""


def newton_schulz_cost(rows: int, columns: int, *, steps: int = 8) -> float:
  """Returns the operations of Newton-Schulz: each step two products with the matrix and one of its Gram matrix.

  steps * (4 m^2 n + 2 m^3), m the shorter side.

  Args:
    rows: Rows of the matrix.
    columns: Columns of the matrix.
    steps: Newton-Schulz steps.

  Example:
    >>> newton_schulz_cost(768, 3072, steps=1) / 768**3
    18.0
  """
  short, long = sorted((rows, columns))
  return float(steps * (4 * short**2 * long + 2 * short**3))


def soap_cost(rows: int, columns: int) -> float:
  """Returns the operations of SOAP with a QR refresh of both sides at every step.

  10 m n (m + n) for the factors, the rotation of the gradient, back, and of the first moment from the old basis to the
  new; 16/3 (m^3 + n^3) for A Q, its orthonormal columns, and the eigenvalues, in four blocks.

  Args:
    rows: Rows m of the matrix.
    columns: Columns n of the matrix.

  Example:
    >>> soap_cost(30, 30)
    828000.0
  """
  return 10.0 * rows * columns * (rows + columns) + 16 / 3 * (rows**3 + columns**3)


def elementwise_cost(rows: int, columns: int) -> float:
  """Returns the operations of an elementwise optimizer such as Adam, about 12 a number.

  Args:
    rows: Rows of the matrix.
    columns: Columns of the matrix.

  Example:
    >>> elementwise_cost(10, 10)
    1200.0
  """
  return 12.0 * rows * columns
