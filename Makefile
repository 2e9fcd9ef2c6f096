# Everything a fresh machine with Python 3.11+ and make needs; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-bench
CODE := conftest.py src papers tests benchmarks docs
# As many test processes as cores; each test uses one thread.  Files in order: those with the fewest tests take longest,
# and by default they come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup browser demo docs test test-slow lint format bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## build .venv from the pinned constraints

# timm comes without its dependencies: they include torchvision, which has no CPU build and would bring in CUDA.
# The tests help the bare torchvision along (tests/models/timm_support.py).
$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,docs]'
	$(BIN)/python -m pip install --quiet --no-deps --editable papers
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps timm torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt huggingface_hub
	@touch $@

# Tests look at reports and at the documentation in a real browser, Debian's Chromium.
browser:  ## install Chromium, if it is not there
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		if [ "$$(id -u)" = 0 ]; then SUDO=; else SUDO=sudo; fi; \
		$$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq chromium >/dev/null; \
	} || { echo "Some tests need Chromium, and apt-get could not install it: please do." >&2; exit 1; }

DEMO := runs/demo/standard runs/demo/robust runs/demo/certified
demo: setup  ## train a standard, a robust and a certified classifier of clothes and compare them in a report: 4 minutes
	rm -rf runs/demo
	$(BIN)/atoll train fashion-standard --out runs/demo/standard
	$(BIN)/atoll train fashion-robust --out runs/demo/robust
	$(BIN)/atoll train fashion-certified --out runs/demo/certified
	$(BIN)/atoll attack $(DEMO) --attacks fast --norm l2 --eps 1.0
	$(BIN)/atoll certify runs/demo/certified --eps 0.5,1.0 --check 100
	$(BIN)/atoll curvature $(DEMO) --loss AT --norm l2 --eps 1.0 --points 256 --landscape weights
	$(BIN)/atoll explain $(DEMO) --methods SM,IG,BIG --points 20
	$(BIN)/atoll report $(DEMO) -o runs/demo/report.html --title "Three ways to train a classifier of clothes"

# One of the tests builds it as well, and looks at it in a browser. (With --quiet, --strict would see no warnings.)
docs: setup  ## the documentation into site/; a broken link or a module without a docstring is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: setup browser lint  ## lint, types, all tests but the slow ones
	$(PYTEST) -m "not slow"

test-slow: setup  ## trainings and kill loops that take minutes
	$(PYTEST) -m slow

lint: setup  ## ruff, mypy, and the layers of the package
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check --quiet $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup  ## let ruff put the code in order
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: setup $(PEERS)/.installed  ## measured ratios, all from one run
	$(BIN)/python -m benchmarks

# What benchmarks compare with, in an environment of its own: nothing of it is needed to use or test Atoll.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt \
		adversarial-robustness-toolbox==1.20.1 multiprocess==0.70.19
	$(PEERS)/bin/python -m pip install --quiet --no-deps pyhessian==0.1
	@touch $@

clean:  ## remove .venv and caches; runs stay
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
