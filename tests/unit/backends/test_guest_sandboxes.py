"""A sandbox with an agent inside as the host has it: execs, connections, network, pauses and its end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native.outside import same_descriptors

from ringfence.backends.local import sandbox as local
from ringfence.backends.local.agents.guest import GuestSandbox
from ringfence.backends.local.answers import SEND_S
from ringfence.backends.local.sandbox import InCgroup
from ringfence.errors import (
    ConnectError,
    ExecError,
    InvalidRequest,
    IoError,
    IsolationError,
    LifecycleError,
    NetworkPolicyError,
    ResourceExhausted,
    SandboxLost,
    Unsupported,
)
from ringfence.launcher import wire
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.limits import Limits
from ringfence.model.net.network import NetworkPolicy, NetworkRule
from ringfence.model.session import ResolvedMount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.model.stats import SandboxStats

pytestmark = pytest.mark.anyone
POLICY = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))
Handler = Callable[[list[Any], wire.Socket, list[int]], bytes | None]


class Agent(threading.Thread):
    """Answers at the other end of a sandbox's control socket; what is not handled is done.

    Attributes:
        asked: Each request without its descriptors.
    """

    def __init__(self, sock: wire.Socket) -> None:
        super().__init__(daemon=True)
        self.sock = sock
        self.asked: list[tuple[Any, ...]] = []
        self.handlers: dict[str, Handler] = {}

    def run(self) -> None:
        while True:
            message, fds = wire.receive(self.sock)
            if message is None:
                break
            verb, *args = message
            self.asked.append(message)
            reply = wire.adopt(fds[0])
            handler = self.handlers.get(verb)
            said = handler(args, reply, fds[1:]) if handler is not None else b"O"
            if said is not None:
                wire.answer(reply, said)
            reply.close()
            for fd in fds[1:]:
                os.close(fd)
        self.sock.close()


class Group:
    """Cgroups whose limit is noted when it is lifted and set again."""

    can_freeze, kills = True, 0

    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes

    def unthrottle(self, on: bool) -> None:
        self.notes.append(("unthrottle", on))
        raise OSError(errno.ENOENT, "the cgroup is gone")

    def thaw(self) -> None:
        self.notes.append("thaw")
        raise OSError(errno.ENOENT, "the cgroup is gone")

    def oom_kills(self) -> int:
        return self.kills


class One(InCgroup, GuestSandbox):
    """One that stands still when it is told to, and notes it."""

    broken = ""

    def _read_stats(self, state: State) -> SandboxStats:
        return SandboxStats(state, memory_bytes=7, execs=self._execs)

    def _freeze(self, frozen: bool) -> None:
        self.notes.append(("freeze", frozen))
        if self.broken == "freeze":
            raise ExecError("busy")

    def _keep_paused(self, paused: bool) -> None:
        self.notes.append(("paused", paused))

    def _let_go(self) -> None:
        self.notes.append("let go")

    notes: list[Any]


class Network:
    """A network that takes or refuses what it is told."""

    broken = ""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def environment(self) -> dict[str, str]:
        return {"NET": str(len(self.done))}

    def _do(self, *what: Any) -> None:
        self.done.append(what)
        if self.broken == what[0]:
            raise NetworkPolicyError("refused")

    def serve(self) -> None:
        self._do("serve")

    def check(self, policy: NetworkPolicy) -> None:
        self._do("check", policy)

    def change(self, policy: NetworkPolicy) -> None:
        self._do("change", policy)

    def events(self) -> list[Any]:
        return ["an event"]

    def close(self) -> None:
        self._do("close")


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """One with an agent, whose first process is a real one."""
    made: list[Any] = []

    def create(mounts: tuple[ResolvedMount, ...] = (), last: int = 0, **spec: Any) -> Any:
        far, control = wire.socketpair()
        process = subprocess.Popen(["sleep", "1000"])
        backend: Any = SimpleNamespace(name="gvisor")
        pidfd = os.pidfd_open(process.pid)
        one: Any = One(
            backend, SandboxSpec(**spec), "guest-1", 1000, list(mounts), control, pidfd, last
        )
        one.notes, one.process, one.agent = [], process, Agent(far)
        one.group = Group(one.notes)
        one.agent.start()
        made.append(one)
        return one

    with same_descriptors():
        yield create
        for one in made:
            one.broken, one.network = "", None
            one.terminate()
            one.process.wait()
            one.agent.join()


@pytest.fixture
def one(make: Callable[..., Any]) -> Any:
    return make()


def refuse(number: int) -> Handler:
    said = b"E%d [Errno %d] no such thing" % (number, number)
    return lambda *_: said


class TestExecs:
    def test_the_agent_is_told_all_of_it(self, make: Any) -> None:
        one = make(last=5, env={"A": "spec", "B": "spec"}, limits=Limits(wall_time_s=9))
        modes: list[int] = []

        def handler(_args: Any, reply: wire.Socket, fds: list[int]) -> None:
            modes.extend(stat.S_IMODE(os.fstat(fd).st_mode) for fd in fds)
            wire.send_raw(reply, wire.ExecReport(wait_status=3 << 8).pack())

        one.agent.handlers["exec"] = handler
        plain = ExecRequest(("true", "x"), cwd="sub", env={"B": "own"}, session_leader=False)
        for at, request in enumerate((plain, ExecRequest(("true",), timeout_s=2.0, user="1000"))):
            run = one.start(request)
            assert (f"exec-{6 + at}", 6 + at) == (run.id, run.number)
            assert [run.number] == list(one._live)
            run._wait_done()
            assert 3 == run.status().exit_code
            assert {} == one._live
            run.close()
        (verb, number, argv, env, cwd, *rest), (*_, timeout, _pty, leads, _uid, _relayed) = (
            one.agent.asked
        )
        assert ("exec", 6, ["true", "x"], "/home/sandbox/sub") == (verb, number, argv, cwd)
        assert ("spec", "own") == (env["A"], env["B"])
        assert [9, None, False, 1000, False] == rest
        assert (2.0, True) == (timeout, leads)
        assert {0o666} == set(modes), "a guest may open them anew"
        assert 2 == one.stats().execs, "without those of before"

    def test_a_terminal_is_one_descriptor_on_the_host(self, one: Any) -> None:
        def handler(_args: Any, reply: wire.Socket, fds: list[int]) -> None:
            assert 1 == len(fds)
            os.write(fds[0], b"prompt")
            wire.send_raw(reply, wire.ExecReport().pack())

        one.agent.handlers["exec"] = handler
        run = one.start(ExecRequest(("sh",), pty=(24, 80)))
        run._wait_done()
        assert run.stdin == run.stdout
        assert run.stderr is None
        assert b"prompt" == os.read(run.stdout, 10)
        assert "xterm-256color" == one.agent.asked[0][3]["TERM"]
        run.resize(30, 90)
        assert ("resize", 1, 30, 90) == one.agent.asked[1]
        run.close()
        run = one.start(ExecRequest(("sh",), pty=(24, 80), env={"TERM": "dumb"}))
        run._wait_done()
        assert "dumb" == one.agent.asked[2][3]["TERM"]
        run.close()

    def test_a_user_that_it_cannot_be_is_refused_before_anything_is_sent(self, one: Any) -> None:
        with pytest.raises(Unsupported, match="65534 is not mapped") as refused:
            one.start(ExecRequest(("true",), user="nobody"))
        assert "user" == refused.value.field
        assert ([], {}, 0) == (one.agent.asked, one._live, one._numbers)

    def test_one_that_cannot_be_sent_leaves_nothing(self, one: Any) -> None:
        one.control.shutdown(socket.SHUT_WR)
        one.agent.join()
        with same_descriptors(), pytest.raises(SandboxLost):
            one.start(ExecRequest(("true",), stream_stdin=True))
        assert {} == one._live

    def test_none_starts_while_it_stands_still_or_has_ended(self, one: Any) -> None:
        one.suspend()
        with pytest.raises(LifecycleError, match="resume it first"):
            one.start(ExecRequest(("true",)))
        one.terminate()
        with pytest.raises(LifecycleError, match="exec: the sandbox is terminated"):
            one.start(ExecRequest(("true",)))
        assert [] == one.agent.asked

    def test_too_many_descriptors_are_told_as_such(
        self, one: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ETOOMANYREFS, "too many references")

        monkeypatch.setattr(wire, "send", full)
        with same_descriptors(), pytest.raises(ResourceExhausted, match="in flight"):
            one.ask("ping")

    def test_an_agent_that_does_not_read_is_waited_for_no_longer_than_its_time(
        self, one: Any
    ) -> None:
        limit = one.control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
        assert (int(SEND_S), 0) == struct.unpack("=qq", limit)
        goes_on = threading.Event()
        one.agent.handlers["wait"] = lambda *_: b"O" if goes_on.wait(30) else None
        waiting = one.request("wait", ())
        one.control.setblocking(False)

        def ask_on() -> None:
            while True:
                one.request("ping", ()).close()

        with pytest.raises(IsolationError, match="took no request"):
            ask_on()
        goes_on.set()
        assert b"O" == waiting.recv(10)
        waiting.close()

    def test_a_directory_that_is_not_there_may_be_hidden_by_a_mount(self, make: Any) -> None:
        one = make(
            (ResolvedMount("/home", "read_write"), ResolvedMount("/home/sandbox/in", "read_only"))
        )
        error = one.no_directory("/home/sandbox/in/x", "not there")
        assert ("cwd", True) == (error.field, "/home/sandbox/in hides" in error.hint)
        assert "mounts.target" == one.no_directory(one.root, "not there").field, "nobody named it"
        assert "make_dir" in one.no_directory("/elsewhere", "not there").hint
        named = make((ResolvedMount("/home", "read_write"),), workdir="/home/named")
        assert "cwd" == named.no_directory("/home/named", "not there").field


class TestConnections:
    @pytest.mark.parametrize("version", [4, 6])
    def test_both_loopbacks_are_tried(self, one: Any, version: int) -> None:
        def dial(args: list[Any], _reply: Any, fds: list[int]) -> bytes:
            if version != args[0]:
                return b"E111 refused"
            os.write(fds[0], b"hello")
            return b"O"

        one.agent.handlers["dial"] = dial
        with one.connect(65535) as near:
            assert b"hello" == near.recv(10)
            assert b"" == near.recv(10), "the agent alone has the other end"
        expected = [("dial", 4, 65535), ("dial", 6, 65535)]
        assert expected[: 1 if 4 == version else 2] == one.agent.asked

    def test_where_nobody_listens_it_is_refused(self, one: Any) -> None:
        one.agent.handlers["dial"] = refuse(errno.ECONNREFUSED)
        with same_descriptors(), pytest.raises(ConnectError, match="port 80") as refused:
            one.connect(80)
        assert "port" == refused.value.field
        for port in (0, 65536):
            with pytest.raises(InvalidRequest):
                one.connect(port)
        one.agent.handlers["dial"] = lambda *_: None
        with same_descriptors(), pytest.raises(SandboxLost):
            one.connect(80)
        assert 3 == len(one.agent.asked)
        one.suspend()
        with pytest.raises(LifecycleError):
            one.connect(80)
        assert 3 == len(one.agent.asked)

    def test_a_client_is_passed_on_or_sees_that_it_was_refused(self, one: Any) -> None:
        passed: list[Any] = []

        def relay(name: str, port: int, client: int, inside: int) -> None:
            passed.append(
                (name, port, os.fstat(client).st_ino, stat.S_ISSOCK(os.fstat(inside).st_mode))
            )

        one.backend.egress = lambda: SimpleNamespace(relay=relay)
        with socket.create_server(("127.0.0.1", 0)) as server:
            for handler in (lambda *_: b"O", refuse(errno.ECONNREFUSED)):
                one.agent.handlers["dial"] = handler
                with socket.create_connection(server.getsockname()) as peer:
                    client, _ = server.accept()
                    inode = os.fstat(client.fileno()).st_ino
                    if 1 == len(one.agent.asked):
                        with pytest.raises(ConnectError):
                            one.forward(80, client)
                        with pytest.raises(ConnectionResetError):
                            peer.recv(1)
                    else:
                        one.forward(80, client)
                        assert b"" == peer.recv(1)
                    assert -1 == client.fileno()
                    assert [("guest-1", 80, True)] == [(*row[:2], row[3]) for row in passed]
                    assert passed[0][2] == inode or 1 < len(one.agent.asked)


class TestNetwork:
    def test_without_one_it_gets_none(self, one: Any) -> None:
        with pytest.raises(NetworkPolicyError, match="gets none later") as refused:
            one.apply_network_policy(POLICY)
        assert "network" == refused.value.field
        assert [] == one.network_log()

    def test_a_policy_holds_when_it_is_in_force(self, one: Any) -> None:
        network = one.network = Network()
        for broken in ("check", "change"):
            network.broken = broken
            with pytest.raises(NetworkPolicyError):
                one.apply_network_policy(POLICY)
            assert one.spec.network.is_none
        assert ["check", "check", "change"] == [each[0] for each in network.done]
        network.broken = ""
        one.apply_network_policy(POLICY)
        assert (POLICY, "5") == (one.spec.network, one._environment["NET"])
        one.apply_network_policy(POLICY)
        assert ("check", POLICY) == network.done[-1], "nothing is changed to what it is"
        assert ["an event"] == one.network_log()
        one.terminate()
        with pytest.raises(LifecycleError):
            one.apply_network_policy(NetworkPolicy())

    def test_its_variables_are_those_of_its_network_and_owner(self, one: Any) -> None:
        one.join_network(Network())
        assert "0" == one._environment["NET"]
        one._created = 0.0
        one.begin(SandboxSpec(env={"MINE": "1"}))
        assert ("1", "1") == (one._environment["NET"], one._environment["MINE"])
        assert one._created > 0.0
        assert {"MINE": "1"} == dict(one.spec.env)

    def test_one_whose_network_is_not_served_has_ended(self, one: Any) -> None:
        network = Network()
        network.broken = "serve"
        with pytest.raises(NetworkPolicyError):
            one.complete(lambda: one.join_network(network), lambda: network.done.append(("next",)))
        assert State.TERMINATED is one._state
        assert ("close",) == network.done[-1]


class TestStandingStill:
    def test_it_is_written_down_before_and_erased_after(self, one: Any) -> None:
        one.suspend()
        one.suspend()
        assert [("paused", True), ("freeze", True)] == one.notes
        one.notes.clear()
        one.resume()
        one.resume()
        assert [("freeze", False), ("paused", False)] == one.notes
        one.broken = "freeze"
        with pytest.raises(ExecError):
            one.suspend()
        assert State.PROVISIONED is not one.state
        assert not one.paused

    def test_where_nothing_can_stand_still_both_ways_say_so(self, one: Any) -> None:
        one.can_suspend = False
        one.resume()
        assert [("freeze", False)] == one.notes, "says so"
        with pytest.raises(Unsupported):
            GuestSandbox._freeze(one, False)

    def test_it_is_awake_for_a_moment_only(self, one: Any) -> None:
        with one.awake():
            assert [] == one.notes
        one.suspend()
        one.notes.clear()
        with one.awake():
            assert [("freeze", False)] == one.notes
        assert ("freeze", True) == one.notes[-1]
        one.notes.clear()
        with one.awake():
            one._state = State.RUNNING
        assert [("freeze", False)] == one.notes, "it goes on"
        assert one._lock.acquire(blocking=False)
        one._lock.release()

    def test_one_whose_agent_answers_anyhow_is_not_woken(
        self, one: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one.suspend()
        one.notes.clear()
        monkeypatch.setattr(One, "answers_frozen", True)
        with one.awake():
            pass
        assert [] == one.notes

    def test_after_its_end_it_neither_stops_nor_goes_on(self, one: Any) -> None:
        one.terminate()
        one.notes.clear()
        for verb in ("suspend", "resume"):
            with pytest.raises(LifecycleError, match=f"{verb}: the sandbox is terminated"):
                getattr(one, verb)()
        with pytest.raises(LifecycleError, match="mount: "):
            one.attach(None)
        assert [] == one.notes


class TestClearing:
    def test_it_is_asked_until_nothing_is_left_at_full_speed(self, one: Any) -> None:
        left = iter((b"O2", b"O1", b"O0"))
        one.agent.handlers["end_all"] = lambda *_: next(left)
        one.end_processes()
        assert [("end_all",)] * 3 == one.agent.asked
        assert [("unthrottle", True), ("unthrottle", False)] == one.notes

    def test_what_stays_is_told_in_time(self, one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "_CLEARING_S", 0.0)
        one.agent.handlers["end_all"] = lambda *_: b"O3"
        with pytest.raises(ExecError, match="3 processes") as refused:
            one.end_processes()
        assert refused.value.retryable
        assert ("unthrottle", False) == one.notes[-1]

    def test_the_limit_is_lifted_once_for_all_that_is_killed(self, one: Any) -> None:
        for on in (True, True, False, True, False, False):
            one.unthrottle(on)
        assert [("unthrottle", True), ("unthrottle", False)] == one.notes


class TestEnds:
    def test_all_is_given_back_whatever_fails(self, one: Any) -> None:
        network = one.network = Network()
        network.broken = "close"
        with pytest.raises(NetworkPolicyError):
            one.terminate()
        assert ["let go"] == one.notes[-1:]
        assert (-1, -1) == (one.pidfd, one.control.fileno())
        assert -signal.SIGKILL == one.process.wait()
        last = one.stats()
        assert (State.TERMINATED, 7) == (last.state, last.memory_bytes), "its last counts"
        one.terminate()
        assert 1 == len(network.done)

    def test_one_that_stood_still_is_thawed_once_it_is_killed(self, one: Any) -> None:
        one.suspend()
        one.notes.clear()
        one.terminate()
        assert [("unthrottle", True), "thaw", "let go"] == one.notes

    def test_the_cause_of_an_end_is_told(self, make: Any) -> None:
        asked, ended, filled, died = make(), make(), make(), make()
        asked.terminate()
        assert asked.ended_on_request
        assert "terminated during the operation" in str(asked.lost_error())
        assert "the sandbox is terminated" == asked.terminated_error().message
        ended.end_because("its files are too many")
        assert not ended.ended_on_request
        assert "was ended: its files are too many" in str(ended.lost_error())
        assert "it was ended: its files are too many" in str(ended.terminated_error("exec"))
        for each, kills, why in ((filled, 1, "ran out of the memory"), (died, 0, "unexpectedly")):
            each.group.kills = kills
            each.process.kill()
            local._has_ended(each.pidfd, 5000)
            assert State.TERMINATED is each.state
            assert not each.ended_on_request
            assert why in str(each.lost_error())
            assert SandboxStats(State.TERMINATED) == each.stats(), "nothing could be read any more"
            with pytest.raises(SandboxLost):
                each.borrow_pidfd()

    def test_one_that_cannot_be_killed_keeps_what_it_has(
        self, one: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local, "_DYING_MS", 0)
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        with pytest.raises(ExecError, match="cannot be killed"):
            one.terminate()
        assert "let go" not in one.notes
        assert one.pidfd >= 0
        one._state = State.RUNNING
        one.end_unwatched()
        assert State.TERMINATED is one._state
        monkeypatch.undo()
        one._state = State.RUNNING

    def test_an_agent_that_ends_meanwhile_is_not_blamed_on_the_wire(self, one: Any) -> None:
        one.agent.handlers["usage"] = lambda *_: None
        one.ended_because = "it was over its size"
        with same_descriptors(), pytest.raises(SandboxLost, match="over its size"):
            one.ask("usage")

    def test_a_snapshot_that_is_not_unpacked_ends_it(self, one: Any) -> None:
        with open("/dev/null", "rb") as content:
            one.unpack((1, 2), content.fileno())
            assert [("load", 1, 2)] == one.agent.asked
            one.agent.handlers["load"] = refuse(errno.ENOSPC)
            with pytest.raises(IoError, match="was not unpacked: no such thing"):
                one.complete(lambda: one.unpack((1, 2), content.fileno()))
        assert State.TERMINATED is one._state
