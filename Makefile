# Each target is the only command a fresh machine needs: it creates .venv and installs first when that is missing or old.
#
#   make demo       PoD from beginning to end on real text: checkpoints/tiny/report.md and report.png
#   make test       everything but the slow tests
#   make test-all   the same, and then the slow tests
#   make lint       ruff: rules and format

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# deepspeed is built from source: none of its ops are wanted at install time, and no accelerator is looked for.
export DS_BUILD_OPS := 0
export DS_ACCELERATOR := cpu

.PHONY: install demo tiny-base test test-slow test-all lint

install: $(STAMP)

# torch goes first and by its exact version: an open range may fetch gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python eval/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -q

# pytest exits with 5 when no test is marked slow: nothing to run is no failure.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -q || test $$? -eq 5

# One after the other also under `make -j`: the tests would compete for the same cores and memory.
test-all:
	$(MAKE) test
	$(MAKE) test-slow

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
