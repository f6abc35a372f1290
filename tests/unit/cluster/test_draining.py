"""What a drain does with each sandbox, and what it says of it."""

from __future__ import annotations

import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from ringfence.cluster.draining import MOVED, SAVED, STAYS, Activity, Draining, can_restore, choose
from ringfence.cluster.moved import Moved

pytestmark = pytest.mark.anyone

_SANDBOX: dict[str, Any] = {
    "id": "sbx-1",
    "owner": "ann",
    "name": "",
    "session_state": "active",
    "last_active_at": 10.0,
    "timeouts": {},
    "metadata": {},
    "backend": "gvisor",
    "image": None,
    "reason": "",
}


class Server:
    """A server with one sandbox, on which the snapshot counts as a use of it."""

    def __init__(self, *, runs: int = 0, refuses: str = "") -> None:
        self.runs, self.refuses = runs, refuses
        self.asked: list[str] = []
        self.is_evicted = False

    def ask(self, method: str, path: str, _body: bytes | None) -> Any:
        self.asked.append(f"{method} {path.partition('?')[0]}")
        if path.endswith("/evict"):
            if self.refuses:
                raise http.client.HTTPException(self.refuses)
            self.is_evicted = True
            return {"sandbox_id": "sbx-1", "snapshot_id": "snap-2"}
        if "POST" == method:
            return {"id": "snap-1"}
        if path.endswith("/execs"):
            ended = [{"state": "ended"}, {"state": "lost"}]
            return {"items": [*ended, *[{"state": "running"}] * self.runs]}
        if path.endswith("/stats"):
            return {"pids": 0}
        if path.endswith("/sbx-1"):
            return {**_SANDBOX, "last_active_at": 11.0}
        return self._listed("state=terminated" in path)

    def _listed(self, is_ended: bool) -> Any:
        shown = {**_SANDBOX, "reason": "evicted"} if is_ended else _SANDBOX
        return {"items": [shown] if is_ended == self.is_evicted else [], "next_cursor": None}


class Gateways:
    """Those who hear of sandboxes that have left."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def publish(self, sandbox: dict[str, Any], snapshot: str) -> None:
        self.heard.append((sandbox["id"], snapshot))


def draining(server: Server, gateways: Gateways, obstacle: str | None = None) -> Draining:
    return Draining(
        server.ask, has_store=True, obstacle=lambda _: obstacle, publish=gateways.publish
    )


@pytest.mark.parametrize(
    ("seen", "is_whole"), [(10.0, True), (11.0, True), (11.000001, True), (11.01, False)]
)
def test_a_snapshot_is_whole_unless_the_sandbox_was_used_since(seen: float, is_whole: bool) -> None:
    """Be what is seen of it older than the snapshot."""
    drain = draining(Server(), Gateways())
    assert ["saved"] == [each["outcome"] for each in drain.settle()]

    kept = drain.kept({**_SANDBOX, "last_active_at": seen})

    assert ("snap-1", is_whole) == (kept["snapshot"], kept["is_whole"])


@pytest.mark.parametrize(
    ("activity", "obstacle", "outcome", "why"),
    [
        (Activity("active"), None, SAVED, ""),
        (Activity("active"), "", SAVED, ""),
        (Activity("active", 2), None, STAYS, "it runs 2 commands"),
        (Activity("active", 2), "", MOVED, ""),
        (Activity("active", 0, 1), "", MOVED, ""),
        (Activity("suspended"), None, STAYS, "it is suspended"),
        (Activity("suspended"), "", MOVED, ""),
        (Activity("detached"), "no node", STAYS, "it is detached, and cannot be moved: no node"),
        (
            Activity("active", 1),
            "no node",
            STAYS,
            "it runs 1 commands, and cannot be moved: no node",
        ),
    ],
)
def test_what_a_snapshot_of_files_would_lose_is_moved_or_stays(
    activity: Activity, obstacle: str | None, outcome: str, why: str
) -> None:
    assert (outcome, why) == choose(activity, has_store=True, obstacle=obstacle)


def test_without_a_store_all_stays() -> None:
    outcome, why = choose(Activity("active", 1), has_store=False, obstacle="")

    assert STAYS == outcome
    assert "no snapshot_store" in why


def test_what_was_moved_is_published_and_listed_until_the_drain_ends() -> None:
    server, gateways = Server(runs=1), Gateways()
    drain = draining(server, gateways, "")

    listed = [drain.settle(), drain.settle()]

    assert [("sbx-1", "snap-2")] == gateways.heard
    assert [["moved"], ["moved"]] == [[each["outcome"] for each in every] for every in listed]
    assert 1 == server.asked.count("POST /v1/sandboxes/sbx-1/evict")


def test_what_cannot_be_moved_stays_with_the_reason_of_its_server() -> None:
    server, gateways = Server(runs=1, refuses="a client is being served by it"), Gateways()

    (settled,) = draining(server, gateways, "").settle()

    assert STAYS == settled["outcome"]
    assert "it cannot be moved: a client is being served by it" == settled["why"]
    assert [] == gateways.heard


def test_two_drains_at_once_save_a_sandbox_once() -> None:
    server, both = Server(), threading.Barrier(2)

    def ask(method: str, path: str, body: bytes | None) -> Any:
        if path.endswith("/snapshots"):  # the other one comes here too, were they not in turn
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)
        return server.ask(method, path, body)

    drain = Draining(ask, has_store=True, obstacle=lambda _: None, publish=Gateways().publish)
    with ThreadPoolExecutor(2) as pool:
        found = [each.result() for each in [pool.submit(drain.settle) for _ in range(2)]]

    assert [["saved"]] * 2 == [[each["outcome"] for each in one] for one in found]
    assert 1 == server.asked.count("POST /v1/sandboxes/sbx-1/snapshots")


def test_a_new_actor_tells_of_what_left_before_the_old_one_ended() -> None:
    """The server has evicted it, and nobody heard the answer."""
    server, gateways = Server(), Gateways()
    server.is_evicted = True

    (settled,) = draining(server, gateways, "").settle()

    assert [("sbx-1", "snap-2")] == gateways.heard
    assert MOVED == settled["outcome"]


def test_a_node_restores_what_a_host_like_it_has_saved() -> None:
    form: dict[str, Any] = {"memory": {"gvisor": "v1"}, "is_draining": False, "images": ["a"]}

    assert can_restore(form, "gvisor", "v1", None)
    assert can_restore(form, "gvisor", "v1", "a")
    assert not can_restore(form, "gvisor", "v1", "b")
    assert not can_restore(form, "gvisor", "v2", None)
    assert not can_restore(form, "microvm", "v1", None)
    assert not can_restore({**form, "is_draining": True}, "gvisor", "v1", None)


def test_a_record_is_read_as_it_was_written() -> None:
    moved = Moved("ann", "snap-1", "", {}, {}, "gvisor", "v1", None, left="aa", at=1.0)

    assert moved == Moved.read(moved.written())


class Losing(Server):
    """A server of busy sandboxes: of one that leaves the answer is lost, another was restored since."""

    def __init__(self) -> None:
        super().__init__()
        self.lives, self.left = ["sbx-1", "sbx-2"], ["sbx-8", "sbx-9"]
        self.is_lost = True

    def ask(self, method: str, path: str, _body: bytes | None) -> Any:
        self.asked.append(f"{method} {path.partition('?')[0]}")
        if path.endswith("/evict"):
            return self._evict(path.split("/")[3])
        if path.endswith("/execs"):
            return {"items": [{"state": "running"}, {"state": "ended"}]}
        is_ended = "state=terminated" in path
        ids = self.left if is_ended else self.lives
        reason = "evicted" if is_ended else ""
        more = [{**_SANDBOX, "id": "sbx-7", "reason": "released"}] if is_ended else []
        return {
            "items": [*({**_SANDBOX, "id": each, "reason": reason} for each in ids), *more],
            "next_cursor": None,
        }

    def _evict(self, sandbox_id: str) -> Any:
        if sandbox_id == "sbx-8":
            raise OSError("it was restored since")
        if sandbox_id in self.lives:
            self.lives.remove(sandbox_id)
            self.left.append(sandbox_id)
        if sandbox_id == "sbx-2" and self.is_lost:
            self.is_lost = False
            raise http.client.HTTPException("the answer was lost")
        return {"sandbox_id": sandbox_id, "snapshot_id": f"snap of {sandbox_id}"}

    def evictions(self) -> list[str]:
        found = [each.split("/")[3] for each in self.asked if each.endswith("/evict")]
        self.asked.clear()
        return found


def test_one_whose_answer_was_lost_is_told_at_the_next_look_and_no_other_again() -> None:
    server, gateways = Losing(), Gateways()
    drain = draining(server, gateways, "")
    first = {each["id"]: each for each in drain.settle()}
    assert ["sbx-8", "sbx-9", "sbx-1", "sbx-2"] == server.evictions()
    assert {"sbx-1": MOVED, "sbx-2": STAYS, "sbx-9": MOVED} == {
        name: each["outcome"] for name, each in first.items()
    }
    assert "it cannot be moved: the answer was lost" == first["sbx-2"]["why"]
    assert [("sbx-9", "snap of sbx-9"), ("sbx-1", "snap of sbx-1")] == gateways.heard

    second = {each["id"]: each["outcome"] for each in drain.settle()}
    assert {"sbx-1": MOVED, "sbx-2": MOVED, "sbx-9": MOVED} == second
    assert ["sbx-8", "sbx-2"] == server.evictions()
    drain.settle()
    assert [] == server.evictions(), "all that has left is told"


def test_what_stays_has_no_snapshot_although_it_was_saved_before() -> None:
    """It was used since: the snapshot is not what it is now."""
    server, gateways = Server(), Gateways()
    drain = draining(server, gateways, "no other node has gvisor")
    [settled] = drain.settle()
    assert (SAVED, "snap-1") == (settled["outcome"], settled["snapshot"])
    server.runs = 1
    [settled] = drain.settle()
    assert (STAYS, "") == (settled["outcome"], settled["snapshot"])
