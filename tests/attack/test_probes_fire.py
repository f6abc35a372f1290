"""Probes fire where nothing stops them: in a plain process of the host, and the gravest ones in root's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence.attack.canaries import Canaries
from ringfence.attack.inside import registered
from ringfence.attack.probes.kit import ESCAPED, HOST, HOST_ROOT
from ringfence.attack.result import CRITICAL
from tests.attack.controls import Controls
from tests.attack.test_attack import GAINS, LACKING, has_every_capability, own_status

OF_HOST = [id for id, each in registered().items() if HOST == each.control]
OF_ROOT = [
    id
    for id, each in registered().items()
    if (CRITICAL, HOST_ROOT) == (each.severity, each.control)
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Controls]:
    with Canaries() as canaries:
        controls = Controls(canaries)
        yield controls
        controls.close()


def silent(plain: Controls, probes: list[str]) -> dict[str, str]:
    """Those that found nothing, although this host has what they try."""
    found = plain.on_host(probes)
    lacking = {*GAINS} if 1 == own_status("NoNewPrivs") else set()
    return {
        id: evidence
        for id, (status, evidence) in found.items()
        if ESCAPED != status and not LACKING.search(evidence) and id not in lacking
    }


def test_on_the_host_each_fires(plain: Controls) -> None:
    assert len(OF_HOST) > 50
    assert {} == silent(plain, OF_HOST)


@pytest.mark.root
def test_as_root_of_the_host_the_gravest_fire(plain: Controls) -> None:
    if not has_every_capability():
        pytest.skip("this root lacks a capability")
    assert len(OF_ROOT) > 5
    assert {} == silent(plain, OF_ROOT)
