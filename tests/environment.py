"""The environment of a process with devices of its own, which compiles as fast as the tests do."""

import os


def with_devices(count: int) -> dict[str, str]:
  flags = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={count}'  # the last one counts
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
