# Sourced by tools/suites.sh: which suites there are. Their packages are in NAME.in, locked in NAME.lock.
# shellcheck shell=bash disable=SC2034

suites=(adk autogen harbor inspect langchain langchain-next mcp openai pydantic smolagents)

# directory_of NAME: where below tests/suites its tests are.
directory_of() {
  case $1 in
    *-next) printf '%s\n' "${1%-next}" ;; # the same tests with a newer framework
    *) printf '%s\n' "$1" ;;
  esac
}

# python_of NAME: the oldest Python that its packages run on.
python_of() {
  case $1 in
    harbor) echo 3.12 ;;
    *) echo 3.11 ;;
  esac
}
