"""The in-memory backend passes the suite first: whole, and with capabilities switched off."""

from __future__ import annotations

import pytest

from ringfence.backends.fake import FakeBackend
from ringfence.model import capabilities as can
from ringfence.testing.claimed import ClaimingBackend
from ringfence.testing.conformance import BackendConformance

pytestmark = [pytest.mark.anyone, pytest.mark.full]


class TestFake(BackendConformance):
    def make_backend(self) -> FakeBackend:
        return FakeBackend()


class TestFakeClaimed(BackendConformance):
    """What was built ahead and then claimed is like any other sandbox."""

    def make_backend(self) -> ClaimingBackend:
        return ClaimingBackend(FakeBackend())


class TestFakeThatCanDoLittle(BackendConformance):
    """Every refusal path of the suite is walked."""

    def make_backend(self) -> FakeBackend:
        return FakeBackend(
            without=(
                can.MOUNT,
                can.ATTACH,
                can.PROTECTED_PATHS,
                can.SNAPSHOT,
                can.RESTORE,
                can.SUSPEND,
                can.RESUME,
                can.PREWARM,
                can.NETWORK_CHANGE,
                can.PIDS_LIMIT,
                can.DISK_QUOTA,
                can.INODE_QUOTA,
            )
        )
