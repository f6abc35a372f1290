# `make demo` shows the main job; `make test` is the whole suite; `make check` is what a change must pass.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test extras suites check lint bench mutate lock clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: ## run a real script inside a sandbox, and print what it sees
	@tools/demo.sh

test: ## all tests, as root also as an unprivileged user; ARGS="..." goes to pytest
	@tools/test.sh $(ARGS)

extras: ## each extra alone in a fresh environment; ARGS="PYTHON ..." chooses interpreters
	@tools/extras.sh $(ARGS)

suites: ## suites that agent frameworks wrote for sandboxes; ARGS="langchain ..." chooses
	@tools/suites.sh $(ARGS)

check: test lint ## tests, lint, format, types and layering

lint: ## ruff, mypy and the layers
	@tools/lint.sh

bench: ## create, exec and run, measured beside the peers installed here
	@. tools/env.sh && make_venv && .venv/bin/ringfence bench --peers $(ARGS)

mutate: ## faults put into PATHS="policy egress/dns.py", and which of them tests notice; ARGS="--most 60 --seed 1"
	@tools/mutate.sh $(ARGS) $(PATHS)

lock: ## lock the tools for development and for `make mutate` anew, with hashes and no registry address
	@. tools/env.sh && add_dev_tools && find_uv && for name in requirements-dev tools/suites/mutate; do \
	  "$$uv" pip compile -q --no-config --universal --python-version 3.11 --upgrade --generate-hashes \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$$name.in" -o "$$name.lock" || exit 1; done

clean: ## remove everything made here
	@rm -rf .venv build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
