"""The probes against gVisor: what says something of it finds no way out, the rest is counted by name.

Here run those from inside, and those from outside that are about files, memory and processes of one
sandbox. `ringfence doctor --attack --backend gvisor` runs all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence.attack import inside, outside, runner
from ringfence.attack.canaries import Canaries
from ringfence.attack.lab import Lab
from ringfence.attack.probes.kit import COPIED, PLAIN
from ringfence.attack.result import ESCAPED, HELD, NOT_APPLICABLE, ProbeResult
from ringfence.attack.scope import why_not
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.model import capabilities as can
from tests.attack.test_attack import KNOWN
from tests.features import require

pytestmark = pytest.mark.full

EVERY = {**inside.registered(), **outside.registered()}
FROM_OUTSIDE = (
    *("files.download-links", "files.set-id-file-mapped", "resources.memory-private"),
    *("files.working-directory", "lifecycle.timeout-regrouped", "lifecycle.timeout-stopped"),
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    require("user namespaces")
    require("runsc")
    with Canaries() as canaries:
        backend = GvisorBackend()
        try:
            yield Lab(backend, canaries)
        finally:
            backend.close()


@pytest.fixture(scope="module")
def found(lab: Lab) -> dict[str, ProbeResult]:
    results = runner.attack_from_inside(lab)
    results += [outside.registered()[id].attack(lab) for id in FROM_OUTSIDE]
    return {result.id: result for result in results}


def test_nothing_escapes(found: dict[str, ProbeResult]) -> None:
    escaped = [f"{r.severity} {r.id}: {r.evidence}" for r in found.values() if r.breaks]

    assert [] == escaped
    assert {id for id, result in found.items() if ESCAPED == result.status} <= KNOWN


def test_a_process_that_goes_on_in_a_copy_is_as_confined(lab: Lab) -> None:
    """A copy is restored from the memory of its source, and then each probe finds what it finds there."""
    if not lab.backend.report().can(can.MEMORY_SNAPSHOT):
        pytest.skip("gVisor saves no memory here")
    inside_of_it = {
        id: probe for id, probe in inside.registered().items() if not why_not(id, "gvisor")
    }
    chosen = [id for id, probe in inside_of_it.items() if runner._belongs(probe, COPIED)]

    copied, plain = (runner._run(lab, kind, chosen) for kind in (COPIED, PLAIN))

    assert {*chosen} == {*copied} == {*plain}
    differing = {id: (plain[id], copied[id]) for id in chosen if plain[id][0] != copied[id][0]}
    assert {} == differing
    assert 90 <= sum(HELD == status for status, _ in copied.values())


def test_most_probes_say_something_and_each_is_counted(found: dict[str, ProbeResult]) -> None:
    statuses = [result.status for result in found.values()]

    assert set(inside.registered()) <= set(found)
    assert 150 <= statuses.count(HELD)
    left_out = {id for id, result in found.items() if NOT_APPLICABLE == result.status}
    assert {id for id in inside.registered() if why_not(id, "gvisor")} == left_out
    assert all(found[id].evidence for id in left_out)


def test_a_shared_kernel_is_attacked_with_every_probe() -> None:
    assert not [id for id in EVERY if why_not(id, "native") or why_not(id, "docker")]


def test_no_probe_of_the_host_s_files_is_left_out() -> None:
    """What a guest could do to the host's files, other sandboxes or the network is always tried."""
    left_out = {id for id in EVERY if why_not(id, "gvisor")}

    for area in (
        "files.read-only",
        "files.protected",
        "leaks.env",
        "network.loopback",
        "lifecycle",
    ):
        assert not [id for id in left_out if id.startswith(area)], area
