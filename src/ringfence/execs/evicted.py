"""Execs of an evicted sandbox: described when it is saved, attended to again where it is restored."""

from __future__ import annotations

import fcntl
import struct
import termios
import time

from ..backends.optional import Continuable
from ..errors import IoError, LifecycleError, RingfenceError
from ..model.execs.exec import ExecRequest
from ..model.execs.exec_view import ExecView
from ..sessions import eviction
from .live_forks import LiveForks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..backends.protocol import BackendExec
    from ..model.spec import SandboxSpec
    from ..sessions.live import Live
    from ..sessions.parts import Manager
    from .execs import Execs

    Form = dict[str, Any]

_DRAINED_S = 5.0
_LOOK_S = 0.01
_LEAST_S = 0.001


class EvictedExecs(LiveForks, eviction.Evicted):
    """Execs of a sandbox that go on where it is restored: all of them, or it is not evicted."""

    def stop(self, processes: str, live: Live, spec: SandboxSpec) -> None:
        for run in self._execs.running_of(live.sandbox_id):
            if run.waiters:
                self.close()
                raise LifecycleError(
                    f"a client waits for the end of {run.id}", hint="wait until it has ended"
                )
        super().stop(processes, live, spec)

    def forms(self) -> list[Form]:
        """Describe each exec with what its clients need to go on: ids and offsets stay as they are.

        Raises:
            IoError: Output that came before the save is not in the spool yet.
        """
        found = []
        for view, template in self._held:
            run = self._execs.find(view.sandbox_id, view.id)
            _await_output(run.begun)
            assert self._inner is not None
            number = self._inner.number_of(template)
            found.append({"number": number, "saved_at": time.time(), "view": run.view().to_json()})
        return found


def _await_output(begun: BackendExec | None) -> None:
    """Wait until the pipes of an exec are empty: nothing writes to them any more."""
    until = time.monotonic() + _DRAINED_S
    pipes = () if begun is None else (begun.stdout, begun.stderr)
    while any(fd is not None and _waiting_bytes(fd) for fd in pipes):
        if time.monotonic() > until:
            raise IoError("output of an exec was not taken in time")
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)  # what was taken last is being counted


def _waiting_bytes(fd: int) -> int:
    try:
        found: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
    except OSError:  # it was closed: its end has been read
        return 0
    return found


def come_back(manager: Manager, execs: Execs, live: Live, form: Form) -> None:
    """Complete an evicted sandbox that was restored here: it has its execs and its state again."""
    _go_on(execs, live, form["execs"])
    eviction.settle(manager, live, form)


def left_s(view: ExecView, saved_at: float) -> float | None:
    """Return the rest of an exec's timeout, without the time in the store; None: it has no timeout."""
    if view.timeout_s is None:
        return None
    return max(_LEAST_S, view.timeout_s - (saved_at - view.created_at))


def _go_on(execs: Execs, live: Live, forms: Sequence[Form]) -> None:
    inner = live.inner
    assert isinstance(inner, Continuable)
    for form in forms:
        view = ExecView.from_json(form["view"]).altered(sandbox_id=live.sandbox_id)
        timeout_s = left_s(view, form["saved_at"])
        request = ExecRequest(
            view.argv, cwd=view.cwd, timeout_s=timeout_s, stream_stdin=view.stream_stdin
        )
        number: int = form["number"]

        def begin(_label: str, number: int = number, request: ExecRequest = request) -> BackendExec:
            return inner.rejoin(number, request)

        try:
            execs.go_on(live, view, request, begin)
        except RingfenceError as exc:
            execs.lose(view, exc)
