"""What a snapshot of a container has of the sandbox's own directories."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path

import pytest

from ringfence.launcher.helpers import tars
from ringfence.launcher.jail.contained import _ChangePacker

pytestmark = pytest.mark.anyone


def names_saved(own: list[Path], changed: list[Path], mounted: set[str]) -> set[str]:
    """Names in the stream, without the directory that all are in."""
    stream = os.memfd_create("stream")
    try:
        with tars.Writer(stream) as tar:
            packer = _ChangePacker(tar, os.getuid(), mounted)
            for path in changed:
                packer.add_change(str(path), not os.path.lexists(path))
            for path in own:
                packer.add(str(path), f".{path}")
        data = os.pread(stream, os.fstat(stream).st_size, 0)
    finally:
        os.close(stream)
    above = str((own or changed)[0].parent)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {name.removeprefix(f".{above}/") for name in tar.getnames()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("data", "data-of-mine", "data2", "deep/data"):
        (tmp_path / "home" / name).mkdir(parents=True)
        (tmp_path / "home" / name / "file").touch()
    return tmp_path / "home"


def test_what_is_mounted_is_left_out_and_no_name_that_begins_like_it(home: Path) -> None:
    mounted = {str(home / "data")}
    kept = {f"home/{name}/file" for name in ("data-of-mine", "data2", "deep/data")}

    assert kept == {n for n in names_saved([home], [], mounted) if n.endswith("file")}
    changed = sorted(home.rglob("file"))
    told = names_saved([], [home, *changed], mounted)
    assert kept == {f"home/{name.partition('home/')[2]}" for name in told if "file" in name}


@pytest.mark.parametrize("place", [".", "deep", "deep/.wh.notes/below"])
def test_a_name_that_would_remove_another_is_refused(home: Path, place: str) -> None:
    """Put back, `.wh.notes` would be lost, and `notes` with it."""
    path = home / place
    path.mkdir(parents=True, exist_ok=True)
    assert "home/deep" in names_saved([home / "data"], [], set()) | {"home/deep"}
    (path / "notes").touch()
    (path / ".wh.notes").touch()

    for own, changed in (([home], []), ([], [path / ".wh.notes"])):
        with pytest.raises(OSError, match="cannot be saved") as refused:
            names_saved(own, changed, set())
        assert errno.EINVAL == refused.value.errno
