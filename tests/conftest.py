"""Settings that must be in place before JAX starts."""

import importlib.metadata
import os
import tempfile

# Eight virtual CPU devices for the tests of sharded parameters; the others use the first. Most of a test is compiling:
# elementwise code is not optimized (products and factorizations come from libraries all the same), and a program that
# one test worker has compiled is not compiled by another.
_FLAGS = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  # The older emitters of elementwise code compile twice as fast. Later jaxlib has the newer ones only.
  _FLAGS += ' --xla_cpu_use_fusion_emitters=false'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAGS}'
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:  # set by the first worker's parent
  _PROGRAMS = tempfile.TemporaryDirectory(prefix='emopt_jax_programs')
  os.environ |= {
    'JAX_COMPILATION_CACHE_DIR': _PROGRAMS.name,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
  }
# QR is a hundred times slower when each virtual device starts the BLAS threads of the whole machine.
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')


def pytest_addoption(parser):
  parser.addoption('--exhaustive', action='store_true', help='every combination of the distributed tests, for an hour')
