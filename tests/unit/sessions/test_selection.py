"""Which backend, and of every other one why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unconfined import Unconfined

from ringfence import Limits, Mount, NetworkPolicy, SandboxSpec
from ringfence.errors import BackendUnavailable, InvalidRequest
from ringfence.model import capabilities as can
from ringfence.model.capabilities import BackendReport, Capability
from ringfence.model.spec import LIGHT, STRONG
from ringfence.sessions.maker import Maker
from ringfence.sessions.selection import beforehand, choose, needed, refusal

if TYPE_CHECKING:
    from ringfence.backends.protocol import Backend

pytestmark = pytest.mark.anyone

ALL = {
    can.NETWORK_NONE,
    can.NETWORK_HOSTS,
    can.NETWORK_UNRESTRICTED,
    can.MOUNT,
    can.SECRETS,
    can.IMAGE,
    *can.LIMITED_BY.values(),
}


def report(name: str, *lacking: str, tiers: tuple[str, ...] = ("light",)) -> BackendReport:
    able = [Capability(each, True) for each in sorted(ALL - set(lacking))]
    unable = [Capability(each, False, f"{name} has no {each}") for each in lacking]
    return BackendReport(name, True, tiers=tiers, capabilities=(*able, *unable))


def gone(name: str) -> BackendReport:
    return BackendReport(name, False, reason="this host has none of it")


@pytest.mark.parametrize(
    ("spec", "capability"),
    [
        (SandboxSpec(), can.NETWORK_NONE),
        (SandboxSpec(network=NetworkPolicy.unrestricted()), can.NETWORK_UNRESTRICTED),
        (SandboxSpec(network=NetworkPolicy(allowed_hosts=("a.com",))), can.NETWORK_HOSTS),
        (SandboxSpec(mounts=(Mount("/data", "/usr"),)), can.MOUNT),
        (SandboxSpec(memory_dir="/srv/memory"), can.MOUNT),
        (SandboxSpec(secrets={"A": "b"}), can.SECRETS),
        (SandboxSpec(template="mine"), can.MOUNT),
        (SandboxSpec(image="mine"), can.IMAGE),
        (SandboxSpec(limits=Limits(cpus=1.0)), can.CPU_LIMIT),
        (SandboxSpec(limits=Limits(io_bytes_per_s=1)), can.IO_LIMIT),
    ],
)
def test_what_a_spec_needs(spec: SandboxSpec, capability: str) -> None:
    assert capability in needed(spec)
    assert ("able",) == choose(spec, {"able": report("able")})
    with pytest.raises(BackendUnavailable) as refused:
        choose(spec, {"lame": report("lame", capability)})
    assert f"lame has no {capability}" in str(refused.value)


def test_what_may_be_missing_is_not_needed() -> None:
    spec = SandboxSpec(limits=Limits(cpus=1.0), allow_degraded=(can.CPU_LIMIT,))

    assert can.CPU_LIMIT not in needed(spec)


def test_tiers_are_never_swapped() -> None:
    spec = SandboxSpec(tier="strong")
    reports = {"a": report("a"), "b": report("b", tiers=("light", "strong"))}

    assert ("b",) == choose(spec, reports)
    assert ["tier strong is not one of its tiers (light)"] == refusal(spec, reports["a"])
    with pytest.raises(BackendUnavailable, match="serve --backend"):
        choose(spec, {"a": report("a")})


def test_in_the_order_given_unless_one_is_preferred() -> None:
    reports = {"gone": gone("gone"), "b": report("b"), "a": report("a")}

    assert ("b", "a") == choose(SandboxSpec(), reports)
    assert ("a",) == choose(SandboxSpec(), reports, "a")
    with pytest.raises(InvalidRequest):
        choose(SandboxSpec(), reports, "c")


def test_a_preferred_one_that_cannot_says_so_and_who_could() -> None:
    reports = {"gone": gone("gone"), "a": report("a")}

    with pytest.raises(BackendUnavailable) as refused:
        choose(SandboxSpec(), reports, "gone")

    assert "this host has none of it" in str(refused.value)
    assert "a: could" in str(refused.value)
    assert "omit preferred_backend" in refused.value.hint


def test_with_none_at_all() -> None:
    with pytest.raises(BackendUnavailable):
        choose(SandboxSpec(), {})


@given(st.lists(st.sets(st.sampled_from(sorted(ALL))), max_size=4), st.booleans())
def test_chosen_is_who_can_and_refused_says_why_of_each(
    lacking: list[set[str]], wants_mount: bool
) -> None:
    spec = SandboxSpec(
        mounts=(Mount("/data", "/usr"),) if wants_mount else (), limits=Limits(pids=5)
    )
    reports = {f"b{i}": report(f"b{i}", *sorted(each)) for i, each in enumerate(lacking)}
    able = [name for name, each in zip(reports, lacking, strict=True) if not each & {*needed(spec)}]

    if able:
        assert tuple(able) == choose(spec, reports)
        return
    with pytest.raises(BackendUnavailable) as refused:
        choose(spec, reports)
    for name, each in zip(reports, lacking, strict=True):
        for capability in each & {*needed(spec)}:
            assert f"{name} has no {capability}" in str(refused.value)


class Unasked(Unconfined):
    """One that must not be asked what it can do: as long as its answer takes, so long would a refusal."""

    tiers = (STRONG,)
    never: ClassVar = {can.NETWORK_UNRESTRICTED: "there is no way to the host's network"}

    def report(self) -> BackendReport:
        raise AssertionError("it was tried, which may take as long as a boot")


class Tried(Unconfined):
    name = "tried"
    tiers = (LIGHT,)

    def report(self) -> BackendReport:
        return report("tried")


def maker(*backends: Backend) -> Maker:
    none: Any = None  # nothing is made
    return Maker({each.name: each for each in backends}, none, none, none)


def test_what_no_host_could_make_possible_is_refused_without_a_trial() -> None:
    spec = SandboxSpec(tier=STRONG, network=NetworkPolicy.unrestricted())

    for preferred in ("", "unconfined"):
        with pytest.raises(BackendUnavailable) as refused:
            maker(Tried(), Unasked()).choose(spec, preferred)
        assert "there is no way to the host's network" in str(refused.value)

    assert "list the destinations in the policy" in refused.value.hint
    with pytest.raises(AssertionError):  # the control: what it might be able to do it is asked
        maker(Unasked()).choose(SandboxSpec(tier=STRONG))


def test_a_tier_that_it_never_has_is_refused_without_a_trial() -> None:
    with pytest.raises(BackendUnavailable, match="tier light is not one of its tiers") as refused:
        maker(Unasked()).choose(SandboxSpec())

    assert "serve --backend" in refused.value.hint


def test_who_prefers_one_does_not_wait_for_the_others() -> None:
    spec = SandboxSpec(limits=Limits(pids=5))

    assert "tried" == maker(Unasked(), Tried()).choose(spec, "tried")
    with pytest.raises(BackendUnavailable, match="unconfined: tier light is not one"):
        maker(Unasked(), Lame()).choose(spec, "lame")


class Lame(Unconfined):
    name = "lame"

    def report(self) -> BackendReport:
        return report("lame", can.PIDS_LIMIT)


def test_a_profile_that_a_backend_never_has_is_refused_without_a_trial() -> None:
    class Without(Unconfined):
        profile_names = ("os_hardened",)

    (why,) = beforehand(SandboxSpec(profile="debug"), Without())
    assert "profile debug is not one of its profiles (os_hardened)" == why
    assert [] == beforehand(SandboxSpec(), Without())
