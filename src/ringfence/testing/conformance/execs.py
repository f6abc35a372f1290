"""Running commands: arguments, streams, results."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ...errors import InvalidRequest, LifecycleError
from ...model import capabilities as can
from ...model.execs.exec import ResourceUsage
from ..running import is_readable, read_until, wait_done
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from ..lab import Lab


class Execs(ConformanceBase):
    one_sandbox = True

    def test_success(self, sandbox: Lab) -> None:
        result = sandbox.run("true")

        assert result.ok
        assert (0, None) == (result.exit_code, result.signal)
        assert (b"", b"") == (result.stdout, result.stderr)

    @pytest.mark.parametrize("code", [1, 3, 126, 127, 255])
    def test_failure_is_a_result(self, sandbox: Lab, code: int) -> None:
        """A non-zero exit is reported as it is, never raised."""
        result = sandbox.sh(f"exit {code}")

        assert (code, None) == (result.exit_code, result.signal)
        assert not result.ok
        assert result.killed_by is None

    def test_stdout_and_stderr_are_apart(self, sandbox: Lab) -> None:
        result = sandbox.sh("echo out; echo err >&2")

        assert (b"out\n", b"err\n") == (result.stdout, result.stderr)

    def test_streams_can_be_opened_by_name(self, sandbox: Lab) -> None:
        """As scripts do that complain to /dev/stderr, and programs that are told to read /dev/stdin."""
        script = "echo said > /dev/stdout; echo wrong >> /dev/stderr; cat < /dev/stdin"
        result = sandbox.run("sh", "-c", script, stdin=b"given")

        assert (b"said\ngiven", b"wrong\n") == (result.stdout, result.stderr)

    def test_arguments_arrive_as_they_are(self, sandbox: Lab) -> None:
        """Argv is never joined into a shell string."""
        given = ("a b", "", "'", '"', "$HOME", "`id`", ";", "*", "new\nline", "-n", "ü漢", "\\")

        result = sandbox.run("printf", "%s|", *given)

        assert "|".join(given) + "|" == result.text

    def test_arguments_may_be_any_bytes(self, sandbox: Lab) -> None:
        result = sandbox.run("printf", "%s", os.fsdecode(b"\xff\xfe"))

        assert b"\xff\xfe" == result.stdout

    def test_output_is_bytes(self, sandbox: Lab) -> None:
        result = sandbox.run("printf", "\\377\\000\\n")

        assert b"\xff\0\n" == result.stdout

    def test_a_command_that_is_not_there(self, sandbox: Lab) -> None:
        assert 127 == sandbox.run("no-such-command").exit_code
        assert 127 == sandbox.run("/no/such/command").exit_code
        assert 127 == sandbox.run("./no-such-command").exit_code

    def test_a_command_that_cannot_be_run(self, sandbox: Lab) -> None:
        sandbox.put("plain", b"text", mode=0o644)

        assert 126 == sandbox.run("./plain").exit_code
        assert 126 == sandbox.run("/tmp").exit_code

    def test_a_script_with_a_shebang(self, sandbox: Lab) -> None:
        sandbox.put("script", b'#!/bin/sh\necho "got $1"\n', mode=0o755)

        assert "got it\n" == sandbox.run("./script", "it").text

    @pytest.mark.parametrize("signum", [9, 15])
    def test_a_signal_of_its_own(self, sandbox: Lab, signum: int) -> None:
        """Not mistaken for an exit code, nor for a kill of ours."""
        result = sandbox.sh(f"kill -{signum} $$")

        assert (None, signum) == (result.exit_code, result.signal)
        assert (False, False) == (result.timed_out, result.oom_killed)
        assert result.killed_by is None

    def test_no_stdin_is_end_of_file(self, sandbox: Lab) -> None:
        process = sandbox.start("cat")

        assert process.stdin is None
        assert b"" == sandbox.finish(process).stdout

    def test_empty_stdin_is_end_of_file(self, sandbox: Lab) -> None:
        assert b"" == sandbox.run("cat", stdin=b"").stdout

    def test_stdin_is_bytes_of_any_size(self, sandbox: Lab) -> None:
        given = os.urandom(self.big_bytes)

        assert given == sandbox.run("cat", stdin=given).stdout

    def test_stdin_that_nobody_reads(self, sandbox: Lab) -> None:
        assert sandbox.run("true", stdin=bytes(self.big_bytes)).ok

    def test_stdin_can_be_streamed(self, sandbox: Lab) -> None:
        """`cat` echoes each chunk before stdin is closed."""
        process = sandbox.start("cat", stream_stdin=True)
        assert process.stdin is not None

        os.write(process.stdin, b"one\n")
        assert b"one\n" == read_until(process.stdout, b"\n", self.patience_s)
        os.write(process.stdin, b"two\n")
        assert b"two\n" == read_until(process.stdout, b"\n", self.patience_s)
        process.close_stdin()
        process.close_stdin()

        assert sandbox.finish(process).ok

    def test_all_output_arrives(self, sandbox: Lab) -> None:
        given = os.urandom(self.big_bytes)
        sandbox.put("big", given)

        assert given == sandbox.run("cat", "big").stdout

    def test_output_beyond_the_cap_is_counted(self, sandbox: Lab) -> None:
        given = os.urandom(self.big_bytes)
        sandbox.put("big", given)

        result = sandbox.sh("cat big; cat big >&2", max_output_bytes=1000)

        assert (given[:1000], given[:1000]) == (result.stdout, result.stderr)
        assert result.truncated
        assert self.big_bytes - 1000 == result.stdout_dropped_bytes
        assert self.big_bytes - 1000 == result.stderr_dropped_bytes

    def test_execs_run_at_the_same_time(self, sandbox: Lab) -> None:
        """Each answers while all the others are running."""
        processes = [sandbox.start("cat", stream_stdin=True) for _ in range(8)]

        for i, process in enumerate(processes):
            assert process.stdin is not None
            os.write(process.stdin, b"%d\n" % i)
        for i, process in enumerate(processes):
            assert b"%d\n" % i == read_until(process.stdout, b"\n", self.patience_s)
        for process in processes:
            process.close_stdin()

        assert all(sandbox.finish(process).ok for process in processes)

    def test_every_exec_has_its_own_id(self, sandbox: Lab) -> None:
        ids = {sandbox.start("true").id for _ in range(3)}

        assert 3 == len(ids)

    def test_status_comes_after_the_end(self, sandbox: Lab) -> None:
        process = sandbox.start("cat", stream_stdin=True)

        assert not is_readable(process.done)
        with pytest.raises(LifecycleError):
            process.status()
        process.close_stdin()
        wait_done(process, self.patience_s)

        assert process.status() == process.status()
        assert is_readable(process.done)

    def test_status_outlives_the_fds(self, sandbox: Lab) -> None:
        process = sandbox.start("sh", "-c", "exit 5")
        wait_done(process, self.patience_s)

        process.close()
        process.close()

        assert 5 == process.status().exit_code

    def test_what_it_used_is_told_or_unknown(self, sandbox: Lab) -> None:
        result = sandbox.run("true")

        usage = result.resource_usage
        values = [getattr(usage, name) for name in ResourceUsage.__dataclass_fields__]
        assert all(value is None or value >= 0 for value in values)
        assert 0 <= result.duration_s <= self.patience_s

    def test_an_unknown_signal_is_refused(self, sandbox: Lab) -> None:
        process = sandbox.start("sleep", "600")

        with pytest.raises(InvalidRequest) as refusal:
            process.signal(4711)

        assert "signum" == refusal.value.field

    def test_resize_needs_a_terminal(self, sandbox: Lab) -> None:
        process = sandbox.start("sleep", "600")

        with pytest.raises(InvalidRequest):
            process.resize(24, 80)

    @needs(can.PTY)
    def test_a_terminal(self, sandbox: Lab) -> None:
        script = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo tty"

        process = sandbox.start("sh", "-c", script, pty=(24, 80))

        assert process.stderr is None
        process.resize(30, 100)
        assert b"tty\r\n" in read_until(process.stdout, b"\n", self.patience_s)
        assert sandbox.finish(process).ok

    @needs(can.PTY)
    def test_all_that_a_terminal_shows_comes_before_the_end(self, sandbox: Lab) -> None:
        """More than a terminal holds itself."""
        shown = b"0123456789abcdef" * 10_000
        sandbox.put("shown", shown)

        result = sandbox.run("cat", "shown", pty=(24, 80))

        assert shown == result.stdout
