"""Ids of a sandbox: inside, on the host, and blocks of host ids that no other sandbox uses."""

from __future__ import annotations

import fcntl
import os
from _thread import allocate_lock

from ....errors import InvalidRequest, ResourceExhausted
from ....launcher.wire import AGENT_UID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SANDBOX_UID = 1000
NOBODY = 65534
NAMES = {"root": 0, "sandbox": SANDBOX_UID, "nobody": NOBODY}

# Above everything that distributions, containers (524288 up) and subuid files hand out.
_FIRST_HOST_ID = 0x70000000
IDS_EACH = 2048
_SLOTS_A_BLOCK = 128
_BLOCKS = 1000
OF_ROOT = _FIRST_HOST_ID, _FIRST_HOST_ID + _BLOCKS * _SLOTS_A_BLOCK * IDS_EACH  # and not the last
LOW_IDS = 2000  # inside ids 0 to 1999 map one to one into a slot


def uid_of(user: str | None, *, field: str = "user") -> int:
    """The inside uid of a name or number; None is the unprivileged `sandbox`.

    Raises:
        InvalidRequest: No such user.
    """
    if user is None:
        return SANDBOX_UID
    if user in NAMES:
        return NAMES[user]
    if user.isascii() and user.isdigit() and int(user) <= NOBODY:
        return int(user)
    names = ", ".join(NAMES)
    raise InvalidRequest(
        f"unknown user {user!r}", field=field, hint=f"a uid up to {NOBODY}, or {names}"
    )


def name_of(uid: int) -> str:
    return next((name for name, known in NAMES.items() if known == uid), "sandbox")


def slot_map(first_host_id: int, uid: int) -> str:
    """The id map of a sandbox that owns a slot: never host 0."""
    extents = [f"0 {first_host_id} {LOW_IDS}"]
    if uid >= LOW_IDS and uid != NOBODY:
        extents.append(f"{uid} {first_host_id + LOW_IDS} 1")
    extents.append(f"{NOBODY} {first_host_id + LOW_IDS + 1} 1")
    extents.append(f"{AGENT_UID} {first_host_id + LOW_IDS + 2} 1")
    return "\n".join(extents)


def shared_map(first_host_id: int, uid: int, own: int) -> str:
    """As `slot_map`, but `uid` is the host id `own`: an ordinary user's, who made the sandbox."""
    extents = [(0, first_host_id, min(uid, LOW_IDS)), (uid, own, 1)]
    extents.append((uid + 1, first_host_id + uid + 1, LOW_IDS - uid - 1))
    if uid != NOBODY:
        extents.append((NOBODY, first_host_id + LOW_IDS + 1, 1))
    extents.append((AGENT_UID, first_host_id + LOW_IDS + 2, 1))
    return "\n".join(f"{inside} {outside} {n}" for inside, outside, n in extents if n > 0)


def host_id(first_host_id: int, inside: int) -> int:
    """Where `slot_map` puts an inside id."""
    if inside < LOW_IDS:
        return first_host_id + inside
    return first_host_id + LOW_IDS + (1 if inside == NOBODY else 0)


class HostIds:
    """Slots of host ids, in blocks held by kernel locks.

    A block's lock is shared with the zygote and vanishes with the last of both processes, however
    they end: no two live sandboxes ever have the same host id.

    Args:
        directory: Where the locks are; the same for all processes that have the same ids.
        slots: Of an ordinary user: the first ids, each a block of its own; None: those of root.
    """

    def __init__(
        self, directory: str, share: Callable[[int], None], slots: Sequence[int] | None = None
    ) -> None:
        self._directory = directory
        self._share = share
        self._blocks_there = range(_BLOCKS) if slots is None else slots
        self._slots_of = _slots if slots is None else lambda block: [block]
        self._lock = allocate_lock()
        self._free: list[int] = []
        self._blocks: dict[str, int] = {}  # path of the lock file to its descriptor

    def take(self) -> int:
        """The first host id of a slot that is now ours.

        Raises:
            ResourceExhausted: Every block is taken.
        """
        with self._lock:
            if not self._free:
                self._free = self._take_block()
            return self._free.pop(0)

    def give_back(self, first_host_id: int) -> None:
        """Only after the sandbox's PID namespace was seen empty."""
        with self._lock:
            self._free.append(first_host_id)

    def go_on_with(self, path: str, fd: int, used: set[int]) -> None:
        """A block that an earlier process had: `fd` holds its lock; its slots, but for those in use."""
        with self._lock:
            self._blocks[path] = fd
            block = int(os.path.basename(path))
            self._free += [first for first in self._slots_of(block) if first not in used]

    def leave(self) -> None:
        """Close our descriptors of the locks; others hold them on."""
        with self._lock:
            for fd in self._blocks.values():
                os.close(fd)
            self._blocks.clear()
            self._free.clear()

    def locks(self) -> list[int]:
        with self._lock:
            return list(self._blocks.values())

    def close(self) -> None:
        """Give every block back. Precondition: no sandbox of ours is left."""
        with self._lock:
            for path, fd in self._blocks.items():
                os.unlink(path)
                os.close(fd)
            self._blocks.clear()
            self._free.clear()
            for directory in (self._directory, os.path.dirname(self._directory)):
                try:
                    os.rmdir(directory)
                except OSError:
                    pass  # others use it

    def _take_block(self) -> list[int]:
        start, count = int.from_bytes(os.urandom(2), "big"), len(self._blocks_there)
        for i in range(count):
            block = self._blocks_there[(start + i) % count]
            path = f"{self._directory}/{block}"
            fd = self._try_lock(path)
            if fd < 0:
                continue
            self._blocks[path] = fd
            self._share(fd)
            return self._slots_of(block)
        raise ResourceExhausted(
            "every block of host user ids is in use",
            hint="end other Ringfence processes of this user, or sandboxes",
        )

    def _try_lock(self, path: str) -> int:
        """A descriptor that holds the lock; -1 when somebody else does."""
        while True:
            try:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                break
            except FileNotFoundError:
                continue  # another process, closing the last block but ours, took it along
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file after we opened it: then it locks nothing.
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return -1


def _slots(block: int) -> list[int]:
    """The first host ids of the slots of a block."""
    first = _FIRST_HOST_ID + block * _SLOTS_A_BLOCK * IDS_EACH
    return [first + slot * IDS_EACH for slot in range(_SLOTS_A_BLOCK)]
