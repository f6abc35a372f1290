"""Images from files: layouts, what `docker save` writes, directories; and damaged ones."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ringfence.errors import ImageRefused, InvalidRequest
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from tests.images.conftest import small
from tests.images.making import Entry, Made, digest_of, layer

pytestmark = pytest.mark.full


@pytest.fixture
def made() -> Made:
    return small(Cmd=["true"])


def test_the_same_image_whatever_it_comes_in(made: Made, tmp_path: Path, store: ImageStore) -> None:
    layout = made.as_layout(tmp_path / "layout")
    subprocess.run(["tar", "-C", layout, "-cf", str(tmp_path / "layout.tar"), "."], check=True)
    archive = made.as_docker_archive(tmp_path / "docker.tar", "x:1")

    ids = {load(path, "x:1", store=store).id for path in (layout, f"{layout}.tar", archive)}

    assert 1 == len(ids) == len(os.listdir(f"{store.directory}/roots"))


def test_a_directory(tmp_path: Path, store: ImageStore) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "proc" / "1").mkdir(parents=True)
    (root / "etc" / "name").write_text("mine")

    image = load(str(root), "mine:1", store=store)

    assert "mine" == Path(store.root(image), "etc/name").read_text()
    assert [] == os.listdir(Path(store.root(image), "proc"))


def test_damaged_layouts(made: Made, tmp_path: Path, store: ImageStore) -> None:
    layout = Path(made.as_layout(tmp_path / "layout"))
    blob = next(iter((layout / "blobs/sha256").glob(digest_of(made.blobs[0])[7:])))
    good = blob.read_bytes()

    blob.write_bytes(good[:-1] + b"!")
    with pytest.raises(ImageRefused, match="should be"):
        load(str(layout), "x", store=store)
    blob.unlink()
    blob.symlink_to("/etc/passwd")
    with pytest.raises(ImageRefused, match="missing"):
        load(str(layout), "x", store=store)
    blob.unlink()
    blob.write_bytes(good)
    load(str(layout), "x", store=store)
    assert 1 == len(store.images()), "the control"


def test_a_damaged_archive_of_an_image_that_is_here(
    made: Made, tmp_path: Path, store: ImageStore
) -> None:
    """Its configuration says which image it is; what else is in it is looked at all the same."""
    archive = Path(made.as_docker_archive(tmp_path / "docker.tar", "x:1"))
    whole = archive.read_bytes()
    load(str(archive), "x:1", store=store)
    load(str(archive), "x:2", store=store)

    archive.write_bytes(whole.replace(b"old" + bytes(400), b"bad" + bytes(400)))
    with pytest.raises(ImageRefused, match="should be"):
        load(str(archive), "x:3", store=store)
    assert ["docker.io/library/x:1", "docker.io/library/x:2"] == [
        image.reference for image in store.images()
    ]


def test_an_archive_without_one_of_its_layers(tmp_path: Path, store: ImageStore) -> None:
    told = [{"Config": "config.json", "Layers": ["0/layer.tar"]}]
    members = [Entry("manifest.json", json.dumps(told).encode()), Entry("config.json", b"{}")]
    (tmp_path / "x.tar").write_bytes(layer(*members))

    with pytest.raises(ImageRefused, match="is missing"):
        load(str(tmp_path / "x.tar"), "x", store=store)


@pytest.mark.parametrize(
    "members",
    [
        [Entry("../index.json", b"{}")],
        [Entry("manifest.json", b"[]")],
        [Entry("manifest.json", b"{")],
        [Entry("manifest.json", json.dumps([{"Config": "/etc/passwd", "Layers": []}]).encode())],
        [Entry("manifest.json", json.dumps([{"Config": "x", "Layers": ["../../x"]}]).encode())],
        [Entry("nothing", b"")],
        [Entry("index.json", b"{}"), Entry("index.json", b"{}")],
    ],
)
def test_archives_that_are_none(members: list[Entry], tmp_path: Path, store: ImageStore) -> None:
    (tmp_path / "x.tar").write_bytes(layer(*members))

    with pytest.raises(ImageRefused):
        load(str(tmp_path / "x.tar"), "x", store=store)
    assert [] == store.images()


def test_no_such_file(store: ImageStore) -> None:
    with pytest.raises(InvalidRequest):
        load("/nowhere/at/all", "x", store=store)


def test_what_a_crash_leaves_is_collected(made: Made, tmp_path: Path, store: ImageStore) -> None:
    load(made.as_layout(tmp_path / "layout"), "x", store=store)
    half = Path(store.directory, "roots", ".partial-x", "root")
    half.mkdir(parents=True)
    (half / "file").write_text("x")
    half.chmod(0o500)
    Path(store.blob(f"sha256:{'0' * 64}")).write_text("nobody's")

    store.collect()

    assert 1 == len(os.listdir(f"{store.directory}/roots"))
    assert [] == os.listdir(f"{store.directory}/blobs")


def test_what_cannot_be_an_image_is_told_by_the_name_it_was_given(
    tmp_path: Path, store: ImageStore
) -> None:
    text, pipe, plain = tmp_path / "text", tmp_path / "pipe", tmp_path / "plain.tar"
    text.write_text("no archive")
    os.mkfifo(pipe)
    subprocess.run(["tar", "-C", tmp_path, "-cf", str(plain), "text"], check=True)

    for path in (text, plain):
        with pytest.raises(ImageRefused, match=str(path)):
            load(str(path), "x:1", store=store)
    with pytest.raises(InvalidRequest, match="neither a regular file") as refusal:
        load(str(pipe), "x:1", store=store)
    assert "path" == refusal.value.field


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_not_called_a_full_disk(tmp_path: Path, store: ImageStore) -> None:
    closed = tmp_path / "closed.tar"
    closed.write_bytes(b"")
    closed.chmod(0)

    with pytest.raises(InvalidRequest, match="Permission denied") as refusal:
        load(str(closed), "x:1", store=store)

    assert ("path", True) == (refusal.value.field, "read" in refusal.value.hint)
