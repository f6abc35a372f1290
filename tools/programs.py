"""The programs that are tested: `programs.py` prints docs/reference/programs.md, `--write` writes it.

`--missing` prints the packages that this machine lacks for them, one a line.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.programs.table import PLACES, Program, programs  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "programs.md"

HEAD = """\
# Programs that work

Each row is a test (`make test ARGS=tests/programs`): native and gVisor, with the sandbox's own files and in
a writable host directory (`--mount DIR:/work:rw`), as root and as an ordinary user; and
[without namespaces](../how-to/without-namespaces.md) (landlock). The packages are Debian's.
This page is made of `tests/programs/programs.toml` by `tools/programs.py --write`.

- **yes**: the test passes.
- **no**: it does not work, for the reason in the note.

Beside a mount, Unix sockets must lie in the sandbox's own files (`/tmp`), not in the mounted directory. They
need Linux 5.9 with Landlock: see `unix_sockets` in `ringfence doctor`. There are no datagram
sockets of Unix there natively: socat, dnsmasq and others that make one for signals or for syslog end with
"Socket type not supported".

Of the host's `/etc` and `/var` a sandbox has little. R, Emacs, Maven, Mono, GHC, PHP's modules, TeX and
LibreOffice find what they need with `--mount /etc/R:/etc/R`, `/etc/emacs`, `/etc/maven`, `/etc/mono`,
`/var/lib/ghc`, `/etc/php`, `/etc/texmf` with `/var/lib/texmf`, and `/etc/libreoffice`, or in an image. `perf`
needs `profile=unrestricted`: counters of the processor tell of other programs. `docker` finds no engine.
"""


def page() -> str:
    notes: list[str] = []
    parts = [HEAD]
    for group, rows in itertools.groupby(programs(), lambda program: program.group):
        parts.append(f"## {group}\n")
        parts.append(
            f"| program | what is done | {' | '.join(PLACES)} |\n|---|---|{'---|' * len(PLACES)}"
        )
        parts.extend(_row(program, notes) for program in rows)
        parts[-1] += "\n"
    parts.append("## Notes\n")
    parts.extend(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    return "\n".join(parts) + "\n"


def _row(program: Program, notes: list[str]) -> str:
    name = program.name
    if program.note:
        name += f" {_number(program.note, notes)}"
    cells = [_cell(program, place, notes) for place in PLACES]
    what = program.what + (f"; `profile={program.profile}`" if program.profile else "")
    return f"| {name} | {what} | {' | '.join(cells)} |"


def _cell(program: Program, place: str, notes: list[str]) -> str:
    if place in program.cannot:
        return f"no {_number(program.cannot[place], notes)}"
    return "yes"


def _number(note: str, notes: list[str]) -> str:
    if note not in notes:
        notes.append(note)
    return f"({notes.index(note) + 1})"


def main(arguments: list[str]) -> None:
    if "--missing" in arguments:
        wanted = [program for program in programs() if not program.optional]
        print(*(package for program in wanted for package in program.missing()), sep="\n")
    elif "--write" in arguments:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
