"""Train a small GPT on the bytes of real text, and compare a matrix optimizer with AdamW.

  python examples/train_lm.py --optimizer kl_soap --compare adamw            # the main job: minutes on 2 CPU cores
  python examples/train_lm.py --optimizer kl_soap --compare adamw --resume   # after Ctrl-C: goes on to the same numbers
  python examples/train_lm.py --optimizer kl_soap --mesh data=8              # over 8 devices; or data=4,model=2

The text is the source of the Python standard library that runs this script, or any file or folder (`--text`).
Needs matplotlib and rich beside the library: `pip install 'emopt_jax[examples]'`.
"""

import argparse
import functools
import json
import os
import pathlib
import shlex
import shutil
import signal
import sys
import sysconfig
import time
import zlib

os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # its threads beside XLA's make QR on a CPU up to 20 times slower

import jax
import matplotlib.figure
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from gpt import GPT, spec_of
from jax.sharding import NamedSharding, PartitionSpec
from on_mesh import make_mesh, place, restore, to_checkpoint
from rich.progress import BarColumn, Progress

import emopt_jax
from emopt_jax import distributed

LEARNING_RATES = {'adamw': 3e-3, 'muon': 1e-2, 'soap': 1e-2, 'kl_soap': 1e-2, 'shampoo': 1e-2}
# KL-SOAP with less for sides longer than the model is wide: diagonal blocks of its factor, or no factor at all; and
# with eigenbases that follow by matrix products only.
LEARNING_RATES |= {'kl_soap_blocks': 1e-2, 'kl_soap_one_sided': 1e-2, 'kl_soap_jacobi': 1e-2}


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--optimizer', choices=LEARNING_RATES, default='kl_soap')
  parser.add_argument('--learning-rate', type=float, help=f'peak (default: {LEARNING_RATES})')
  parser.add_argument('--adam-learning-rate', type=float, default=3e-3, help='peak for leaves that are no matrices')
  parser.add_argument('--text', type=pathlib.Path, help='file or folder (default: the Python standard library)')
  sizes = {'width': 128, 'layers': 4, 'heads': 4, 'context': 128, 'batch': 32, 'steps': 200}
  for name, default in (sizes | {'seed': 0, 'validate-every': 25, 'save-every': 100}).items():
    parser.add_argument(f'--{name}', type=int, default=default, help=f'(default: {default})')
  parser.add_argument('--mesh', default='', help='axes as data=8 or data=4,model=2; on a CPU its devices are virtual')
  parser.add_argument('--compare', choices=LEARNING_RATES, help='train with this one too, on the same batches')
  parser.add_argument('--out', type=pathlib.Path, help='folder for the results (default: runs/OPTIMIZER)')
  parser.add_argument('--resume', action='store_true', help='continue the run in --out from its last checkpoint')
  args = parser.parse_args()
  args.out = args.out or pathlib.Path('runs', args.optimizer)
  for name, value in vars(args).items():
    if type(value) in (int, float) and not (value > 0 or (name == 'seed' and value == 0)):
      sys.exit(f'error: --{name.replace("_", "-")} must be positive, not {value}')
  if args.width % args.heads:
    sys.exit(f'error: --width must be a multiple of --heads = {args.heads}, not {args.width}')
  if args.compare == args.optimizer:
    sys.exit(f'error: --compare {args.compare} is the optimizer of the run itself')
  return args


def load_text(args):
  """Returns the bytes to train on and those to validate on."""
  root = args.text or pathlib.Path(sysconfig.get_paths()['stdlib'])
  files = sorted(file for file in [root, *root.glob('**/*' if args.text else '*.py')] if file.is_file())
  text = np.frombuffer(b'\n'.join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
  # Every tenth block is for validation, so that both parts are alike; long blocks make few seams.
  block = 16 * args.context
  if len(text) < 10 * block:
    sys.exit(f'error: {root} holds {len(text)} bytes, and --context {args.context} needs at least {10 * block}')
  blocks = text[: len(text) // block * block].reshape(-1, block)
  return np.delete(blocks, np.s_[9::10], axis=0).ravel(), blocks[9::10].ravel()


def make_optimizer(name, learning_rate, params, args, mesh):
  """Returns the optimizer without a mesh, and for a mesh the one that deals matrices to its devices and their plan."""

  def schedule(peak):
    warmup = -(-args.steps // 10)
    return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, args.steps + 1, 0.01 * peak)

  def clipped(optimizer):
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)

  plan = None
  if mesh is not None:
    specs = jax.tree_util.tree_map_with_path(
      lambda keys, _: spec_of(emopt_jax.leaf_path(keys)) if 'model' in mesh.shape else PartitionSpec(), params
    )
    plan = distributed.plan_layerwise(params, mesh, 'data', specs=specs)
  adamw = functools.partial(optax.adamw, b1=0.9, b2=0.95, weight_decay=0.1)
  if name == 'adamw':
    plain = clipped(adamw(schedule(learning_rate)))
    return plain, plain, plan
  if smaller := {'kl_soap_blocks': {'block_size': args.width}, 'kl_soap_one_sided': {'max_dim': args.width}}.get(name):
    rotated = emopt_jax.scale_by_soap(emopt_jax.kl_covariance(**smaller))
    decayed = optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(schedule(learning_rate))
    matrix_optimizer = optax.chain(rotated, *decayed)
  elif name == 'kl_soap_jacobi':
    matrix_optimizer = emopt_jax.kl_soap(schedule(learning_rate), refresh=emopt_jax.jacobi_refresh, weight_decay=0.1)
  else:
    matrix_optimizer = getattr(emopt_jax, name)(schedule(learning_rate), weight_decay=0.1)
  other_optimizer = adamw(schedule(args.adam_learning_rate))
  print(emopt_jax.describe_routing(params, matrix_optimizer, other_optimizer))
  plain = clipped(emopt_jax.route(matrix_optimizer, other_optimizer))
  if plan is None:
    return plain, plain, None
  print(plan)
  return distributed.layerwise(matrix_optimizer, plan, others=other_optimizer, max_norm=1.0), plain, plan


def train(name, learning_rate, texts, mesh, args, out, stop_signals):
  """Trains to the last step or a signal; returns the metrics of each step and the trained model."""
  graph, params = nnx.split(GPT(args, nnx.Rngs(args.seed)))
  optimizer, plain, plan = make_optimizer(name, learning_rate, params, args, mesh)
  params = place(params, plan)
  put = functools.partial(jax.device_put, device=mesh and NamedSharding(mesh, PartitionSpec('data')))

  def loss_of(params, batch):
    logits = nnx.merge(graph, params)(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

  def update(state, gradients):
    updates, opt_state = optimizer.update(gradients, state['opt_state'], state['params'])
    return {'params': optax.apply_updates(state['params'], updates), 'opt_state': opt_state}

  # Saving is synchronous because the next update reuses (donates) the very buffers that are being written.
  options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
  checkpoints = ocp.CheckpointManager((out / 'checkpoints').absolute(), options=options)
  state, metrics = place({'params': params, 'opt_state': jax.jit(optimizer.init)(params)}, plan), []
  if step := checkpoints.latest_step() or 0:
    state = restore(checkpoints, step, state, plain, plan)
    metrics = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()[:step]]
  window = np.arange(args.context + 1)  # the inputs and, one later, the targets
  starts = np.linspace(0, len(texts[1]) - len(window), 16 * args.batch).astype(int)
  validation = [put(texts[1][starts[i::16, None] + window]) for i in range(16)]  # each batch spans the whole text
  # Two programs instead of one, so that the optimizer can be timed; compiled before the clock starts.
  shardings = jax.tree.map(lambda x: x.sharding, state)
  gradient_step = jax.jit(jax.value_and_grad(loss_of), out_shardings=(None, shardings['params']))
  gradient_step = gradient_step.lower(params, validation[0]).compile()
  update_step = jax.jit(update, donate_argnums=0, out_shardings=shardings).lower(state, params).compile()
  validation_step = jax.jit(loss_of).lower(params, validation[0]).compile()
  bar = Progress('{task.description}', BarColumn(), '{task.fields[status]}', disable=not sys.stdout.isatty())
  task = bar.add_task(name, total=args.steps, status='')
  with bar, open(out / 'metrics.jsonl', 'w', buffering=1) as metrics_file:
    metrics_file.writelines(json.dumps(entry) + '\n' for entry in metrics)
    stopped = step == args.steps
    while not stopped:
      # A function of seed and step alone: a resumed run sees the batches of an uninterrupted one.
      starts = np.random.default_rng((args.seed, step)).integers(len(texts[0]) - args.context, size=args.batch)
      batch, begin = put(texts[0][starts[:, None] + window]), time.perf_counter()
      loss, gradients = jax.block_until_ready(gradient_step(state['params'], batch))
      middle = time.perf_counter()
      state = jax.block_until_ready(update_step(state, gradients))
      seconds, share = (end := time.perf_counter()) - begin, (end - middle) / (end - begin)
      step += 1
      if not np.isfinite(loss):
        sys.exit(f'error: the loss is {loss} at step {step}: lower the learning rate')
      metrics.append({'step': step, 'loss': float(loss), 'seconds': seconds, 'optimizer_share': share})
      if step == args.steps or step % args.validate_every == 0:
        batches = validation if step == args.steps else validation[:4]
        metrics[-1]['val_loss'] = float(np.mean([validation_step(state['params'], batch) for batch in batches]))
      metrics_file.write(json.dumps(metrics[-1]) + '\n')
      stopped = bool(stop_signals) or step == args.steps
      if stopped or step % args.save_every == 0:
        checkpoints.save(step, args=ocp.args.StandardSave(to_checkpoint(state, plain, plan)))
      val_loss = next((entry['val_loss'] for entry in reversed(metrics) if 'val_loss' in entry), float('nan'))
      seconds, share = np.mean([(entry['seconds'], entry['optimizer_share']) for entry in metrics[-20:]], axis=0)
      status = f'{step}/{args.steps}  loss {loss:.3f}  validation {val_loss:.3f}  optimizer {share:.0%}  '
      status += f'{args.batch * args.context / seconds:,.0f} tokens/s  {(args.steps - step) * seconds:.0f} s left'
      bar.update(task, completed=step, status=status)
      if bar.disable and (stopped or step % 10 == 0):
        print(name, status, flush=True)
  return metrics, nnx.merge(graph, state['params'])


def plot(runs, path):
  axes = matplotlib.figure.Figure(layout='constrained').subplots()
  for color, (name, metrics) in zip(['C0', 'C1'], runs.items(), strict=False):
    axes.plot([entry['step'] for entry in metrics], [entry['loss'] for entry in metrics], color=color, alpha=0.3)
    validation = {entry['step']: entry['val_loss'] for entry in metrics if 'val_loss' in entry}
    axes.plot(list(validation), list(validation.values()), 'o-', color=color, label=f'{name}, validation')
  axes.set(xlabel='step', ylabel='loss (nats per byte)')
  axes.legend()
  axes.figure.savefig(path)


def sample(model, prompt, seed, length=300, temperature=0.8):
  """Returns what the model writes after a prompt, bytes [context]."""
  next_byte = nnx.jit(lambda model, x, key: jax.random.categorical(key, model(x[None])[0, -1] / temperature))
  text = prompt
  for key in jax.random.split(jax.random.key(seed), length):
    text = np.append(text, next_byte(model, text[-len(prompt) :], key))
  written = bytes(text[len(prompt) :].tolist()).decode(errors='replace')
  return ''.join(letter if letter.isprintable() or letter == '\n' else '\ufffd' for letter in written)


def main():
  args = parse_arguments()
  mesh = make_mesh(args.mesh, args.batch)
  texts = load_text(args)
  # What a resumed run must have in common with its first part, the text included.
  config = {key: str(value) for key, value in vars(args).items() if key not in ('compare', 'mesh', 'out', 'resume')}
  config['text'] += f' (crc32 {zlib.crc32(b"".join(texts))})'
  if not args.resume:
    for old in (args.out / 'checkpoints', *args.out.glob('compare_*')):
      shutil.rmtree(old, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / 'config.json').write_text(json.dumps(config))
  elif not any(args.out.glob('checkpoints/*')):
    sys.exit(f'error: --resume finds no checkpoint in {args.out}')
  for key, value in json.loads((args.out / 'config.json').read_text()).items():
    if config[key] != value:
      sys.exit(f'error: --resume continues a run with {key} {value}, not {config[key]}')
  stop_signals = []  # the first Ctrl-C ends the run after the current step, a second one ends it at once
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: stop_signals.append(number) or signal.signal(number, signal.SIG_DFL))
  runs, models = {}, {}
  for name in filter(None, [args.optimizer, args.compare]):
    out, learning_rate = (args.out / f'compare_{name}', None) if runs else (args.out, args.learning_rate)
    runs[name], models[name] = train(name, learning_rate or LEARNING_RATES[name], texts, mesh, args, out, stop_signals)
    plot(runs, args.out / 'loss.png')
    if stop_signals:
      command = shlex.join(['python', *sys.argv] + ['--resume'] * (not args.resume))
      print(f'stopped {name} after step {len(runs[name])}, with a checkpoint; to continue:\n  {command}')
      sys.exit(128 + stop_signals[0])

  print(f'\n{sample(models[args.optimizer], texts[1][: args.context], args.seed)}\n')
  print(f'results in {args.out}:\noptimizer  validation loss  seconds')
  for name, metrics in runs.items():
    print(f'{name:9}  {metrics[-1]["val_loss"]:15.3f}  {sum(entry["seconds"] for entry in metrics):7.1f}')


if __name__ == '__main__':
  main()
