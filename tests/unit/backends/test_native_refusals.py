"""What the native backend refuses before anything is started."""

from __future__ import annotations

import pytest

from ringfence import Limits, NetworkPolicy, SandboxSpec
from ringfence.backends.native import request
from ringfence.errors import Unsupported

pytestmark = pytest.mark.anyone

COUNTED = Limits(network_bytes=1 << 20)


def test_bytes_that_nobody_counts_are_not_limited() -> None:
    """On the host's own network no process of ours is between."""
    with pytest.raises(Unsupported) as refused:
        request.check(SandboxSpec(network=NetworkPolicy(mode="unrestricted"), limits=COUNTED))

    assert "limits.network_bytes" == refused.value.field
    request.check(SandboxSpec(network=NetworkPolicy(mode="limited"), limits=COUNTED))
