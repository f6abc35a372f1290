"""What the log says of events and errors, and frames that no message may have."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.daemon.test_connections import serving

from ringfence.daemon import logs, protocol
from ringfence.model.base.checks import FrozenMap
from ringfence.model.event import CONFIG, Event
from ringfence.sessions.events import Events

pytestmark = pytest.mark.anyone

UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


def frame(head: int, text: bytes = b"") -> bytes:
    """A frame of a client, whose mask changes nothing."""
    return bytes([head, 0x80 | len(text)]) + bytes(4) + text


@pytest.mark.parametrize(("more", "is_passed_on"), [(3, True), (4, False)])
def test_a_message_has_so_many_frames_and_no_more(
    more: int, is_passed_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without content too, which no bound on its bytes ever ends."""
    monkeypatch.setattr(protocol, "_MOST_FRAMES", 4)

    async def scene(connect: Any, _kind: Any) -> None:
        connection = await connect()
        await connection.say(UPGRADE)
        await asyncio.wait_for(connection._reader.readuntil(b"\r\n\r\n"), 30)
        frames = [frame(0x01, b"x"), *[frame(0x00)] * (more - 1), frame(0x80)]
        await connection.say(*frames)
        head = await asyncio.wait_for(connection._reader.readexactly(2), 30)
        if is_passed_on:
            assert (b"\x81\x01", b"x") == (head, await connection._reader.readexactly(1))
        else:
            assert 0x88 == head[0]
            said = await connection._reader.readexactly(head[1])
            assert 1009 == int.from_bytes(said[:2])
            assert await connection.is_closed()

    serving(tmp_path / "s", scene)


def event(kind: str, reason: str = "", **details: str) -> Event:
    ids = ("sbx-1", "sess-1", "ann") if kind != CONFIG else ("", "", "")
    return Event(1, kind, 1.0, *ids, reason, FrozenMap(details))


def test_an_event_is_told_with_its_ids_and_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ringfence.sandboxes"):
        logs._say(event("ended", "idle"))
        logs._say(event("snapshot", snapshot_id="snap-1"))
        logs._say(event(CONFIG, changed="network", network_enabled="true"))
    ids = {"sandbox": "sbx-1", "session": "sess-1", "client": "ann"}
    assert [
        ("sandbox ended", {**ids, "reason": "idle"}),
        ("sandbox snapshot", {**ids, "snapshot_id": "snap-1"}),
        (
            "config of the execution service changed",
            {"changed": "network", "network_enabled": "true"},
        ),
    ] == [(each.getMessage(), getattr(each, logs.FACTS)) for each in caplog.records]


@pytest.mark.parametrize(("level", "count"), [(logging.INFO, 1), (logging.WARNING, 0)])
def test_events_are_followed_where_the_level_has_them(
    level: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    events = Events()
    with caplog.at_level(level, "ringfence.sandboxes"):
        logs.follow(events)
        events.add("created", None)
        assert count == len(caplog.records)
        assert count == len(events._listeners)


def failing() -> logging.LogRecord:
    try:
        raise ValueError("no\x1b[2J")
    except ValueError:
        return logging.LogRecord("a", logging.ERROR, "", 1, "it %s", ("failed",), sys.exc_info())


def test_an_error_is_told_with_where_it_was() -> None:
    record = failing()
    setattr(record, logs.FACTS, {"exec": "exec-1", "place": Path("/x")})
    form = json.loads(logs.JsonLines().format(record))
    assert ("error", "a", "it failed", "exec-1", "/x") == (
        form["level"],
        form["logger"],
        form["message"],
        form["exec"],
        form["place"],
    )
    assert "ValueError" in form["error"]
    first, *rest = logs.Readable().format(record).split("\n")
    assert first.endswith("error   it failed exec=exec-1 place=/x")
    assert any("ValueError" in line for line in rest)
