"""Output, input, events, logs and pages that come in pieces: each once, through whatever breaks."""

from __future__ import annotations

import json
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import Client
from ringfence.client._sync.contexts import RemoteContext
from ringfence.client._sync.process import wait_for
from ringfence.client._sync.stream import RemoteStream
from ringfence.contexts.context import Turn
from ringfence.errors import (
    ExecError,
    InvalidRequest,
    LifecycleError,
    RingfenceError,
    SandboxLost,
    ServerUnreachable,
)
from tests.client.scripted import Answer, Request, as_json, problem, served, without_pauses
from tests.client.test_asked_again import exec_view, process_of, sandbox_of, sandbox_view

pytestmark = pytest.mark.anyone


@pytest.fixture(name="waits", autouse=True)
def fixture_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return without_pauses(monkeypatch)


# -- streams ---------------------------------------------------------------------------------------


class Output:
    """A stream of the server: connections break after so many bytes, and some were dropped before."""

    def __init__(self, data: bytes, cuts: list[int], dropped: list[int] | None = None) -> None:
        self.data, self.cuts, self.dropped = data, cuts, dropped or []

    def __call__(self, request: Request) -> Answer:
        lost = self.dropped.pop(0) if self.dropped else 0
        start = int(request.query["offset"]) + lost
        part = self.data[start:]
        sent = part[: self.cuts.pop(0)] if self.cuts else part
        headers = {"x-ringfence-offset": str(start), "x-ringfence-dropped-bytes": str(lost)}
        return Answer(sent, 200, {**headers, "x-ringfence-end": "true"}, len(part))


def test_a_stream_goes_on_where_it_broke_and_counts_what_was_dropped(tmp_path: Path) -> None:
    data = bytes(range(100))
    with served(tmp_path / "s", Output(data, [10, 0, 0, 0, 5, 0], [3, 0, 0, 0, 7])) as (c, server):
        stream = RemoteStream(c._transport, "/e", "stderr")
        assert data[3:13] + data[20:25] + data[25:] == stream.getvalue()
    assert ["0", "13", "13", "13", "13", "25", "25"] == [r.query["offset"] for r in server.requests]
    assert {("stderr", "true")} == {(r.query["stream"], r.query["follow"]) for r in server.requests}
    assert (10, 10, 100) == (stream.dropped_bytes, stream.missed_bytes, stream.offset)
    assert b"" == stream.read(), "it is over, and nobody is asked"
    assert 7 == len(server.requests)


def test_a_stream_that_brings_nothing_more_is_given_up(tmp_path: Path, waits: list[float]) -> None:
    with served(tmp_path / "s", Output(b"abc", [1, 0, 0, 1, *[0] * 9])) as (client, server):
        stream, found = RemoteStream(client._transport, "/e", "stdout"), list[bytes]()
        with pytest.raises(ServerUnreachable):
            found.extend(iter(stream))
    assert ["0", "1", "1", "1", *["2"] * 4] == [each.query["offset"] for each in server.requests]
    assert 7 == len(waits)


def test_a_look_at_what_is_there_does_not_wait(tmp_path: Path) -> None:
    headers = {"x-ringfence-offset": "0", "x-ringfence-dropped-bytes": "0"}
    ends = iter(["false", "false", "true"])
    bodies = iter([b"", b"ab", b""])

    def script(_: Request) -> Answer:
        here = {**headers, "x-ringfence-end": next(ends)}
        return Answer(next(bodies), 200, here)

    with served(tmp_path / "s", script) as (client, server):
        stream = RemoteStream(client._transport, "/e", "stdout")
        with pytest.raises(TimeoutError):
            stream.read(0)
        assert b"ab" == stream.read(0)
        assert b"" == stream.read(0)
    assert {"false"} == {each.query["follow"] for each in server.requests}


def test_lines_are_whole_whatever_the_connections(tmp_path: Path) -> None:
    text = "ä\n\nlonger line\nrest"
    with served(tmp_path / "s", Output(text.encode(), [1, 1, 4, 3])) as (client, _server):
        assert text.split("\n") == [*RemoteStream(client._transport, "/e", "stdout").lines()]
    with served(tmp_path / "t", Output(b"one\n", [])) as (client, _server):
        assert ["one"] == [*RemoteStream(client._transport, "/e", "stdout").lines()]


# -- events of a process ---------------------------------------------------------------------------


def lines(*forms: dict[str, Any], is_broken: bool = False) -> Answer:
    body = b"".join(json.dumps(form).encode() + b"\n" for form in forms)
    return Answer(body, 200, {}, len(body) + is_broken)


def output(cursor: str, data: str, stream: str = "stdout") -> dict[str, Any]:
    return {"type": "output", "cursor": cursor, "stream": stream, "offset": 0, "data": data}


def test_events_go_on_after_the_last_that_was_seen(tmp_path: Path, waits: list[float]) -> None:
    beat, end = {"type": "heartbeat", "cursor": "2b"}, {"type": "end", "cursor": "9"}
    answers = [
        lines(output("1", "a"), output("2", "b", "stderr"), beat, is_broken=True),
        *[lines(is_broken=True)] * 2,
        lines(beat, is_broken=True),  # a server that is there, though nothing is written
        *[lines(is_broken=True)] * 2,
        lines({"type": "dropped", "cursor": "3", "bytes": 7}, end, output("10", "never")),
    ]
    script = iter(answers)
    with served(tmp_path / "s", lambda _: next(script)) as (client, server):
        found = [*process_of(client).events("0")]
    assert ["output", "output", "dropped", "end"] == [each["type"] for each in found]
    assert [b"a", b"b"] == [each["data"] for each in found[:2]]
    assert ["0", *["2b"] * 6] == [each.query["offset"] for each in server.requests]
    assert 6 == len(waits)
    with (
        served(tmp_path / "t", lambda _: lines(is_broken=True)) as (client, server),
        pytest.raises(ServerUnreachable),
    ):
        list(process_of(client).events("5", follow=False))
    assert [("5", "false")] * 4 == [(r.query["offset"], r.query["follow"]) for r in server.requests]
    running = {"type": "running", "cursor": "1", "exec": {}}
    with served(tmp_path / "u", lambda _: lines(running)) as (client, server):
        assert [running] == [*process_of(client).events(follow=False)]


# -- the end of a process --------------------------------------------------------------------------

RESULT = {"exit_code": 3, "stdout": "out"}


def view_form(state: str = "running", **changes: Any) -> dict[str, Any]:
    form = {"id": "exec-a", "sandbox_id": "sbx-a", "argv": ["cat"], "created_at": 1.0}
    return {**form, "state": state, **changes}


def test_an_end_is_waited_for_as_often_as_it_takes(tmp_path: Path) -> None:
    answers = [as_json(view_form())] * 3 + [as_json(view_form("ended", result=RESULT))]
    script = iter(answers)
    with served(tmp_path / "s", lambda _: next(script)) as (client, server):
        result = process_of(client).wait()
        assert (3, b"out") == (result.exit_code, result.stdout)
    assert ["GET wait"] * 4 == server.asked
    assert {"25.0"} == {each.query["timeout_s"] for each in server.requests}

    with served(tmp_path / "t", lambda _: as_json(view_form())) as (client, server):
        with pytest.raises(TimeoutError, match="0 s"):
            process_of(client).wait(0)
        assert ["0.0"] == [each.query["timeout_s"] for each in server.requests]
        with pytest.raises(InvalidRequest):
            process_of(client).wait(-1)
    problem_form = {"code": "sandbox_lost", "message": "it went away"}
    lost = as_json(view_form("lost", problem=problem_form))
    with served(tmp_path / "u", lambda _: lost) as (client, server):
        with pytest.raises(SandboxLost, match="it went away"):
            process_of(client).wait()
        view = exec_view(state="ended", result=RESULT)
        found = wait_for(client._transport, "/s", view)
        assert (3, 1) == (found.exit_code, len(server.requests)), "what is known is not asked for"


def test_a_view_is_asked_for_until_it_is_the_last(tmp_path: Path) -> None:
    answers = iter([as_json(view_form()), as_json(view_form("ended"))])
    with served(tmp_path / "s", lambda _: next(answers)) as (client, server):
        process = process_of(client)
        assert [True, False, False] == [process.running for _ in range(3)]
        assert 2 == len(server.requests)
        states = iter(["suspended", "terminated"])

        def script(_: Request) -> Answer:
            return as_json(sandbox_view(state=next(states)).to_json())

        server.script = script
        sandbox = sandbox_of(client)
        assert ["suspended", "terminated", "terminated"] == [sandbox.state for _ in range(3)]
        server.requests.clear()
        sandbox.terminate()
        assert [] == server.requests, "it has ended already"


@pytest.mark.parametrize("is_refused", [False, True])
def test_whatever_ends_the_wait_ends_the_process(is_refused: bool, tmp_path: Path) -> None:
    """Also where the server refuses the kill, because it has ended meanwhile."""

    def script(request: Request) -> Answer:
        if request.path.endswith("/output"):
            return lines(
                output("1", "a"), output("2", "b", "stderr"), {"type": "end", "cursor": "3"}
            )
        if request.path.endswith("/kill"):
            return problem(409, "lifecycle") if is_refused else Answer()
        return as_json(view_form("ended", result=RESULT))

    seen: list[bytes] = []

    def fail(data: bytes) -> None:
        seen.append(data)
        raise KeyError

    with served(tmp_path / "s", script) as (client, server):
        with pytest.raises(KeyError):
            process_of(client).run_through(None, fail)
        assert [b"b"] == seen
        waited = [] if is_refused else ["GET wait"]
        assert ["GET output", "POST kill", *waited] == server.asked
        server.requests.clear()
        assert 3 == process_of(client).run_through(seen.append, None).exit_code
        assert [b"b", b"a"] == seen
        assert ["GET output", "GET wait"] == server.asked
        server.requests.clear()
        assert 3 == process_of(client).run_through(None, None).exit_code
        assert ["GET wait"] == server.asked


# -- input -----------------------------------------------------------------------------------------


class Input:
    """Takes so many bytes of each piece; None: the answer is lost, and the piece was taken."""

    def __init__(self, takes: list[int | None], offset: int = 0) -> None:
        self.takes, self.offset, self.data, self.is_over = takes, offset, b"", False

    def __call__(self, request: Request) -> Answer | None:
        start = int(request.query["offset"])
        piece = request.body[self.offset - start :]
        assert start <= self.offset
        takes = self.takes.pop(0) if self.takes else len(piece)
        taken = piece if takes is None else piece[:takes]
        self.data += taken
        self.offset += len(taken)
        self.is_over |= request.query["eof"] == "true"
        return None if takes is None else as_json({"offset": self.offset})


def test_input_goes_on_after_what_was_taken(tmp_path: Path) -> None:
    mib = 1 << 20
    data, taker = (
        bytes(range(256)) * (3 * mib // 256) + b"end",
        Input([5, None, 0, mib, 7], offset=9),
    )
    with served(tmp_path / "s", taker) as (client, server):
        process = process_of(client, stream_stdin=True, stdin_bytes=9)
        assert process.stdin is not None
        process.stdin.write(data)
        process.stdin.write(b"more")
        assert all(len(each.body) <= mib for each in server.requests)
        for _ in range(2):
            process.stdin.close()
        assert (data + b"more", True) == (taker.data, taker.is_over)
        assert ["true"] == [r.query["eof"] for r in server.requests if r.query["eof"] != "false"]
        with pytest.raises(ExecError, match="closed"):
            process.stdin.write(b"late")
        assert process_of(client).stdin is None
        assert process_of(client, pty=[2, 2]).stdin is not None


@pytest.mark.parametrize("code", ["lifecycle", "exec_failed"])
def test_input_that_nobody_reads_is_an_error_and_its_end_is_none(code: str, tmp_path: Path) -> None:
    with served(tmp_path / "s", lambda _: problem(409, code)) as (client, _server):
        stdin = process_of(client, stream_stdin=True).stdin
        assert stdin is not None
        with pytest.raises(ExecError):
            stdin.write(b"x")
        stdin.close()


@pytest.mark.parametrize(
    ("answer", "ends"),
    [(None, True), (problem(409, "exec_failed"), False), (problem(403, "forbidden"), True)],
)
def test_large_input_that_cannot_arrive_ends_the_process(
    answer: Answer | None, ends: bool, tmp_path: Path
) -> None:
    """One that reads no more is left to end by itself."""

    def script(request: Request) -> Answer | None:
        if request.path.endswith("/stdin"):
            return answer
        return as_json(view_form())

    with served(tmp_path / "s", script, retries=0) as (client, server):
        data = bytes((1 << 20) + 1)
        process = sandbox_of(client).start(["cat"], stdin=data)
        for thread in threading.enumerate():
            if thread.name == "ringfence-stdin":
                thread.join(60)
        assert process.stdin is None
        first = server.requests[0].form
        assert (True, None) == (first["stream_stdin"], first.get("stdin"))
        assert ends == ("POST kill" in server.asked)
        small = sandbox_of(client).start(["cat"], stdin=data[:-1])
        assert small.stdin is None
        assert "POST execs" == server.asked[-1]
        assert "stdin" in server.requests[-1].form


# -- events of sandboxes ---------------------------------------------------------------------------


def event(seq: int, is_broken: bool = False) -> bytes:
    form = {
        "seq": seq, "kind": "created", "time": 1.0, "sandbox_id": "s", "session_id": "s", "client_id": "c",
    }  # fmt: skip
    return f"id: run-{seq}\nevent: created\ndata: {json.dumps(form)}\n\n".encode()


def test_events_go_on_after_the_last_one(tmp_path: Path) -> None:
    def cut(data: bytes) -> Answer:
        return Answer(data, length=len(data) + 1)

    gap = b"event: gap\ndata: %s\n\n"
    answers = [
        cut(event(4) + event(5)),
        *[cut(b": beat\n\n")] * 3,
        Answer(gap % b'{"lost": 3}' + event(9)),  # an end without an error is none either
        *[cut(b"")] * 3,
        cut(gap % b'{"reason": "restarted"}' + event(1)),
        *[cut(b"id: half")] * 4,
    ]
    script = iter(answers)
    found: list[Any] = []
    with (
        served(tmp_path / "s", lambda _: next(script), retries=0) as (client, server),
        pytest.raises(ServerUnreachable),
    ):
        found.extend(client.follow_events(3))
    assert [
        (4, "created"),
        (5, "created"),
        (5, "gap"),
        (9, "created"),
        (9, "gap"),
        (1, "created"),
    ] == [(each.seq, each.kind) for each in found]
    assert ["3 events were missed", "restarted"] == [e.reason for e in found if e.kind == "gap"]
    ids = [each.headers.get("last-event-id") for each in server.requests]
    assert [None, *["run-5"] * 4, *["run-9"] * 4, *["run-1"] * 4] == ids
    since = [each.query["since"] for each in server.requests]
    assert ["3", *["5"] * 4, *["9"] * 4, *["1"] * 4] == since


# -- logs of builds --------------------------------------------------------------------------------


def test_a_log_of_a_build_goes_on_after_its_last_line(tmp_path: Path) -> None:
    def log(cursor: int, kind: str = "log", **more: Any) -> dict[str, Any]:
        return {"type": kind, "cursor": cursor, **more}

    answers = [
        lines(log(1), log(2), log(3, "heartbeat"), is_broken=True),
        *[lines(is_broken=True)] * 3,
        lines(log(4)),  # it ended without its end
        *[lines()] * 3,
        lines(log(5, "end"), log(6)),
    ]
    script = iter(answers)
    with served(tmp_path / "s", lambda _: next(script)) as (client, server):
        found = [*client.templates.follow("a/b", "build-x")]
    assert [(1, "log"), (2, "log"), (4, "log"), (5, "end")] == [
        (each["cursor"], each["type"]) for each in found
    ]
    assert ["0", *["3"] * 4, *["4"] * 4] == [each.query["offset"] for each in server.requests]
    assert {"build-x"} == {each.query["build_id"] for each in server.requests}
    with (
        served(tmp_path / "t", lambda _: lines()) as (client, server),
        pytest.raises(ServerUnreachable),
    ):
        list(client.templates.follow("t"))
    assert 4 == len(server.requests)


# -- pages -----------------------------------------------------------------------------------------


def test_a_list_has_each_page_once(tmp_path: Path) -> None:
    pages: dict[str | None, tuple[list[str], str | None]] = {
        None: (["a", "b"], "1"), "1": ([], "2"), "2": (["c"], None),
    }  # fmt: skip

    def script(request: Request) -> Answer:
        names, cursor = pages[request.query.get("cursor")]
        is_exec = request.path.endswith("/execs")
        items = [view_form(id=name) if is_exec else sandbox_view(name).to_json() for name in names]
        return as_json({"items": items, "next_cursor": cursor})

    with served(tmp_path / "s", script) as (client, server):
        assert ["a", "b", "c"] == [each.id for each in sandbox_of(client).execs()]
        found = client.list(labels={"k": "v"}, states=["running"], name="n")
        assert ["a", "b", "c"] == [each.id for each in found]
    assert 6 == len(server.requests)
    assert {("k=v", "running", "n")} == {
        tuple(each.query[key] for key in ("label", "state", "name")) for each in server.requests[3:]
    }


# -- when to ask again -----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 507])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(
    status: int, method: str, tmp_path: Path, waits: list[float]
) -> None:
    """After as long as it says; as often as `retries`; and only what is safe to repeat."""
    is_busy = status in (429, 502, 503, 504)
    answer = problem(status, "too_many_requests", **{"retry-after": "3"})
    with (
        served(tmp_path / "s", lambda _: answer, retries=5) as (client, server),
        pytest.raises(RingfenceError),
    ):
        client._transport.json(method, "/x")
    asked = 6 if is_busy and method == "GET" else 1
    assert (asked, [3.0] * (asked - 1)) == (len(server.requests), waits)


def test_an_error_that_nobody_can_read_is_of_something_else(tmp_path: Path) -> None:
    for number, content in enumerate((b"<html>", b"[" * 100_000)):
        answer = Answer(content, 500, {"content-type": "application/problem+json"})
        with (
            served(tmp_path / str(number), partial(told, answer)) as (client, _),
            pytest.raises(ServerUnreachable, match="500"),
        ):
            client.health()


def told(answer: Answer, _request: Request) -> Answer:
    return answer


def test_what_is_asked_again_has_its_answer(tmp_path: Path, waits: list[float]) -> None:
    answers: Any = iter([None, problem(503, "io"), None, as_json({"a": 1})])
    with served(tmp_path / "s", lambda _: next(answers), retries=3) as (client, server):
        assert {"a": 1} == client._transport.json("POST", "/x", body={"b": 2}, key="k")
        assert [({"b": 2}, "k")] * 4 == [
            (each.form, each.headers["idempotency-key"]) for each in server.requests
        ]
        assert 3 == len(waits)
        server.script = lambda _: Answer()
        assert client._transport.json("GET", "/x") is None


def test_a_server_that_is_not_there_is_asked_three_times_more(waits: list[float]) -> None:
    """Also what is not safe to repeat: it was not sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for retries, most in ((6, 3), (2, 2), (0, 0)):
        waits.clear()
        with Client(server, retries=retries) as client, pytest.raises(ServerUnreachable):
            client._transport.json("POST", "/x")
        assert most == len(waits)


def test_connections_are_closed_with_the_last_that_uses_them(tmp_path: Path) -> None:
    with served(tmp_path / "s", lambda _: Answer(b"ab\n")) as (client, _server):
        transport = client._transport
        with transport.stream("/x") as outer:
            client.close()
            assert transport._client is not None
            with transport.stream("/y") as inner:
                assert b"ab\n" == inner.read()
            assert b"ab\n" == outer.read()
            assert transport._client is not None
        assert transport._client is None
        assert b"ab\n" == transport.request("GET", "/z").content
        assert (None, 0) == (transport._client, transport._users)
        with pytest.raises(RingfenceError), transport.stream("/x"):
            raise LifecycleError("x")
        assert (None, 0) == (transport._client, transport._users)


# -- cells -----------------------------------------------------------------------------------------

DONE = {
    "execution_count": 1,
    "timed_out": False,
    "dropped_bytes": 5,
    "dropped_results": 2,
    "running": True,
}


def context_of(client: Client) -> Any:
    form = {"id": "ctx-a", "language": "python", "running": True}
    return RemoteContext(client._transport, "/v1/sandboxes/sbx-a", form=form)


def piece(cursor: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "cursor": cursor, **more}


def test_a_cell_is_begun_once_and_each_of_its_events_comes_once(
    tmp_path: Path, waits: list[float]
) -> None:
    start, end = piece(0, "start", cell="cell-1"), piece(9, "end", error=None, **DONE)
    answers: Any = iter(
        [
            lines(
                start, piece(1, "stdout", text="a"), piece(2, "input", prompt="p"), is_broken=True
            ),
            lines(start, is_broken=True),
            lines(start),
            lines(
                start, piece(3, "stderr", text="b"), piece(4, "dropped", bytes=7), is_broken=True
            ),
            *[None] * 2,
            lines(start, piece(5, "stdout", text="c"), end),
        ]
    )

    def script(request: Request) -> Answer | None:
        if request.path.endswith("/input"):
            return Answer()
        answer: Answer | None = next(answers)
        return answer

    said: list[str] = []
    with served(tmp_path / "s", script, retries=0) as (client, server):
        found = context_of(client).run("code", on_stdout=said.append, on_input=lambda _: "typed")
    assert ("ac", "b", 12, 2) == (
        found.stdout, found.stderr, found.dropped_bytes, found.dropped_results,
    )  # fmt: skip
    assert ["a", "c"] == said
    begun, typed, *others = server.requests
    assert ("POST", "/v1/sandboxes/sbx-a/contexts/ctx-a/cells") == (begun.method, begun.path)
    assert {"code": "code", "timeout_s": None, "input": True} == begun.form
    assert {"text": "typed"} == typed.form
    assert {("GET", f"{begun.path}/cell-1")} == {(each.method, each.path) for each in others}
    assert [*["2"] * 3, *["4"] * 3] == [each.query["cursor"] for each in others]
    assert 6 == len(waits)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cell_that_may_have_run_is_not_begun_again(has_begun: bool, tmp_path: Path) -> None:
    begun = lines(piece(0, "start", cell="cell-1"), is_broken=True)

    def script(request: Request) -> Answer | None:
        return begun if has_begun and request.method == "POST" else None

    with served(tmp_path / "s", script, retries=0) as (client, server):
        with pytest.raises(ServerUnreachable):
            context_of(client).run("code")
        methods = [each.method for each in server.requests if "cells" in each.path]
    assert ["POST", *["GET"] * (3 if has_begun else 0)] == methods


def test_a_cell_whose_caller_fails_is_interrupted_and_no_other(tmp_path: Path) -> None:
    start, out = piece(0, "start", cell="cell-1"), piece(1, "stdout", text="a")

    def script(request: Request) -> Answer | None:
        return (
            Answer() if request.path.endswith("/interrupt") else lines(start, out, is_broken=True)
        )

    def fail(_: str) -> None:
        raise KeyError

    with served(tmp_path / "s", script, retries=0) as (client, server):
        with pytest.raises(KeyError):
            context_of(client).run("code", on_stdout=fail)
        last = server.requests[-1]
        assert ("POST", {"cell_id": "cell-1"}) == (last.method, last.query)
        server.script = lambda _: problem(409, "lifecycle")
        context = context_of(client)
        with pytest.raises(LifecycleError):
            context.run("code")
        assert not context.running
        assert not server.requests[-1].path.endswith("/interrupt")


def test_what_the_end_of_a_cell_says_is_told(tmp_path: Path) -> None:
    error = {"name": "ValueError", "value": "no", "traceback": "where"}
    more = {"execution_count": 7, "timed_out": True, "running": False}
    answer = lines(
        piece(0, "start", cell="cell-1"), piece(9, "end", error=error, **{**DONE, **more})
    )
    errors: list[Any] = []
    with served(tmp_path / "s", lambda _: answer, retries=0) as (client, server):
        context = context_of(client)
        found = context.run("code", timeout_s=5, on_error=errors.append)
        assert {"code": "code", "timeout_s": 5, "input": False} == server.requests[0].form
    assert (7, True, False) == (found.execution_count, found.timed_out, context.running)
    assert error == vars(found.error)
    assert [found.error] == errors


def test_a_cell_whose_caller_has_gone_does_not_run_or_is_interrupted(tmp_path: Path) -> None:
    turn = Turn()

    def script(request: Request) -> Answer:
        turn.is_abandoned = True
        if request.path.endswith("/interrupt"):
            return Answer()
        return lines(piece(0, "start", cell="cell-1"), piece(9, "end", error=None, **DONE))

    with served(tmp_path / "s", script, retries=0) as (client, server):
        context_of(client).follow(turn, "code")
        assert ["POST cells", "POST interrupt"] == server.asked
        assert {"cell_id": "cell-1"} == server.requests[-1].query
        assert "" == context_of(client).follow(turn, "code").stdout
        assert 2 == len(server.requests), "it was not begun at all"
        for wrong in ({"on_stdout": 5}, {"on_error": "x"}, {"timeout_s": 0}):
            with pytest.raises(InvalidRequest):
                context_of(client).run("code", **wrong)
        assert 2 == len(server.requests)


def test_a_context_is_begun_again_as_it_was_and_ended(tmp_path: Path) -> None:
    ids = iter(["ctx-a", "ctx-b"])

    def script(request: Request) -> Answer:
        if request.method == "DELETE":
            return problem(404, "exec_not_found")
        if request.path.endswith("/variables"):
            return as_json({"items": [{"name": "x"}]})
        return as_json({"id": next(ids), "language": "bash", "running": True})

    with served(tmp_path / "s", script, retries=0) as (client, server):
        context = RemoteContext(
            client._transport, "/v1/sandboxes/sbx-a", "bash", cwd="/srv", env={"A": "b"}
        )
        assert "ctx-a" == context.id
        context.running = False
        context.restart()
        assert ("ctx-b", True) == (context.id, context.running)
        assert [{"name": "x"}] == context.variables()
        context.close()
        assert not context.running
        begun, again, looked, ended = server.requests
    at = "/v1/sandboxes/sbx-a/contexts"
    assert [at, f"{at}/ctx-a/restart", f"{at}/ctx-b/variables", f"{at}/ctx-b"] == [
        each.path for each in (begun, again, looked, ended)
    ]
    assert {"language": "bash", "cwd": "/srv", "env": {"A": "b"}} == begun.form == again.form
