"""Several processes of `examples/08_multihost.py` on this machine: killed, frozen, and continued on other numbers."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.environment import with_devices

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
SAVE_EVERY = 10


def example(out, *options):
  return [sys.executable, EXAMPLES / '08_multihost.py', '--save-every', str(SAVE_EVERY), '--out', out, *options]


def run_alone(out, steps):
  """Returns what a run of one process prints."""
  command = example(out, '--steps', str(steps))
  result = subprocess.run(command, env=with_devices(1), capture_output=True, text=True, timeout=120)
  assert result.returncode == 0, result.stderr
  return result.stdout


def launch(command, *options):
  """Starts local processes; the launcher ends in any case, and all of them with it."""
  launcher = [sys.executable, EXAMPLES / 'launch' / 'local.py', '--timeout', '120', *options, '--', *command]
  return subprocess.Popen(launcher, env=with_devices(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(launcher, groups):
  """Leaves nothing behind, whatever went wrong."""
  launcher.terminate()
  with contextlib.suppress(subprocess.TimeoutExpired):
    launcher.wait(10)
  launcher.kill()
  launcher.wait()
  for group in groups:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(group, signal.SIGKILL)


def exists(group):
  try:
    os.killpg(group, 0)
  except ProcessLookupError:
    return False
  return True


def all_gone(groups):
  end = time.monotonic() + 10  # a killed grandchild stays in its group until init takes note
  while any(exists(group) for group in groups) and time.monotonic() < end:
    time.sleep(0.1)
  return not any(exists(group) for group in groups)


def train_and_kill(out, *, processes, devices, victim, number, first_step, grace):
  """Trains until a step is done, then sends a signal to one process; returns the output and the seconds to the end."""
  command = example(out, '--steps', '1000000', '--timeout', '10')
  options = ('-n', str(processes), '--devices', str(devices), '--grace', str(grace))
  launcher, groups, lines, killed = launch(command, *options), [], [], None
  try:
    for line in launcher.stdout:
      lines.append(line)
      if found := re.match(r'process \d+: pid (\d+)', line):
        groups.append(int(found[1]))
      if killed is None and (found := re.match(r'step (\d+) ', line)) and int(found[1]) >= first_step:
        killed = time.monotonic()
        os.killpg(groups[victim], number)
    output = ''.join(lines)
    assert launcher.wait(10) != 0
    assert killed is not None, output
    assert len(groups) == processes
    assert all_gone(groups)
    seconds = time.monotonic() - killed
    return output, seconds
  finally:
    end(launcher, groups)


def saved_steps(out):
  return sorted(int(folder.name) for folder in (out / 'checkpoints').iterdir() if folder.name.isdigit())


def shown_steps(output):
  """Returns the steps in the output of the run, without their repetition in the logs that follow a failure."""
  return [int(step) for step in re.findall(r'^step (\d+) ', output.split('----- last output')[0], re.MULTILINE)]


def check_end(output, out, seconds):
  """Checks the end of a killed run; returns the step of its last checkpoint."""
  last = saved_steps(out)[-1]
  assert seconds < 60
  assert f'To go on from step {last}, start all processes again' in output
  assert last >= shown_steps(output)[-1] - SAVE_EVERY
  return last


def check_resumed(output, last):
  assert f'goes on from step {last}\n' in output
  assert shown_steps(output)[0] == last + 10


def load_params(out, step):
  path = out / 'checkpoints' / str(step) / 'default'
  with ocp.PyTreeCheckpointer() as checkpointer:
    # As NumPy arrays, because this process lacks the devices that wrote them.
    leaves = checkpointer.metadata(path).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
    return checkpointer.restore(path, restore_args=as_numpy)['params']


def test_killed_run_goes_on_with_other_numbers_of_processes(tmp_path):
  out = tmp_path / 'run'
  output, seconds = train_and_kill(
    out, processes=2, devices=2, victim=1, number=signal.SIGKILL, first_step=20, grace=60
  )
  first = check_end(output, out, seconds)
  ends = output.split('error, in the order of events:')[1].split('\n')
  assert ends[1].startswith('process 1 ended with SIGKILL')
  assert ends[2].startswith('process 0 ended with ')  # by itself

  # Process 0, this time: the others lose the coordinator.
  output, seconds = train_and_kill(
    out, processes=4, devices=1, victim=0, number=signal.SIGKILL, first_step=first + 20, grace=60
  )
  check_resumed(output, first)
  second = check_end(output, out, seconds)
  ends = output.split('error, in the order of events:')[1].split('\n')
  assert ends[1].startswith('process 0 ended with SIGKILL')
  assert sorted(line[:21] for line in ends[2:5]) == [f'process {i} ended with '[:21] for i in (1, 2, 3)]

  steps = second + 10
  resumed = run_alone(out, steps)
  check_resumed(resumed, second)
  run_alone(tmp_path / 'whole', steps)
  assert saved_steps(out)[-1] == saved_steps(tmp_path / 'whole')[-1] == steps
  # The ranks' gradients are added in another order, which changes their last bits; measured, tens of steps make 1e-6
  # of that.
  expected, actual = load_params(tmp_path / 'whole', steps), load_params(out, steps)
  assert len(jax.tree.leaves(expected)) == 12
  for reference, leaf in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
    assert np.linalg.norm(leaf - reference) < 1e-5 * np.linalg.norm(reference)


def test_frozen_process_ends_the_others(tmp_path):
  # As a host that loses its network: no connection is closed, and only heartbeats tell.
  output, seconds = train_and_kill(
    tmp_path, processes=2, devices=1, victim=1, number=signal.SIGSTOP, first_step=20, grace=1
  )
  check_end(output, tmp_path, seconds)
  assert 'stopped sending heartbeats' in output
  ends = output.split('error, in the order of events:')[1].split('\n')
  assert ends[1].startswith('process 0 ended with ')
  assert 'process 1 was still running' in ends[2]


FAKE = """
import pathlib, sys, time
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
seen = pathlib.Path(sys.argv[1])
if arguments['--process'] == '0':
  (seen / arguments['--coordinator']).touch()
  if len(list(seen.iterdir())) == 1:
    sys.exit('Failed to start RPC server')
while len(list(seen.iterdir())) < 2:  # as it waits for the coordinator
  time.sleep(0.05)
"""


def test_launcher_takes_another_port(tmp_path):
  launcher = launch([sys.executable, '-c', FAKE, tmp_path], '-n', '2', '--timeout', '20')
  try:
    output, _ = launcher.communicate(timeout=40)
  finally:
    end(launcher, [])
  assert launcher.returncode == 0, output
  assert 'starting anew' in output
  assert len(list(tmp_path.iterdir())) == 2


def test_launcher_ends_at_its_timeout(tmp_path):
  launcher = launch([sys.executable, '-c', 'import time; time.sleep(60)'], '-n', '2', '--timeout', '1')
  try:
    output, _ = launcher.communicate(timeout=40)
  finally:
    end(launcher, [])
  assert launcher.returncode != 0
  assert output.count('was still running') == 2
  groups = [int(group) for group in re.findall(r'pid (\d+)', output)]
  assert len(groups) == 2
  assert all_gone(groups)
