"""State that is a dict keyed by the path of each stack of matrices."""

from typing import Any

import jax.numpy as jnp

from emopt_jax.matrices import Stacks


def check_known(stacks: Stacks, entries: dict[str, Any]) -> None:
  """Raises a ValueError unless a state keyed by path was made for these stacks."""
  for path, stack in stacks.items():
    if path not in entries:
      raise ValueError(
        f"leaf '{path}' of shape {stack.shape[1:]}: the optimizer's state was made for other parameters, "
        f'{sorted(entries)}; make it with init from the parameters that are updated'
      )


def keyed_by_path(entries: dict[str, Any]) -> Any:
  """Returns the entries, or an empty array where there are none.

  `optax.tree.map_params` calls init with an empty tree and takes what it returns as a prefix of the state. An empty
  dict is no prefix of a dict with entries; an array is a prefix of anything.
  """
  return entries or jnp.zeros(0)
