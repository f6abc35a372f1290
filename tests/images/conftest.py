"""A store of the test's own, and an image like alpine: busybox and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from tests.features import require
from tests.images.making import Entry, Made, directory, layer, program, symlink

PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234::/srv/app:/bin/sh\n"
APPLETS = (
    "sh",
    "ls",
    "cat",
    "echo",
    "id",
    "mkdir",
    "rm",
    "env",
    "pwd",
    "touch",
    "mv",
    "ps",
    "head",
    # What a step COPY takes.
    "tar",
    "gzip",
    "mktemp",
    "cp",
    "chmod",
    "dirname",
    "find",
    "xargs",
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    """An empty store, also that of sandboxes made in this process."""
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    return ImageStore()


def small(**config: object) -> Made:
    """An image of busybox in two layers."""
    require("busybox")
    busybox = shutil.which("busybox")
    assert busybox
    applets = [symlink(f"bin/{name}", "busybox") for name in APPLETS]
    base = layer(
        directory("bin"),
        program("bin/busybox", busybox),
        *applets,
        directory("etc"),
        Entry("etc/passwd", PASSWD),
        symlink("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
        directory("tmp", 0o1777),
        directory("srv/app"),
        Entry("srv/app/old", b"old"),
        symlink("var/srv", "/srv"),  # as /var/run is mostly /run
    )
    top = layer(
        Entry("etc/os-release", b"ID=small\n"),
        Entry("srv/app/.wh.old"),
        Entry("srv/app/new", b"new"),
    )
    return Made([base, top], config)


@pytest.fixture
def image(store: ImageStore, tmp_path: Path) -> str:
    """The name of a small image in `store`."""
    load(small(Env=["GREETING=hello"]).as_layout(tmp_path / "layout"), "small:1", store=store)
    return "small:1"
