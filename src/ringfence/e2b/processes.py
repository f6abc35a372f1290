"""E2B's process service on our execs: start, follow, input, signals."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..api.exec_bodies import append
from ..api.streaming.runs import Bell, Watching, wait_for
from ..contexts.frames import language_of
from ..errors import ExecError, InvalidRequest, LifecycleError, PermissionDenied, SandboxLost
from ..execs.run import Run
from ..model.execs.exec import KILLED_BY_TERMINATE, ExecRequest
from ..spool.order import ERR, OUT
from .call import Call
from .codec import RpcError, field, from_base64, to_base64
from .entries import absolute
from .notes import variables
from .rpc import (
    client_stream,
    deadline_s,
    home_of,
    incoming,
    ping_s,
    server_stream,
    unary,
    unknown_user,
    user_of,
)
from .settings import HOME, ROOT, variables_of_root

_PIECE = 32 << 10
_LONGEST_TAG = 1024
_SHELL = ("/bin/bash", "-l", "-c")  # as E2B's SDKs run each command
_LONGEST_ARGUMENT = 30_000  # characters: execve(2) takes 128 KiB in one argument
_ENDED = (SandboxLost.code, LifecycleError.code)  # of an exec whose sandbox is gone
_DYING_S = 2.0
_STALL_S = 60.0  # for input that the process does not read
_FIRST_PID = 1 << 22  # beyond every pid of the kernel: PID_MAX_LIMIT of include/linux/threads.h
_SIGNALS = {
    "SIGNAL_SIGKILL": signal.SIGKILL,
    "SIGNAL_SIGTERM": signal.SIGTERM,
    9: signal.SIGKILL,
    15: signal.SIGTERM,
}


def pid_of(exec_id: str) -> int:
    """A number for an exec. It follows from the id, so that it is the same after a restart."""
    return _FIRST_PID + zlib.crc32(exec_id.encode()) % (1 << 30)


async def _number(call: Call, run: Run) -> int:
    """The pid of a process inside; where it cannot be had, a number that follows from the exec."""
    known = call.shared.pids.get(run.id)
    if known is None:
        known = await call.call(run.pid) or pid_of(run.id)
        if not run.done.done():
            call.shared.pids[run.id] = known
            run.at_end(lambda: _forget(call.shared.pids, run.id))
    return known


async def _find(call: Call, form: dict[str, Any]) -> Run:
    """Find the exec that a selector means, which runs.

    Raises:
        RpcError: There is none.
    """
    selector = field(form, "process", dict, {})
    pid, tag = field(selector, "pid", int), field(selector, "tag", str)
    for run in reversed(call.shared.execs.running_of(call.inside.sandbox_id)):
        tagged = call.shared.tags.get(run.id, ("", {}))[0]
        if (tag and tag == tagged) or (pid is not None and pid == await _number(call, run)):
            return run
    what = f"tag {tag}" if tag else f"pid {pid}"
    raise RpcError("not_found", f"process with {what} not found")


async def start(call: Call, form: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Start a process and follow it. It goes on without the client, until the deadline."""
    config = field(form, "process", dict, {})
    env = {str(key): str(value) for key, value in field(config, "envs", dict, {}).items()}
    cwd = field(config, "cwd", str)
    pty = field(form, "pty", dict)
    argv = (field(config, "cmd", str, ""), *field(config, "args", list, []))
    tag = field(form, "tag", str, "")
    if len(tag) > _LONGEST_TAG:
        raise RpcError("invalid_argument", f"tag: over {_LONGEST_TAG} characters")
    if argv[:-1] == _SHELL and len(str(argv[-1])) > _LONGEST_ARGUMENT:
        argv = await _from_file(call, str(argv[-1]))
    live, timeout_s, user = call.inside, deadline_s(call), user_of(call)
    own = variables_of_root(live.spec.env) if user == ROOT else {}
    if timeout_s is not None and not call.caller.is_admin:
        most = call.service.permissions.most.limits.wall_time_s
        timeout_s = min(timeout_s, most or timeout_s)
    request = ExecRequest(
        argv,
        cwd=await _directory(call, user, cwd),
        env=variables(live) | own | env,
        user=user,
        timeout_s=timeout_s,
        pty=_size_of(pty) if pty is not None else None,
        stream_stdin=field(form, "stdin", bool, True),
        session_leader=pty is not None,
    )
    wanted = call.service.permissions.judge(call.caller, request)
    if cwd and request.cwd and not await _is_there(call, request.cwd, user):
        raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist")
    try:
        run = await call.call(call.shared.execs.start, live, wanted)
    except InvalidRequest as exc:
        if exc.field != "user":
            raise
        raise unknown_user(request.user or "") from exc
    _note(call, run, tag, env)
    return _events(call, run, (0, 0))


async def _directory(call: Call, user: str | None, cwd: str | None) -> str | None:
    """Return the directory of a command; without one that the client or the template names, the user's home."""
    home = await home_of(call, user)
    if cwd:
        return absolute(cwd, home)
    if user is None or call.inside.spec.workdir not in (None, HOME):
        return None
    return home if await _is_there(call, home, user) else None  # an image need not have it


async def _is_there(call: Call, path: str, user: str | None) -> bool:
    try:
        return bool(await call.call(call.inside.sandbox.files.exists, path))
    except PermissionDenied:
        if user is None:
            raise
        return True  # the exec says whether its user may go there


def _note(call: Call, run: Run, tag: str, env: dict[str, str]) -> None:
    tags = call.shared.tags
    tags[run.id] = tag, env
    run.at_end(lambda: _forget(tags, run.id))


def note_copies(call: Call, sandbox_id: str, copies: Iterable[Mapping[str, str]]) -> None:
    """Give processes that go on in a fork the tags that they had.

    Args:
        copies: Ids of execs in forks, by those in the sandbox that was forked.
    """
    sources = {own: source for each in copies for source, own in each.items()}
    for run in call.shared.execs.running_of(sandbox_id):
        noted = call.shared.tags.get(sources.get(run.id, ""))
        if noted is not None:
            _note(call, run, *noted)


async def _from_file(call: Call, script: str) -> tuple[str, ...]:
    """A command for a script that is too long to be an argument of one."""
    path = f"/tmp/.e2b-{secrets.token_hex(8)}"
    await call.call(call.inside.sandbox.files.write, path, script, mode=0o644)
    return (*_SHELL, 's=$(cat "$0"); rm -f "$0"; eval "$s"', path)


def _forget(known: dict[str, Any], exec_id: str) -> None:
    known.pop(exec_id, None)


def _size_of(pty: dict[str, Any]) -> tuple[int, int]:
    size = field(pty, "size", dict, {})
    return field(size, "rows", int, 24), field(size, "cols", int, 80)


async def connect(call: Call, form: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    run = await _find(call, form)
    out, err = run.spool.totals
    return _events(call, run, (out, err), deadline_s(call))


async def _events(
    call: Call, run: Run, place: tuple[int, int], left_s: float | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yield start, data and end of a process. What a slow client has not read stays on disk.

    Args:
        left_s: Until the stream ends, which the process does not notice.
    """
    until = None if left_s is None else time.monotonic() + left_s
    yield {"event": {"start": {"pid": await _number(call, run)}}}
    wait_s = ping_s(call)
    follower = run.spool.follow(place, (OUT, ERR))
    share, name = call.service.share, "pty" if run.view().pty is not None else ""

    def read() -> dict[str, Any] | None:
        """Read on the event loop, and in its turn: who writes without end is read without end."""
        if (event := follower.next(_PIECE)) is None:
            return None
        stream = name or ("stderr" if event.stream == ERR else "stdout")
        return {"event": {"data": {stream: to_base64(event.data)}}}

    with follower, Bell(run) as bell, Watching(call.service, run.sandbox_id):
        while True:
            bell.clear()
            is_over = run.done.done()
            while message := await share.run(read, 0.0):
                yield message
            if is_over:
                break
            left = wait_s if until is None else min(wait_s, until - time.monotonic())
            if left <= 0:
                raise RpcError("deadline_exceeded", "the deadline of the request is over")
            if not await bell.wait(left) and (until is None or time.monotonic() < until):
                yield {"event": {"keepalive": {}}}
    yield {"event": {"end": _end(run)}}


def _end(run: Run) -> dict[str, Any]:
    """Describe how it ended, zero values left out as proto3 does.

    Raises:
        RpcError: Its sandbox or its time was over.
    """
    view = run.view()
    status, problem = view.status, view.problem
    if problem is not None and problem.code not in _ENDED:
        raise problem.error()
    if status is None or status.killed_by == KILLED_BY_TERMINATE:
        why = "the sandbox was killed or reached its end of life"
        if problem is not None and problem.code == SandboxLost.code:
            why = problem.message
        raise RpcError("unavailable", f"sandbox {run.sandbox_id}: {why}")
    if status.timed_out:
        raise RpcError("deadline_exceeded", "the process was killed at its deadline")
    if status.signal is not None:
        name = signal.strsignal(status.signal) or f"signal {status.signal}"
        text = f"signal: {name.lower()}"
        return {"exitCode": -1, "status": text, "error": text}
    text = f"exit status {status.exit_code}"
    if not status.exit_code:
        return {"exited": True, "status": text}
    return {"exitCode": status.exit_code, "exited": True, "status": text, "error": text}


async def list_(call: Call, _form: dict[str, Any]) -> dict[str, Any]:
    """List the processes that were started here and run."""
    found = []
    for run in call.shared.execs.running_of(call.inside.sandbox_id):
        view = run.view()
        if language_of(view.argv):
            continue  # an interpreter of the other port
        tag, env = call.shared.tags.get(run.id, ("", {}))
        config: dict[str, Any] = {"cmd": view.argv[0], "args": view.argv[1:], "envs": env}
        if view.cwd:
            config["cwd"] = view.cwd
        pid = await _number(call, run)
        found.append({"config": config, "pid": pid, **({"tag": tag} if tag else {})})
    return {"processes": found}


async def _give(run: Run, given: dict[str, Any]) -> None:
    """Write input, of the kind that the process takes."""
    is_pty = run.view().pty is not None
    stdin, pty = field(given, "stdin", str), field(given, "pty", str)
    text = pty if is_pty else stdin
    if text is None:
        what = "a terminal: send `pty`" if is_pty else "no terminal: send `stdin`"
        raise RpcError("failed_precondition", f"the process has {what}")
    try:
        async with asyncio.timeout(_STALL_S):
            await append(run, from_base64(text))
    except TimeoutError:
        raise RpcError("deadline_exceeded", "the process does not read its input") from None
    except (ExecError, LifecycleError, OSError) as exc:
        raise _no_input(run, exc) from exc


def _no_input(run: Run, exc: Exception) -> RpcError:
    view = run.view()
    if view.stream_stdin or view.pty is not None:
        return RpcError("failed_precondition", f"stdin not enabled or closed: {exc}")
    why = "stdin not enabled or closed: start the command with stdin=True to write to it"
    return RpcError("failed_precondition", why)


async def send_input(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Write to a process's stdin or terminal."""
    run = await _find(call, form)
    async with call.shared.lock(run.id):
        await _give(run, field(form, "input", dict, {}))
    return {}


async def stream_input(call: Call) -> dict[str, Any]:
    """Write what the client streams."""
    run: Run | None = None
    async for each in incoming(call):
        if "start" in each:
            run = await _find(call, field(each, "start", dict, {}))
        elif "data" in each:
            if run is None:
                raise RpcError("invalid_argument", "the first message names no process")
            async with call.shared.lock(run.id):
                await _give(run, field(field(each, "data", dict, {}), "input", dict, {}))
    return {}


async def close_stdin(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    run = await _find(call, form)
    try:
        await call.call(run.end_input)
    except (ExecError, LifecycleError) as exc:
        raise _no_input(run, exc) from exc
    return {}


async def send_signal(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Signal a process; SIGKILL takes what it has started along."""
    run = await _find(call, form)
    number = _SIGNALS.get(form.get("signal", ""))
    if number is None:
        raise RpcError("unimplemented", f"invalid signal: {form.get('signal')}")
    if number == signal.SIGKILL:
        await call.call(run.kill)
        await wait_for(run, _DYING_S)  # so that the next request does not find it any more
    else:
        await call.call(run.signal, int(number))
    return {}


async def update(call: Call, form: dict[str, Any]) -> dict[str, Any]:
    """Tell a process's terminal its size."""
    run, pty = await _find(call, form), field(form, "pty", dict)
    if pty is not None:
        rows, columns = _size_of(pty)
        with suppress(LifecycleError):
            await call.call(run.resize, rows, columns)
    return {}


_AT = "/process.Process"
ROUTES = [
    server_stream(f"{_AT}/Start", start),
    server_stream(f"{_AT}/Connect", connect),
    unary(f"{_AT}/List", list_),
    unary(f"{_AT}/SendInput", send_input),
    client_stream(f"{_AT}/StreamInput", stream_input),
    unary(f"{_AT}/CloseStdin", close_stdin),
    unary(f"{_AT}/SendSignal", send_signal),
    unary(f"{_AT}/Update", update),
]
