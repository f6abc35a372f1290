#!/usr/bin/env bash
# The whole test suite. As root: all of it as root, then again as an unprivileged user. Arguments go to pytest.
# The last line is "N passed, N failed, N skipped"; a part that cannot run here is one skip, and in CI one failure.
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh

reports=build/reports
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

add_report() {  # NAME
  local line p f s
  line=$(.venv/bin/python tools/counts.py "$reports/$1.xml")
  read -r p _ f _ s _ <<<"$line"
  say "$1: $line"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

run_here() {  # NAME, then pytest arguments
  local name=$1; shift
  say "tests as $name"
  PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pytest --junitxml="$reports/$name.xml" "$@" </dev/null
  add_report "$name"
}

copy_tree() {  # TO: what git knows or would know; without git, everything but what is made here
  if git -c safe.directory='*' rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git -c safe.directory='*' ls-files -z --cached --others --exclude-standard |
      tar --null --ignore-failed-read -T - -cf - 2>/dev/null
  else
    tar --exclude=./.venv --exclude=./build --exclude=./.git --exclude=__pycache__ -cf - .
  fi | tar -C "$1" -xf -
}

install_site() {  # PYTHON: the test tools for it, in build/site
  local stamp
  stamp=$("$1" -VV; cat requirements-dev.lock)
  [ "$stamp" = "$(cat build/site.stamp 2>/dev/null)" ] && return 0
  say "installing the test tools for $1"
  rm -rf build/site build/site.stamp
  .venv/bin/python -m pip --python "$1" install -q --require-hashes --target build/site \
    --root-user-action ignore -r requirements-dev.lock >>build/pip.log 2>&1 || return 1
  printf '%s\n' "$stamp" > build/site.stamp
}

# A user of no account and no groups, who can read only a copy of the tree and of the test tools.
run_rootless() {  # pytest arguments
  local uid=23456 python stage
  local become=(setpriv "--reuid=$uid" "--regid=$uid" --clear-groups --no-new-privs --inh-caps=-all)
  command -v setpriv >/dev/null || apt_install util-linux || { cannot_run rootless-tests "setpriv is missing"; return; }
  python=$(PATH=/usr/bin:/usr/local/bin find_python "${become[@]}") || {
    cannot_run rootless-tests "no Python >= 3.11 that an unprivileged user may execute"; return
  }
  stage=$(mktemp -d /var/tmp/rf-rootless.XXXXXX)
  # shellcheck disable=SC2064
  trap "rm -rf '$stage'" EXIT
  mkdir "$stage/tree" "$stage/site" "$stage/home" "$stage/bin" "$stage/run"
  copy_tree "$stage/tree"
  install_site "$python" || {
    cannot_run rootless-tests "the locked test tools could not be installed: $(why_not)"; return
  }
  cp -R build/site/. "$stage/site"
  printf '#!/bin/sh\nexec %s -m ringfence "$@"\n' "$python" > "$stage/bin/ringfence"
  chmod 755 "$stage" "$stage/bin/ringfence"
  chmod 700 "$stage/run"
  chown -R "$uid:$uid" "$stage"
  say "tests as an unprivileged user (uid $uid)"
  (
    cd "$stage/tree" && exec "${become[@]}" env -i CI="${CI:-}" RINGFENCE_TEST_BOTH=1 LANG=C.UTF-8 \
      HOME="$stage/home" XDG_RUNTIME_DIR="$stage/run" USER=tester LOGNAME=tester TERM="${TERM:-dumb}" \
      PATH="$stage/bin:/usr/local/bin:/usr/bin:/bin" PYTHONPATH="$stage/tree/src:$stage/site" PYTHONDONTWRITEBYTECODE=1 \
      "$python" -m pytest --junitxml="$stage/rootless.xml" "$@" </dev/null
  )
  cp "$stage/rootless.xml" "$reports/rootless.xml" 2>/dev/null
  add_report rootless
}

if add_dev_tools; then
  if [ "$(id -u)" = 0 ]; then
    export RINGFENCE_TEST_BOTH=1
    run_here root "$@"
    run_rootless "$@"
  else
    run_here rootless "$@"
  fi
else
  cannot_run test-suite "the locked test tools could not be installed: $(why_not)"
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
