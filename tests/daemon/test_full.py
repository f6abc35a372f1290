"""The disk with the state directory has no room, or no inodes: said so, nothing stuck, and over by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.servers import Server
from tests.native.outside import cgroups_of, pids_with, until

pytestmark = pytest.mark.root  # a file system of its own is mounted
_BYTES, _INODES = 12 << 20, 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A daemon whose state directory is a small file system of its own."""
    state = tmp_path / "s"
    state.mkdir(mode=0o700)
    options = f"size={_BYTES},nr_inodes={_INODES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(state)], check=True)
    made = Server(state)
    try:
        yield made
    finally:
        try:
            made.stop()
        finally:
            subprocess.run(["umount", str(state)], check=True)


def fill(state: Path, what: str) -> list[Path]:
    """Use up all bytes, or all inodes; what is to be removed again."""
    made: list[Path] = []
    try:
        if what == "bytes":
            made.append(state / "ballast")
            with made[0].open("wb", buffering=0) as file:
                for size in (1 << 20, 4096):
                    try:
                        while file.write(bytes(size)) == size:
                            pass
                    except OSError:
                        continue
            return made
        while True:
            name = state / f"ballast-{len(made)}"
            name.touch()
            made.append(name)
    except OSError:
        return made


@pytest.mark.full
@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_full(what: str, server: Server) -> None:
    server.start(faulty=False)
    marker = f"69{os.getpid():07d}"
    doomed, kept = server.make(), server.make()
    sleeps = server.run(doomed, f"exec sleep {marker}")
    before = server.run(kept, "echo before; read x; echo $x; exit 3", stream_stdin=True)
    assert until(lambda: 1 == len(pids_with(marker)))
    assert (
        3
        == server.ask(
            "POST", "/sandboxes/" + kept + "/execs", json={"script": "exit 3", "wait": True}
        )["status"]["exit_code"]
    )
    filled = fill(server.state, what)
    assert filled, "the control: there was room"

    # Making things is refused, in time and with the reason.
    for _ in range(2 if what == "bytes" else 0):  # to write down a sandbox takes no inode
        refused = server.ask("POST", "/sandboxes", 507, json={"use_pool": False})
        assert ("storage_full", True) == (refused["code"], refused["retryable"])
    assert "storage_full" == server.ask("POST", f"/sandboxes/{kept}/snapshots", 507)["code"]
    if what == "bytes":
        run = {"script": "echo no", "wait": True}
        refused = server.ask("POST", f"/sandboxes/{kept}/execs", 507, json=run)
        assert "storage_full" == refused["code"]
    else:
        run = {"script": "echo gone; exit 4", "wait": True}
        told = server.ask("POST", f"/sandboxes/{kept}/execs", json=run)
        assert (4, 5) == (told["status"]["exit_code"], told["stdout_dropped_bytes"])
        assert told["truncated"]
        assert told["storage_fault"]

    # Looking, killing, ending and what runs inside are not held up.
    assert 200 == server.http.get("/v1/sandboxes").status_code
    assert 200 == server.http.get(f"/v1/sandboxes/{kept}").status_code
    server.ask("POST", f"/sandboxes/{doomed}/execs/{sleeps}/kill")
    assert "terminated" == server.ask("DELETE", f"/sandboxes/{doomed}")["state"]
    assert until(lambda: [] == pids_with(marker) and [] == cgroups_of(doomed))
    assert "terminated" == server.ask("GET", f"/sandboxes/{doomed}")["state"]

    # A daemon that is killed now comes back, with what lives.
    server.kill()
    server.start(faulty=False)
    assert "running" == server.ask("GET", f"/sandboxes/{kept}")["state"]
    assert "terminated" == server.ask("GET", f"/sandboxes/{doomed}")["state"]

    # With room again, all goes on without help.
    for each in filled:
        each.unlink()
    server.ask("POST", f"/sandboxes/{kept}/execs/{before}/stdin?offset=0", content=b"after\n")
    assert 3 == server.wait(kept, before)["status"]["exit_code"]
    assert server.output(kept, before).endswith(b"after\n")
    again = server.make()
    assert 0 == server.wait(again, server.run(again, "true"))["status"]["exit_code"]
