"""The world, as who lives in it sees it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ringfence

from . import authority, network, places, sites
from .control import Control
from .record import Event

_SOURCE = Path(ringfence.__file__).parent.parent
_TREE = Path(__file__).parents[3]
_PATIENCE_S = 20.0
_OWN = "/the-worlds-own"


class World:
    """Made by `enter`: this process lives on its host from then on.

    Attributes:
        directory: Certificates (`ca.pem`), repositories, control sockets; short-lived.
        internet, host: What the servers of each network saw.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.internet = Control(directory, "internet")
        self.host = Control(directory, "host")

    @property
    def ca(self) -> Path:
        """The certificate of the world's authority, where programs may read it too."""
        return Path(authority.BUNDLE, "world-ca.pem")

    @property
    def has_ipv6(self) -> bool:
        return network.has_ipv6()

    def mark(self) -> tuple[int, int]:
        """Where both records end now."""
        return self.internet.mark(), self.host.mark()

    def left(self, mark: tuple[int, int], **facts: Any) -> list[Event]:
        """Everything that has left a sandbox since, as the internet and the host saw it.

        What is on its way when this is called has been seen when it returns.
        """
        for control, port in ((self.internet, 80), (self.host, places.HOST_PORT_EVERYWHERE)):
            here = control.mark()
            address = places.WEB_V4 if control is self.internet else "127.0.0.1"
            with socket.create_connection((address, port), timeout=_PATIENCE_S) as own:
                own.sendall(f"GET {_OWN} HTTP/1.0\r\n\r\n".encode())
                own.recv(1)
            assert control.wait(here, target=_OWN), "a server of the world is stuck"
        found: list[Event] = []
        for control, number in ((self.internet, mark[0]), (self.host, mark[1])):
            events = control.seen(number)
            ours = {event["connection"] for event in events if event.get("target") == _OWN}
            found += [event for event in events if event.get("connection", -1) not in ours]
        return [event for event in found if facts.items() <= event.items()]

    def await_server(self, host: str, port: int) -> None:
        """Return once a program that was just started takes connections."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                socket.create_connection((host, port), timeout=_PATIENCE_S).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, f"nobody listens on {host}:{port}"
                time.sleep(0.01)  # a port that opens cannot be waited for

    def program_environment(self) -> dict[str, str]:
        """What makes programs that bring their own trusted certificates look at the system's."""
        bundle = f"{authority.BUNDLE}/ca-certificates.crt"
        return {
            **dict.fromkeys(("REQUESTS_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"), bundle),
            **dict.fromkeys(("GIT_SSL_CAINFO", "npm_config_cafile"), bundle),
            "NODE_EXTRA_CA_CERTS": str(self.ca),
        }


def _users() -> str:
    """The machine's users, and those that servers run as: some programs insist on a name."""
    known = Path("/etc/passwd").read_text()
    me = os.geteuid()
    if f":{me}:" not in known:
        known += f"tester:x:{me}:{os.getegid()}::/nonexistent:/bin/sh\n"
    known += f"world:x:{places.SERVER_UID}:{places.SERVER_UID}::/nonexistent:/bin/sh\n"
    return known + "sshd:x:54322:54322::/run/sshd:/bin/false\n"


class Servers:
    """The processes behind a world, and its directory; ended by `close`."""

    def __init__(self) -> None:
        # Not named after us: what is, tests take for something that was left behind.
        self.directory = Path(tempfile.mkdtemp(prefix="rf-world-"))
        self._children: list[_Child] = []

    def prepare(self) -> None:
        """Files that the namespaces will show."""
        directory = self.directory
        directory.chmod(0o755)
        authority.make(directory)
        (directory / "hosts").write_text(places.HOSTS_FILE)
        (directory / "resolv.conf").write_text(
            f"nameserver {places.DNS_V4}\noptions timeout:3 attempts:1\n"
        )
        (directory / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
        (directory / "passwd").write_text(_users())
        if shutil.which("git"):
            sites.make_repository(directory / "repositories")

    def start(self) -> None:
        """Start both, the internet's in a network of its own. This process must be on the host."""
        told, tell = os.pipe()
        internet = self._fork(lambda: self._internet(told), keep=told)
        os.close(told)
        try:
            # Its namespace must be there before the cable can be laid into it.
            self._await(internet, b"in\n")
            network.connect(internet.pid)
        finally:
            os.write(tell, b"x")
            os.close(tell)
        self._await(internet, b"ready\n")
        self._await(self._fork(lambda: self._serve("host")), b"ready\n")

    def _internet(self, told: int) -> None:
        network.enter_internet()
        os.write(1, b"in\n")
        os.read(told, 1)
        network.become_internet()
        self._serve("internet")

    def _serve(self, role: str) -> None:
        network.settle()
        network.die_with_parent()
        path = os.pathsep.join([str(_TREE), str(_SOURCE), os.environ.get("PYTHONPATH", "")])
        argv = [sys.executable, "-m", f"{__package__}.serve", role, str(self.directory)]
        os.execve(sys.executable, argv, {**os.environ, "PYTHONPATH": path})

    def _fork(self, run: Callable[[], None], keep: int = -1) -> _Child:
        read, write = os.pipe()
        pid = os.fork()
        if 0 == pid:
            try:
                os.close(read)
                os.dup2(write, 1)
                log = os.open(
                    self.directory / "servers.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND
                )
                os.dup2(log, 2)
                run()
            except BaseException as exc:  # noqa: BLE001  nothing of the parent's may run on here
                os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
            finally:
                os._exit(1)
        os.close(write)
        self._children.append(_Child(pid, read))
        return self._children[-1]

    def _await(self, child: _Child, word: bytes) -> None:
        heard = child.hear()
        if heard != word:
            log = (self.directory / "servers.log").read_text()
            raise network.CannotEnterError(f"a server of the world did not come up: {log[-500:]}")

    def close(self) -> None:
        for child in self._children:
            os.kill(child.pid, signal.SIGTERM)
        for child in self._children:
            child.reap()
        self._children.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


class _Child:
    def __init__(self, pid: int, read: int) -> None:
        self.pid = pid
        self._file = open(read, "rb", buffering=0)  # noqa: SIM115  held as long as the child lives

    def hear(self) -> bytes:
        return self._file.readline()

    def reap(self) -> None:
        os.waitpid(self.pid, 0)
        self._file.close()


def enter() -> tuple[World, Servers]:
    """Make a world and move this process into it, for good.

    Raises:
        CannotEnterError: This machine cannot.

    Precondition: this process has one thread.
    """
    for program in ("ip", "openssl"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            raise network.CannotEnterError(f"this machine lacks: {program}")
    servers = Servers()
    try:
        servers.prepare()
        network.enter_host()
        servers.start()
        network.show_own_files(servers.directory)
        network.settle()
        return World(servers.directory), servers
    except BaseException:
        servers.close()
        raise


def main(argv: list[str]) -> int:
    """Run a command in a world of its own; a shell when there is none."""
    _world, servers = enter()
    try:
        command = argv or [os.environ.get("SHELL", "/bin/sh")]
        environment = {**os.environ, **_world.program_environment()}
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        servers.close()
