"""What a plan allows for what is mounted, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfence import Mount, SandboxSpec
from ringfence.backends.local.host.facts import host
from ringfence.backends.native import planner
from ringfence.backends.native.profiles import BUILT_IN, Profile
from ringfence.backends.native.request import Request
from ringfence.policy.landlock import plan_landlock

OWN = Profile("own")


def draft_of(mounts: list[Mount]) -> planner.Draft:
    draft = planner.Draft(Request(SandboxSpec(mounts=tuple(mounts)), OWN, 1000), "sandbox", 0)
    try:
        planner.make_plan(draft, host())
    finally:
        draft.close()
        for part in draft.protected:
            part.remove_placeholders()
    return draft


def test_a_host_directory_stays_one_whatever_is_mounted_after_it(tmp_path: Path) -> None:
    """A socket of the host's can be in it; not in a file."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    directory = Mount("/data/d", str(tmp_path / "directory"))
    file = Mount("/data/f", str(tmp_path / "file"))

    assert not draft_of([]).host_directory
    assert not draft_of([file]).host_directory
    assert draft_of([directory]).host_directory
    assert draft_of([directory, file]).host_directory
    assert draft_of([file, directory]).host_directory


@pytest.mark.parametrize(
    ("abi", "directory", "isolated", "allowed"),
    [
        (0, False, True, True),
        (0, True, True, False),
        (0, False, False, False),
        (5, False, False, False),
        (6, False, False, True),
        (6, True, False, False),
        (8, True, True, False),
        (8, False, True, True),
        (9, True, True, True),
        (9, True, False, True),
    ],
)
def test_unix_sockets_are_allowed_where_none_of_the_hosts_is_in_reach(
    abi: int, directory: bool, isolated: bool, allowed: bool
) -> None:
    draft = planner.Draft(Request(SandboxSpec(), OWN, 1000), "sandbox", 0)
    draft.host_directory = directory
    rules = plan_landlock(abi, writable=["/tmp"])

    def answer(profile: Any) -> bool:
        return planner.unix_sockets_allowed(draft, profile, rules, isolated)

    assert allowed == answer(OWN)
    assert answer(Profile("on", unix_sockets=True))
    assert not answer(Profile("off", unix_sockets=False))


def test_profiles_that_are_there_by_name_are_few_and_take_little_away() -> None:
    """A control with one layer only is made by a test, for its own backend: no name leads to it."""
    always = {
        name for name, each in BUILT_IN.items() if each.no_new_privs and each.drop_capabilities
    }

    assert {"os_hardened", "own_root", "debug", "unrestricted"} == set(BUILT_IN) == always
    for name in ("os_hardened", "own_root", "debug"):
        each = BUILT_IN[name]
        assert each.seccomp
        assert each.landlock
        assert each.forbid_user_namespaces
        assert each.unix_sockets is None
        assert each.tracing == (name == "debug")
    assert 0 == BUILT_IN["os_hardened"].root_capabilities
