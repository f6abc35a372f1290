#!/usr/bin/env bash
# The site of the documentation, in build/docs. A link or anchor that leads nowhere is a failure, as is a page that
# docs/index.md does not name. Arguments go to `mkdocs`: `tools/docs.sh serve`.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
place=build/docs-env lock=tools/suites/docs.lock

if ! make_venv || ! add_pip; then
  echo "FAILED docs: no environment could be made"; exit 1
fi
mkdir -p build
if ! cmp -s "$lock" "$place/docs.lock"; then
  say "installing $lock into $place"
  rm -rf "$place"
  .venv/bin/python -m venv --without-pip "$place" && install_locked "$place/bin/python" "$lock" &&
    cp "$lock" "$place/docs.lock" || { echo "FAILED docs: the locked tools could not be installed: $(why_not)"; exit 1; }
fi
[ $# -gt 0 ] || set -- build
# The advertisement of a successor is no warning.
NO_MKDOCS_2_WARNING=1 exec "$place/bin/mkdocs" "$@"
