"""Parts of an agent without namespaces: its rights, terminals, saved trees and waits."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.linux.child import result_of
from tests.waiting import readable

from ringfence.guest.without_namespaces import landlocked, starter
from ringfence.guest.without_namespaces.landlocked import LandlockAgent, LandlockTags
from ringfence.launcher import wire
from ringfence.launcher.pid1 import notifications, processes, terminals
from ringfence.linux import libc as linux_libc
from ringfence.linux import privileges, seccomp
from ringfence.linux.landlock import abi_version
from ringfence.policy.landlock import plan_landlock

PLACES = [("/root/home", "/own/home"), ("/root/tmp", "/own/tmp")]


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("./own/home", "home"),
        ("./own/home/a/b", "home/a/b"),
        ("./own/tmp/x", "tmp/x"),
        ("./own/home2/a", None),
        ("./own", None),
        ("./other", None),
        ("own/home", None),
    ],
)
def test_a_saved_name_has_a_place_in_a_directory_of_the_sandboxs(
    name: str, place: str | None
) -> None:
    if place is None:
        with pytest.raises(OSError, match="no place") as refused:
            landlocked._place("/root", PLACES, name)
        assert errno.EINVAL == refused.value.errno
    else:
        assert place == landlocked._place("/root", PLACES, name)


@pytest.mark.anyone
def test_trees_are_loaded_where_they_belong_but_for_links_to_mounts(tmp_path: Path) -> None:
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    for name in ("home/a", "tmp", "home/data2"):
        (saved / name).mkdir(parents=True)
    (saved / "home/a/file").write_text("x")
    (saved / "home/a/file").chmod(0o640)
    (saved / "home/data").symlink_to("/mnt")
    (saved / "home/data2/kept").write_text("y")
    (saved / "home/left").symlink_to("/mnt")
    (saved / "tmp/z").write_text("z")
    for name in ("home", "tmp"):
        (loaded / name).mkdir(parents=True)
    stream = os.memfd_create("stream")
    places = [(str(saved / name), f"/own/{name}") for name in ("home", "tmp")]
    landlocked._pack(stream, places, [str(saved / "home/left")])
    os.lseek(stream, 0, os.SEEK_SET)
    places = [(str(loaded / name), f"/own/{name}") for name in ("home", "tmp")]
    links = [f"{loaded}/home/data"]

    pid = os.fork()  # as the agent does: it changes its umask
    if pid == 0:
        try:
            landlocked._unpack(stream, str(loaded), places, links)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(stream)
    found = {str(each.relative_to(loaded)) for each in loaded.rglob("*")}
    wanted = {"home", "home/a", "home/a/file", "home/data2", "home/data2/kept", "tmp", "tmp/z"}
    assert wanted == found
    info = (loaded / "home/a/file").stat()
    assert (0o640, os.getuid()) == (stat.S_IMODE(info.st_mode), info.st_uid)


@pytest.mark.anyone
def test_no_spelling_of_a_name_is_loaded_below_a_link_to_a_mount(tmp_path: Path) -> None:
    """A snapshot may come from elsewhere."""
    for name in ("home/data", "home/data2"):
        (tmp_path / name).mkdir(parents=True)
    stream = os.memfd_create("stream")
    with open(os.dup(stream), "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for name in ("data/a", "./data/b", "/data/c", "data/./d", "data2/kept", "dat"):
            tar.addfile(tarfile.TarInfo(f"./own/home/{name}"))
    os.lseek(stream, 0, os.SEEK_SET)

    def load() -> None:
        places = [(f"{tmp_path}/home", "/own/home")]
        landlocked._unpack(stream, str(tmp_path), places, [f"{tmp_path}/home/data"])

    result_of(load)
    os.close(stream)
    assert [] == os.listdir(tmp_path / "home/data")
    assert ["dat", "data", "data2"] == sorted(os.listdir(tmp_path / "home"))
    assert ["kept"] == os.listdir(tmp_path / "home/data2")


class TestTerminals:
    @pytest.fixture
    def ends(self) -> Iterator[tuple[wire.Socket, wire.Socket]]:
        """The agent's end and the guardian's."""
        before = len(os.listdir("/proc/self/fd"))
        asks, asked = wire.socketpair()
        with closing(asks), closing(asked):
            yield asks, asked
        assert before == len(os.listdir("/proc/self/fd"))

    def ask(self, ends: tuple[wire.Socket, wire.Socket]) -> tuple[int, int]:
        asks, asked = ends
        thread = threading.Thread(target=landlocked._open_terminal, args=[asked])
        thread.start()
        try:
            return landlocked._ask_terminal(asks, 21, 43)
        finally:
            thread.join()

    @pytest.mark.anyone
    def test_one_after_the_other_is_opened_in_its_size(
        self, ends: tuple[wire.Socket, wire.Socket]
    ) -> None:
        for _ in range(2):
            master, slave = self.ask(ends)
            assert (43, 21) == tuple(os.get_terminal_size(slave))
            os.write(master, b"x\n")
            assert b"x\n" == os.read(slave, 9)
            for fd in (master, slave):
                os.close(fd)

    @pytest.mark.anyone
    @pytest.mark.parametrize("step", ["master", "slave"])
    def test_one_that_cannot_be_opened_is_refused_and_the_next_is_not(
        self, ends: tuple[wire.Socket, wire.Socket], step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = terminals.new_terminal

        def new_terminal(multiplexer: str, *size: int) -> tuple[int, str]:
            if step == "master":
                raise OSError(errno.ENOSPC, "no more terminals")
            return real(multiplexer, *size)[0], "/no/such/terminal"

        with monkeypatch.context() as patch:
            patch.setattr(terminals, "new_terminal", new_terminal)
            with pytest.raises(OSError) as refused:
                self.ask(ends)
        assert (errno.ENOSPC if step == "master" else errno.ENOENT) == refused.value.errno
        for fd in self.ask(ends):
            os.close(fd)

    @pytest.mark.anyone
    def test_the_end_of_one_side_is_told_to_the_other(self) -> None:
        asks, asked = wire.socketpair()
        asks.close()
        assert not landlocked._open_terminal(asked)
        asked.close()
        asks, asked = wire.socketpair()

        def answer() -> None:
            wire.receive(asked)
            asked.close()

        answered = threading.Thread(target=answer)
        answered.start()
        with pytest.raises(OSError) as refused:
            landlocked._ask_terminal(asks, 1, 1)
        answered.join()
        asks.close()
        assert errno.EIO == refused.value.errno


def status_after(uid: int) -> dict[str, list[str]]:
    """What a child has become."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            landlocked._become(uid)
            securebits = ctypes.CDLL(None).prctl(27, 0, 0, 0, 0)
            os.write(write, Path("/proc/self/status").read_bytes() + b"Securebits: %d" % securebits)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        lines = file.read().decode().splitlines()
    os.waitpid(pid, 0)
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


@pytest.mark.root
@pytest.mark.parametrize("uid", [23456, -1])
def test_a_guardian_of_root_has_no_rights_left(uid: int) -> None:
    os.setgroups([7, *os.getgroups()])
    try:
        found = status_after(uid)
        assert "7" in status_after(0)["Groups"], "the control"
    finally:
        os.setgroups([each for each in os.getgroups() if each != 7])

    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert 0 == int(found[name][0], 16), name
    assert privileges.SECUREBITS_LOCKED == int(found["Securebits"][0])
    number = str(uid if uid > 0 else 0)
    assert ([number] * 4, [number] * 4) == (found["Uid"], found["Gid"])
    assert uid < 0 or [] == found["Groups"]


@pytest.mark.anyone
@pytest.mark.parametrize("is_confined", [True, False])
def test_the_domain_of_an_exec_alone(tmp_path: Path, is_confined: bool) -> None:
    """Without that of the agent, and without the filters: what keeps execs from each other, and from ports."""
    abi = abi_version()
    if abi < 6:
        pytest.skip("needs Landlock that judges signals, Linux 6.12")
    plan = plan_landlock(abi, writable=[], network=False)
    code = notifications.program(
        [([(0, linux_libc.number("sethostname"))], seccomp.RET_ERRNO | errno.EXDEV)]
    )
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()

    def attempts() -> dict[str, int]:
        before = len(os.listdir("/proc/self/fd"))
        privileges.set_no_new_privs()
        if is_confined:
            landlocked.confine((plan.handled_fs, plan.handled_net, plan.scoped, abi), code)
        libc = ctypes.CDLL(None, use_errno=True)

        def port() -> None:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))

        return {
            "signal": number(os.kill, os.getppid(), 0),
            "port": number(port),
            "rename": number(os.rename, tmp_path / "one/file", tmp_path / "two/moved"),
            "write": number((tmp_path / "one/new").touch),
            "filter": ctypes.get_errno() if libc.sethostname(b"", -1) < 0 else 0,
            "left open": len(os.listdir("/proc/self/fd")) - before,
        }

    def number(function: Callable[..., object], *arguments: object) -> int:
        try:
            function(*arguments)
        except OSError as exc:
            return exc.errno or 0
        return 0

    found = result_of(attempts)
    refused = {"signal": errno.EPERM, "port": errno.EACCES, "filter": errno.EXDEV}
    allowed = {"rename": 0, "write": 0, "left open": 0}
    if not is_confined:
        refused = {"signal": 0, "port": 0, "filter": found["filter"]}
        assert errno.EXDEV != found["filter"]
    assert {**refused, **allowed} == found


@pytest.mark.root
def test_a_guardian_that_becomes_nobody_keeps_what_it_has() -> None:
    own = Path("/proc/self/status").read_text()
    found = status_after(0)
    assert f"CapEff:\t{found['CapEff'][0]}\n" in own
    assert found["Uid"] == ["0"] * 4


@pytest.mark.anyone
def test_processes_that_have_ended_count_against_forks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is not waited for takes a number of the kernel's, and is no process to kill."""
    base = 1 << 60
    tags = {os.getpid(): base}
    monkeypatch.setattr(processes, "tag_of", lambda pid: tags.get(pid, 1))
    sleeping = subprocess.Popen(["sleep", "600"])
    tags[sleeping.pid] = base
    try:
        assert [sleeping.pid] == landlocked.members(base), "and never oneself"
        assert (1, 1) == (landlocked.count(base), landlocked.count(base, zombies=True))
        sleeping.kill()
        os.waitid(os.P_PID, sleeping.pid, os.WEXITED | os.WNOWAIT)
        assert [] == landlocked.members(base)
        assert [sleeping.pid] == landlocked.members(base, zombies=True)
        assert (0, 1) == (landlocked.count(base), landlocked.count(base, zombies=True))
        assert not landlocked.kill_members(base)
    finally:
        sleeping.kill()
        sleeping.wait()


@pytest.mark.parametrize("tag", [1 << 60, 1])
def test_a_tag_that_root_may_not_ask_for_is_read(tag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """prlimit(2) wants a capability of root that containers may lack; another user needs none."""
    monkeypatch.setattr(processes, "tag_of", lambda _pid: 0)
    monkeypatch.setattr(landlocked, "tag_of", lambda _pid: tag)

    assert (tag > 1 and 0 == os.geteuid()) == landlocked._is_member(os.getpid(), 1 << 60)


@pytest.mark.anyone
def test_programs_end_before_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on with them if the guardian were killed in between."""
    base = 1 << 60
    script = "sleep 600 & echo $!; wait; read x"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None
        own = {agent.pid, int(agent.stdout.readline())}
        monkeypatch.setattr(processes, "tag_of", lambda pid: base if pid in own else 1)

        landlocked._end_programs(base, agent.pid)

        left = processes.read(f"/proc/{agent.pid}/task/{agent.pid}/children").split()
        assert all(processes.is_zombie(int(pid)) for pid in left), "dead, if not yet reaped"
        assert agent.poll() is None
        landlocked._end_programs(base, agent.pid)
        agent.kill()


@pytest.mark.anyone
def test_a_guardian_ends_the_programs_then_their_agent_then_what_is_left() -> None:
    """And until then holds nothing of the sandbox's, is looked into by nobody, and adopts what runs below."""
    libc = ctypes.CDLL(None)
    ours, theirs = wire.socketpair()
    said, say = os.pipe()
    kept = os.memfd_create("kept")

    def facts() -> tuple[object, ...]:
        adopts = ctypes.c_int()
        libc.prctl(37, ctypes.byref(adopts), 0, 0, 0)
        opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
        held = sum("memfd:kept" in each for each in opened)
        return libc.prctl(3, 0, 0, 0, 0), libc.prctl(39, 0, 0, 0, 0), adopts.value, held

    def guard() -> None:
        agents: list[int] = []

        def tell(*what: object) -> None:
            is_alive = [os.path.exists(f"/proc/{each}") for each in agents]
            os.write(say, f"{(*what, *is_alive)}\n".encode())

        def serve(*_: object) -> None:
            while True:
                signal.pause()

        def end_programs(base: int, agent: int) -> None:
            agents.append(agent)
            tell("programs", base, *facts())

        module: Any = landlocked
        module._serve, module._end_programs = serve, end_programs
        module.end_all = lambda base: tell("all", base)
        landlocked.main(theirs)

    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os.close(kept)
            guard()
        finally:
            os._exit(1)
    os.close(say)
    theirs.close()
    wire.send(ours, {"ids": 0, "tag_base": 5}, [kept])
    ours.close()
    os.close(kept)
    with open(said, encoding="utf-8") as file:
        told = file.read().splitlines()
    _pid, status = os.waitpid(pid, 0)

    assert [str(("programs", 5, 0, 1, 1, 0, True)), str(("all", 5, False))] == told
    assert landlocked.ENDED_ALL == os.waitstatus_to_exitcode(status)


@pytest.mark.anyone
def test_a_starter_that_cannot_fork_says_so_and_serves_the_next() -> None:
    host, theirs = wire.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            host.close()
            os.dup2(theirs.fileno(), 3, inheritable=False)
            pids = [0, 4711]

            def clone() -> int:
                if pids.pop(0):
                    return 4711
                raise OSError(errno.EAGAIN, "no more processes")

            module: Any = starter
            module.namespaces.clone_sibling = clone
            starter.main()
        finally:
            os._exit(1)
    theirs.close()
    host.settimeout(60)
    answers = []
    for _ in range(2):
        reply, asks = wire.socketpair()
        reply.settimeout(60)
        read, write = os.pipe()
        wire.send(host, "start", [asks.fileno(), write, write, write])
        os.close(write)
        asks.close()
        answers.append(wire.receive_raw(reply)[0])
        assert b"" == wire.receive_raw(reply)[0], "it keeps nothing of a request"
        assert readable([read], 60), "nor what came with it"
        os.close(read)
        reply.close()
    host.close()
    _pid, status = os.waitpid(pid, 0)

    assert answers[0].startswith(b"E%d fork: " % errno.EAGAIN)
    assert b"O4711" == answers[1]
    assert 0 == os.waitstatus_to_exitcode(status)


@pytest.mark.anyone
def test_no_signal_goes_to_a_number_that_is_anothers_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, asked = 1 << 60, list[int]()
    with ExitStack() as stack:
        for_other, own = (stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(2))

        def tag_of(pid: int) -> int:
            asked.append(pid)
            return base if pid == own.pid else 1

        monkeypatch.setattr(processes, "tag_of", tag_of)
        before = len(os.listdir("/proc/self/fd"))
        landlocked.signal_members([for_other.pid, 2**22 + 1, own.pid], base, signal.SIGKILL)
        assert -signal.SIGKILL == own.wait(60)
        assert for_other.poll() is None
        assert [for_other.pid, own.pid] == asked
        assert before == len(os.listdir("/proc/self/fd"))
        for_other.kill()


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("sockets_s", "execs_s", "most_ms"),
    [
        (None, None, None),
        (1.0, None, 1001.0),
        (None, 2.0, 2001.0),
        (3.0, 2.0, 2001.0),
        (1.0, 2.0, 1001.0),
    ],
)
def test_the_loop_waits_for_whatever_comes_first(
    sockets_s: float | None, execs_s: float | None, most_ms: float | None
) -> None:
    agent: Any = LandlockAgent.__new__(LandlockAgent)
    looked: list[int] = []
    agent.sockets = SimpleNamespace(look=lambda: looked.append(1), wait_s=lambda: sockets_s)
    agent.execs = SimpleNamespace(wait_s=lambda: execs_s)
    agent.watchdog, agent.file_locks = SimpleNamespace(wait_s=lambda: None), None

    assert most_ms == agent._timeout_ms()
    assert [1] == looked, "connections that wait are looked at in each turn"


@pytest.mark.anyone
def test_another_way_out_holds_from_then_on() -> None:
    agent: Any = LandlockAgent.__new__(LandlockAgent)
    agent.sockets = SimpleNamespace(network={"way": {"at": 1}, "v4": b""})
    for way in ({"at": 2}, None):
        assert b"" == agent._do_network(None, [], way)
        assert {"way": way, "v4": b""} == agent.sockets.network


@pytest.mark.anyone
def test_members_of_an_exec_are_those_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    base = 1 << 60
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    tags = {each.pid: base - 5 - number for number, each in enumerate(children)}
    monkeypatch.setattr(processes, "tag_of", lambda pid: tags.get(pid, 1))
    groups = LandlockTags(0, base)
    try:
        assert [[children[0].pid], [children[1].pid], []] == [groups.members(n) for n in (5, 6, 7)]
        assert 2 == groups.count()
        assert not groups.is_alone, "no signal goes to all processes of the host"
    finally:
        for each in children:
            each.kill()
            each.wait()


@pytest.mark.anyone
def test_what_is_packed_for_a_host_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    ours, theirs = socket.socketpair()
    ours.close()
    with closing(theirs), pytest.raises(OSError):
        landlocked._pack(theirs.fileno(), [(str(tmp_path), "/own")], [])
