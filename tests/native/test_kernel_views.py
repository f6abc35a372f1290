"""What the kernel itself shows of the host: mounted in no sandbox of root's, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.errors import InvalidRequest, IsolationError
from tests.features import require
from tests.native.outside import open_fds, until

COPY = "copy the files that are wanted into a directory and mount that"


@pytest.fixture(autouse=True)
def _root() -> None:
    require("root")  # an ordinary user's mounts keep their ids, and all of it can be had


@pytest.mark.parametrize("source", ["/sys/kernel", "/proc/cpuinfo"])
def test_who_starts_with_one_is_told_what_to_do(source: str, tmp_path: Path) -> None:
    with pytest.raises(IsolationError) as refused:
        Sandbox.create(mounts=[f"{source}:/mnt/x:ro"])
    assert COPY in refused.value.hint

    (tmp_path / "copy").write_bytes(Path("/proc/cpuinfo").read_bytes())
    with Sandbox.create(mounts=[f"{tmp_path}:/mnt/x:ro"]) as sandbox:  # the control: as it is told
        assert sandbox.files.read("/mnt/x/copy")


def test_who_mounts_one_later_is_told_it_too(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sandbox.mount("/sys/kernel:/mnt/x:ro")

    assert COPY in refused.value.hint


def test_the_zygote_holds_none_that_it_could_not_mount(sandbox: Sandbox) -> None:
    """Else it would hold the file system, a disk perhaps, until it ends; each try once more."""
    zygote = sandbox._inner.zygote.pid  # type: ignore[attr-defined]
    for _ in range(3):
        with pytest.raises(IsolationError):
            Sandbox.create(mounts=["/sys/kernel:/mnt/x:ro"])

    # The caller is told of the refusal before the zygote closes what it had opened.
    assert until(lambda: not any("kernel" in place for place in open_fds(zygote).values()))
