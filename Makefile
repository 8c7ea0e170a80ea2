# Everything runs in its own virtual environment, made on first use from PYTHON (3.11 or later).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test format clean

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

clean:
	rm -rf $(VENV) runs

$(VENV)/%.done: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@
