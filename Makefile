# make demo: the whole pipeline on a real model.   make test: set up and test.   make matrix: every format on every GPU, wide grids.   make isa: numbers on older processors.   make check: lint and types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo

CAPS ?=

.PHONY: demo test matrix isa check setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dtool needs python >= 3.11: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[ort,rtx,plugin,dev]"
	touch $@

demo: setup
	test -d $(DEMO)/model || $(BIN)/dtool fetch smollm2-135m -o $(DEMO)/model
	$(BIN)/dtool fetch calibration
	$(BIN)/dtool run $(DEMO)/model -r fp16-rtx --no-bench -o $(DEMO)/gpu
	$(BIN)/dtool run $(DEMO)/model -r int8 --no-bench -o $(DEMO)/int8 > /dev/null
	$(BIN)/dtool generate $(DEMO)/int8/engine --chat -p "What is 2+2?" -n 16
	$(BIN)/dtool run $(DEMO)/model -r int8 -o $(DEMO)/int8

test: setup
	$(BIN)/python -m pytest -n 2

matrix: setup
	$(BIN)/python -m pytest -n 2 -m matrix

isa: setup
	$(BIN)/python -m tests.isa $(CAPS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(DEMO)
