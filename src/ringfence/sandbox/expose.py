"""An address on the host that leads to a server inside a sandbox."""

from __future__ import annotations

import os
import socket
import stat
import threading

from ..errors import ConnectError, InvalidRequest, RingfenceError
from ..model.base import checks
from ..model.base.helpful import helpful

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backends.protocol import BackendSandbox

_BACKLOG = 128
_MOST_DIALLING = 32  # connections that wait for a slow server inside, each in a thread of its own


@helpful
class Exposure:
    """Every connection to `address` is one to the server inside, until `close` or the sandbox's end.

    A connection is refused, by a reset, while nothing inside listens. Closing ends no connection.

    Attributes:
        address: `(host, port)`, or the path of a unix socket.
    """

    def __init__(self, sandbox: BackendSandbox, port: int, listener: socket.socket) -> None:
        self._sandbox, self.port, self._listener = sandbox, port, listener
        name = listener.getsockname()
        self.address: tuple[str, int] | str = name if isinstance(name, str) else name[:2]
        self._inode = _inode(self.address)
        self._lock, self._is_open = threading.Lock(), True
        self._room = threading.BoundedSemaphore(_MOST_DIALLING)
        name = f"ringfence-expose-{port}"
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def lead_to(self, sandbox: BackendSandbox) -> None:
        """Connect to another sandbox from now on."""
        self._sandbox = sandbox

    def close(self) -> None:
        """Accept nothing more; idempotent."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        # Closing alone would leave a thread that waits in accept(2) there for good.
        self._listener.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._listener.close()
        if isinstance(self.address, str) and self._inode == _inode(self.address):
            os.unlink(self.address)

    def __enter__(self) -> Exposure:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Exposure of port {self.port} at {self.address}>"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                return  # closed
            self._room.acquire()
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        try:
            self._sandbox.forward(self.port, client)
        except ConnectError:
            pass  # the client has been told, by a reset
        except RingfenceError:
            self._give_up()
        finally:
            self._room.release()

    def _give_up(self) -> None:
        """The sandbox is gone, or suspended: then others may find it awake again."""
        if self._sandbox.session.state == "terminated":
            self.close()


def _inode(address: tuple[str, int] | str) -> tuple[int, int] | None:
    if not isinstance(address, str):
        return None
    try:
        info = os.lstat(address)
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if stat.S_ISSOCK(info.st_mode) else None


def listen(host: str, host_port: int, unix: str | None) -> socket.socket:
    """A listener on one address of the host, or at a path that only this user may use.

    Raises:
        InvalidRequest: It is taken, or cannot be had.
    """
    if unix is not None:
        return _listen_at(checks.path(unix, "unix"))
    checks.integer(host_port, "host_port", 0, 65535)
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host, host_port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, UnicodeError) as exc:
        hint = "as 127.0.0.1"
        raise InvalidRequest(f"{host!r} is not an address", field="host", hint=hint) from exc
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise InvalidRequest(f"{host} port {host_port}: {exc.strerror}", field="host_port") from exc
    return listener


def _listen_at(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # bind(2) gives the socket file the mode of the socket: set before, no other user can
        # connect in between.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise InvalidRequest(f"{path}: {exc.strerror or exc}", field="unix") from exc
    return listener
