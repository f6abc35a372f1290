"""Logs and protections of ended sandboxes, for clients that ask after the end."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

from ...errors import RingfenceError
from ...model.capabilities import Protection
from ...model.net.netlog import NetworkEvent
from ...model.net.network import NetworkPolicy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...sandbox.sync import Sandbox

_MOST, _MOST_BYTES = 64, 8 << 20  # of all
_LOG_BYTES = 1 << 20  # of one
_text = json.JSONEncoder(separators=(",", ":")).encode


class EndedSandbox:
    """The answers of one sandbox as text: nothing of the sandbox itself stays in memory."""

    __slots__ = ("_log", "_rest", "id")

    def __init__(self, sandbox: Sandbox) -> None:
        self.id = sandbox.id
        events, left = sandbox.network_log(), _LOG_BYTES
        log: list[str] = []
        while events and left > 0:  # the newest come first
            log.append(_text(events.pop().to_json()))
            left -= len(log[-1])
        self._log = "[" + ",".join(reversed(log)) + "]"
        learned, protections = sandbox.learned_policy(), sandbox.protections()
        self._rest = _text([learned.to_json(), [each.to_json() for each in protections]])

    def __len__(self) -> int:
        return len(self._log) + len(self._rest)

    def network_log(self) -> list[NetworkEvent]:
        """List the network events, oldest first; of a long log the newest MiB."""
        return [NetworkEvent.from_json(form) for form in json.loads(self._log)]

    def learned_policy(self) -> NetworkPolicy:
        """The smallest policy that allows what was reached."""
        form: Any = json.loads(self._rest)[0]
        return NetworkPolicy.from_json(form)

    def protections(self) -> tuple[Protection, ...]:
        """Return the protections as last read back."""
        return tuple([Protection.from_json(form) for form in json.loads(self._rest)[1]])


class EndedSandboxes:
    """Store of the last 64 ended sandboxes, fewer where their logs are large."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, EndedSandbox] = OrderedDict()
        self._bytes = 0

    def keep(self, sandbox: Sandbox) -> None:
        """Store the sandbox's logs and protections; skip it where its backend can no longer read them."""
        try:
            ended = EndedSandbox(sandbox)
        except RingfenceError:
            return
        with self._lock:
            # An evicted one comes back under its id, and ends again.
            before = self._kept.pop(ended.id, None)
            self._kept[ended.id] = ended
            self._bytes += len(ended) - (0 if before is None else len(before))
            while len(self._kept) > _MOST or self._bytes > _MOST_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def find(self, sandbox_id: str) -> EndedSandbox | None:
        with self._lock:
            return self._kept.get(sandbox_id)
