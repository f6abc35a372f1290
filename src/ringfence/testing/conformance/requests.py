"""Requests that make no sense, and requests this backend cannot meet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from ...errors import ImageNotFound, InvalidRequest, Unsupported
from ...model import capabilities as can
from ...model.execs.exec import ExecRequest
from ...model.limits import Limits
from ...model.mount import Mount
from .base import ConformanceBase

if TYPE_CHECKING:
    from ...backends.protocol import Backend
    from ..lab import Lab
    from .base import MakeSandbox

BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"argv": ()}, "argv"),
    ({"argv": "true"}, "argv"),
    ({"argv": ("",)}, "argv[0]"),
    ({"argv": ("true", "a\0b")}, "argv[1]"),
    ({"argv": ("true", 7)}, "argv[1]"),
    ({"env": {"1A": "x"}}, "env.1A"),
    ({"env": {"A-B": "x"}}, "env.A-B"),
    ({"env": {"": "x"}}, "env"),
    ({"env": {"A": "x\0"}}, "env.A"),
    ({"cwd": ""}, "cwd"),
    ({"cwd": "a\0b"}, "cwd"),
    ({"user": "../root"}, "user"),
    ({"stdin": "text"}, "stdin"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"timeout_s": -1}, "timeout_s"),
    ({"timeout_s": math.nan}, "timeout_s"),
    ({"timeout_s": math.inf}, "timeout_s"),
    ({"timeout_s": True}, "timeout_s"),
    ({"max_output_bytes": -1}, "max_output_bytes"),
    ({"pty": (0, 80)}, "pty"),
    ({"session_leader": 1}, "session_leader"),
    ({"pty": (24, 80), "session_leader": False}, "session_leader"),
]
BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"id": "  "}, "id"),
    ({"id": "../up"}, "id"),
    ({"id": "x" * 64}, "id"),
    ({"env": {"A=B": "x"}}, "env.A=B"),
    ({"tier": "medium"}, "tier"),
    ({"profile": "no-such-profile"}, "profile"),
    ({"template": "no-such-template"}, "template"),
    ({"user": "no-such-user"}, "user"),
    ({"workdir": "relative"}, "workdir"),
    ({"workdir": "/a/../b"}, "workdir"),
    ({"memory_dir": "relative"}, "memory_dir"),
]
BAD_TARGETS = [
    "", "relative", "/", "//", "/a/../b", "/a\0b", "/proc", "/proc/self", "/sys/fs", "/dev/shm",
    "/usr", "/usr/", "/bin", "/sbin", "/etc", "/lib", "/lib64", "/mnt", "/mnt/session",
]  # fmt: skip
BAD_LIMITS: list[tuple[str, Any]] = [
    ("wall_time_s", 0),
    ("wall_time_s", math.nan),
    ("wall_time_s", 1e30),
    ("cpus", -1),
    ("cpus", math.inf),
    ("cpus", "2"),
    ("memory_bytes", -1),
    ("memory_bytes", 1),
    ("memory_bytes", 1.5),
    ("memory_bytes", 2**80),
    ("idle_timeout_s", -0.1),
    ("pids", 0),
    ("pids", True),
    ("disk_bytes", -1),
    ("inodes", 0),
    ("open_files", 10**12),
    ("output_bytes", -1),
    ("io_bytes_per_s", 0),
    ("network_bytes", -1),
]
_SOME: dict[str, Any] = {
    "cpus": 1.0,
    "memory_bytes": 2**28,
    "pids": 64,
    "disk_bytes": 2**26,
    "inodes": 4096,
    "open_files": 256,
    "io_bytes_per_s": 2**30,
    "network_bytes": 2**30,
}


class Requests(ConformanceBase):
    one_sandbox = True

    @pytest.mark.parametrize(("change", "field"), BAD_REQUESTS)
    def test_a_bad_exec_request(self, sandbox: Lab, change: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            sandbox.sandbox.start(ExecRequest(**{"argv": ("true",), **change}))

        assert field == refusal.value.field

    @pytest.mark.parametrize(("change", "field"), BAD_SPECS)
    def test_a_bad_spec(
        self, make_sandbox: MakeSandbox, change: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            make_sandbox(**change)

        assert field == refusal.value.field

    @pytest.mark.parametrize("target", BAD_TARGETS)
    def test_a_bad_mount_target(self, make_sandbox: MakeSandbox, target: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            make_sandbox(mounts=(Mount(target, "data"),))

        assert "target" == refusal.value.field

    @pytest.mark.parametrize(("name", "value"), BAD_LIMITS)
    def test_a_bad_limit(self, make_sandbox: MakeSandbox, name: str, value: Any) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            make_sandbox(limits=Limits(**{name: value}))

        assert name == refusal.value.field

    def test_a_tier_it_does_not_serve(self, backend: Backend, make_sandbox: MakeSandbox) -> None:
        """Never a silent fallback to another tier."""
        for tier in {"light", "strong"}.difference(backend.report().tiers):
            with pytest.raises(Unsupported) as refusal:
                make_sandbox(tier=tier)

            assert "tier" == refusal.value.field

    def test_an_image_that_is_not_there(self, backend: Backend, make_sandbox: MakeSandbox) -> None:
        """The host's programs are never shown instead, nor where there are no images at all."""
        refused = ImageNotFound if backend.report().can(can.IMAGE) else Unsupported
        with pytest.raises(refused) as refusal:
            make_sandbox(image="no-such-image:ever")

        assert "image" == refusal.value.field

    @pytest.mark.parametrize("name", list(can.LIMITED_BY))
    def test_a_limit_holds_or_is_refused(
        self, backend: Backend, make_sandbox: MakeSandbox, name: str
    ) -> None:
        """A limit that cannot be enforced is refused; allowed by name, it is reported as degraded."""
        capability = can.LIMITED_BY[name]
        limits = Limits(**{name: _SOME[name]})
        if backend.report().can(capability):
            assert make_sandbox(limits=limits).run("true").ok
            return

        with pytest.raises(Unsupported) as refusal:
            make_sandbox(limits=limits)

        assert f"limits.{name}" == refusal.value.field
        self.refusals.update([capability])
        try:
            lab = make_sandbox(limits=limits, allow_degraded=(capability,))
        except Unsupported:
            return  # refusing all the same is always honest
        assert capability in lab.sandbox.stats().degraded
