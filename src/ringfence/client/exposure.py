"""An address of this machine that leads to a server inside a sandbox of a Ringfence server. Blocks.

Between here and there a connection is a WebSocket, whose binary messages are its bytes.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from contextlib import suppress

from ..errors import ConnectError, InvalidRequest, LifecycleError, RingfenceError
from ..model.base.helpful import helpful
from ..model.state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from ._sync.transport import Transport

_BACKLOG = 128
_CHUNK = 1 << 16


def connect(transport: Transport, at: str, port: int) -> socket.socket:
    """A connection, as a socket.

    Raises:
        ConnectError: Nothing accepts connections there.
        LifecycleError: The sandbox has ended, or is suspended.
    """
    ours, theirs = socket.socketpair()
    opened: list[BaseException | None] = []
    is_open = threading.Event()

    def run() -> None:
        try:
            with transport.websocket(f"{at}/ports/{port}/tcp") as channel:
                opened.append(None)
                is_open.set()
                _join(channel, theirs)
        except BaseException as exc:  # noqa: BLE001  told to whoever waits
            opened.append(exc)
        finally:
            is_open.set()
            theirs.close()

    threading.Thread(target=run, name=f"ringfence-port-{port}", daemon=True).start()
    is_open.wait()
    if opened[0] is not None:
        ours.close()
        raise refusal(transport, at, opened[0], port)
    return ours


def refusal(transport: Transport, at: str, exc: BaseException, port: int) -> BaseException:
    """The error for a WebSocket that was not opened: its answer says why, and cannot be read."""
    if isinstance(exc, RingfenceError):
        return exc
    try:
        state = transport.json("GET", at)["state"]
    except RingfenceError as problem:
        return problem
    if state in (State.TERMINATED, State.SUSPENDED):
        return LifecycleError(f"the sandbox is {state}")
    return ConnectError(f"port {port}: {exc}")


def _join(channel: Any, sock: socket.socket) -> None:
    """Bytes both ways until one side has no more; then the rest of the other's."""

    def outward() -> None:
        with suppress(Exception):
            while data := sock.recv(_CHUNK):
                channel.send_bytes(data)
            channel.send_text("eof")

    thread = threading.Thread(target=outward, daemon=True)
    thread.start()
    try:
        while True:
            sock.sendall(channel.receive_bytes())
    except Exception:  # noqa: BLE001  closed at either end: there is nothing to add
        pass
    finally:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        thread.join()


@helpful
class RemoteExposure:
    """See `Exposure`: every connection to `address` is one to the server inside.

    Attributes:
        address: `(host, port)`, or the path of a unix socket.
    """

    def __init__(
        self, transport: Transport, at: str, port: int, host: str, host_port: int, unix: str | None
    ) -> None:
        self._transport, self._at, self.port = transport, at, port
        self._unix = unix
        self._listener = _listen(host, host_port, unix)
        name = self._listener.getsockname()
        self.address: tuple[str, int] | str = name if isinstance(name, str) else name[:2]
        self._inode = _inode(unix)
        self._is_open = True
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                with self._transport.websocket(f"{self._at}/ports/{self.port}/tcp") as channel:
                    _join(channel, client)
            except Exception:  # noqa: BLE001  the client is told by a reset, as it would be inside
                with suppress(OSError):
                    linger = b"\1\0\0\0\0\0\0\0"  # struct linger {1, 0}: socket(7)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def close(self) -> None:
        """Accept nothing more; idempotent. Ends no connection."""
        if not self._is_open:
            return
        self._is_open = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        # What took its place at the path belongs to somebody else.
        if self._unix is not None and self._inode == _inode(self._unix):
            with suppress(OSError):
                os.unlink(self._unix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteExposure of port {self.port} at {self.address}>"


def _inode(path: str | None) -> tuple[int, int] | None:
    """Number of the socket at `path`; None where there is none."""
    try:
        info = os.lstat(path or "")
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if stat.S_ISSOCK(info.st_mode) else None


def _listen(host: str, host_port: int, unix: str | None) -> socket.socket:
    family = (
        socket.AF_UNIX if unix is not None else socket.AF_INET6 if ":" in host else socket.AF_INET
    )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if unix is not None:
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(unix)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, host_port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        field = "unix" if unix is not None else "host_port"
        raise InvalidRequest(f"{unix or host}: {exc.strerror or exc}", field=field) from exc
    return listener
