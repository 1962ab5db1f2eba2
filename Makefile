# Every target works in a virtual environment of its own, made on first use.
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

CLUSTER := .venv-cluster
CLUSTER_INSTALLED := $(CLUSTER)/.installed

.PHONY: check test test-cluster demo format bench clean

check: $(INSTALLED)  ## format, lint, types, import ranks and unit tests: about a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/unit tests/golden -n auto

test: check  ## everything above, then contract, integration and attack tests with real processes
	$(BIN)/pytest tests/contract tests/integration tests/attacks -n auto

test-cluster: $(CLUSTER_INSTALLED)  ## what needs vLLM and Ray, both real, in an environment of their own
	$(CLUSTER)/bin/pytest tests/contract/test_vllm_engine.py tests/contract/test_weight_engines.py tests/integration/test_*vllm*.py
	OMP_NUM_THREADS=1 $(CLUSTER)/bin/pytest tests/contract/test_ray_*.py tests/integration/test_ray_*.py

demo: $(INSTALLED)  ## an agent that learns to use a calculator: two minutes on two cores
	$(BIN)/treadle train calculator

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## figures, not tests: each prints its ratios
	$(BIN)/python bench/startup.py
	PYTHONPATH=. $(BIN)/python bench/schedules.py
	PYTHONPATH=. $(BIN)/python bench/engine.py
	PYTHONPATH=. $(BIN)/python bench/grpo_step.py

$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(CLUSTER_INSTALLED): pyproject.toml constraints-cluster.txt
	python3 -m venv $(CLUSTER)
	$(CLUSTER)/bin/pip install --quiet --constraint constraints.txt torch
	$(CLUSTER)/bin/pip install --quiet --no-deps --requirement constraints-cluster.txt --editable .
	touch $@

clean:
	rm -rf $(VENV) $(CLUSTER) .mypy_cache .ruff_cache .pytest_cache .hypothesis
