# Sourced: tests that failed beside thousands of others run once more, alone (docs/decisions/0063).

most_again=5

# Whether what failed is a failure: it failed again, or it was too much to be chance.
# What passes now is named on lines that begin with FLAKY.
fails_again() {  # COUNT LOG RUN, then pytest arguments
  local count=$1 log=$2; shift 2
  [ "$count" -gt 0 ] && [ "$count" -le "$most_again" ] || return 0
  # Of a leak the last test is told, which may not be the one that left it.
  ! grep -q 'the test run left behind' "$log" || return 0
  say "$count failed: once more, alone"
  ("$@" --last-failed --last-failed-no-failures=none) || return 0
  grep -E '^(FAILED|ERROR) ' "$log" | sed 's/^/FLAKY /'
  return 1
}
