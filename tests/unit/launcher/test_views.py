"""File systems of one tenant each: what they show, who shares them, and when they are unmounted."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linux.child import result_of

from ringfence.backends.local.mounts import template
from ringfence.launcher import wire
from ringfence.launcher.fuse import view, views
from ringfence.linux import namespaces

pytestmark = pytest.mark.root
_DIRECTORY = os.O_PATH | os.O_DIRECTORY


def opened(path: str | Path) -> int:
    return os.open(path, _DIRECTORY | os.O_CLOEXEC)


class Scene:
    """A mount space and a server of its views, both in a child of the tests."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.space = views.MountSpace(str(place / "scratch"), None, "/dev/fuse")
        self.fds = len(os.listdir("/proc/self/fd"))
        ours, theirs = wire.socketpair()
        self.server = namespaces.fork_with(0)
        if self.server == 0:
            ours.close()
            os.chroot(place)
            view.Server(theirs).run()
            os._exit(0)
        theirs.close()
        self.views = views.Views(self.space, self.server, ours)

    def plan(self, tenant: str, *, once: bool = False) -> Any:
        return {"server": self.server, "tenant": tenant, "once": once, "trees": [0], "image": -1}

    def tree(self, path: str) -> Any:
        info = os.stat(self.place / path)
        ids = {"device": info.st_dev, "inode": info.st_ino, "idmap": "", "idmap_gid": "", "fd": -1}
        return {"source": f"/{path}", "attributes": template.READ_ONLY, **ids}

    def shown(self, tenant: str, *, once: bool = False) -> int:
        """A part of the template, as a tenant has it."""
        return self.views.open(self.tree("shown/usr"), self.plan(tenant, once=once), None)

    def image(self, tenant: str, name: str = "image") -> int:
        source = self.place / name
        return self.views.open(self.tree(name), self.plan(tenant), lambda: opened(source))

    def mounted(self) -> list[str]:
        return sorted(os.listdir(f"/proc/self/fd/{self.space.fd}"))

    def held(self) -> int:
        """How many descriptors are open for views."""
        return len(os.listdir("/proc/self/fd")) - self.fds

    def end(self) -> int:
        self.views.close()
        return os.waitpid(self.server, 0)[1]


@pytest.fixture
def place(tmp_path: Path, require: Callable[[str], None]) -> Path:
    require("fuse")
    for name in ("scratch", "shown/shown/usr", "shown/usr", "image", "another"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shown" / "shown" / "usr" / "file").write_text("of the template")
    for name in ("image", "another"):
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "scratch" / "before").touch()
    return tmp_path


def within(place: Path, work: Callable[[Scene], Any]) -> Any:
    """What `work` returns, in a scene that is then cleared up."""

    def play() -> Any:
        scene = Scene(place)
        try:
            return work(scene)
        finally:
            assert 0 == scene.end()
            assert 0 == scene.held()
            assert [] == scene.mounted()

    return result_of(play)


def text(fd: int) -> str:
    return Path(f"/proc/self/fd/{fd}/file").read_text()


def close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def test_each_tenant_has_file_systems_of_its_own(place: Path) -> None:
    def look(scene: Scene) -> Any:
        fds = [scene.shown("a"), scene.shown("a"), scene.image("a"), scene.image("a")]
        fds += [scene.shown("b"), scene.image("b", "another"), scene.image("a", "another")]
        devices = [os.fstat(fd).st_dev for fd in fds]
        said = [text(fd) for fd in fds]
        mounted = scene.mounted()
        close(*fds)
        return [[devices.index(each) for each in devices], said, len(mounted)]

    which, said, mounted = within(place, look)
    assert [0, 0, 2, 2, 4, 5, 6] == which
    assert 5 == mounted
    of_template = "of the template"
    assert [of_template, of_template, "image", "image", of_template, "another", "another"] == said


def test_what_is_shown_is_read_only_and_out_of_the_hosts_sight(place: Path) -> None:
    def look(scene: Scene) -> Any:
        fd = scene.image("a")
        flags = os.fstatvfs(fd).f_flag
        try:
            os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
            refused = 0
        except OSError as exc:
            refused = exc.errno or 0
        inside = os.stat("/proc/self/ns/mnt").st_ino
        places = [scene.space.outside(lambda: os.stat("/proc/self/ns/mnt").st_ino)]
        places.append(os.stat("/proc/self/ns/mnt").st_ino)
        try:
            scene.space.outside(lambda: os.open("/missing", os.O_RDONLY))
        except FileNotFoundError:
            places.append(os.stat("/proc/self/ns/mnt").st_ino)
        close(fd)
        seen = os.listdir(place / "scratch")
        wanted = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV
        return [refused, flags & wanted == wanted, inside, places, seen, scene.space.own.decode()]

    refused, is_restricted, inside, places, seen, own = within(place, look)
    assert errno.EROFS == refused
    assert is_restricted
    here = os.stat("/proc/self/ns/mnt").st_ino
    assert here != inside
    assert [here, inside, inside] == places
    assert ["before"] == seen == os.listdir(place / "scratch")
    assert "0 0" == own


def test_what_nobody_else_will_want_goes_with_its_last_jail(place: Path) -> None:
    def look(scene: Scene) -> Any:
        close(scene.shown("a", once=True), scene.shown("b"))
        first, second = (scene.views.use(scene.plan("a")) for _ in range(2))
        other = scene.views.use(scene.plan("b"))
        found = [scene.mounted()]
        for keys in (first, second, other):
            scene.views.release(keys)
            found.append(scene.mounted())
        scene.views.release(other and [("never", 0, 0)])  # one that is gone is passed over
        scene.views.users += 1
        return [found, scene.views.users]

    found, users = within(place, look)
    assert [["1", "2"], ["1", "2"], ["2"], ["2"]] == found
    assert 0 == users


def test_few_are_kept_for_who_comes_again_and_those_in_use_always(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_MOST_IDLE", 2)

    def look(scene: Scene) -> Any:
        found = []
        close(scene.shown("used"))
        keys = scene.views.use(scene.plan("used"))
        for tenant in ("a", "b", "a", "c", "a", "b"):
            close(scene.shown(tenant))
            found.append(scene.mounted())
        scene.views.release(keys)
        return [*found, scene.mounted()]

    assert [
        ["1", "2"],
        ["1", "2", "3"],
        ["1", "2", "3"],
        ["1", "2", "4"],  # of `a` and `b` the one that was opened last has stayed
        ["1", "2", "4"],
        ["1", "2", "5"],
        ["2", "5"],
    ] == within(place, look)


@pytest.mark.parametrize("is_used", [True, False])
def test_who_is_retired_serves_until_its_last_jail_is_gone(place: Path, is_used: bool) -> None:
    def look(scene: Scene) -> Any:
        close(scene.shown("a"))
        keys = scene.views.use(scene.plan("a")) if is_used else []
        scene.views.retire()
        closed = [scene.views._control.fileno() < 0]
        if is_used:
            scene.views.release(keys)
        closed.append(scene.views._control.fileno() < 0)
        return closed

    assert [not is_used, True] == within(place, look)


def test_a_server_that_is_gone_leaves_nothing_mounted(place: Path) -> None:
    def look() -> Any:
        scene = Scene(place)
        close(scene.shown("a"))
        before = scene.held()
        os.kill(scene.server, signal.SIGKILL)
        os.waitpid(scene.server, 0)
        refused = []
        works: list[Callable[[], int]] = [lambda: scene.image("b"), lambda: scene.shown("b")]
        for work in works:
            try:
                close(work())
            except OSError as exc:
                refused.append(exc.errno)
        found = [refused, scene.held() - before, scene.mounted()]
        scene.views.close()
        return [*found, scene.mounted(), scene.held()]

    refused, held, mounted, after, left = result_of(look)
    assert 2 == len(refused)
    assert (0, ["1"], [], 0) == (held, mounted, after, left)


def test_what_cannot_be_mounted_leaves_no_place_for_it(place: Path) -> None:
    def look(scene: Scene) -> Any:
        before = scene.held()
        scene.space._device = "/dev/null"  # no descriptor of which the kernel mounts
        try:
            scene.image("a")
        except OSError as exc:
            return [exc.errno, scene.held() - before, scene.mounted()]
        return []

    assert [errno.EINVAL, 0, []] == within(place, look)


def test_whether_ids_can_be_mapped_is_found_by_trying_and_leaves_nothing(place: Path) -> None:
    def look(scene: Scene) -> Any:
        before = scene.held()
        ids = {"idmap": "0 1000 1", "idmap_gid": "0 1000 1", "source": "/"}
        tree: Any = dict(scene.tree("shown/usr"), **ids)
        can = scene.views.can_map_ids(tree)
        return [can, scene.held() - before, scene.mounted()]

    can, held, mounted = within(place, look)
    assert can in (True, False)
    assert (0, []) == (held, mounted)


def test_a_server_lets_go_of_what_is_unmounted_and_of_what_is_forgotten(place: Path) -> None:
    def look(scene: Scene) -> Any:
        def served() -> int:
            return len(os.listdir(f"/proc/{scene.server}/fd"))

        def settled(wanted: int) -> bool:
            # It answers one after the other: what it was told before has been done by then.
            for _ in range(100):
                close(scene.shown("again"))
                os.listdir(f"/proc/self/fd/{scene.space.fd}/1")
                if served() <= wanted:
                    return True
            return False

        close(scene.shown("again"))
        before = served()
        fd = scene.image("a")
        said = text(fd)
        close(fd)
        during = served()
        (key,) = scene.views._views.keys() - {("again", 0, 0)}
        scene.views._close(scene.views._views.pop(key))
        return [said, during > before, settled(before)]

    assert ["image", True, True] == within(place, look)
