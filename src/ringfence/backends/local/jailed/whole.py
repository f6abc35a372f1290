"""Execs that go on after their sandbox was saved with its memory: in its place, and in its forks."""

from __future__ import annotations

import os
import select

from ....errors import LifecycleError, RingfenceError, Unsupported
from ....launcher import wire
from ...optional import ProcessTemplate, WaitingCopy
from ..agents.guest import GuestExec
from ..agents.streams import lend, open_channels
from ..answers import answer
from . import saving

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ....model.execs.exec import ExecRequest
    from .jailed import JailedSandbox

_JOIN_S = 60.0


class RelayedExec(GuestExec):
    """A process tree whose streams the agent passes on, so that it can be saved.

    `done` stays the same descriptor while the socket behind it is replaced: a driver waits for it.
    """

    is_relayed = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._far: dict[int, int] | None = None
        self._wait = select.epoll()
        self._wait.register(self._reply, select.EPOLLIN)

    @property
    def done(self) -> int:
        return -1 if self._wait.closed else self._wait.fileno()

    def leave(self) -> None:
        """Keep its streams and its driver from seeing that the agent closes its ends."""
        with self._lock:
            if self._status is not None or self._problem is not None or self._wait.closed:
                raise LifecycleError(f"{self.id} has just ended")
            if self._far is not None:
                raise LifecycleError(f"{self.id} is being saved already")
            far: dict[int, int] = {}
            try:
                for number, fd in enumerate((self.stdin, self.stdout, self.stderr)):
                    if fd is not None:
                        way = os.O_WRONLY if number else os.O_RDONLY
                        far[number] = os.open(f"/proc/self/fd/{fd}", way | os.O_CLOEXEC)
            except OSError:
                for fd in far.values():
                    os.close(fd)
                raise
            self._far = far
            self._wait.unregister(self._reply)

    def stay(self) -> None:
        """Go on as before: nothing was saved, or all is lost. Idempotent."""
        with self._lock:
            far, self._far = self._far, None
            for fd in (far or {}).values():
                os.close(fd)
            # Closed while it was apart, it has no socket to wait for.
            if far is not None and self._reply.fileno() >= 0:
                self._wait.register(self._reply, select.EPOLLIN)

    def move(self, sandbox: JailedSandbox) -> None:
        """Go on in the sandbox that was restored in its sandbox's place; what cannot ends as lost."""
        far, reply = self._far, None
        if far is None:
            return
        try:
            reply = join(sandbox, self.number, far)
        except (RingfenceError, OSError):
            self.stay()
            return
        with self._lock:
            self._far, before, self._reply = None, self._reply, reply
            self._sandbox, self._control = sandbox, sandbox.control
            sandbox.attend(self)
            before.close()
            self._wait.register(reply, select.EPOLLIN)

    def close(self) -> None:
        super().close()
        self.stay()
        self._wait.close()


def join(sandbox: JailedSandbox, number: int, far: dict[int, int]) -> wire.Socket:
    """Have a restored agent tell of an exec's end; returns where. The ends are closed, if that succeeds.

    Raises:
        Refused: There is no such exec.
        SandboxLost: The sandbox has ended.
    """
    ours, theirs = wire.socketpair()
    try:
        ends = tuple(sorted(far))
        asked = sandbox.request(
            "join", (number, ends), (theirs.fileno(), *(far[end] for end in ends))
        )
        try:
            answer(asked, _JOIN_S)
        finally:
            asked.close()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    for fd in far.values():
        os.close(fd)
    return ours


class WholeTemplate(ProcessTemplate):
    """Template of an exec whose sandbox is saved with all that runs in it.

    Attributes:
        home: Where it goes on: once that was saved, the sandbox in its place.
        is_held: The exec is apart for this template, and not for the next fork of its sandbox.
    """

    is_held = False

    def __init__(self, home: JailedSandbox, run: RelayedExec) -> None:
        self.home, self.run = home, run

    def release(self) -> None:
        is_held, self.is_held = self.is_held, False
        if is_held:
            self.run.move(self.home)

    def load(self) -> None:
        self.release()

    def copy(
        self, sandbox: Any, request: ExecRequest, taken: Sequence[int], label: str = ""
    ) -> WaitingCopy:
        del taken, label
        command, cwd, *_ = self.run.facts
        return WaitingCopy(rejoin(sandbox, self.run.number, request, command, cwd))

    def close(self) -> None:
        self.release()


def rejoin(
    sandbox: JailedSandbox, number: int, request: ExecRequest, command: str, cwd: str
) -> RelayedExec:
    """Attend to an exec, with streams of its own, in a sandbox restored from the one where it began.

    Raises:
        Unsupported: It does not go on there.
    """
    ours, theirs, inner, outer = open_channels(request)
    ours.close()
    theirs.close()
    lend(inner)
    far = dict(enumerate(inner, 3 - len(inner)))
    try:
        reply = join(sandbox, number, far)
    except BaseException as exc:
        for fd in (*inner, *(end for end in outer if end is not None)):
            os.close(fd)
        if not isinstance(exc, OSError | RingfenceError):
            raise
        raise refused(sandbox, f"exec {number} did not go on: {exc}") from exc
    control, kills = sandbox.control, sandbox.oom_kills()
    run = RelayedExec(sandbox, number, control, reply, outer, kills, command, cwd)
    sandbox.attend(run)
    return run  # it runs already


def refused(sandbox: JailedSandbox, reason: str) -> Unsupported:
    return Unsupported(
        reason,
        backend=sandbox.backend.name,
        operation="fork with processes",
        hint='processes="none" copies the files',
    )


def hold(sandbox: JailedSandbox, templates: Sequence[ProcessTemplate]) -> None:
    """Have these execs, and nothing else inside, hold what is the host's.

    Raises:
        Unsupported: Something else does; all goes on.
    """
    held = [each for each in templates if isinstance(each, WholeTemplate)]
    try:
        for each in held:
            each.run.leave()
            each.is_held = True
        saving.settle(sandbox, [each.run.number for each in held])
    except BaseException as exc:
        for each in held:
            if each.is_held:
                each.run.stay()
            each.is_held = False
        if isinstance(exc, LifecycleError):
            raise refused(sandbox, exc.message) from exc
        raise
