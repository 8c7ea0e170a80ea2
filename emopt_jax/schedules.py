"""Learning-rate and batch-size rules."""

import optax


def wsd_schedule(
  peak_value: float, *, warmup_steps: int, stable_steps: int, decay_steps: int, minimum: float = 0.01
) -> optax.Schedule:
  """Returns the warm-up, stable, decay schedule: linear up from 0, constant, linear down to `minimum` of the peak.

  Args:
    peak_value: Learning rate of the stable part.
    warmup_steps: Steps of the linear rise.
    stable_steps: Steps at the peak.
    decay_steps: Steps of the linear fall; the rate stays at its minimum afterwards.
    minimum: Last rate relative to the peak, in [0, 1].

  Returns:
    A function of the step count.

  Raises:
    ValueError: If a number of steps is negative or minimum is not in [0, 1].

  Example:
    >>> schedule = wsd_schedule(1.0, warmup_steps=10, stable_steps=80, decay_steps=10)
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 89, 95, 100)]
    [0.0, 0.5, 1.0, 1.0, 0.505, 0.01]

  References:
    Hu et al., MiniCPM, arXiv 2404.06395; "SOAP, Muon, and Beyond", arXiv 2607.20548.
  """
  for name, steps in (('warmup_steps', warmup_steps), ('stable_steps', stable_steps), ('decay_steps', decay_steps)):
    if steps < 0:
      raise ValueError(f'{name} must not be negative, got {steps}')
  if not 0 <= minimum <= 1:
    raise ValueError(f'minimum must be in [0, 1], got {minimum}')
  decay_start = warmup_steps + stable_steps
  rise = optax.linear_schedule(0.0, peak_value, warmup_steps) if warmup_steps else optax.constant_schedule(peak_value)
  fall = (
    optax.linear_schedule(peak_value, minimum * peak_value, decay_steps)
    if decay_steps
    else optax.constant_schedule(peak_value)
  )
  return optax.join_schedules([rise, optax.constant_schedule(peak_value), fall], [warmup_steps, decay_start])


def scale_learning_rate(learning_rate: float, *, batch_size: int, reference_batch_size: int) -> float:
  """Returns lr sqrt(batch_size / reference_batch_size): the rate for another batch size.

  Args:
    learning_rate: Rate tuned at the reference batch size.
    batch_size: New batch size, in samples or tokens.
    reference_batch_size: Batch size of the tuning, in the same unit.

  Returns:
    The new rate.

  Raises:
    ValueError: If a batch size is below 1.

  Example:
    >>> scale_learning_rate(1e-3, batch_size=4096, reference_batch_size=1024)
    0.002

  References:
    Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, arXiv 2205.10287.
  """
  if batch_size < 1 or reference_batch_size < 1:
    raise ValueError(f'batch sizes must be at least 1, got {batch_size} and {reference_batch_size}')
  return learning_rate * (batch_size / reference_batch_size) ** 0.5


def expert_batch_size(batch_size: int, *, experts_per_token: int, experts: int) -> float:
  """Returns B k / N: how many tokens an expert of a mixture sees in a batch of B when each token goes to k of N.

  Args:
    batch_size: B, in tokens.
    experts_per_token: k, from 1 to N.
    experts: N.

  Returns:
    The mean batch size of one expert, for `scale_learning_rate`.

  Raises:
    ValueError: If k is not from 1 to N.

  Example:
    >>> expert_batch_size(4096, experts_per_token=2, experts=64)
    128.0

  References:
    "SOAP, Muon, and Beyond", arXiv 2607.20548.
  """
  if not 1 <= experts_per_token <= experts:
    raise ValueError(f'experts_per_token must be from 1 to {experts}, got {experts_per_token}')
  return batch_size * experts_per_token / experts
