"""Helpers and agents that the zygote sends into a running sandbox: no more rights there than its programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from tests.native.outside import init_pid, until
from tests.posture.reading import Process, processes_in

pytestmark = pytest.mark.root
_GROUPS = [4711, 4712]


@pytest.fixture(scope="module")
def backend() -> Iterator[NativeBackend]:
    """One whose zygote has groups, of which nothing is to come to sandboxes."""
    before = os.getgroups()
    with closing(NativeBackend()) as made:
        os.setgroups(_GROUPS)
        try:
            Sandbox.create(backend=made).terminate()
        finally:
            os.setgroups(before)
        yield made


@pytest.fixture
def sandbox(backend: NativeBackend) -> Iterator[Sandbox]:
    with Sandbox.create(backend=backend) as made:
        yield made


def others(sandbox: Sandbox) -> list[Process]:
    """All in its PID namespace but PID 1."""
    return [each for each in processes_in(init_pid(sandbox)) if each.inside != 1]


def filters_of(pid: int) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return text.partition("\nSeccomp_filters:")[2].split()[0]


def test_a_helper_for_files_is_locked_down_as_programs_are(sandbox: Sandbox) -> None:
    program = sandbox.start(["sleep", "600"])
    assert until(lambda: ["sleep"] == [each.name for each in others(sandbox)])
    [control] = others(sandbox)
    with sandbox.files.watch("/tmp"):
        assert until(lambda: 2 == len(others(sandbox)))
        [helper] = [each for each in others(sandbox) if each.pid != control.pid]
        filters = filters_of(helper.pid), filters_of(control.pid)
    program.kill()
    program.wait()

    [seen], [of_program] = helper.identities, control.identities
    for name in ("uids", "gids", "uid_map", "gid_map", "setgroups", "root"):
        assert getattr(of_program, name) == getattr(seen, name), name
    assert ((), 1, 2, (0,) * 5) == (seen.groups, seen.no_new_privs, seen.seccomp, seen.capabilities)
    assert filters[0] == filters[1]
    assert control.control_groups == helper.control_groups
    assert control.traceable
    assert not helper.traceable


def test_an_agent_of_another_user_has_no_groups_and_is_bounded_as_the_sandbox(
    sandbox: Sandbox,
) -> None:
    [own, other] = [sandbox.start(["sleep", "600"], user=user) for user in (None, "1500")]
    assert until(lambda: 2 == [each.name for each in others(sandbox)].count("sleep"))
    found = others(sandbox)
    for each in (own, other):
        each.kill()
        each.wait()

    assert 3 == len(found), "an agent, and two programs"
    assert {()} == {seen.groups for each in found for seen in each.identities}
    assert {0} == {
        rights for each in found for seen in each.identities for rights in seen.capabilities[3:]
    }
    [agent] = [each for each in found if each.name.startswith("ringfence")]
    assert not agent.traceable
    assert {each.limits["Max processes"] for each in found} == {agent.limits["Max processes"]}
