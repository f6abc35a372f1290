"""Copies of a sandbox's running processes in other sandboxes: see `launcher.live`."""

from __future__ import annotations

import errno
import marshal
import os
import signal
import time
from _thread import allocate_lock

from ...errors import IsolationError, SandboxLost, Unsupported
from ...launcher import wire
from ...launcher.live import steps
from ...launcher.pid1.processes import TAG_BASE
from ...model.state import State
from ..local.answers import Refused, answer
from ..optional import ProcessTemplate, WaitingCopy
from .inner import namespace_fds_of, replay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ...model.execs.exec import ExecRequest
    from ..local.agents.execs import LocalExec
    from ..protocol import BackendExec
    from .sandbox import NativeSandbox

_STOP_S, _LOAD_S, _COPY_S = 10.0, 120.0, 30.0
_PAUSE_S = 0.001


def refused(reason: str) -> Unsupported:
    return Unsupported(
        reason,
        backend="native",
        operation="fork with processes",
        hint='processes="none" copies the files',
    )


class NativeTemplate(ProcessTemplate):
    """See `ProcessTemplate`. A helper of the zygote's holds it, and ends with `close`.

    Raises:
        Unsupported: The process cannot be copied; it goes on, and nothing is left.
    """

    def __init__(self, sandbox: NativeSandbox, run: LocalExec) -> None:
        if sandbox.lockdown["borrows_proc"]:
            raise refused("in its /proc, which is its caller's, processes have other numbers")
        ours, theirs = wire.socketpair()
        self._control, self._name, self._number = ours, run.id, run.number
        self._sandbox = sandbox
        self._turn = allocate_lock()
        self._is_loading = self._is_released = False
        self._problem: Unsupported | None = None  # why its memory could not be copied
        try:
            _body, (self._pidfd,) = sandbox.zygote.ask("enter", {"op": "live"}, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            fds = run.stdin, run.stdout, run.stderr
            streams = [os.fstat(fd).st_ino for fd in fds if fd is not None]
            argument = {
                "pid": _pid_of(sandbox, run),
                "streams": streams,
                "files": sandbox.mapped_files,
            }
            facts = self._ask("stop", argument, _STOP_S)
        except BaseException:
            self.close()
            raise
        self.ids, self.bytes, self.processes = facts["ids"], facts["bytes"], facts["processes"]
        self._files: dict[tuple[int, int], bytes] = facts["files"]

    def release(self) -> None:
        """Let the process go on. It does as well where the helper has ended: ptrace(2)."""
        if self._is_released:
            return
        try:
            self._ask("release", None, _STOP_S)
        except Unsupported:
            pass
        self._is_released = True

    def load(self) -> None:
        """Begin to copy its memory, which it may change meanwhile."""
        with self._turn:
            self._exchange("load", None, 0.0)
            self._is_loading = True
            self._sandbox.loading.add(self)

    def wait(self) -> None:
        with self._turn:
            self._finish_load()

    def _finish_load(self) -> None:
        if self._is_loading:
            try:
                self._exchange("", None, _LOAD_S)
            except Unsupported as exc:
                self._problem = exc
            self._is_loading = False
            self._sandbox.loading.discard(self)
        if self._problem is not None:
            raise self._problem

    def copy(
        self, sandbox: Any, request: ExecRequest, taken: Sequence[int], label: str = ""
    ) -> WaitingCopy:
        reports: list[wire.Socket] = []

        def tell(number: int, reply: wire.Socket, streams: list[int]) -> None:
            argument = {
                "plan": replay(sandbox),
                "cgroup_dirs": sandbox.group.directories,
                "tag": TAG_BASE - number,
                "taken": list(taken),
            }
            argument["namespaces"], places = namespace_fds_of(sandbox)
            try:
                report, listener = self._begin(sandbox, argument, [*places, *streams])
            finally:
                for fd in places:
                    os.close(fd)
            reports.append(report)
            try:
                told = ("adopt", number, self.ids[0], request.timeout_s or 0.0)
                sandbox.send(told, [reply.fileno(), listener], sandbox.control)
                sandbox.ask("wake")  # it reads one after the other
            finally:
                os.close(listener)

        # It keeps its number, which is its id: those of a sandbox in which nothing ran are free.
        sandbox.count = max(sandbox.count, self._number - 1)
        try:
            run = sandbox.begin(tell, request, sandbox.control, sandbox.uid, label, attended=False)
        except BaseException:
            for report in reports:
                report.close()
            raise
        sandbox.mapped_files.update(self._files)
        return _NativeCopy(run, reports[0])

    def _begin(
        self, sandbox: NativeSandbox, argument: dict[str, Any], fds: list[int]
    ) -> tuple[wire.Socket, int]:
        """Make a copy that waits: the socket on which it does, and the listener of its filter."""
        give_up = time.monotonic() + _COPY_S
        while True:
            ours, theirs = wire.socketpair()
            try:
                try:
                    self._ask("copy", argument, _COPY_S, [*fds, theirs.fileno()])
                finally:
                    theirs.close()
                ours.settimeout(_COPY_S)
                data, sent = wire.receive_raw(ours)
                if data == b"R" and len(sent) == 1:
                    return ours, sent[0]
                problem = steps.failure(data) if len(data) == steps.STEP_BYTES else None
            except BaseException:
                ours.close()
                raise
            ours.close()
            sandbox.ask("kill", TAG_BASE - argument["tag"])  # what waits for the one that failed
            # A helper that put files into the sandbox ends a moment after its answer, and has an id there.
            if problem is None or problem.errno != errno.EEXIST or time.monotonic() > give_up:
                raise refused(f"no copy of {self._name} was made: {problem or 'it ended'}")
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Let go of all that is kept; copies live on. A process that stands still goes on. Idempotent."""
        self._control.close()
        self._sandbox.loading.discard(self)
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            if self._is_loading:  # else it would read on, and the next fork wait for its end
                self._kill(pidfd)
            self._sandbox.expect_end(pidfd)

    @staticmethod
    def _kill(pidfd: int) -> None:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended

    def _ask(self, verb: str, argument: Any, timeout_s: float, fds: Sequence[int] = ()) -> Any:
        with self._turn:
            self._finish_load()
            return self._exchange(verb, argument, timeout_s, fds)

    def _exchange(self, verb: str, argument: Any, timeout_s: float, fds: Sequence[int] = ()) -> Any:
        """Send a request unless `verb` is empty, and receive an answer unless `timeout_s` is 0."""
        try:
            if verb:
                wire.send(self._control, (verb, argument), list(fds))
            if not timeout_s:
                return None
            body, _fds = answer(self._control, timeout_s)
        except Refused as exc:
            why = exc.strerror or str(exc)
            if exc.errno == errno.ENOTTY:
                why = "the kernel is older than Linux 6.7"
            raise refused(f"{self._name} cannot be copied: {why}") from exc
        except IsolationError as exc:  # a thread waits for the kernel, and does not stop
            self._kill(self._pidfd)
            raise refused(f"{self._name} cannot be copied: it does not stop") from exc
        except (OSError, SandboxLost) as exc:
            raise refused(f"{self._name} cannot be copied: what copies it has ended") from exc
        return marshal.loads(body)


class _NativeCopy(WaitingCopy):
    """A copy that reads one byte before it runs; the end of the stream ends it."""

    def __init__(self, run: BackendExec, report: wire.Socket) -> None:
        super().__init__(run)
        self._report = report

    def go_on(self) -> None:
        """Let it run.

        Raises:
            Unsupported: It has ended, as something inside or a limit of the sandbox's ended it.
        """
        try:
            wire.send_raw(self._report, b"g")
        except OSError as exc:
            raise refused(f"the copy of {self.run.id} ended before it went on: {exc}") from exc
        finally:
            self._report.close()

    def close(self) -> None:
        self._report.close()


def _pid_of(sandbox: NativeSandbox, run: LocalExec) -> int:
    """The pid of an exec's first process, as the host sees it.

    Source: proc(5), children, CONFIG_PROC_CHILDREN.
    """
    if not _has_begun(sandbox, run):  # `left_behind` has waited: something inside has stopped it
        raise refused(f"{run.id} has not begun its program within {_STOP_S:.0f} s")
    try:
        inside = int(sandbox.ask("pid", run.number)[0])
    except Refused as exc:
        raise refused(f"{run.id} has ended") from exc
    for pid, number, _command in _children(sandbox.pid):
        if number == inside:
            return pid
    raise refused(f"{run.id} is not to be found")


def _has_begun(sandbox: NativeSandbox, run: LocalExec) -> bool:
    """Return whether an exec runs its program: before, it is a copy of PID 1, whose files are not inside."""
    return sandbox.ask("begun", run.number)[0] == b"1"


def left_behind(sandbox: NativeSandbox) -> list[str]:
    """See `Forkable`. PID 1 adopts what the processes of an exec leave in the background."""
    sandbox.wait_for_helpers(_STOP_S)
    is_suspended = sandbox.state is State.SUSPENDED
    give_up = time.monotonic() + _STOP_S
    for run in [] if is_suspended else list(sandbox.runs.values()):
        # Now, while what may have stopped it still runs; `template` refuses what does not begin.
        while not _has_begun(sandbox, run) and time.monotonic() < give_up:
            time.sleep(_PAUSE_S)
    children = _children(sandbox.pid)
    others = {number: command for pid, number, command in children if _has_tag(pid)}
    runs, known = list(sandbox.runs.values()), set()
    if len(others) <= len(runs):
        return []
    if is_suspended and runs:
        raise refused(
            "what runs cannot be copied: the sandbox is suspended"
        )  # PID 1 answers nobody
    for run in runs:
        try:
            known.add(int(sandbox.ask("pid", run.number)[0]))
        except Refused:
            continue  # it has just ended
    return [f"{others[each]} (pid {each})" for each in sorted(set(others) - known)]


def _has_tag(pid: int) -> bool:
    """Tell processes of execs from helpers of ours, which are inside until a moment after their answer."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            line = file.read().partition(b"Max realtime timeout")[2].partition(b"\n")[0]
    except OSError:
        return False  # it has just ended
    return line.split()[1:2] != [b"unlimited"]


def _children(pid: int) -> Iterator[tuple[int, int, str]]:
    """Yield pid, pid inside, and command of the children of a PID 1."""
    with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
        found = file.read().split()
    for each in found:
        try:
            with open(f"/proc/{int(each)}/status", "rb") as status:
                text = status.read()
        except OSError:
            continue  # it has just ended
        ids = text.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()
        pending = int(text.partition(b"\nShdPnd:\t")[2][:16] or b"0", 16)
        pending |= int(text.partition(b"\nSigPnd:\t")[2][:16] or b"0", 16)
        is_ending = b"\nVmSize:" not in text or pending & 1 << signal.SIGKILL - 1
        if ids and not is_ending:
            name = text.partition(b"Name:\t")[2].partition(b"\n")[0]
            yield int(each), int(ids[-1]), name.decode("utf-8", "replace")
