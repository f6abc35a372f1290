"""The agent's way from who starts it to who it stays, and the users that it and its children become."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.guest.serving import settings_of
from tests.unit.linux.child import result_of, status_of

from ringfence.guest import boot, process_image, users
from ringfence.launcher.machine_code import process_image_elf
from ringfence.linux import privileges

_GET_DUMPABLE = 3  # prctl(2)
_MAP = "0 700000 1\n1000 701000 1"


@pytest.mark.root
class TestUserNamespace:
    def test_an_agent_is_its_root_and_has_nothing_of_who_started_it(
        self, require: Callable[[str], None]
    ) -> None:
        require("user namespaces")

        def enter() -> Any:
            os.setgroups([4242])
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
            before = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("user", "uts", "net")]
            opened = len(os.listdir("/proc/self/fd"))
            limits = [(resource.RLIMIT_NOFILE, 9999, 9999), (resource.RLIMIT_CORE, 3, 5)]
            boot.enter_user_namespace(settings_of(rlimits=limits), boot.start_mapper(_MAP))
            after = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("user", "uts", "net")]
            try:
                os.waitpid(-1, os.WNOHANG)
                left = True
            except ChildProcessError:
                left = False
            return {
                "namespaces": [one == other for one, other in zip(before, after, strict=True)],
                "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
                "maps": [Path(f"/proc/self/{name}_map").read_text().split() for name in ("uid", "gid")],
                "limits": [resource.getrlimit(which) for which, *_ in limits],
                "dumpable": privileges.prctl(_GET_DUMPABLE),
                "opened": len(os.listdir("/proc/self/fd")) - opened,
                "left": left,
            }  # fmt: skip

        assert {
            "namespaces": [False, False, True],
            "ids": [[0] * 3, [0] * 3, []],
            "maps": [_MAP.split()] * 2,
            "limits": [[512, 512], [3, 5]],
            "dumpable": 0,
            "opened": 0,
            "left": False,
        } == result_of(enter)

    @pytest.mark.parametrize("ids", ["0 700000", "0 700000 1\n0 701000 1"])
    def test_without_its_ids_it_does_not_go_on(
        self, require: Callable[[str], None], ids: str
    ) -> None:
        require("user namespaces")

        def enter() -> Any:
            try:
                boot.enter_user_namespace(settings_of(), boot.start_mapper(ids))
            except OSError as exc:
                return [exc.errno, exc.strerror]
            return []

        assert [errno.EPERM, "ids could not be mapped"] == result_of(enter)


def test_a_program_that_maps_ids_waits_until_it_is_told(tmp_path: Path) -> None:
    program, out = tmp_path / "map-ids", tmp_path / "out"
    program.write_text(f"#!/bin/sh\nread word\necho $word $# > {out}\n")
    program.chmod(0o700)
    before = len(os.listdir("/proc/self/fd"))

    mapper = boot.start_mapper("", str(program))
    assert not out.exists()
    os.write(mapper.go, b"go\n")
    os.close(mapper.go)

    assert 0 == os.waitpid(mapper.pid, 0)[1]
    assert "go 0\n" == out.read_text()
    assert before == len(os.listdir("/proc/self/fd"))


def test_what_it_came_from_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("agent", "map-ids", "other"):
        (tmp_path / name).touch()
    for _ in range(2):
        boot._remove_what_we_came_from(str(tmp_path))
        assert ["other"] == os.listdir(tmp_path)


class TestUsers:
    @pytest.mark.root
    def test_another_user_for_a_moment_or_for_good(self) -> None:
        def become() -> Any:
            found = []
            users.is_root = True
            with users.As(1500):
                found.append([os.getresuid(), os.getresgid()])
            found.append([os.getresuid(), os.getresgid()])
            try:
                with users.As(1600):
                    raise FileNotFoundError
            except FileNotFoundError:
                found.append([os.getresuid(), os.getresgid()])
            users.is_root = False
            with users.As(1500):
                users.become_for_good(1500)()
                found.append([os.getresuid(), os.getresgid()])
            users.look()
            assert users.is_root
            users.become_for_good(1500)()
            found.append([os.getresuid(), os.getresgid()])
            users.look()
            return [found, users.is_root]

        found, is_root = result_of(become)
        root = [[0] * 3, [0] * 3]
        assert [[[0, 1500, 0], [0, 1500, 0]], root, root, root, [[1500] * 3] * 2] == found
        assert not is_root

    @pytest.mark.root
    def test_root_inside_again(self) -> None:
        def become() -> Any:
            os.setresgid(5, 5, 0)
            os.setresuid(5, 0, 0)
            users.become_root()
            return [os.getresuid(), os.getresgid()]

        assert [[0] * 3, [0] * 3] == result_of(become)

    @pytest.mark.parametrize(
        ("kept", "left"), [([], [0, 1, 2]), ([1, 5, 9], [0, 1, 2, 5, 9]), ([7, 3], [0, 1, 2, 3, 7])]
    )
    def test_a_child_keeps_these_descriptors_and_no_other(
        self, tmp_path: Path, kept: list[int], left: list[int]
    ) -> None:
        """In whatever order they are named; the standard ones lead nowhere."""
        (tmp_path / "source").touch()
        pid = os.fork()
        if pid == 0:
            try:
                source = os.open(tmp_path / "source", os.O_RDONLY)
                for fd in range(12):
                    os.dup2(source, fd)
                users.keep_only(kept)
                opened = [fd for fd in range(4096) if _target(fd)]
                kept_open = [[fd, _target(fd)] for fd in opened]
                (tmp_path / "found").write_text(json.dumps(kept_open))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

        rows = json.loads((tmp_path / "found").read_text())
        found = {fd: target for fd, target in rows if "/proc/" not in target}
        extra = {*found} - {*left}
        assert len(extra) <= 1, "null itself"
        assert {"/dev/null"} >= {found[fd] for fd in extra}
        for fd in left:
            expected = str(tmp_path / "source") if fd in kept else "/dev/null"
            assert expected == found[fd], fd

    @pytest.mark.parametrize("walled", [False, True])
    def test_how_soon_it_is_killed_for_memory_is_its_own_to_say_later(self, walled: bool) -> None:
        """Of that one file, and nothing else of /proc."""

        def keep() -> Any:
            if walled and os.geteuid() != 0:
                return []  # who copies a mount is root of a mount namespace
            before = len(os.listdir("/proc/self/fd"))
            users.keep_score(walled=walled)
            new = len(os.listdir("/proc/self/fd")) - before
            own = int(os.pread(users.score_fd, 16, 0))
            os.write(users.score_fd, b"%d" % min(1000, own + 7))
            path = os.readlink(f"/proc/self/fd/{users.score_fd}")
            return [
                new == 1,
                path.rpartition("/")[2],
                os.get_inheritable(users.score_fd),
                int(Path("/proc/self/oom_score_adj").read_text()) - min(1000, own + 7),
                status_of("Name") != "",
            ]

        found = result_of(keep)
        assert found in ([True, "oom_score_adj", False, 0, True], [] if walled else None)


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_process_that_is_kept_as_an_image_goes_on_as_the_agent_of_where_it_is() -> None:
    """It stops by itself. What a new process has not is made anew: ignored signals, and who it is."""

    def go_on() -> Any:
        found: list[Any] = []
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        users.is_root = os.getuid() != 0

        def begin(mapper: boot.Mapper) -> None:
            found.append([mapper.pid, mapper.go])

        boot.main = begin  # type: ignore[assignment]
        me = os.getpid()
        other = os.fork()
        if other == 0:
            while Path(f"/proc/{me}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                if os.getppid() != me:
                    os._exit(1)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        process_image.main()
        os.waitpid(other, 0)
        ignored = [signal.getsignal(each) for each in (signal.SIGPIPE, signal.SIGXFSZ)]
        same = users.is_root == (os.getuid() == 0)
        return [found, [each == signal.SIG_IGN for each in ignored], same]

    assert [[[-1, process_image_elf.GO_FD]], [True, True], True] == result_of(go_on)
