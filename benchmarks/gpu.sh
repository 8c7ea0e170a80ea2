#!/usr/bin/env bash
# Newton-Schulz, refreshes and whole steps on one GPU, within 8 minutes, in one table at the end:
#
#   bash benchmarks/gpu.sh
#   SHAPES=64x256 SIZES=64 WIDTH=64 LAYERS=1 ROUNDS=2 JAX_PLATFORMS=cpu bash benchmarks/gpu.sh    # to try it anywhere
#
# PYTHON is the Python that has jax with its GPU plugin (default: python3), OUT the folder of the results (default:
# runs/gpu), ONLY the optimizers, separated by semicolons. A part that reaches its limit ends there, and its rows so far
# count.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/gpu}
read -ra shapes <<< "${SHAPES:-1024x4096 4096x4096}"
read -ra sizes <<< "${SIZES:-1024 2048 4096}"
WIDTH=${WIDTH:-1024}
LAYERS=${LAYERS:-2}
ROUNDS=${ROUNDS:-7}
# All but Shampoo, whose eigh of 4096 rows takes seconds, and SOAP, whose step is that of KL-SOAP.
everything='optax.contrib.muon;muon;muon, bfloat16 operands;muon, default (8 steps);optax.adamw;kl_soap'
everything+=';kl_soap, matrix products only;kl_soap, blocks of the width;kl_soap, one-sided'
everything+=';torch.optim.AdamW;torch.optim.Muon (bfloat16);pytorch_optimizer.SOAP'
IFS=';' read -ra only <<< "${ONLY:-$everything}"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}  # PyTorch's peers need memory too

rm -rf "$OUT"
mkdir -p "$OUT"
results=$OUT/results.jsonl
touch "$results"

# part SECONDS NAME ARGUMENT...: the limits add up to 460 s.
part() {
  local limit=$1 name=$2 status=0
  shift 2
  echo "$name:" >&2
  timeout --kill-after=2 "$limit" "$PYTHON" "benchmarks/$name.py" "$@" --json "$results" > "$OUT/$name.md" || status=$?
  if [ "$status" -ne 0 ]; then
    echo "$name ended with status $status (124: its $limit s were over)" | tee -a "$OUT/$name.md" >&2
  fi
}

timeout 30 "$PYTHON" -c '
import jax
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, backend {jax.default_backend()}")
'
part 110 bench_newton_schulz --shapes "${shapes[@]}" --rounds "$ROUNDS"
part 150 bench_refresh --sizes "${sizes[@]}" --batch 1 --steps 51 --spectra steep --only jacobi
part 150 bench_step --width "$WIDTH" --layers "$LAYERS" --rounds "$ROUNDS" --only "${only[@]}"
head -qn 1 "$OUT"/*.md | sort -u
echo
JAX_PLATFORMS=cpu timeout 20 "$PYTHON" benchmarks/combined.py "$results"
