"""Reports of a backend about itself and its sandboxes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ...errors import LifecycleError
from ...model import capabilities as can
from ...model.capabilities import BackendReport
from ...model.granted import SandboxCapabilities
from ...model.mount import READ_WRITE, Mount
from ...model.stats import SandboxStats
from ..running import read_until
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ...backends.protocol import Backend
    from ...model.capabilities import Protection
    from ..lab import Lab
    from .base import MakeSandbox

_COUNTED = (
    "cpu_ns", "memory_bytes", "peak_memory_bytes", "pids", "io_read_bytes", "io_write_bytes",
    "disk_bytes", "inodes", "uptime_s",
)  # fmt: skip


class Reports(ConformanceBase):
    def test_the_report(self, backend: Backend) -> None:
        report = backend.report()

        assert backend.name == report.backend
        assert report.available
        assert report.tiers
        assert report == BackendReport.from_json(json.loads(json.dumps(report.to_json())))

    def test_capabilities_are_named_once_and_lacks_explained(self, backend: Backend) -> None:
        capabilities = backend.report().capabilities

        names = [each.name for each in capabilities]
        assert sorted(set(names)) == sorted(names)
        assert [] == [each.name for each in capabilities if not each.available and not each.reason]

    def test_protections_are_explained(self, backend: Backend, sandbox: Lab) -> None:
        _check_protections(backend.report().protections)
        _check_protections(sandbox.sandbox.protections())

    def test_nothing_is_missing_that_was_not_allowed(self, sandbox: Lab) -> None:
        """A sandbox that started without leave to degrade has all of its protections."""
        allowed = set(self.make_spec().allow_degraded)

        found = sandbox.sandbox.protections()

        missing = {each.name for each in found if each.status == can.MISSING}
        assert "*" in allowed or missing <= allowed

    def test_stats(self, sandbox: Lab) -> None:
        sandbox.run("true")
        process = sandbox.start("sh", "-c", "echo ready; sleep 600")
        read_until(process.stdout, b"ready", self.patience_s)

        stats = sandbox.sandbox.stats()

        assert sandbox.state == stats.state
        assert 2 == stats.execs
        assert stats.pids is None or stats.pids >= 1
        values = [getattr(stats, name) for name in _COUNTED]
        assert all(value is None or value >= 0 for value in values)
        assert stats == SandboxStats.from_json(json.loads(json.dumps(stats.to_json())))

    def test_stats_only_grow_where_they_count(self, sandbox: Lab) -> None:
        before = sandbox.sandbox.stats()
        sandbox.put("file", bytes(100_000))
        sandbox.sh("i=; while [ $i. != xxxxxxxxxxxxxxxx. ]; do i=${i}x; done")
        after = sandbox.sandbox.stats()

        for name in ("cpu_ns", "peak_memory_bytes", "disk_bytes", "inodes", "uptime_s"):
            was, now = getattr(before, name), getattr(after, name)
            assert was is None or now is None or was <= now

    def test_what_it_says_it_may_do_it_may_do(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(env={"A": "1"})

        found = lab.sandbox.granted()

        assert lab.sandbox.session.id == found.id
        assert lab.sandbox.session.backend == found.backend
        assert found.can_write_filesystem == bool(found.writable_paths)
        for path in found.writable_paths:
            lab.put(f"{path}/probe", b"x")
        assert (None, None) == (found.created_at, found.time_remaining_ms)
        again = SandboxCapabilities.from_json(json.loads(json.dumps(found.to_json())))
        assert found == again

    @needs(can.MOUNT)
    def test_what_is_read_only_is_not_said_to_be_writable(
        self, make_sandbox: MakeSandbox, tmp_path: Path
    ) -> None:
        mounts = (Mount("/mnt/shown", str(tmp_path)), Mount("/mnt/own", "", READ_WRITE))

        found = make_sandbox(mounts=mounts).sandbox.granted()

        assert "/mnt/own" in found.writable_paths
        assert "/mnt/shown" not in found.writable_paths
        assert not found.is_persistent

    @needs(can.SUSPEND, can.RESUME)
    def test_what_is_suspended_is_not_asked(self, sandbox: Lab) -> None:
        sandbox.sandbox.suspend()
        with pytest.raises(LifecycleError):
            sandbox.sandbox.granted()

        sandbox.sandbox.resume()
        assert sandbox.sandbox.granted().id

    @needs(can.SECRETS)
    def test_secrets_are_not_shown(self, make_sandbox: MakeSandbox) -> None:
        lab = make_sandbox(secrets={"TOKEN": "hunter2-hunter2"})

        shown = [lab.sandbox.session, lab.sandbox.session.to_json(admin=True)]

        assert "hunter2-hunter2" not in repr(shown)
        assert "hunter2-hunter2" not in lab.run("env").text


def _check_protections(protections: Sequence[Protection]) -> None:
    names = [each.name for each in protections]
    assert names
    assert sorted(set(names)) == sorted(names)
    assert [] == [each.name for each in protections if each.status != can.ENFORCED and not each.why]
