"""A server of gVisor sandboxes: what comes through pipes of its agent is as whole as what is a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.client import Client
from tests.api.conftest import start
from tests.features import require
from tests.native.outside import until

pytestmark = [pytest.mark.anyone, pytest.mark.full]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    require("user namespaces")
    require("runsc")
    config = {"backends": ["gvisor"], "manager": {"pool": {"enabled": False}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    daemon = start(tmp_path / "s", "--config", str(tmp_path / "config.json"))
    with Client(f"unix:{daemon.socket}") as found:
        yield found
    daemon.stop()


def test_files_and_execs(client: Client, tmp_path: Path) -> None:
    with client.create(tier="strong") as sandbox:
        files, data = sandbox.files, bytes(range(256)) * 8192
        files.write("deep/file", data, parents=True, mode=0o600)
        assert data == files.read("deep/file")
        assert data[1_000_001:1_000_101] == files.read("deep/file", offset=1_000_001, max_bytes=100)
        assert b"" == files.read("deep/file", offset=len(data))
        assert b"MemTotal" == files.read("/proc/meminfo")[:8]
        sandbox.shell("ln -s deep/file link")
        files.write("link", "replaced")
        assert (b"replaced", 0o600) == (files.read("deep/file"), files.stat("deep/file").mode)
        assert ["file"] == [each.name for each in files.list("deep")]
        files.download("deep", str(tmp_path / "back"))
        assert "replaced" == (tmp_path / "back" / "file").read_text()
        assert "replaced" == sandbox.exec(["cat", "link"]).stdout_text
        assert ["replaced"] == [each.text for each in files.search("replaced").items]


def test_who_wants_mounts_gets_a_new_sandbox_beside_a_pool(tmp_path: Path) -> None:
    """A warm one would have to mount them while it runs, and then its memory could not be saved any more."""
    require("user namespaces")
    require("runsc")
    profiles = {"strong": {"tier": "strong"}}
    pool = {"min_warm": 1, "max_warm": 1, "warm_profiles": ["strong"], "profiles": profiles}
    config = {"backends": ["gvisor"], "manager": {"pool": pool}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "file").write_text("mine")
    daemon = start(tmp_path / "s", "--config", str(tmp_path / "config.json"))
    with Client(f"unix:{daemon.socket}") as client:
        assert until(lambda: client.stats().pool_size, 60)
        with client.create(tier="strong", mounts=[f"{tmp_path}:/mnt/x:ro"]) as sandbox:
            assert "mine" == sandbox.files.read_text("/mnt/x/file")
        assert (0, 1) == (client.stats().pool_hits, client.stats().pool_misses)
        with client.create(tier="strong"):  # the control: the warm one is still there
            assert 1 == client.stats().pool_hits
    daemon.stop()
