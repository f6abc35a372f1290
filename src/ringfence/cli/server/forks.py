"""`fork`, `merge`, `tree`: branches of sandboxes of a server."""

from __future__ import annotations

from ...errors import InvalidRequest
from ...model.spec import LINEAGE
from .. import tables
from ..terminal import say, size
from . import remote
from .commands import FORK, MERGE, TREE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...model.fork import Merged
    from ...model.sandbox import SandboxView

_HEADS = ("CHANGE", "KIND", "SIZE", "PATH")
_CONFLICTS = 1


def fork(argv: Sequence[str]) -> int:
    """Print the ids of new sandboxes with the files of another, and what was left out."""
    given, words, after = remote.read(FORK, argv)
    remote.no_more(words := [*words, *after], 1)
    count = given.get("n", "1")
    if not count.isascii() or not count.isdigit():
        raise InvalidRequest(f"{count!r} is not a number", field="n", hint="as --n 3")
    labels = remote.key_values(given["label"], "label") if "label" in given else None
    with remote.client_of(given) as client:
        sandbox = remote.sandbox_of(client, remote.word(words, "SANDBOX", FORK))
        processes = given.get("processes", "auto")
        made = sandbox.fork(int(count), processes=processes, labels=labels)
        if "json" in given:
            remote.print_json([remote.full(each._view) for each in made])
        else:
            print(*(each.id for each in made), sep="\n")
        reasons = {each.fork_report.reason for each in made if each.fork_report is not None}
        for reason in filter(None, reasons):
            say(f"left out: {reason}")  # which may name a program of the sandbox
    return 0


def merge(argv: Sequence[str]) -> int:
    """Merge a branch's changes into a sandbox or a directory of this machine; 1 for conflicts."""
    given, words, after = remote.read(MERGE, argv)
    remote.no_more(words := [*words, *after], 1)
    if "base" not in given:
        hint = "the snapshot that both sides come from: `ringfence snapshot list`"
        raise InvalidRequest("is missing", field="base", hint=hint)
    if ("into" in given) == ("to" in given):
        raise InvalidRequest("give one of --into SANDBOX and --to DIR", field="into")
    with remote.client_of(given) as client:
        branch = remote.sandbox_of(client, remote.word(words, "SANDBOX", MERGE))
        into = given["to"] if "to" in given else remote.sandbox_of(client, given["into"])
        merged = branch.merge(
            into,
            base=given["base"],
            path=given.get("path", "."),
            prefer=given.get("prefer"),
            dry_run="dry-run" in given,
        )
    if "json" in given:
        remote.print_json(merged.to_json())
    else:
        _show(merged)
    return _CONFLICTS if merged.conflicts else 0


def _show(merged: Merged) -> None:
    if merged.conflicts:
        rows = [(each.path, each.reason) for each in merged.conflicts]
        tables.show(("CONFLICT", "REASON"), rows)
        return
    tables.show(
        _HEADS,
        [(each.change, each.kind, size(each.size_bytes), each.path) for each in merged.changes],
    )


def tree(argv: Sequence[str]) -> int:
    """Print the live sandboxes, each fork below its parent."""
    given, words, after = remote.read(TREE, argv)
    remote.no_more([*words, *after], 0)
    with remote.client_of(given) as client:
        found = client.list()
    below: dict[str, list[SandboxView]] = {}
    live = {view.id for view in found}
    for view in found:
        ancestors = [each for each in view.labels.get(LINEAGE, "").split() if each in live]
        below.setdefault(ancestors[-1] if ancestors else "", []).append(view)
    if "json" in given:
        forms = [
            {"id": v.id, "name": v.name, "lineage": v.labels.get(LINEAGE, "").split()}
            for v in found
        ]
        remote.print_json(forms)
        return 0
    todo = [(view, 0) for view in reversed(below.get("", []))]
    while todo:
        view, depth = todo.pop()
        name = f"  {tables.plain(view.name)}" if view.name else ""
        print(f"{'  ' * depth}{view.id}  {view.state}{name}")
        todo += [(each, depth + 1) for each in reversed(below.get(view.id, []))]
    return 0
