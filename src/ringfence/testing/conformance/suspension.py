"""Freezing a sandbox, and letting it go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ...errors import LifecycleError
from ...model import capabilities as can
from ...model.state import State
from ..running import drain, is_readable, read_until
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from ..lab import Lab

HEARTBEAT = "while :; do echo beat; sleep 0.02; done"
STILL_S = 0.3  # many beats; a frozen process makes none, however long we wait


class Suspension(ConformanceBase):
    @needs(can.SUSPEND, can.RESUME)
    def test_suspended_processes_stand_still(self, sandbox: Lab) -> None:
        process = sandbox.start("sh", "-c", HEARTBEAT)
        read_until(process.stdout, b"beat", self.patience_s)

        sandbox.sandbox.suspend()
        drain(process.stdout)
        time.sleep(STILL_S)
        during = drain(process.stdout)
        sandbox.sandbox.resume()

        assert b"" == during
        read_until(process.stdout, b"beat", self.patience_s)

    @needs(can.SUSPEND, can.RESUME)
    def test_the_states(self, sandbox: Lab) -> None:
        sandbox.run("true")

        box = sandbox.sandbox
        seen = []
        for step in (box.suspend, box.suspend, box.resume, box.resume):
            step()
            seen.append(sandbox.state)

        assert [State.SUSPENDED, State.SUSPENDED, State.RUNNING, State.RUNNING] == seen
        assert sandbox.run("true").ok

    @needs(can.SUSPEND)
    def test_suspended_before_anything_ran(self, sandbox: Lab) -> None:
        sandbox.sandbox.suspend()

        assert State.SUSPENDED == sandbox.state

    @needs(can.RESUME)
    def test_resuming_what_is_not_suspended(self, sandbox: Lab) -> None:
        sandbox.sandbox.resume()

        assert State.PROVISIONED == sandbox.state

    @needs(can.SUSPEND, can.RESUME)
    def test_a_suspended_sandbox_starts_nothing(self, sandbox: Lab) -> None:
        """A clear error rather than a command that hangs."""
        sandbox.sandbox.suspend()

        with pytest.raises(LifecycleError):
            sandbox.start("true")
        sandbox.sandbox.resume()

        assert sandbox.run("true").ok

    @needs(can.SUSPEND)
    def test_a_suspended_process_can_be_killed(self, sandbox: Lab) -> None:
        process = sandbox.start("sleep", "600")
        sandbox.sandbox.suspend()

        process.kill()

        assert is_readable(process.done, self.patience_s)
        assert State.SUSPENDED == sandbox.state
