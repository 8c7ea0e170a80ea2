"""Imports go one way: linalg -> matrices -> batching -> transforms -> optimizers -> routing -> the package itself."""

import ast
import pathlib

import pytest

import emopt_jax

ROOT = pathlib.Path(emopt_jax.__file__).parent
LAYERS = ('linalg', 'matrices', 'batching', 'transforms', 'optimizers', 'routing', 'routing_table')
# Modules beside the layers, and the layers that each may use.
BESIDE = {
  'schedules': (),
  'text_table': (),
  'diagnostics': ('linalg', 'matrices'),
  'distributed': (*LAYERS[:4], 'routing', 'text_table', 'distributed'),
}
FILES = sorted(ROOT.rglob('*.py'))


def imported(file: pathlib.Path) -> set[tuple[str, ...]]:
  """Returns the dotted names that a file imports anywhere, also inside its functions."""
  nodes = list(ast.walk(ast.parse(file.read_text())))
  names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
  froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
  assert all(node.level == 0 for node in froms), 'imports are absolute'
  names |= {f'{node.module}.{alias.name}' for node in froms for alias in node.names}
  return {tuple(name.split('.')) for name in names}


@pytest.mark.parametrize('file', FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file):
  layer = file.relative_to(ROOT).with_suffix('').parts[0]
  if layer == '__init__':
    return
  names = imported(file)
  allowed = BESIDE[layer] if layer in BESIDE else LAYERS[: LAYERS.index(layer) + 1]
  if layer in ('routing', 'routing_table'):
    allowed = [name for name in allowed if name not in ('transforms', 'optimizers')]  # any optimizer is routed
    allowed.append('text_table')
  own = {name[1] if len(name) > 1 else '__init__' for name in names if name[0] == 'emopt_jax'}
  assert own <= set(allowed)
  if layer == 'linalg':
    assert not {'optax', 'flax'} & {name[0] for name in names}
  if layer == 'optimizers':
    classes = [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    assert not classes and not any(name[0] == 'jax' and 'numpy' in name for name in names)  # no state, no mathematics
