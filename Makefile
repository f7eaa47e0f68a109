# Everything a newcomer needs: `make demo`, `make test`, `make lint`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format clean

demo: $(STAMP)
	$(BIN)/fnpipe demo demo-out

test: $(STAMP)
	$(BIN)/pytest

# mypy does not follow setuptools' editable finder, so it gets the same tree as an install lays down.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types/fnpipe
	for p in pipeline mining train cli; do ln -sfn $(CURDIR)/$$p build/types/fnpipe/$$p; done
	MYPYPATH=build/types $(BIN)/mypy -p fnpipe
	$(BIN)/pytest tests/test_project.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf build demo-out *.egg-info
