"""Helpers that go into the namespaces that the agent of a container made: mounts, and a snapshot's files."""

from __future__ import annotations

import io
import os
import signal
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linux.child import result_of

from ringfence.backends.local.mounts.template import READ_ONLY, tree
from ringfence.launcher import newroot
from ringfence.launcher.jail import contained
from ringfence.linux import mounts, namespaces

_INSIDE = 1000  # our id there
_OTHER = 4242  # an id that is not mapped


class Container:
    """A process in namespaces of its own, whose files are those below a directory of ours."""

    def __init__(self, place: Path) -> None:
        self.place, self.root = place, place / "root"
        for name in ("source", "agent", "root", "root/data", "root/home/mounted", "root/secret"):
            (place / name).mkdir(parents=True)
        for name in ("source/file", "root/home/file", "root/secret/file"):
            (place / name).touch()
        ready, told = os.pipe()
        mapped, tell = os.pipe()
        self.pid = namespaces.fork_with(0)
        if self.pid == 0:
            os.close(tell)
            namespaces.unshare(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS)
            os.write(told, b"u")
            os.read(mapped, 1)
            mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
            mounts.mount("mounted", str(self.root / "home/mounted"), "tmpfs")
            (self.root / "home/mounted/hosts").touch()
            os.write(told, b"m")
            while True:
                signal.pause()
        os.read(ready, 1)
        maps = f"{_INSIDE} {os.getuid()} 1", f"{_INSIDE} {os.getgid()} 1"
        namespaces.write_id_maps(self.pid, *maps, deny_setgroups=True)
        os.write(tell, b"g")
        assert b"m" == os.read(ready, 1)
        for fd in (ready, told, mapped, tell):
            os.close(fd)
        self.fds = [
            os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            for name in ("user", "mnt")
        ]

    def see(self, path: str | Path) -> Path:
        """A path as it is there."""
        return Path(f"/proc/{self.pid}/root{path}")

    def join(self, what: str, request: dict[str, Any], fds: list[int]) -> str:
        """Do it in a child; the step that failed, and why."""

        def work() -> str:
            try:
                contained.OPERATIONS[what]({"uid": _INSIDE, "gid": _INSIDE, **request}, fds)
            except newroot.BuildError as exc:
                return f"{exc.step}: {exc.cause.errno}"
            except OSError as exc:
                return f"{exc.errno} {exc.strerror}"
            return ""

        found: str = result_of(work)
        return found

    def furnish(self, steps: list[Any], hidden: list[Any]) -> str:
        source = os.open(self.place / "source", os.O_PATH | os.O_DIRECTORY)
        info = os.fstat(source)
        of = {"device": info.st_dev, "inode": info.st_ino, "fd": 0}
        request = {
            "trusted_root": os.geteuid() == 0,
            "trees": [{**tree(str(self.place / "source"), READ_ONLY), **of}],
            "steps": steps,
            "hidden": hidden,
            "place": str(self.place / "agent"),
        }
        said = self.join("furnish", request, [*self.fds, source])
        os.close(source)
        return said

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def container(require: Callable[[str], None]) -> Iterator[Container]:
    require("user namespaces")
    with tempfile.TemporaryDirectory(prefix="rf-within-") as name:
        made = Container(Path(name))
        try:
            yield made
        finally:
            made.close()


def out_of_reach(container: Container) -> str:
    """A path that nobody inside can make."""
    if os.geteuid() != 0:
        return "/usr/ringfence-absent"
    others = container.place / "others"
    others.mkdir(mode=0o755)
    os.chown(others, _OTHER, _OTHER)
    return str(others / "absent")


def test_what_is_mounted_is_read_only_there_and_nowhere_else(container: Container) -> None:
    data = container.root / "data"
    assert "" == container.furnish([("bind", str(data), 0)], [])

    assert ["file"] == os.listdir(container.see(data))
    assert os.statvfs(container.see(data)).f_flag & os.ST_RDONLY
    assert [] == os.listdir(data)


def test_of_what_fails_halfway_nothing_stays(container: Container) -> None:
    data = container.root / "data"
    failing = ("rewrite", str(container.root / "absent"), b"")
    said = container.furnish([("bind", str(data), 0), failing], [])

    assert f"rewrite {failing[1]}: 2" == said
    assert [] == os.listdir(container.see(data))


def test_what_is_hidden_is_covered_last_and_by_nothing_that_can_be_reached(
    container: Container,
) -> None:
    """What is absent is made where somebody inside could make it, if that is asked for."""
    secret, absent, made = (container.root / name for name in ("secret", "absent", "made"))
    within = container.root / "data/file"  # of what is mounted by a step
    hidden = [
        ("hide", str(secret), False),
        ("hide", str(absent), False),
        ("hide", str(within), False),
        ("hide", str(made), True),
        ("hide", out_of_reach(container), True),
    ]
    assert "" == container.furnish([("bind", str(container.root / "data"), 0)], hidden)

    for path in (secret, made, within):
        info = container.see(path).stat()
        assert 0 == stat.S_IMODE(info.st_mode), path
        assert stat.S_ISDIR(info.st_mode) == (path != within)
    assert not container.see(absent).exists()
    agent = container.place / "agent"
    assert [] == os.listdir(container.see(agent)), "where the covers were made is left as it was"
    assert agent.stat().st_dev == container.see(agent).stat().st_dev
    assert ["file"] == os.listdir(secret), "the control"


def test_where_no_cover_can_be_made_nothing_is_hidden_in_silence(container: Container) -> None:
    (container.place / "agent").rmdir()
    assert "hide: 2" == container.furnish([], [("hide", str(container.root / "secret"), False)])


def saved(container: Container, **request: Any) -> tuple[str, dict[str, tarfile.TarInfo]]:
    """What was refused, or else the members by names, without the directory that all are in."""
    read, write = os.pipe()
    given = {"changed": [], "gone": [], "own": [], "hosts": [], **request}
    said = container.join("save", given, [*container.fds, write])
    os.close(write)
    with open(read, "rb") as file:
        data = file.read()
    if said:
        return said, {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return "", {each.name.removeprefix(f".{container.root}/"): each for each in tar}


def test_what_was_changed_is_saved_and_what_is_anothers_or_mounted_is_not(
    container: Container,
) -> None:
    root = container.root
    for name in ("changed", "theirs", "hosts-too"):
        (root / name).write_text(name)
    if os.geteuid() == 0:
        os.chown(root / "theirs", _OTHER, _OTHER)
    (root / "shown").mkdir()
    (root / "shown/file").touch()
    said, found = saved(
        container,
        changed=[str(root / name) for name in ("changed", "theirs", "shown/file")],
        gone=[str(root / "home/gone"), str(root / "changed")],
        own=[str(root / "home"), str(root / "shown")],
        hosts=[str(root / "shown")],
    )

    assert "" == said
    theirs = {"theirs"} - ({"theirs"} if os.geteuid() == 0 else set())
    expected = {"home", "home/file", "home/.wh.gone", ".wh.changed", "changed", *theirs}
    assert expected == {*found}, "and nothing of what is mounted"
    assert (7, 0) == (found["changed"].size, found["home/.wh.gone"].size)
    names = [*found]
    assert names.index(".wh.changed") < names.index("changed"), "it was removed, and made again"


def test_a_mount_that_is_the_sandboxs_own_is_saved(container: Container) -> None:
    said, found = saved(container, own=[str(container.root / "home/mounted")])
    assert ("", {"home/mounted", "home/mounted/hosts"}) == (said, {*found})


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_a_name_that_was_told_as_another_is_refused(container: Container, what: str) -> None:
    said, _ = saved(container, **{what: [f"{container.root}/bad\ufffdname"]})
    assert said.startswith("84 "), "EILSEQ"


def test_files_are_put_back_as_the_users_and_what_is_gone_is_removed(container: Container) -> None:
    root = container.root
    for name in ("old", "kept"):
        (root / "home" / name).touch()
    content = os.memfd_create("content")
    with os.fdopen(os.dup(content), "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name in (".wh.old", "new"):
            member = tarfile.TarInfo(f".{root}/home/{name}")
            member.uid = member.gid = 0
            member.mode, member.size = 0o640, 0 if name == ".wh.old" else 4
            tar.addfile(member, io.BytesIO(b"text"))
    os.lseek(content, 0, os.SEEK_SET)
    assert "" == container.join("load", {}, [*container.fds, content])
    os.close(content)

    assert ["file", "kept", "mounted", "new"] == sorted(os.listdir(root / "home"))
    info = (root / "home/new").stat()
    assert (os.getuid(), os.getgid(), 0o640) == (
        info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode),
    )  # fmt: skip
    assert "text" == (root / "home/new").read_text()
