"""The training example in a short form: its results, that it resumes to the same numbers, and what bad input gets."""

import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'examples' / 'train_lm.py'
STEPS = 40
TINY = (
  f'--width 16 --layers 1 --heads 2 --context 16 --batch 4 --steps {STEPS} --validate-every 8 --save-every 30'.split()
)
COMPARE = ['--optimizer', 'kl_soap', '--compare', 'adamw']


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  path = tmp_path_factory.mktemp('text') / 'text.txt'
  path.write_text(''.join(f'{number} times {number} is {number * number}.\n' for number in range(1000)))
  return path


@pytest.fixture(scope='module')
def uninterrupted(text, tmp_path_factory):
  """The folder and the output of a whole run with its comparison."""
  out = tmp_path_factory.mktemp('runs') / 'uninterrupted'
  process = start(text, out)
  output, errors = process.communicate(timeout=300)
  assert process.returncode == 0, errors
  return out, output


def start(text, out, *more):
  command = [sys.executable, SCRIPT, *TINY, *COMPARE, '--text', text, '--out', out, *more]
  return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def read_metrics(out):
  return [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]


def losses(out):
  return [(entry['step'], entry['loss'], entry.get('val_loss')) for entry in read_metrics(out)]


def stop_after_step(process, out, step, number):
  """Sends the signal once the metrics have that many lines, and returns the exit status and the output."""
  deadline = time.monotonic() + 300
  while not (out / 'metrics.jsonl').exists() or len((out / 'metrics.jsonl').read_text().splitlines()) < step:
    assert process.poll() is None and time.monotonic() < deadline, process.communicate()
    time.sleep(0.005)
  process.send_signal(number)
  output, errors = process.communicate(timeout=300)
  assert 'Traceback' not in errors
  return process.returncode, output


def test_trains_and_writes_its_results(uninterrupted):
  out, output = uninterrupted
  for folder in (out, out / 'compare_adamw'):
    metrics = read_metrics(folder)
    assert [entry['step'] for entry in metrics] == list(range(1, STEPS + 1))
    assert [entry['step'] for entry in metrics if 'val_loss' in entry] == list(range(8, STEPS + 1, 8))
    assert metrics[0]['loss'] > 5 and metrics[-1]['val_loss'] < 4  # ln 256 = 5.5 at the start
    assert all(entry['seconds'] > 0 and 0 < entry['optimizer_share'] < 1 for entry in metrics)
    assert {path.name for path in (folder / 'checkpoints').iterdir()} == {'30', '40'}
  assert (out / 'loss.png').read_bytes().startswith(b'\x89PNG')

  assert 'blocks/layers/0/qkv/kernel' in output  # the routing table
  assert f'kl_soap {STEPS}/{STEPS}  loss ' in output and 'tokens/s' in output  # plain lines: stdout is no terminal
  for name, folder in (('kl_soap', out), ('adamw', out / 'compare_adamw')):
    assert any(line.split()[:2] == [name, f'{losses(folder)[-1][2]:.3f}'] for line in output.splitlines())


def test_both_optimizers_see_the_same_start_and_batches(uninterrupted):
  out, _ = uninterrupted
  assert losses(out)[0] == losses(out / 'compare_adamw')[0]
  assert losses(out)[-1] != losses(out / 'compare_adamw')[-1]


def test_a_stopped_run_resumes_to_the_same_numbers(uninterrupted, text, tmp_path):
  whole, _ = uninterrupted
  out = tmp_path / 'stopped'
  status, output = stop_after_step(start(text, out), out, 3, signal.SIGINT)
  assert status == 128 + signal.SIGINT
  assert 'stopped kl_soap after step' in output and output.rstrip().endswith('--resume')
  assert 3 <= len(losses(out)) < STEPS
  assert losses(out) == losses(whole)[: len(losses(out))]

  # As after a crash: lines that are newer than the checkpoint.
  with open(out / 'metrics.jsonl', 'a') as metrics_file:
    metrics_file.write(json.dumps({'step': len(losses(out)) + 1, 'loss': 0.0}) + '\n')
  status, output = stop_after_step(start(text, out, '--resume'), out / 'compare_adamw', 3, signal.SIGTERM)
  assert status == 128 + signal.SIGTERM
  assert 'stopped adamw after step' in output
  assert losses(out) == losses(whole)

  process = start(text, out, '--resume')
  output, errors = process.communicate(timeout=300)
  assert process.returncode == 0, errors
  assert losses(out) == losses(whole)
  assert losses(out / 'compare_adamw') == losses(whole / 'compare_adamw')


@pytest.mark.parametrize('mesh', ['data=4', 'data=2,model=2'])
def test_a_mesh_gives_the_numbers_of_one_device_and_resumes_on_any(mesh, uninterrupted, text, tmp_path):
  whole, _ = uninterrupted
  out = tmp_path / 'mesh'
  status, output = stop_after_step(start(text, out, '--mesh', mesh), out, 3, signal.SIGINT)
  assert status == 128 + signal.SIGINT
  assert 'inside shard_map' in output  # the plan
  process = start(text, out, '--resume', '--mesh', 'data=2')
  output, errors = process.communicate(timeout=300)
  assert process.returncode == 0, errors
  # 1e-3: sums in another order, carried on by 40 steps of a model that learns.
  np.testing.assert_allclose([loss for _, loss, _ in losses(out)], [loss for _, loss, _ in losses(whole)], rtol=1e-3)


def test_resume_refuses_other_arguments(uninterrupted, text):
  out, _ = uninterrupted
  arguments = [*TINY, *COMPARE, '--text', str(text), '--out', str(out), '--resume']
  assert error_of(*arguments, '--seed', '1') == 'error: --resume continues a run with seed 0, not 1'
  assert error_of(*arguments, '--width', '32') == 'error: --resume continues a run with width 16, not 32'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ('--heads 3', 'error: --width must be a multiple of --heads = 3, not 128'),
    ('--steps 0', 'error: --steps must be positive, not 0'),
    ('--batch -1', 'error: --batch must be positive, not -1'),
    ('--seed -1', 'error: --seed must be positive, not -1'),
    ('--learning-rate 0', 'error: --learning-rate must be positive, not 0.0'),
    ('--adam-learning-rate nan', 'error: --adam-learning-rate must be positive, not nan'),
    ('--optimizer soap --compare soap', 'error: --compare soap is the optimizer of the run itself'),
    ('--mesh model=2', 'error: --mesh must be data=N or data=N,model=M, with --batch a multiple of N, not model=2'),
    ('--mesh data=3', 'error: --mesh must be data=N or data=N,model=M, with --batch a multiple of N, not data=3'),
    ('--text no_such_file', 'error: no_such_file holds 0 bytes, and --context 128 needs at least 20480'),
    ('--out no_such_folder --resume', 'error: --resume finds no checkpoint in no_such_folder'),
  ],
)
def test_bad_arguments(arguments, message):
  assert error_of(*arguments.split()) == message


def error_of(*arguments):
  """Returns the message that the script exits with; in this process, to spare the start of many."""
  spec = importlib.util.spec_from_file_location('train_lm', SCRIPT)
  script = importlib.util.module_from_spec(spec)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, 'argv', ['train_lm.py', *arguments])
    patch.syspath_prepend(SCRIPT.parent)  # where Python looks for the modules beside a script that it runs
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit) as error:
      script.main()
  return error.value.code
