"""Sandboxes with a kernel of their own that are forked on a server, with all that runs in them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from ringfence.attack import inside, runner
from ringfence.attack.canaries import Canaries
from ringfence.attack.probes.kit import COPIED
from ringfence.attack.result import HELD
from ringfence.attack.scope import why_not
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.gvisor.sandbox import GvisorSandbox
from ringfence.backends.microvm.kernel import VARIABLE
from ringfence.client import Client
from ringfence.errors import IoError, QuotaExceeded, RingfenceError, Unsupported
from ringfence.execs.execs import Execs
from ringfence.execs.live_forks import LiveForks as LiveExecs
from ringfence.model.calls import make_request
from ringfence.model.spec import STRONG, SandboxSpec
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.testing.conformance.live_forks import LiveForks
from tests.api.conftest import Daemon, start
from tests.features import guest_kernel, require
from tests.machines import cache_dir, require_machines

pytestmark = [pytest.mark.root, pytest.mark.full]
_COUNTER = "n=0; while read -r line; do n=$((n+1)); echo $line $n; done; echo end"
_NUMBERS = "n=0; while :; do n=$((n+1)); echo $n; done"


def _start(place: Path, backend: str = "gvisor") -> Daemon:
    config = {"backends": [backend], "manager": {"pool": {"enabled": False}}}
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return start(place / "s", "--config", str(place / "config.json"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    require("user namespaces")
    require("runsc")
    made = _start(tmp_path_factory.mktemp("d"))
    yield made
    made.stop()


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[Any]:
    with Client(f"unix:{daemon.socket}") as client, client.create(tier="strong") as made:
        yield made


class TestConformance(LiveForks):
    """The part that backends pass in the library, over a server."""

    patience_s: ClassVar[float] = 120.0

    def make_backend(self) -> GvisorBackend:
        return GvisorBackend()

    def make_spec(self, **changes: Any) -> SandboxSpec:
        return SandboxSpec(**{"tier": STRONG, **changes})

    @pytest.fixture
    def origin(self, daemon: Daemon) -> Iterator[Any]:
        with Client(f"unix:{daemon.socket}") as client, client.create(tier="strong") as made:
            yield made

    @pytest.fixture
    def limits(self) -> dict[str, Any]:
        return {"network_bytes": 1 << 20, "cpus": 0.5}

    def is_whole(self, origin: Any) -> bool:
        return True

    def copy_of(self, fork: Any, process: Any) -> Any:
        (own,) = fork.fork_report.processes
        assert process.id != own
        return fork.process(own)

    def test_it_goes_back_to_a_mark(self, origin: Any) -> None:
        with pytest.raises(Unsupported):
            origin.mark()


def test_the_probes_find_in_a_copy_what_they_find_in_a_new_sandbox(sandbox: Any) -> None:
    known = {id: probe for id, probe in inside.registered().items() if not why_not(id, "gvisor")}
    chosen = [id for id, probe in known.items() if runner._belongs(probe, COPIED)]
    with Canaries() as canaries:
        context = dict(canaries.context)
        copied = inside.run_in_copy(sandbox, chosen, context, lambda _fork, found: found)
        plain = inside.run_inside(sandbox, chosen, context)
    differing = {id: (plain[id], copied[id]) for id in chosen if plain[id][0] != copied[id][0]}
    assert {} == differing
    assert 80 <= sum(HELD == status for status, _ in copied.values())


def _counter(sandbox: Any) -> Any:
    counter = sandbox.start(["sh", "-c", _COUNTER], stream_stdin=True)
    assert b"a 1\n" == _next(counter, b"a\n")
    return counter


def _next(process: Any, line: bytes) -> Any:
    process.stdin.write(line)
    return next(iter(process.stdout))


def test_all_that_runs_goes_on(sandbox: Any) -> None:
    sandbox.run_code("import random; random.seed(7); values = [1, 2]; numbers = iter('abc')")
    sandbox.run_code("next(numbers)")
    counter = _counter(sandbox)
    sandbox.shell("sleep 1000 >/dev/null 2>&1 </dev/null &")
    with ExitStack() as stack:
        forks = [stack.enter_context(each) for each in sandbox.fork(2, processes="required")]
        drawn = {sandbox.run_code("random.random()").text}
        for number, fork in enumerate(forks):
            report = fork.fork_report
            assert (True, "", (), 1, 1) == (
                report.has_processes,
                report.reason,
                report.left_out,
                len(report.contexts),
                len(report.processes),
            )
            assert (sandbox.id,) == fork.lineage()
            (context,) = report.contexts
            kept = fork.context(id=context)
            assert str([1, 2, number]) == kept.run(f"values.append({number}); values").text
            assert "'b'" == kept.run("next(numbers)").text
            drawn.add(kept.run("random.random()").text)
            assert b"b 2\n" == _next(fork.process(*report.processes), b"b\n")
            assert "1" == fork.shell("pgrep -c sleep || true").stdout_text.strip()
        assert 3 == len(drawn)
        assert "[1, 2]" == sandbox.run_code("values").text
        assert b"c 2\n" == _next(counter, b"c\n"), "of the source, under the id that it had"
        (again,) = forks[1].fork(processes="required")
        stack.enter_context(again)
        assert b"d 3\n" == _next(again.process(*again.fork_report.processes), b"d\n")
    (files,) = sandbox.fork(processes="none")
    with files:
        assert (False, "") == (files.fork_report.has_processes, files.fork_report.reason)
    counter.stdin.close()
    assert counter.wait(30).stdout.endswith(b"end\n")


def test_a_machine_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_machines()
    monkeypatch.setenv(VARIABLE, guest_kernel() or "")
    monkeypatch.setenv("XDG_CACHE_HOME", cache_dir())
    daemon = _start(tmp_path, "microvm")
    try:
        with (
            Client(f"unix:{daemon.socket}") as client,
            client.create(tier="strong", backend="microvm") as made,
        ):
            source: Any = made
            counter = _counter(source)
            (fork,) = source.fork(processes="required", labels={"is": "copy"}, network=["a.test"])
            with fork:
                assert b"b 2\n" == _next(fork.process(*fork.fork_report.processes), b"b\n")
                view = client.get(fork.id)
                hosts = view.spec.network.allowed_hosts
                assert (("a.test",), "copy") == (hosts, view.spec.labels["is"])
            assert b"c 2\n" == _next(counter, b"c\n")
            assert source.id == client.get(source.id).id
    finally:
        daemon.stop()


class Faulty(GvisorBackend):
    """gVisor on a host where some restores fail."""

    faults = 0

    def restore(self, *args: Any, **options: Any) -> GvisorSandbox:
        if self.faults:
            self.faults -= 1
            raise IoError("this restore failed")
        return super().restore(*args, **options)


def test_a_fork_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The source goes on if one of two attempts to restore it succeeds, and has ended if none does."""
    require("user namespaces")
    require("runsc")
    with closing(Faulty(state_dir=str(tmp_path))) as backend:
        config = ManagerConfig(pool=PoolConfig(enabled=False))
        with (
            SessionManager(config, backends=(backend,)) as manager,
            closing(Execs(manager)) as execs,
        ):
            source = manager.acquire(SandboxSpec(tier=STRONG), client_id="ann")
            live = manager.index.find(source.id)
            assert live is not None
            run = execs.start(live, make_request(["sleep", "1000"], stream_stdin=True))

            def fork(**options: Any) -> list[Any]:
                carry = LiveExecs(execs, live.sandbox_id, "", lambda: None)
                return manager.fork(source.id, processes="required", carry=carry, **options)

            backend.faults = 1
            (made,) = fork()
            assert (1, 2) == (len(execs.running_of(made.session.sandbox_id)), len(manager.list()))
            with pytest.raises(QuotaExceeded):
                fork(most=2)
            made.release()
            assert run.running
            assert source.sandbox.exec(["true"]).ok
            assert ([source.id], []) == (
                [each.session_id for each in manager.list()],
                manager.snapshots(),
            )
            backend.faults = 2
            with pytest.raises(IoError):
                fork()
            assert ("terminated", "fork") == (source.session.state, source.session.reason)
            run.done.result(60)
            assert ([], [], []) == (manager.list(), manager.snapshots(), backend.snapshots())


def test_no_byte_of_output_is_lost(sandbox: Any) -> None:
    """Neither in the spool of the source nor between that and a fork's, which begins in the middle."""
    writer = sandbox.start(["sh", "-c", _NUMBERS])
    forks = [fork for _ in range(2) for fork in sandbox.fork(processes="required")]
    try:
        writer.kill()
        lines = [int(each) for each in writer.wait(60).stdout.splitlines()[:-1]]
        assert lines == list(range(lines[0], lines[0] + len(lines)))
        for fork in forks:
            copy = fork.process(*fork.fork_report.processes)
            copy.kill()
            lines = [int(each) for each in copy.wait(60).stdout.splitlines()[1:-1]]
            assert lines == list(range(lines[0], lines[0] + len(lines)))
    finally:
        for fork in forks:
            fork.terminate()


def test_what_cannot_go_along_is_named_and_all_goes_on(sandbox: Any) -> None:
    counter = _counter(sandbox)
    terminal = sandbox.start(["sleep", "1000"], pty=(24, 80))
    with pytest.raises(Unsupported, match=f"{terminal.id}.*terminal|terminal.*{terminal.id}"):
        sandbox.fork(processes="required")
    (fork,) = sandbox.fork()
    with fork:
        assert not fork.fork_report.has_processes
        assert terminal.id in fork.fork_report.reason
    assert b"b 2\n" == _next(counter, b"b\n")
    terminal.kill()
    terminal.wait()
    waiting = threading.Thread(target=sandbox.exec, args=(["sh", "-c", "read -r x <fifo"],))
    sandbox.shell("mkfifo fifo")
    waiting.start()
    try:
        while "read" not in sandbox.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout_text:
            pass
        with pytest.raises(Unsupported, match="waits for its end"):
            sandbox.fork(processes="required")
    finally:
        sandbox.shell("echo >fifo")
        waiting.join()
    assert b"c 3\n" == _next(counter, b"c\n")


def test_calls_meanwhile_wait_or_are_told_to_come_again(sandbox: Any) -> None:
    _counter(sandbox)
    problems: list[RingfenceError] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                assert sandbox.exec(["true"]).ok
            except RingfenceError as exc:
                problems.append(exc)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        made = [fork for _ in range(3) for fork in sandbox.fork()]
    finally:
        is_over.set()
        asking.join()
    for fork in made:
        fork.terminate()
    assert [] == [each for each in problems if "saved with its memory" not in str(each)]
    assert sandbox.exec(["true"]).ok


def test_forks_at_once_are_made_in_turn(sandbox: Any) -> None:
    """The first one still makes its copies while the source is saved for the second."""
    counter = _counter(sandbox)
    with ThreadPoolExecutor(3) as pool:
        forking = [pool.submit(sandbox.fork, 2, processes="required") for _ in range(3)]
        forks = [fork for each in forking for fork in each.result()]
    try:
        for fork in forks:
            assert b"b 2\n" == _next(fork.process(*fork.fork_report.processes), b"b\n")
        assert b"b 2\n" == _next(counter, b"b\n")
    finally:
        for fork in forks:
            fork.terminate()


@pytest.mark.parametrize("moment", ["*/", "snap-*/memory.img"])
def test_a_killed_daemon_leaves_nothing(tmp_path: Path, moment: str) -> None:
    """While a sandbox is saved, and when it has been and is restored."""
    first = _start(tmp_path)
    try:
        with Client(f"unix:{first.socket}") as client:
            source = client.create(tier="strong")
            _counter(source)
            (fork,) = source.fork(processes="required")
            assert fork.exec(["true"]).ok
            forking = threading.Thread(target=_fork, args=(first, source.id))
            forking.start()
            snapshots = tmp_path / "s" / "snapshots"
            while not [*snapshots.glob(moment)]:
                pass
            os.kill(first.process.pid, signal.SIGKILL)
            forking.join()
    finally:
        first.stop()
    second = _start(tmp_path)
    try:
        with Client(f"unix:{second.socket}") as client:
            assert ([], []) == (client.list(), client.snapshots())
        assert [] == _directories(snapshots)
    finally:
        second.stop()


def _fork(daemon: Daemon, sandbox_id: str) -> None:
    with daemon.client() as http, suppress(httpx.HTTPError):  # the server is killed meanwhile
        http.post(f"/v1/sandboxes/{sandbox_id}/fork", json={"processes": "required"})


def _directories(place: Path) -> list[Path]:
    return [each for each in place.iterdir() if each.is_dir()]
