"""What the benchmarks make of their measurements: ratios, tables, counts of a program, plots. Nothing is timed here."""

import doctest
import json
import sys
import time

import bench_scaling
import combined
import jax
import jax.numpy as jnp
import measure
import optax
import plots
import pytest
import torch_peers


def test_first_round_is_not_counted():
  clock = iter(range(100))
  calls = []
  turns = {name: lambda name=name: calls.append(name) for name in 'ab'}
  seconds = measure.alternate(turns, 3, clock=lambda: next(clock) ** 2, pause=0.0)
  assert calls == list('abababab')
  # The i-th run takes from (2 i)^2 to (2 i + 1)^2; the runs 0 and 1 belong to the first round.
  assert seconds == {'a': [9, 17, 25], 'b': [13, 21, 29]}


def test_ratio_is_of_rounds_and_not_of_medians():
  seconds, reference = [1.0, 20.0, 3.0], [1.0, 10.0, 6.0]
  assert measure.median_ratio(seconds, reference) == 1.0
  assert measure.median_ratio(seconds, None) is None
  with pytest.raises(ValueError):
    measure.median_ratio(seconds, reference[1:])


def test_table_and_its_json_lines(tmp_path, capsys):
  file = tmp_path / 'new' / 'results.jsonl'
  columns = {'name': '', 'bytes': ',d', 'recovery': '>', 'ratio': '.2f'}
  rows = [('one', 1234, '3', jnp.float32(0.5)), ('two', 5, 'over 60', None)]
  for _ in range(2):
    measure.print_table('made up', columns, iter(rows), settings={'width': 8}, json_file=file)
  assert capsys.readouterr().out.splitlines()[:4] == [
    '| name | bytes | recovery | ratio |',
    '| --- | ---: | ---: | ---: |',
    '| one | 1,234 | 3 | 0.50 |',
    '| two | 5 | over 60 | - |',
  ]
  read = measure.read_rows(file)
  assert len(read) == 4 and read[:2] == read[2:]
  assert read[1].items() >= {'benchmark': 'made up', 'width': 8, 'name': 'two', 'bytes': 5, 'ratio': None}.items()


def test_doctests():
  assert doctest.testmod(measure).failed == 0


def test_compile_time_is_apart_and_shapes_suffice():
  compiled = measure.compile_timed(jnp.add, *2 * [jax.ShapeDtypeStruct((4,), jnp.float32)], donate=0)
  assert compiled.program(jnp.ones(4), jnp.ones(4)).tolist() == 4 * [2.0]
  assert compiled.seconds == compiled.lower_seconds + compiled.compile_seconds > 0
  assert compiled.program.memory_analysis().alias_size_in_bytes == 16
  result, seconds = measure.timed(lambda x: time.sleep(0.01) or x + 1, jnp.zeros(()))
  assert result == 1 and seconds >= 0.01


def test_counts_of_a_program():
  def program(x):
    y = jax.lax.fori_loop(0, x.shape[0], lambda _, y: jnp.sin(y) @ x, x)
    return jnp.linalg.qr(y @ x)[0] + jnp.linalg.eigh(x)[1]

  compiled = jax.jit(program).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile()
  assert bench_scaling.count_operations(compiled.as_text()) == {'products': 2, 'factorizations': 2, 'loops': 1}


def test_counts_on_a_gpu():
  program = 'ENTRY %main (a: f32[8,8]) -> f32[8,8] {\n'
  for target in ('__cublas$gemm', 'cusolver_geqrf_ffi', 'cusolver_orgqr_ffi', 'cusolver_syevd_ffi'):
    program += f'  %x = f32[8,8]{{1,0}} custom-call(%a), custom_call_target="{target}"\n'
  counts = bench_scaling.count_operations(program + '}\n')
  assert counts == {'products': 1, 'factorizations': 2, 'loops': 0}


def test_memory_of_a_recipe(monkeypatch):
  monkeypatch.setattr(bench_scaling, 'memory_recipes', lambda width: {'adamw': optax.adamw(0.01)})
  ((name, state, temporaries, per_parameter, kept),) = bench_scaling.memory_rows(16, 1)
  assert (name, kept) == ('adamw', 0) and state == pytest.approx(8, abs=0.01)
  assert temporaries == per_parameter * 12 * 16**2


def test_torch_peers_step_and_count_their_state():
  pytest.importorskip('torch')
  parameters = measure.transformer_matrices(4, 1)
  gradients = measure.gradients_of(parameters)
  optimizers = torch_peers.make_optimizers(parameters, gradients)
  assert set(optimizers) <= set(torch_peers.NAMES)
  for name, optimizer in optimizers.items():
    for _ in range(2):
      torch_peers.step(optimizer)
    first, expected = optimizer.param_groups[0]['params'][0], next(iter(parameters.values()))
    assert 0 < abs(first.numpy() - expected).max() < 0.1, name
  size = 12 * 4**2
  # Two moments, and the counter of each of the four matrices.
  assert torch_peers.state_bytes(optimizers['torch.optim.AdamW']) == 8 * size + 4 * 4


def test_torch_missing(monkeypatch):
  monkeypatch.setattr(torch_peers, 'installed', lambda package: False)
  assert torch_peers.make_optimizers({}, {}) == {} and torch_peers.versions() == ''


def results(file):
  """Writes made-up rows of every benchmark that is drawn or combined."""
  tables = [
    ('bench_scaling time', {'layers': 2}, ('optimizer', 'width', 'ms a step'), [
      (name, width, scale * width**2.5 / 1e4)
      for width in (64, 128, 256, 512)
      for name, scale in zip(bench_scaling.TIMED, (0.1, 4, 3, 12, 7, 5), strict=True)
    ]),
    *(
      ('bench_step', {'layers': 4, 'width': width}, ('optimizer', 'ms a step', f'against {plots.REFERENCE}'), [
        (plots.REFERENCE, 100.0, 1.0), ('muon', 70.0, 0.7), ('optax.adamw', 5.0, 0.05), ('kl_soap', 900.0, 9.0),
      ])
      for width in (256, 512)
    ),
    ('train_quality', {'steps': 200}, ('optimizer', 'peak learning rate', 'mean', 's a step'), [
      ('adamw', 0.001, 2.24, 0.35), ('adamw', 0.003, 2.13, 0.35), ('muon', 0.01, 1.75, 0.39), ('soap', 0.01, 1.62, 0.5),
    ]),
  ]  # fmt: skip
  with file.open('w') as out:
    for benchmark, settings, columns, rows in tables:
      for values in rows:
        line = {'benchmark': benchmark, 'settings': {'device': 'cpu', **settings}, 'columns': columns}
        out.write(json.dumps(line | {'values': values}) + '\n')


def test_plots(tmp_path, monkeypatch, capsys):
  file, out = tmp_path / 'results.jsonl', tmp_path / 'plots'
  results(file)
  monkeypatch.setattr(sys, 'argv', ['plots.py', str(file), '--out', str(out)])
  plots.main()
  assert {path.name for path in out.iterdir()} == set(plots.PLOTS)
  assert len(capsys.readouterr().out.splitlines()) == len(plots.PLOTS)
  for path in out.iterdir():
    assert path.read_bytes().startswith(b'\x89PNG') and path.stat().st_size < 100_000


def test_plots_draw_the_last_of_each_point_and_nothing_without_rows(tmp_path):
  file = tmp_path / 'results.jsonl'
  results(file)
  rows = measure.read_rows(file)
  assert [draw([]) for draw in plots.PLOTS.values()] == [None, None, None]
  axes = plots.loss_against_step_time([*rows, rows[-1] | {'mean': 1.5}]).axes[0]
  assert sorted(float(line.get_ydata()[0]) for line in axes.lines) == [1.5, 1.75, 2.13]  # AdamW's best alone


def test_plots_without_a_file_say_so(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'argv', ['plots.py'])
  with pytest.raises(SystemExit):
    plots.main()
  assert 'make bench' in capsys.readouterr().err


def test_combined_table(tmp_path, monkeypatch, capsys):
  file = tmp_path / 'results.jsonl'
  results(file)
  monkeypatch.setattr(sys, 'argv', ['combined.py', str(file)])
  combined.main()
  lines = capsys.readouterr().out.splitlines()
  assert '| bench_step | muon, width 256 | 70.00 | 0.700 | optax.contrib.muon | - | - |' in lines
