"""Every process of a sandbox, seen from outside, is what it should be: nothing is taken on trust."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ringfence.egress import confine
from tests.native.outside import children_of
from tests.posture import expected, maker
from tests.posture.reading import (
    Process,
    anonymous,
    command_of,
    holders_of,
    mounts_of,
    processes_in,
    read_process,
)
from tests.strangers import PYTHON, package_for_others

pytestmark = pytest.mark.root

OTHER_UID, OTHER_GID = 23457, 23458


@dataclass
class Made:
    """A running sandbox, its processes, and who made it: (0, 0) for root."""

    first: int
    maker: int
    uid: int
    gid: int
    processes: list[Process]

    def one(self, word: str) -> Process:
        """The process that has `word` on its command line."""
        (found,) = [p for p in self.processes if word in p.command]
        return found

    @property
    def init(self) -> Process:
        (found,) = [p for p in self.processes if self.first == p.pid]
        return found


@pytest.fixture(scope="module", params=["new", "claimed", "limited", "claimed-limited", "copied"])
def way(request: pytest.FixtureRequest) -> str:
    """Built at once, for a pool or as a fork, with a network or without: all the same."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def made_by_root(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    top = tmp_path_factory.mktemp("root")
    for name in ("ro", "rw"):
        (top / name).mkdir()
    sandbox = maker.make(str(top / "ro"), str(top / "rw"), way)
    maker.start_others(sandbox)
    first = sandbox._inner.pid
    time.sleep(maker.SETTLES_S)
    yield Made(first, os.getpid(), 0, 0, processes_in(first))
    sandbox.terminate()


@pytest.fixture(scope="module")
def made_by_other(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The same, made by an ordinary user with a copy of the package."""
    top = tmp_path_factory.mktemp("other")
    source = package_for_others(top)
    script = shutil.copy(maker.__file__, top / "maker.py")
    os.chown(top, OTHER_UID, OTHER_GID)  # its home: snapshots are kept there
    for name in ("ro", "rw"):
        (top / name).mkdir()
        os.chown(top / name, OTHER_UID, OTHER_GID)
    become = ("setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_GID}", "--clear-groups")
    paths = [str(source), *(str(top / name) for name in ("ro", "rw"))]
    child = subprocess.Popen(
        [*become, PYTHON, "-B", script, *paths, way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "HOME": str(top)},
        cwd=top,
    )
    with child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            pytest.skip("an ordinary user can make no sandbox here")
        first = json.loads(line)["pid"]
        yield Made(first, child.pid, OTHER_UID, OTHER_GID, processes_in(first))


@pytest.fixture(params=["made_by_root", "made_by_other"])
def made(way: str, request: pytest.FixtureRequest) -> Made:
    found: Made = request.getfixturevalue(request.param)
    return found


# -- who they are ------------------------------------------------------------------------------


def test_there_are_the_expected_processes_and_no_others(made: Made) -> None:
    sleepers = {"6001", "6002", "6003", "6004", "6005"}
    agents = 0
    if 0 == made.uid:
        sleepers |= {"6006", "6007"}
        agents = 2
    found = {word for p in made.processes for word in p.command[-1:] if word in sleepers}
    threaded = [p for p in made.processes if p.command[-1] == maker.THREADED]

    assert sleepers - {"6001"} == found
    assert 1 == len(threaded)
    assert 1 + agents + len(sleepers) == len(made.processes), [p.command for p in made.processes]


def test_every_thread_is_who_it_should_be(made: Made) -> None:
    """Namespaces, five capability sets, no_new_privs, filter, ids, maps, groups and root at once."""
    namespaces = next(iter(made.init.identities)).namespaces
    for process in made.processes:
        (seen,) = process.identities  # all threads are alike
        if made.uid:
            wanted = expected.identity_made_by(seen, made.uid, made.gid)
        else:
            wanted = expected.identity_made_by_root(seen, inside=inside_id(process))
            if is_agent(
                process
            ):  # each connects for programs: the sandbox shows directories of the host
                wanted = expected.identity_of_agent(wanted, expected.TO_TRACE)
        assert wanted == seen, process.command
        assert namespaces == seen.namespaces, process.command


def inside_id(process: Process) -> int:
    """Two execs run as other users, each watched by an agent of that user."""
    (seen,) = process.identities
    inside = expected.inside_id(seen)
    by_command = {"6006": 0, "6007": expected.NOBODY}
    if process.command[-1] in by_command:
        assert by_command[process.command[-1]] == inside
    elif "ringfence-agent" != process.name and not is_agent(process):
        assert expected.SANDBOX == inside, process.command
    return inside


def is_agent(process: Process) -> bool:
    return process.inside != 1 and process.name.startswith("ringfence")


def test_there_is_a_process_with_several_threads(made: Made) -> None:
    assert {2} == {p.threads for p in made.processes if p.command[-1] == maker.THREADED}


def test_root_inside_has_no_capabilities(made_by_root: Made) -> None:
    """Securebits at work: execve as uid 0 gives a process of root everything; here it gives nothing."""
    (seen,) = made_by_root.one("6006").identities

    assert {seen.uid_map[0][1]} == seen.uids
    assert (0, 0, 0, 0, 0) == seen.capabilities


def test_no_id_is_root_of_the_host(made: Made) -> None:
    for process in made.processes:
        (seen,) = process.identities
        assert 0 not in seen.uids | seen.gids
        for _inside, outside, _count in (*seen.uid_map, *seen.gid_map):
            assert 0 != outside


def test_who_watches_cannot_be_traced(made: Made) -> None:
    watchers = {made.first} | {p.pid for p in made.processes if is_agent(p)}

    assert watchers == {p.pid for p in made.processes if not p.traceable}


# -- what they hold ------------------------------------------------------------------------------


def test_pid_1_holds_what_it_needs(way: str, made: Made) -> None:
    held = anonymous(made.init.files)
    always = {fd: text for fd, text in held.items() if fd in expected.INIT}
    others = sorted(text for fd, text in held.items() if fd not in expected.INIT)

    assert expected.init(made.uid) == always
    # Four execs run; something ran already when the second, third and fourth were started.
    copies = 2 if "copied" == way else 0  # each with a filter of its own that asks
    began = [expected.BEGAN] * (3 - copies // 2) + [expected.LISTENER] * copies
    assert sorted(began + [expected.REPORT] * 4) == others


def test_agents_hold_what_they_need(made_by_root: Made) -> None:
    agents = [p for p in made_by_root.processes if is_agent(p)]
    for agent in agents:
        held = anonymous(agent.files)
        score, counters = held.pop(5), held.pop(6)
        always = expected.agent()
        others = sorted(held.pop(fd) for fd in {*held} - {*always})
        assert always == held
        assert score.endswith("/oom_score_adj w cloexec")
        assert counters.endswith("/io r cloexec")
        assert sorted([expected.BEGAN, expected.REPORT]) == others
    assert 2 == len(agents)


@pytest.mark.parametrize(
    ("word", "files"),
    [
        (maker.THREADED, {0: expected.NULL, **expected.OUTPUTS}),
        ("6002", expected.TERMINAL),
        ("6003", {0: "pipe r", **expected.OUTPUTS}),
        ("6004", {0: expected.NULL, **expected.OUTPUTS}),
        ("6005", {0: expected.NULL, **expected.OUTPUTS}),
    ],
    ids=["plain", "terminal", "fed", "background", "parent"],
)
def test_programs_hold_three_streams(made: Made, word: str, files: dict[int, str]) -> None:
    assert files == anonymous(made.one(word).files)


def test_programs_of_other_users_hold_three_streams(made_by_root: Made) -> None:
    for word in ("6006", "6007"):
        held = anonymous(made_by_root.one(word).files)
        assert {0: expected.NULL, **expected.OUTPUTS} == held


@pytest.mark.full
def test_every_pipe_leads_to_the_maker_or_stays_inside(made: Made) -> None:
    inside = {p.pid for p in made.processes}
    pipes = {
        text.split()[0] for p in made.processes for text in p.files.values() if "pipe:" in text
    }

    for pipe in pipes:
        assert holders_of(pipe) <= inside | {made.maker}, pipe
    assert pipes


def test_who_serves_its_network_is_nobody(way: str, made: Made) -> None:
    """The egress process: outside, under a filter of its own, and there is nothing to it but a network."""
    if not way.endswith("limited"):
        pytest.skip("nothing serves a sandbox without network")
    serving = [read_process(pid) for pid in children_of(made.maker) if is_egress(command_of(pid))]

    assert serving
    for process in serving:
        (seen,) = process.identities
        assert (1, 2, ()) == (seen.no_new_privs, seen.seccomp, seen.groups)
        assert not process.traceable
        bounding = 0 if 0 == made.uid else seen.capabilities[3]
        assert (0, 0, 0, bounding, 0) == seen.capabilities
        own = (confine.UID, confine.UID) if 0 == made.uid else (made.uid, made.gid)
        assert own == (*seen.uids, *seen.gids)


def is_egress(command: tuple[str, ...]) -> bool:
    return any("ringfence.egress.main" in word for word in command)


# -- what bounds them ------------------------------------------------------------------------------


def test_every_process_has_the_limits(made: Made) -> None:
    wanted = expected.LIMITS if 0 == made.uid else expected.LIMITS_OF_A_USER
    for process in made.processes:
        found = {name: process.limits[name] for name in wanted}
        assert wanted == found, process.command
        assert "unlimited" not in process.limits["Max processes"]


def test_the_processes_of_an_exec_share_a_tag(made: Made) -> None:
    """By it a tree is found and killed; two execs never have the same."""
    tags = {p.command[-1]: p.limits["Max realtime timeout"] for p in made.processes}
    execs = [tags[word] for word in (maker.THREADED, "6002", "6003", "6005")]

    assert tags["6004"] == tags["6005"]
    assert len(execs) == len(set(execs))
    assert "unlimited unlimited" not in execs


def test_every_process_is_in_the_control_groups(made_by_root: Made) -> None:
    wanted = {path for path in made_by_root.init.control_groups if "ringfence." in path}
    for process in made_by_root.processes:
        assert wanted <= process.control_groups, process.command


# -- what they see ---------------------------------------------------------------------------------


def test_mounts_are_the_expected_ones_and_no_others(made: Made) -> None:
    seen = mounts_of(made.first)
    etc = {target: seen.pop(target) for target in list(seen) if target.startswith("/etc/")}
    libraries = {target: seen.pop(target) for target in list(seen) if is_of_the_system(target)}
    read_only, writable = seen.pop("/mnt/read-only"), seen.pop("/mnt/writable")
    protected = {t: seen.pop(t) for t in list(seen) if t.startswith("/mnt/writable/")}

    assert expected.mounts() == seen
    for target, mount in {**etc, **libraries}.items():
        assert expected.host_directory("ro") == mount.flags, target
        assert "" == mount.propagation, target
    mapped = () if made.uid else ("idmapped",)
    assert expected.host_directory("ro", *mapped) == read_only.flags
    assert expected.host_directory("rw", *mapped) == writable.flags
    for target, mount in protected.items():
        pinned = target in ("/mnt/writable/.git", "/mnt/writable/.git/info")
        access = "rw" if pinned else "ro"
        assert expected.host_directory(access, *mapped) == mount.flags, target
    assert {"/mnt/writable/.git/hooks", "/mnt/writable/.envrc"} <= set(protected)


def is_of_the_system(target: str) -> bool:
    return target.split("/")[1] in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")


def test_nothing_is_left_of_the_hosts_root(made: Made) -> None:
    """No mount but its own root, /proc and /dev/pts shows the top of a file system."""
    tops = {t for t, mount in mounts_of(made.first).items() if "/" == mount.shows}

    assert {"/", "/proc", "/dev/pts"} >= tops - {"/usr", "/mnt/read-only", "/mnt/writable"}


def test_every_process_sees_the_same_mounts(made: Made) -> None:
    wanted = mounts_of(made.first)
    for process in made.processes:
        assert wanted == mounts_of(process.pid), process.command
