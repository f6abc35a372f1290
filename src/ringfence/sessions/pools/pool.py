"""Warm sandboxes, made in the background and each claimed once. Used ones never come back."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque

from ...errors import Unsupported
from ...linux import timers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...backends.protocol import WarmSandbox
    from ...model.spec import SandboxSpec
    from ..clock import Clock
    from ..config import PoolConfig

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_LULL_S = 0.025  # without claims: then whoever came has had its first answers


class PooledSandbox:
    """A warm sandbox in the pool.

    Attributes:
        born: On the clock.
        snapshot: Id of the snapshot whose files it has; empty for none.
    """

    def __init__(
        self, warm: WarmSandbox, backend: str, profile: str, born: float, snapshot: str = ""
    ) -> None:
        self.warm, self.backend, self.profile, self.born = warm, backend, profile, born
        self.snapshot = snapshot

    def fits(self, spec: SandboxSpec, backend: str, snapshot: str) -> bool:
        """Return whether it can be claimed for `spec`, over the files of this snapshot."""
        same = (self.backend, self.snapshot) == (backend, snapshot)
        return same and self.warm.fits(spec)


class Pool:
    """The shelf, and the thread that fills it.

    Args:
        build: Makes one for a profile, written down and with a slot of its own; None: no room.
        discard: Ends one unused, whatever became of it, and gives back what it held.
    """

    def __init__(
        self,
        config: PoolConfig,
        clock: Clock,
        build: Callable[[str], PooledSandbox | None],
        discard: Callable[[PooledSandbox], None],
    ) -> None:
        self.config, self._clock = config, clock
        self._build, self._discard = build, discard
        self._changed = threading.Condition()
        self._shelf: deque[PooledSandbox] = deque()
        self._building: Counter[str] = Counter()
        self._orders: Counter[str] = Counter()  # beyond min_warm, each once
        self._closed = False
        self._thread: threading.Thread | None = None
        self._alarm: Alarm | None = None  # of the thread
        self._runs_in_background = False
        self._pause_s, self._not_before = 0.0, 0.0
        self._calm_at = 0.0  # on the clock, when the last claim is a lull ago
        self.last_error = ""
        self.given_up: dict[str, str] = {}  # profiles that no backend builds ahead, and why

    @property
    def size(self) -> int:
        """Warm sandboxes that could be claimed now."""
        with self._changed:
            return len(self._shelf)

    # -- taking out ---------------------------------------------------------------------------

    def claim(self, spec: SandboxSpec, backend: str, snapshot: str = "") -> PooledSandbox | None:
        """Take one that fits, for good; None where there is none.

        Raises:
            InvalidRequest: The spec names what no sandbox could have.
        """
        with self._changed:
            for pooled in self._shelf:
                if pooled.fits(spec, backend, snapshot):
                    self._shelf.remove(pooled)
                    self._calm_at = self._clock.now() + _LULL_S
                    # Whoever has it is about to use it: the thread is not to wake beside that.
                    is_urgent = self._wanted(patient=True) is not None
                    self._wake(0.0 if is_urgent else _LULL_S)
                    return pooled
        return None

    def _wake(self, after_s: float = 0.0) -> None:
        """Have the thread look what there is to do; it finds out itself whether it is too early."""
        if self._alarm is not None:
            self._alarm.set(after_s)

    def take_any(self) -> PooledSandbox | None:
        """Take the oldest, to make room for a client's own."""
        with self._changed:
            return self._shelf.popleft() if self._shelf else None

    def profile_for(self, spec: SandboxSpec, backend: str) -> str:
        """The warm profile that such a sandbox could have come from; empty for none that is known."""
        with self._changed:
            for pooled in self._shelf:
                if pooled.fits(spec, backend, ""):
                    return pooled.profile
        return ""

    # -- filling up ---------------------------------------------------------------------------

    def order(self, profile: str) -> bool:
        """Ask for one beyond `min_warm`, as far as `max_warm` allows; whether it will be made."""
        with self._changed:
            if self._closed or profile not in self.config.warm_profiles or not self._has_room():
                return False
            self._orders[profile] += 1
            self._wake()
            return True

    def _has_room(self) -> bool:
        """Return whether `max_warm` leaves room for one beyond the `min_warm` of each profile."""
        least = dict.fromkeys(self.config.warm_profiles, self.config.min_warm)
        there = self._there() | Counter(least)  # of each, the larger number
        return there.total() + self._orders.total() < self.config.max_warm

    def _there(self) -> Counter[str]:
        return Counter(pooled.profile for pooled in self._shelf) + self._building

    def start(self) -> None:
        """Fill the shelf in the background from now on."""
        self._runs_in_background = True
        if self.config.enabled and self._thread is None:
            self._alarm = Alarm()
            arguments = (self._alarm,)
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="ringfence-pool", daemon=True
            )
            self._thread.start()

    def _run(self, alarm: Alarm) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                wait_s = self._idle_s()
                if wait_s > 0:
                    alarm.set(wait_s)
            if wait_s > 0:
                alarm.wait()
            else:
                self.tend(patient=True)

    def _idle_s(self) -> float:
        """Until there is something to do."""
        now = self._clock.now()
        expiring = [pooled.born + self.config.warm_ttl_s - now for pooled in self._shelf]
        until_expiry = max(0.0, min(expiring, default=3600.0))
        if self._wanted() is None:
            return until_expiry
        begin_at = self._not_before
        if self._wanted(patient=True) is None:
            begin_at = max(begin_at, self._calm_at)
        return min(until_expiry, max(0.0, begin_at - now))

    def _wanted(self, *, patient: bool = False) -> tuple[str, bool] | None:
        """A profile of which one is missing, and whether it was ordered.

        Args:
            patient: Nothing that can wait for a lull: who has just claimed one is about to use it, and
                building the next would be in the way. Not once more than half of them are gone.
        """
        if not self.config.enabled:
            return None
        least = self.config.min_warm
        if patient and self._clock.now() < self._calm_at:
            least -= least // 2
        possible = [name for name in self.config.warm_profiles if name not in self.given_up]
        for profile in possible:
            there = (
                sum(pooled.profile == profile for pooled in self._shelf) + self._building[profile]
            )
            if there < least:
                return profile, False
        return next(((name, True) for name in possible if self._orders[name]), None)

    def tend(self, *, patient: bool = False) -> None:
        """Discard what is too old or dead, and make what is missing; returns when all is done.

        Args:
            patient: What can wait for a lull is left for then.
        """
        for pooled in self._take_expired():
            self._discard(pooled)
        while (profile := self._begin(patient)) is not None:
            made: PooledSandbox | None = None
            try:
                made = self._build(profile)
                self.last_error, self._pause_s = "", 0.0
            except Unsupported as exc:
                self.given_up[profile] = str(exc)
            except Exception as exc:  # noqa: BLE001  the pool goes on; `health` tells
                self.last_error = f"{type(exc).__name__}: {exc}"
            finally:
                too_late = self._finish(profile, made)
            if too_late is not None:
                self._discard(too_late)
            if made is None:
                return

    def fill(self) -> None:
        """`tend`, and wait for what others are building."""
        self.tend()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._building.total())

    def _take_expired(self) -> list[PooledSandbox]:
        with self._changed:
            oldest = self._clock.now() - self.config.warm_ttl_s
            over = [
                pooled for pooled in self._shelf if pooled.born <= oldest or not pooled.warm.alive
            ]
            for pooled in over:
                self._shelf.remove(pooled)
            return over

    def _begin(self, patient: bool) -> str | None:
        with self._changed:
            if self._closed or self._clock.now() < self._not_before:
                return None
            wanted = self._wanted(patient=patient)
            if wanted is None:
                return None
            profile, was_ordered = wanted
            self._building[profile] += 1
            self._orders[profile] -= was_ordered
            return profile

    def _finish(self, profile: str, pooled: PooledSandbox | None) -> PooledSandbox | None:
        """Put it on the shelf; what comes after the closing is given back."""
        with self._changed:
            self._building[profile] -= 1
            self._changed.notify_all()
            self._wake()
            if pooled is None:
                # No room, or it failed: not again at once.
                self._pause_s = min(max(self._pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._not_before = self._clock.now() + self._pause_s
                return None
            if self._closed:
                return pooled
            self._shelf.append(pooled)
            return None

    def change(self, config: PoolConfig) -> None:
        """Keep other ones from now on. What was built for another profile, or a spec that is no more, goes."""
        with self._changed:
            was, self.config = self.config, config
            names = config.warm_profiles if config.enabled else ()
            pooled = [each for each in names if was.profiles.get(each) == config.profiles[each]]
            over = [each for each in self._shelf if each.profile not in pooled]
            for each in over:
                self._shelf.remove(each)
            self._orders.clear()
            self.given_up.clear()
            self._pause_s = self._not_before = 0.0
            self._wake()
        for each in over:
            self._discard(each)
        if self._runs_in_background:
            self.start()

    def wake(self) -> None:
        """There may be room again: do not wait any longer, where that was why."""
        with self._changed:
            if self._not_before:
                self._pause_s = self._not_before = 0.0
                self._wake()

    def close(self) -> None:
        """Discard everything; returns when the thread has ended."""
        with self._changed:
            self._closed = True
            shelf, self._shelf = list(self._shelf), deque()
            self._changed.notify_all()
            self._wake()
        for pooled in shelf:
            self._discard(pooled)
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            alarm, self._alarm = self._alarm, None
            if alarm is not None:
                alarm.close()


class Alarm:
    """Timer of one waiting thread. `set` may be called from any thread."""

    def __init__(self) -> None:
        self._fd = timers.timerfd()

    def set(self, after_s: float) -> None:
        """Expire in `after_s` seconds instead of at the earlier set time; 0: now."""
        timers.settime(self._fd, after_s)

    def wait(self) -> None:
        """Wait until it expires. Preconditions: it is set, or will be."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Preconditions: no thread waits, and none will set it."""
        os.close(self._fd)
