#!/usr/bin/env bash
# The main job, on a real script: whatever Python is here, nothing downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh

if make_venv; then
  ringfence=(.venv/bin/ringfence)
else
  say "no environment could be made: running straight from the source tree"
  python=$(find_python)
  ringfence=(env "PYTHONPATH=$PWD/src" "$python" -m ringfence)
fi

say "ringfence run -- python3 examples/hello.py"
exec "${ringfence[@]}" run -- python3 examples/hello.py
