# `make launch` and `make test` are all a fresh machine needs: Python 3.11 to 3.13 and make.

VENV := .venv
PACKAGES := nas search_spaces workers dashboard
BIN := $(VENV)/bin
LAUNCH_STAMP := $(VENV)/.installed-launch
DEV_STAMP := $(VENV)/.installed-dev

# ensurepip is asked for because Debian's python3 has venv without it.
SUITABLE := import ensurepip, sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))
INSTALL = $(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable

# A visible title for each check: $(call title,ruff check)
title = @printf '\n== %s ==\n' '$(1)'

.DEFAULT_GOAL := help
.PHONY: help launch dashboard test lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'ARGS="..." passes options on: make launch ARGS="--trials 40", make test ARGS="-k store"'
	@echo 'PYTHON=... picks the interpreter of a new $(VENV); TORCH_INDEX=URL adds a package index for torch.'

launch: $(LAUNCH_STAMP)  ## install if needed, then search: the demo, or the GPU preset where there is a GPU
	@$(BIN)/nas launch $(ARGS)

dashboard: $(LAUNCH_STAMP)  ## serve the dashboard of the latest study and print its address
	@$(BIN)/nas dashboard $(ARGS)

test: lint  ## run every check: lint, then pytest
	$(call title,pytest)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(DEV_STAMP)  ## ruff, mypy --strict and the import contracts
	$(call title,ruff check)
	@$(BIN)/ruff check .
	$(call title,ruff format --check)
	@$(BIN)/ruff format --check .
	$(call title,mypy --strict)
	@$(BIN)/mypy --strict $(PACKAGES)
	$(call title,lint-imports)
	@$(BIN)/lint-imports --no-logo --no-cache

format: $(DEV_STAMP)  ## rewrite the code as ruff likes it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove caches and build products; keeps .venv, studies and checkpoints
	@rm -rf build dist *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# --clear: a folder without a working interpreter is the rest of an interrupted or moved installation.
$(BIN)/python:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
	  for python in python3 python3.13 python3.12 python3.11 ''; do \
	    [ -z "$$python" ] || ! "$$python" -c '$(SUITABLE)' 2>/dev/null || break; \
	  done; \
	fi; \
	"$${python:-false}" -c '$(SUITABLE)' 2>/dev/null || { \
	  echo "PYTHON=$${python:-none found}: a Python from 3.11 to 3.13 with its venv module is needed" \
	    '(Debian: apt install python3 python3-venv)' >&2; exit 2; }; \
	echo "creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear '$(VENV)'

# The stamps make pip run only when pyproject.toml has changed since it last succeeded.
$(LAUNCH_STAMP): pyproject.toml | $(BIN)/python
	@echo 'installing hybrid-nas[train,dashboard] into $(VENV) (minutes the first time)'
	@$(INSTALL) '.[train,dashboard]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo 'installing hybrid-nas[dev] into $(VENV) (minutes the first time)'
	@$(INSTALL) '.[dev]'
	@touch $(LAUNCH_STAMP) $@
