"""One file in and out: a guest with a kernel of its own gives streams, which have no places to seek."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import Sandbox
from tests.features import require

pytestmark = pytest.mark.full


def test_a_file_goes_in_and_comes_out(tmp_path: Path) -> None:
    require("user namespaces")
    require("runsc")
    given, back = tmp_path / "given", tmp_path / "back"
    given.write_bytes(os.urandom(3_000_003))
    given.chmod(0o750)
    told: list[int] = []

    with Sandbox.create(tier="strong", backend="gvisor") as sandbox:
        sandbox.files.upload(str(given), "file", progress=lambda done, _: told.append(done))
        mode = sandbox.files.stat("file").mode
        sandbox.files.download("file", str(back))
        sandbox.files.download("/proc/version", str(tmp_path / "version"))

    assert given.read_bytes() == back.read_bytes()
    assert (0o750, 3_000_003) == (mode, told[-1])
    version = (tmp_path / "version").read_text()  # of a size that nobody knows before
    assert version.startswith("Linux version")
    assert version != Path("/proc/version").read_text()
