# Every target works in a virtual environment of its own, made on first use.
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: check test demo format bench clean

check: $(INSTALLED)  ## format, lint, types, import ranks and unit tests: about a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/unit tests/golden -n auto

test: check  ## everything above, then contract and integration tests with real processes
	$(BIN)/pytest tests/contract tests/integration -n auto

demo: $(INSTALLED)  ## an agent that learns to use a calculator: two minutes on two cores
	$(BIN)/treadle train calculator

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## figures, not tests: each prints its ratios
	$(BIN)/python bench/startup.py
	PYTHONPATH=. $(BIN)/python bench/engine.py
	PYTHONPATH=. $(BIN)/python bench/grpo_step.py

$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
