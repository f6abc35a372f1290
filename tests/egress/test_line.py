"""The host's thread that listens to an egress process: without it, no caller waits for ever."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import NetworkPolicy
from ringfence.egress.host import line as line_module
from ringfence.egress.host.client import Egress
from ringfence.egress.host.line import Line, _Answer, _is_stopped
from ringfence.egress.host.served import Served
from ringfence.errors import NetworkPolicyError
from ringfence.model.net.netlog import NetworkEvent
from ringfence.model.net.rules import NetworkRule
from tests.held import Held, HeldError, state_of

pytestmark = pytest.mark.anyone

# One thread's stack is more than the address space has left, and an interpreter's is not.
_LEFT, _STACK = 256 << 20, 512 << 20


@pytest.fixture(name="line")
def fixture_line() -> Iterator[Line]:
    line = Line("plain")
    line.flush()
    yield line
    line.close()


def without_threads(asked: str) -> subprocess.CompletedProcess[str]:
    """Run this file's function of that name where no thread can be started."""
    command = [sys.executable, "-c", f"from {__name__} import {asked}; {asked}()"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def take_threads_away() -> None:
    status = Path("/proc/self/status").read_text()
    size = int(status.partition("VmSize:")[2].split()[0]) << 10
    threading.stack_size(_STACK)
    resource.setrlimit(resource.RLIMIT_AS, (size + _LEFT, size + _LEFT))


def begin() -> None:
    take_threads_away()
    try:
        Line("plain")
    except NetworkPolicyError as exc:
        print(exc, exc.hint, sep="\n")
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("no child is left")


def test_a_thread_that_cannot_start_is_told_and_leaves_no_process() -> None:
    found = without_threads("begin").stdout.splitlines()
    assert found[0].startswith("no thread could be started for the process that enforces")
    assert ["raise `ulimit -u` or `ulimit -v`", "no child is left"] == found[1:]


def test_a_daemon_that_cannot_start_threads_says_so_and_ends(tmp_path: Path) -> None:
    code = f"from {__name__} import take_threads_away; take_threads_away(); "
    code += "from ringfence.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "serve", "--state-dir", str(tmp_path / "state")]
    env = {**os.environ, "PYTHONMALLOC": "malloc"}  # what it would start itself again with
    ended = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert 125 == ended.returncode, ended.stderr
    assert "no thread can be started in this process (raise `ulimit -u`" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_thread_that_dies_ends_all_waiting(line: Line) -> None:
    """What kills it here comes from outside, as a lack of memory would."""
    [listener] = [
        ident
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident() and _is_listening_to(line, frame)
    ]
    line.flush()  # the control: it is answered
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(listener), ctypes.py_object(MemoryError)
    )
    os.kill(line.pid, signal.SIGKILL)  # it looks up from its socket

    with pytest.raises(NetworkPolicyError, match="the thread that listens to it failed: Memory"):
        line.flush()
    with pytest.raises(NetworkPolicyError, match="does not stay up"):
        line.make_authority(["a.test"])
    with pytest.raises(ChildProcessError):
        os.waitpid(line.pid, os.WNOHANG)


def _is_listening_to(line: Line, frame: object) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_listen" and frame.f_locals["self"] is line:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back  # type: ignore[attr-defined]
    return False


def a_body(sandbox_id: str, **policy: object) -> dict[str, Any]:
    form = {**NetworkPolicy.parse("a.test").to_json(), **policy}
    return {"id": sandbox_id, "policy": form, "secrets": {}, "network_bytes": None, "ca": None}


BAD = {"mode": "unrestricted", "allowed_hosts": ()}
"""A policy that no process serves: its second field says nothing then."""


def sockets() -> tuple[int, list[int]]:
    """A listener's port, and descriptors of it and of a resolver's socket."""
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    port: int = tcp.getsockname()[1]
    return port, [tcp.detach(), udp.detach()]


@pytest.mark.parametrize("is_move", [False, True])
def test_sockets_of_a_refused_sandbox_are_shut_down_unless_another_process_has_them(
    line: Line, is_move: bool
) -> None:
    """Who connects would wait for ever."""
    port, fds = sockets()
    elsewhere = [os.dup(fd) for fd in fds]
    try:
        line.serve(a_body("sbx-1", **BAD), fds, is_move=is_move)
        with pytest.raises(NetworkPolicyError, match="was not applied"):
            line.settle("sbx-1")
        if is_move:
            socket.create_connection(("127.0.0.1", port)).close()
        else:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
    finally:
        for fd in elsewhere:
            os.close(fd)
    line.drop("sbx-1")


def test_a_process_that_lived_long_enough_may_end_as_often_again(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends as soon as it has started is given up, and then its sandboxes reach nothing."""
    monkeypatch.setattr(line_module, "_FIRST_PAUSE_S", 0.0)
    port, fds = sockets()
    elsewhere = os.dup(fds[0])
    line.serve(a_body("sbx-1"), fds)
    line.settle("sbx-1")
    line._short_lives = line_module._MOST_SHORT_LIVES
    line._started_at -= line_module._SHORT_LIFE_S
    before = line.pid
    os.kill(before, signal.SIGKILL)
    while before == line.pid:
        line.flush()
    line.settle("sbx-1")
    assert 0 == line._short_lives
    socket.create_connection(("127.0.0.1", port)).close()

    line._short_lives = line_module._MOST_SHORT_LIVES
    os.kill(line.pid, signal.SIGKILL)
    assert line._ended.acquire(timeout=60), "the thread that listens ends"
    line._ended.release()
    with pytest.raises(NetworkPolicyError, match="does not stay up"):
        line.flush()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    os.close(elsewhere)
    assert not line._answers


def test_a_second_turn_that_fails_leaves_the_first(line: Line) -> None:
    """Its descriptors are kept for the next process, and given back in the end."""
    _, fds = sockets()
    line.serve(a_body("sbx-1"), fds)
    before = line.served("sbx-1")
    _, again = sockets()
    again += [os.dup(again[0]) for _ in range(300)]
    with pytest.raises(OSError, match="Invalid argument"):
        line.serve(a_body("sbx-1"), again)  # more than a message may have
    assert before is line.served("sbx-1") is not None
    for fd in again:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
    line.settle("sbx-1")
    line.drop("sbx-1")
    for fd in fds:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)


def test_what_is_asked_of_a_process_that_ends_is_answered_when_the_next_one_knows(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer before that would call in force what nobody enforces."""
    before, known = line.pid, list[int]()

    def pause(_: float) -> None:
        asking.join(0.2)
        assert [] == known

    def ask() -> None:
        line.flush()
        known.append(line.pid)

    monkeypatch.setattr(line_module, "sleep", pause)
    line._short_lives = 1
    os.kill(before, signal.SIGSTOP)
    asking = threading.Thread(target=ask)
    asking.start()
    while not line._answers:
        os.sched_yield()
    os.kill(before, signal.SIGKILL)
    asking.join()
    assert [line.pid] == known != [before]


def test_an_answer_is_waited_for_once_and_comes_whole(line: Line) -> None:
    """What goes on in a sandbox comes in several messages."""
    answer = _Answer()
    line._answers[77] = answer
    for number in range(2):
        line._hear_answer({"live": {"token": 77, "events": [{"port": number}]}})
        assert not answer.wait(0)
    line._hear_answer({"flushed": 78})
    assert not answer.wait(0), "that was another's"
    line._hear_answer({"flushed": 77})
    assert answer.wait(0)
    assert [{"port": 0}, {"port": 1}] == answer.value["live"]
    del line._answers[77]
    line.flush()
    assert {} == line._answers


def test_a_process_is_replaced_only_by_who_waited_for_it(line: Line) -> None:
    """Two callers that waited for one in vain would end its replacement as well."""
    before = line.pid
    line._replace(before + 1)
    line.flush()
    assert (before, "") == (line.pid, line.fault)
    line._replace(before)
    line.flush()
    assert before != line.pid
    assert "replaced" in line.fault


def test_a_process_that_is_stopped_is_known_as_such() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            assert not _is_stopped(child.pid)
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            assert _is_stopped(child.pid)
        finally:
            child.kill()
    assert not _is_stopped(child.pid), "there is none"


def test_what_is_not_told_one_by_one_is_added_up(line: Line) -> None:
    _, fds = sockets()
    line.serve(a_body("sbx-1"), fds)
    for missed in ({"sbx-1": 2, "sbx-gone": 5}, {"sbx-1": 3}):
        line._hear({"missed": missed})
    served = line.served("sbx-1")
    assert served is not None
    assert 5 == served.missed
    line.drop("sbx-1")


def test_one_that_was_closed_serves_nothing_and_keeps_no_socket() -> None:
    line = Line("plain")
    port, fds = sockets()
    line.serve(a_body("sbx-1"), fds)
    line.settle("sbx-1")
    socket.create_connection(("127.0.0.1", port)).close()
    line.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    other, fds = sockets()
    with pytest.raises(NetworkPolicyError, match="was closed"):
        line.serve(a_body("sbx-2"), fds)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", other))
    for ask in (line.flush, lambda: line.relay({"id": "sbx-1", "port": 1}, [])):
        with pytest.raises(NetworkPolicyError, match="was closed"):
            ask()
    with pytest.raises(NetworkPolicyError, match="was closed"):
        line.make_authority(["a.test"])


BODY: dict[str, Any] = {"id": "sbx-1", "port": 1}
EVENT = NetworkEvent(
    time=1.0, sandbox_id="sbx-1", kind="tcp", host="a.test", port=443, allowed=True
)


@pytest.mark.parametrize(
    "call",
    [
        lambda line: line.serve(BODY, []),
        lambda line: line.change(BODY),
        lambda line: line.settle("sbx-1"),
        lambda line: line.drop("sbx-1"),
        lambda line: line.relay(BODY, []),
        lambda line: line.served("sbx-1"),
        lambda line: line.make_authority([]),
        lambda line: line.close(),
    ],
    ids=["serve", "change", "settle", "drop", "relay", "served", "authority", "close"],
)
def test_callers_take_their_turn(
    line: Line, call: Callable[[Line], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that send at once would mix their messages with what is remembered of them."""
    with monkeypatch.context() as patch:
        patch.setattr(line, "_lock", Held(line._lock))
        before = state_of(line, "_lock")
        with pytest.raises(HeldError):
            call(line)
        assert before == state_of(line, "_lock")
    line.flush()


@pytest.mark.parametrize("verb", ["add", "inherit"])
def test_the_record_of_a_sandbox_is_written_by_one_at_a_time(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, before = Served(BODY, []), Served(BODY, [])
    before.add(EVENT)
    what: Any = EVENT if "add" == verb else before
    with monkeypatch.context() as patch:
        patch.setattr(served, "_lock", Held(served._lock))
        was = state_of(served, "_lock")
        with pytest.raises(HeldError):
            getattr(served, verb)(what)
        assert was == state_of(served, "_lock")
    getattr(served, verb)(what)
    assert [EVENT] == served.events()
    assert 1 == served.allowed


@pytest.mark.parametrize("verb", ["serve", "drop", "relay", "close", "expect"])
def test_which_process_has_a_sandbox_is_looked_up_by_one_at_a_time(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    egress = Egress()
    policy = NetworkPolicy(rules=(NetworkRule("a.test", methods=("GET",)),))
    calls: dict[str, Callable[[], object]] = {
        "serve": lambda: egress.serve("sbx-1", policy, {}, None, []),
        "drop": lambda: egress.drop("sbx-1"),
        "relay": lambda: egress.relay("sbx-1", 1, -1, -1),
        "close": egress.close,
        "expect": lambda: egress.expect(policy),
    }
    with monkeypatch.context() as patch:
        patch.setattr(egress, "_lock", Held(egress._lock))
        before = state_of(egress, "_lock")
        with pytest.raises(HeldError):
            calls[verb]()
        assert before == state_of(egress, "_lock")
    egress.close()
