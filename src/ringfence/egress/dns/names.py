"""Synthetic addresses: what a sandbox connects to instead of the address behind a name.

The name stays known for every protocol, and there is no other way to reach anything. A name has one
number, and with it an address in each of two networks that are nobody's: 198.18.0.0/15 (RFC 2544)
and 2001:2::/48 (RFC 5180).
"""

from __future__ import annotations

from _blake2 import blake2b  # the C half: `hashlib` asks OpenSSL first, for milliseconds
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

V6_NETWORK = bytes.fromhex("20010002" + "00" * 12)  # and 48 bits
PROXY_V4 = bytes([198, 18, 0, 1])
PROXY_V6 = V6_NETWORK[:-1] + b"\1"

_NUMBERS = 1 << 17  # as many as 198.18.0.0/15 has
MOST_NAMES = 16384  # of one sandbox: some megabytes


class Names:
    """The names of one sandbox and their addresses.

    A name that was asked for long ago makes room for a new one; those that are pinned stay.

    Args:
        key: Of the sandbox: a name has the same address after a restart, and nobody can choose names
            that all begin their search for a free number at the same place.
    """

    def __init__(self, key: str, most: int = MOST_NAMES) -> None:
        self._key = key.encode()[:64]
        self._most = most
        self._names: dict[int, str] = {}
        self._pinned: dict[str, int] = {}
        self._numbers: dict[str, int] = {}  # the others, oldest first

    def __len__(self) -> int:
        return len(self._names)

    def pin(self, names: Iterable[str]) -> None:
        """Give `names`, and no others from now on, addresses for good."""
        wanted = sorted(set(names))  # the order decides where numbers collide
        for name in sorted(set(self._pinned).difference(wanted)):
            self._numbers[name] = self._pinned.pop(name)
        for name in wanted:
            if name not in self._pinned:
                self._pinned[name] = self._numbers.pop(name, 0) or self._take(name)
        self._make_room()

    def addresses(self, name: str) -> tuple[bytes, bytes]:
        """The v4 and the v6 address of `name`, in network order."""
        number = self._pinned.get(name, 0)
        if not number:
            number = self._numbers.pop(name, 0) or self._take(name)
            self._numbers[name] = number  # the newest now
            self._make_room()
        low = number.to_bytes(3, "big")
        return bytes((198, 18 + low[0], low[1], low[2])), V6_NETWORK[:-3] + low

    def name_at(self, address: bytes) -> str | None:
        """The name whose address this is; None for any other address."""
        number = number_of(address)
        return None if number is None else self._names.get(number)

    def _take(self, name: str) -> int:
        digest = blake2b(name.encode(), key=self._key, digest_size=8).digest()
        number = int.from_bytes(digest, "big") % _NUMBERS
        while number in self._names or not _is_usable(number):
            number = (number + 1) % _NUMBERS
        self._names[number] = name
        return number

    def _make_room(self) -> None:
        over = max(0, len(self._numbers) - self._most)
        for name in [*islice(self._numbers, over)]:
            del self._names[self._numbers.pop(name)]


def is_synthetic(address: bytes) -> bool:
    """Return whether `address` (network order) is in one of the two networks."""
    if len(address) == 4:
        return address[0] == 198 and address[1] & 0xFE == 18
    return address.startswith(V6_NETWORK[:6])


def number_of(address: bytes) -> int | None:
    """The number in a synthetic address; None where there is none."""
    if not is_synthetic(address):
        return None
    if len(address) == 4:
        return (address[1] - 18) << 16 | address[2] << 8 | address[3]
    return int.from_bytes(address[6:], "big")


def _is_usable(number: int) -> bool:
    """Not what is taken for a network's own address or its broadcast, and not the proxy's."""
    return number & 0xFF not in (0, 255) and number > 255
