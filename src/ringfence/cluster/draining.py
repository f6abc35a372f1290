"""Sandboxes of a draining node: what is saved for another one, what is moved, what stays, and why.

A snapshot has files; processes stay with the node, and so does the sandbox itself: once the node is gone,
its owner resumes it by its id on another one, see `reviving`. Where the backend saves memory, a sandbox
in which something runs is evicted: it ends here with all that runs, and goes on on another node.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass

from ..errors import RingfenceError
from ..model.client_session import SessionState
from ..sessions.maker import EVICTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Form = dict[str, Any]
    Ask = Callable[[str, str, bytes | None], Form]

SAVED, MOVED, STAYS = "saved", "moved", "stays"
_PAGE = 1000
_AGAIN_S = 30.0  # one that is used now and then is not saved at each look
_PROBLEMS = (RingfenceError, OSError, http.client.HTTPException)
_SHOWN = ("id", "owner", "name", "session_state")


@dataclass(frozen=True)
class Activity:
    """Activity in a sandbox, which a snapshot of its files would lose.

    Attributes:
        state: Of its session.
        commands: Execs that run, contexts among them.
        processes: Processes inside, of execs or not; 0 where that is not known.
    """

    state: str
    commands: int = 0
    processes: int = 0

    @property
    def loss(self) -> str:
        """Say what would be lost; empty for nothing."""
        if self.commands:
            return f"it runs {self.commands} commands"
        if self.state != SessionState.ACTIVE:
            return f"it is {self.state}"
        return f"{self.processes} processes run in it" if self.processes else ""


def choose(activity: Activity, *, has_store: bool, obstacle: str | None) -> tuple[str, str]:
    """Choose what becomes of a sandbox, and say why where it stays.

    Args:
        has_store: Snapshots outlive the node.
        obstacle: Why it cannot be moved with its memory; empty: it can; None: its backend saves files only.
    """
    if not has_store:
        return STAYS, "no snapshot_store: with this node it is lost"
    loss = activity.loss
    if not loss:
        return SAVED, ""
    if obstacle:
        return STAYS, f"{loss}, and cannot be moved: {obstacle}"
    return (STAYS, loss) if obstacle is None else (MOVED, "")


def can_restore(form: Form, backend: str, needs: str, image: str | None) -> bool:
    """Return whether a node restores what was saved with its memory.

    Args:
        form: Report of the node.
        needs: What a host must have, as the saving one's report of the backend says.
        image: The image that the sandbox was made from.
    """
    is_like = form.get("memory", {}).get(backend) == needs
    return is_like and not form["is_draining"] and (image is None or image in form["images"])


def _was_used(sandbox: Form, since: float) -> bool:
    """Return whether a sandbox was used later; what is seen of it may be older.

    Its time is told on the wall's clock, from a monotonic one: by up to a microsecond another each time.
    """
    used_at: float = sandbox["last_active_at"]
    return used_at > since + 1e-4


class Draining:
    """Saves the idle sandboxes of a node, each once for each time that it was used, and moves busy ones.

    Args:
        ask: Asks the daemon: method, path, body; the answer.
        has_store: Whether snapshots outlive the node.
        obstacle: Says why a sandbox cannot be moved with its memory, as for `choose`.
        publish: Tells gateways of a sandbox that has left: the sandbox and its snapshot.

    Attributes:
        saved: By sandbox, its last use and the snapshot of it.
        moved: What was moved by this drain, as `settle` reports it.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        has_store: bool,
        obstacle: Callable[[Form], str | None],
        publish: Callable[[Form, str], None],
    ) -> None:
        self._ask, self._has_store = ask, has_store
        self._obstacle, self._publish = obstacle, publish
        self.saved: dict[str, tuple[float, str]] = {}
        self.moved: dict[str, Form] = {}
        self._saved_at: dict[str, float] = {}
        self._turn = threading.Lock()  # two operators may drain one node
        self._is_complete = False

    def settle(self) -> list[Form]:
        """Save and move what can be; for each sandbox what became of it."""
        with self._turn:
            if self._has_store and not self._is_complete:
                self._complete()
                self._is_complete = True
            found = [self._settled(each) for each in self._sandboxes("")]
            return [each for each in found if each["outcome"] != MOVED] + [*self.moved.values()]

    def _sandboxes(self, query: str) -> list[Form]:
        found: list[Form] = []
        cursor = ""
        while True:
            page = self._ask("GET", f"/v1/sandboxes?limit={_PAGE}&cursor={cursor}{query}", None)
            found += page["items"]
            if not (cursor := page["next_cursor"] or ""):
                return found

    def _complete(self) -> None:
        """Tell of what has left, and whose answer was not heard: the actor was killed, or too slow."""
        for sandbox in self._sandboxes("&state=terminated"):
            if sandbox["reason"] == EVICTED and sandbox["id"] not in self.moved:
                try:
                    self._evict(sandbox)
                except _PROBLEMS:
                    continue  # it was restored since

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
        outcome, why = STAYS, ""
        try:
            obstacle = self._obstacle(sandbox)
            activity = self._activity(sandbox, counts=obstacle is not None)
            outcome, why = choose(activity, has_store=self._has_store, obstacle=obstacle)
            if outcome == SAVED:
                self._save(sandbox)
            elif outcome == MOVED:
                self._evict(sandbox)
        except _PROBLEMS as exc:
            how = "moved" if outcome == MOVED else "saved"
            outcome, why = STAYS, f"it cannot be {how}: {exc}"
            self._is_complete = self._is_complete and how != "moved"
        snapshot = self.snapshot_of(sandbox["id"]) if outcome == SAVED else ""
        return {**_shown(sandbox), "outcome": outcome, "snapshot": snapshot, "why": why}

    def _activity(self, sandbox: Form, *, counts: bool) -> Activity:
        """Look at what runs in a sandbox; at processes only where its memory can be saved."""
        at, state = f"/v1/sandboxes/{sandbox['id']}", sandbox["session_state"]
        if not self._has_store:
            return Activity(state)
        execs = self._ask("GET", f"{at}/execs", None)["items"]
        commands = sum(each["state"] == "running" for each in execs)
        if commands or state != SessionState.ACTIVE or not counts:
            return Activity(state, commands)
        return Activity(state, commands, self._ask("GET", f"{at}/stats", None)["pids"] or 0)

    def _save(self, sandbox: Form) -> None:
        used_at, before = self.saved.get(sandbox["id"], (0.0, ""))
        since = time.monotonic() - self._saved_at.get(sandbox["id"], -_AGAIN_S)
        if before and (not _was_used(sandbox, used_at) or since < _AGAIN_S):
            return
        made = self._ask("POST", f"/v1/sandboxes/{sandbox['id']}/snapshots", _drained(sandbox))
        again = self._ask("GET", f"/v1/sandboxes/{sandbox['id']}", None)
        self.saved[sandbox["id"]] = again["last_active_at"], made["id"]
        self._saved_at[sandbox["id"]] = time.monotonic()
        if before:
            self._ask("DELETE", f"/v1/snapshots/{before}", None)

    def _evict(self, sandbox: Form) -> None:
        left = self._ask("POST", f"/v1/sandboxes/{sandbox['id']}/evict", _drained(sandbox))
        self._publish(sandbox, left["snapshot_id"])
        form = {"outcome": MOVED, "snapshot": left["snapshot_id"], "why": ""}
        self.moved[sandbox["id"]] = {**_shown(sandbox), **form}
        _, before = self.saved.pop(sandbox["id"], (0.0, ""))
        if before:
            self._ask("DELETE", f"/v1/snapshots/{before}", None)


def _shown(sandbox: Form) -> Form:
    return {name: sandbox[name] for name in _SHOWN}


def _drained(sandbox: Form) -> bytes:
    return json.dumps({"metadata": {"ringfence.drained": sandbox["id"]}}).encode()


__all__ = ["MOVED", "SAVED", "STAYS", "Activity", "Draining", "can_restore", "choose"]
