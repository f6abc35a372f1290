"""Exclusive resources of a daemon: its state directory and its listening sockets."""

from __future__ import annotations

import contextlib

from ..backends.registry import check_names, check_settings, use_settings
from ..store.directory import StateDirectory
from .config import SOCKET
from .sockets import check_certificate, listen_tcp, listen_unix

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from .config import DaemonConfig


class Held:
    """A state directory that is ours, and sockets on which nobody is answered yet.

    Attributes:
        listeners: Each with whether it speaks TLS; the unix socket is the first.
    """

    def __init__(
        self, directory: StateDirectory, listeners: list[tuple[socket.socket, bool]]
    ) -> None:
        self.directory, self.listeners = directory, listeners
        self._is_hidden = False

    def hide(self) -> None:
        """Let nobody connect any more. Who has connected can still be accepted."""
        if self._is_hidden:
            return  # each server asks; one that was quicker has closed its listener already
        self._is_hidden = True
        self.directory.remove(SOCKET)
        for listener, _ in self.listeners[1:]:
            # The kernel drops what would make the queue longer; on closing it resets what is in it.
            listener.listen(0)


@contextlib.contextmanager
def held(config: DaemonConfig) -> Iterator[Held]:
    """Both, until the end of the block.

    A daemon takes a second to load, and longer to go on with many sandboxes. Who connects in that time
    waits in the kernel's queue; were the sockets made last, the one that a killed daemon left would
    refuse him, as if nobody were to come.

    Raises:
        StateInUse: Another daemon holds the state directory.
        InvalidRequest: An address cannot be had, or must not be.
    """
    if config.backends_file:
        use_settings(config.backends_file)
        check_settings()
    check_names(config.backends)
    with contextlib.ExitStack() as stack:
        directory = StateDirectory(config.state_dir)
        stack.callback(directory.close)
        unix = listen_unix(config.socket_path)
        stack.callback(_forget, unix, directory)
        listeners = [(unix, False)]
        if config.listen:
            if tls := bool(config.tls_certificate):
                check_certificate(config.tls_certificate, config.tls_key)
            tcp = listen_tcp(config.listen, public=tls or config.allow_public)
            stack.callback(tcp.close)
            listeners.append((tcp, tls))
        yield Held(directory, listeners)


def _forget(listener: socket.socket, directory: StateDirectory) -> None:
    listener.close()
    directory.remove(SOCKET)
