"""`ringfence doctor --attack`: shows what the bundled probes found, as each is known."""

from __future__ import annotations

import sys

from ..terminal import Colours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...attack.result import ProbeResult

_COLOUR_OF = {
    "held": "green",
    "not_applicable": "green",
    "inconclusive": "yellow",
    "escaped": "red",
}


def main(*, as_json: bool, backend: str | None = None) -> int:
    """Run the probes; 0 when nothing escaped.

    Args:
        backend: The name of what is attacked; None is native.
    """
    from ...attack.runner import run_attack
    from ...backends.registry import backend_named

    screen = None if as_json else _Screen()
    attacked = backend_named(backend) if backend else None
    results = run_attack(screen.show if screen else None, attacked)
    escaped = [each for each in results if each.breaks]
    if screen:
        screen.conclude(results)
    else:
        _print_json(results)
    return 1 if escaped else 0


_WORDS = {"not_applicable": "not for it"}


class _Screen:
    def __init__(self) -> None:
        self._colours = Colours(sys.stdout.fileno())

    def show(self, result: ProbeResult) -> None:
        colour, word = _COLOUR_OF.get(result.status, "red"), _WORDS.get(result.status)
        status = self._colours.paint(colour, f"{word or result.status:<12}")
        print(f"{status}  {result.severity:<8}  {result.id}: {_one_line(result.description)}")
        if result.status not in ("held", "not_applicable"):
            print(f"{'':<12}  {'':<8}  {_one_line(result.evidence)}")
        sys.stdout.flush()

    def conclude(self, results: list[ProbeResult]) -> None:
        print("\n" + ", ".join(f"{count} {status}" for status, count in counts(results).items()))


def counts(results: list[ProbeResult]) -> dict[str, int]:
    """How many of each status there are; all are always named."""
    found = dict.fromkeys(_COLOUR_OF, 0)
    for each in results:
        found[each.status] += 1
    return found


def _print_json(results: list[ProbeResult]) -> None:
    import json

    form: dict[str, Any] = {
        "probes": [each.to_json() for each in results],
        "counts": counts(results),
        "escaped": [each.id for each in results if each.breaks],
    }
    print(json.dumps(form, indent=2))


def _one_line(text: str) -> str:
    """Evidence comes from inside a sandbox: it must not steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
