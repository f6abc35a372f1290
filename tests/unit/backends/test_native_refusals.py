"""What the native backend refuses before anything is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.features import require

from ringfence import Limits, NetworkPolicy, SandboxSpec
from ringfence.backends.native import attach, request
from ringfence.errors import Unsupported

pytestmark = pytest.mark.anyone

COUNTED = Limits(network_bytes=1 << 20)


def test_bytes_that_nobody_counts_are_not_limited() -> None:
    """On the host's own network no process of ours is between."""
    with pytest.raises(Unsupported) as refused:
        request.check(SandboxSpec(network=NetworkPolicy(mode="unrestricted"), limits=COUNTED))

    assert "limits.network_bytes" == refused.value.field
    request.check(SandboxSpec(network=NetworkPolicy(mode="limited"), limits=COUNTED))


@pytest.mark.parametrize(
    ("target", "is_writable"),
    [("/home/x", True), ("/home", True), ("/home2", False), ("/tmp/a/b", True), ("/", False)],
)
def test_what_is_beside_a_writable_tree_is_not_in_it(target: str, is_writable: bool) -> None:
    require("landlock")
    made = SimpleNamespace(
        profile=SimpleNamespace(landlock=True), landlock_writable=("/home", "/tmp")
    )

    assert is_writable == attach._is_writable(cast("Any", made), target)
