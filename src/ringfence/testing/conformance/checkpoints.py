"""Memory that is saved with the files: what ran goes on, as often as it is restored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ...errors import InvalidRequest, LifecycleError
from ...model import capabilities as can
from ...model.state import State
from .base import needs
from .snapshots import Snapshots

if TYPE_CHECKING:
    from ...backends.protocol import Backend
    from ..lab import Lab
    from .snapshots import Restore

COUNT = "i=0; while :; do i=x$i; echo $i > count; sleep 0.02; done"


class Checkpoints(Snapshots):
    @needs(can.MEMORY_SNAPSHOT)
    def test_what_ran_goes_on(self, sandbox: Lab, backend: Backend, restore: Restore) -> None:
        """A shell counts in a variable of its own: only its memory knows how far it is."""
        if not backend.report().can(can.MEMORY_SNAPSHOT):
            sandbox.sandbox.checkpoint({})
        sandbox.sh(f"({COUNT}) > log 2>&1 < /dev/null &")
        reached = self._wait_for(sandbox, 5)

        snapshot = sandbox.sandbox.checkpoint({"why": "memory"})
        try:
            first, second = restore(snapshot), restore(snapshot)
            counts = [self._wait_for(lab, reached + 5) for lab in (first, second)]
        finally:
            backend.delete_snapshot(snapshot.id)

        assert State.TERMINATED is sandbox.state
        assert snapshot.has_memory
        assert {"why": "memory"} == snapshot.metadata
        assert min(counts) >= reached + 5
        assert first.sandbox.session.id != second.sandbox.session.id
        assert first.run("true").ok

    @needs(can.MEMORY_SNAPSHOT)
    def test_an_exec_that_still_runs_is_named(self, sandbox: Lab) -> None:
        """Its streams end at the host: nobody could continue them. It, and the sandbox, go on."""
        process = sandbox.start("sleep", "600")

        with pytest.raises(LifecycleError, match="sleep"):
            sandbox.sandbox.checkpoint({})

        assert sandbox.run("true").ok
        process.kill()

    @needs(can.MEMORY_SNAPSHOT)
    def test_it_goes_on_as_it_was(self, sandbox: Lab, backend: Backend) -> None:
        snapshot = sandbox.sandbox.checkpoint({})

        try:
            with pytest.raises(InvalidRequest) as refusal:
                backend.restore(snapshot.id, self.make_spec(env={"OTHER": "1"}))
        finally:
            backend.delete_snapshot(snapshot.id)

        assert "spec" == refusal.value.field

    def _wait_for(self, lab: Lab, count: int) -> int:
        """How far it has come, once that is `count` at least."""
        ends = time.monotonic() + self.patience_s
        while time.monotonic() < ends:
            found = lab.sh("cat count").stdout.count(b"x")
            if found >= count:
                return found
        raise AssertionError(f"it did not come as far as {count}")
