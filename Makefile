# Two commands are all the set-up there is: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test soak check format setup clean release-check docs

help:
	@echo "make demo    install what is needed, then show trimtab at work on this machine"
	@echo "make test    install what is needed, then run the tests"
	@echo "make check   ruff, mypy --strict and the floor test"
	@echo "make soak    the slow tests alone"
	@echo "make release-check  build the packages, install them into clean environments, run the README"
	@echo "make docs    the documentation as a static site in site/, with man pages"
	@echo "make setup   only install (into $(VENV))"
	@echo "make format  let ruff rewrite the source"
	@echo "make clean   remove $(VENV) and caches"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "trimtab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (a minute or two the first time; torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

# The run begins anew every time.
define show
	@echo; echo '$$ trimtab $(1)'
	@$(BIN)/trimtab $(1)
endef

# Two threads of a model this small would wait for each other on a busy machine.
demo: export OMP_NUM_THREADS = 1
demo: $(READY)
	$(call show,detect)
	$(call show,plan slm --on RTX3090 --pin compile=false)
	@rm -rf $(VENV)/demo
	$(call show,train slm:tiny --steps 150 --every 10 --evaluate-every 50 --out $(VENV)/demo)
	$(call show,estimate slm --on RTX3090 --micro-batch 12)
	@echo; echo "next: trimtab train slm:tiny --data YOUR_TEXT, trimtab plan YOUR_FILE.py:YourJob --on 4xA100-40GB, docs/jobs.md"

PYTEST := $(BIN)/python -m pytest --durations=10

test: $(READY)
	@$(PYTEST) -n auto --dist loadgroup -m 'not slow'

# Both parts run, whatever becomes of the first: a failure in one says nothing of the other.
soak: $(READY)
	@failed=0; \
	$(PYTEST) -n auto --dist loadgroup -m 'slow and not alone' || failed=1; \
	$(PYTEST) -m 'slow and alone' || failed=1; \
	exit $$failed

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_floors.py

release-check: $(READY)
	@$(BIN)/python bench/release.py --keep dist

docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@$(BIN)/python bench/manual.py --man site/man/man1
	@echo "open site/index.html; man -M site/man trimtab-plan"

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
