"""Timeouts, kills and signals: what ends a process, and that nothing of it is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ...model.limits import Limits
from ..running import is_readable, read_to_end, read_until, wait_done
from .base import ConformanceBase

if TYPE_CHECKING:
    from ..lab import Lab
    from .base import MakeSandbox

TREE = "setsid sleep 600 & (sleep 600 &) ; (setsid sleep 600 &) ; echo ready; "
"""A shell with a new session, an orphan and an orphaned new session below it."""


class Endings(ConformanceBase):
    def test_a_timeout_takes_the_whole_tree(self, sandbox: Lab) -> None:
        """And keeps the output so far."""
        process = sandbox.start("sh", "-c", TREE + "sleep 600", timeout_s=self.soon_s)

        wait_done(process, self.patience_s)

        status = process.status()
        assert b"ready\n" == read_to_end(process.stdout, self.patience_s)
        assert (True, "timeout") == (status.timed_out, status.killed_by)
        assert (None, 9) == (status.exit_code, status.signal)
        assert not status.ok

    def test_a_timeout_cannot_be_ignored(self, sandbox: Lab) -> None:
        script = "trap '' TERM INT HUP; echo ready; while :; do sleep 600; done"

        result = sandbox.sh(script, timeout_s=self.soon_s)

        assert result.timed_out
        assert b"ready\n" == result.stdout

    def test_the_wall_time_is_the_default_timeout(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(limits=Limits(wall_time_s=0.3))

        assert lab.run("sleep", "600").timed_out

    def test_a_timeout_of_its_own_comes_first(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(limits=Limits(wall_time_s=0.2))

        result = lab.run("sleep", "0.5", timeout_s=self.patience_s)

        assert result.ok

    def test_a_timeout_of_a_year(self, sandbox: Lab) -> None:
        """It is more milliseconds than poll(2) takes, here and in what runs inside."""
        assert sandbox.run("true", timeout_s=366 * 86_400).ok
        assert sandbox.run("true").ok

    def test_ending_in_time_is_no_timeout(self, sandbox: Lab) -> None:
        result = sandbox.run("true", timeout_s=self.patience_s)

        assert result.ok
        assert not result.timed_out

    def test_one_timeout_leaves_the_others_alone(self, sandbox: Lab) -> None:
        other = sandbox.start("cat", stream_stdin=True)

        assert sandbox.run("sleep", "600", timeout_s=0.2).timed_out

        assert b"hello" == sandbox.finish(other, stdin=b"hello").stdout

    def test_kill_takes_the_whole_tree(self, sandbox: Lab) -> None:
        process = sandbox.start("sh", "-c", TREE + "sleep 600")
        read_until(process.stdout, b"ready", self.patience_s)

        process.kill()

        wait_done(process, self.patience_s)
        read_to_end(process.stdout, self.patience_s)
        assert (9, "caller") == (process.status().signal, process.status().killed_by)
        assert not process.status().timed_out

    def test_kill_again_and_after_the_end(self, sandbox: Lab) -> None:
        process = sandbox.start("sh", "-c", "exit 4")
        wait_done(process, self.patience_s)

        process.kill()
        process.kill()

        assert (4, None) == (process.status().exit_code, process.status().killed_by)

    def test_kill_leaves_the_others_alone(self, sandbox: Lab) -> None:
        other = sandbox.start("cat", stream_stdin=True)
        process = sandbox.start("sh", "-c", TREE)

        process.kill()

        assert b"hello" == sandbox.finish(other, stdin=b"hello").stdout

    def test_children_outlive_the_command_until_killed(self, sandbox: Lab) -> None:
        """A server left in the background is no reason to wait; kill still finds it."""
        process = sandbox.start("sh", "-c", TREE + "exit 0")

        wait_done(process, self.patience_s)
        assert 0 == process.status().exit_code
        read_until(process.stdout, b"ready\n", self.patience_s)
        assert not is_readable(process.stdout or 0)
        process.kill()

        assert b"" == read_to_end(process.stdout, self.patience_s)

    @pytest.mark.parametrize("signum", [2, 15])
    def test_a_signal_reaches_the_process(self, sandbox: Lab, signum: int) -> None:
        script = f"trap 'echo caught; exit 7' {signum}; echo ready; while :; do sleep 0.05; done"
        process = sandbox.start("sh", "-c", script)
        read_until(process.stdout, b"ready", self.patience_s)

        process.signal(signum)

        result = sandbox.finish(process)
        assert 7 == result.exit_code
        assert result.stdout.endswith(b"caught\n")
        assert result.killed_by is None

    def test_a_signal_that_ends_it_is_its_own(self, sandbox: Lab) -> None:
        process = sandbox.start("sleep", "600")

        process.signal(15)

        result = sandbox.finish(process)
        assert (None, 15) == (result.exit_code, result.signal)
        assert result.killed_by is None

    def test_setsid_keeps_the_exit_code_of_what_leads_nothing(self, sandbox: Lab) -> None:
        """setsid(1) forks where it leads a process group, and does not wait for what it forked."""
        run = sandbox.start(
            *("setsid", "sh", "-c", "sleep 0.2; echo said; exit 3"), session_leader=False
        )
        result = sandbox.finish(run)

        assert (3, b"said\n") == (result.exit_code, result.stdout)

    def test_the_group_of_what_leads_nothing_is_its_own(self, sandbox: Lab) -> None:
        others = [
            sandbox.start("sh", "-c", "echo ready; sleep 600", session_leader=leads)
            for leads in (True, False)
        ]
        script = "trap 'exit 7' 12; sh -c 'echo ready; exec sleep 600'; exit 8"
        grouped = sandbox.start("sh", "-c", script, session_leader=False)
        for each in (*others, grouped):
            read_until(each.stdout, b"ready", self.patience_s)

        grouped.signal(12, group=True)
        assert 7 == sandbox.finish(grouped).exit_code
        assert not sandbox.sh("kill -9 0", session_leader=False).ok, "its own group and no other"
        assert not any(is_readable(each.done) for each in others)
        for each in others:
            each.kill()
            assert "caller" == sandbox.finish(each).killed_by

    def test_all_of_what_leads_nothing_is_killed(self, sandbox: Lab) -> None:
        process = sandbox.start("sh", "-c", TREE + "sleep 600", session_leader=False)
        read_until(process.stdout, b"ready", self.patience_s)

        process.kill()

        wait_done(process, self.patience_s)
        read_to_end(process.stdout, self.patience_s)
        assert (9, "caller") == (process.status().signal, process.status().killed_by)

    def test_a_signal_after_the_end_does_nothing(self, sandbox: Lab) -> None:
        process = sandbox.start("true")
        wait_done(process, self.patience_s)

        process.signal(15)

        assert 0 == process.status().exit_code
