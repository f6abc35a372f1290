"""Forks, marks and rewinds of what runs, by the same calls whatever the backend does for them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from ...backends import optional
from ...errors import Unsupported
from ...model import capabilities as can
from ...sandbox.sync import Sandbox
from .base import ConformanceBase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...backends.protocol import Backend
    from ...sandbox.process import Process

_COUNTS = "n=5; while read -r line; do n=$((n+1)); echo $n; done; echo end"
_OWN = "head -c 8 /dev/urandom"
_POWERS = """
for each in /proc/[0-9]*; do
    tr '\\0' ' ' < $each/cmdline | grep -q '^sh -c n=5' &&
        grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp:)' $each/status
done
true
"""


class LiveForks(ConformanceBase):
    """A shell that counts the lines that it reads has its number in its memory only."""

    @pytest.fixture
    def origin(self, backend: Backend) -> Iterator[Sandbox]:
        report = backend.report()
        with Sandbox.create(self.make_spec(), backend=backend) as made:
            inner = made._inner
            if not isinstance(inner, optional.Forkable | optional.Continuable):
                pytest.skip(f"{type(inner).__name__} copies no processes")
            if isinstance(inner, optional.Continuable) and not report.can(can.MEMORY_SNAPSHOT):
                made.start(["sleep", "1000"])
                with pytest.raises(Unsupported):
                    made.fork(processes="required")
                assert made.exec(["true"]).ok
                pytest.skip("refused, as the backend's report says")
            yield made

    @pytest.fixture
    def limits(self, backend: Backend) -> dict[str, Any]:
        """Limits that the host keeps, as a fork may have others."""
        more = {"cpus": 0.5} if backend.report().can(can.CPU_LIMIT) else {}
        return {"network_bytes": 1 << 20, **more}

    def test_what_runs_goes_on_in_each_fork(self, origin: Sandbox) -> None:
        counter = self._counter(origin)
        origin.files.write("file", "same")
        with ExitStack() as stack:
            forks = [stack.enter_context(each) for each in origin.fork(2, processes="required")]
            for number, fork in enumerate(forks):
                report = fork.fork_report
                assert report is not None
                assert (origin.id, True, "") == (report.parent, report.has_processes, report.reason)
                told = [(each.exec_id, each.is_reseeded) for each in report.copies]
                assert [(id, False) for id in report.processes] == told != []
                assert (origin.id,) == fork.lineage()
                copy = self.copy_of(fork, counter)
                for _ in range(number):
                    self._next(copy)
                assert f"{7 + number}\n" == self._next(copy)
                fork.files.write("file", str(number))
            assert "7\n" == self._next(counter)
            assert "same" == origin.files.read_text("file")
            assert 3 == len({each.shell(_OWN).stdout for each in (origin, *forks)})
            (again,) = forks[1].fork(processes="required")
            assert "9\n" == self._next(self.copy_of(stack.enter_context(again), counter))
            ended = self.copy_of(forks[0], counter)
            assert ended.stdin is not None
            ended.stdin.close()
            assert ended.wait(self.patience_s).stdout.endswith(b"end\n")
            self.copy_of(forks[1], counter).kill()
            assert "caller" == self.copy_of(forks[1], counter).wait(self.patience_s).killed_by
        assert counter.stdin is not None
        counter.stdin.close()
        assert counter.wait(self.patience_s).ok

    def test_a_copy_is_as_protected(self, origin: Sandbox) -> None:
        """Its protections are read back from the kernel, and so is what the copied process may do."""
        counter = self._counter(origin)
        (fork,) = origin.fork(processes="required")
        with fork:
            protections = [
                {each.name: each.status for each in made.protections()} for made in (origin, fork)
            ]
            assert protections[0] == protections[1]
            assert protections[0], "it reports some"
            assert "7\n" == self._next(self.copy_of(fork, counter)), "it goes on"
            powers = [made.shell(_POWERS).stdout_text for made in (origin, fork)]
            assert powers[0] == powers[1]
            assert "CapEff" in powers[0], "the shell was found"

    def test_a_copy_has_the_labels_limits_and_network_that_are_asked_for(
        self, origin: Sandbox, limits: dict[str, Any]
    ) -> None:
        counter = self._counter(origin)
        (fork,) = origin.fork(processes="required", labels={"branch": "one"}, limits=limits)
        with fork:
            assert "one" == fork.spec.labels["branch"]
            assert "7\n" == self._next(self.copy_of(fork, counter))
            assert limits == {name: getattr(fork.spec.limits, name) for name in limits}
        assert (None, None) == (origin.spec.limits.cpus, origin.spec.limits.network_bytes)
        if not self.is_whole(origin):
            return
        for field, change in (
            ("limits.inodes", {"limits": {"inodes": 5000}}),
            ("secrets", {"secrets": {"s": "v"}}),
        ):
            with pytest.raises(Unsupported, match=field):
                origin.fork(processes="required", **change)
            (fork,) = origin.fork(**change)
            with fork:
                made = fork.fork_report
                assert made is not None
                assert (False, True) == (made.has_processes, field in made.reason)
        assert "7\n" == self._next(counter), "of the source, which has not been saved"

    def test_it_goes_back_to_a_mark(self, origin: Sandbox) -> None:
        counter, name = self._counter(origin), origin.id
        origin.files.write("file", "before")
        with origin.mark(processes="required") as mark:
            assert "7\n" == self._next(counter)
            for _ in range(2):
                origin.files.write("file", "after")
                origin.rewind(mark)
                assert (name, "before") == (origin.id, origin.files.read_text("file"))
                assert "7\n" == self._next(origin.process(counter.id))
            (fork,) = origin.fork(at=mark)
            with fork:
                assert "7\n" == self._next(fork.process(counter.id))
        assert "8\n" == self._next(origin.process(counter.id))

    def test_what_cannot_go_along_is_named_and_all_goes_on(self, origin: Sandbox) -> None:
        counter = self._counter(origin)
        terminal = origin.start(["sleep", "1000"], pty=(24, 80))
        with pytest.raises(Unsupported, match=terminal.id):
            origin.fork(processes="required")
        (fork,) = origin.fork()
        with fork:
            report = fork.fork_report
            assert report is not None
            assert terminal.id in report.reason
        assert "7\n" == self._next(counter)
        assert terminal.running

    def is_whole(self, origin: Sandbox) -> bool:
        """Return whether all of it is saved, and not single processes."""
        return isinstance(origin._inner, optional.Continuable)

    def copy_of(self, fork: Sandbox, process: Process) -> Process:
        """Find the copy of a process in a fork; on a server it has an id of its own."""
        report = fork.fork_report
        assert report is not None
        assert (process.id,) == report.processes
        return fork.process(process.id)

    def _counter(self, origin: Sandbox) -> Process:
        counter = origin.start(["sh", "-c", _COUNTS], stream_stdin=True)
        assert "6\n" == self._next(counter)
        return counter

    def _next(self, process: Process) -> str:
        """Give a line, and read one."""
        assert process.stdin is not None
        process.stdin.write(b"\n")
        return next(iter(process.stdout)).decode()
