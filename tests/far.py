"""A real sshd in network and mount namespaces of the tests' own, and a way to log in there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringfence.backends.command import far
from ringfence.backends.command.stream import StreamBackend
from tests.features import program

_CONFIG = """
Port 22
ListenAddress 127.0.0.1
HostKey {place}/host
AuthorizedKeysFile {place}/user.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
PidFile none
"""
_START = """
ip link set lo up
mount -t tmpfs tests /run && mkdir /run/sshd
mount -t tmpfs tests /media && mkdir /media/python
if [ -n "$2" ]; then
  mount --bind "$2" /media/python
  case "$2" in /root/*) mount -t tmpfs -o mode=755 tests /root && mkdir -p "$2" ;; esac
  mount --bind /media/python "$2"
fi
exec {sshd} -D -e -f "$1/config"
"""


class Host:
    """The far host.

    Attributes:
        server: Its sshd, in namespaces of its own.
    """

    def __init__(self, place: Path, server: subprocess.Popen[bytes]) -> None:
        self.place, self.server = place, server

    def inside(self, *argv: str) -> None:
        """Run a command in its network namespace."""
        subprocess.run(["nsenter", f"--net=/proc/{self.server.pid}/ns/net", *argv], check=True)

    def toml(self, python: str = "/usr/bin/python3") -> str:
        """The table `[ssh.far]` that describes it."""
        known = f'"UserKnownHostsFile={self.place}/known", "StrictHostKeyChecking=yes"'
        return (
            f'[ssh.far]\nhost = "127.0.0.1"\nuser = "root"\nidentity = "{self.place}/user"\n'
            f'program = "{self.place}/ssh"\noptions = [{known}]\npython = "{python}"\n'
        )

    def backend(self, python: str = "/usr/bin/python3") -> StreamBackend:
        options = (f"UserKnownHostsFile={self.place}/known", "StrictHostKeyChecking=yes")
        return StreamBackend(
            far.ssh(
                "far",
                "127.0.0.1",
                user="root",
                identity=f"{self.place}/user",
                options=options,
                program=f"{self.place}/ssh",
                python=python,
            )
        )


@contextmanager
def far_host(python_home: str = "") -> Iterator[Host]:
    """One, in which a Python of this host's can be read by everybody."""
    place = Path(tempfile.mkdtemp(prefix="far-host-of-a-test-"))
    for name in ("host", "user"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)]
        subprocess.run(keygen, check=True)
    (place / "known").write_text(f"127.0.0.1 {(place / 'host.pub').read_text()}")
    (place / "config").write_text(_CONFIG.format(place=place))
    start = _START.format(sshd=program("sshd"))
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-euc", start, "sh", str(place), python_home],
            stderr=subprocess.PIPE,
            stdout=log,
            stdin=subprocess.DEVNULL,
        )
    assert server.stderr is not None
    try:
        while b"Server listening" not in (line := server.stderr.readline()):
            assert line, f"sshd ended with {server.wait()}"
        os.set_blocking(server.stderr.fileno(), False)
        ssh = place / "ssh"
        ssh.write_text(
            f'#!/bin/sh\nexec nsenter --net=/proc/{server.pid}/ns/net {shutil.which("ssh")} "$@"\n'
        )
        ssh.chmod(0o755)
        yield Host(place, server)
    finally:
        server.terminate()
        server.wait(30)
        server.stderr.close()
        shutil.rmtree(place)
