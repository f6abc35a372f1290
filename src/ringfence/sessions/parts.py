"""Interface of a session manager that the modules of its verbs need, which it imports itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..model.client_session import ClientSession
from ..model.granted import SandboxCapabilities
from ..snapshots.shared import SharedSnapshots
from ..store.store import Store
from .admission import Slots
from .catalogue.index import SessionIndex
from .clock import Clock
from .config import ManagerConfig
from .counts.statistics import Counters
from .events import Events
from .keys import Keys
from .live import Live
from .maker import Maker
from .pools.pool import Pool
from .reaper import Reaper
from .templates.built import Resolver


class Manager(Protocol):
    config: ManagerConfig
    clock: Clock
    store: Store
    maker: Maker
    pool: Pool
    slots: Slots
    index: SessionIndex
    counters: Counters
    keys: Keys
    events: Events
    reaper: Reaper
    has_background: bool
    not_ours: list[str]
    shared: SharedSnapshots | None

    @property
    def templates(self) -> Resolver: ...
    @property
    def verbs(self) -> dict[str, Callable[[str], object]]: ...

    @property
    def uptime_s(self) -> float: ...

    def check_open(self) -> None: ...

    def activate(self, live: Live) -> None: ...

    def end(self, live: Live, reason: str) -> bool: ...

    def detach(self, session: str) -> ClientSession: ...

    def extend(self, session: str, ttl_s: float) -> ClientSession: ...

    def suspend(self, session: str) -> ClientSession: ...

    def release(self, session: str, *, keep_alive: bool = False) -> ClientSession: ...

    def capabilities(self, session: str) -> SandboxCapabilities: ...
