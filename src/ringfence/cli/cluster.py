"""`ringfence cluster` and `ringfence nodes`."""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from typing import cast

from ..errors import InvalidRequest
from ..model.base.checks import parse_duration
from .options import parse
from .server.hosting import CLUSTER, NODES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TextIO

    from ..cluster.directory import Directory
    from .options import Command


def cluster(argv: Sequence[str]) -> int:
    given, words = _read(CLUSTER, argv)
    if "help" in given:
        return 0
    if len(words) != 1 or words[0] not in ("up", "status", "down"):
        raise InvalidRequest("give one of up, status, down", field="VERB", hint=_usage(CLUSTER))
    from ..cluster import admin

    if words == ["up"]:
        if "address" not in given or "join" in given:
            text = admin.up(given.get("join", ""))
            if "json" not in given:
                sys.stdout.write(text)
        directory = _directory(given)
        return _report_missing(directory, _show(given, directory, start=True))
    if words == ["status"]:
        _show(given, _directory(given))
    else:
        ended = admin.down(_directory(given))
        print(json.dumps({"ended": ended}) if "json" in given else f"ended {ended} nodes")
    return 0


def nodes(argv: Sequence[str]) -> int:
    given, words = _read(NODES, argv)
    if "help" in given:
        return 0
    from ..cluster import admin

    if not words:
        _show(given, _directory(given))
    elif len(words) == 2 and words[0] in ("drain", "undrain"):
        directory = _directory(given)
        admin.drain(directory, words[1], draining=words[0] == "drain")
        if words[0] == "drain":
            return _await_drain(given, directory, words[1])
    else:
        raise InvalidRequest("give nothing, or drain NODE", field="VERB", hint=_usage(NODES))
    return 0


def _read(command: Command, argv: Sequence[str]) -> tuple[dict[str, Any], Sequence[str]]:
    given, words = parse(command, argv)
    verbs: list[str] = []
    while words and not words[0].startswith("-"):  # options may follow the verb
        verbs.append(words[0])
        _, words = parse(command, words[1:], given)
    if "help" in given:
        from .help import help_of

        sys.stdout.write(help_of(command))
    return given, [*verbs, *words]


def _usage(command: Command) -> str:
    return f"ringfence {command.name} {command.arguments}"


class MainThreadOutput:
    """Standard output of the main thread alone: a thread of Ray prints warnings there, whatever it is told.

    Theirs go to standard error, so that the output of `--json` is JSON.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> int:
        """Write to standard output, or from another thread to standard error."""
        is_main = threading.current_thread() is threading.main_thread()
        return (self._output if is_main else sys.stderr).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def _directory(given: dict[str, Any]) -> Directory:
    from ..cluster.directory import connect

    sys.stdout = cast("TextIO", MainThreadOutput(sys.stdout))
    return connect(given.get("address", "auto"), given.get("cluster-name", "default"))


def _await_drain(given: dict[str, Any], directory: Directory, tag: str) -> int:
    """Show what is left on a draining node until it is empty; 1: some is left after --wait."""
    from ..cluster import admin

    most_s = parse_duration(given.get("wait", "10s"), "wait")
    is_empty = admin.wait_drained(directory, tag, most_s, partial(_show_left, "json" in given))
    if is_empty and "json" not in given:
        print(f"node {tag} has no sandbox: stop Ray there")
    return 0 if is_empty else 1


def _show_left(as_json: bool, left: list[dict[str, Any]]) -> None:
    from .tables import show

    if as_json:
        print(json.dumps(left), flush=True)
        return
    rows = [
        (each["id"], each["owner"], each["outcome"], each["snapshot"] or each["why"])
        for each in left
    ]
    show(("SANDBOX", "OWNER", "OUTCOME", "SNAPSHOT OR REASON"), rows)


def _report_missing(directory: Directory, found: list[dict[str, Any]]) -> int:
    """Report Ray nodes without a server; 1 if there are any."""
    missing = directory.ray_nodes().keys() - {each["ray_id"] for each in found}
    if not missing:
        return 0
    print(f"{len(missing)} Ray nodes have no server yet: see `ringfence nodes`", file=sys.stderr)
    return 1


def _show(
    given: dict[str, Any], directory: Directory, *, start: bool = False
) -> list[dict[str, Any]]:
    """Print the nodes; the forms that were printed."""
    from ..cluster import admin

    found = admin.start(directory) if start else admin.nodes(directory)
    if "json" in given:
        print(json.dumps(found))
        return found
    from .tables import plain, show

    heads = ("NODE", "HOST", "STATUS", "SANDBOXES", "LOAD", "FREE", "TIERS", "BACKENDS")
    rows = [
        (
            *(each["node"], each["host"], each["status"]),
            *(f"{each['active']}/{each['max_sandboxes']}", f"{each['load']:.1f}/{each['cpus']:g}"),
            f"{each['free_memory_bytes'] >> 20} MiB",
            *(",".join(each["tiers"]), ",".join(each["backends"])),
        )
        for each in found
    ]
    show(heads, rows)
    for tag, why in admin.troubles(directory).items():
        print(f"node {tag} does not start: {plain(why)}", file=sys.stderr)
    return found
