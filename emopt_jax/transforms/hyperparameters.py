"""Range checks of hyperparameters, which may be traced (`optax.inject_hyperparams`) and are then not compared."""

from collections.abc import Callable

import jax.core
from jax.typing import ArrayLike


def check_decay(name: str, value: ArrayLike) -> None:
  """Raises a ValueError unless 0 <= value < 1."""
  if _is_concrete(value) and not 0 <= value < 1:  # pyright: ignore[reportOperatorIssue]
    raise ValueError(f'{name} must be in [0, 1), got {value}')


def check_not_negative(name: str, value: ArrayLike | Callable) -> None:
  """Raises a ValueError unless value >= 0; a schedule is not looked at."""
  if _is_concrete(value) and not value >= 0:  # pyright: ignore[reportOperatorIssue]
    raise ValueError(f'{name} must not be negative, got {value}')


def check_positive(name: str, value: ArrayLike) -> None:
  """Raises a ValueError unless value > 0."""
  if _is_concrete(value) and not value > 0:  # pyright: ignore[reportOperatorIssue]
    raise ValueError(f'{name} must be positive, got {value}')


def check_at_least_one(name: str, value: ArrayLike) -> None:
  """Raises a ValueError unless value is a whole number >= 1."""
  if _is_concrete(value) and not value >= 1:  # pyright: ignore[reportOperatorIssue]
    raise ValueError(f'{name} must be at least 1, got {value}')
  if _is_concrete(value) and value != int(value):  # pyright: ignore[reportArgumentType]
    raise ValueError(f'{name} must be a whole number, got {value}')


def _is_concrete(value: ArrayLike | Callable) -> bool:
  return not callable(value) and not isinstance(value, jax.core.Tracer)
