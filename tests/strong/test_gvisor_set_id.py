"""What a guest makes in a writable mount belongs on the host to the mount's owner: no bits that lend that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.gvisor.backend import GvisorBackend

pytestmark = pytest.mark.full

TRIES = """
cp /usr/bin/true shell; chmod 4755 shell; chmod g+s shell; mkdir made; chmod 2777 made
python3 -c "import os; os.open('opened', os.O_CREAT | os.O_WRONLY, 0o6777)"
chmod 0751 shell
"""


def test_no_set_id_bits_reach_the_host(backend: GvisorBackend, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with Sandbox.create(
        backend=backend, mounts=[f"{tmp_path}:/work:rw"], workdir="/work"
    ) as sandbox:
        sandbox.exec(["sh", "-c", TRIES])

        modes = {name: os.lstat(tmp_path / name).st_mode for name in ("shell", "made")}

    # The control: what has no such bit is changed as asked.
    assert 0o100751 == modes["shell"]
    assert not modes["made"] & 0o6000
    assert not any(path.lstat().st_mode & 0o6000 for path in tmp_path.rglob("*"))
