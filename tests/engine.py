"""A Docker engine of the tests' own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringfence.backends.docker.backend import DockerBackend
from ringfence.errors import BackendUnavailable

PATIENCE_S = 60.0


@contextmanager
def running_engine() -> Iterator[str]:
    """`dockerd` on a socket, a disk and a network of its own: none of the host's is touched. Its address."""
    place = Path(tempfile.mkdtemp(prefix="engine-of-a-test-", dir="/var/tmp"))
    address = f"unix://{place}/engine"
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                shutil.which("dockerd") or "dockerd",
                *(
                    "--host",
                    address,
                    "--data-root",
                    f"{place}/data",
                    "--exec-root",
                    f"{place}/exec",
                ),
                *("--pidfile", f"{place}/pid", "--bridge=none", "--iptables=false"),
                *("--ip6tables=false", "--ip-masq=false"),
            ],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        _wait_for(address, process, place / "log")
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def running_podman() -> Iterator[str]:
    """Podman's service, which speaks as an engine does, with all it has in a place of its own. Its address."""
    place = Path(tempfile.mkdtemp(prefix="podman-of-a-test-", dir="/var/tmp"))
    address = f"unix://{place}/engine"
    podman = [
        *(shutil.which("podman") or "podman", "--root", f"{place}/root", "--runroot"),
        *(f"{place}/run", "--cgroup-manager=cgroupfs"),
    ]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [*podman, "system", "service", "--time=0", address],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            # Of each image that it loads it leaves a file of no bytes there.
            env={**os.environ, "TMPDIR": str(place)},
        )
    try:
        _wait_for(address, process, place / "log")
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        subprocess.run([*podman, "rm", "--force", "--all"], capture_output=True, check=False)
        subprocess.run(["umount", f"{place}/root/overlay"], capture_output=True, check=False)
        shutil.rmtree(place, ignore_errors=True)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends and process.poll() is None:
        backend = DockerBackend(address)
        try:
            backend.client()
        except BackendUnavailable:
            time.sleep(0.1)  # nothing tells when it listens
        else:
            return
        finally:
            backend.close()
    raise AssertionError(f"the engine did not start: {log.read_text()[-2000:]}")
