#!/usr/bin/env bash
# Mutation run: `tools/mutate.sh [--most N] [--seed S] PATH...` puts faults into a copy of the tree, one at a time,
# and reports which of them the tests of their room notice. For nights and by hand; it is no part of CI.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
mkdir -p build

install_cosmic_ray() {
  cmp -s tools/suites/mutate.lock build/mutate/mutate.lock && return 0
  rm -rf build/mutate &&
    install_locked .venv/bin/python tools/suites/mutate.lock --target build/mutate &&
    cp tools/suites/mutate.lock build/mutate/mutate.lock
}

# A fault in the lock-down can send kill(-1) or mount where it must not: it does so in namespaces of its own, with
# the machine read-only around it, and without cgroups.
contained() {  # TREE COMMAND...
  unshare --mount --pid --ipc --propagation private --fork --kill-child --mount-proc bash -c '
    mkdir -p /var/lib/ringfence && mount --bind "$1" "$1" &&
      for place in /tmp /var/tmp /run /var/lib/ringfence /sys/fs/cgroup; do
      mount -t tmpfs -o mode=1777 none "$place" || exit 1
    done && mount -o remount,bind,ro / && cd "$1" && shift && exec "$@"' - "$@"
}

[ "$(id -u)" = 0 ] || { echo "run it as root: only root can keep the faults away from this machine"; exit 1; }
{ add_dev_tools && install_cosmic_ray; } || { echo "the locked tools could not be installed: $(why_not)"; exit 1; }
tree=$(mktemp -d /var/cache/rf-mutate.XXXXXX)
trap 'rm -rf "$tree"' EXIT
copy_tree "$tree"
tools=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
(cd "$tree" && make_venv) || exit 1
printf '%s\n' "$tools" >"$("$tree/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tools.pth"
PYTHONPATH="$PWD/build/mutate" contained "$tree" "$PWD/.venv/bin/python" tools/mutate/mutate.py --report /dev/fd/3 "$@" 3>>build/mutate.jsonl
