"""The bundled probes find no way out; each one is shown to fire where the protection is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence.attack import inside, outside, runner
from ringfence.attack.inside import archive
from ringfence.attack.lab import Lab
from ringfence.attack.outside.register import OutsideProbe
from ringfence.attack.probes.kit import COPIED, HOST_ROOT, PLAIN, Probe
from ringfence.attack.result import (
    AREAS,
    ESCAPED,
    HELD,
    INCONCLUSIVE,
    LOW,
    SEVERITIES,
    STATUSES,
    ProbeResult,
    count_by_area,
)
from ringfence.errors import NetworkPolicyError
from tests.attack.controls import GROUPS, ControlMissingError, Controls

pytestmark = pytest.mark.full

INSIDE = inside.registered()
OUTSIDE = outside.registered()
EVERY: dict[str, Probe | OutsideProbe] = {**INSIDE, **OUTSIDE}

# What a shared kernel shows to everybody; docs/explanation/isolation.md says so.
KNOWN = {
    "files.protected-and-replaced",
    "files.set-id-file-mapped",
    "files.shared-lock",
    "leaks.boot-id",
    "leaks.kernel-command-line",
    "leaks.mount-sources",
}
GAINS = {"identity.no-new-privs", "identity.setuid-program"}
# Under a control, these words of a probe say that this kernel or host lacks what it tries.
LACKING = re.compile(
    r"ENOSYS|ENOENT|ENODEV|ENXIO|EOPNOTSUPP|ENOTSUP|EAFNOSUPPORT|EPROTONOSUPPORT|ESOCKTNOSUPPORT"
    r"|this host has|gave nothing|not a call of this machine|refused by the kernel"
)


# -- the attack --------------------------------------------------------------------------------


def test_nothing_escapes(attack: list[ProbeResult]) -> None:
    escaped = [f"{r.severity} {r.id}: {r.evidence}" for r in attack if r.breaks]

    assert [] == escaped


def test_only_what_is_known_shows_through_the_shared_kernel(attack: list[ProbeResult]) -> None:
    shown = {result.id for result in attack if ESCAPED == result.status}

    assert shown <= KNOWN
    assert {LOW} >= {EVERY[id].severity for id in KNOWN}


def test_every_probe_is_reported_once(attack: list[ProbeResult]) -> None:
    assert sorted(EVERY) == sorted(result.id for result in attack)


def test_every_result_can_be_read_by_program(attack: list[ProbeResult]) -> None:
    for result in attack:
        form = result.to_json()
        assert form["area"] in AREAS
        assert form["severity"] in SEVERITIES
        assert form["status"] in STATUSES
        assert form["evidence"], result.id
        assert form["description"].endswith("."), result.id
        assert form["control"], result.id


def test_every_area_is_attacked(attack: list[ProbeResult]) -> None:
    assert set(AREAS) == set(count_by_area(attack))
    assert 120 <= len(attack)


def test_few_probes_end_without_a_finding(attack: list[ProbeResult]) -> None:
    """A probe that breaks must not pass for a closed door: each says why it cannot tell."""
    undecided = [r for r in attack if INCONCLUSIVE == r.status]

    broken = [
        f"{r.id}: {r.evidence}" for r in undecided if re.search(r"Error\b|no answer", r.evidence)
    ]
    assert [] == broken
    assert len(undecided) < 15


def test_copies_of_processes_are_attacked_as_well(controls: Controls) -> None:
    """Inside a process that goes on in a fork, each probe finds what it finds in a new sandbox."""
    lab = controls.lab()
    chosen = [id for id in INSIDE if runner._belongs(INSIDE[id], COPIED)]
    if not (found := runner._run(lab, COPIED, chosen)):
        pytest.skip("no process can be copied here")
    wanted = runner._run(lab, PLAIN, chosen)
    kinds = [{id: status for id, (status, _) in each.items()} for each in (found, wanted)]
    assert kinds[1] == kinds[0]


def test_where_no_policy_can_be_enforced_the_rest_is_attacked(
    controls: Controls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_lab: Lab) -> None:
        raise NetworkPolicyError("this kernel has no nf_tables")

    monkeypatch.setattr(Lab, "limited", refused)
    chosen = {id: INSIDE[id] for id in ("network.loopback-v4", "network.smuggle-host")}
    monkeypatch.setattr(runner, "registered", lambda: chosen)

    found = {result.id: result for result in runner.attack_from_inside(controls.lab())}

    assert [HELD, INCONCLUSIVE] == [found[id].status for id in chosen]
    assert "no nf_tables" in found["network.smuggle-host"].evidence


def test_the_token_never_enters_a_sandbox(controls: Controls) -> None:
    """A probe that finds it has read it from the host."""
    text = inside.request(list(INSIDE), controls.canaries.context)

    assert controls.canaries.token not in text
    assert controls.canaries.token[::-1] not in text


def test_probes_travel_without_ringfence() -> None:
    """They run under any Python of a sandbox, where Ringfence is not installed."""
    assert b"from ringfence" not in archive()
    assert b"import ringfence" not in archive()


# -- the controls ------------------------------------------------------------------------------


def with_control(probes: dict[str, Probe] | dict[str, OutsideProbe]) -> list[str]:
    return [id for id, probe in probes.items() if not probe.control.startswith("none: ")]


@pytest.mark.parametrize("id", with_control(INSIDE))
def test_fires_without_the_protection(id: str, controls: Controls) -> None:
    try:
        status, evidence = controls.outcome(INSIDE[id])
    except ControlMissingError as exc:
        pytest.skip(str(exc))
    if ESCAPED != status and LACKING.search(evidence):
        pytest.skip(f"this kernel or host lacks it: {evidence}")
    if ESCAPED != status and id in GAINS and 1 == own_status("NoNewPrivs"):
        pytest.skip("this process may gain nothing itself: no_new_privs")
    if ESCAPED != status and HOST_ROOT == INSIDE[id].control and not has_every_capability():
        pytest.skip(f"this root lacks a capability: {evidence}")

    assert ESCAPED == status, evidence


def has_every_capability() -> bool:
    """Root of a container, and of some machines, has not."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    return (1 << last + 1) - 1 == own_status("CapEff")


def own_status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0], 16)


@pytest.mark.parametrize("id", with_control(OUTSIDE))
def test_fires_from_outside_without_the_protection(id: str, unprotected: Lab) -> None:
    result = OUTSIDE[id].attack(unprotected)

    assert ESCAPED == result.status, result.evidence


def test_every_control_is_known_or_explained() -> None:
    for id, probe in INSIDE.items():
        assert probe.control in GROUPS or probe.control.startswith("none: "), id
    for id in OUTSIDE:
        assert OUTSIDE[id].control, id


def test_most_probes_have_a_control() -> None:
    without = [id for id, probe in EVERY.items() if probe.control.startswith("none: ")]

    assert len(without) < len(EVERY) // 8, without
