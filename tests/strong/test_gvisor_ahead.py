"""In a burst of gVisor sandboxes the next one is built ahead: it is the same, nobody's, and soon gone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ringfence import Limits, Sandbox
from ringfence.backends.gvisor import ahead
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.model.spec import SandboxSpec
from tests.features import require

pytestmark = pytest.mark.full

PATIENCE_S = 60.0


@pytest.fixture
def backend() -> Iterator[GvisorBackend]:
    require("user namespaces")
    require("runsc")
    made = GvisorBackend(prebuilt=True)
    yield made
    made.close()


def _life(backend: GvisorBackend, **options: object) -> str:
    with Sandbox.create(backend=backend, **options) as sandbox:  # type: ignore[arg-type]
        assert sandbox.exec(["true"]).ok
        return sandbox.id


def _wait_for(backend: GvisorBackend, live: int) -> set[str]:
    ends = time.monotonic() + PATIENCE_S
    while len(backend._jailed) != live:
        assert time.monotonic() < ends, f"{len(backend._jailed)} live, not {live}"
        time.sleep(0.01)
    return set(backend._jailed)


def test_the_next_is_there_already_and_becomes_what_is_asked_for(
    backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "KEEP_S", PATIENCE_S)
    first = _life(backend)
    assert not backend._jailed, "one alone is no burst"
    _life(backend)
    [waiting] = _wait_for(backend, 1)

    with Sandbox.create(backend=backend, limits=Limits(pids=64)) as other:
        assert waiting != other.id, "it is of another kind"
    with Sandbox.create(backend=backend, env={"WHOSE": "mine"}, labels={"a": "b"}) as sandbox:
        assert waiting == sandbox.id != first
        assert "mine\n" == sandbox.exec(["sh", "-c", 'echo "$WHOSE"']).stdout_text
        assert "b" == sandbox.session.metadata["a"]
        assert {"WHOSE": "mine"} == dict(sandbox.spec.env)


def test_it_ends_with_its_backend(backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "KEEP_S", PATIENCE_S)
    _life(backend)
    _life(backend)
    _wait_for(backend, 1)

    backend.close()

    assert not backend._jailed


def test_it_is_gone_where_nobody_comes(
    backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "KEEP_S", PATIENCE_S)
    _life(backend)
    _life(backend)
    _wait_for(backend, 1)
    made = backend._ahead
    assert made is not None
    assert made._next is not None

    made._let_go(made._next)  # as its thread does when its time is over

    assert not backend._jailed
    assert made.take(SandboxSpec(tier="strong")) is None
