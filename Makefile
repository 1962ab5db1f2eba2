# Every target works in a virtual environment of its own, made on first use. An environment is complete where it has a
# stamp with the hash of what it was made from, so a fresh checkout of the same versions installs nothing: a CI that keeps
# environments between clones sets VENV and CLUSTER to where it keeps them (for one clone at a time).
VENV ?= .venv
# Hundreds of processes import the package and the tests: each would compile both again.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(shell (echo $(CURDIR); python3 --version; cat pyproject.toml constraints.txt) | sha256sum | head -c 16)

CLUSTER ?= .venv-cluster
CLUSTER_INSTALLED := $(CLUSTER)/.installed-$(shell (echo $(CURDIR); python3 --version; cat pyproject.toml constraints.txt constraints-cluster.txt) | sha256sum | head -c 16)

AGENTS ?= .venv-agents
CODEX_VERSION := 0.166.0
AGENTS_INSTALLED := $(AGENTS)/.installed-$(shell (python3 --version; echo $(CODEX_VERSION); cat constraints-agents.txt) | sha256sum | head -c 16)

ENVIRONMENTS ?= .venv-environments
ENVIRONMENTS_INSTALLED := $(ENVIRONMENTS)/.installed-$(shell (python3 --version; cat constraints-environments.txt) | sha256sum | head -c 16)

VERIFIERS ?= .venv-verifiers
VERIFIERS_INSTALLED := $(VERIFIERS)/.installed-$(shell (python3 --version; cat constraints-verifiers.txt) | sha256sum | head -c 16)

TINKER ?= .venv-tinker
TINKER_INSTALLED := $(TINKER)/.installed-$(shell (python3 --version; grep torch constraints.txt; cat constraints-tinker.txt) | sha256sum | head -c 16)

# In CI a test that fails is run once more. One that passes then is listed as RERUN: it is unstable, and to be mended.
AGAIN := $(if $(CI),--reruns 1 -r fER)

.PHONY: check test test-agents test-environments test-hubs test-install test-tinker test-cluster test-vllm test-ray demo dist docs format bench clean

check: $(INSTALLED)  ## format, lint, types, import ranks and unit tests: about a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/unit tests/golden -n auto $(AGAIN)

test: check  ## everything above, then contract, integration and attack tests with real processes
	$(BIN)/pytest tests/contract tests/integration tests/attacks -n auto $(AGAIN)

test-agents: $(INSTALLED) $(AGENTS_INSTALLED)  ## frameworks, Claude Code and Codex through the gateway, in an environment of their own
	AGENTS=$(AGENTS) $(BIN)/pytest tests/agents -n auto

test-environments: $(INSTALLED) $(ENVIRONMENTS_INSTALLED)  ## adapters of environments, with the real packages in an interpreter of their own
	ENVIRONMENTS_PYTHON=$(ENVIRONMENTS)/bin/python $(BIN)/pytest tests/environments

test-hubs: $(INSTALLED) $(VERIFIERS_INSTALLED)  ## tasksets of verifiers through the gateway, in an environment of their own
	VERIFIERS=$(VERIFIERS) $(BIN)/pytest tests/agents/test_verifiers_hub.py

test-install: $(INSTALLED)  ## the wheel with its dependencies, installed by pip into a new environment, without the repository
	$(BIN)/pytest tests/install $(AGAIN)

test-tinker: $(INSTALLED) $(TINKER_INSTALLED)  ## the published tinker client and two recipes of its cookbook, unmodified, in an environment of their own
	TINKER=$(TINKER) $(BIN)/pytest tests/tinker

test-cluster: $(CLUSTER_INSTALLED)  ## what needs vLLM and Ray, both real, in an environment of their own; side by side
	$(MAKE) --jobs=2 --output-sync=target test-vllm test-ray

test-vllm: $(CLUSTER_INSTALLED)
	$(CLUSTER)/bin/pytest tests/contract/test_vllm_engine.py tests/contract/test_weight_engines.py tests/integration/test_*vllm*.py $(AGAIN)

test-ray: $(CLUSTER_INSTALLED)
	OMP_NUM_THREADS=1 $(CLUSTER)/bin/pytest tests/contract/test_ray_*.py tests/integration/test_ray_*.py $(AGAIN)

demo: $(INSTALLED)  ## an agent that learns to use a calculator: two minutes on two cores
	$(BIN)/treadle train calculator

dist: $(INSTALLED)  ## the source distribution and the wheel, in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

docs: $(INSTALLED)  ## the documentation as a site, in site/
	$(BIN)/mkdocs build --strict

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## figures, not tests: each prints its ratios
	$(BIN)/python bench/startup.py
	PYTHONPATH=. $(BIN)/python bench/schedules.py
	PYTHONPATH=. $(BIN)/python bench/engine.py
	PYTHONPATH=. $(BIN)/python bench/grpo_step.py

$(INSTALLED):
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	rm -f $(VENV)/.installed*
	touch $@

$(CLUSTER_INSTALLED):
	python3 -m venv $(CLUSTER)
	$(CLUSTER)/bin/pip install --quiet --constraint constraints.txt torch
	$(CLUSTER)/bin/pip install --quiet --no-deps --requirement constraints-cluster.txt --editable .
	rm -f $(CLUSTER)/.installed*
	touch $@

$(AGENTS_INSTALLED):
	python3 -m venv $(AGENTS)
	$(AGENTS)/bin/pip install --quiet --no-deps --requirement constraints-agents.txt
	if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --prefix $(AGENTS)/npm @openai/codex@$(CODEX_VERSION); fi
	rm -f $(AGENTS)/.installed*
	touch $@

$(ENVIRONMENTS_INSTALLED):
	python3 -m venv $(ENVIRONMENTS)
	$(ENVIRONMENTS)/bin/pip install --quiet --requirement constraints-environments.txt
	rm -f $(ENVIRONMENTS)/.installed*
	touch $@

$(VERIFIERS_INSTALLED):
	python3 -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/pip install --quiet --no-deps --requirement constraints-verifiers.txt
	rm -f $(VERIFIERS)/.installed*
	touch $@

$(TINKER_INSTALLED):
	python3 -m venv $(TINKER)
	$(TINKER)/bin/pip install --quiet --constraint constraints.txt torch
	$(TINKER)/bin/pip install --quiet --no-deps --requirement constraints-tinker.txt
	rm -f $(TINKER)/.installed*
	touch $@

clean:
	rm -rf $(VENV) $(CLUSTER) $(AGENTS) $(ENVIRONMENTS) $(VERIFIERS) $(TINKER) .mypy_cache .ruff_cache .pytest_cache .hypothesis
