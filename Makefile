# Needs Python 3.10-3.12, make and a package index. Everything else is installed into .venv, pinned by constraints.txt.
SHELL := bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
UV ?= $(shell command -v uv || echo .uv/bin/uv)
BIN := .venv/bin
SOURCES := platform serving jobs tests
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

.PHONY: demo test test-full check format constraints clean

demo: .venv/ready  ## the main job, end to end, on this machine
	$(BIN)/python jobs/demo.py

test: .venv/ready  ## everything but the tests marked `full`
	$(BIN)/python -m pytest

test-full: .venv/ready  ## every test
	$(BIN)/python -m pytest -m ""

check: .venv/ready  ## style, types, import directions, declared dependencies, spelling
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/deptry platform serving jobs
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs infra $(SOURCES)

format: .venv/ready
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.venv/ready: pyproject.toml constraints.txt | $(UV)
	[ -x $(BIN)/python ] || $(UV) venv --allow-existing --python $(PYTHON) .venv
	$(UV) pip install --python $(BIN)/python -c constraints.txt -b constraints.txt -e '.[dev]'
	touch $@

.uv/bin/uv:
	$(PYTHON) -m venv .uv && .uv/bin/python -m pip install -q uv==0.13.9 || $(PYTHON) -m pip install -q --target .uv uv==0.13.9

constraints:  ## resolve again, for all supported Pythons, from the package index alone
	env -u UV_FIND_LINKS -u PIP_FIND_LINKS $(UV) pip compile pyproject.toml -o constraints.txt --upgrade \
	  --all-extras --universal --python-version 3.10 --no-annotate --no-header

clean:
	rm -rf .venv .uv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
