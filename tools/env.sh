# Sourced by the other scripts: finding Python, making the environments they run in.
# shellcheck shell=bash

say() { printf '\033[2m== %s\033[0m\n' "$*" | { [ -t 1 ] && cat || sed 's/\x1b\[[0-9;]*m//g'; }; }

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

# find_python [COMMAND PREFIX...]: print the first Python >= 3.11, tried through the prefix (such as setpriv).
find_python() {
  local candidate path
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    path=$(command -v "$candidate") || continue
    if "$@" "$path" -c "$new_enough" >/dev/null 2>&1; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# The source tree as an environment of its own: needs no network, no pip and no ensurepip.
make_venv() {
  local python
  [ -x .venv/bin/ringfence ] && .venv/bin/python -c '' 2>/dev/null && return 0
  python=$(find_python) || { echo "Python 3.11 or newer is needed; none was found" >&2; return 1; }
  say "making .venv with $python"
  rm -rf .venv
  "$python" -m venv --without-pip .venv || return 1
  link_source .venv/bin/python "$PWD/src" .venv/bin/ringfence
  # As an installer does: where PYTHONDONTWRITEBYTECODE is set, every start would compile it all again.
  .venv/bin/python -m compileall -q src >/dev/null || true
}

# link_source PYTHON SRC COMMAND: let PYTHON import SRC, and write the `ringfence` command.
link_source() {
  local site
  site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
  printf '%s\n' "$2" > "$site/ringfence.pth"
  # A venv's scripts name their interpreter by its full path, as pip writes them.
  cat > "$3" <<SCRIPT
#!$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
import sys

from ringfence.cli.main import main

sys.exit(main())
SCRIPT
  chmod 755 "$3"
}

# apt_install PACKAGE...: as root on Debian and its kin; otherwise fails.
apt_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "apt-get install $*"
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"; } \
    </dev/null >build/apt.log 2>&1
}

# The tools for tests and checks, exactly as locked.
add_dev_tools() {
  make_venv || return 1
  local stamp=.venv/requirements-dev.lock
  cmp -s requirements-dev.lock "$stamp" && return 0
  mkdir -p build
  say "installing requirements-dev.lock into .venv"
  install_locked .venv/bin/python requirements-dev.lock || return 1
  cp requirements-dev.lock "$stamp"
}

# install_locked PYTHON LOCK [OPTION...]: what is locked, compiled.
install_locked() {
  local python=$1 lock=$2; shift 2
  install_for "$python" --compile --require-hashes "$@" -r "$lock"
}

# install_for PYTHON [ARGUMENT...]: by uv, which takes seconds, or else by pip, which asks its own configuration where to look.
install_for() {
  local python=$1; shift
  { find_uv && "$uv" pip install -q --python "$python" "$@" >>build/pip.log 2>&1; } ||
    .venv/bin/python -m pip --python "$python" install -q --root-user-action ignore "$@" >>build/pip.log 2>&1
}

find_uv() {  # sets `uv`; installs it, as locked, into build/uv
  uv=$PWD/build/uv/bin/uv
  add_pip && cmp -s tools/suites/uv.lock build/uv/uv.lock && return 0
  rm -rf build/uv &&
    .venv/bin/python -m pip install -q --require-hashes --target build/uv --root-user-action ignore \
      -r tools/suites/uv.lock >>build/pip.log 2>&1 && cp tools/suites/uv.lock build/uv/uv.lock
}

add_pip() {
  [ ! -x .venv/bin/pip ] || return 0
  # Debian keeps ensurepip in a package of its own.
  .venv/bin/python -c 'import ensurepip' 2>/dev/null || apt_install python3-venv || true
  .venv/bin/python -m ensurepip >build/pip.log 2>&1 || .venv/bin/python -m venv .venv >>build/pip.log 2>&1
}

# Why add_dev_tools failed, in a line.
why_not() {
  local reason
  reason=$(grep -vi '^warning' build/pip.log 2>/dev/null | tail -n 1)
  case $reason in
    *"No module named"*pip*) reason="$reason; install python3-venv" ;;
  esac
  printf '%s (build/pip.log)\n' "${reason:-no reason given}"
}

# copy_tree TO: what git knows or would know; without git, everything but what is made here.
copy_tree() {
  if git -c safe.directory='*' rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git -c safe.directory='*' ls-files -z --cached --others --exclude-standard |
      tar --null --ignore-failed-read -T - -cf - 2>/dev/null
  else
    tar --exclude=./.venv --exclude=./build --exclude=./.git --exclude=__pycache__ -cf - .
  fi | tar -C "$1" -xf -
}
