"""`create`, `list`, `update`, `rm`, `top`: the sandboxes of a server."""

from __future__ import annotations

import sys
import time

from ...errors import InvalidRequest, RingfenceError
from ...model.base.checks import parse_duration
from .. import tables
from ..request import make_spec
from ..terminal import complain, size
from . import remote
from .commands import CREATE, LIST, RM, TOP, UPDATE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...client import Client, RemoteSandbox
    from ...model.sandbox import SandboxView
    from ...model.spec import SandboxSpec
    from ...model.stats import SandboxStats

_CLEAR = "\x1b[H\x1b[2J"
_HEADS = ("SANDBOX", "NAME", "STATE", "BACKEND", "AGE", "ENDS IN", "LABELS")
_TOP = ("SANDBOX", "NAME", "STATE", "CPU", "MEMORY", "PEAK", "PROCESSES", "EXECS", "AGE")


def create(argv: Sequence[str]) -> int:
    """Print the id of a new sandbox."""
    given, words, after = remote.read(CREATE, argv)
    remote.no_more([*words, *after], 0)
    with remote.client_of(given) as client:
        made = _make(client, given)
        if "json" in given:
            remote.print_json(remote.full(made.view))
        else:
            print(made.id)
    return 0


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """Collect the fields of the spec that only a server's sandbox has."""
    changes: dict[str, Any] = {}
    if "label" in given:
        changes["labels"] = remote.key_values(given["label"], "label")
    if "ttl" in given:
        changes["ttl_s"] = parse_duration(given["ttl"], "ttl_s")
    return changes


def _make(client: Client, given: dict[str, Any]) -> RemoteSandbox:
    if "name" in given and not given["name"].strip():
        hint = "remove the option for no name; is a variable of the shell empty?"
        raise InvalidRequest("must not be empty", field="name", hint=hint)
    if "snapshot" in given:
        others = {"name", "label", "ttl", "server", "key-file", "json", "snapshot"}
        if more := sorted(set(given) - others):
            hint = "the snapshot determines this option"
            raise InvalidRequest("cannot be given with --snapshot", field=more[0], hint=hint)
        return client.restore(given["snapshot"], name=given.get("name", ""), **_changes(given))
    return client.create(
        spec_of(given),
        name=given.get("name", ""),
        backend=given.get("backend", ""),
        use_pool="no-pool" not in given,
    )


def spec_of(given: dict[str, Any]) -> SandboxSpec:
    spec = make_spec({"mount": [], **given}, ())
    changes = _changes(given)
    if "idle-timeout" in given:
        idle = parse_duration(given["idle-timeout"], "idle-timeout")
        changes["limits"] = {**spec.limits.to_json(), "idle_timeout_s": idle}
    return type(spec).from_json({**spec.to_json(with_secrets=True), **changes})


def list_(argv: Sequence[str]) -> int:
    given, words, after = remote.read(LIST, argv)
    remote.no_more([*words, *after], 0)
    with remote.client_of(given) as client:
        found = _found(client, given)
    if "json" in given:
        remote.print_json([remote.full(view) for view in found])
    elif "quiet" in given:
        sys.stdout.write("".join(f"{view.id}\n" for view in found))
    else:
        tables.show(_HEADS, [_row(view) for view in found])
    return 0


def _found(client: Client, given: dict[str, Any]) -> list[SandboxView]:
    labels = remote.key_values(given.get("label", ()), "label")
    return client.list(labels=labels, states=given.get("state", ()))


def _row(view: SandboxView) -> tuple[str, ...]:
    return (
        view.id,
        view.name,
        str(view.state),
        view.backend,
        tables.ago(view.created_at),
        tables.span(view.expires_in_s),
        tables.pairs(view.labels),
    )


def remove(argv: Sequence[str]) -> int:
    """End sandboxes; 125 when one of them could not be."""
    given, words, after = remote.read(RM, argv)
    ids = [*words, *after]
    if bool(ids) == ("all" in given):
        hint = "ringfence rm ID..., or --all; `ringfence list` shows ids"
        raise InvalidRequest("is missing", field="SANDBOX", hint=hint)
    if "label" in given and "all" not in given:
        raise InvalidRequest("only selects sandboxes for --all", field="label", hint="add --all")
    failed, ended = 0, []
    with remote.client_of(given) as client:
        for each in ids or [view.id for view in _found(client, given)]:
            try:
                sandbox = remote.sandbox_of(client, each)
                sandbox.terminate()
                ended.append(sandbox.id)
            except RingfenceError as exc:
                complain(exc, RM)
                failed = 125
    if "json" in given:
        remote.print_json({"ended": ended})
    else:
        sys.stdout.write("".join(f"{each}\n" for each in ended))
    return failed


def update(argv: Sequence[str]) -> int:
    """Change the name and the labels of a sandbox."""
    given, words, after = remote.read(UPDATE, argv)
    remote.no_more(words := [*words, *after], 1)
    sandbox = remote.word(words, "SANDBOX", UPDATE)
    labels: dict[str, str | None] = dict.fromkeys(given.get("unlabel", ()))
    labels |= remote.key_values(given.get("label", ()), "label")
    if not labels and "name" not in given:
        raise InvalidRequest("is missing", field="name", hint="or give --label, --unlabel")
    with remote.client_of(given) as client:
        view = remote.sandbox_of(client, sandbox).update(name=given.get("name"), labels=labels)
    if "json" in given:
        remote.print_json(remote.full(view))
    return 0


def top(argv: Sequence[str]) -> int:
    """A table of what sandboxes use, again and again."""
    given, words, after = remote.read(TOP, argv)
    remote.no_more([*words, *after], 0)
    interval = parse_duration(given.get("interval", "2s"), "interval")
    live = sys.stdout.isatty() and not {"once", "json"} & set(given)
    with remote.client_of(given) as client:
        before: dict[str, tuple[float, int]] = {}
        while True:
            found = _used(client, given)
            if "json" in given:
                forms = [{"sandbox": remote.full(v), "stats": s.to_json()} for v, s in found]
                remote.print_json(forms)
                return 0
            rows = [_used_row(view, stats, before) for view, stats in found]
            if not live:
                tables.show(_TOP, rows)
                return 0
            sys.stdout.write(_CLEAR + _headline(client) + tables.written(_TOP, rows, _lines()))
            sys.stdout.flush()
            time.sleep(interval)


def _lines() -> int:
    import shutil

    return max(2, shutil.get_terminal_size().lines - 3)


def _headline(client: Client) -> str:
    stats = client.stats()
    pool = f"{stats.pool_size} warm"
    return f"{client.server}: {stats.active_sandboxes} sandboxes, {pool}, {stats.created} made\n\n"


def _used(client: Client, given: dict[str, Any]) -> list[tuple[SandboxView, SandboxStats]]:
    found = []
    for view in _found(client, given):
        try:
            found.append((view, client.get(view.id).stats()))
        except RingfenceError:
            continue  # it has ended meanwhile
    return found


def _used_row(
    view: SandboxView, stats: SandboxStats, before: dict[str, tuple[float, int]]
) -> tuple[str, ...]:
    now = time.monotonic()
    share = ""
    if stats.cpu_ns is not None:
        then, cpu_ns = before.get(view.id, (now, stats.cpu_ns))
        if now > then:
            share = f"{(stats.cpu_ns - cpu_ns) / 1e7 / (now - then):.1f} %"
        before[view.id] = (now, stats.cpu_ns)
        share = share or f"{stats.cpu_ns / 1e9:.2f} s"
    return (
        view.id,
        view.name,
        str(stats.state),
        share,
        _bytes(stats.memory_bytes),
        _bytes(stats.peak_memory_bytes),
        "?" if stats.pids is None else str(stats.pids),
        str(stats.execs),
        tables.ago(view.created_at),
    )


def _bytes(count: int | None) -> str:
    return "?" if count is None else size(count)
