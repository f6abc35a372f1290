"""`ringfence bench`: reads the options, measures, prints."""

from __future__ import annotations

import _signal as signal
import sys

from ..commands import BENCH
from ..options import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Measure; 0 when everything could be measured."""
    options, words = parse(BENCH, argv)
    if "help" in options:
        from ..help import help_of

        sys.stdout.write(help_of(BENCH))
        return 0
    _check(words)
    import json

    from ...bench import main as bench
    from ...bench import report
    from ...bench.settings import Settings

    settings = Settings(peers="peers" in options, quick="quick" in options, full="full" in options)
    asked = [*words, *(name for name in bench.ONLY_IF_ASKED if name in options)]
    names = [
        name
        for name in bench.MEASURES
        if (name in asked if asked else name not in bench.ONLY_IF_ASKED)
    ]
    # As at Ctrl-C, what was started ends too: servers and their sandboxes would stay for ever.
    signal.signal(signal.SIGTERM, _end)
    rows, missing = bench.measure(names, settings, None if "json" in options else bench.Screen())
    if "json" in options:
        json.dump(report.to_json(rows, missing, settings), sys.stdout, indent=2)
        sys.stdout.write("\n")
    return 0


def _end(signum: int, _frame: object) -> None:
    raise SystemExit(128 + signum)


def _check(words: Sequence[str]) -> None:
    from ...errors import InvalidRequest

    for word in words:
        if word.startswith("-"):
            hint = f"options stand before the measures: see `ringfence {BENCH.name} --help`"
            raise InvalidRequest(f"{word} stands behind a measure", field="OPTION", hint=hint)
        if word not in BENCH.words.split():
            raise InvalidRequest(
                f"no measure {word!r}", field="MEASURE", hint=f"one of {BENCH.words}"
            )
