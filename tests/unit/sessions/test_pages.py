"""Lists of sandboxes page by page: each once, oldest first, whatever ends between two pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.sessions.catalogue import listing
from ringfence.sessions.catalogue.describe import describe_live
from ringfence.sessions.catalogue.listing import Wanted, page
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager

pytestmark = pytest.mark.anyone

ALL = (*listing.ALIVE, State.TERMINATED)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionManager]:
    monkeypatch.setattr(listing, "_BATCH", 2)
    backend = Unconfined()
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with SessionManager(config, backends=[backend], background=False, clock=FakeClock()) as made:
        yield made
    backend.close()


def pages(manager: SessionManager, most: int, **wanted: Any) -> list[list[str]]:
    """Read to the end."""
    found: list[list[str]] = []
    after: str | None = ""
    while after is not None:
        views, after = page(manager, Wanted(**wanted), after, most)
        found.append([each.session_id for each in views])
    return found


@pytest.fixture
def ids(manager: SessionManager) -> list[str]:
    """Seven, of two clients in turn; every third has ended."""
    made = []
    for number in range(7):
        spec = SandboxSpec(labels={"n": str(number % 2), "every": "x"})
        made.append(manager.acquire(spec, client_id=f"client-{number % 2}").id)
    for each in made[::3]:
        manager.release(each)
    return made


@pytest.mark.parametrize("most", [1, 2, 3, 6, 7, 8])
def test_each_is_on_one_page(manager: SessionManager, ids: list[str], most: int) -> None:
    expected = [ids[n : n + most] for n in range(0, 7, most)]
    assert expected == pages(manager, most, states=ALL)
    alive = [each for n, each in enumerate(ids) if n % 3]
    assert [alive[n : n + most] for n in range(0, 4, most)] == pages(manager, most)
    assert [[each] for each in ids[::3]] == pages(manager, 1, states=(State.TERMINATED,))


def test_a_page_has_what_is_asked_for_alone(manager: SessionManager, ids: list[str]) -> None:
    assert [ids[1::2]] == pages(manager, 9, states=ALL, client_id="client-1")
    assert [ids[0::2]] == pages(manager, 9, states=ALL, labels={"n": "0", "every": "x"})
    assert [[]] == pages(manager, 9, states=ALL, labels={"n": "0", "every": "y"})
    manager.change(ids[1], name="mine")
    assert [[ids[1]]] == pages(manager, 9, states=ALL, name="mine")


def test_one_that_ends_while_it_is_listed_is_listed_once(
    manager: SessionManager, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = describe_live

    def describe(live: Any) -> Any:
        view = original(live)
        if live.id == ids[4]:
            manager.release(live.id)
        return view

    monkeypatch.setattr(listing, "describe_live", describe)
    assert [ids] == pages(manager, 9, states=ALL)


def test_what_was_lost_meanwhile_is_listed_as_ended(
    manager: SessionManager, ids: list[str]
) -> None:
    live = manager.index.find(ids[1])
    assert live is not None
    live.inner.terminate()
    assert [[ids[2], ids[4], ids[5]]] == pages(manager, 9)
    assert "lost" == manager.get(ids[1]).reason
