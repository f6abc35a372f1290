"""The clock on the wall is set by an hour, while a manager runs and between two: nothing expires by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unconfined import Unconfined
from tests.unit.sessions.timing import FakeClock

from ringfence import SandboxSpec
from ringfence.errors import SandboxNotFound
from ringfence.model.client_session import SessionTimeouts
from ringfence.sessions import liveness
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager

pytestmark = pytest.mark.anyone

HOUR, DAY = 3600.0, 86_400.0
KEPT_S = 1800.0


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
@pytest.mark.parametrize("restart", [False, True])
def test_nothing_expires(jump: float, restart: bool, tmp_path: Path) -> None:
    clock, backend = FakeClock(), Unconfined()
    config = ManagerConfig(
        pool=PoolConfig(enabled=False),
        timeouts=SessionTimeouts(idle_s=600.0),
        keep_ended_s=KEPT_S,
    )

    def manage() -> SessionManager:
        return SessionManager(
            config, state_dir=str(tmp_path), backends=[backend], background=False, clock=clock
        )

    manager = manage()
    ended = manager.acquire(client_id="ann").id
    manager.terminate(ended)
    alive = manager.acquire(SandboxSpec(ttl_s=900.0), client_id="ann").id
    if restart:
        manager.close(keep=True)
        clock = FakeClock(clock.moment)
    clock.on_the_wall += jump
    if restart:
        manager = manage()
    clock.pass_by(300.0)
    liveness.tidy(manager)
    assert [] == manager.cleanup_expired()
    assert "terminated" == manager.get(ended).state
    if not restart:  # this backend's sandboxes end with a manager
        assert manager.get(alive).expires_in_s == pytest.approx(600.0)
        clock.pass_by(700.0)
        assert [alive] == [each.session_id for each in manager.cleanup_expired()], "the control"
    clock.pass_by(KEPT_S + 2 * HOUR)
    liveness.tidy(manager)
    with pytest.raises(SandboxNotFound):
        manager.get(ended)
    manager.close()
    backend.close()


def test_a_clock_that_was_years_behind_keeps_nothing_for_years() -> None:
    """A machine without a battery boots in 1970: what is old then is told by its clock of now."""
    clock = FakeClock()
    clock.first_ahead_s = clock.ahead_s
    for jump, less in (
        (0.0, 0.0),
        (-DAY, 0.0),
        (DAY / 2, DAY / 2),
        (DAY, DAY),
        (20_000 * DAY, DAY),
    ):
        clock.on_the_wall += jump
        assert clock.wall() - 60.0 - less == pytest.approx(clock.ago(60.0))
        clock.on_the_wall -= jump


class _Interrupted(FakeClock):
    """Time that passes while the clocks are read; now and then others run in between."""

    readings = 0

    def now(self) -> float:
        self.readings += 1
        self.moment += 0.02 if self.readings % 5 == 0 else 1e-7
        return self.moment

    def wall(self) -> float:
        self.moment += 1e-7
        return self.on_the_wall + self.moment


def test_a_moment_is_told_alike_however_busy_the_machine_is() -> None:
    """A drain compares two tellings of a sandbox's last use."""
    clock = _Interrupted()
    told = [clock.wall_at(500.0) for _ in range(200)]

    assert max(told) - min(told) < 1e-5
    assert told[0] == pytest.approx(clock.on_the_wall + 500.0, abs=1e-5)
    assert clock.moment > 1000.0 + 200 * 0.02 / 3, "the control: others ran"
