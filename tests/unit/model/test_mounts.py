"""Mounts of one spec: none hides another, and each shows what its source names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.errors import InvalidRequest
from ringfence.model.mount import MEMORY_DIR, OUTPUTS_DIR, Mount
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize("again", ["/data", "/data/", "//data", "/./data"])
def test_two_at_one_target_are_refused(again: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SandboxSpec(mounts=(Mount("/data", "/usr"), Mount("/other"), Mount(again, "/var")))

    error = refused.value
    assert "mounts[2].target" == error.field
    assert "/data is the target of mounts[0]" in error.message
    assert error.hint
    assert not error.retryable


def test_the_directory_for_memory_is_a_mount_too() -> None:
    mount = Mount(MEMORY_DIR, "/var")
    with pytest.raises(InvalidRequest, match="memory_dir"):
        SandboxSpec(memory_dir="/usr", mounts=(mount,))

    assert (mount,) == SandboxSpec(mounts=(mount,)).mounts


def test_one_below_another_is_fine_in_any_order() -> None:
    mounts = (Mount("/data/in", "/var"), Mount("/data", "/usr"), Mount("/data2"))

    assert mounts == SandboxSpec(mounts=mounts, memory_dir="/usr").mounts
    assert SandboxSpec(mounts=(Mount(OUTPUTS_DIR, "/var"),)).mounts


@pytest.mark.parametrize("source", [".", "./", "././"])
def test_the_session_s_root_is_not_taken_for_no_source(source: str) -> None:
    """It would be a new and empty directory, and whoever wrote "." meant one with something in it."""
    with pytest.raises(InvalidRequest) as refused:
        Mount("/data", source)

    assert "source" == refused.value.field
    assert "absolute path" in refused.value.hint
    assert Mount("/data", "./sub").source == "sub"


def test_paths_may_be_path_objects() -> None:
    mount = Mount(Path("/data"), Path("/usr/share"))

    assert Mount("/data", "/usr/share") == mount
    assert (str, str) == (type(mount.target), type(mount.source))
    assert mount == Mount.from_json(mount.to_json())
