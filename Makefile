# Works on a fresh machine with Python 3.11+ and make; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-bench
CODE := conftest.py src papers tests benchmarks docs
# One test process per core and one thread per test.  Without --no-loadscope-reorder, the files with the fewest tests would
# run last, but they take longest.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup browser demo docs test test-slow lint format bench mutants clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv with pinned versions

# timm is installed without its dependencies: one of them, torchvision, has no CPU build and would install CUDA.
# tests/models/timm_support.py makes the bare torchvision work in tests.
$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,docs]'
	$(BIN)/python -m pip install --quiet --no-deps --editable papers
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps timm torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt huggingface_hub
	@touch $@

# Tests open reports and the documentation in Debian's Chromium.
browser:  ## install Chromium if it is missing
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		if [ "$$(id -u)" = 0 ]; then SUDO=; else SUDO=sudo; fi; \
		$$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq chromium >/dev/null; \
	} || { echo "Some tests need Chromium, but apt-get could not install it. Please install it." >&2; exit 1; }

DEMO := runs/demo/standard runs/demo/robust runs/demo/certified
demo: setup  ## train a standard, a robust and a certified classifier on Fashion-MNIST and compare them in a report: under 4 minutes
	rm -rf runs/demo
	$(BIN)/atoll train fashion-standard --out runs/demo/standard
	$(BIN)/atoll train fashion-robust --out runs/demo/robust
	$(BIN)/atoll train fashion-certified --out runs/demo/certified
	$(BIN)/atoll attack $(DEMO) --attacks fast --budget 0.03 --norm l2 --eps 1.0
	$(BIN)/atoll certify runs/demo/certified --eps 0.5,1.0 --check 100
	$(BIN)/atoll curvature $(DEMO) --loss AT --norm l2 --eps 1.0 --points 256 --landscape weights
	$(BIN)/atoll explain $(DEMO) --methods SM,IG,BIG --points 10
	$(BIN)/atoll report $(DEMO) -o runs/demo/report.html --title "Three ways to train a classifier of clothes"

# tests/test_site.py also builds the site and opens it in a browser.  Do not add --quiet: it would hide warnings from --strict.
docs: setup  ## build the documentation in site/; broken links and missing module docstrings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: setup browser lint  ## run lint, the type checker and all tests except the slow ones
	$(PYTEST) -m "not slow"

test-slow: setup browser  ## run the slow tests: training runs and kill loops that take minutes
	$(PYTEST) -m slow

lint: setup  ## run ruff, mypy and import-linter
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check --quiet $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup  ## format the code with ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: setup $(PEERS)/.installed  ## run all benchmarks
	$(BIN)/python -m benchmarks

PACKAGE ?= threat
mutants: setup  ## change one thing in the code of PACKAGE at a time, and count how often a test notices
	$(BIN)/python -m pip install --quiet --constraint constraints.txt cosmic-ray coverage
	$(BIN)/python -m benchmarks.mutants $(PACKAGE)

# The libraries that benchmarks compare with have a separate environment.  Atoll and its tests do not need them.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt \
		adversarial-robustness-toolbox==1.20.1 multiprocess==0.70.19
	$(PEERS)/bin/python -m pip install --quiet --no-deps pyhessian==0.1
	@touch $@

clean:  ## remove environments and caches, but keep runs
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
