"""Talking to processes of the host: System V objects, queues, sockets, signals."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import threading
import time

from .kit import (
    BOTH,
    ESCAPED,
    HOST,
    MOUNTED,
    PATIENCE_S,
    UNIX_SOCKETS,
    Outcome,
    attempt,
    call,
    escaped,
    first_escape,
    held,
    inconclusive,
    probe,
    read,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_IPC_STAT = 2
SOCKET_OF_OWN = "own.socket"
_RACE_S = 1.0


# -- System V and POSIX objects ---------------------------------------------------------------


def _by_key_and_id(get: str, control: str, key: int, id: int, *extra: int) -> Outcome:
    if key == 0:
        return inconclusive("the host's kernel gave nothing to plant")
    found = call(get, key, *extra, 0)
    if found >= 0:
        return escaped(f"{get} found the host's object {found}")
    buffer = ctypes.create_string_buffer(512)
    arguments = (id, 0, _IPC_STAT, buffer) if control == "semctl" else (id, _IPC_STAT, buffer)
    result = call(control, *arguments)
    if result >= 0:
        return escaped(f"{control} reached the host's object {id}")
    return held(f"{get}: {said(found)}, {control}: {said(result)}")


@probe("ipc.shared-memory", "high", HOST, where=BOTH)
def shared_memory(context: dict[str, Any]) -> Outcome:
    """Shared memory of the host must not be reachable."""
    planted = context["sysv"]
    return _by_key_and_id("shmget", "shmctl", planted["shm_key"], planted["shm_id"], 0)


@probe("ipc.semaphores", "high", HOST, where=BOTH)
def semaphores(context: dict[str, Any]) -> Outcome:
    """Semaphores of the host must not be reachable."""
    planted = context["sysv"]
    return _by_key_and_id("semget", "semctl", planted["sem_key"], planted["sem_id"], 0)


@probe("ipc.message-queues", "high", HOST, where=BOTH)
def message_queues(context: dict[str, Any]) -> Outcome:
    """Message queues of the host must not be reachable."""
    planted = context["sysv"]
    return _by_key_and_id("msgget", "msgctl", planted["msg_key"], planted["msg_id"])


@probe("ipc.object-list", "medium", HOST)
def object_list(context: dict[str, Any]) -> Outcome:
    """The host's System V objects must not be listed."""
    planted = context["sysv"]
    if not planted["shm_key"]:
        return inconclusive("the host's kernel gave nothing to plant")
    listed = read("/proc/sysvipc/shm").decode().splitlines()[1:]
    found = [line for line in listed if line.split()[1:2] == [str(planted["shm_id"])]]
    return (
        escaped(f"/proc/sysvipc/shm: {found[0].strip()}")
        if found
        else held(f"{len(listed)} segments, none the host's")
    )


@probe("ipc.posix-queue", "high", HOST)
def posix_queue(context: dict[str, Any]) -> Outcome:
    """POSIX message queues of the host must not be reachable."""
    if not context["queue"]:
        return inconclusive("the host's kernel gave no queue to plant")
    result = call("mq_open", context["queue"].encode(), os.O_RDONLY | os.O_NONBLOCK, 0, 0)
    return (
        escaped("mq_open found the host's queue")
        if result >= 0
        else held(f"mq_open: {said(result)}")
    )


# -- unix sockets -----------------------------------------------------------------------------

_KINDS = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM}


def _connect(address: str | bytes, kind: int) -> Outcome:
    """Escaped when something of the host listens at `address` and we are let in."""
    try:
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(address)
    except TimeoutError:
        return inconclusive("nobody takes the connection, and nobody refuses it")
    except OSError as exc:
        return held(f"{errno.errorcode.get(exc.errno or 0, exc)}")
    return escaped("connected")


def _abstract(kind: str) -> Callable[[dict[str, Any]], Outcome]:
    return lambda context: _connect(b"\0" + context["abstract"][kind].encode(), _KINDS[kind])


for _kind in _KINDS:
    probe(
        f"ipc.abstract-{_kind}",
        "critical",
        HOST,
        where=BOTH,
        about=f"An abstract {_kind} socket of the host, as desktops have, must not be reachable.",
    )(_abstract(_kind))


def _in_mount(kind: str, mount: str) -> Callable[[dict[str, Any]], Outcome]:
    return lambda context: _connect(f"{context[mount]}/{kind}.socket", _KINDS[kind])


for _kind in _KINDS:
    for _mount, _words in (("ro", "read-only"), ("rw", "writable")):
        probe(
            f"ipc.socket-in-{_words}-mount-{_kind}",
            "critical",
            UNIX_SOCKETS,
            where=MOUNTED,
            about=f"A {_kind} socket of the host in a {_words} mount must not be reachable.",
        )(_in_mount(_kind, _mount))


@probe("ipc.socket-by-host-path", "critical", HOST, where=BOTH)
def socket_by_host_path(context: dict[str, Any]) -> Outcome:
    """A socket of the host outside the mounts must not be reachable by its path."""
    return _connect(context["socket"], socket.SOCK_STREAM)


@probe("ipc.socket-by-other-names", "critical", UNIX_SOCKETS, where=MOUNTED)
def socket_by_other_names(context: dict[str, Any]) -> Outcome:
    """Nor by a symlink, a descriptor of its directory, or what /proc has of this process."""
    path = f"{context['ro']}/stream.socket"
    link = f"{os.environ.get('TMPDIR', '/tmp')}/{os.getpid()}.link"
    os.symlink(path, link)
    fd = os.open(context["ro"], os.O_PATH | os.O_DIRECTORY)
    pinned = os.open(path, os.O_PATH)
    before = os.getcwd()
    os.chdir(context["ro"])
    try:
        names = (
            *(
                link,
                "stream.socket",
                f"/proc/self/fd/{fd}/stream.socket",
                f"/proc/self/fd/{pinned}",
            ),
            *(f"/proc/{os.getpid()}/root{path}", "/proc/thread-self/cwd/stream.socket"),
        )
        return first_escape([_connect(name, socket.SOCK_STREAM) for name in names])
    finally:
        os.chdir(before)
        os.close(fd)
        os.close(pinned)
        os.unlink(link)


@probe("ipc.socket-swapped-by-threads", "critical", UNIX_SOCKETS, where=MOUNTED)
def socket_swapped_by_threads(context: dict[str, Any]) -> Outcome:
    """Nor while other threads change the address and what the descriptor is."""
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError as exc:  # where PID 1 connects for nobody, none is made
        return held(f"no Unix socket: {errno.errorcode[exc.errno or 0]}")
    own, host = _own_address(), f"{context['ro']}/stream.socket".encode()
    size = max(len(own), len(host)) + 1
    names = [b"\1\0" + name.ljust(size, b"\0") for name in (own, host)]
    address = ctypes.create_string_buffer(names[0], 2 + size)
    end = time.monotonic() + _RACE_S
    with socket.socket(socket.AF_UNIX) as listener, socket.socket() as other:
        try:
            listener.bind(names[0][2:] if own.startswith(b"\0") else own)
        except PermissionError as exc:
            return held(f"no Unix socket can be bound beside this mount: {exc.strerror}")
        listener.listen(1)
        listener.setblocking(False)
        target = os.dup(other.fileno())

        def swap_addresses() -> None:
            while time.monotonic() < end:
                ctypes.memmove(address, names[1], len(names[1]))
                ctypes.memmove(address, names[0], len(names[0]))

        def swap_descriptors() -> None:
            while time.monotonic() < end:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix:
                    os.dup2(unix.fileno(), target)
                os.dup2(other.fileno(), target)

        threads = [threading.Thread(target=each) for each in (swap_addresses, swap_descriptors)]
        for thread in threads:
            thread.start()
        reached = False
        try:
            while time.monotonic() < end and not reached:
                if call("connect", target, address, len(names[1])) == 0:
                    reached = not _has_caller(listener)  # whose else is it?
        finally:
            for thread in threads:
                thread.join()
            os.close(target)
    return escaped("connected") if reached else held(f"not in {_RACE_S} s")


def _own_address() -> bytes:
    """An abstract address; a path where none can be taken."""
    own = b"\0%d" % os.getpid()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(own)
    except PermissionError:
        return f"{os.environ.get('TMPDIR', '/tmp')}/{os.getpid()}.socket".encode()
    return own


def _has_caller(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@probe("ipc.socketpair-sendto", "critical", UNIX_SOCKETS, where=MOUNTED)
def socketpair_sendto(context: dict[str, Any]) -> Outcome:
    """Nor from a pair: one for datagrams can send to any path, though connected elsewhere."""
    outcomes = []
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        except OSError as exc:
            outcomes.append(held(f"socketpair {int(kind)}: {errno.errorcode.get(exc.errno or 0)}"))
            continue
        with ours, theirs:
            path = f"{context['ro']}/datagram.socket"
            outcomes.append(
                _send_away(ours, theirs, path, f"sendto from a pair of kind {int(kind)}")
            )
            outcomes.append(attempt(ours.connect, f"connect of a pair of kind {int(kind)}", path))
    return first_escape(outcomes)


def _send_away(ours: socket.socket, theirs: socket.socket, path: str, what: str) -> Outcome:
    outcome = attempt(lambda: ours.sendto(b"x", path), what)
    if outcome.status != ESCAPED:
        return outcome
    theirs.setblocking(False)
    try:
        return held(f"{what}: went to its own other end") if theirs.recv(1) else outcome
    except BlockingIOError:
        return outcome


@probe("ipc.socket-of-own", "high", UNIX_SOCKETS, where=MOUNTED)
def socket_of_own(context: dict[str, Any]) -> Outcome:
    """No socket may be made in a writable mount, for a program of the host to connect to."""
    path = f"{context['rw']}/{SOCKET_OF_OWN}"

    def bind() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(path)
        return path

    return attempt(bind, "bind")


@probe("ipc.passed-by-netlink", "medium", HOST)
def unix_list(context: dict[str, Any]) -> Outcome:
    """The host's unix sockets must not be listed."""
    listed = read("/proc/net/unix", 1 << 20)
    if context["abstract"]["stream"].encode() in listed:
        return escaped("/proc/net/unix lists the host's socket")
    return held(f"{len(listed.splitlines())} lines, none the host's")


# -- signals ----------------------------------------------------------------------------------


def _not_ours(pid: int, context: dict[str, Any]) -> bool:
    """Return whether `pid` is no process in here: a host pid may be another process inside."""
    return context["marker"].encode() in read(f"/proc/{pid}/cmdline") or not os.path.exists(
        f"/proc/{pid}"
    )


@probe("ipc.signal-host-process", "critical", HOST, where=BOTH)
def signal_host_process(context: dict[str, Any]) -> Outcome:
    """A process of the host must not be reachable by a signal."""
    pid = context["marker_pid"]
    if not _not_ours(pid, context):
        return inconclusive(f"{pid} is a process of the sandbox too")
    return first_escape(
        [
            attempt(lambda: os.kill(pid, 0), f"kill {pid}"),
            _signal_result("tgkill", call("tgkill", pid, pid, 0)),
            _signal_result("tkill", call("tkill", pid, 0)),
        ]
    )


def _signal_result(name: str, result: int) -> Outcome:
    return escaped(f"{name}: worked") if result == 0 else held(f"{name}: {said(result)}")


@probe("ipc.pidfd-of-host-process", "high", HOST)
def pidfd_of_host_process(context: dict[str, Any]) -> Outcome:
    """A process of the host must not be had as a descriptor."""
    pid = context["marker_pid"]
    if not _not_ours(pid, context):
        return inconclusive(f"{pid} is a process of the sandbox too")
    result = call("pidfd_open", pid, 0)
    return escaped("pidfd_open: worked") if result >= 0 else held(f"pidfd_open: {said(result)}")


@probe("ipc.owner-of-descriptor", "high", HOST)
def owner_of_descriptor(context: dict[str, Any]) -> Outcome:
    """A process of the host must not be made to get the signals of a descriptor (F_SETOWN)."""
    pid = context["marker_pid"]
    if not _not_ours(pid, context):
        return inconclusive(f"{pid} is a process of the sandbox too")
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def own() -> int:
            fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
            owner: int = fcntl.fcntl(ours, fcntl.F_GETOWN)
            if owner != pid:
                raise OSError(errno.ESRCH, "nobody")
            return owner

        return attempt(own, "F_SETOWN")


@probe("ipc.limits-of-host-process", "high", HOST)
def limits_of_host_process(context: dict[str, Any]) -> Outcome:
    """Limits and priorities of a process of the host must not be reachable."""
    pid = context["marker_pid"]
    if not _not_ours(pid, context):
        return inconclusive(f"{pid} is a process of the sandbox too")
    buffer = ctypes.create_string_buffer(16)
    return first_escape(
        [
            _signal_result("prlimit", call("prlimit64", pid, 7, 0, buffer)),
            attempt(lambda: os.getpriority(os.PRIO_PROCESS, pid), "getpriority"),
            attempt(lambda: os.sched_getaffinity(pid), "sched_getaffinity"),
        ]
    )
