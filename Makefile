.DEFAULT_GOAL := help
.PHONY: help setup run test test-thorough test-slow test-browser check lint types arch fmt test-gpu bench bench-kernels bench-kv bench-serve report ui wheelhouse

PYTHON ?= python3
PY ?= .venv/bin/python
JOBS ?= 2
STUDIES ?= bench bench_lossless
MARKS ?= browser and not slow
DEMO := smollm2_135m
# Nothing but the names listed: what they need beyond these lists the GPU machine has.
FETCH_WHEELS = $(PY) -m pip download --no-deps -c constraints.txt --only-binary=:all: \
  --python-version 3.12 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_31_x86_64
# One thread a process, and sources compiled once: tests start a hundred Python processes.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
RUN_TESTS = $(PY) -m tightfit models fetch glass && \
  $(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadfile
# One stamp for each content of the two files: an unchanged environment is not touched again.
INSTALLED := .venv/installed-$(firstword $(shell cat constraints.txt pyproject.toml | cksum))

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(INSTALLED):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "Python 3.11 or 3.12 is needed, $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	rm -f .venv/installed-* && touch $@

setup: $(INSTALLED) ## create .venv with the pinned packages (PYTHON=python3.12 selects)

run: setup ## fetch the demo model once and run it (ARGS="offload=uva" adds choices)
	$(PY) -m tightfit models fetch $(DEMO)
	$(PY) -m harness $(ARGS)

test: setup ## run the tests that need no GPU, in JOBS=2 processes of one thread
	$(RUN_TESTS) -m "not thorough and not slow and not browser and not gpu and not weights" $(ARGS)

test-thorough: setup ## the tests that widen those, likewise: more cases, more processes
	$(RUN_TESTS) -m "thorough and not slow and not browser and not gpu and not weights" $(ARGS)

test-slow: setup ## the tests that take longer (storms, interpreted kernels, whole sweeps), likewise
	$(RUN_TESTS) -m "slow and not browser and not gpu and not weights" $(ARGS)

test-browser: setup ## drive the console's pages in Chromium; MARKS=browser with a comparison to its end
	$(RUN_TESTS) -m "$(MARKS)" tests/console $(ARGS)

check: lint types arch test ## everything that must pass before a commit

lint: setup ## ruff, codespell, yamllint; changes nothing
	$(PY) -m ruff check && $(PY) -m ruff format --check
	.venv/bin/codespell && .venv/bin/yamllint --strict conf

types: setup ## mypy, strict
	$(PY) -m mypy

arch: setup ## import contracts
	.venv/bin/lint-imports

fmt: setup ## sort imports, mend what ruff can, format; the only target that rewrites code
	$(PY) -m ruff check --fix && $(PY) -m ruff format

test-gpu: JOBS := 1
test-gpu: ## run the GPU tests (JOBS=14 processes; on a machine with its own torch: PY=python3)
	@$(PY) -m pytest -m "gpu and not alone" --require-gpu $(if $(filter-out 1,$(JOBS)),-n $(JOBS)) $(ARGS); others=$$?; \
	  $(PY) -m pytest -m "gpu and alone" --require-gpu $(ARGS); \
	  case $$others,$$? in 0,0 | 0,5 | 5,0) ;; *) exit 1;; esac  # 5: none among ARGS

bench: ## backends and weights in codes against link and memory on this GPU; writes docs/performance.md
	@status=0; for study in $(STUDIES); do $(PY) -m harness study=$$study $(ARGS) || status=$$?; done; \
	  exit $$status

bench-kv: ## the KV cache over two tiers on this GPU; writes docs/performance.md
	$(PY) -m harness study=bench_kv $(ARGS)

bench-serve: ## what the server adds to the engine on this GPU; writes docs/performance.md
	$(PY) -m harness study=bench_serve $(ARGS)

bench-kernels: ## time single operators on this GPU
	$(PY) -m kernels.bench $(ARGS)

report: ## rebuild the report of a run folder: make report DIR=...
	@test -n "$(DIR)" || { echo "DIR: expected the folder of a run or a sweep: make report DIR=..."; exit 2; }
	$(PY) -m reports "$(DIR)"

ui: setup ## open MLflow on the database of all runs (ARGS="--port 5001")
	$(PY) -m tightfit ui $(ARGS)

wheelhouse: setup ## collect what an offline GPU machine lacks, for Python 3.12, in two groups
	rm -rf wheelhouse
	$(PY) -m pip wheel --no-deps -w wheelhouse/base -c constraints.txt antlr4-python3-runtime
	$(FETCH_WHEELS) -d wheelhouse/base --find-links wheelhouse/base -r requirements-offline.txt
	$(FETCH_WHEELS) -d wheelhouse/server -r requirements-offline-server.txt
	@du -sb wheelhouse | awk '{ printf "wheelhouse: %.1f MB\n", $$1 / 1e6; exit $$1 > 20e6 }' || \
	  { echo "wheelhouse: expected at most 20 MB. Take what the machine has off the lists."; exit 1; }
