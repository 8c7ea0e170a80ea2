"""Clipping of averaged gradients equals that of one device, also where gradients are not finite or huge."""

import functools

import numpy as np
import optax
import pytest

import emopt_jax
from emopt_jax import distributed
from tests.distributed import problems

INNERS = {
  'muon': functools.partial(emopt_jax.muon, 0.02),
  'soap': functools.partial(emopt_jax.soap, 0.02),
}


def setting(layout='replicated'):
  problem = problems.problem('3', layout)
  return problem, distributed.plan_layerwise(problem.params, problem.mesh, 'data', specs=problem.specs)


def gradients(problem, entries=()):
  """Returns the gradients of all ranks for three steps, with some entries of one rank's gradient of one matrix put."""
  steps = [problems.local_gradients(problem.params, step, problem.mesh.shape['data']) for step in range(3)]
  for step, entry in entries:
    steps[step]['8x16_1']['kernel'][2, 3, 4] = entry
  return steps


@pytest.mark.parametrize(
  ('optimizer', 'entry', 'layout'),
  [
    ('muon', 'A', 'replicated'),
    ('muon', 'B', 'replicated'),
    ('soap', 'A', 'replicated'),
    ('soap', 'B', 'replicated'),
    ('muon', 'A', 'FSDP x tensor parallel'),
  ],
)
def test_one_bad_matrix_skips_and_the_rest_goes_on(optimizer, entry, layout):
  problem, plan = setting(layout)
  inner = INNERS[optimizer]
  actual = distributed.layerwise(inner(), plan, others=optax.adamw(0.01), max_norm=0.5)
  plain = optax.chain(emopt_jax.clip_by_finite_norm(0.5), emopt_jax.route(inner(), optax.adamw(0.01)))
  bad = gradients(problem, [(1, np.nan)])
  problems.assert_equals_one_device(actual, plain, problem, plan, entry, bad)
  state = plain.init(problem.params)
  for local in bad:
    updates, state = plain.update(problems.mean(local), state, problem.params)
  assert emopt_jax.diagnostics.skipped_gradients(state) == 1
  assert all(
    np.isfinite(leaf).all() and np.any(leaf) for leaf in (updates['8x16_1']['kernel'], updates['norm']['scale'])
  )


@pytest.mark.parametrize('entry', ['A', 'B'])
@pytest.mark.parametrize('largest', [1e25, 3e38])
def test_huge_entry_gives_a_finite_norm(largest, entry):
  problem, plan = setting()
  actual = distributed.layerwise(optax.sgd(0.1), plan, others=optax.sgd(0.1), max_norm=0.5)
  plain = optax.chain(emopt_jax.clip_by_finite_norm(0.5), optax.partition({'all': optax.sgd(0.1)}, 'all'))
  problem = problem._replace(
    params={path: {k: 0 * x for k, x in leaf.items()} for path, leaf in problem.params.items()}
  )
  huge = gradients(problem, [(0, largest)])[:1]
  moved = run_parameters(actual, problem, plan, entry, huge)
  expected = run_parameters(plain, problem, None, 'one device', huge)
  problems.assert_close(moved, expected, 1e-6)  # sums and three products in another order
  # The whole norm is in that one entry: a step of 0.1 times 0.5.
  np.testing.assert_allclose(moved['8x16_1']['kernel'][3, 4], -0.05, rtol=1e-6)


def run_parameters(optimizer, problem, plan, entry, steps):
  params = problem.params if plan is None else problems.place(problem, problem.params)
  state = optimizer.init(params)
  for local in steps:
    if plan is None:
      updates, state = optimizer.update(problems.mean(local), state, params)
      params = optax.apply_updates(params, updates)
    else:
      step = problems.make_step(entry, optimizer, problem, plan, state)
      params, state = step(problems.place_gradients(problem, local, entry), state, params)
  return {path: {name: np.asarray(leaf) for name, leaf in leaves.items()} for path, leaves in params.items()}


@pytest.mark.parametrize('entry', ['A', 'B'])
def test_elementwise_clipping_of_averaged_gradients(entry):
  """Inside `inner` and `others`, and in `wrapper`, gradients are averaged: both equal clipping before on one device."""
  problem, plan = setting()
  clip = optax.clip(0.3)
  plain = optax.chain(clip, emopt_jax.route(emopt_jax.muon(0.02), optax.adamw(0.01)))
  wrapped = distributed.layerwise(
    emopt_jax.muon(0.02), plan, others=optax.adamw(0.01), wrapper=lambda optimizer: optax.chain(clip, optimizer)
  )
  problems.assert_equals_one_device(wrapped, plain, problem, plan, entry, gradients(problem))
  within = distributed.layerwise(
    optax.chain(clip, emopt_jax.muon(0.02)), plan, others=optax.chain(clip, optax.adamw(0.01))
  )
  plain = emopt_jax.route(optax.chain(clip, emopt_jax.muon(0.02)), optax.chain(clip, optax.adamw(0.01)))
  problems.assert_equals_one_device(within, plain, problem, plan, entry, gradients(problem))
