"""Routes of directory trees over a helper of the test: what it is asked for, told, and closed by."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.unconfined import Unconfined

from ringfence.api.access.caller import Caller
from ringfence.api.routes import trees
from ringfence.api.service import Service
from ringfence.errors import IoError, NotADirectory, RingfenceError, TimeoutExceeded
from ringfence.model.found import MOST_LINE_BYTES
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager

pytestmark = pytest.mark.anyone

ANN = Caller("ann")


class Helper:
    """A helper inside that says these pieces, or fails; what it was given, and how often it was closed."""

    def __init__(self, *pieces: bytes | Exception, fails: bool = False, reads: int = 99) -> None:
        self.pieces, self.fails, self.reads = list(pieces), fails, reads
        self.given: list[bytes] = []
        self.asked: tuple[str, str, str] = ("", "", "")
        self.closed = self.finished = 0

    def __call__(self, _pools: Any, _live: Any, what: str, path: str, options: str = "") -> Helper:
        self.asked = what, path, options
        return self

    async def __aenter__(self) -> Helper:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.closed += 1

    async def read(self, *_how: object) -> bytes:
        found = self.pieces.pop(0) if self.pieces else b""
        if isinstance(found, Exception):
            raise found
        return found

    async def write(self, data: bytes) -> bool:
        self.given.append(data)
        return len(self.given) < self.reads

    async def chunks(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data
        await self.finish()

    async def finish(self) -> None:
        self.finished += 1
        if self.fails:
            raise IoError("it cannot be read")


class Scene:
    def __init__(self, stack: ExitStack) -> None:
        backend = Unconfined()
        stack.callback(backend.close)
        config = ManagerConfig(pool=PoolConfig(enabled=False))
        manager = stack.enter_context(SessionManager(config, backends=[backend], background=False))
        self.service = Service(manager)
        stack.callback(self.service.thread_pools.close)
        self.sandbox = manager.acquire(client_id="ann").session.sandbox_id


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def stand_in(monkeypatch: pytest.MonkeyPatch, *pieces: bytes | Exception, **how: Any) -> Helper:
    made = Helper(*pieces, **how)
    monkeypatch.setattr(trees, "Running", made)
    return made


async def test_a_directory_is_sent_whole_or_its_helper_is_closed(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def download(path: Path = tmp_path) -> Any:
        return (await trees.download(scene.sandbox, str(path), scene.service, ANN)).body_iterator  # type: ignore[attr-defined]

    helper = stand_in(monkeypatch, b"a", b"b")
    assert b"ab" == b"".join([each async for each in await download()])
    assert (("out", str(tmp_path), ""), 1, 1) == (helper.asked, helper.closed, helper.finished)
    helper = stand_in(monkeypatch, b"a", b"b")
    async with aclosing(await download()) as pieces:
        assert b"a" == await anext(pieces)
        assert 0 == helper.closed
    assert (1, 0) == (helper.closed, helper.finished), "of a client that leaves"
    helper = stand_in(monkeypatch, b"a", fails=True)
    with pytest.raises(IoError):
        _ = [each async for each in await download()]
    assert 1 == helper.closed
    for helper in (stand_in(monkeypatch, fails=True), stand_in(monkeypatch, OSError("gone"))):
        monkeypatch.setattr(trees, "Running", helper)
        with pytest.raises((IoError, OSError)):
            await download()
        assert 1 == helper.closed, "before anything is answered"
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectory):
        await download(tmp_path / "file")


def watching(*paths: str) -> bytes:
    return b"".join(b'{"kind": "created", "path": "%s"}\n' % each.encode() for each in paths)


async def test_changes_are_told_as_they_come_and_the_helper_is_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch(*, recursive: bool = False) -> Any:
        asked = trees.watch(scene.sandbox, "/a", scene.service, ANN, recursive)
        return (await asked).body_iterator  # type: ignore[attr-defined]

    data, quiet = watching("/a/b", "/a/c"), TimeoutExceeded("nothing")
    helper = stand_in(monkeypatch, data[:10], data[10:50], quiet, quiet, data[50:])
    told = [each async for each in await watch(recursive=True)]
    assert ["event", ": not", ": not", "event"] == [each[:5] for each in told]
    assert ["/a/b", "/a/c"] == [
        json.loads(each.partition("data: ")[2])["path"] for each in (told[0], told[-1])
    ]
    assert ("watch", "/a", {"recursive": True}) == (
        *helper.asked[:2],
        json.loads(helper.asked[2]),
    )
    assert (1, 1) == (helper.closed, helper.finished)
    helper = stand_in(monkeypatch, b"x" * MOST_LINE_BYTES, b"x")
    with pytest.raises(IoError, match="too long"):
        _ = [each async for each in await watch()]
    assert 1 == helper.closed
    assert {"recursive": False} == json.loads(helper.asked[2])
    helper = stand_in(monkeypatch, fails=True)
    with pytest.raises(IoError):
        await watch()
    assert 1 == helper.closed


async def test_what_is_looked_for_is_what_was_asked_for_and_is_bounded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, service = scene.sandbox, scene.service
    body = trees.Replace(paths=["a"], pattern="p", replacement="r", regex=True, ignore_case=True)
    ways: tuple[tuple[Callable[[], Any], tuple[str, str, Any]], ...] = (
        (
            lambda: trees.find(box, "*.py", service, ANN, "/d", 7),
            ("find", "/d", {"pattern": "*.py", "most": 7}),
        ),
        (
            lambda: trees.search(box, "p", service, ANN, "/d", True, True, "*.py", 7),
            (
                "search",
                "/d",
                {"pattern": "p", "regex": True, "ignore_case": True, "glob": "*.py", "most": 7},
            ),
        ),
        (
            lambda: trees.replace(box, body, service, ANN),
            (
                "replace",
                ".",
                {
                    "pattern": "p",
                    "replacement": "r",
                    "regex": True,
                    "ignore_case": True,
                    "files": ["a"],
                },
            ),
        ),
    )
    answer = b'{"path": "x"}\n{"done": true}\n'
    for ask, (what, path, options) in ways:
        helper = stand_in(monkeypatch, answer[:5], answer[5:])
        response = await ask()
        assert {"items": [{"path": "x"}]} == json.loads(bytes(response.body))
        found = json.loads(helper.asked[2])
        found["files"] = [*found["files"]] if "files" in found else None
        assert (what, path, {"files": None, **options}) == (*helper.asked[:2], found)
        assert 1 == helper.closed
        with monkeypatch.context() as patch:
            patch.setattr(trees, "MOST_FOUND_BYTES", len(answer) - 1)
            helper = stand_in(patch, answer[:5], answer[5:])
            with pytest.raises(RingfenceError):
                await ask()
            assert 1 == helper.closed


async def test_a_tree_is_taken_until_its_helper_reads_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Request:
        async def stream(self) -> AsyncIterator[bytes]:
            for each in (b"ab", b"cde", b"f"):
                yield each

    request: Any = Request()
    for how, count, given in (({}, 6, 3), ({"reads": 2}, 5, 2)):
        helper = stand_in(monkeypatch, **how)
        response = await trees.upload(scene.sandbox, "/t", request, scene.service, ANN)
        assert {"path": "/t", "received_bytes": count} == json.loads(bytes(response.body))
        assert (given, 1, 1) == (len(helper.given), helper.finished, helper.closed)
        assert ("in", "/t", "") == helper.asked
    helper = stand_in(monkeypatch, reads=1, fails=True)
    with pytest.raises(IoError):
        await trees.upload(scene.sandbox, "/t", request, scene.service, ANN)
    assert 1 == helper.closed
