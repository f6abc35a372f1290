"""Calls of a sandbox in another process: by a socket on its node, or by an actor that owns it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

from ..errors import (
    InvalidRequest,
    RingfenceError,
    SandboxLost,
    SandboxNotFound,
    Unsupported,
    error_from_json,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..sandbox import Sandbox

    Find = Callable[[str], Sandbox | None]

METHODS = {
    *("exec", "shell", "run_code", "stats", "capabilities", "protections", "snapshot", "changes"),
    *("network_log", "suspend", "resume", "apply_network_policy", "terminate"),
}
FILE_METHODS = {
    *("read", "read_text", "write", "list", "stat", "exists", "make_dir", "remove", "move"),
    *("glob", "search", "replace"),
}
VALUES = {"state", "session"}
_MOST_CALLERS = 64
_GREETING_S = 10.0
_FULL_S = 0.1
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def check(method: str) -> None:
    """Refuse what cannot be called from another process.

    Args:
        method: Its name; those of files begin with `files.`.

    Raises:
        Unsupported: It works with callbacks, streams or descriptors of the process that owns the sandbox.
    """
    room, _, name = method.rpartition(".")
    if name not in (FILE_METHODS if room == "files" else METHODS | VALUES):
        raise Unsupported(
            f"{method}() works only in the process that created the sandbox",
            operation=method,
            hint="call it there, or create a sandbox in this task",
        )


def perform(sandbox: Sandbox | None, method: str, parts: tuple[Any, ...], options: Any) -> Any:
    """Do a call here. Returns `(True, result)`, or `(False, the error as JSON)`.

    Args:
        sandbox: None where it has ended.
        method: As for `check`.
        parts: Positional arguments.
        options: Keyword arguments.
    """
    try:
        check(method)
        if sandbox is None:
            raise SandboxNotFound("the sandbox has ended", hint="create another one")
        room, _, name = method.rpartition(".")
        found = getattr(sandbox.files if room else sandbox, name)
        return True, found if name in VALUES else found(*parts, **options)
    except RingfenceError as exc:
        return False, exc.to_json()
    except TypeError as exc:
        return False, InvalidRequest(str(exc)).to_json()


def result_of(answer: tuple[bool, Any]) -> Any:
    """Return the result of `perform`, or raise its error.

    Args:
        answer: What `perform` returned.
    """
    is_result, value = answer
    if is_result:
        return value
    raise error_from_json(value)


class Door:
    """An abstract socket by which other processes of this user on this node reach sandboxes here.

    It has no file, so a killed process leaves none. Who connects has to know the key before a byte is
    unpickled: a process of the same user inside a sandbox with the host's network does not.

    Args:
        find: Returns a sandbox of this process by its id.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self.key = secrets.token_bytes(32)
        self.name = f"ringfence-ray-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_MOST_CALLERS)
        self._callers = threading.BoundedSemaphore(_MOST_CALLERS)
        threading.Thread(target=self._accept, name=self.name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # a caller that is gone already; or no descriptor is left, for now
                time.sleep(_FULL_S)
                continue
            if _peer_uid(accepted) != os.geteuid() or not self._callers.acquire(blocking=False):
                accepted.close()
                continue
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.closing(Connection(accepted.detach())) as connection:
            try:
                timer = threading.Timer(_GREETING_S, _shut, (connection.fileno(),))
                timer.start()
                try:
                    deliver_challenge(connection, self.key)
                    answer_challenge(connection, self.key)
                finally:
                    timer.cancel()
                sandbox_id, method, parts, options = connection.recv()
                connection.send(perform(self._find(sandbox_id), method, parts, options))
            except Exception:  # noqa: BLE001  a caller that is gone or knows no key is nobody's concern here
                return
            finally:
                self._callers.release()


def _peer_uid(accepted: socket.socket) -> int:
    credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid: int = _PEER.unpack(credentials)[1]
    return uid


def _shut(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as silent:
        silent.shutdown(socket.SHUT_RDWR)


def by_socket(name: str, key: bytes, call: tuple[Any, ...]) -> Any:
    """Call by a `Door`.

    Args:
        name: Its name.
        key: Its key.
        call: Id, method, positional and keyword arguments.

    Raises:
        SandboxLost: The process has ended, and the sandbox with it.
    """
    try:
        with Client(f"\0{name}", "AF_UNIX", authkey=key) as connection:
            connection.send(call)
            return connection.recv()
    except (OSError, EOFError) as exc:
        raise SandboxLost(
            "the process that owned the sandbox has ended, and the sandbox with it",
            hint="pass handles only while their task or actor runs, or create with detached=True",
        ) from exc
