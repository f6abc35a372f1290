# `make demo` shows the main job; `make test` is the inner loop, `make test-all` everything; `make check` is what a change must pass.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all extras suites check docs lint bench mutate lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: ## run a real script inside a sandbox, and print what it sees
	@tools/demo.sh

test: ## the tests of the inner loop, as root also as an unprivileged user; ARGS="..." goes to pytest
	@RINGFENCE_TEST_GEAR=first tools/test.sh $(ARGS)

test-all: ## all tests: also every other backend, all programs and all pages
	@tools/test.sh $(ARGS)

extras: ## the wheel and each extra alone in fresh environments, and the README followed; ARGS="all" or "PYTHON ..."
	@tools/extras.sh $(ARGS)

suites: ## suites that agent frameworks wrote for sandboxes; ARGS="langchain ..." chooses, ARGS=all adds those that CI leaves out
	@tools/suites.sh $(ARGS)

check: test-all lint ## tests, lint, format, types and layering

lint: ## ruff, mypy and the layers
	@tools/lint.sh

docs: ## the site of the documentation in build/docs, its links checked; ARGS="serve" shows it
	@tools/docs.sh $(ARGS)

bench: ## create, exec and run, measured beside the peers installed here
	@. tools/env.sh && make_venv && .venv/bin/ringfence bench --peers $(ARGS)

mutate: ## faults put into PATHS="policy egress/dns/message.py", and which of them tests notice; ARGS="--most 60 --seed 1"
	@tools/mutate.sh $(ARGS) $(PATHS)

lock: ## lock the tools for development, `make mutate` and `make docs` anew, with hashes and no registry address
	@. tools/env.sh && add_dev_tools && find_uv && for name in requirements-dev tools/suites/mutate tools/suites/docs; do \
	  "$$uv" pip compile -q --no-config --universal --python-version 3.11 --upgrade --generate-hashes \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$$name.in" -o "$$name.lock" || exit 1; done

clean: ## remove everything made here
	@rm -rf .venv build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
