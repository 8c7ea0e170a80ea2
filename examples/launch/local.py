"""Runs a script in several processes on the CPU of this machine, as several hosts would, and ends all where one fails.

  python examples/launch/local.py -n 4 -- python examples/08_multihost.py --steps 200
  python examples/launch/local.py -n 2 --devices 4 -- python examples/08_multihost.py  # four virtual devices each

The script must take --coordinator, --processes and --process. The output of process 0 is shown while it runs, that of
the others where they fail. Every process leads a group of its own, and no group outlives this launcher.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

PORT_TAKEN = 'Failed to start RPC server'  # says JAX; between its choice and its use another program may take it


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('-n', '--processes', type=int, default=2)
  parser.add_argument('--devices', type=int, default=1, help='virtual devices per process')
  parser.add_argument('--grace', type=float, default=45, help='seconds for the others to end after one has failed')
  parser.add_argument('--timeout', type=float, default=float('inf'), help='seconds for the whole run')
  parser.add_argument('command', nargs='+')
  return parser.parse_args()


def free_port():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def kill_group(process):
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def port_taken(folder):
  return PORT_TAKEN in (folder / '0.log').read_text(errors='replace')


def start(args, folder):
  # A proxy would be asked for the coordinator too.
  environment = {key: value for key, value in os.environ.items() if not key.lower().endswith('_proxy')}
  flags = (
    f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={args.devices}'  # the last one counts
  )
  environment |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
  common = ['--coordinator', f'127.0.0.1:{free_port()}', '--processes', str(args.processes)]
  processes = []
  try:
    for i in range(args.processes):
      with open(folder / f'{i}.log', 'wb') as log:
        command = [*args.command, *common, '--process', str(i)]
        processes.append(
          subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0)
        )
      print(f'process {i}: pid {processes[i].pid}', flush=True)
  except BaseException:
    for process in processes:
      kill_group(process)
    raise
  return processes


def watch(args, folder, processes):
  """Waits until all have ended, or one has failed and the others had their time; returns how each failed."""
  failed, begin, deadline = {}, time.monotonic(), time.monotonic() + args.timeout
  with open(folder / '0.log', errors='replace') as shown:
    while True:
      statuses = [process.poll() for process in processes]
      print(shown.read(), end='', flush=True)
      for i, status in enumerate(statuses):
        if status and i not in failed:
          kill_group(processes[i])  # what its leader left behind
          how = signal.Signals(-status).name if status < 0 else f'exit status {status}'
          failed[i] = f'process {i} ended with {how} after {time.monotonic() - begin:.1f} s'
          grace = 0 if port_taken(folder) else args.grace
          deadline = min(deadline, time.monotonic() + grace)
      running = [i for i, status in enumerate(statuses) if status is None]
      if not running or time.monotonic() > deadline:
        late = f'was still running {time.monotonic() - begin:.1f} s after the start, and was killed'
        return failed | {i: f'process {i} {late}' for i in running}
      time.sleep(0.05)


def main():
  args = parse_arguments()
  # An exception, so that `finally` runs.
  signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
  for _ in range(3):
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      processes = start(args, folder)
      try:
        failed = watch(args, folder, processes)
      finally:
        for process in processes:
          kill_group(process)
      if not failed:
        return
      logs = {i: (folder / f'{i}.log').read_text(errors='replace') for i in failed}
      if not port_taken(folder):
        break
    print('the port was taken in the meantime: starting anew with another one', flush=True)
  for i, log in logs.items():
    print(f'----- last output of process {i}\n' + '\n'.join(log.splitlines()[-30:]))
  sys.exit('\n'.join(['error, in the order of events:', *failed.values()]))


if __name__ == '__main__':
  main()
