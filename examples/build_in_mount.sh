#!/bin/sh
# A build inside a sandbox: it sees one directory of yours, and what it makes there is yours afterwards.
# Usage: build_in_mount.sh, with `ringfence` on PATH.
set -eu
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
cat > "$project/build.py" <<'PY'
import platform
import sys

print("built by Python", platform.python_version(), "from", sys.argv[0])
PY

ringfence run --mount "$project:/work:rw" --workdir /work -- sh -c 'python3 build.py > out.txt'

ls -l "$project/out.txt"
cat "$project/out.txt"
