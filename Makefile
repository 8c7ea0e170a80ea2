# Everything runs in its own virtual environment, made on first use from PYTHON (3.11 or later).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The programs compiled for machines that are not there have environments of their own, of 5.5 and 1.5 GB.
AOT_VENV ?= .venv-aot
# PyTorch, for its optimizers in the benchmarks, takes gigabytes too.
BENCH_VENV ?= .venv-bench

.PHONY: train test format clean bench bench-gpu aot-gpu aot-tpu

train: $(VENV)/examples.done
	$(BIN)/python examples/train_lm.py --optimizer kl_soap --compare adamw --steps 120

test: $(VENV)/test.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n auto

format: $(VENV)/test.done
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench:
	$(MAKE) $(BENCH_VENV)/bench.done VENV=$(BENCH_VENV)
	rm -rf runs/bench
	mkdir -p runs/bench
	OPENBLAS_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/bench_newton_schulz.py --json runs/bench/results.jsonl > runs/bench/newton_schulz.md
	OPENBLAS_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/bench_refresh.py --json runs/bench/results.jsonl > runs/bench/refresh.md
	OPENBLAS_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/bench_step.py --width 256 --json runs/bench/results.jsonl > runs/bench/step_256.md
	OPENBLAS_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/bench_step.py --width 512 --rounds 5 --json runs/bench/results.jsonl > runs/bench/step_512.md
	OPENBLAS_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/bench_scaling.py --json runs/bench/results.jsonl > runs/bench/scaling.md
	OPENBLAS_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/plots.py

# On one GPU, with the Python that has JAX for it: make bench-gpu PYTHON=...
bench-gpu:
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh

aot-gpu aot-tpu: aot-%: $(AOT_VENV)-%/aot.done
	$(<D)/bin/python benchmarks/aot_compile.py $*

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(AOT_VENV)-gpu $(AOT_VENV)-tpu runs

$(VENV)/%.done: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

$(AOT_VENV)-gpu/aot.done: JAX := jax[cuda12]
$(AOT_VENV)-tpu/aot.done: JAX := jax[tpu]
$(AOT_VENV)-%/aot.done: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e . '$(JAX)'
	touch $@
