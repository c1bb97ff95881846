# One command per habit. Each makes the virtual environment when it is missing or out of date.

VENV ?= .venv
PY := $(VENV)/bin/python
ARGS ?=
# Tests start many processes: those that find compiled modules start a third faster.
unexport PYTHONDONTWRITEBYTECODE
# Most tests wait more than they compute. WORKERS=0 runs them in one process, as a debugger wants it.
WORKERS ?= 3

.PHONY: help run demo test setup tools java style types format bench torture fuzz certain docs clean
.DEFAULT_GOAL := help

help:
	@echo "make run      start a server on loopback (ARGS='--durability written' passes flags on)"
	@echo "make demo     from nothing to a picture: a live stream, a killed server, a lake, a report, an audit"
	@echo "              (ARGS='--s3' puts the lake into an S3 server)"
	@echo "make test     run every test but the longest (ARGS='-k figg' passes flags on)"
	@echo "make setup    only make the virtual environment, and install what tests need where it may"
	@echo "make style    check format and lint        make types    check types"
	@echo "make format   mend format and lint         make docs     write the options in docs/ anew"
	@echo "make bench    measure against the peers    make torture  every test, at length: 200 kills under load, and more"
	@echo "make fuzz     a coverage-guided fuzzer at every decoder: an hour in total, and a report (ARGS='--seconds 60 journal')"
	@echo "make certain  every test five times, twice beside busy loops (ARGS=tests/client for some)"
	@echo "make clean    delete the virtual environment and caches (never a data directory)"

# Only the ready line may reach standard output here.
run: $(VENV)/.run-installed
	@{ echo; \
	   echo "A server starts on loopback, with its data in ./headrace-data; Ctrl-C stops it."; \
	   echo "To try in a second terminal:"; \
	   echo "  $(VENV)/bin/headrace subscribe greetings --from-start"; \
	   echo "and in a third:"; \
	   echo "  $(VENV)/bin/headrace publish greetings 'hello, log'"; \
	   echo "  $(VENV)/bin/headrace topics"; \
	   echo; } >&2
	@exec $(PY) -m headrace serve $(ARGS)

demo: $(VENV)/.dev-installed java
	@$(PY) examples/demo.py $(ARGS)

test: setup
	$(PY) -m pytest -n $(WORKERS) $(ARGS)

setup: $(VENV)/.dev-installed tools

# What tests need besides Python, where it may be installed. Without a program its tests are skipped.
tools:
	@.ci/tools

# For Spark. Everything else works without it.
java:
	@.ci/tools java

style: $(VENV)/.dev-installed
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(VENV)/.dev-installed
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

types: $(VENV)/.dev-installed
	$(PY) -m mypy

bench: $(VENV)/.dev-installed java
	$(PY) -m bench $(ARGS)

torture: setup
	HEADRACE_TORTURE=$${HEADRACE_TORTURE:-200} $(PY) -m pytest --timeout 14400 $(ARGS)

fuzz: $(VENV)/.dev-installed
	nice -n 19 $(PY) -m tests.fuzz $(ARGS)

certain: setup
	@.ci/certain $(PY) -m pytest -n $(WORKERS) $(ARGS)

docs: $(VENV)/.dev-installed
	$(PY) -m headrace config --markdown > docs/configuration.md
	$(PY) -m headrace.cli.pipeline.options
	$(PY) -m headrace.server.metrics.page > docs/metrics.md

clean:
	rm -rf $(VENV) build dist src/*.egg-info .fuzz .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# setuptools comes from the constraints too: without build isolation an install is repeatable.
PIP = $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt

$(VENV)/.run-installed: pyproject.toml constraints.txt
	@VENV=$(VENV) .ci/venv >&2
	@echo "installing Headrace into $(VENV) ..." >&2
	@$(PIP) setuptools >&2
	@$(PIP) --no-build-isolation -e . >&2
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.run-installed
	@echo "installing what tests need into $(VENV) ..." >&2
	@$(PIP) --no-build-isolation -e '.[dev]' >&2
	@touch $@
