"""Canaries: files and values that the host plants for the probes; nothing else of the host is
touched.

No canary is protected by its permissions: only isolation stands between a probe and a canary. The
token itself never enters a sandbox, only its SHA-256: a probe that finds text with this digest has
read the token.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing, suppress

from ..backends.local.agents import agent_code
from .service import Service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

_IPC_CREAT, _IPC_EXCL, _IPC_RMID = 0o1000, 0o2000, 0
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")
RO, RW, RO_FILE = "/mnt/read-only", "/mnt/writable", "/mnt/one-file"
PROTECTED = ("vault/keys",)


def digest(text: str | bytes) -> str:
    """Hash a token for use inside."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


class Canaries:
    """Plants everything on entering, removes everything on leaving.

    Attributes:
        context: What the probes are told.
        directory: Private, and readable by everybody.
    """

    def __init__(self) -> None:
        self.token = os.urandom(16).hex()
        self.directory = ""
        self.context: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._plant()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def _plant(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="ringfence-attack-")
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        os.chmod(self.directory, 0o755)
        self._files()
        self._environment()
        self._process()
        self._sockets()
        self._listeners()
        self._services()
        self._objects()
        self._terminal()
        self._facts()

    # -- files ------------------------------------------------------------------------------

    def _files(self) -> None:
        self.secret = f"{self.directory}/secret-{self.token[:8]}"
        write(self.secret, self.token)
        self.ro, self.rw = f"{self.directory}/ro", f"{self.directory}/rw"
        self.ro_file = f"{self.directory}/one-file"
        write(self.ro_file, "as it was\n")
        open_file = f"{self.directory}/open-file"
        write(open_file, "as it was\n", 0o666)
        self.plant_read_only()
        self.plant_writable()
        shared = f"/dev/shm/ringfence-attack-{self.token[:8]}"
        try:
            write(shared, self.token)
            self._stack.callback(_remove, shared)
        except OSError:
            shared = ""
        # Inheritable on purpose: whoever starts a process carelessly passes it on.
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        os.set_inheritable(fd, True)
        self._stack.callback(os.close, fd)
        info = os.fstat(fd)
        self.context |= {
            "directory": self.directory,
            "secret": self.secret,
            "secret_name": os.path.basename(self.secret),
            "secret_digest": digest(self.token),
            "open_file": open_file,
            "secret_directory_id": [info.st_dev, info.st_ino],
            "shm_file": shared,
            "ro": RO,
            "rw": RW,
            "ro_file": RO_FILE,
            "ro_source": self.ro,
        }

    def plant_read_only(self) -> None:
        """The directory that is mounted read-only, as new."""
        shutil.rmtree(self.ro, ignore_errors=True)
        os.makedirs(f"{self.ro}/empty")
        write(f"{self.ro}/file", "as it was\n")
        write(f"{self.ro}/doomed", "as it was\n")

    def plant_writable(self) -> None:
        """The directory that is mounted writable, as new: a small repository, and two below it."""
        shutil.rmtree(self.rw, ignore_errors=True)
        os.makedirs(f"{self.rw}/.git/hooks")
        os.makedirs(f"{self.rw}/open")
        for inner in ("projects/module/.git", "projects/bare.git"):
            for name in ("objects", "refs", "hooks"):
                os.makedirs(f"{self.rw}/{inner}/{name}")
            write(f"{self.rw}/{inner}/config", "[core]\n\trepositoryformatversion = 0\n")
            write(f"{self.rw}/{inner}/HEAD", "ref: refs/heads/main\n")
        write(f"{self.rw}/.git/hooks/existing", "#!/bin/sh\n", 0o755)
        write(f"{self.rw}/.git/config", "[core]\n\trepositoryformatversion = 0\n")
        write(f"{self.rw}/.git/HEAD", "ref: refs/heads/main\n")
        write(f"{self.rw}/.mcp.json", "{}\n")
        for name in ("file", "file2", "file3"):
            write(f"{self.rw}/{name}", "as it was\n")

    def plant_sockets(self) -> None:
        """Listening sockets in both mounts, gone with the directories that hold them."""
        for directory in (self.ro, self.rw):
            for name, kind in (("stream", socket.SOCK_STREAM), ("datagram", socket.SOCK_DGRAM)):
                path = f"{directory}/{name}.socket"
                if not os.path.exists(path):
                    self._listen(path, kind)

    # -- environment and process --------------------------------------------------------------

    def _environment(self) -> None:
        name = "RINGFENCE_ATTACK_CANARY"
        os.environ[name] = self.token[::-1]
        self._stack.callback(os.environ.pop, name, None)
        self.context["environment_digest"] = digest(self.token[::-1])

    def _process(self) -> None:
        marker = f"ringfence-attack-{self.token[8:16]}"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", marker],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        self.process = process
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.context |= {"marker": marker, "marker_pid": process.pid, "init": 1}

    # -- sockets ------------------------------------------------------------------------------

    def _listen(self, address: str | bytes, kind: int) -> None:
        sock = self._stack.enter_context(closing(socket.socket(socket.AF_UNIX, kind)))
        sock.bind(address)
        if isinstance(address, str):
            os.chmod(address, 0o777)
        if kind == socket.SOCK_STREAM:
            sock.listen(64)

    def _sockets(self) -> None:
        names = {
            kind: f"ringfence-attack-{kind}-{self.token[:8]}" for kind in ("stream", "datagram")
        }
        self._listen(b"\0" + names["stream"].encode(), socket.SOCK_STREAM)
        self._listen(b"\0" + names["datagram"].encode(), socket.SOCK_DGRAM)
        outside = f"{self.directory}/outside.socket"
        self._listen(outside, socket.SOCK_STREAM)
        self.plant_sockets()
        self.context |= {"abstract": names, "socket": outside}

    def _listeners(self) -> None:
        ports = {"v4": 0, "v6": 0, "any": 0}
        for name, family, address in (
            ("v4", socket.AF_INET, "127.0.0.1"),
            ("any", socket.AF_INET, "0.0.0.0"),  # a canary must be reachable
            ("v6", socket.AF_INET6, "::1"),
        ):
            with suppress(OSError):
                sock = self._stack.enter_context(closing(socket.socket(family, socket.SOCK_STREAM)))
                sock.bind((address, 0))
                sock.listen(64)
                ports[name] = sock.getsockname()[1]
        # 127.3.2.1, 0.0.0.0 and v4-mapped addresses lead to a listener on every address only.
        ports["v4"] = ports["any"]
        self.context |= {"tcp": ports, "udp": self._echo(), "addresses": _own_addresses()}

    def _services(self) -> None:
        """Two servers of the host's loopback: one that a policy will allow, and one beside it."""
        for name in ("service", "other_service"):
            self.context[name] = self._stack.enter_context(Service()).port

    def _echo(self) -> int:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])

        def serve() -> None:
            with sock:
                while True:
                    data, peer = sock.recvfrom(64)
                    if data == self.token.encode():
                        return
                    sock.sendto(b"pong", peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()

        def stop() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bye:
                bye.sendto(self.token.encode(), ("127.0.0.1", port))
            thread.join(2)

        self._stack.callback(stop)
        return port

    # -- kernel objects -------------------------------------------------------------------------

    def _objects(self) -> None:
        """System V objects and a POSIX queue, open to everybody."""
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _IPC_CREAT | _IPC_EXCL | 0o666
        key = int.from_bytes(os.urandom(3), "big") | 0x5000000
        planted = {f"{kind}_{what}": 0 for kind in ("shm", "sem", "msg") for what in ("key", "id")}
        makers: dict[str, tuple[Callable[[], int], Callable[[int], int]]] = {
            "shm": (
                lambda: libc.shmget(key, 4096, flags),
                lambda i: libc.shmctl(i, _IPC_RMID, None),
            ),
            "sem": (lambda: libc.semget(key, 1, flags), lambda i: libc.semctl(i, 0, _IPC_RMID)),
            "msg": (lambda: libc.msgget(key, flags), lambda i: libc.msgctl(i, _IPC_RMID, None)),
        }
        for kind, (make, remove) in makers.items():
            id = make()
            if id >= 0:
                planted |= {f"{kind}_key": key, f"{kind}_id": id}
                self._stack.callback(remove, id)
        self.context["sysv"] = planted
        self.context["queue"] = self._queue(libc)

    def _queue(self, libc: ctypes.CDLL) -> str:
        name = f"ringfence-attack-{self.token[:8]}"
        # One message of one byte: of the usual size only ten fit into RLIMIT_MSGQUEUE, mq_overview(7), and
        # those of runs that were killed are there until the next boot.
        size = (ctypes.c_long * 8)(0, 1, 1)
        try:
            opened = libc.mq_open(
                f"/{name}".encode(), os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o644, size
            )
        except AttributeError:
            return ""
        if opened < 0:
            return ""
        self._stack.callback(libc.mq_unlink, f"/{name}".encode())
        self._stack.callback(os.close, opened)
        return name

    def _terminal(self) -> None:
        self.context |= {"terminal": "", "terminal_device": 0}
        with suppress(OSError):
            master, slave = os.openpty()
            self._stack.callback(os.close, master)
            self._stack.callback(os.close, slave)
            name = os.ttyname(slave)
            self.context |= {"terminal": name, "terminal_device": os.stat(name).st_dev}

    def _facts(self) -> None:
        root = os.stat("/").st_dev
        etc = {name: _file_digest(f"/etc/{name}") for name in ("resolv.conf", "hosts")}
        self.context |= {
            "namespaces": {kind: link for kind in _NAMESPACES if (link := _namespace(kind))},
            "root_device": f"{os.major(root)}:{os.minor(root)}",
            "caller_uid": os.geteuid(),
            "pending_signals": resource.getrlimit(resource.RLIMIT_SIGPENDING)[1],
            "caller_home": os.path.realpath(os.path.expanduser("~")),
            "rootless": os.geteuid() != 0,
            "host_name_digest": digest(socket.gethostname()),
            "boot_digest": digest(_text("/proc/sys/kernel/random/boot_id").strip()),
            "etc_digests": etc,
            "agent_digest": digest(agent_code.packed()),
            "package_directory": os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        }


def write(path: str, text: str, mode: int = 0o644) -> None:
    """A file that everybody may read, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(fd, mode)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _text(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def _file_digest(path: str) -> str:
    with suppress(OSError), open(path, "rb") as file:
        return digest(file.read(1 << 16))
    return ""


def _namespace(kind: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


def _own_addresses() -> list[str]:
    """IPv4 addresses of this host but loopback: local routes of /proc/net/fib_trie."""
    found: dict[str, None] = {}
    address = ""
    for line in _text("/proc/net/fib_trie").splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            address = words[1]
        elif words[-2:] == ["host", "LOCAL"] and not address.startswith("127."):
            found[address] = None
    return list(found)
