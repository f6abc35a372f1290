#!/usr/bin/env bash
# Each extra alone in a fresh environment, from a built wheel: what it is for is imported, with nothing else there.
# `tools/extras.sh [PYTHON...]`; without one, the Python of .venv. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh
mkdir -p build
passed=0 failed=0 skipped=0

declare -A imports=(
  [adk]=integrations.adk [autogen]=integrations.autogen [client]=client._sync.client [docker]=backends.docker
  [egress]=egress [harbor]=integrations.harbor [images]=images.registry [inspect]=integrations.inspect_ai
  [langchain]=integrations.langchain [mcp]=integrations.mcp.server [openai-agents]=integrations.openai_agents
  [pydantic-ai]=integrations.pydantic_ai [server]=api.app [smolagents]=integrations.smolagents [testing]=testing
)
# What users install beside an extra and what must fit.
declare -A beside=([pydantic-ai]=pydantic-ai-harness==0.62.0)
# What an adapter imports only when it is used.
declare -A also=([harbor]=dockerfile_parse [egress]=cryptography [docker]=docker)

try() {  # PYTHON EXTRA
  local python=$1 extra=$2 place=$stage/$2 code
  code="import ringfence, ringfence.${imports[$extra]}${also[$extra]:+, ${also[$extra]}}"
  "$uv" venv -q --no-config --python "$python" "$place" &&
    VIRTUAL_ENV=$place "$uv" pip install -q "$wheel[$extra]" ${beside[$extra]:-} &&
    "$place/bin/python" -W ignore -c "$code" && "$place/bin/ringfence" --version >/dev/null
}

add_dev_tools && find_uv || { echo "0 passed, 1 failed, 0 skipped"; exit 1; }
[ $# -gt 0 ] || set -- "$PWD/.venv/bin/python"
for python in "$@"; do
  stage=$(mktemp -d /var/tmp/rf-extras.XXXXXX)
  trap 'rm -rf "$stage"' EXIT
  .venv/bin/python -m hatchling build -t wheel -d "$stage" >build/wheel.log 2>&1
  wheel=$(echo "$stage"/*.whl)
  mapfile -t extras < <("$python" - <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"], sep="\n")
PY
  )
  for extra in "${extras[@]}"; do
    if [ "$extra" = harbor ] && "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
      skipped=$((skipped + 1)); echo "SKIPPED $extra: Harbor needs Python 3.12"
    elif [ -z "${imports[$extra]:-}" ]; then
      failed=$((failed + 1)); echo "FAILED $extra: tools/extras.sh does not know what it is for"
    elif try "$python" "$extra" >build/extra.log 2>&1; then
      passed=$((passed + 1))
    else
      failed=$((failed + 1)); echo "FAILED $extra with $python: $(grep -v '^$' build/extra.log | tail -n 1)"
    fi
    rm -rf "${stage:?}/$extra"
  done
  rm -rf "$stage"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
