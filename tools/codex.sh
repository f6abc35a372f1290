#!/usr/bin/env bash
# The whole conformance suite under the real Codex CLI, in five minutes. `--install` only puts it on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh

VERSION=0.169.0
PREFIX=/usr/local/lib/ringfence-codex # where an ordinary user may execute it

if ! command -v codex >/dev/null; then
  [ "$(id -u)" = 0 ] || { echo "codex is not installed: run this as root once, or npm install -g @openai/codex"; exit 1; }
  npm install --silent --no-audit --no-fund --prefix "$PREFIX" "@openai/codex@$VERSION" >/dev/null
  chmod -R a+rX "$PREFIX"
  ln -sf "$PREFIX/node_modules/.bin/codex" /usr/local/bin/codex
fi
[ "${1:-}" != --install ] || exit 0
add_dev_tools
RINGFENCE_TEST_CODEX=all PATH="$PWD/.venv/bin:$PATH" \
  .venv/bin/python -m pytest -q tests/conformance/test_command.py -k AllOfCodex "$@"
