# Sourced by tools/suites.sh: which suites there are. Their packages are in NAME.in, locked in NAME.lock.
# shellcheck shell=bash disable=SC2034

# NAME-root is the suite NAME as root; NAME-gvisor the same in the strong tier. Both use NAME's packages.
# Each of the second line comes long after the one whose compiled packages it finds.
suites=(harbor adk autogen inspect langchain langchain-next mcp openai pydantic smolagents
  harbor-gvisor adk-gvisor autogen-gvisor inspect-root inspect-gvisor langchain-gvisor mcp-gvisor openai-gvisor pydantic-gvisor smolagents-gvisor)

# packages_of NAME: whose packages it uses.
packages_of() {
  case $1 in
    *-root | *-gvisor) printf '%s\n' "${1%-*}" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

# A suite that asks for a second user inside, and its one test that does: an ordinary user needs a range of ids for it.
suite_of_users=inspect
test_of_users=inspect/test_inspect.py::test_exec_as_user

# backend_of NAME: what its sandboxes run in; nothing for the default.
backend_of() {
  case $1 in
    *-gvisor) echo gvisor ;;
    *) printf '%s\n' "${RINGFENCE_SUITE_BACKEND:-}" ;;
  esac
}

# directory_of NAME: where below tests/suites its tests are.
directory_of() {
  local name
  name=$(packages_of "$1")
  printf '%s\n' "${name%-next}" # the same tests with a newer framework
}

# python_of NAME: the oldest Python that its packages run on.
python_of() {
  case $1 in
    harbor) echo 3.12 ;;
    *) echo 3.11 ;;
  esac
}
