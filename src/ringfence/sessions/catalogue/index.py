"""Index of live sessions by session id, sandbox id, client and key.

Each answer is a consistent snapshot, and a client finds only its own sessions.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

from ...errors import QuotaExceeded, SandboxNotFound
from ...model.client_session import SessionState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..live import Live


class SessionIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Live] = {}
        self._sandboxes: dict[str, Live] = {}
        self._keys: dict[tuple[str, str], Live] = {}
        self._of_client: Counter[str] = Counter()
        self._making: dict[object, str] = {}

    @contextmanager
    def share(self, client_id: str, most: int | None) -> Iterator[object]:
        """In the block one more of a client's is being made; what is yielded is for `enter`.

        Raises:
            QuotaExceeded: The client has `most` already.
        """
        share = object()
        with self._lock:
            has = self._of_client[client_id] + [*self._making.values()].count(client_id)
            if most is not None and has >= most:
                raise QuotaExceeded(
                    f"this client has reached its limit of {most} sandboxes",
                    hint="end a sandbox, or ask an admin to raise the limit",
                    field="max_of_client",
                )
            self._making[share] = client_id
        try:
            yield share
        finally:
            with self._lock:
                self._making.pop(share, None)

    def enter(self, live: Live, share: object = None) -> None:
        """From now on it is found, and its `share` is used up.

        Preconditions: its sandbox has no other session.
        """
        with self._lock:
            if live.id in self._sessions or live.sandbox_id in self._sandboxes:
                raise ValueError(f"{live.sandbox_id} is already registered")
            self._sessions[live.id] = self._sandboxes[live.sandbox_id] = live
            self._of_client[live.client_id] += 1
            self._making.pop(share, None)
            if live.key:
                self._keys[live.client_id, live.key] = live

    def leave(self, live: Live) -> bool:
        """It has ended; whether it was in the book."""
        with self._lock:
            if self._sessions.get(live.id) is not live:
                return False
            del self._sessions[live.id], self._sandboxes[live.sandbox_id]
            if self._keys.get((live.client_id, live.key)) is live:
                del self._keys[live.client_id, live.key]
            self._of_client -= Counter((live.client_id,))  # one less, and never a name with none
            return True

    def find(self, any_id: str, client_id: str | None = None) -> Live | None:
        """By session or sandbox id; None where there is none, or another client's.

        Args:
            client_id: None may see everything.
        """
        with self._lock:
            live = self._sessions.get(any_id) or self._sandboxes.get(any_id)
        return live if live is not None and client_id in (None, live.client_id) else None

    def need(self, any_id: str, client_id: str | None = None) -> Live:
        """`find`.

        Raises:
            SandboxNotFound: There is none, or it is another client's: the same words for both.
        """
        live = self.find(any_id, client_id)
        if live is None:
            raise SandboxNotFound(f"no session or sandbox {any_id!r}")
        return live

    def under_key(self, client_id: str, key: str) -> Live | None:
        with self._lock:
            return self._keys.get((client_id, key)) if key else None

    def all(self) -> list[Live]:
        """Every live session, oldest first."""
        with self._lock:
            return list(self._sessions.values())

    def counts(self, client_id: str | None = None) -> dict[SessionState, int]:
        counted = dict.fromkeys(SessionState, 0)
        for live in self.all():
            counted[live.state] += client_id in (None, live.client_id)
        return counted
