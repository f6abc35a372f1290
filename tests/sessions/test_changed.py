"""What is changed while a manager runs, and how much one client may have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringfence import SandboxSpec
from ringfence.errors import InvalidRequest, QuotaExceeded, ResourceExhausted
from ringfence.model.acquire import AcquireOptions
from ringfence.sessions.config import PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.sessions.conftest import NO_POOL, MakeManager

pytestmark = pytest.mark.anyone

WANTED = PoolConfig(
    min_warm=0, max_warm=3, warm_profiles=("quiet",), profiles={"quiet": SandboxSpec(user="nobody")}
)


def test_a_pool_that_was_changed_is_the_next_manager_s(
    make_manager: MakeManager, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    first = make_manager(state_dir=state)
    first.change_pool(WANTED)
    first.close()

    second = make_manager(state_dir=state)
    assert WANTED == second.pool.config == second.config.pool
    second.close()


def test_a_configuration_that_was_changed_since_wins(
    make_manager: MakeManager, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    first = make_manager(state_dir=state)
    first.change_pool(WANTED)
    first.close()

    newer = PoolConfig(min_warm=0, max_warm=1)
    second = make_manager(state_dir=state, pool=newer)
    assert newer == second.pool.config
    second.close()
    third = make_manager(state_dir=state)
    assert WANTED == third.pool.config, "the first one's configuration again, and what it became"


def test_each_client_has_so_many_at_most(make_manager: MakeManager) -> None:
    manager = make_manager(max_of_client=2, pool=NO_POOL)
    mine = [manager.acquire(client_id="ann") for _ in range(2)]

    with pytest.raises(QuotaExceeded) as refused:
        manager.acquire(client_id="ann")
    assert ("max_of_client", False) == (refused.value.field, refused.value.retryable)
    again = AcquireOptions(preferred_id=mine[0].session.sandbox_id)
    assert not manager.acquire(options=again, client_id="ann").newly_created
    assert manager.acquire(client_id="ben").newly_created
    mine[0].release()
    assert manager.acquire(client_id="ann").newly_created


def test_many_at_once_are_no_more(make_manager: MakeManager) -> None:
    manager = make_manager(max_of_client=3, pool=NO_POOL)

    def one(_: int) -> bool:
        try:
            manager.acquire(client_id="ann")
        except ResourceExhausted:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        made = [*threads.map(one, range(8))]

    assert 3 == sum(made) == len(manager.list("ann"))


def test_a_failed_one_does_not_count(make_manager: MakeManager) -> None:
    manager: SessionManager = make_manager(max_of_client=1, pool=NO_POOL)
    with pytest.raises(InvalidRequest):
        manager.acquire(SandboxSpec(user="nobody-has-this-name"), client_id="ann")

    assert manager.acquire(client_id="ann").newly_created
