#!/usr/bin/env bash
# The whole conformance suite where each sandbox takes a second: `codex` (the real CLI), `docker` (a real engine),
# `ssh` (a real sshd) or `microvm` (an emulator and a kernel).
# `make test` runs the parts that depend on them; of `microvm` all, half of it as root and half not. `codex --install` only puts the CLI on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh

CODEX=0.169.0
PREFIX=/usr/local/lib/ringfence-codex # where an ordinary user may execute it

what=${1:?"codex, docker, ssh or microvm"}
if [ "$what" = codex ] && ! command -v codex >/dev/null; then
  [ "$(id -u)" = 0 ] || { echo "codex is not installed: run this as root once, or npm install -g @openai/codex"; exit 1; }
  npm install --silent --no-audit --no-fund --prefix "$PREFIX" "@openai/codex@$CODEX" >/dev/null
  chmod -R a+rX "$PREFIX"
  ln -sf "$PREFIX/node_modules/.bin/codex" /usr/local/bin/codex
fi
[ "${2:-}" != --install ] || exit 0
add_dev_tools
export RINGFENCE_TEST_ALL_OF=$what PATH="$PWD/.venv/bin:$PATH"
.venv/bin/python -m pytest -q tests/conformance -k AllOf
[ "$what" != microvm ] || .venv/bin/python -m pytest -q tests/egress/inside/test_microvm.py
