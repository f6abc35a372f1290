"""`ringfence backup` and `ringfence restore`."""

from __future__ import annotations

import json
import os
import sys

from ..errors import InvalidRequest
from .options import parse
from .server.hosting import BACKUP, RESTORE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .options import Command


def save(argv: Sequence[str]) -> int:
    """`backup`; returns its exit code."""
    given, place = _read(BACKUP, argv)
    if place:
        from .. import __version__
        from ..store import backup

        form = backup.save(_state_dir(given), place, __version__)
        _tell(given, form, f"saved in {place}")
    return 0


def restore(argv: Sequence[str]) -> int:
    given, place = _read(RESTORE, argv)
    if place:
        from ..store import backup

        state_dir = _state_dir(given)
        _tell(given, backup.restore(place, state_dir), f"restored in {state_dir}")
    return 0


def _read(command: Command, argv: Sequence[str]) -> tuple[dict[str, Any], str]:
    given, words = parse(command, argv)
    _, rest = parse(command, words[1:], given)  # options may follow the directory
    if "help" in given:
        from .help import help_of

        sys.stdout.write(help_of(command))
        return given, ""
    if rest or not words or not words[0]:
        usage = f"ringfence {command.name} {command.arguments}"
        raise InvalidRequest("give exactly one directory", field="DIR", hint=usage)
    return given, os.path.abspath(words[0])


def _state_dir(given: dict[str, Any]) -> str:
    from ..model.places import state_directory

    return os.path.abspath(given.get("state-dir") or state_directory())


def _tell(given: dict[str, Any], form: dict[str, Any], what: str) -> None:
    if "json" in given:
        print(json.dumps(form))
        return
    print(f"{what}: {len(form['snapshots'])} snapshots")
    if form["snapshots_elsewhere"]:
        print(
            f"not in the backup: {form['snapshots_elsewhere']} snapshots that their backends store elsewhere"
        )
