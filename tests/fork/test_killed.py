"""kill -9 of all that takes part in a fork: the source goes on or ends as documented, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.local.host import owner
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.live_copies import NativeTemplate
from ringfence.contexts.frames import argv_of
from ringfence.errors import ExecError, LifecycleError, RingfenceError, Unsupported
from ringfence.linux import libc
from ringfence.model.calls import make_request
from ringfence.sandbox import marks
from tests.fork.test_live import native
from tests.native.callers import Caller
from tests.native.outside import (
    cgroups_of,
    children_of,
    descendants_of,
    new_length,
    pids_with,
    pin,
    survivors,
    until,
)
from tests.posture.reading import processes_in
from tests.sessions import test_restart

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]
_PATIENCE_S = 30.0


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    """With a zygote of its own, which a test may kill."""
    backend = NativeBackend(state_dir=str(tmp_path))
    with Sandbox.create(backend=backend) as made:
        yield made
    backend.close()


def template_of(sandbox: Sandbox) -> NativeTemplate:
    return NativeTemplate(native(sandbox), sandbox._its_contexts.running()[0][0]._process._pump.run)


def helpers(sandbox: Sandbox) -> set[int]:
    """Processes that make copies, and templates."""
    found = set()
    for pid in descendants_of(native(sandbox).zygote.pid):
        try:
            if "ringfence-copy\n" == Path(f"/proc/{pid}/comm").read_text():
                found.add(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.root
def test_what_makes_copies_may_be_killed_at_any_time(sandbox: Sandbox) -> None:
    """The source goes on, whether it stands still then or not, and nothing is left."""
    sandbox.run_code("kept = 9")
    for kills_after in ("stop", "load", "copy"):
        template = template_of(sandbox)
        if kills_after != "stop":
            template.release()
            template.load()
        if kills_after == "copy":
            with Sandbox.create() as other:
                wanted = make_request(argv_of("python"), stream_stdin=True)
                copy = template.copy(other._inner, wanted, template.ids)
                signal.pidfd_send_signal(template._pidfd, signal.SIGKILL)
                template.close()
                copy.go_on()
            continue
        signal.pidfd_send_signal(template._pidfd, signal.SIGKILL)
        template.close()
        assert "9" == sandbox.run_code("kept").text
    assert "9" == sandbox.run_code("kept").text
    assert until(lambda: not helpers(sandbox), _PATIENCE_S)
    alone = [each for each in processes_in(native(sandbox).pid) if "python" in each.command[0]]
    assert 1 == len(alone)


def test_the_helper_is_killed_while_it_stops_the_source(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source goes on right, or ends: between two of its calls it has other registers."""
    whole = NativeTemplate._ask

    def ask(self: NativeTemplate, verb: str, *rest: Any) -> Any:
        if verb == "stop":
            delay_s = moments.pop() / 1000
            timer = threading.Timer(
                delay_s, signal.pidfd_send_signal, [self._pidfd, signal.SIGKILL]
            )
            timer.start()
            try:
                return whole(self, verb, *rest)
            finally:
                timer.join()
        return whole(self, verb, *rest)

    moments = [0.5 * each for each in range(16)]
    monkeypatch.setattr(NativeTemplate, "_ask", ask)
    outcomes = []
    while moments:
        context = sandbox.context()
        context.run("kept = list(range(1000)); import threading; wait = threading.Event().wait")
        context.run("for n in range(4): threading.Thread(target=wait, daemon=True).start()")
        try:
            NativeTemplate(native(sandbox), context._process._pump.run).close()
            outcomes.append("")
        except Unsupported as exc:
            outcomes.append(exc.message)
        try:
            ran = context.run("sum(kept)", timeout_s=20)
            ended = ran.error is not None and "ContextEnded" == ran.error.name
            assert ended or "499500" == ran.text
        except (ExecError, LifecycleError):
            ended = True
        assert not ended or "has ended" in outcomes[-1]
        context.close()
    assert any("has ended" in each for each in outcomes)
    assert until(lambda: not helpers(sandbox), _PATIENCE_S)
    listed = sandbox.shell("echo /proc/[0-9]*").stdout_text.split()
    assert 2 == len(listed), listed  # PID 1 and this shell


@pytest.mark.full
def test_the_helper_is_killed_while_it_stops_a_tree(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy of a child that was made for reading runs on beside it."""
    whole = NativeTemplate._ask
    moments = [each / 1000 for each in range(1, 17)]

    def ask(self: NativeTemplate, verb: str, *rest: Any) -> Any:
        timer = threading.Timer(
            moments.pop(), signal.pidfd_send_signal, [self._pidfd, signal.SIGKILL]
        )
        timer.start()
        try:
            return whole(self, verb, *rest)
        finally:
            timer.join()

    monkeypatch.setattr(NativeTemplate, "_ask", ask)
    begin = "import subprocess; cats = [subprocess.Popen(['cat'], stdin=-1, stdout=-1) for _ in range(8)]"
    use = "[each.stdin.write(b'a\\n') and each.stdin.flush() or each.stdout.readline() for each in cats]"
    was_copied = []
    while moments:
        context = sandbox.context()
        context.run(begin)
        try:
            NativeTemplate(native(sandbox), context._process._pump.run).close()
            was_copied.append(True)
        except Unsupported:
            was_copied.append(False)
        if was_copied[-1]:
            assert str([b"a\n"] * 8) == context.run(use, timeout_s=20).text
        # With the helper the kernel kills the copies that it traces, and waits for none of them.
        assert until(lambda: int(sandbox.shell("pgrep -c cat").stdout_text) <= 8, _PATIENCE_S)
        context.close()
    assert False in was_copied
    assert until(lambda: not helpers(sandbox), _PATIENCE_S)

    init = native(sandbox).pid
    assert until(lambda: not descendants_of(init), _PATIENCE_S), descendants_of(init)


@pytest.mark.parametrize("processes", ["auto", "required"])
def test_the_template_is_killed(sandbox: Sandbox, processes: str) -> None:
    sandbox.run_code("kept = 4")
    sandbox.files.write("file", "saved")
    with sandbox.mark(processes=processes) as mark:
        mark.wait()
        for pid in helpers(sandbox):
            if set(children_of(pid)) == set():
                os.kill(pid, signal.SIGKILL)
        if processes == "required":
            with pytest.raises(Unsupported, match="cannot be copied"):
                sandbox.fork(at=mark)
        else:
            (fork,) = sandbox.fork(at=mark)
            with fork:
                report = fork.fork_report
                assert report is not None
                assert not report.has_processes
                assert report.reason
                assert "saved" == fork.files.read_text("file")
    assert "4" == sandbox.run_code("kept").text


def test_the_zygote_is_killed(sandbox: Sandbox) -> None:
    """With it end its sandboxes, and all that makes copies."""
    sandbox.run_code("kept = 4")
    with sandbox.mark(processes="required") as mark:
        zygote = native(sandbox).zygote.pid
        family = pin(descendants_of(zygote))
        assert len(family) >= 4
        os.kill(zygote, signal.SIGKILL)
        assert [] == survivors(family, _PATIENCE_S)
        with pytest.raises(RingfenceError):
            sandbox.fork(at=mark)
        with pytest.raises(RingfenceError):
            sandbox.exec(["true"])


_PRELUDE = (
    test_restart._PRELUDE
    + """
from ringfence.backends.native.live_copies import NativeTemplate
from ringfence.sandbox.live_fork import LiveFork
from ringfence.sandbox.marks import Mark
backend = NativeBackend(state_dir=state)
source = Sandbox.create(backend=backend)
source.run_code("kept = 1")
source.start(["sleep", marker])
halted = lambda: say(["halted", [each.id for each in backend.living()]])
def halt():
    halted()
    signal.pause()
"""
)
_FORK = "source.fork(2, processes='required')"
_REWIND = "mark = source.mark(processes='required'); {}source.rewind(mark)"


def _halting(what: str, when: str, call: str = _FORK) -> str:
    halting = test_restart.halting(what, when)
    return call.format(halting) if "{}" in call else halting + call


_STEPS = {
    "all stands still": _halting("NativeTemplate.release", "before"),
    "before the snapshot": _halting("NativeSandbox.snapshot", "before"),
    "saved": _halting("NativeSandbox.snapshot", "after"),
    "goes on": _halting("LiveFork.release", "after"),
    "loaded": _halting("NativeTemplate.load", "after"),
    "restored": _halting("NativeBackend.restore", "after"),
    "one copy waits": _halting("NativeTemplate.copy", "after"),
    "one fork is there": _halting("LiveFork.put_into", "after"),
    "before it is closed": _halting("Mark.close", "before"),
    "closed": _halting("Mark.close", "after"),
    "rewind: ended": _halting("NativeSandbox.terminate", "after", _REWIND),
    "rewind: copied": _halting("NativeTemplate.copy", "after", _REWIND),
}


@pytest.mark.full
@pytest.mark.parametrize("label", _STEPS)
def test_the_host_process_is_killed(label: str, tmp_path: Path) -> None:
    """Its sandboxes end with it, and the next process that forks removes what it saved."""
    marker, state = new_length(), str(tmp_path / "state")
    with Caller(_PRELUDE + _STEPS[label], state, label, marker) as caller:
        _, ids = caller.hear(60)
        family = pin(descendants_of(caller.pid))
        assert ids or label.startswith("rewind: ended")
        caller.kill()
    assert [] == survivors(family, _PATIENCE_S)
    assert [] == pids_with(marker)
    backend = NativeBackend(state_dir=state)
    try:
        with Sandbox.create(backend=backend) as other:
            other.mark().close()
        assert [] == backend.snapshots()
    finally:
        backend.close()
    for each in ids:
        assert [] == cgroups_of(each)


def test_each_backend_of_a_process_removes_what_a_kill_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is where an earlier one was: then id() is the same."""
    monkeypatch.setattr(marks, "id", lambda _: 1, raising=False)
    gone = owner.label(os.getpid(), 1)  # our number, of another start
    for number in range(2):
        backend = NativeBackend(state_dir=str(tmp_path / str(number)))
        with Sandbox.create(backend=backend) as made:
            native(made).snapshot({marks.OWNER: gone})
            kept = native(made).snapshot({marks.OWNER: owner.label()}).id
        before = len(backend.snapshots())
        marks._sweep(backend)
        left = [each.id for each in backend.snapshots()]
        backend.close()
        assert (2, [kept]) == (before, left)
