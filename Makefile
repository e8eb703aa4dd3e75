# Everything runs in .venv, which `make setup` builds once and again when its inputs change.

VENV := .venv
# Debian 12's pip warns without --use-pep517; newer ones do what it says anyway.
INSTALL := $(VENV)/bin/python -m pip --quiet --disable-pip-version-check --no-input \
  install --use-pep517 --constraint constraints.txt --editable
SETUP := $(VENV)/.setup-done
DOCS := $(VENV)/.docs-done

# The Python that makes .venv; empty: the newest on PATH (tools/find-python).
PYTHON ?=
# More arguments for pytest: make test PYTEST_ARGS="tests/wal -x"
PYTEST_ARGS ?=
# Disks that `make crash` looks at for each call; empty: as many as it thinks right.
STATES ?=

.DEFAULT_GOAL := help
.PHONY: help setup test demo bench lint format docs explore crash java constraints clean

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(SETUP) ## Build .venv with everything, Spark too; PYTHON=<path> picks the Python

test: $(SETUP) ## Run the tests; PYTEST_ARGS="..." passes more arguments to pytest
	@$(VENV)/bin/pytest $(PYTEST_ARGS)

demo: $(SETUP) ## Show what Quiver does, on data made for it
	@$(VENV)/bin/quiver demo

bench: $(SETUP) ## Measure the file formats on this machine
	@$(VENV)/bin/quiver bench formats

lint: $(SETUP) ## Check style, types and the order of the house
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo

format: $(SETUP) ## Format the code and repair what can be repaired without thinking
	@$(VENV)/bin/ruff format
	@$(VENV)/bin/ruff check --fix

docs: $(DOCS) ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "Built site/index.html"

explore: $(SETUP) ## Run the long explorations; QUIVER_EXAMPLES=<n> sets how many examples each tries
	@$(VENV)/bin/pytest -m slow --timeout=0 --hypothesis-profile=explore $(PYTEST_ARGS)

crash: $(SETUP) ## Cut the power at every call of the store; STATES=<n> looks at n disks for each
	@$(VENV)/bin/python tests/store/explorations.py $(STATES)

java: ## Check for the Java that Spark needs; install it if this is Debian and you are root
	@tools/ensure-java

constraints: ## Resolve all dependencies anew and write constraints.txt; PYTHON=<the oldest you have>
	@PYTHON="$(PYTHON)" tools/resolve-constraints

clean: ## Remove .venv and everything that was built
	@rm -rf $(VENV) build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# The stamp is written last. So a .venv without it is a set-up that did not finish, and nobody knows
# which of its packages are whole: it starts over. One that finished is brought up to date in place.
$(SETUP): pyproject.toml constraints.txt
	@tools/ensure-java
	@{ test -e $@ && $(VENV)/bin/python -c 'import pip'; } 2>/dev/null \
	  || PYTHON="$(PYTHON)" tools/make-venv $(VENV)
	@rm -f $@
	@echo "Installing Quiver with its tools and Spark (about 450 MB the first time)"
	@$(INSTALL) '.[dev,spark]'
	@touch $@
	@echo "Set up in $(VENV)"

$(DOCS): $(SETUP)
	@echo "Installing what the documentation is built with"
	@$(INSTALL) '.[docs]'
	@touch $@
