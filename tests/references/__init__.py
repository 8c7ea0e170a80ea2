"""Numbers recorded from another library (`load`) and slow float64 oracles (`oracles`): see README.md."""

import functools
import json
import pathlib

import numpy as np

_FOLDER = pathlib.Path(__file__).parent


@functools.cache
def _manifest() -> dict:
  return json.loads((_FOLDER / 'manifest.json').read_text())


def names(*prefixes: str) -> list[str]:
  """Returns the names of the recorded cases that start with one of the prefixes."""
  return [name for name in _manifest() if name.startswith(prefixes)]


def settings(name: str) -> dict:
  """Returns the settings that the case was recorded with."""
  return _manifest()[name]['settings']


def load(name: str) -> dict[str, np.ndarray]:
  """Returns the arrays of a case; weights and gradients are `[out, in]`."""
  with np.load(_FOLDER / f'{name}.npz') as arrays:
    return dict(arrays)
