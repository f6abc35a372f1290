"""Limits that bite: the sandbox stops, the host and the sandbox's owner do not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ...errors import ResourceExhausted, Unsupported
from ...model import capabilities as can
from ...model.limits import MIB, Limits
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from ...backends.protocol import Backend
    from ..lab import Lab
    from .base import MakeSandbox

FORKS = 'i=; while [ "$i" != %s ]; do sleep 600 & i=${i}x; done; echo all' % ("x" * 40)
FILES = 'i=; while [ "$i" != %s ]; do echo x > many/a$i; i=${i}x; done' % ("x" * 200)
DOUBLING = "x=0123456789abcdef; i=0; while [ $i -lt 22 ]; do x=$x$x; i=$((i+1)); done; echo all"


class LimitsThatBite(ConformanceBase):
    @needs(can.PIDS_LIMIT)
    def test_processes(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(limits=Limits(pids=32))
        process = lab.start("sh", "-c", FORKS, timeout_s=self.patience_s)

        result = lab.finish(process)
        counted = lab.sandbox.stats().pids

        assert b"all" not in result.stdout or not result.ok or result.stderr
        assert counted is None or counted <= 32
        process.kill()
        assert lab.run("true").ok

    @needs(can.PIDS_LIMIT)
    def test_processes_below_the_limit(self, make_sandbox: MakeSandbox) -> None:
        """The control: the same script is fine where there is room."""
        lab = make_sandbox(limits=Limits(pids=256))

        assert "all\n" == lab.sh(FORKS).text

    @needs(can.DISK_QUOTA)
    def test_bytes_on_disk(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(limits=Limits(disk_bytes=2 * MIB))
        with pytest.raises((ResourceExhausted, OSError)):
            lab.put("filler", bytes(4 * MIB))
        lab.files.remove("filler")

        lab.put("half", bytes(MIB))
        result = lab.sh("cat half half half > more")

        assert not result.ok
        lab.files.remove("more")
        lab.put("after", b"there is room again")

    def test_a_root_on_disk_or_a_reason(self, backend: Backend, make_sandbox: MakeSandbox) -> None:
        """Files outside mounts are on disk, as large as asked for; or the request is refused."""
        has_quota = backend.report().can(can.DISK_QUOTA)
        limits = Limits(disk_bytes=32 * MIB, inodes=2048) if has_quota else Limits()
        try:
            lab = make_sandbox(disk_root=True, limits=limits)
        except Unsupported as exc:
            refused = exc.field, bool(exc.message)
        else:
            _check_files_on_disk(lab, has_quota=has_quota)
            refused = "disk_root", True
        assert refused == ("disk_root", True)

    @needs(can.INODE_QUOTA)
    def test_inodes(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(limits=Limits(inodes=256))
        lab.files.make_dir("many")
        lab.sh(FILES)  # nearly all of them at once

        with pytest.raises((ResourceExhausted, OSError)):
            _put_many(lab, 100)
        lab.files.remove("many", recursive=True)

        lab.put("after", b"there is room again")

    @needs(can.MEMORY_LIMIT)
    def test_memory(self, make_sandbox: MakeSandbox) -> None:
        """Doubling 16 bytes 22 times makes 64 MiB, and takes as much again to make the last."""
        lab = make_sandbox(limits=Limits(memory_bytes=64 * MIB))

        result = lab.sh(DOUBLING, timeout_s=self.patience_s)

        assert not result.ok
        assert b"all" not in result.stdout
        assert not result.timed_out
        assert result.oom_killed == (result.killed_by == "oom")
        assert lab.run("true").ok

    @needs(can.MEMORY_LIMIT)
    def test_memory_below_the_limit(self, make_sandbox: MakeSandbox) -> None:
        """The control: the same script is fine where there is room."""
        lab = make_sandbox(limits=Limits(memory_bytes=2048 * MIB))

        result = lab.sh(DOUBLING, timeout_s=self.patience_s)

        assert "all\n" == result.text

    @needs(can.OPEN_FILES_LIMIT)
    def test_open_files(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(limits=Limits(open_files=99))

        assert "99\n" == lab.sh("ulimit -n").text

    @needs(can.CPU_LIMIT)
    def test_cpu_time(self, make_sandbox: MakeSandbox) -> None:
        """A loop on a tenth of a core uses a small part of the time that passes."""
        lab = make_sandbox(limits=Limits(cpus=0.1))
        before_s = time.monotonic()

        result = lab.sh("while :; do :; done", timeout_s=2)

        passed_ns = (time.monotonic() - before_s) * 1e9
        used_ns = result.resource_usage.cpu_ns
        assert result.timed_out
        assert used_ns is None or used_ns < passed_ns / 2


def _put_many(lab: Lab, count: int) -> None:
    for i in range(count):
        lab.put(f"many/{i}", b"")


def _check_files_on_disk(lab: Lab, *, has_quota: bool) -> None:
    assert lab.sh("head -c 20000000 /dev/zero > f && wc -c < f").text.strip() == "20000000"
    if has_quota and "disk_quota" not in lab.sandbox.stats().degraded:
        assert not lab.sh("head -c 30000000 /dev/zero > g").ok
    lab.files.remove("f")
    lab.put("after", b"it is still there")
