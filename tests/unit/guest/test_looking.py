"""What an agent sees of files, users and mounts, each rule with both of its sides."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.guest import agent as agent_module
from ringfence.guest import groups as cgroups
from ringfence.guest import looking, room
from ringfence.guest.agent import Agent
from ringfence.guest.files import FileRequests
from ringfence.guest.groups import Groups, MachineGroups
from ringfence.launcher.machine_code import process_image_elf
from ringfence.linux import libc, namespaces, privileges

pytestmark = pytest.mark.anyone


class TestMachineId:
    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        place = tmp_path / "machine-id"
        monkeypatch.setattr(looking, "_MACHINE_ID", str(place))
        return place

    def test_one_that_is_there_becomes_another(self, path: Path) -> None:
        path.write_text("0" * 32 + "\n")
        looking.renew_machine_id()
        first = path.read_text()
        looking.renew_machine_id()

        assert 33 == len(first)
        assert int(first, 16)
        assert first != path.read_text()

    @pytest.mark.parametrize("kind", ["missing", "empty", "directory", "fifo", "link"])
    def test_what_is_no_machine_id_stays_as_it_is(
        self, kind: str, path: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "target"
        target.write_text("of another")
        makers: dict[str, Any] = {
            "missing": lambda: None,
            "empty": path.touch,
            "directory": path.mkdir,
            "fifo": lambda: os.mkfifo(path),
            "link": lambda: path.symlink_to(target),
        }
        makers[kind]()
        before = len(os.listdir("/proc/self/fd"))

        looking.renew_machine_id()

        assert "of another" == target.read_text()
        assert before == len(os.listdir("/proc/self/fd"))
        assert kind != "empty" or path.read_bytes() == b""

    def test_a_path_below_a_file_is_an_error(self, path: Path, monkeypatch: Any) -> None:
        path.touch()
        monkeypatch.setattr(looking, "_MACHINE_ID", str(path / "below"))
        with pytest.raises(NotADirectoryError):
            looking.renew_machine_id()


def test_facts_of_a_process_that_is_gone_are_none() -> None:
    gone = 2**22 + 1
    assert (0, "?") == (looking.resident(gone), looking.name_of(gone))
    with pytest.raises(ProcessLookupError):
        looking.field_of("/proc/self/status", b"\nNoSuchField:")
    assert looking.resident(os.getpid()) > 1 << 20
    assert looking.name_of(os.getpid()) == Path("/proc/self/comm").read_text().strip()
    assert int(looking.field_of("/proc/self/status", b"\nPid:")) == os.getpid()


def test_holders_of_host_descriptors_are_others_than_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Descriptors of the host are named so in gVisor alone."""
    real = os.readlink
    other = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    holders = (str(os.getpid()), str(other.pid))

    def readlink(path: str) -> str:
        number = path.split("/")[2]
        return "host:[1]" if number in holders else real(path)

    with other:
        assert [] == looking.holders_of_the_hosts()
        monkeypatch.setattr(os, "readlink", readlink)
        assert [other.pid] == looking.holders_of_the_hosts()
        other.kill()


@pytest.mark.parametrize(
    ("number", "is_left_out"),
    [(errno.ENOENT, True), (errno.EINVAL, True), (errno.EACCES, False), (errno.EIO, False)],
)
def test_only_a_name_that_went_away_is_left_out_of_a_list(
    number: int, is_left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").touch()
    (tmp_path / "there").touch()
    real = looking.described

    def described(path: str) -> bytes:
        if path.endswith("gone"):
            raise OSError(number, "while we looked")
        return real(path)

    monkeypatch.setattr(looking, "described", described)
    requests: Any = FileRequests()
    requests.settings = {"uid": os.getuid()}
    body = os.memfd_create("body")
    nobody: Any = None
    try:
        if is_left_out:
            requests._do_list(nobody, [body], str(tmp_path))
            assert os.pread(body, 100, 0).startswith(b"there\0")
            assert b"gone" not in os.pread(body, 100, 0)
        else:
            with pytest.raises(OSError, match="while we looked"):
                requests._do_list(nobody, [body], str(tmp_path))
    finally:
        os.close(body)


class TestNumbers:
    def agent(self) -> Any:
        made: Any = Agent.__new__(Agent)
        made.execs = SimpleNamespace(counts_cpu=True, last_number=41)
        made.groups = SimpleNamespace(count=lambda: 3, memory_bytes=lambda: 4096, most=lambda: 77)
        made.watchdog = SimpleNamespace(settle=lambda: None)
        return made

    def test_usage_is_what_is_not_free_and_bounds_are_all_of_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = SimpleNamespace(f_blocks=1000, f_bfree=600, f_bavail=500, f_frsize=512, f_bsize=4096)
        root.f_files, root.f_ffree, root.f_favail = 90, 50, 40
        monkeypatch.setattr(room, "usage", lambda: root)
        nobody: Any = None

        assert b"3 4096 %d %d" % (400 * 512, 40) == self.agent()._do_usage(nobody, [])
        most, files, size, inodes = self.agent()._do_bounds(nobody, []).split()
        assert (b"77", 1000 * 512, 90) == (most, int(size), int(inodes))
        import resource

        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == int(files)

    @pytest.mark.parametrize("holds", [True, False])
    def test_a_process_with_a_descriptor_of_the_hosts_is_not_saved(
        self, holds: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = [os.getpid()] if holds else []
        monkeypatch.setattr(looking, "holders_of_the_hosts", lambda: found)
        agent, nobody = self.agent(), None
        agent.flows, agent.execs.running, agent.settings = [], {}, {"place": ""}
        if holds:
            with pytest.raises(OSError, match=f"pid {os.getpid()}") as busy:
                agent._do_settle(nobody, [])
            assert errno.EBUSY == busy.value.errno
        else:
            assert b"" == agent._do_settle(nobody, [])

    def test_a_guest_that_wakes_is_another_machine_than_the_one_that_was_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its name is set in a namespace of its own elsewhere; here it would be this host's."""
        place, names = tmp_path / "machine-id", list[str]()
        place.write_text("0" * 32 + "\n")
        monkeypatch.setattr(looking, "_MACHINE_ID", str(place))
        monkeypatch.setattr(namespaces, "sethostname", names.append)

        assert b"41" == self.agent()._do_wake(None, [], "fork-1")

        assert ["fork-1"] == names
        assert "0" * 32 + "\n" != place.read_text()

    def test_a_throttled_agent_believes_no_count(self) -> None:
        agent, nobody = self.agent(), None
        assert b"" == agent._do_throttled(nobody, [])
        assert not agent.execs.counts_cpu


class TestRoom:
    def test_a_copy_has_links_modes_and_empty_places_for_mounts(self, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        (source / "dir/mounted/below").mkdir(parents=True)
        (source / "dir").chmod(0o1750)
        (source / "link").symlink_to("dir/nowhere")
        (source / "file").write_text("of a mount")
        points = {str(source / "dir/mounted"), str(source / "file")}

        room._copy(str(source), str(target), points)

        assert 0o1750 == stat.S_IMODE((target / "dir").stat().st_mode)
        assert "dir/nowhere" == os.readlink(target / "link")
        assert [] == os.listdir(target / "dir/mounted")
        assert "" == (target / "file").read_text()

    @pytest.mark.parametrize("kind", ["file", "fifo"])
    def test_what_cannot_be_there_again_is_refused(self, kind: str, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        (source / "it").touch() if kind == "file" else os.mkfifo(source / "it")
        with pytest.raises(OSError) as refused:
            room._copy(str(source), str(tmp_path / "target"), {str(source / "other")})
        assert errno.EOPNOTSUPP == refused.value.errno

    def test_the_templates_own_files_are_copied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tmp_path / "own"
        source.mkdir()
        (source / "it").write_text("x")
        (source / "it").chmod(0o741)
        monkeypatch.setattr(room, "_OWN_FILES", f"{source}/")

        room._copy(str(source), str(tmp_path / "target"), set())

        copy = tmp_path / "target/it"
        assert ("x", 0o741) == (copy.read_text(), stat.S_IMODE(copy.stat().st_mode))

    def test_the_outermost_mounts_are_those_below_no_other(self) -> None:
        points = ["/a/b", "/a/b/c", "/a/bc", "/d"]
        assert ["/a/b", "/a/bc", "/d"] == [
            each for each in points if not room._has_above(each, points)
        ]

    def test_mount_points_are_read_unescaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "/proc" in room._mount_points()
        assert "/" in room._mount_points()


class _Tree:
    """A directory in which a new one has the files of a cgroup."""

    FILES = ("cgroup.procs", "pids.current", "pids.max", "cpuacct.usage_user", "cpuacct.usage_sys")

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._mkdir, self._rmdir = path, os.mkdir, os.rmdir
        self.fill("", "memory.usage_in_bytes", "memory.limit_in_bytes", "freezer.state")
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)
        hierarchy = lambda _place, _controllers: os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # noqa: E731
        monkeypatch.setattr(cgroups, "_hierarchy", hierarchy)

    def fill(self, group: str, *more: str) -> None:
        for name in (*self.FILES, *more):
            (self.path / group / name).write_text("" if name == "cgroup.procs" else "0")

    def mkdir(self, name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._mkdir(name, mode, dir_fd=dir_fd)
        if dir_fd is not None:
            self.fill(name)

    def rmdir(self, name: str, *, dir_fd: int | None = None) -> None:
        group = self.path / name
        if not group.exists():
            raise FileNotFoundError(errno.ENOENT, name)
        if self.read(f"{name}/cgroup.procs"):
            raise OSError(errno.EBUSY, "has members")
        for each in group.iterdir():
            each.unlink()
        self._rmdir(group)

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def write(self, name: str, value: object) -> None:
        (self.path / name).write_text(str(value))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Tree:
    return _Tree(tmp_path, monkeypatch)


class TestGroups:
    def groups(self, tree: _Tree, pids: int = 3) -> Groups:
        made = Groups("/place", pids)
        made.prepare()
        return made

    @pytest.mark.parametrize(("pids", "most"), [(1, "2"), (2, "2"), (3, "3")])
    def test_each_group_has_the_bound_of_processes(self, tree: _Tree, pids: int, most: str) -> None:
        groups = self.groups(tree, pids)
        tree.write("home/pids.current", 1)
        groups.enter(1)
        assert most == tree.read("kept/pids.max")
        groups._pids = pids + 5
        groups.enter(2)
        assert str(pids + 5) == tree.read("2/pids.max")

    def test_the_kept_group_serves_one_exec_after_the_other(self, tree: _Tree) -> None:
        groups = self.groups(tree)
        tree.write("home/pids.current", 1)
        groups.enter(7)
        me = str(os.getpid())
        assert me == tree.read("kept/cgroup.procs")
        tree.write("kept/cpuacct.usage_user", 50)
        tree.write("kept/cpuacct.usage_sys", 70)
        assert (50, 70) == groups.cpu_ns(7)
        assert [int(me)] == groups.members(7)
        assert not groups.remove(7), "it has members"
        tree.write("kept/cgroup.procs", "")
        assert groups.remove(7)
        assert [] == groups.members(7)

        groups.enter(8)
        tree.write("kept/cpuacct.usage_user", 60)
        assert (10, 0) == groups.cpu_ns(8), "time of the one before is not its own"

    def test_a_second_exec_has_a_group_that_goes_with_its_last_member(self, tree: _Tree) -> None:
        groups = self.groups(tree)
        tree.write("home/pids.current", 1)
        groups.enter(7)
        groups.enter(8)
        assert str(os.getpid()) == tree.read("8/cgroup.procs")
        tree.write("8/cpuacct.usage_user", 5)
        tree.write("8/cpuacct.usage_sys", 6)
        assert (5, 6) == groups.cpu_ns(8)
        assert not groups.remove(8)
        assert {8} == groups._others
        tree.write("8/cgroup.procs", "")

        assert groups.remove(8)

        assert set() == groups._others
        assert not (tree.path / "8").exists()
        assert groups.remove(8)

    @pytest.mark.parametrize(
        ("home", "kept", "other", "is_refused"),
        [(1, 1, 1, False), (1, 2, 1, True), (2, 1, 1, True)],
    )
    def test_all_groups_count_against_the_bound(
        self, tree: _Tree, home: int, kept: int, other: int, is_refused: bool
    ) -> None:
        """With the agent, which is in the home group and not counted."""
        groups = self.groups(tree, 3)
        tree.write("home/pids.current", 1)
        groups.enter(7)
        groups.enter(8)
        tree.write("home/pids.current", home)
        tree.write("kept/pids.current", kept)
        tree.write("8/pids.current", other)
        assert home - 1 + kept + other == groups.count()

        if is_refused:
            with pytest.raises(BlockingIOError):
                groups.enter(9)
            assert not (tree.path / "9").exists()
        else:
            groups.enter(9)
        groups.leave()
        assert str(os.getpid()) == tree.read("home/cgroup.procs")

    def test_nobody_else_enters_the_hierarchy(
        self, tree: _Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        groups = self.groups(tree)
        owned: list[tuple[int, int]] = []
        monkeypatch.setattr(os, "fchown", lambda _fd, uid, gid: owned.append((uid, gid)))
        tree.path.chmod(0o755)
        groups.keep()

        assert [(0, 0)] == owned
        assert 0o700 == stat.S_IMODE(tree.path.stat().st_mode)


class TestMachineGroups:
    @pytest.mark.parametrize(
        ("text", "lacked"),
        [
            ("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", False),
            ("oom_kill_disable 1\nunder_oom 1\noom_kill 0\n", False),
            ("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        ],
    )
    def test_what_the_kernel_killed_for_memory_is_told(
        self, tmp_path: Path, text: str, lacked: bool
    ) -> None:
        groups: Any = MachineGroups.__new__(MachineGroups)
        groups._trees = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        (tmp_path / "5").mkdir()
        (tmp_path / "5/memory.oom_control").write_text(text)

        assert lacked == groups.lacked_memory(5)
        assert not groups.lacked_memory(6)
        os.close(groups._trees)

    def test_limits_count_all_but_the_agent(self, tmp_path: Path) -> None:
        groups: Any = MachineGroups.__new__(MachineGroups)
        (tmp_path / "all").mkdir()
        for name, value in (("pids.max", "9"), ("pids.current", "4")):
            (tmp_path / "all" / name).write_text(value)
        (tmp_path / "memory.limit_in_bytes").touch()
        groups._bound_all = groups._trees = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)

        assert (8, 3) == (groups.most(), groups.count())
        groups.limit(5, 4096)

        assert "6" == (tmp_path / "all/pids.max").read_text()
        assert "4096" == (tmp_path / "memory.limit_in_bytes").read_text()
        os.close(groups._trees)


class TestLeaving:
    """Being another program before a snapshot, which gVisor refuses of one whose file is gone."""

    def calls(self, place: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        made: list[tuple[Any, ...]] = []

        def prctl(*arguments: int) -> None:
            made.append((*arguments[:2], os.readlink(f"/proc/self/fd/{arguments[2]}")))

        monkeypatch.setattr(privileges, "prctl", prctl)
        monkeypatch.setattr(libc, "munmap", lambda *where: made.append(where))
        before = len(os.listdir("/proc/self/fd"))
        agent_module.leave(place)
        assert before == len(os.listdir("/proc/self/fd"))
        return made

    def test_an_agent_of_its_own_place_becomes_what_is_mapped_besides(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = os.path.dirname(os.readlink("/proc/self/exe"))
        changed, unmapped = self.calls(place, monkeypatch)

        assert (privileges.PR_SET_MM, privileges.PR_SET_MM_EXE_FILE) == changed[:2]
        assert not changed[2].startswith(f"{place}/")
        assert (process_image_elf.BASE, process_image_elf.MOST_BYTES) == unmapped

    def test_another_program_stays_what_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [] == self.calls("/no/such/place", monkeypatch)
