#!/usr/bin/env bash
# Run tests/on_each_python.py on Debian's newest Python, as root and as an ordinary user.
# `tools/newest_python.sh [SUITE]`: root and the network are needed. The system of that Debian suite (default: sid) is made
# once, in build/SUITE, and entered in a mount namespace of its own, where its Python finds its own libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
suite=${1:-sid} root=$PWD/build/${1:-sid}
[ "$(id -u)" = 0 ] || { echo "only root can make a Debian system" >&2; exit 1; }
mkdir -p build
command -v debootstrap >/dev/null || apt_install debootstrap
if [ ! -x "$root/usr/bin/python3" ]; then
  say "making a system of Debian $suite in build/$suite"
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3 "$suite" "$root" >build/debootstrap.log ||
    { tail -n 3 build/debootstrap.log; rm -rf "$root"; exit 1; }
fi

enter() {  # COMMAND...: in the system, with this tree at /tree
  unshare --mount --propagation private bash -euc '
    root=$1; shift
    mkdir -p "$root/tree" "$root/old"
    mount --bind "$root" "$root"
    for name in proc sys dev; do mount --rbind "/$name" "$root/$name"; done
    mount --bind "$PWD" "$root/tree"
    for name in run tmp; do mount -t tmpfs -o mode=1777 tmpfs "$root/$name"; done
    cd "$root"
    pivot_root . old
    umount -l /old
    cd /
    exec env -i HOME=/tmp XDG_RUNTIME_DIR=/run PATH=/usr/sbin:/usr/bin PYTHONPATH=/tree/src PYTHONDONTWRITEBYTECODE=1 "$@"
  ' - "$root" "$@"
}

passed=0
for become in "" "setpriv --reuid=23459 --regid=23459 --clear-groups"; do
  # shellcheck disable=SC2086
  version=$(enter $become python3 -W error /tree/tests/on_each_python.py)
  say "Python $version${become:+, as an ordinary user}"
  passed=$((passed + 1))
done
echo "$passed passed, 0 failed"
