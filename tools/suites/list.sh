# Sourced by tools/suites.sh: which suites there are. Their packages are in NAME.in, locked in NAME.lock.
# shellcheck shell=bash disable=SC2034

# NAME-root is the suite NAME as root; NAME-gvisor the same in the strong tier; NAME-remote the same on a
# server (`server=`). All use NAME's packages. Without a framework's own tests (adk, autogen, harbor, smolagents
# has some) gVisor changes nothing that the conformance suite of backends does not ask: they run there no more.
# Each of the second line comes long after the one whose compiled packages it finds.
suites=(harbor adk autogen e2b e2b-middle e2b-next e2b_inspect e2b_langchain e2b_pydantic inspect langchain langchain-next mcp openai
  pydantic ray smolagents inspect-root ray-root openai-gvisor
  harbor-remote adk-remote autogen-remote inspect-remote langchain-remote mcp-remote openai-remote pydantic-remote smolagents-remote)

# `tools/suites.sh all` runs these too. CI does not: they repeat what the conformance suite asks of gVisor (decision 77).
suites_by_hand=(inspect-gvisor langchain-gvisor mcp-gvisor pydantic-gvisor smolagents-gvisor)

# packages_of NAME: whose packages it uses.
packages_of() {
  case $1 in
    *-root | *-gvisor | *-remote) printf '%s\n' "${1%-*}" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

# Suites that ask for a second user inside: an ordinary user needs a range of ids for it.
suites_of_users='inspect inspect-remote e2b_inspect'

# test_of_users NAME: which of its tests ask for one.
test_of_users() {
  case $1 in
    e2b_inspect) echo e2b_inspect/ ;; # all: its environment is root
    *) echo inspect/test_inspect.py::test_exec_as_user ;;
  esac
}

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
  name=${name%-middle} # the same tests with a newer framework
  printf '%s\n' "${name%-next}"
}

# python_of NAME: the oldest Python that its packages run on.
python_of() {
  case $1 in
    harbor | e2b_inspect) echo 3.12 ;;
    *) echo 3.11 ;;
  esac
}
