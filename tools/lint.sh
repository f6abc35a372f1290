#!/usr/bin/env bash
# Lint, format, types and layering; each counts as one. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh

passed=0 failed=0
step() {  # NAME COMMAND...
  local name=$1; shift
  say "$name"
  if "$@" </dev/null; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED $name"; fi
}

if add_dev_tools; then
  PATH="$PWD/.venv/bin:$PATH"
  step "ruff check" ruff check .
  step "ruff format" ruff format --check .
  step "mypy" mypy
  step "lint-imports" env PYTHONPATH=src lint-imports --no-cache
else
  echo "FAILED checks: the locked tools could not be installed: $(why_not)"
  failed=4
fi

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
