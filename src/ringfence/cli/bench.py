"""`ringfence bench`: reads the options; the measuring is `ringfence.bench`'s."""

from __future__ import annotations

import sys

from .commands import BENCH
from .options import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Measure; 0 when everything could be measured."""
    given, words = parse(BENCH, argv)
    if "help" in given:
        from .help import help_of

        sys.stdout.write(help_of(BENCH))
        return 0
    _check(words)
    from ..bench.main import main as bench

    return bench([*(f"--{name}" for name in given), *words])


def _check(words: Sequence[str]) -> None:
    from ..errors import InvalidRequest

    for word in words:
        if word not in BENCH.words.split():
            raise InvalidRequest(
                f"no measure {word!r}", field="MEASURE", hint=f"one of {BENCH.words}"
            )
