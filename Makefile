# Needs Python 3.11 or newer with pip; everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-extras format docs dist bench zoo clean

help: ## Show this help
	@echo "Usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create .venv and install Favour, the studies and the development tools

# The stamp is newer than these files exactly when the installation is up to date.
$(INSTALLED): pyproject.toml studies/pyproject.toml constraints.txt peers.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Favour needs Python 3.11 or newer; try: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || { echo "==> creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing favour[dev] and favour-studies into $(VENV) (the first time fetches PyTorch: a few minutes)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]" -e studies
	@$(BIN)/python -m pip install --quiet --no-deps -r peers.txt
	@touch $@

demo: $(INSTALLED) ## Train a small dropout network and compare Favour with sampling (under a minute)
	@echo "==> favour demo"
	@$(BIN)/favour demo

test: $(INSTALLED) ## Lint, check formatting and types, run the tests and doctests
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> pytest (tests and doctests, $(JOBS) processes)"
	@$(BIN)/python -m pytest -q -n $(JOBS)

# pytest exits with 5 when no test carries the marker.
test-slow: $(INSTALLED) ## Run the tests marked slow
	@echo "==> pytest -m slow"
	@$(BIN)/python -m pytest -q -n $(JOBS) -m slow || [ $$? -eq 5 ]

test-extras: $(INSTALLED) ## Install each extra alone into a fresh environment, and try what its pages promise
	@echo "==> pytest -m extras (fetches PyTorch once, and each extra's packages: about ten minutes)"
	@$(BIN)/python -m pytest -q -m extras tests/test_extras.py

format: $(INSTALLED) ## Format the code and fix what the linter can fix
	@echo "==> ruff format, ruff check --fix"
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(INSTALLED) ## Build the documentation site into build/site
	@echo "==> mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(INSTALLED) ## Build the wheel and the source archive into dist/, and check what an index would say of them
	@echo "==> build, twine check"
	@rm -rf dist
	@$(BIN)/python -m pip install --quiet build twine
	@$(BIN)/python -m build --quiet
	@$(BIN)/python -m twine check --strict dist/*

bench: $(INSTALLED) ## Run the benchmarks
	@echo "==> benchmarks/run.py"
	@$(BIN)/python benchmarks/run.py

zoo: $(INSTALLED) ## Try models of twenty packages, each in an environment of its own (an hour or two)
	@echo "==> benchmarks/zoo.py"
	@$(BIN)/python benchmarks/zoo.py --jobs $(JOBS)
	@$(BIN)/python benchmarks/zoo.py --jobs $(JOBS) --held-out

clean: ## Remove caches and build outputs (not .venv)
	@echo "==> removing caches and build outputs"
	@rm -rf build dist src/*.egg-info studies/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src studies tests -name __pycache__ -type d -prune -exec rm -rf {} +
