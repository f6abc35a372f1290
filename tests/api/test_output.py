"""Output that comes in the very moment in which somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.api.routes import output
from ringfence.spool.order import OUT
from ringfence.spool.spool import Spool

pytestmark = pytest.mark.anyone


def asked(tmp_path: Path, early: bytes, late: bytes) -> tuple[Any, Any, Spool]:
    """A service and an exec that writes `late` right after what it wrote `early` was looked at."""
    spool = Spool(str(tmp_path / "x"), 1 << 20)
    spool.feed(OUT, early)

    async def call(function: Callable[..., Any], *args: Any, **_more: Any) -> Any:
        found = function(*args)
        nonlocal late
        spool.feed(OUT, late)
        late = b""
        return found

    run = SimpleNamespace(spool=spool, sandbox_id="sbx-x", at_end=lambda _: lambda: None)
    index = SimpleNamespace(find=lambda _: None)
    manager = SimpleNamespace(index=index)
    return SimpleNamespace(thread_pools=SimpleNamespace(call=call), manager=manager), run, spool


async def body_of(response: Any) -> bytes:
    return b"".join([piece async for piece in response.body_iterator])


@pytest.mark.parametrize("early", [b"", b"early "])
async def test_no_more_is_promised_than_was_read(tmp_path: Path, early: bytes) -> None:
    service, run, _spool = asked(tmp_path, early, b"late")
    response = await output._bytes(service, run, OUT, 0, follow=False)

    sent = await body_of(response)
    assert len(sent) == int(response.headers["content-length"])
    assert sent in (early, early + b"late")
    assert str(len(sent)) == response.headers["x-ringfence-next-offset"]
    assert "false" == response.headers["x-ringfence-end"]


@pytest.mark.parametrize("early", [b"", b"early "])
async def test_who_follows_goes_on(tmp_path: Path, early: bytes) -> None:
    service, run, spool = asked(tmp_path, early, b"late")
    response = await output._bytes(service, run, OUT, 0, follow=True)
    spool.close()

    assert early + b"late" == await body_of(response)
