"""What a runtime leaves as a guest's memory is taken in as a file, and as nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ringfence.errors import IoError
from ringfence.model.snapshot import Snapshot
from ringfence.model.spec import SandboxSpec
from ringfence.snapshots.catalogue import Catalogue


def _save(directory: Path, memory: Path) -> Snapshot:
    read, write = os.pipe()
    os.close(write)
    try:
        catalogue = Catalogue(str(directory), "gvisor")
        return catalogue.save(
            read,
            "snap-1",
            SandboxSpec(),
            1 << 20,
            memory=str(memory),
            session_id="se-1",
            created_at=1.0,
        )
    finally:
        os.close(read)


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo"])
def test_a_link_in_its_place_leads_nowhere(tmp_path: Path, kind: str) -> None:
    """Followed, it would have made a file of the host's readable by everybody, and given it away."""
    others = tmp_path / "others"
    others.write_text("secret")
    others.chmod(0o600)
    memory = tmp_path / "memory"
    if kind == "symlink":
        memory.symlink_to(others)
    elif kind == "hard link":
        memory.hardlink_to(others)
    else:
        os.mkfifo(memory)

    with pytest.raises(IoError):
        _save(tmp_path / "snapshots", memory)

    assert 0o600 == stat.S_IMODE(others.stat().st_mode)
    assert [] == Catalogue(str(tmp_path / "snapshots"), "gvisor").list()


def test_a_file_is_taken_in(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(b"pages")
    memory.chmod(0o600)

    saved = _save(tmp_path / "snapshots", memory)

    assert saved.has_memory
    assert 5 == saved.size_bytes
    kept = Catalogue(str(tmp_path / "snapshots"), "gvisor").memory_of("snap-1")
    assert b"pages" == Path(kept).read_bytes()
    assert 0o444 == stat.S_IMODE(os.stat(kept).st_mode)
