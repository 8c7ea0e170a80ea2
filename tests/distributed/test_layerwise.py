"""Distributed steps equal those of one device: momentum, factors and parameters."""

import itertools

import pytest

from tests.distributed import problems

STEPS = 10
COUNTS = ['48 in 4 classes', '13', '3', '1']
ENTRIES = [('A', 'Auto'), ('A', 'Explicit'), ('B', 'Auto'), ('B', 'Explicit'), ('C', 'Explicit')]


def in_short_run(optimizer: str, count: str, entry: str, kind: str, layout: str) -> bool:
  """Returns whether a case is in the short run: each optimizer, count, entry, mesh and layout, not all together."""
  if optimizer == 'muon' and count == '13':
    return kind == 'Auto' or entry == 'C' or layout == 'FSDP x tensor parallel'
  if optimizer == 'muon':
    return (entry, kind) == ('A', 'Auto') and (count == '48 in 4 classes' or layout == 'replicated')
  if optimizer == 'kl_soap' and count == '3':
    return (entry, kind, layout) in KL_SOAP
  return (entry, kind, layout) == ('A', 'Auto', 'replicated') and (optimizer, count) in (
    ('kl_soap', '48 in 4 classes'),
    ('soap', '3'),
  )


KL_SOAP = {
  ('A', 'Auto', 'FSDP x tensor parallel'),
  ('A', 'Explicit', 'tensor parallel'),
  ('B', 'Auto', 'FSDP'),
  ('C', 'Explicit', 'replicated'),
}


def pytest_generate_tests(metafunc):
  if 'case' not in metafunc.fixturenames:
    return
  cases = [
    (optimizer, count, entry, kind, layout)
    for optimizer, count, (entry, kind), layout in itertools.product(problems.INNERS, COUNTS, ENTRIES, problems.LAYOUTS)
    # Gradients of sharded parameters are never unreduced: the transpose of their all-gather reduces them.
    if (entry != 'C' or layout == 'replicated')
    and (metafunc.config.getoption('--exhaustive') or in_short_run(optimizer, count, entry, kind, layout))
  ]
  metafunc.parametrize('case', cases, ids='-'.join)


def test_equals_one_device(case):
  optimizer, count, entry, kind, layout = case
  problem = problems.problem(count, layout, kind)
  expected = problems.reference(optimizer, count, problem.mesh.shape['data'], STEPS)
  actual = problems.run_distributed(problems.INNERS[optimizer], problem, STEPS, entry)
  # 1e-5: ten steps of sums in another order, 1e-7 each, which Newton-Schulz and the rotations magnify a few times.
  problems.assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize('layout', ['replicated', 'FSDP x tensor parallel'])
def test_without_tracking_of_varying_values(layout):
  problem = problems.problem('3', layout)
  expected = problems.reference('muon', '3', problem.mesh.shape['data'], STEPS)
  actual = problems.run_distributed(problems.INNERS['muon'], problem, STEPS, 'A', check_vma=False)
  problems.assert_close(actual, expected, 1e-5)
