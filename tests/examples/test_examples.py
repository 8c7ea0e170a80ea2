"""Runs every small example as a user would, and checks what it prints."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.environment import with_devices

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'


def run(name):
  command = [sys.executable, EXAMPLES / name]
  result = subprocess.run(command, env=with_devices(1), capture_output=True, text=True, timeout=300)
  assert result.returncode == 0, result.stderr
  assert 'Warning' not in result.stderr, result.stderr
  return result.stdout


def number_after(label, output):
  """Returns the last number of the last line with the label."""
  line = [line for line in output.splitlines() if label in line][-1]
  return float(line.split()[-1])


def test_quickstart():
  output = run('01_quickstart.py')
  assert 'KL-SOAP  step 300' in output
  adamw, kl_soap = (number_after(f'{name:8} step 300', output) for name in ('AdamW', 'KL-SOAP'))
  assert kl_soap < 0.7 * adamw < 0.05


def test_routing():
  output = run('02_routing.py')
  first, second = output.split('KL-SOAP on attention alone')
  assert re.search(r'blocks/attention/qkv/kernel +\(12, 768, 2304\) +12 x \(768, 2304\) +matrix', first)
  assert re.search(r'token_embed/embedding +\(50257, 768\) +other', first)
  assert '4 matrix, 6 other' in first
  assert re.search(r'blocks/attention/qkv/kernel +\(12, 768, 2304\) +36 x \(768, 768\) +matrix', second)
  assert re.search(r'blocks/mlp/up/kernel +\(12, 768, 3072\) +other', second)
  assert "rule matches no leaf: 'lm_heads' -> 'matrix'" in second


def test_compose():
  output = run('03_compose.py')
  assert number_after('polar_svd', output) < 1e-5
  assert number_after('Polar Express, 8 steps', output) < 1e-2 < number_after('Keller Jordan, 5 steps', output)
  assert number_after('spectral descent', output) < number_after('AdamW', output) < 0.05
  assert number_after('Lion in the eigenbasis', output) < 0.9 * number_after('Lion  ', output)


def test_linen():
  output = run('04_linen.py')
  adamw, kl_soap = re.findall(r'step 200 .* (\S+)', output)[:2]
  assert float(kl_soap) < 0.8 * float(adamw)
  assert 'KL-SOAP, continued from step 150' in output
  assert 'as without the stop: True' in output


def test_nnx():
  output = run('05_nnx.py')
  assert re.search(r'blocks/1/up/kernel +\(64, 256\) +1 x \(64, 256\) +matrix', output)
  assert number_after('  KL-SOAP  ', output) < 0.93 * number_after('  AdamW  ', output) < 2.5
  diagnosed = re.findall(r'blocks/\d/\w+/kernel +(\d\.\d+) +(\d\.\d+) +(\d\.\d+) ', output)
  assert len(diagnosed) == 8
  assert all(0.05 < float(rms) < 1 and float(stale) < 0.5 for rms, *stales in diagnosed for stale in stales)
  assert 'skipped gradients 0, rejected refreshes 0' in output


def test_layerwise():
  output = run('07_layerwise.py')
  assert re.search(r'32x32 +float32 +data=8 +0 +8 +1 +100%', output)
  assert 'load: max/mean 1.000' in output and '1.00 / N' in output
  one, *others = (number_after(name, output) for name in ('one device', 'plain jit', 'in shard_map', 'checkpoint'))
  assert one < 0.5
  # Sums in another order, carried on by 30 steps.
  assert all(abs(loss - one) < 1e-4 * one for loss in others)


@pytest.mark.parametrize('path', sorted(EXAMPLES.glob('0*.py')), ids=lambda path: path.name)
def test_begins_with_its_command(path):
  lines = path.read_text().splitlines()
  assert f'`python examples/{path.name}`' in lines[0]
  assert len(lines) <= (200 if path.name == '08_multihost.py' else 120)
