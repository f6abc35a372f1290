#!/usr/bin/env bash
# Races of the calls that an agent makes without namespaces: pointers, descriptors, paths and directories that
# threads swap. Ten minutes each by default; the tests run ten seconds.
#
#     tools/races.sh [SECONDS]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
add_dev_tools
export RINGFENCE_RACE_S=${1:-600}
exec .venv/bin/python -m pytest -q -p no:cacheprovider -k swapped \
  tests/native/test_races_without_namespaces.py tests/native/test_everyday_without_namespaces.py
