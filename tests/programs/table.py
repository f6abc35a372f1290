"""The table of programs, as data: read by the tests here and by tools/programs.py."""

from __future__ import annotations

import functools
import glob
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("programs.toml")

PLACES = ("native", "native+mount", "gvisor", "gvisor+mount", "landlock")
"""A backend, and whether a writable directory of the host is the working directory."""

_PRELUDE = """\
T=$(mktemp -d)
export T
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
until_ok() {
  local turn
  for turn in $(seq 600); do "$@" 2>/dev/null && return; sleep 0.05; done
  "$@"
}
"""


@dataclass(frozen=True)
class Program:
    """One row; programs.toml says what the fields mean."""

    name: str
    group: str
    what: str
    needs: tuple[str, ...]
    script: str
    expect: str
    note: str = ""
    optional: bool = False
    profile: str | None = None
    cannot: dict[str, str] = field(default_factory=dict)

    def full_script(self) -> str:
        return _PRELUDE + self.script

    def missing(self) -> list[str]:
        """The packages whose files this machine lacks."""
        pairs = [need.rpartition(":") for need in self.needs]
        return [package for path, _, package in pairs if not glob.glob(path)]


@functools.cache
def programs() -> tuple[Program, ...]:
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))["program"]
    return tuple(Program(**{**row, "needs": tuple(row["needs"])}) for row in rows)
