"""The store of images: names, ids, locks, and what `collect` removes and what it leaves."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringfence.errors import ImageNotFound, ImageRefused
from ringfence.images import store as module
from ringfence.images.store import ImageStore, _link_tree, default_directory
from ringfence.images.unpack import Layer
from ringfence.model.image import Image
from tests.images.making import Entry, digest_of, directory, layer

PATIENCE_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(str(tmp_path / "images"))


def named(store: ImageStore, name: str, **told: object) -> Image:
    """An image without files, made in milliseconds, under a name."""
    return store.name(store.scratch(json.dumps({"config": told}).encode()), name)


def layer_file(tmp_path: Path, *entries: Entry, name: str = "layer") -> tuple[str, str]:
    data = layer(*entries)
    (tmp_path / name).write_bytes(data)
    return str(tmp_path / name), digest_of(data)


def entries(store: ImageStore, name: str) -> set[str]:
    return {*os.listdir(Path(store.directory, name))}


# -- asking ----------------------------------------------------------------------------------------


def test_an_image_is_found_by_each_way_to_write_its_name_and_by_its_id(store: ImageStore) -> None:
    image = named(store, "mine:1", Labels={"a": "b"})
    other = named(store, "ghcr.io/x/other", Labels={"c": "d"})

    for name in ("mine:1", "docker.io/mine:1", "library/mine:1", image.id):
        assert image.id == store.find(name).id
    assert ["docker.io/library/mine:1", "ghcr.io/x/other:latest"] == [
        each.reference for each in store.images()
    ]
    for name in ("mine", "mine:2", f"sha256:{'0' * 64}"):
        with pytest.raises(ImageNotFound):
            store.find(name)
    store.name(other, "mine:1")
    assert other.id == store.find("mine:1").id, "a name can come to mean another image"


def test_an_image_of_a_step_is_found_by_its_id_alone(store: ImageStore) -> None:
    key = f"sha256:{'a' * 64}"
    image = store.scratch(b"{}")
    with pytest.raises(ImageNotFound):
        store.find(image.id)
    assert None is store.step(key)
    store.remember_step(key, image)

    assert image.id == store.find(image.id).id
    assert (found := store.step(key)) is not None
    assert image.id == found.id
    assert [] == store.images()


def test_a_name_that_is_removed_while_they_are_listed_hides_no_other(store: ImageStore) -> None:
    """Or `collect` would take the files of all that come behind it."""
    images = [named(store, name, User=str(number)) for number, name in enumerate(("a", "b"))]
    gone = Path(store.directory, "names", "0000.json")  # which is read first
    gone.symlink_to("removed")

    store.collect()
    assert images == store.images()
    assert {each.id[7:] for each in images} == entries(store, "roots")


def test_a_user_that_the_image_does_not_have_is_no_reason_not_to_keep_it(store: ImageStore) -> None:
    image = named(store, "x", User="nobody-knows", WorkingDir="/srv", Cmd=["a"], Entrypoint=["b"])
    assert (None, "nobody-knows", "/") == (image.uid, image.user, image.home)
    assert ("/srv", ("b",), ("a",)) == (image.workdir, image.entrypoint, image.command)
    assert image == store.find("x")


@pytest.mark.parametrize("what", ["add", "scratch", "derive", "name", "collect"])
def test_whatever_adds_or_removes_waits_for_its_turn(store: ImageStore, what: str) -> None:
    image = named(store, "x")
    started = threading.Event()
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: store.add("y", b"{}", []),
        "scratch": lambda: store.scratch(b"{}"),
        "derive": lambda: store.derive(image, {"User": "7"}, []),
        "name": lambda: store.name(image, "y"),
        "collect": store.collect,
    }

    def run() -> None:
        started.set()
        calls[what]()

    before = {name: entries(store, name) for name in ("roots", "names")}
    thread = threading.Thread(target=run)
    with store._locked():
        thread.start()
        assert started.wait(PATIENCE_S)
        while thread.is_alive() and not is_waited_for(Path(store.directory, "lock")):
            time.sleep(0.001)
        assert thread.is_alive()
        assert before == {name: entries(store, name) for name in ("roots", "names")}
    thread.join()


def is_waited_for(path: Path) -> bool:
    """Whether somebody waits for a lock on a file: proc_locks(5)."""
    lines = Path("/proc/locks").read_text().splitlines()
    number = str(path.stat().st_ino)
    return any("->" in line and line.split()[6].split(":")[2] == number for line in lines)


def test_the_directories_are_this_users_alone(store: ImageStore) -> None:
    mask = os.umask(0)
    try:
        image = named(store, "x")
        store.remember_step("a" * 64, image)
        store.blob(image.id)
        with store.building("ab"):
            pass
        with store.fetching():
            pass
    finally:
        os.umask(mask)
    places = ["", "names", "roots", "steps", "blobs", "builds", "builds/ab"]
    places.append(f"roots/{image.id[7:]}")
    for name in places:
        assert 0o700 == stat.S_IMODE(Path(store.directory, name).stat().st_mode), name
    lock = Path(store.directory, "lock")
    assert 0o600 == stat.S_IMODE(lock.stat().st_mode)


@pytest.mark.parametrize("first", ["fetching", "blob", "building", "remember_step", "scratch"])
def test_whatever_comes_first_makes_the_store_for_this_user_alone(
    tmp_path: Path, store: ImageStore, first: str
) -> None:
    image = named(ImageStore(str(tmp_path / "other")), "x")
    mask = os.umask(0)
    try:
        if first in ("fetching", "building"):
            with store.fetching() if first == "fetching" else store.building("ab"):
                pass
        elif first == "blob":
            store.blob(image.id)
        elif first == "scratch":
            store.scratch(b"{}")
        else:
            store.remember_step("ab", image)
    finally:
        os.umask(mask)
    for top, _, _ in os.walk(store.directory):
        mode = stat.S_IMODE(os.stat(top).st_mode)
        assert 0o700 == mode or top.endswith("/root"), top


def test_no_id_and_no_digest_leads_to_another_place(store: ImageStore) -> None:
    image = named(store, "x")
    for wrong in ("../../x", "sha256:../x", image.id[:-1], f"{image.id}/../x", ""):
        with pytest.raises(ImageRefused):
            store.blob(wrong)
        with pytest.raises(ImageNotFound):
            store._root(wrong)


def test_files_that_are_gone_cannot_be_held(store: ImageStore) -> None:
    image = named(store, "x")
    before = len(os.listdir("/proc/self/fd"))
    os.close(store.hold(image))
    store.remove("x")
    store.collect()
    with pytest.raises(ImageNotFound, match="are gone"):
        store.hold(image)
    assert before == len(os.listdir("/proc/self/fd"))


def test_files_are_held_or_collected_and_never_both(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody begins to use what is being removed, which takes a while."""
    image, seen = named(store, "x"), list[bool]()
    store.remove("x")
    remove = module._remove

    def removing(path: str) -> None:
        with pytest.raises(ImageNotFound):
            store.hold(image)
        seen.append(os.path.exists(os.path.join(path, "root")))
        remove(path)

    monkeypatch.setattr(module, "_remove", removing)
    before = len(os.listdir("/proc/self/fd"))
    assert (0, []) == store.collect()
    assert [True] == seen
    assert set() == entries(store, "roots")

    again = named(store, "x")
    path = Path(store._root(again.id), "image")
    with ThreadPoolExecutor() as pool, path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as who collects has it
        holding = pool.submit(store.hold, again)
        while not holding.done() and not is_waited_for(path):
            time.sleep(0.001)
        path.parent.rename(path.parent.with_name(".partial-of-it"))
        assert named(store, "x").id == again.id, "made anew meanwhile"
        fcntl.flock(file, fcntl.LOCK_UN)
        with pytest.raises(ImageNotFound, match="are gone"):
            holding.result(PATIENCE_S)
    assert before == len(os.listdir("/proc/self/fd"))
    os.close(store.hold(again))


@pytest.mark.parametrize("kind", ["variable", "data home", "home"])
def test_where_images_are_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGFENCE_IMAGES", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(os, "geteuid", lambda: 0 if kind == "variable" else 5)
    expected = "/home/me/.local/share/ringfence/images"
    if kind == "variable":
        assert "/var/lib/ringfence/images" == default_directory()
        monkeypatch.setenv("RINGFENCE_IMAGES", "here")
        expected = f"{os.getcwd()}/here"
    elif kind == "data home":
        monkeypatch.setenv("XDG_DATA_HOME", "/data")
        expected = "/data/ringfence/images"
    assert expected == default_directory()


# -- adding ----------------------------------------------------------------------------------------


def test_layers_and_digests_of_them_are_of_one_number(store: ImageStore, tmp_path: Path) -> None:
    path, digest = layer_file(tmp_path, Entry("x", b"1"))
    for digests in ([digest, digest], [digest] * 3):
        told = json.dumps({"rootfs": {"diff_ids": digests}}).encode()
        with pytest.raises(ImageRefused, match="names"):
            store.add("x", told, [Layer(path)])
    assert [] == store.images()


def test_what_could_not_be_unpacked_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    path, _ = layer_file(tmp_path, Entry("d/x", b"1"), Entry("../x", b"1"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ImageRefused):
        store.add("x", b"{}", [Layer(path)])

    assert set() == entries(store, "roots")
    assert [] == store.images()
    assert before == len(os.listdir("/proc/self/fd"))
    named(store, "x")  # and the lock is free


def test_layers_of_an_image_that_is_here_are_compared_unless_they_were(
    store: ImageStore, tmp_path: Path
) -> None:
    path, digest = layer_file(tmp_path, Entry("x", b"1"))
    told = json.dumps({"rootfs": {"diff_ids": [digest]}}).encode()
    image = store.add("x:1", told, [Layer(path)])
    Path(path).write_bytes(layer(Entry("x", b"2")))

    with pytest.raises(ImageRefused):
        store.add("x:2", told, [Layer(path)])
    assert ["docker.io/library/x:1"] == [each.reference for each in store.images()]
    assert image.id == store.add("x:2", told, [Layer(path, is_known=True)]).id
    assert "1" == Path(store.root(image), "x").read_text()


def test_an_image_on_top_of_another_shares_its_files_and_changes_none(
    store: ImageStore, tmp_path: Path
) -> None:
    path, digest = layer_file(
        tmp_path, directory("shut", 0o555), Entry("shut/a", b"12"), Entry("b", b"345")
    )
    told = json.dumps({"rootfs": {"diff_ids": [digest]}, "config": {"Env": ["A=1"]}}).encode()
    base = store.add("base", told, [Layer(path)])
    changed = (Entry("b", b"new!"), directory("shut", 0o555), Entry("shut/.wh.a"))
    top, other = layer_file(tmp_path, *changed, name="top")
    image = store.derive(base, {"Env": {"B": "2"}}, [Layer(top, other)], whole=True)
    plain = store.derive(base, {"User": "7"}, [])

    assert ("345", "new!") == tuple(Path(store.root(i), "b").read_text() for i in (base, image))
    assert (["a"], []) == tuple(os.listdir(Path(store.root(i), "shut")) for i in (base, image))
    assert (5, 9, 5) == (base.size_bytes, image.size_bytes, plain.size_bytes)
    assert ({"A": "1", "B": "2"}, 7) == (image.env, plain.uid)
    assert Path(store.root(plain), "b").samefile(Path(store.root(base), "b"))
    for each in (base, image, plain):
        assert 0o555 == stat.S_IMODE(Path(store.root(each), "shut").stat().st_mode), each


def test_links_and_modes_of_a_tree_are_linked_as_they_are(tmp_path: Path) -> None:
    base, root = tmp_path / "base", tmp_path / "root"
    (base / "d" / "e").mkdir(parents=True)
    root.mkdir()
    (base / "d" / "file").write_text("four")
    (base / "link").symlink_to("d/file")
    (base / "out").symlink_to(tmp_path)
    (base / "d" / "e").chmod(0o500)
    (base / "d").chmod(0o511)

    assert 4 + len("d/file") + len(str(tmp_path)) == _link_tree(str(base), str(root), whole=True)
    assert ("d/file", str(tmp_path)) == (os.readlink(root / "link"), os.readlink(root / "out"))
    assert (root / "d" / "file").samefile(base / "d" / "file")
    assert [0o511, 0o500] == [stat.S_IMODE((root / n).stat().st_mode) for n in ("d", "d/e")]


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_built_by_one_at_a_time(store: ImageStore, fails: bool) -> None:
    def attempt(key: str) -> bool:
        """Tell whether a lock is free."""
        fd = os.open(Path(store.directory, "builds", key[:2]), os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    before = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(KeyError), store.building("abcd") as path:
        Path(path).write_text("half a layer")
        assert not attempt("ab")
        with store.building("cdef") as other:
            assert path != other
        if fails:
            raise KeyError
    assert attempt("ab")
    assert not Path(path).exists()
    assert before == len(os.listdir("/proc/self/fd"))


# -- removing --------------------------------------------------------------------------------------


def test_a_name_that_is_removed_is_one_of_several(store: ImageStore) -> None:
    image = named(store, "x:1")
    store.name(image, "x:2")

    store.remove("x:1")
    store.collect()
    assert image.id == store.find("x:2").id
    assert {image.id[7:]} == entries(store, "roots")
    store.remove("x:2")
    with pytest.raises(ImageNotFound) as refused:
        store.remove("x:2")
    assert "image list" in refused.value.hint
    assert (0, []) == store.collect()
    assert set() == entries(store, "roots")


def test_what_is_collected_is_counted(store: ImageStore, tmp_path: Path) -> None:
    path, _ = layer_file(tmp_path, Entry("x", b"12345"))
    image = store.add("x", b"{}", [Layer(path)])
    kept, loose = (f"sha256:{each * 64}" for each in "ab")
    Path(store.blob(kept)).write_bytes(b"123")
    Path(store.blob(loose)).write_bytes(b"1234567")
    store.remember_blobs(image, [kept])

    assert (7, []) == store.collect()
    assert {kept[7:]} == entries(store, "blobs")
    store.remove("x")
    assert (8, []) == store.collect()
    assert set() == entries(store, "blobs") | entries(store, "roots")


def test_nothing_is_collected_that_is_held_or_fetched_or_built(store: ImageStore) -> None:
    image = named(store, "x")
    blob = Path(store.blob(f"sha256:{'a' * 64}"))
    blob.write_bytes(b"123")
    store.remember_blobs(image, [f"sha256:{'a' * 64}"])
    store.remove("x")

    held = store.hold(image)
    assert (0, [image.id]) == store.collect()
    assert blob.exists(), "blobs of what is in use stay"
    os.close(held)
    with store.fetching(), store.building("ab") as path:
        Path(path).write_text("a layer")
        assert (0, []) == store.collect()
        assert blob.exists()
        assert Path(path).exists()
        Path(store.directory, "builds", "cd").mkdir()
        left = Path(store.directory, "builds", "cd", "layer")
        left.write_text("of a killed builder")
        store.collect()
        assert not left.exists()
    assert (3, []) == store.collect()


def test_a_step_is_kept_as_long_as_its_files(store: ImageStore) -> None:
    image, other = named(store, "x"), store.scratch(b'{"config": {"User": "7"}}')
    store.remember_step("a" * 64, image)
    store.remember_step("b" * 64, other)

    store.collect()
    assert {f"{'a' * 64}.json"} == entries(store, "steps")
    assert None is store.step("b" * 64)
    assert {image.id[7:]} == entries(store, "roots")


@contextlib.contextmanager
def elsewhere(*argv: str) -> Iterator[None]:
    """A process in a mount namespace of its own, once it has done what `argv` does."""
    script = '"$@" && echo done && read x'
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "sh", "-c", script, "sh", *argv]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            pytest.skip("no mount namespace can be made here")
        yield
        process.stdin.close()


def test_files_that_any_process_has_mounted_are_not_collected(
    store: ImageStore, tmp_path: Path
) -> None:
    """Sandboxes outlive a server that was killed, and the lock that it held."""
    image = named(store, "x")
    store.remove("x")
    (tmp_path / "there").mkdir()

    with elsewhere("mount", "--bind", store.root(image), str(tmp_path / "there")):
        assert (0, [image.id]) == store.collect()
        assert os.path.isdir(store.root(image))
    assert (0, []) == store.collect()
    assert set() == entries(store, "roots")


def test_a_file_is_seen_whole_or_not_at_all(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = named(store, "x")
    before = {*os.listdir(store.directory)}

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as full:
        full.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="full"):
            store.name(image, "y")
    assert before == {*os.listdir(store.directory)}
    assert ["docker.io/library/x:latest"] == [each.reference for each in store.images()]
    Path(store.directory, ".partial-of-a-killed-process").write_text("")
    store.collect()
    assert before == {*os.listdir(store.directory)}


def test_a_killed_process_gives_the_store_back(store: ImageStore) -> None:
    image = named(store, "x")
    code = (
        "import sys, time\nfrom ringfence.images.store import ImageStore\n"
        "store = ImageStore(sys.argv[1])\nfd = store.hold(store.find('x'))\n"
        "with store._locked():\n print('held', flush=True)\n time.sleep(1000)"
    )
    argv = [sys.executable, "-c", code, store.directory]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "held\n" == process.stdout.readline()
        fd = os.open(Path(store.directory, "lock"), os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        process.kill()
    store.remove("x")
    assert [] == store.collect()[1]
    assert not os.path.exists(store.root(image))
    assert hashlib.sha256(b'{"config": {}}').hexdigest() == image.id[7:]


def test_what_is_made_a_second_time_is_the_first(store: ImageStore, tmp_path: Path) -> None:
    base = named(store, "base")
    path, digest = layer_file(tmp_path, Entry("a", b"1"))
    made = [store.derive(base, {"User": "7"}, [Layer(path, digest)]) for _ in range(2)]
    assert made[0].id == made[1].id
    assert made[0].size_bytes == made[1].size_bytes == 1
    assert 2 == len(entries(store, "roots"))
    configuration = json.dumps({"config": {"Env": ["A=b"]}}).encode()
    assert store.scratch(configuration).id == store.scratch(configuration).id
    assert 3 == len(entries(store, "roots"))


def test_a_name_that_is_given_here_has_no_digest_of_a_registry(
    store: ImageStore, tmp_path: Path
) -> None:
    path, _ = layer_file(tmp_path, Entry("a", b"1"))
    pulled = store.add("there/x", b"{}", [Layer(path)], digest=f"sha256:{'d' * 64}")
    assert f"sha256:{'d' * 64}" == store.find("there/x").digest
    again = store.name(pulled, "mine")
    assert ("docker.io/library/mine:latest", "") == (again.reference, again.digest)
    assert again == store.find("mine")
    assert pulled == store.find("there/x")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "fails"), KeyboardInterrupt(), ValueError()])
def test_whatever_interrupts_a_write_or_a_root_leaves_no_part_of_it(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    image = named(store, "x")
    path, _ = layer_file(tmp_path, Entry("a", b"1"))
    roots, files = entries(store, "roots"), {*os.listdir(store.directory)}

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(type(error)):
            store.name(image, "y")
        with pytest.raises(type(error)):
            store.add("z", b"{}", [Layer(path)])
    assert (roots, files) == (entries(store, "roots"), {*os.listdir(store.directory)})
