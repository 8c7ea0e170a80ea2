"""The environment of a process with one device, as a user has it, that compiles as fast as the tests do."""

import os


def environment() -> dict[str, str]:
  flags = [flag for flag in os.environ['XLA_FLAGS'].split() if 'device_count' not in flag]
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join(flags)}
