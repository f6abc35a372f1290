"""Probes that run on the host, over a stand-in for sandboxes: what each makes of what it sees."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.attack.lab import eventually, host_processes
from ringfence.attack.outside import (
    bombs,
    descriptors,
    host_side,
    neighbours,
    races,
    register,
    residue,
    timeouts,
)
from ringfence.errors import RingfenceError, SandboxLost, Unsupported

pytestmark = pytest.mark.anyone


class Box:
    """A sandbox of nothing."""

    def __init__(self, lab: Any, options: dict[str, Any]) -> None:
        self.lab, self.options = lab, options
        self._inner = SimpleNamespace(pid=0, first_host_id=lab.ids.pop(0) if lab.ids else 0)
        self.shown: list[Any] = []

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.lab.ended += 1

    def protections(self) -> list[Any]:
        found: list[Any] = self.lab.protections
        return found

    def exec(self, argv: Any, **how: Any) -> Any:
        return self.lab.answer(self, argv, how)

    def start(self, argv: Any, **how: Any) -> Any:
        return self.lab.process


class LabOfNothing:
    """Makes such sandboxes, and gives the answers of what runs in them in order."""

    def __init__(self, *answers: Any, protected: bool = True, backend: str = "native") -> None:
        self.answers, self.protected = [*answers], protected
        self.backend = SimpleNamespace(name=backend)
        self.looked: Any = None
        self.rootless = False
        self.ended, self.ids = 0, list[int]()
        self.made: list[Box] = []
        self.asked: list[Any] = []
        self.protections: list[Any] = []
        self.process: Any = SimpleNamespace(
            running=True, kill=lambda: None, wait=lambda _s=None: self.answer()
        )

    def sandbox(self, **options: Any) -> Box:
        self.made.append(Box(self, options))
        return self.made[-1]

    def answer(self, *asked: Any) -> Any:
        self.asked.append(asked)
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def said(text: str = "", **more: Any) -> Any:
    facts = {
        "stdout_text": text,
        "stderr_text": "",
        "timed_out": False,
        "oom_killed": False,
        "signal": 9,
    }
    return SimpleNamespace(**{**facts, **more})


@pytest.fixture(autouse=True)
def _inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(sandbox: Box, module: str, function: str, *words: str, **how: Any) -> Any:
        return sandbox.lab.answer(sandbox, (module, function, *words), how)

    for module in (bombs, neighbours, races, residue, timeouts):
        monkeypatch.setattr(module, "run", run)
        if hasattr(module, "start"):
            monkeypatch.setattr(module, "start", lambda sandbox, *_, **__: sandbox.lab.process)
        if hasattr(module, "first_line"):
            monkeypatch.setattr(module, "first_line", lambda process: process.line)


def outcome(id: str, lab: LabOfNothing) -> tuple[str, str]:
    result = register.PROBES[id].attack(lab)  # type: ignore[arg-type]
    return result.status, result.evidence


# -- bombs -----------------------------------------------------------------------------------------


def test_a_bomb_that_gets_all_it_wants_is_not_bounded() -> None:
    for text, status in (("199", "held"), ("200", "escaped"), ("201 x", "escaped"), ("", "held")):
        assert status == outcome("resources.fork-bomb", LabOfNothing(said(text)))[0]
    for protected, limit in ((True, 16 << 20), (False, 64 << 20)):
        lab = LabOfNothing(said("0"), protected=protected)
        outcome("resources.disk-filler", lab)
        assert {"disk_bytes": limit} == lab.made[0].options["limits"]
        assert 1 == lab.ended


def test_memory_that_was_taken_without_an_end_is_an_escape_unless_that_was_declared() -> None:
    probe = "resources.memory-private"
    lost = SandboxLost("more than the memory allowed was used")
    for answer, protected, status in (
        (said("1 2 3"), True, "held"), (said("1 2 done"), True, "escaped"), (lost, True, "held"),
        (lost, False, "inconclusive"), (SandboxLost("it is gone"), True, "inconclusive"),
        (said("1 done"), False, "escaped"),
    ):  # fmt: skip
        assert status == outcome(probe, LabOfNothing(answer, protected=protected))[0]
    weak = LabOfNothing(said("1 done"))
    weak.protections = [SimpleNamespace(name="memory_limit", status="degraded", why="no cgroup")]
    status, evidence = outcome(probe, weak)
    assert ("inconclusive", True) == (status, "no cgroup" in evidence)
    weak.protections[0].status, weak.answers = "enforced", [said("1 done")]
    assert "escaped" == outcome(probe, weak)[0]
    assert [64 << 20] * 2 == [each.options["limits"]["memory_bytes"] for each in weak.made]


# -- neighbours ------------------------------------------------------------------------------------


def test_a_neighbour_is_looked_at_once_and_what_is_found_has_escaped() -> None:
    lab = LabOfNothing(said("files\ntcp\nlooked\n"))
    lab.process.line = "planted /tmp/x"
    assert "escaped" == outcome("lifecycle.neighbour-files", lab)[0]
    assert "held" == outcome("ipc.neighbour-semaphores", lab)[0]
    assert "escaped" == outcome("network.neighbour-services", lab)[0]
    ((who, words, _how),) = lab.asked
    assert (lab.made[1], ("planted", "look", "/tmp/x"), 2) == (who, words, lab.ended)
    own = LabOfNothing(said("looked"), protected=False)
    own.process.line = "planted"
    outcome("lifecycle.neighbour-files", own)
    assert own.made[0] is own.asked[0][0], "the control looks into the same one"


@pytest.mark.parametrize(("line", "text"), [("", "looked"), ("planted", "files"), ("planted", "")])
def test_who_did_not_look_to_the_end_has_found_nothing(line: str, text: str) -> None:
    lab = LabOfNothing(said(text))
    lab.process.line = line
    assert ("inconclusive", "no answer") == outcome("lifecycle.neighbour-files", lab)


def test_ids_in_common_are_an_escape_but_for_a_user_who_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [{1, 2}, {3}, {1, 2}, {2}, {2}, {2}, {4}, {4}]
    monkeypatch.setattr(neighbours, "_outside_ids", lambda _pid: ids.pop(0))
    probe = "identity.neighbour-host-id"
    assert ("held", "1 and 3") == outcome(probe, LabOfNothing())
    assert ("escaped", "1 ids in common") == outcome(probe, LabOfNothing())
    for protected, status in ((True, "inconclusive"), (False, "escaped")):
        lab = LabOfNothing(protected=protected)
        lab.rootless = True
        assert status == outcome(probe, lab)[0]
    monkeypatch.undo()
    found = neighbours._outside_ids(os.getpid())
    first = int(Path("/proc/self/uid_map").read_text().split()[1])
    assert first in found


@pytest.mark.parametrize(
    ("text", "alive", "backend", "status"),
    [
        ("reached", True, "native", "escaped"), ("No such process", True, "native", "held"),
        ("No such process", False, "native", "escaped"), ("reached", True, "gvisor", "held"),
        ("reached", False, "gvisor", "escaped"),
    ],
)  # fmt: skip
def test_a_signal_that_reaches_a_neighbour_is_an_escape(
    text: str, alive: bool, backend: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "host_pid", lambda _sandbox, inside: inside + 1000)
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    lab = LabOfNothing(said(text), backend=backend)
    lab.process.line, lab.process.running = "7", alive
    assert status == outcome("ipc.neighbour-signal", lab)[0]
    ((who, words, _how),) = lab.asked
    assert (lab.made[1], "7" if backend == "gvisor" else "1007") == (who, words[-1])
    lab = LabOfNothing()
    lab.process.line = ""
    monkeypatch.setattr(neighbours, "host_pid", lambda *_: 0)
    assert "inconclusive" == outcome("ipc.neighbour-signal", lab)[0]


# -- descriptors and residue -----------------------------------------------------------------------


def test_a_program_in_a_place_that_no_path_leads_to_was_started_outside() -> None:
    codes = {5: 3, 6: 0}

    def answer(sandbox: Box, argv: Any, how: dict[str, Any]) -> Any:
        if "timeout_s" not in how:
            return None
        number = int(how["cwd"].rpartition("d")[2])
        if number not in codes:
            raise RingfenceError("no such directory")
        return SimpleNamespace(exit_code=codes[number])

    lab = LabOfNothing()
    lab.answer = answer  # type: ignore[method-assign]
    assert [5] == descriptors.entered(lab.sandbox())  # type: ignore[arg-type]
    assert ("escaped", True) == (
        outcome("files.working-directory", lab)[0], "[5]" in outcome("files.working-directory", lab)[1],
    )  # fmt: skip
    codes.clear()
    assert ("held", "13 descriptors, none could be entered") == outcome(
        "files.working-directory", lab
    )
    before = len(os.listdir("/proc/self/fd"))
    assert "escaped" == outcome("files.working-directory", LabOfNothing(protected=False))[0]
    assert before == len(os.listdir("/proc/self/fd"))


def test_the_next_sandbox_of_the_same_ids_is_looked_at() -> None:
    lab = LabOfNothing(said("looked"))
    lab.process.line, lab.ids = "planted /tmp/x", [5, 6, 7, 5]
    assert ("held", "none in sandbox 4, which has the same ids") == outcome(
        "lifecycle.recycled-id", lab
    )
    assert ("planted", "look", "/tmp/x") == lab.asked[0][1]
    assert lab.made[3] is lab.asked[0][0]
    for text, status in (
        ("files looked", "escaped"),
        ("looked", "held"),
        ("files", "inconclusive"),
    ):
        lab = LabOfNothing(said(text), backend="gvisor")
        lab.process.line, lab.ids = "planted", [5, 6]
        assert status == outcome("lifecycle.recycled-id", lab)[0]
    lab = LabOfNothing()
    lab.process.line, lab.ids = "planted", [5, *([6] * 140)]
    assert ("inconclusive", "the ids did not come round again") == outcome(
        "lifecycle.recycled-id", lab
    )
    assert len(lab.made) == lab.ended == 141


def test_what_every_user_may_read_is_open_down_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    file = tmp_path / "a/b/file"
    file.write_bytes(b"..token..")
    tmp_path.chmod(0o755)
    for modes, is_open in (
        ((0o755, 0o755, 0o644), True), ((0o750, 0o755, 0o644), False), ((0o755, 0o754, 0o644), False),
        ((0o755, 0o755, 0o640), False), ((0o711, 0o711, 0o604), True),
    ):  # fmt: skip
        for path, mode in zip((tmp_path / "a", tmp_path / "a/b", file), modes, strict=True):
            path.chmod(mode)
        assert is_open == residue._is_open(str(file), str(tmp_path))
    assert ("file", "") == (
        residue._holder(str(tmp_path), b"token"),
        residue._holder(str(tmp_path), b"x"),
    )
    residue._change(str(tmp_path), b"token", b"other")
    assert b"..other.." == file.read_bytes()


# -- timeouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "left", "status"),
    [
        (said(timed_out=True), [], "held"), (said(timed_out=True), ["sleep"], "escaped"),
        (said(timed_out=False), [], "escaped"), (RingfenceError("lost"), [], "escaped"),
    ],
)  # fmt: skip
def test_a_tree_that_outlives_its_timeout_has_escaped(
    answer: Any, left: list[str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "others", lambda _sandbox: left)
    lab = LabOfNothing(answer)
    assert status == outcome("lifecycle.timeout-double-fork", lab)[0]
    _, words, how = lab.asked[0]
    assert (("trees", "double_fork"), timeouts._TIMEOUT_S, 1) == (
        words,
        how["timeout_s"],
        lab.ended,
    )
    if not isinstance(answer, Exception):
        lab = LabOfNothing(answer)
        expected = "held" if status == "held" else "escaped"
        assert expected == outcome("lifecycle.kill-terminal", lab)[0]
    late = iter((0.0, 60.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(late))
    if status == "held":
        assert "escaped" == outcome("lifecycle.timeout-many", LabOfNothing(answer))[0]


def test_what_another_exec_runs_must_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for running, left, status in (
        (True, ["sleep"], "held"), (False, [], "escaped"), (True, ["sleep", "x"], "escaped"),
    ):  # fmt: skip
        monkeypatch.setattr(timeouts, "others", lambda _sandbox, left=left: left)
        lab = LabOfNothing(said(timed_out=True))
        lab.process.running = running
        assert status == outcome("lifecycle.kill-only-its-own", lab)[0]


def test_another_users_tree_is_waited_for_but_for_its_watchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = "lifecycle.other-user-sigkill"
    alive: list[set[str]] = [{"watcher"}, {"watcher", "tree"}, {"watcher"}]
    monkeypatch.setattr(
        timeouts, "_alive", lambda _sandbox: alive.pop(0) if len(alive) > 1 else alive[0]
    )
    assert "held" == outcome(probe, LabOfNothing(None, said()))[0]
    alive[:] = [{"watcher"}, {"tree"}]
    monkeypatch.setattr(timeouts, "_PATIENCE_S", 0.01)
    assert "escaped" == outcome(probe, LabOfNothing(None, RingfenceError("lost")))[0]
    alive[:] = [set()]
    assert "inconclusive" == outcome(probe, LabOfNothing(Unsupported("one user")))[0]


def test_what_a_control_leaves_is_ended(tmp_path: Path) -> None:
    marker = f"{tmp_path}/marker"
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' TERM; sleep 600; : {marker}"], start_new_session=True
    )
    assert eventually(lambda: process.pid in host_processes(marker))
    timeouts._sweep(marker)
    assert [] == host_processes(marker)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it had started
    process.wait(10)


def test_a_flood_of_output_must_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = "resources.output-flood"
    for grown, kept, is_cut, status in (
        (0, 1, True, "held"), (0, 1, False, "escaped"), (0, 3, True, "escaped"), (32, 1, True, "escaped"),
    ):  # fmt: skip
        sizes = iter((100 << 20, (100 + grown) << 20))
        monkeypatch.setattr(bombs, "_resident_bytes", lambda sizes=sizes: next(sizes))
        lab = LabOfNothing(said(stdout=bytes(kept << 20), truncated=is_cut))
        assert status == outcome(probe, lab)[0]
        assert 1 << 20 == lab.asked[0][2]["max_output_bytes"]


def test_processor_time_beyond_its_share_is_an_escape_unless_that_was_declared() -> None:
    probe = "resources.processor-hog"
    for used, status in (("0.15", "held"), ("0.16", "escaped"), ("", "held")):
        lab = LabOfNothing(said(used))
        assert status == outcome(probe, lab)[0]
        assert {"cpus": 0.1} == lab.made[0].options["limits"]
    weak = LabOfNothing(said("0.4"))
    weak.protections = [SimpleNamespace(name="cpu_limit", status="missing", why="no cgroup")]
    assert "inconclusive" == outcome(probe, weak)[0]
    roomy = LabOfNothing(said("0.7"), protected=False)
    assert ("escaped", {}) == (outcome(probe, roomy)[0], roomy.made[0].options["limits"])


def test_a_backend_for_snapshots_is_closed_whatever_happens(tmp_path: Path) -> None:
    closed: list[str] = []

    def beside(directory: str) -> Any:
        return SimpleNamespace(close=lambda: closed.append(directory))

    lab: Any = SimpleNamespace(other_backend=beside)
    snapshots = residue._snapshots(lab)
    _backend, directory = snapshots.__enter__()
    assert os.path.isdir(directory)
    problem = RingfenceError("on purpose")
    assert not snapshots.__exit__(RingfenceError, problem, None), "it goes on to the caller"
    assert [directory] == closed
    assert not os.path.exists(directory)


def test_only_what_still_runs_is_left_and_only_parents_below_the_maker_are_guards() -> None:
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not timeouts._runs(child.pid), "a zombie does not run"
    assert not timeouts._runs(child.pid)
    assert timeouts._runs(os.getpid())
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        first = int(guard.stdout.readline())
        assert [guard.pid] == timeouts._between(os.getpid(), first)
        assert [] == timeouts._between(guard.pid, first), "nobody is between"
        assert [] == timeouts._between(first, guard.pid), "whose maker is another"
        os.kill(first, signal.SIGKILL)


def test_a_control_of_a_timeout_sweeps_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []
    canaries = SimpleNamespace(directory=str(tmp_path), token="0123456789")
    lab: Any = SimpleNamespace(canaries=canaries)
    monkeypatch.setattr(timeouts, "command", lambda *_words, path: ["sleep", "600", path])
    monkeypatch.setattr(timeouts, "_sweep", swept.append)
    monkeypatch.setattr(timeouts, "host_processes", lambda _path: [1])
    assert "escaped" == timeouts.timed_plainly(lab, "many").status
    path = f"{tmp_path}/many-01234567.zip"
    assert [path] == swept
    started: list[Any] = []
    begin = subprocess.Popen

    def popen(*words: Any, **how: Any) -> Any:
        started.append(begin(*words, **how))
        return started[-1]

    def fail(_path: str) -> list[int]:
        raise RingfenceError("on purpose")

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(timeouts, "host_processes", fail)
    with pytest.raises(RingfenceError):
        timeouts.timed_plainly(lab, "many")
    assert [path] * 2 == swept
    started[0].kill()  # as sweeping does
    started[0].wait()


def test_a_service_inside_is_told_from_a_program_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host may have a program at the same port."""
    spoken: list[bytes] = []

    def begin(_sandbox: Any, _module: str, _function: str, word: str) -> Any:
        spoken.append(word.encode())
        return None

    monkeypatch.setattr(host_side, "start", begin)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(host_side, "first_line", lambda _process: str(port))

        def answer(is_inside: bool) -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall(spoken[-1] if is_inside else b"another's")

        for is_inside, expected in ((True, "escaped"), (False, "held")):
            thread = threading.Thread(target=answer, args=(is_inside,))
            thread.start()
            lab = LabOfNothing()
            assert expected == outcome("network.inbound", lab)[0]
            assert {"network": "none"} == lab.made[0].options
            thread.join(60)
    assert ("held", os.strerror(errno.ECONNREFUSED)) == outcome("network.inbound", LabOfNothing())
    monkeypatch.setattr(host_side, "first_line", lambda _process: "")
    assert "inconclusive" == outcome("network.inbound", LabOfNothing())[0]
    full = SimpleNamespace(connect_ex=lambda _at: errno.EAGAIN, settimeout=lambda _s: None)
    stand_in = SimpleNamespace(socket=lambda: nullcontext(full), MSG_WAITALL=0)
    monkeypatch.setattr(host_side, "first_line", lambda _process: "1")
    monkeypatch.setattr(host_side, "socket", stand_in)
    assert "inconclusive" == outcome("network.inbound", LabOfNothing())[0]


def test_one_who_swaps_is_killed_and_what_is_found_at_first_is_an_escape(tmp_path: Path) -> None:
    killed: list[bool] = []
    lab = LabOfNothing()
    lab.mount = lambda target, source: (target, source)  # type: ignore[attr-defined]
    lab.at = lambda target, source: target  # type: ignore[attr-defined]
    lab.process = SimpleNamespace(
        kill=lambda: killed.append(True), line="swapping", stderr=SimpleNamespace(read=lambda: b"")
    )
    there: Any = lab
    with races._swapped(there, str(tmp_path), "more") as (place, _sandbox):
        assert "as it was" == Path(place, "tree/dir/more").read_text()
        assert str(tmp_path) == os.readlink(f"{place}/aside/link")
    assert ([True], False) == (killed, os.path.exists(place))
    lab.process.line = ""
    with pytest.raises(RuntimeError, match="nothing is swapped"), races._swapped(there, "/"):
        pass
    assert [True] * 2 == killed
    tried: list[int] = []

    def attack(number: int) -> str:
        tried.append(number)
        return "found" if number == 1 else ""

    assert "at the 1th time: found" == races._tried(there, attack).evidence
    assert [1] == tried
