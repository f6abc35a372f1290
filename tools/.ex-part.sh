#!/usr/bin/env bash
# The wheel in fresh environments: alone, where the README is followed block by block, and with each extra alone, where
# what the extra is for is imported with nothing else there, and what its page shows first is run. Each answers
# `doctor --json` and runs a sandbox.
# `tools/extras.sh [PYTHON...]`; without one, the Python of .venv; `all` is /usr/bin/python3 and each supported version that
# pyenv has. As root, an unprivileged user does all this where it may execute the Python.
# The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
mkdir -p build
passed=0 failed=0 skipped=0
uid=23456

declare -A imports=(
  [adk]=integrations.adk [autogen]=integrations.autogen [client]=client._sync.client [docker]=backends.docker
  [egress]=egress [harbor]=integrations.harbor [images]=images.registry [inspect]=integrations.inspect_ai
  [langchain]=integrations.langchain [mcp]=integrations.mcp.server [openai-agents]=integrations.openai_agents
  [pydantic-ai]=integrations.pydantic_ai [ray]=ray [server]=api.app [smolagents]=integrations.smolagents [testing]=testing
)
# What users install beside an extra and what must fit.
declare -A beside=([pydantic-ai]=pydantic-ai-harness==0.62.0)
# What an adapter imports only when it is used.
declare -A also=([harbor]=dockerfile_parse [egress]=cryptography [docker]=docker)

make_stage() {  # PYTHON
  stage=$(mktemp -d /var/tmp/rf-extras.XXXXXX)
  trap 'rm -rf "$stage"' EXIT
  mkdir "$stage/tree" "$stage/home"
  chmod 755 "$stage"
  chmod 700 "$stage/home"
  copy_tree "$stage/tree"
  .venv/bin/python -m hatchling build -t wheel -d "$stage" >build/wheel.log 2>&1
  wheel=$(echo "$stage"/*.whl)
  become=()
  if [ "$(id -u)" = 0 ]; then
    become=(setpriv "--reuid=$uid" "--regid=$uid" --clear-groups --no-new-privs --inh-caps=-all)
    if "${become[@]}" env "$1" -c '' 2>/dev/null; then chown "$uid:$uid" "$stage/home"; else become=(); fi
  fi
}

as_user() {  # [VARIABLE=VALUE...] COMMAND...
  "${become[@]}" env -i -C "$stage/home" HOME="$stage/home" XDG_RUNTIME_DIR="$stage/home" TMPDIR="$stage/home" \
    LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin "$@" </dev/null
}

works() {  # COMMAND
  as_user "$1" --version && as_user "$1" doctor --json | "$python" -m json.tool && as_user "$1" run -- true
} >/dev/null

try() {  # EXTRA
  local extra=$1 place=$stage/$1 code
  code="import ringfence, ringfence.${imports[$extra]}${also[$extra]:+, ${also[$extra]}}"
  "$uv" venv -q --no-config --python "$python" "$place" &&
    VIRTUAL_ENV=$place "$uv" pip install -q "$wheel[$extra]" ${beside[$extra]:-} &&
    as_user "$place/bin/python" -W ignore -c "$code" && works "$place/bin/ringfence" &&
    .venv/bin/python tools/first_programs.py "$extra" "$place" "$stage/home" "${become[@]}"
}

# The wheel alone, then with the one extra that the README names; pip finds the wheel as it would in an index.
follow() {
  local place=$stage/readme
  "$python" -m venv "$place" && "$place/bin/pip" install -q --no-index --find-links "$stage" ringfence &&
    works "$place/bin/ringfence" && VIRTUAL_ENV=$place "$uv" pip install -q "$wheel[server]" &&
    as_user PATH="$place/bin:/usr/local/bin:/usr/bin:/bin" PYTHONPATH="$stage/tree" PIP_NO_INDEX=1 PIP_FIND_LINKS="$stage" \
      "$place/bin/python" -m tests.docs.follow "$stage/tree/README.md"
}

report() {  # WHAT COMMAND...
  local what=$1; shift
  if "$@" >build/extra.log 2>&1; then
    passed=$((passed + 1))
  elif [ $? = 77 ]; then
    skipped=$((skipped + 1)); echo "SKIPPED $what, its page: $(tail -n 1 build/extra.log)"
  else
    failed=$((failed + 1)); echo "FAILED $what: $(grep -v '^$' build/extra.log | tail -n 1)"
  fi
}

each_python() {  # one path a line
  local version path
  echo /usr/bin/python3
  for version in $(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml); do
    for path in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3; do
      [ ! -x "$path" ] || { echo "$path"; break; }
    done
  done
}

