"""Steps of a root with real mounts, each in namespaces of its own, and what refuses without the rest."""

from __future__ import annotations

import errno
import os
import stat
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher import build, newroot
from ringfence.linux import mounts, namespaces

AS_ROOT = 0 == os.geteuid()
OTHER = 12345 if AS_ROOT else 0  # without root there is one id
MAP = "0 0 65536" if AS_ROOT else f"0 {os.geteuid()} 1"
GROUPS = "0 0 65536" if AS_ROOT else f"0 {os.getegid()} 1"


@pytest.fixture
def alone(tmp_path: Path) -> Callable[[Callable[[Path], None]], None]:
    """Runs a function as PID 1 and root of new namespaces, in a tmpfs; what it asserts fails here."""

    def run(function: Callable[[Path], None]) -> None:
        said, say = os.pipe2(os.O_CLOEXEC)
        mapped, go = os.pipe2(os.O_CLOEXEC)
        pid, pidfd = namespaces.clone3(
            namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS | namespaces.CLONE_NEWPID
        )
        if pid == 0:
            try:
                os.read(mapped, 1)
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
                mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
                mounts.mount("none", str(tmp_path), "tmpfs", 0, "mode=0755")
                os.chdir(tmp_path)
                function(tmp_path)
            except BaseException:  # noqa: BLE001  the test hears of it
                os.write(say, traceback.format_exc().encode()[-60000:])
            finally:
                os._exit(0)
        for fd in (say, mapped, pidfd):
            os.close(fd)
        namespaces.write_id_maps(pid, MAP, GROUPS, deny_setgroups=not AS_ROOT)
        os.write(go, b"g")
        os.close(go)
        with open(said, "rb") as file:
            problem = file.read().decode()
        os.waitpid(pid, 0)
        assert not problem, problem

    return run


def new_root(uid: int = 0) -> newroot.NewRoot:
    shape: Any = {"uid": uid, "gid": uid}
    os.makedirs("covers", exist_ok=True)
    root = newroot.NewRoot(os.open(".", os.O_PATH | os.O_DIRECTORY), shape, [])
    root.covers = "/covers"
    return root


def refused(function: Callable[..., Any], *args: Any) -> int:
    """The number with which it is refused; 0: it is not."""
    try:
        function(*args)
    except OSError as exc:
        return exc.errno or 0
    return 0


def write(path: str) -> None:
    Path(path).write_text("written")


def mounted() -> str:
    return Path("/proc/self/mountinfo").read_text()


def test_what_is_protected_cannot_be_written_and_its_neighbour_can(alone: Any) -> None:
    def inside(_: Path) -> None:
        os.makedirs("work/kept")
        write("work/kept/file")
        write("work/file")
        newroot._protect(new_root(), "/work/kept")
        newroot._protect(new_root(), "/work/file")

        assert errno.EROFS == refused(write, "work/kept/file")
        assert errno.EROFS == refused(write, "work/file")
        assert 0 == refused(write, "work/other")
        for name in ("kept", "file"):
            assert errno.EBUSY == refused(os.rename, f"work/{name}", "work/elsewhere")

    alone(inside)


def test_what_is_pinned_can_be_written_but_not_moved(alone: Any) -> None:
    def inside(_: Path) -> None:
        os.makedirs("work/pinned")
        newroot._pin(new_root(), "/work/pinned")

        assert 0 == refused(write, "work/pinned/file")
        assert errno.EBUSY == refused(os.rename, "work/pinned", "work/elsewhere")
        assert errno.EBUSY == refused(os.rmdir, "work/pinned")

    alone(inside)


def test_what_is_hidden_is_covered_by_what_nobody_may_read_or_write(alone: Any) -> None:
    def inside(_: Path) -> None:
        os.makedirs("work/secrets")
        write("work/secrets/one")
        write("work/secret")
        root = new_root(OTHER)
        for path, make in (("/work/secrets", False), ("/work/secret", False), ("/work/no", True)):
            newroot._hide(root, path, make)
        newroot._hide(root, "/work/absent", False)

        assert [] == os.listdir("work/secrets") == os.listdir("work/no")
        assert "" == Path("work/secret").read_text()
        for name in ("secrets", "secret", "no"):
            assert 0 == stat.S_IMODE(os.stat(f"work/{name}").st_mode)
            assert errno.EBUSY == refused(os.rename, f"work/{name}", "work/elsewhere")
        assert errno.EROFS == refused(write, "work/secrets/new")
        assert errno.EROFS == refused(write, "work/secret")
        assert not os.path.exists("work/absent")

    alone(inside)


@pytest.mark.parametrize(
    ("mode", "of_way", "of_entry", "is_held"),
    [
        (0o755, OTHER, 0, True),  # the user's own: what is in it can be renamed
        (0o755, 0, OTHER, False),
        (0o777, 0, 0, True),
        (0o1777, 0, 0, False),
        (0o1777, 0, OTHER, True),  # of what is the user's own in it
        (0o1777, OTHER, 0, True),
    ],
)
@pytest.mark.root
def test_the_way_to_what_is_hidden_cannot_be_made_anew(
    alone: Any, mode: int, of_way: int, of_entry: int, is_held: bool
) -> None:
    def inside(_: Path) -> None:
        os.makedirs("way/entry")
        os.chown("way/entry", of_entry, of_entry)
        os.chown("way", of_way, of_way)
        os.chmod("way", mode)
        newroot._hide(new_root(OTHER), "/way/entry/secret", True)
        mounts.umount2("way/entry/secret", mounts.MNT_DETACH)  # itself a mount that holds the way

        held = errno.EBUSY if is_held else 0
        assert held == refused(os.rename, "way/entry", "way/elsewhere")

    alone(inside)


def test_what_is_masked_is_empty_and_stays_it(alone: Any) -> None:
    def inside(_: Path) -> None:
        os.makedirs("dev/empty")
        Path("dev/null").touch()
        mounts.mount("/dev/null", "dev/null", "none", mounts.MS_BIND)
        os.makedirs("proc/acpi")
        write("proc/acpi/one")
        write("proc/kcore")
        root = new_root()
        for name in ("/proc/acpi", "/proc/kcore", "/proc/absent"):
            newroot._mask(root, name)

        assert [] == os.listdir("proc/acpi")
        assert errno.EROFS == refused(write, "proc/acpi/two")
        assert "" == Path("proc/kcore").read_text()
        assert stat.S_ISCHR(os.stat("proc/kcore").st_mode)
        line = next(line for line in mounted().splitlines() if "/proc/acpi " in line)
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(line.split()[5].split(","))
        assert not os.path.exists("proc/absent")

    alone(inside)


def test_a_mount_of_which_a_later_step_fails_is_taken_back(alone: Any) -> None:
    def inside(_: Path) -> None:
        os.mkdir("source")
        write("source/file")
        root = new_root()
        count = len(os.listdir("/proc/self/fd"))
        for steps in (
            [("bind", "/at", 0), ("rewrite", "/absent", b"")],
            [("rewrite", "/absent", b""), ("bind", "/at", 0)],
        ):
            root.trees = [mounts.open_tree("source")]
            with pytest.raises(
                newroot.BuildError, match=r"^rewrite /absent: .*\[Errno 2\]|No such"
            ):
                newroot.run_or_undo(root, steps)
            os.chdir(os.path.join("/proc/self/fd", str(root.fd)))
            assert not os.path.exists("at/file")
            assert "/at " not in mounted()
        os.close(root.trees[0])  # the second never came to it
        assert count == len(os.listdir("/proc/self/fd"))

        root.trees = [mounts.open_tree("source")]
        newroot.run_or_undo(root, [("bind", "/at", 0)])
        assert os.path.exists("at/file")
        assert count == len(os.listdir("/proc/self/fd"))

    alone(inside)


@pytest.mark.parametrize("fails_before", [1, 2, 3])
def test_each_of_several_mounts_is_taken_back_and_none_that_was_there_before(
    alone: Any, fails_before: int
) -> None:
    """One lies in another; and those that come after the failed step were never there."""

    def inside(_: Path) -> None:
        for name in ("first", "second", "third"):
            os.makedirs(f"{name}/within")
            write(f"{name}/file")
        os.mkdir("before")
        mounts.mount("first", "before", "none", mounts.MS_BIND)
        root = new_root()
        steps = [("bind", "/at", 0), ("bind", "/at/within", 1), ("bind", "/beside", 2)]
        failing = ("rewrite", "/absent", b"")
        root.trees = [mounts.open_tree(name) for name in ("first", "second", "third")]
        count = len(os.listdir("/proc/self/fd"))
        with pytest.raises(newroot.BuildError, match=r"^rewrite /absent: "):
            newroot.run_or_undo(root, [*steps[:fails_before], failing, *steps[fails_before:]])

        assert count - fails_before == len(os.listdir("/proc/self/fd"))
        os.chdir(os.path.join("/proc/self/fd", str(root.fd)))
        places = {line.split()[4].rpartition("/")[2] for line in mounted().splitlines()}
        assert {"before"} == places & {"at", "within", "beside", "before"}
        assert {"file", "within"} == set(os.listdir("before"))
        for fd in root.trees[fails_before:]:
            os.close(fd)

        root.trees = [mounts.open_tree(name) for name in ("first", "second", "third")]
        newroot.run_or_undo(root, steps)
        for name in ("at", "at/within", "beside"):
            assert os.path.exists(f"{name}/file"), name

    alone(inside)


def test_what_is_to_be_the_users_own_is_and_nothing_else(alone: Any) -> None:
    def inside(_: Path) -> None:
        root = new_root(OTHER)
        newroot._dir(root, "/own", 0o750, True)
        newroot._dir(root, "/other", 0o700, False)
        newroot._image_dir(root, "image-own", 0o750, True)
        newroot._image_dir(root, "image-other", 0o700, False)
        newroot._session_dir(root, "/session/deep")

        own, other = (OTHER, OTHER), (0, 0)
        for name, owner in (
            ("own", own), ("other", other), ("image-own", own), ("image-other", other),
            ("session", other), ("session/deep", own),
        ):  # fmt: skip
            info = os.stat(name)
            assert owner == (info.st_uid, info.st_gid), name

    alone(inside)


def test_terminals_are_few_and_the_sandboxs_own(alone: Any) -> None:
    def inside(place: Path) -> None:
        os.mkdir("pts")
        newroot.bound_terminals("pts", 1)
        first = os.open("pts/ptmx", os.O_RDWR | os.O_NOCTTY)

        assert ["0", "ptmx"] == sorted(os.listdir("pts"))
        assert 0o620 == stat.S_IMODE(os.stat("pts/0").st_mode)
        assert 0o666 == stat.S_IMODE(os.stat("pts/ptmx").st_mode)
        assert errno.ENOSPC == refused(os.open, "pts/ptmx", os.O_RDWR | os.O_NOCTTY)
        (line,) = (line.split() for line in mounted().splitlines() if f"{place}/pts " in line)
        assert {"nosuid", "noexec"} <= set(line[5].split(","))
        newroot.bound_terminals("pts", 2, mounts.MS_REMOUNT)
        os.close(os.open("pts/ptmx", os.O_RDWR | os.O_NOCTTY))
        os.close(first)

    alone(inside)


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_boot_id_is_covered_by_what_has_no_name(alone: Any, is_masked: bool) -> None:
    def inside(_: Path) -> None:
        place = Path(newroot.BOOT_ID[1:])
        place.parent.mkdir(parents=True)
        if not is_masked:
            place.write_text("the host's")
        os.mkdir("dev")
        newroot._boot_id(new_root())

        assert [] == os.listdir("dev")
        assert is_masked or 4 == uuid.UUID(place.read_text().strip()).version
        assert is_masked or 0o444 == stat.S_IMODE(place.stat().st_mode)

    alone(inside)


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_tree_of_the_host_has_the_planned_attributes(alone: Any, is_checked: bool) -> None:
    def inside(place: Path) -> None:
        for name in ("source", "other", "read-only", "writable"):
            os.mkdir(name)
        info = os.stat("source")
        tree: Any = {
            "source": str(place / "source"),
            "device": info.st_dev,
            "inode": info.st_ino if is_checked else 0,
            "attributes": mounts.MOUNT_ATTR_RDONLY | mounts.MOUNT_ATTR_NOSUID,
        }
        count = len(os.listdir("/proc/self/fd"))
        root = new_root()
        root.attach(build.open_tree(tree, -1), "/read-only")
        root.attach(build.open_tree(tree | {"attributes": 0}, -1), "/writable")

        assert errno.EROFS == refused(write, "read-only/file")
        assert 0 == refused(write, "writable/file")
        lines = {line.split()[4]: line.split()[5] for line in mounted().splitlines()}
        assert {"ro", "nosuid"} <= set(lines[f"{place}/read-only"].split(","))
        assert "nosuid" not in lines[f"{place}/writable"]
        os.close(root.fd)
        assert count == len(os.listdir("/proc/self/fd"))

    alone(inside)


@pytest.mark.parametrize(
    ("forbid", "apart", "most"),
    [
        (True, True, ["0", "32", "16384"]),
        (False, False, ["", "8", "8192"]),
    ],
)
def test_a_root_of_its_own_and_nothing_of_the_hosts(
    alone: Any, forbid: bool, apart: bool, most: list[str]
) -> None:
    def inside(place: Path) -> None:
        shape: Any = {
            "scratch": str(place / "scratch"), "forbid_user_namespaces": forbid,
            "trusted_root": apart, "root_size_bytes": 1 << 20, "root_inodes": 50, "uid": 0,
            "gid": 0, "layers": [], "disk": None, "shared_memory_bytes": 0,
        }  # fmt: skip
        os.mkdir("scratch")
        names = ("max_user_namespaces", "max_inotify_instances", "max_inotify_watches")
        before = Path("/proc/sys/user/max_user_namespaces").read_text()
        steps = [
            *(("proc",), ("dir", "/etc", 0o755, False), ("file", "/etc/name", b"x", 0o644)),
            *(("dir", "/dev", 0o755, False), ("devpts",)),
        ]
        score = build.build_root(shape, steps, [], [])

        assert "/" == os.getcwd()
        assert ["dev", "etc", "proc"] == sorted(os.listdir("/"))
        assert ["/", "/dev/pts", "/proc"] == sorted(
            line.split()[4] for line in mounted().splitlines()
        )
        assert 0o022 == os.umask(0)
        values = [Path(f"/proc/sys/user/{name}").read_text().strip() for name in names]
        assert [most[0] or before.strip(), *most[1:]] == values
        assert errno.EROFS == refused(write, "/proc/self/oom_score_adj")
        os.write(score, b"900")
        assert "900\n" == Path("/proc/self/oom_score_adj").read_text()
        root = next(line.split() for line in mounted().splitlines() if line.split()[4] == "/")
        assert {"nosuid", "nodev"} <= set(root[5].split(","))
        info = os.statvfs("/")
        assert (1 << 20, 50) == (info.f_blocks * info.f_frsize, info.f_files)

        newroot_steps = [("dir", "/later", 0o755, False)]
        plan: Any = {**shape, "terminals": 1, "steps": newroot_steps, "root_size_bytes": 2 << 20}
        os.umask(0o022)
        build.complete_root(plan, shape, [])
        info = os.statvfs("/")
        assert (2 << 20, 50) == (info.f_blocks * info.f_frsize, info.f_files)
        assert os.path.isdir("/later")
        terminal = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        assert errno.ENOSPC == refused(os.open, "/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        os.close(terminal)
        assert 0o022 == os.umask(0)
        root = next(line.split() for line in mounted().splitlines() if line.split()[4] == "/")
        assert {"nosuid", "nodev"} <= set(root[5].split(","))

    alone(inside)


def test_what_is_mounted_from_now_on_is_seen_nowhere_else(alone: Any) -> None:
    def inside(_: Path) -> None:
        os.mkdir("outer")
        mounts.mount("none", "outer", "tmpfs")
        os.mkdir("outer/inner")
        mounts.mount("none", "outer/inner", "tmpfs")
        for place in ("outer", "outer/inner"):
            mounts.mount("none", place, "none", mounts.MS_SHARED)
        assert 2 == mounted().count(" shared:")
        build.make_mounts_private()

        assert 0 == mounted().count(" shared:") == mounted().count(" master:")

    alone(inside)
