"""What a plan allows for what is mounted, without starting anything."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.features import require

from ringfence import Limits, Mount, NetworkPolicy, SandboxSpec
from ringfence.backends.local.host.facts import host
from ringfence.backends.local.mounts import template
from ringfence.backends.native import connecting, planner
from ringfence.backends.native.profiles import BUILT_IN, Profile
from ringfence.backends.native.request import Request
from ringfence.linux import namespaces
from ringfence.model.mount import MEMORY_DIR, READ_WRITE
from ringfence.model.spec import LINEAGE
from ringfence.policy import landlock
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
    """A socket of the host's can be in it; not in a file. A source may be a socket itself."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    directory = Mount("/data/d", str(tmp_path / "directory"))
    file = Mount("/data/f", str(tmp_path / "file"))

    assert not draft_of([]).host_directory
    assert not draft_of([file]).host_directory
    assert draft_of([directory]).host_directory
    assert draft_of([directory, file]).host_directory
    assert draft_of([file, directory]).host_directory
    assert draft_of([Mount("/data/s", str(tmp_path / "socket"))]).host_directory


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


def plan_of(request: Request) -> tuple[planner.Draft, Any]:
    draft = planner.Draft(request, "native-12345678", 0)
    try:
        return draft, planner.make_plan(draft, host())
    finally:
        draft.close()
        for part in draft.protected:
            part.remove_placeholders()


def asked(profile: Profile = OWN, **wishes: Any) -> Request:
    return Request(SandboxSpec(**wishes), profile, 1000)


def test_a_sandbox_shares_no_namespace_but_a_network_that_was_asked_for() -> None:
    kinds = ("USER", "NS", "PID", "IPC", "UTS")
    always = sum(getattr(namespaces, f"CLONE_NEW{kind}") for kind in kinds)
    for policy, expected in (
        (NetworkPolicy(), always | namespaces.CLONE_NEWNET),
        (NetworkPolicy.none(), always | namespaces.CLONE_NEWNET),
        (NetworkPolicy.unrestricted(), always),
    ):
        _draft, plan = plan_of(asked(network=policy))
        assert expected == plan["namespaces"]
        assert plan["network"] is None or not policy.is_unrestricted


def test_limits_of_a_process_are_hard_ones() -> None:
    _draft, plan = plan_of(asked(limits=Limits(open_files=99)))
    found = {which: (soft, hard) for which, soft, hard in plan["rlimits"]}
    assert len(found) == len(plan["rlimits"])
    assert ((1, 1), (99, 99), (0, 0)) == tuple(
        found[which]
        for which in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_RTPRIO)
    )
    assert resource.RLIMIT_FSIZE not in found
    _draft, plan = plan_of(asked(limits=Limits(disk_bytes=5 << 20)))
    assert (resource.RLIMIT_FSIZE, 5 << 20, 5 << 20) in plan["rlimits"]
    assert 5 << 20 == plan["root_size_bytes"]


def test_a_profile_switches_off_what_it_names_and_nothing_else() -> None:
    _draft, plan = plan_of(asked())
    switches = (
        "no_new_privs",
        "keep_capabilities",
        "forbid_user_namespaces",
        "releases_idle_pages",
    )
    assert [True, False, True, True] == [plan[name] for name in switches]
    assert plan["seccomp"]
    assert 0 == plan["root_capabilities"]
    cases: tuple[tuple[dict[str, Any], str, Any], ...] = (
        ({"no_new_privs": False}, "no_new_privs", False),
        ({"drop_capabilities": False}, "keep_capabilities", True),
        ({"forbid_user_namespaces": False}, "forbid_user_namespaces", False),
        ({"seccomp": False}, "seccomp", b""),
        ({"landlock": False}, "landlock", None),
    )
    for change, name, value in cases:
        _draft, other = plan_of(asked(Profile("other", **change)))
        assert value == other[name]
        for each in {*switches, "seccomp", "landlock"} - {name}:
            assert bool(plan[each]) == bool(other[each])


def test_signals_are_scoped_unless_copies_are_made_of_what_runs() -> None:
    """A copied process is in a Landlock domain beside that of PID 1, which has to be able to end it."""
    if host().landlock_abi < 6:
        pytest.skip("needs Landlock that scopes signals")
    _draft, plan = plan_of(asked())
    assert landlock.SCOPE_SIGNAL | landlock.SCOPE_ABSTRACT_UNIX_SOCKET == plan["landlock"][2]
    draft, plan = plan_of(asked(labels={LINEAGE: "x"}))
    assert landlock.SCOPE_ABSTRACT_UNIX_SOCKET == plan["landlock"][2]
    assert plan["hostname"] == draft.hostname == f"{plan_of(asked())[1]['hostname']}-12345678"


def test_no_socket_may_be_made_where_the_hosts_programs_would_find_it(tmp_path: Path) -> None:
    require("landlock")
    (tmp_path / "file").touch()
    writable = Mount("/home/work", str(tmp_path), READ_WRITE, protect=())
    draft, plan = plan_of(asked(mounts=(writable,)))

    def may(path: str) -> bool:
        return any(
            access & landlock.MAKE_SOCK and f"{path}/".startswith(f"{top}/")
            for top, access in plan["landlock"][4]
        )

    assert [False, False] == [may("/home/work"), may(planner.ATTACHED)]
    assert [True, True] == [may("/tmp"), may(template.HOME)]
    assert (["/home/work"], []) == (draft.writable_of_host, draft.writable_files)
    for mount in (
        Mount("/data", str(tmp_path)),
        Mount("/data", str(tmp_path / "file"), READ_WRITE),
        Mount("/data", access="read_only"),
    ):
        draft, plan = plan_of(asked(mounts=(mount,)))
        assert "/data" not in draft.writable
        assert mount.is_writable is ("/data" in draft.writable_files)
        assert [] == draft.writable_of_host


def test_what_is_denied_is_hidden_when_all_mounts_are_there(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    mount = Mount("/data", str(tmp_path), READ_WRITE, protect=())
    _draft, plan = plan_of(asked(mounts=(mount,), deny=("/data/secret", "/usr/share/misc")))
    steps = [step[:2] for step in plan["steps"]]
    at = steps.index(("bind", "/data"))
    hidden = [index for index, step in enumerate(steps) if step[0] == "hide"]
    assert 2 == len(hidden)
    assert at < min(hidden)
    assert "/data/secret" in [steps[index][1] for index in hidden]


@pytest.mark.parametrize(
    "lacks",
    ["", "directory", "seccomp", "drop_capabilities", "sockets", "policy", "root", "rules", "proc"],
)
def test_pid_1_connects_only_where_its_rights_are_those_of_all(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "why_not", lambda: "")
    changes: dict[str, dict[str, Any]] = {
        "seccomp": {"seccomp": False}, "drop_capabilities": {"drop_capabilities": False},
        "sockets": {"unix_sockets": False}, "policy": {"policy": object()},
        "root": {"root_capabilities": 1},
    }  # fmt: skip
    profile = Profile("own", **changes.get(lacks, {}))
    request: Any = SimpleNamespace(
        spec=SandboxSpec(), base=None, uid=1000, borrows_proc=lacks == "proc"
    )
    draft = planner.Draft(request, "sandbox", 0)
    draft.host_directory = lacks != "directory"
    rules = plan_landlock(0 if lacks == "rules" else 8, writable=["/tmp"])
    assert (not lacks) is planner.connects_by_init(draft, profile, rules, True)
    monkeypatch.setattr(connecting, "why_not", lambda: "a new kernel")
    assert not planner.connects_by_init(draft, profile, rules, True)
    monkeypatch.setattr(connecting, "why_not", lambda: "")
    few = plan_landlock(5, writable=["/tmp"])  # does not scope abstract sockets
    assert (not lacks or lacks == "rules") is planner.connects_by_init(draft, profile, few, True)
    assert not planner.connects_by_init(draft, profile, few, False)


def test_a_directory_of_ones_own_stands_in_for_the_memory_that_is_always_there(
    tmp_path: Path,
) -> None:
    draft, _plan = plan_of(asked())
    targets = [each.target for each in draft.mounts]
    assert MEMORY_DIR in targets
    draft, _plan = plan_of(asked(memory_dir=str(tmp_path)))
    found = [each for each in draft.mounts if each.target == MEMORY_DIR]
    assert [str(tmp_path)] == [each.host_path for each in found]
