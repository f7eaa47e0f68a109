# Everything a newcomer needs: `make demo`, `make test`, `make lint`, `make docs`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: demo test lint docs format clean

demo: $(INSTALLED)
	$(BIN)/fnpipe demo demo-out

# Three on two cores, because many tests wait for programs that they start. Which share one: `group_of` in tests/conftest.py.
test: $(INSTALLED_DEV)
	$(BIN)/pytest -n 3

# mypy does not follow setuptools' editable finder, so it gets the same tree as an install lays down.
lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/types/fnpipe
	for p in pipeline mining train cli; do ln -sfn $(CURDIR)/$$p build/types/fnpipe/$$p; done
	for f in __init__.py py.typed; do ln -sfn $(CURDIR)/api/$$f build/types/fnpipe/$$f; done
	MYPYPATH=build/types $(BIN)/mypy -p fnpipe
	$(BIN)/pytest tests/test_project.py

# The reference is written anew from the code. A link that leads nowhere, or a page that is in no menu, is an error.
docs: $(INSTALLED_DEV)
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/recipes.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

# The tests also need every extra, and the programs that people open edges with.
$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf build demo-out *.egg-info
