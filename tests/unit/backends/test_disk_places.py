"""The directory with the disks of all sandboxes is shown to none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Mount, SandboxSpec
from ringfence.backends.local.mounts import disks
from ringfence.errors import InvalidRequest

pytestmark = pytest.mark.anyone


def test_no_mount_shows_the_disks_of_all(tmp_path: Path) -> None:
    """Neither the directory itself, nor one above it, nor by a link on either side."""
    top, beside = tmp_path / "above" / "disks", tmp_path / "above" / "beside"
    top.mkdir(parents=True)
    beside.mkdir()
    (tmp_path / "to-above").symlink_to(tmp_path / "above")
    (tmp_path / "to-disks").symlink_to(top)

    for source in (top, top.parent, tmp_path / "to-above", tmp_path / "to-disks"):
        for place in (top, tmp_path / "to-disks"):
            spec = SandboxSpec(mounts=(Mount("/data", str(source)),))
            with pytest.raises(
                InvalidRequest, match="where writable layers on disk are"
            ) as refusal:
                disks._check_mounts(spec, str(place))
            assert "mounts" == refusal.value.field
    disks._check_mounts(SandboxSpec(mounts=(Mount("/data", str(beside)), Mount("/own"))), str(top))
