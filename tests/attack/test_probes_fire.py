"""The gravest probes: each fires in a plain process of the host, where nothing stops it."""

from __future__ import annotations

from ringfence.attack.canaries import Canaries
from ringfence.attack.inside import registered
from ringfence.attack.probes.kit import ESCAPED, HOST
from ringfence.attack.result import CRITICAL
from tests.attack.controls import Controls

GRAVE = [
    id for id, each in registered().items() if (CRITICAL, HOST) == (each.severity, each.control)
]


def test_they_fire_on_the_host() -> None:
    assert len(GRAVE) >= 5
    with Canaries() as canaries:
        controls = Controls(canaries)
        try:
            found = controls.on_host(GRAVE)
        finally:
            controls.close()
    assert {} == {id: said for id, said in found.items() if ESCAPED != said[0]}
