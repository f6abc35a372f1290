"""Traces planted by one sandbox in every possible place, and the search for them in another."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_KEY, _PORT, _NAME = 0x7261, 7261, "ringfence-planted"
_QUEUE = f"/{_NAME}".encode()
_PLACES = (
    *("/tmp", "/home/sandbox", "/var/tmp", "/mnt/memory", "/mnt/session/outputs", "/dev/shm"),
)
_OWN = ("TMPDIR", "HOME", "RINGFENCE_MEMORY_DIR", "RINGFENCE_OUTPUTS_DIR")
_libc = ctypes.CDLL(None, use_errno=True)


def plant(seconds: str) -> None:
    """Leave files, kernel objects and listening sockets, say which files, and stay for a while."""
    made = []
    for place in {*_PLACES, *(os.environ.get(name, "/tmp") for name in _OWN)}:
        with suppress(OSError), open(f"{place}/{_NAME}", "w", encoding="ascii") as file:
            file.write("x")
            made.append(file.name)
    _libc.shmget(_KEY, 4096, 0o1666)
    _libc.semget(_KEY, 1, 0o1666)
    _libc.msgget(_KEY, 0o1666)
    _libc.mq_open(_QUEUE, os.O_CREAT | os.O_RDWR, 0o666, None)
    stream, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
    stream.bind(("127.0.0.1", _PORT))
    stream.listen()
    with suppress(OSError):  # where there is no UDP
        datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagram.bind(("127.0.0.1", _PORT))
    with suppress(OSError):  # where no such name can be taken
        abstract.bind(f"\0{_NAME}")
        abstract.listen()
    print("planted", *made, flush=True)
    time.sleep(float(seconds))


def _seen_files() -> bool:
    """Return whether one that was planted can be read, at the paths that the other knows."""
    for path in sys.argv[4:]:
        with suppress(OSError), open(path, encoding="ascii") as file:
            return file.read() == "x"
    return False


def _seen_processes() -> bool:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if b"plant\0" in file.read():
                        return True
            except OSError:
                continue
    return False


def _connects(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as sock:
        sock.settimeout(10)
        try:
            sock.connect(address)
        except TimeoutError:
            raise  # not decided
        except OSError:
            return False
        return True


def _listed() -> bool:
    with open("/proc/net/tcp", encoding="ascii") as file:
        return any(line.split()[1].endswith(f":{_PORT:04X}") for line in list(file)[1:])


# name: id, severity, what, how to look
LOOKS: dict[str, tuple[str, str, str, Callable[[], bool]]] = {
    "files": ("lifecycle.neighbour-files", "critical", "files", _seen_files),
    "shm": (
        "files.neighbour-shared-memory",
        "critical",
        "files in /dev/shm",
        lambda: os.path.exists(f"/dev/shm/{_NAME}"),
    ),
    "processes": ("lifecycle.neighbour-processes", "high", "processes", _seen_processes),
    "shared-memory": (
        "ipc.neighbour-shared-memory",
        "critical",
        "System V shared memory",
        lambda: _libc.shmget(_KEY, 0, 0) >= 0,
    ),
    "semaphores": (
        "ipc.neighbour-semaphores",
        "high",
        "System V semaphores",
        lambda: _libc.semget(_KEY, 0, 0) >= 0,
    ),
    "queues": (
        "ipc.neighbour-message-queues",
        "high",
        "System V queues",
        lambda: _libc.msgget(_KEY, 0) >= 0,
    ),
    "posix": (
        "ipc.neighbour-posix-queues",
        "high",
        "POSIX queues",
        lambda: _libc.mq_open(_QUEUE, os.O_RDONLY) >= 0,
    ),
    "tcp": (
        "network.neighbour-services",
        "high",
        "services",
        lambda: _connects(socket.AF_INET, ("127.0.0.1", _PORT)),
    ),
    "abstract": (
        "ipc.neighbour-abstract-sockets",
        "high",
        "abstract sockets",
        lambda: _connects(socket.AF_UNIX, f"\0{_NAME}"),
    ),
    "connections": ("network.neighbour-connections", "medium", "connections", _listed),
}


def look(*_paths: str) -> None:
    """Print the name of everything that is found, and "looked" at the end.

    Args:
        _paths: Of files that the other has made; `_seen_files` reads them.
    """
    for name, (*_about, is_seen) in LOOKS.items():
        if is_seen():
            print(name)
    print("looked")


def say_pid() -> None:
    """Print the own pid and wait for a signal."""
    print(os.getpid(), flush=True)
    time.sleep(20)


def signal_to(pid: str) -> None:
    """Send SIGTERM; print what came of it."""
    try:
        os.kill(int(pid), 15)
    except OSError as exc:
        print(exc.strerror)
        sys.exit()
    print("reached")
