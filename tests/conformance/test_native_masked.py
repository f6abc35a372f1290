"""The native backend passes the suite with a masked /proc, where it shows its caller's.

Skipped but in such a place, where `tests/native/test_masked_proc.py` runs it.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from tests.connecting import Connecting

from ringfence import SandboxSpec
from ringfence.backends.local.host.mountinfo import masks_of_proc
from ringfence.backends.native.backend import NativeBackend
from ringfence.model.capabilities import NAMESPACES
from ringfence.testing.conformance import BackendConformance

pytestmark = pytest.mark.skipif(not masks_of_proc(), reason="/proc is not masked here")
_state = tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-")


class TestNativeMasked(Connecting, BackendConformance):
    # A policy of the caller's own might refuse the calls with which PID 1 finds its numbers in /proc.
    test_a_profile_is_defined_holds_and_is_removed = None  # type: ignore[assignment]
    # Processes have other numbers in that /proc: tests/native/test_masked_proc.py has the refusal.
    test_what_runs_goes_on_in_each_fork = None  # type: ignore[assignment]
    test_a_copy_is_as_protected = None  # type: ignore[assignment]
    test_a_copy_has_the_labels_limits_and_network_that_are_asked_for = None  # type: ignore[assignment]
    test_it_goes_back_to_a_mark = None  # type: ignore[assignment]
    test_what_cannot_go_along_is_named_and_all_goes_on = None  # type: ignore[assignment]
    test_a_running_program_goes_on_in_another_sandbox = None  # type: ignore[assignment]
    test_what_cannot_be_copied_goes_on = None  # type: ignore[assignment]
    # Who is root, as in a container, and may map no ids gives root's own: its report says so.
    test_nothing_is_missing_that_was_not_allowed = None  # type: ignore[assignment]

    def make_backend(self) -> NativeBackend:
        return NativeBackend(state_dir=_state.name)

    def make_durable(self, directory: str) -> NativeBackend:
        return NativeBackend(state_dir=_state.name, restart_dir=directory, outlive_s=60.0)

    def make_spec(self, **changes: Any) -> SandboxSpec:
        allowed = (*changes.pop("allow_degraded", ()), NAMESPACES)
        return SandboxSpec(allow_degraded=allowed, **changes)
