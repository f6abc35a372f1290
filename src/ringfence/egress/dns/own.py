"""The host's own addresses, as they are now: a name must not lead back to the machine itself."""

from __future__ import annotations

import _socket as socket

from ...linux import routes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..io.loop import Loop

_LEAST_S = 0.1  # between two looks: a router's table never rests


class OwnAddresses:
    """Kept up to date by the kernel's own notices.

    Attributes:
        texts: Single addresses.
    """

    def __init__(self, loop: Loop, on_change: Callable[[], None]) -> None:
        self.texts: frozenset[str] = frozenset()
        self._networks: tuple[tuple[bytes, int], ...] = ()
        self._loop, self._on_change = loop, on_change
        self._is_resting = self._is_stale = False
        self._socket = routes.watch_routes()  # before the first look: nothing falls between
        loop.watch(self._socket.fileno(), self._on_notice)
        self._look()

    def covers(self, address: bytes) -> bool:
        """Return whether `address`, in network order, leads to this machine."""
        return any(
            len(network) == len(address) and _shared_bits(network, address) >= bits
            for network, bits in self._networks
        )

    def close(self) -> None:
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()

    def _on_notice(self, _events: int) -> None:
        try:
            while self._socket.recv(1 << 16):
                continue
        except BlockingIOError:
            pass
        except OSError:
            pass  # ENOBUFS: some were lost; what counts is that there were any
        self._is_stale = True
        if not self._is_resting:
            self._refresh()

    def _refresh(self) -> None:
        self._is_resting = self._is_stale
        if self._is_stale:
            self._is_stale = False
            self._loop.later(_LEAST_S, self._refresh)
            try:
                self._look()
            except OSError:
                self._is_stale = True  # no descriptor is left, say: by then there may be one

    def _look(self) -> None:
        networks = tuple(sorted(set(routes.local_networks())))
        if networks == self._networks:
            return
        self._networks = networks
        self.texts = frozenset(
            socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)
            for address, bits in networks
            if bits == 8 * len(address)
        )
        self._on_change()


def _shared_bits(one: bytes, other: bytes) -> int:
    differing = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return 8 * len(one) - differing.bit_length()
