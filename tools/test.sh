#!/usr/bin/env bash
# The test suite. As root it runs as root and, at the same time, again as two unprivileged users, whose output is shown
# when root's is done. RINGFENCE_TEST_GEAR is first, rest or all (tests/passes.py). Arguments go to pytest; then the gear is all.
# As root it first installs what the tests need (needs.sh).
# At most five that failed run once more, alone: one that passes then is named FLAKY (docs/decisions/0063).
# The last line is "N passed, N failed, N skipped"; a part that cannot run here is one skip, and in CI one failure.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
. tools/needs.sh
. tools/again.sh

if [ $# -gt 0 ]; then gear=all; else gear=${RINGFENCE_TEST_GEAR:-all}; fi
export RINGFENCE_TEST_GEAR=$gear
reports=build/reports/$gear
rm -rf "$reports"
mkdir -p "$reports"
passed=0 failed=0 skipped=0

cannot_run() {  # WHAT WHY
  if [ -n "${CI:-}" ]; then
    failed=$((failed + 1)); echo "FAILED $1: $2"
  else
    skipped=$((skipped + 1)); echo "SKIPPED $1: $2"
  fi
}

add_report() {  # NAME, then what ran and its arguments
  local line p f s name=$1; shift
  line=$(.venv/bin/python tools/counts.py "$reports/$name.xml")
  read -r p _ f _ s _ <<<"$line"
  if fails_again "$f" "$reports/$name.log" "$@"; then :; else p=$((p + f)) f=0; fi
  say "$name: $p passed, $f failed, $s skipped"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

run_root() {  # pytest arguments
  PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pytest "$@" </dev/null
}

install_site() {  # PYTHON: the test tools for it, in build/site
  local stamp
  stamp=$("$1" -VV; cat requirements-dev.lock)
  [ "$stamp" = "$(cat build/site.stamp 2>/dev/null)" ] && return 0
  say "installing the test tools for $1"
  rm -rf build/site build/site.stamp
  install_locked "$1" requirements-dev.lock --target build/site || return 1
  printf '%s\n' "$stamp" > build/site.stamp
}

# Users of no account and no groups, who can read only a copy of the tree and of the test tools.
uids=(23456 23458)
become() {  # UID COMMAND...
  local uid=$1; shift
  setpriv "--reuid=$uid" "--regid=$uid" --clear-groups --no-new-privs --inh-caps=-all "$@"
}

find_rootless() {  # sets `python`
  command -v setpriv >/dev/null || apt_install util-linux || { cannot_run rootless-tests "setpriv is missing"; return 1; }
  python=$(PATH=/usr/bin:/usr/local/bin find_python become "${uids[0]}") || {
    cannot_run rootless-tests "no Python >= 3.11 that an unprivileged user may execute"; return 1
  }
}

# compile_tree PYTHON: compile what is not yet compiled, once instead of in every process and pass.
compile_tree() {
  "$1" -m compileall -q -x /test_ src tests >/dev/null || true
  "$1" tools/rewrite_tests.py tests src/ringfence/testing/conformance || true
}

make_site() {  # the test tools and the package compiled, in `$stage/site` and `$stage/tree`
  install_site "$python" || {
    echo "the locked test tools could not be installed: $(why_not)" >"$reports/rootless.why"; return 1
  }
  mkdir "$stage/site" "$stage/tree"
  cp -R --preserve=timestamps build/site/. "$stage/site"  # by which Python knows that what is compiled is still of use
  copy_tree "$stage/tree"
  find src tests -name '*.pyc' -print0 | tar --null -T - -cf - | tar -C "$stage/tree" -xf -
  (cd "$stage/tree" && PYTHONPATH=$stage/site compile_tree "$python")
  chmod 755 "$stage"
}

make_home() {  # UID: a tree, a home and a `ringfence` command of its own
  local home=$stage/$1
  mkdir "$home" "$home/home" "$home/bin" "$home/run"
  cp -a "$stage/tree" "$home/tree"
  printf '#!/bin/sh\nexec %s -m ringfence "$@"\n' "$python" > "$home/bin/ringfence"
  chmod 755 "$home/bin/ringfence"
  chmod 700 "$home/run"
  chown -R "$1:$1" "$home"
}

run_user() {  # UID, then pytest arguments
  local uid=$1 home=$stage/$1; shift
  (cd "$home/tree" && become "$uid" env -i CI="${CI:-}" RINGFENCE_TEST_BOTH=1 RINGFENCE_TEST_GEAR="$gear" \
    RINGFENCE_TEST_CLAIMS="${RINGFENCE_TEST_CLAIMS:-}" LANG=C.UTF-8 \
    HOME="$home/home" XDG_RUNTIME_DIR="$home/run" USER="tester$uid" LOGNAME="tester$uid" TERM="${TERM:-dumb}" \
    PATH="$home/bin:/usr/local/bin:/usr/bin:/bin" PYTHONPATH="$home/tree/src:$stage/site" PYTHONDONTWRITEBYTECODE=1 \
    "$python" -m pytest "$@" </dev/null)
}

# All identities at once. What is marked `anyone` runs in the pass that comes to it first.
run_all() {  # pytest arguments
  export RINGFENCE_TEST_BOTH=1 RINGFENCE_TEST_NEIGHBOURS="${uids[*]} 23457" # and tools/suites.sh
  trap 'kill "${passes[@]}" 2>/dev/null; wait; rm -rf "$stage"' EXIT
  if find_rootless; then
    stage=$(mktemp -d /var/tmp/rf-rootless.XXXXXX)
    mkdir "$stage/claims"
    chmod 1777 "$stage/claims"
    export RINGFENCE_TEST_CLAIMS=$stage/claims
    say "tests as unprivileged users (uids ${uids[*]}) begin, and are shown when root's are done"
    run_users "$@" &
    passes+=($!)
  fi
  say "tests as root"
  run_root --cache-clear --junitxml="$reports/root.xml" "$@" | tee "$reports/root.log"
  wait "${passes[@]}"
  passes=()
  unset RINGFENCE_TEST_CLAIMS # what failed runs again in its own pass
  [ -z "$stage" ] || show_users
  add_report root run_root "$@"
  [ -z "$stage" ] || report_users "$@"
}

run_users() {  # pytest arguments
  local uid
  trap 'kill $(jobs -p)' TERM
  make_site || return
  for uid in "${uids[@]}"; do
    make_home "$uid"
    run_user "$uid" --cache-clear --junitxml="$stage/$uid/report.xml" "$@" >"$reports/rootless-$uid.log" 2>&1 &
  done
  wait
}

show_users() {
  local uid
  for uid in "${uids[@]}"; do
    say "tests as an unprivileged user (uid $uid)"
    cat "$reports/rootless-$uid.log"
    cp "$stage/$uid/report.xml" "$reports/rootless-$uid.xml" 2>/dev/null
  done
}

report_users() {  # pytest arguments
  local uid
  if [ -e "$reports/rootless.why" ]; then
    cannot_run rootless-tests "$(cat "$reports/rootless.why")"
    return
  fi
  for uid in "${uids[@]}"; do
    add_report "rootless-$uid" run_user "$uid" "$@"
  done
}

stage='' passes=()
add_needs
if add_dev_tools; then
  compile_tree .venv/bin/python
  if [ "$(id -u)" = 0 ]; then
    run_all "$@"
  else
    say "tests as an unprivileged user"
    run_root --cache-clear --junitxml="$reports/rootless.xml" "$@" | tee "$reports/rootless.log"
    add_report rootless run_root "$@"
  fi
else
  cannot_run test-suite "the locked test tools could not be installed: $(why_not)"
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
