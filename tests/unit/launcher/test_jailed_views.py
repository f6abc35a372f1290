"""What jails see of the host by way of a view server, which is in a jail itself, and what ends with it."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.linux.child import result_of

from ringfence.backends.local.jailed.bare_jail import bare_jail, filter_of_jail
from ringfence.backends.local.mounts.template import DEVICE, READ_ONLY, tree
from ringfence.launcher import wire
from ringfence.launcher.fuse import view
from ringfence.launcher.jail.jailer import Jailer
from ringfence.linux import privileges
from ringfence.policy import filters

pytestmark = pytest.mark.root
_PATIENCE_S = 20
_HOST_ID = 700000
_GET_DUMPABLE, _GET_SECUREBITS = 3, 27  # prctl(2)
_LINKS = [each for each in ("/bin", "/lib", "/lib64") if os.path.islink(each)]
_SHOWS = "stat -c %d /usr; echo up >&0; read word"


class Scene:
    """A jailer with a mount space, and the jails that it is asked for. In a process of its own."""

    def __init__(self, place: Path) -> None:
        signal.alarm(_PATIENCE_S)
        self.place = place
        self.here: Any = SimpleNamespace(
            trusted_root=True, uid=0, gid=0, scratch=str(place / "scratch")
        )
        self.host_end, inner = wire.socketpair()
        self.jailer = Jailer(inner)
        self.errors = os.memfd_create("errors")
        self.source = os.open(
            place / "source", os.O_PATH | os.O_DIRECTORY
        )  # among the host's mounts
        self.held: list[wire.Socket] = []  # of programs that wait
        self.frozen = place / "frozen"
        self.frozen.mkdir()
        (self.frozen / "cgroup.freeze").write_text("1")

    def ask(self, verb: str, argument: Any, fds: Sequence[int] = ()) -> tuple[str, list[int]]:
        """Have one request served; its answer, which a helper may give."""
        ours, theirs = wire.socketpair()
        wire.send(self.host_end, (verb, argument), [theirs.fileno(), *fds])
        theirs.close()
        assert self.jailer.serve_one()
        data, received = wire.receive_raw(ours)
        ours.close()
        return data.decode(), received

    def make_space(self) -> str:
        wanted = {"scratch": self.here.scratch, "owner": None, "device": "/dev/fuse"}
        return self.ask("mount_space", wanted)[0]

    def create(self, plan: Any, fds: Sequence[int] = ()) -> tuple[int, wire.Socket]:
        """Its pid, and the host's end of its standard input."""
        ours, theirs = wire.socketpair()
        said, pidfds = self.ask("create", plan, [theirs.fileno(), self.errors, *fds])
        theirs.close()
        for each in pidfds:
            os.close(each)
        assert said.startswith("O"), said
        return int(said[1:]), ours

    def start_server(self) -> tuple[int, wire.Socket]:
        """One that shows the host's /usr."""
        plan: Any = bare_jail("view", self.here, f"0 {_HOST_ID} 1", filters.load_view_filter())
        plan["trees"] = [tree("/usr", READ_ONLY)]
        plan["steps"] = [("dir", name, 0o755, False) for name in ("/proc", view.SHOWN)]
        plan["guest"].update(path=view.SHOWN, size_bytes=1 << 20, inodes=64)
        plan["guest"]["steps"] = [("bind", "/usr", 0)]
        plan["keep_capabilities"] = True
        pid, control = self.create(plan)
        assert (b"O", []) == wire.receive_raw(control)
        return pid, control

    def show(self, server: int, control: wire.Socket) -> str:
        """From now on jails see files by way of this one."""
        ids = f"0 {_HOST_ID} 1"
        probe = {**tree("/", READ_ONLY), "idmap": ids, "idmap_gid": ids}
        said, _ = self.ask("views", {"server": server, "probe": probe}, [control.fileno()])
        control.close()
        return said

    def plan(self, name: str, server: int = 0, tenant: str = "") -> Any:
        """A jail whose program tells the device and the owner of its /usr, and waits."""
        plan: Any = bare_jail(name, self.here, f"0 {_HOST_ID + 8} 8", filter_of_jail())
        plan["trees"] = [tree("/usr", READ_ONLY), tree("/dev/null", DEVICE)]
        plan["steps"] = [("dir", each, 0o755, False) for each in ("/proc", "/guest", "/more")]
        plan["steps"] += [("bind", "/usr", 0), ("bind", "/dev/null", 1)]
        plan["steps"] += [("symlink", each, os.readlink(each)) for each in _LINKS]
        plan["guest"].update(path="/guest", size_bytes=1 << 20, inodes=64)
        plan["argv"] = ["/usr/bin/sh", "-c", _SHOWS]
        plan["env"] = {"PATH": "/usr/bin"}
        if server:
            plan["view"] = {"server": server, "tenant": tenant, "once": "" != tenant, "trees": [0]}
            plan["view"] |= {"image": -1, "image_source": None}
        return plan

    def run(self, plan: Any, fds: Sequence[int] = ()) -> tuple[int, str]:
        """Start one; its pid, and what its program says of the device of its /usr."""
        at = os.fstat(self.errors).st_size
        pid, control = self.create(plan, fds)
        heard, _fds = wire.receive_raw(control)
        self.held.append(control)
        said = os.pread(self.errors, 1000, at).decode()
        assert b"up\n" == heard, (heard, said)
        return pid, said.strip()

    def mounted(self) -> int:
        assert self.jailer.space is not None
        return len(os.listdir(f"/proc/self/fd/{self.jailer.space.fd}"))

    def end(self, pid: int) -> None:
        """Kill a process, and have the jailer notice."""
        os.kill(pid, signal.SIGKILL)
        self.notice(pid)

    def notice(self, pid: int) -> None:
        if pid in self.jailer.jails:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self.jailer.reap()


@pytest.fixture
def place(require: Callable[[str], None]) -> Iterator[Path]:
    """A directory that other ids reach too."""
    require("user namespaces")
    require("fuse")
    with tempfile.TemporaryDirectory(prefix="rf-views-") as name:
        for path in (Path(name), Path(name, "scratch"), Path(name, "source")):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        Path(name, "source/file").touch()
        yield Path(name)


def within(place: Path, work: Callable[[Scene], Any]) -> Any:
    """What `work` returns, in a scene that is then cleared up."""

    def play() -> Any:
        scene = Scene(place)
        try:
            return work(scene)
        finally:
            scene.host_end.close()
            scene.jailer.run()

    return result_of(play)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}


def test_who_serves_views_has_one_right_and_sees_what_it_shows(place: Path) -> None:
    def look(scene: Scene) -> Any:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
        scene.make_space()
        pid, control = scene.start_server()
        proc = Path(f"/proc/{pid}")
        limits = (proc / "limits").read_text().partition("Max open files")[2].split()[:2]
        root = [sorted(os.listdir(proc / "root" / each)) for each in ("", "shown")]
        found = {
            "limits": len({*limits}),
            "root": root,
            "words": (proc / "cmdline").read_bytes().strip(b"\0").decode(),
            "open": sorted(map(int, os.listdir(proc / "fd"))),
            "owner": (proc / "environ").stat().st_uid,
            "status": status_of(pid),
        }
        control.close()
        scene.notice(pid)
        return [found, len(scene.jailer.jails)]

    found, left = within(place, look)
    status = found["status"]
    one_right = "0000000000000004"  # CAP_DAC_READ_SEARCH, over files of its own id
    for name, rights in (("Inh", 0), ("Prm", one_right), ("Eff", one_right), ("Bnd", one_right)):
        assert int(str(rights), 16) == int(status[f"Cap{name}"], 16), name
    assert 0 == int(status["CapAmb"], 16)
    assert ("1", "2", "1") == tuple(
        status[name] for name in ("NoNewPrivs", "Seccomp", "Seccomp_filters")
    )
    assert ([str(_HOST_ID)] * 4, "") == (status["Uid"].split(), status["Groups"])
    assert 0 == found["owner"], "nobody traces it"
    assert ("ringfence-view", "ringfence-view") == (status["Name"], found["words"])
    assert [0, 1, 2, 3] == found["open"]
    assert [["proc", "shown"], ["usr"]] == found["root"]
    assert 1 == found["limits"], "it may open as many as it could allow itself"
    assert 0 == left, "it ends with the host's end of its socket"


def test_rights_that_nobody_sees_from_outside_are_given_up_too() -> None:
    """Whatever it did, it could not get any back; and it begins only then."""
    read, write = os.pipe()

    def be_served() -> Any:
        host, control = wire.socketpair()
        host.shutdown(socket.SHUT_WR)  # which it takes for the end, once it serves
        server = os.fork()
        if server == 0:
            os.dup2(write, 2)
            view.serve(control, b"")
            bits, dumpable = (privileges.prctl(each) for each in (_GET_SECUREBITS, _GET_DUMPABLE))
            os.write(2, json.dumps([bits, dumpable, os.listdir("/proc/self/fd")]).encode())
            os._exit(0)
        os.waitpid(server, 0)
        return wire.receive_raw(host)[0].decode()

    assert "O" == result_of(be_served)
    os.close(write)
    with open(read, encoding="ascii") as file:
        bits, dumpable, opened = json.loads(file.read())
    assert (privileges.SECUREBITS_LOCKED, 0) == (bits, dumpable)
    assert {"0", "1", "2", "3"} == {*opened} - {"4"}, "the last one lists them"


def test_jails_see_files_by_way_of_their_server_and_end_with_it(place: Path) -> None:
    def look(scene: Scene) -> Any:
        host, theirs = wire.socketpair()
        too_early = scene.ask("views", {"server": 1, "probe": None}, [theirs.fileno()])[0]
        theirs.close()
        assert scene.make_space() == "O"
        space = scene.jailer.space
        assert scene.make_space() == "O"
        assert space is scene.jailer.space, "there is one"
        server, control = scene.start_server()
        assert scene.show(server, control) in ("O0", "O1")
        opened = len(os.listdir("/proc/self/fd"))
        frozen = {**scene.plan("one", server, "one"), "cgroup_dirs": [str(scene.frozen)]}
        (one, first), (two, second) = scene.run(frozen), scene.run(scene.plan("two", server, "two"))
        assert opened + 2 + 2 == len(os.listdir("/proc/self/fd")), "a view each, and the test's own"
        source, info = scene.source, os.fstat(scene.source)
        own = {**tree(str(place / "source"), READ_ONLY), "device": info.st_dev, "fd": 0}
        own["inode"] = info.st_ino
        plan = scene.plan("plain")
        plan["steps"].append(("bind", "/own", len(plan["trees"])))
        plan["trees"].append(own)
        plan |= {"placeholders": [("/none", "x", 1, 1)], "note": "/none/note"}
        plain, third = scene.run(plan, [source])
        found: dict[str, Any] = {
            "too early": too_early,
            "devices": [first, second, third],
            "users": [
                [record.server == server, record.views]
                for record in (scene.jailer.jails[pid] for pid in (one, two, plain))
            ],
            "mounted": [scene.mounted()],
            "own": os.listdir(f"/proc/{plain}/root/own"),
            "placeholders": scene.jailer.placeholders,
        }
        mount = {"op": "mount", "trusted_root": True, "trees": [own], "uid": 0, "gid": 0}
        pidfd = os.pidfd_open(two)
        steps = [("bind", "/more", 0)]
        found["mount"], _ = scene.ask("enter", {**mount, "steps": steps}, [pidfd, source])
        found["more"] = os.listdir(f"/proc/{two}/root/more")
        scene.end(two)
        found["mounted"].append(scene.mounted())
        opened = len(os.listdir("/proc/self/fd"))
        scene.end(server)
        with suppress(ChildProcessError):  # it may be reaped already
            os.waitid(os.P_PID, one, os.WEXITED | os.WNOWAIT)
        scene.jailer.reap()
        found["mounted"].append(scene.mounted())
        assert opened - 2 == len(os.listdir("/proc/self/fd")), "the view and the server's socket"
        os.kill(plain, 0)
        found["left"] = [[*scene.jailer.jails] == [plain], len(scene.jailer.views)]
        null, errors = os.open("/dev/null", os.O_RDWR), scene.errors
        opened = len(os.listdir("/proc/self/fd"))
        late = scene.plan("late", server, "late")
        found["late"], _ = scene.ask("create", late, [null, errors])
        assert opened == len(os.listdir("/proc/self/fd"))
        host.close()
        return found

    found = within(place, look)
    assert "E22 views: [Errno 22] make the mount space first" == found["too early"]
    first, second, third = map(int, found["devices"])
    here = os.stat("/usr").st_dev
    assert len({first, second, here}) == 3, "each tenant has a file system of its own"
    assert here == third
    assert [[True, [["one", 0, 0]]], [True, [["two", 0, 0]]], [False, []]] == found["users"]
    assert [2, 1, 0] == found["mounted"]
    assert ["file"] == found["own"] == found["more"]
    assert "O" == found["mount"]
    assert {"plain": [[["/none", "x", 1, 1]], "/none/note"]} == found["placeholders"]
    assert [True, 0] == found["left"], "another's jail is alive"
    assert found["late"].startswith("E107 view of /usr: ")
    assert "0" == (place / "frozen/cgroup.freeze").read_text()


def test_a_server_that_another_follows_ends_with_the_last_jail_that_it_has(place: Path) -> None:
    def look(scene: Scene) -> Any:
        scene.make_space()
        old, control = scene.start_server()
        scene.show(old, control)
        user, _ = scene.run(scene.plan("user", old, "user"))
        idle, control = scene.start_server()
        scene.show(idle, control)
        new, control = scene.start_server()
        scene.show(new, control)
        other, _ = scene.run(scene.plan("other", new, "other"))
        scene.notice(idle)
        found = [[*scene.jailer.views] == [old, new]]
        scene.end(user)
        scene.notice(old)
        return [*found, [*scene.jailer.views] == [new], {*scene.jailer.jails} == {new, other}]

    assert [True, True, True] == within(place, look)
