"""A session and its sandbox, as the manager holds them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager

from ..model.client_session import ClientSession, SessionState
from ..sandbox.sync import Sandbox
from .expiry import Activity
from .usage import Use, WatchedSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..backends.protocol import BackendSandbox
    from ..model.client_session import SessionTimeouts
    from ..model.granted import SandboxCapabilities
    from ..model.spec import SandboxSpec
    from .clock import Clock


class LeasedSandbox(Sandbox):
    """`Sandbox`, but the manager ends it: in time, or when it is told to."""

    _can_move = False

    def __init__(self, inner: WatchedSandbox, spec: SandboxSpec) -> None:
        from dataclasses import replace

        timeless = spec if spec.ttl_s is None else replace(spec, ttl_s=None)
        super().__init__(inner, timeless)
        self.spec = spec

    def __del__(self) -> None:
        """Nothing: a client may drop it, and get it again."""


class Live:
    """A session that has not ended. `lock` is held by whoever changes its state.

    Attributes:
        expires: On the clock, when its time to live is over; None without one.
        moving: Resolves once the sandbox, which is saved and restored in its place, is there again; None:
            it is there.
        profile: Of the pool that its sandbox came from; empty for one that was made for it.
    """

    def __init__(
        self,
        clock: Clock,
        session_id: str,
        client_id: str,
        backend: str,
        sandbox_id: str,
        spec: SandboxSpec,
        timeouts: SessionTimeouts,
        metadata: Mapping[str, str],
        verbs: dict[str, Callable[[str], object]],
    ) -> None:
        self.clock, self.id, self.client_id, self.backend = clock, session_id, client_id, backend
        self.sandbox_id, self.spec = sandbox_id, spec
        self.timeouts, self.metadata, self._verbs = timeouts, metadata, verbs
        self.lock = threading.RLock()
        self.state, self.reason = SessionState.ACTIVE, ""
        self.activity = Activity(clock.now())
        self.created_at = clock.wall()
        self.expires = None if spec.ttl_s is None else clock.now() + spec.ttl_s
        self.key = self.request = self.profile = ""
        self.is_checked = False  # somebody looks at it in the background
        self.next_look = 0.0
        self.saved_activity = self.activity.last
        self.granted: SandboxCapabilities | None = None  # as last read back
        self.moving: Future[None] | None = None
        self.use = Use(self.touch)

    def have(self, inner: BackendSandbox) -> None:
        """Its sandbox is there. Preconditions: nobody has found the session before."""
        self.inner = inner
        own = {name: self._of_mine(verb) for name, verb in self._verbs.items()}
        self.watched = WatchedSandbox(inner, self.use, own)
        self.sandbox = LeasedSandbox(self.watched, self.spec)

    @contextmanager
    def move(self) -> Iterator[None]:
        """Have its sandbox saved and restored in its place: in the block its absence is no loss.

        Verbs that change its state wait for the end of the block.
        """
        with self.lock:
            moving: Future[None] = Future()
            self.moving = moving
            try:
                with self.use.call():
                    yield
            finally:
                self.moving = None
                moving.set_result(None)

    def lead_to(self, inner: BackendSandbox) -> None:
        """Have the sandbox that was restored in its place; objects that clients hold stay valid."""
        self.inner, self.granted = inner, None
        self.watched.lead_to(inner)
        self.sandbox._take_place(self.watched)

    def touch(self) -> None:
        self.activity.touch(self.clock.now())

    def _of_mine(self, verb: Callable[[str], object]) -> Callable[[], None]:
        """A verb of the manager as the sandbox has it: for one that has ended, the sandbox answers."""

        def call() -> None:
            if self.state != SessionState.TERMINATED:
                verb(self.id)
            else:
                getattr(self.inner, verb.__name__)()

        return call

    def left_s(self, now: float) -> float | None:
        return None if self.expires is None else self.expires - now

    def remaining_s(self, now: float) -> float | None:
        """Until it expires if nobody uses it; None: never."""
        left, limit = [self.left_s(now)], self.timeouts.of(self.state)
        if limit is not None:
            left.append(limit - (0.0 if self.use.busy else self.activity.unused_s(now)))
        return min((max(0.0, each) for each in left if each is not None), default=None)

    def view(self) -> ClientSession:
        now = self.clock.now()
        left, is_over = self.left_s(now), self.state == SessionState.TERMINATED
        return ClientSession(
            session_id=self.id,
            sandbox_id=self.sandbox_id,
            client_id=self.client_id,
            state=self.state,
            backend=self.backend,
            created_at=self.created_at,
            # The wall clock may have been set back since.
            last_active_at=max(self.created_at, self.clock.wall_at(self.activity.last)),
            timeouts=self.timeouts,
            metadata=self.metadata,
            expires_in_s=None if left is None else max(0.0, left),
            reason=self.reason,
            time_remaining_s=None if is_over else self.remaining_s(now),
        )
