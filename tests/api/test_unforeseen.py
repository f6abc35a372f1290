"""What nobody foresaw is answered as a problem, whichever way the request took."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from ringfence.api.access.peer import PEER, Peer
from ringfence.api.app import make_app
from ringfence.api.service import Service
from ringfence.sessions.manager import SessionManager
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone


@pytest.fixture
def service() -> Iterator[Service]:
    with SessionManager(backends=[Unconfined()], background=False) as manager:
        made = Service(manager)
        yield made
        made.thread_pools.close()


def post(service: Service, media_type: str, behind: Any = None) -> httpx.Response:
    """Ask for a sandbox as the owner of the unix socket would."""
    app = make_app(service, behind)
    app.state.execs = None  # of what was evicted: nothing is

    async def local(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {PEER: Peer(0)}
        await app(scope, receive, send)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(local, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"content-type": media_type}
            return await client.post("/v1/sandboxes", content=b"{}", headers=headers)

    return asyncio.run(main())


@pytest.mark.parametrize("media_type", ["application/json", "application/json; charset=utf-8"])
def test_a_bug_is_a_problem_on_both_ways(
    service: Service,
    media_type: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Control: without the bug, the same request makes a sandbox."""
    assert 201 == post(service, media_type).status_code

    def fail(*_args: Any, **_options: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(service.manager, "acquire", fail)
    answered = post(service, media_type)

    assert (500, "task_failed") == (answered.status_code, answered.json()["code"])
    assert "application/problem+json" == answered.headers["content-type"]
    assert "a bug" not in answered.text
    assert answered.headers["x-request-id"]
    assert any("POST /v1/sandboxes failed" in each.message for each in caplog.records)
    assert 'status="500"' in service.requests.render(0)
    assert 0 == service.admission.now


def test_a_client_that_leaves_is_nobodys_fault(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async def behind(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ClientDisconnect

    answered = post(service, "application/json", lambda _app: behind)

    assert 499 == answered.status_code
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    assert 'status="499"' in service.requests.render(0)
    assert 0 == service.admission.now
