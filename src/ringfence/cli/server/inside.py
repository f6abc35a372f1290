"""`exec`, `shell`, `logs`, `cp`: working in a sandbox of a server."""

from __future__ import annotations

import os
import shlex
import sys

from ...errors import ExecNotFound, FileNotFound, InvalidRequest
from ...model.base.checks import parse_duration
from ...model.files import DIRECTORY
from .. import tables
from ..request import environment
from ..terminal import size
from . import attached, remote
from .commands import CHANGES, CP, EXEC, LOGS, SHELL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ...client import Client, RemoteSandbox
    from ...client.forms import OutputEvent
    from ...model.execs.exec_view import ExecView

_SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash -l; exec sh -l")
_HEADS = ("EXEC", "STATE", "CODE", "STARTED", "TOOK", "COMMAND")
_CHANGES = ("CHANGE", "KIND", "SIZE", "PATH")
_CHUNK = 1 << 20


def exec_(argv: Sequence[str]) -> int:
    """Run a command; the exit code is its own."""
    given, words, command = _split(argv)
    if not command:
        hint = "ringfence exec [OPTIONS] SANDBOX -- CMD ARG..."
        raise InvalidRequest("no command given", field="argv", hint=hint)
    options = _options(given)
    with remote.client_of(given) as client:
        sandbox = remote.sandbox_of(client, remote.word(words, "SANDBOX", EXEC))
        if "json" in given:
            stdin = b"" if os.isatty(0) else b"".join(_standard_input())
            result = sandbox.exec(command, stdin=stdin or None, **options)
            remote.print_json(result.to_json())
            return _code(result.exit_code, result.signal, timed_out=result.timed_out)
        if "detach" in given:
            print(sandbox.start(command, **options).id)
            return 0
        return _run(sandbox, command, options, on_terminal=_wants_terminal(given))


def _standard_input() -> Iterator[bytes]:
    while data := os.read(0, _CHUNK):
        yield data


def _split(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """As `remote.read`, but a `--` may be left out: what follows the sandbox is the command."""
    if "--" in argv:
        return remote.read(EXEC, argv)
    from ..options import parse

    given, rest = parse(EXEC, argv)
    if "help" in given:
        return remote.read(EXEC, argv)
    return given, rest[:1], rest[1:]


def _code(exit_code: int | None, signum: int | None, *, timed_out: bool) -> int:
    if timed_out:
        return attached.TIMED_OUT
    return 128 + signum if signum is not None else exit_code or 0


def _options(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"env": environment(given.get("env", ()))}
    if "timeout" in given:
        found["timeout_s"] = parse_duration(given["timeout"], "timeout_s")
    if "workdir" in given:
        found["cwd"] = given["workdir"]
    if "user" in given:
        found["user"] = given["user"]
    return found


def _wants_terminal(given: dict[str, Any]) -> bool:
    return "tty" in given or all(os.isatty(fd) for fd in range(3))


def _run(
    sandbox: RemoteSandbox, command: Sequence[str], options: dict[str, Any], *, on_terminal: bool
) -> int:
    if on_terminal:
        from ..tty import size_of

        term = {"TERM": os.environ["TERM"]} if os.environ.get("TERM") else {}
        options = {**options, "env": {**term, **options["env"]}, "pty": size_of(1, 0, 2)}
    else:
        options = {**options, "stream_stdin": not _is_null(0)}
    process = sandbox.start(command, **options)
    return attached.Attached(process, on_terminal=on_terminal).run_through()


def _is_null(fd: int) -> bool:
    return os.path.samestat(os.fstat(fd), os.stat(os.devnull))


def shell(argv: Sequence[str]) -> int:
    given, words, command = remote.read(SHELL, argv)
    remote.no_more(words, 1)
    options, argv = _options(given), command or _SHELL
    with remote.client_of(given) as client:
        if words:
            return _run(remote.sandbox_of(client, words[0]), argv, options, on_terminal=True)
        with client.create(name="shell") as sandbox:
            return _run(sandbox, argv, options, on_terminal=True)


def logs(argv: Sequence[str]) -> int:
    given, words, after = remote.read(LOGS, argv)
    words += after
    remote.no_more(words, 2)
    with remote.client_of(given) as client:
        sandbox = remote.sandbox_of(client, remote.word(words, "SANDBOX", LOGS))
        if "network" in given:
            return _network(sandbox, given)
        if "list" in given:
            return _execs(sandbox, given)
        process = sandbox.process(words[1] if len(words) > 1 else _newest(sandbox))
        follow = "follow" in given
        if "json" not in given:
            code = attached.show(process, follow=follow)
            return code if follow else 0
        for event in process.events(follow=follow):
            _print_event(event)
    return 0


def changes(argv: Sequence[str]) -> int:
    """List what has changed in a sandbox, or print the unified diff of it."""
    given, words, after = remote.read(CHANGES, argv)
    words += after
    remote.no_more(words, 1)
    with remote.client_of(given) as client:
        sandbox = remote.sandbox_of(client, remote.word(words, "SANDBOX", CHANGES))
        found = sandbox.changes(given.get("since"))
    if "json" in given:
        remote.print_json(found.to_json())
    elif "diff" in given:
        lines = found.diff().split("\n")
        steered = sys.stdout.isatty()  # what a guest wrote must not move our cursor
        sys.stdout.write("\n".join(map(tables.plain, lines) if steered else lines))
    else:
        rows = [(each.change, each.kind, size(each.size_bytes), each.path) for each in found.items]
        tables.show(_CHANGES, rows)
    if not found.is_complete:
        print("ringfence: there is more than is shown", file=sys.stderr)
    return 0


def _print_event(event: OutputEvent) -> None:
    import json

    from ...model.base.jsonform import bytes_to_json

    data = bytes_to_json("data", event["data"]) if "data" in event else {}
    print(json.dumps({**event, **data}), flush=True)


def _newest(sandbox: RemoteSandbox) -> str:
    found = sandbox.execs()
    if not found:
        hint = f"run a command: ringfence exec {sandbox.id} -- COMMAND"
        raise ExecNotFound(f"no command has run in {sandbox.id} yet", hint=hint)
    return found[-1].id


def _execs(sandbox: RemoteSandbox, given: dict[str, Any]) -> int:
    found = sandbox.execs()
    if "json" in given:
        remote.print_json([view.to_json() for view in found])
    else:
        tables.show(_HEADS, [_row(view) for view in found])
    return 0


def _row(view: ExecView) -> tuple[str, ...]:
    code = ""
    if view.status is not None:
        status = view.status
        code = str(_code(status.exit_code, status.signal, timed_out=status.timed_out))
    took = tables.span(view.status.duration_s) if view.status else ""
    command = shlex.join(view.argv)
    return view.id, str(view.state), code, tables.ago(view.created_at), took, command


def _network(sandbox: RemoteSandbox, given: dict[str, Any]) -> int:
    found = [event.to_json() for event in sandbox.network_log()]
    if "json" in given:
        remote.print_json(found)
        return 0
    for event in found:
        print(" ".join(f"{k}={v}" for k, v in event.items() if v not in (None, "")))
    return 0


# -- copying ------------------------------------------------------------------------------------


def copy(argv: Sequence[str]) -> int:
    given, words, after = remote.read(CP, argv)
    words += after
    remote.no_more(words, 2)
    if len(words) < 2:
        raise InvalidRequest("is missing", field="DST", hint="ringfence cp SRC DST")
    (source_id, source), (target_id, target) = (_place(word) for word in words)
    if bool(source_id) == bool(target_id):
        what = f"{words[0]!r} and {words[1]!r}: one, not both, must be SANDBOX:PATH"
        raise InvalidRequest(what, field="SRC", hint="as ringfence cp a.txt SANDBOX:/tmp/a.txt")
    with remote.client_of(given) as client:
        if target_id:
            _upload(client, source, target_id, target)
        else:
            _download(client, source_id, source, target)
    return 0


def _place(word: str) -> tuple[str, str]:
    """(sandbox, path); a local path has no sandbox, and a colon only behind a slash."""
    head, colon, path = word.partition(":")
    return (head, path or ".") if colon and head and "/" not in head else ("", word)


def _upload(client: Client, source: str, sandbox_id: str, target: str) -> None:
    from ..terminal import Progress

    files = remote.sandbox_of(client, sandbox_id).files
    if source == "-":
        with files.open_write(target) as file:
            for data in _standard_input():
                file.write(data)
        return
    if target.endswith("/") or _is_directory(files, target):
        target = f"{target.rstrip('/')}/{os.path.basename(os.path.abspath(source))}"
    with Progress("uploading") as progress:
        files.upload(source, target, progress=progress)


def _is_directory(files: Any, path: str) -> bool:
    try:
        return bool(files.stat(path, follow=True).kind == DIRECTORY)
    except FileNotFound:
        return False


def _download(client: Client, sandbox_id: str, source: str, target: str) -> None:
    from ..terminal import Progress

    files = remote.sandbox_of(client, sandbox_id).files
    if target == "-":
        with files.open_read(source) as file:
            while data := file.read(_CHUNK):
                sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    name = os.path.basename(source.rstrip("/"))
    if os.path.isdir(target) and name not in ("", ".", ".."):
        target = os.path.join(target, name)
    with Progress("downloading") as progress:
        files.download(source, target, overwrite=True, progress=progress)  # as cp(1) does
