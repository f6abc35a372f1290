"""Guardian, agent and programs of the landlock backend, seen from the host: what each has and what it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ringfence import Mount, Sandbox
from ringfence.backends.landlock.backend import LandlockBackend
from ringfence.guest.tags import tag_of
from ringfence.guest.without_namespaces.landlocked import members
from tests.native.outside import is_sleep, until
from tests.native.test_without_namespaces import _landlock, of
from tests.waiting import readable

__all__ = ["_landlock"]  # a fixture

pytestmark = pytest.mark.root
_GROUPS = [4711, 4712]


@pytest.fixture(scope="module")
def backend() -> Iterator[LandlockBackend]:
    """One whose starter has groups and a umask, of which nothing is to come to sandboxes."""
    before = os.getgroups()
    with closing(LandlockBackend()) as made:
        os.setgroups(_GROUPS)
        umask = os.umask(0o007)
        try:
            Sandbox.create(backend=made).terminate()
        finally:
            os.umask(umask)
            os.setgroups(before)
        yield made


@pytest.fixture
def sandbox(backend: LandlockBackend) -> Iterator[Sandbox]:
    with Sandbox.create(backend=backend) as made:
        yield made


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}


def programs_of(sandbox: Sandbox, count: int) -> list[int]:
    """Those that sleep, once there are so many."""
    base = of(sandbox)._tag_base
    assert until(lambda: count == sum(map(is_sleep, members(base))))
    return sorted(filter(is_sleep, members(base)))


def session(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])


def opened(pid: int) -> dict[int, str]:
    """Descriptors and what they lead to, without numbers of inodes."""
    directory = Path(f"/proc/{pid}/fd")
    return {int(fd): os.readlink(directory / fd).partition(":[")[0] for fd in os.listdir(directory)}


def ends(pidfds: list[int]) -> bool:
    """Tell whether all of these end, which closes them."""
    found = []
    for each in pidfds:
        found.append(bool(readable([each], 30.0)))
        os.close(each)
    return all(found)


def test_each_has_no_more_than_it_needs(sandbox: Sandbox) -> None:
    inner = of(sandbox)
    running = [sandbox.start(["sleep", "600"]) for _ in range(2)]
    first, second = programs_of(sandbox, 2)
    found = {"guardian": inner._launcher.pid, "agent": inner.pid, "first": first, "second": second}
    facts = {name: status(pid) for name, pid in found.items()}

    for name, each in facts.items():
        rights = [int(each[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
        assert [0] * 5 == rights, name
        assert ("1", "") == (each["NoNewPrivs"], each["Groups"]), name
        assert 1 == len({*each["Uid"].split(), *each["Gid"].split()}), name
        assert "0" not in each["Uid"].split(), name
    filters = {name: int(each["Seccomp_filters"]) for name, each in facts.items()}
    around = filters["guardian"]
    assert {"guardian": 0, "agent": 2, "first": 3, "second": 3} == {
        name: count - around for name, count in filters.items()
    }
    assert ("ringfence-guard", "ringfence-init") == (
        facts["guardian"]["Name"],
        facts["agent"]["Name"],
    )
    owners = {name: os.stat(f"/proc/{pid}/environ").st_uid for name, pid in found.items()}
    assert (0, 0) == (owners["guardian"], owners["agent"]), "nobody traces them"
    assert owners["first"] == owners["second"] == int(facts["first"]["Uid"].split()[0])
    assert {pid: pid for pid in found.values()} == {pid: session(pid) for pid in found.values()}
    assert "0022" == facts["guardian"]["Umask"] == facts["agent"]["Umask"]
    assert 0 == int(facts["agent"]["SigCgt"], 16), "Python's own handler would be anybody's to call"
    assert {str(found["agent"])} == {
        each["PPid"] for name, each in facts.items() if name in ("first", "second")
    }
    assert str(found["guardian"]) == facts["agent"]["PPid"]
    base = inner._tag_base
    tags = {name: tag_of(pid) for name, pid in found.items()}
    assert base >= tags["first"] > tags["second"]
    for program in running:
        program.kill()
        program.wait()


def test_none_holds_what_is_anothers(backend: LandlockBackend) -> None:
    """Nor what the sandbox was made with: whoever may open it, may leave it by it."""
    with Sandbox.create(backend=backend, mounts=[Mount("/shown", "/usr/share")]) as sandbox:
        inner = of(sandbox)
        program = sandbox.start(["sleep", "600"])
        guardian, agent, inside = (
            opened(pid) for pid in (inner._launcher.pid, inner.pid, *programs_of(sandbox, 1))
        )
        program.kill()
        program.wait()

    assert {0, 1, 2} == {*inside}
    assert ["/dev/null"] * 3 == [agent[fd] for fd in range(3)]
    kinds = sorted([*guardian.values()])
    assert 2 == kinds.count("socket"), "the host's, and the agent's for terminals"
    assert 2 == sum("guardian-says" in each for each in kinds), "as its output and its errors"
    held = [*agent.values()]
    assert held.count("socket") <= 4, "those, the exec's, and one that asks who listens"
    assert {"anon_inode", "pidfd"} & {each.partition(":")[0] for each in kinds}
    for each in (guardian, agent):
        assert not [
            path for path in each.values() if path.startswith(("/usr", "/home", "/tmp", "/sys"))
        ]


@pytest.mark.parametrize("victim", ["guardian", "agent"])
def test_with_either_everything_ends(sandbox: Sandbox, victim: str) -> None:
    """What left its exec too."""
    inner = of(sandbox)
    assert sandbox.shell("sleep 600 > /dev/null 2>&1 &").ok
    left = [*{*members(inner._tag_base), inner.pid, inner._launcher.pid}]
    assert 3 == len(left)
    pidfds = [os.pidfd_open(pid) for pid in left]
    os.kill({"guardian": inner._launcher.pid, "agent": inner.pid}[victim], signal.SIGKILL)

    assert ends(pidfds)
