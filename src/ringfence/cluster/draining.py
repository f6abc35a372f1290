"""Sandboxes of a draining node: what is saved for another one, what stays, and why.

A snapshot has files; processes and the memory of contexts stay with the node, and so does the sandbox
itself. Once the node is stopped, its owner resumes it by its id on another one: see `reviving`.
"""

from __future__ import annotations

import http.client
import json
import time

from ..errors import RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Form = dict[str, Any]
    Ask = Callable[[str, str, bytes | None], Form]

SAVED, STAYS = "saved", "stays"
_PAGE = 1000
_AGAIN_S = 30.0  # one that is used now and then is not saved at each look


def _was_used(sandbox: Form, since: float) -> bool:
    """Return whether a sandbox was used later; what is seen of it may be older.

    Its time is told on the wall's clock, from a monotonic one: by up to a microsecond another each time.
    """
    used_at: float = sandbox["last_active_at"]
    return used_at > since + 1e-4


class Draining:
    """Saves the idle sandboxes of a node, each once for each time that it was used.

    Args:
        ask: Asks the daemon: method, path, body; the answer.
        has_store: Whether snapshots outlive the node.

    Attributes:
        saved: By sandbox, its last use and the snapshot of it.
    """

    def __init__(self, ask: Ask, *, has_store: bool) -> None:
        self._ask, self._has_store = ask, has_store
        self.saved: dict[str, tuple[float, str]] = {}
        self._saved_at: dict[str, float] = {}

    def settle(self) -> list[Form]:
        """Save what can be saved; for each sandbox what became of it."""
        found: list[Form] = []
        cursor = ""
        while True:
            page = self._ask("GET", f"/v1/sandboxes?limit={_PAGE}&cursor={cursor}", None)
            found += [self._settled(each) for each in page["items"]]
            if not (cursor := page["next_cursor"] or ""):
                return found

    def snapshot_of(self, sandbox_id: str) -> str:
        """The last snapshot of a sandbox by this drain; empty for none."""
        return self.saved.get(sandbox_id, (0.0, ""))[1]

    def kept(self, sandbox: Form) -> Form:
        """Facts about a sandbox for the time after its node is lost, beside those of a list."""
        used_at, snapshot = self.saved.get(sandbox["id"], (0.0, ""))
        if not snapshot:
            return {}
        is_whole = not _was_used(sandbox, used_at)
        more = (
            {"timeouts": sandbox["timeouts"], "metadata": sandbox["metadata"]} if is_whole else {}
        )
        return {"snapshot": snapshot, "is_whole": is_whole, **more}

    def _settled(self, sandbox: Form) -> Form:
        why = self._why_not(sandbox)
        if not why:
            try:
                self._save(sandbox)
            except (RingfenceError, OSError, http.client.HTTPException) as exc:
                why = f"it cannot be saved: {exc}"
        kept = {name: sandbox[name] for name in ("id", "owner", "name", "session_state")}
        saved = "" if why else self.snapshot_of(sandbox["id"])
        return {**kept, "outcome": STAYS if why else SAVED, "snapshot": saved, "why": why}

    def _why_not(self, sandbox: Form) -> str:
        if not self._has_store:
            return "no snapshot_store: with this node it is lost"
        if sandbox["session_state"] != "active":
            return f"it is {sandbox['session_state']}"
        execs = self._ask("GET", f"/v1/sandboxes/{sandbox['id']}/execs", None)["items"]
        running = sum(each["state"] == "running" for each in execs)
        return f"it runs {running} commands" if running else ""

    def _save(self, sandbox: Form) -> None:
        used_at, before = self.saved.get(sandbox["id"], (0.0, ""))
        since = time.monotonic() - self._saved_at.get(sandbox["id"], -_AGAIN_S)
        if before and (not _was_used(sandbox, used_at) or since < _AGAIN_S):
            return
        body = json.dumps({"metadata": {"ringfence.drained": sandbox["id"]}}).encode()
        made = self._ask("POST", f"/v1/sandboxes/{sandbox['id']}/snapshots", body)
        again = self._ask("GET", f"/v1/sandboxes/{sandbox['id']}", None)
        self.saved[sandbox["id"]] = again["last_active_at"], made["id"]
        self._saved_at[sandbox["id"]] = time.monotonic()
        if before:
            self._ask("DELETE", f"/v1/snapshots/{before}", None)


__all__ = ["SAVED", "STAYS", "Draining"]
