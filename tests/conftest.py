"""Settings that must be in place before JAX starts."""

import os

# Eight virtual CPU devices for the tests of sharded parameters; the others use the first.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8'
# QR is a hundred times slower when each virtual device starts the BLAS threads of the whole machine.
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')


def pytest_addoption(parser):
  parser.addoption('--exhaustive', action='store_true', help='every combination of the distributed tests, for an hour')
