"""E2B's filesystem service in one process: what is listed, made, moved, removed and watched."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.e2b import filesystem, rpc, watchers
from ringfence.e2b.codec import RpcError, frame
from ringfence.e2b.notes import Notes
from ringfence.errors import LifecycleError
from ringfence.sessions.live import Live
from tests.e2b.conftest import frames_of
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone

AT = "/filesystem.Filesystem"


@pytest.fixture
def here() -> Iterator[Here]:
    with ExitStack() as stack:
        yield Here(stack)


@pytest.fixture
def live(here: Here) -> Live:
    return here.live(notes=Notes())


@pytest.fixture
def home(here: Here, live: Live) -> Path:
    return Path(here.root(live)) / "home" / "user"


class Box:
    """The filesystem service of one sandbox."""

    def __init__(self, here: Here, live: Live) -> None:
        self.here = here
        self.headers = {
            "e2b-sandbox-id": live.sandbox_id,
            "x-access-token": here.shared.tokens.of(live),
        }

    async def rpc(self, name: str, **form: Any) -> tuple[int, Any]:
        answered = await self.here.ask("POST", f"{AT}/{name}", headers=self.headers, json=form)
        return answered.status_code, answered.json()

    async def refused(self, name: str, **form: Any) -> tuple[int, str]:
        status, answer = await self.rpc(name, **form)
        return status, answer["code"]

    async def listed(self, path: str, depth: int | None = None) -> list[str]:
        """Names of the entries below, in the order in which they came."""
        status, answer = await self.rpc("ListDir", path=path, depth=depth)
        assert 200 == status, answer
        return [each["name"] for each in answer["entries"]]


@pytest.fixture
def box(here: Here, live: Live) -> Box:
    return Box(here, live)


async def test_a_directory_is_listed_down_to_a_depth_and_through_no_link(
    box: Box, home: Path
) -> None:
    (home / "a" / "b" / "c").mkdir(parents=True)
    (home / "a" / "b" / "file").touch()
    (home / "a" / "up").symlink_to("..")
    (home / "link").symlink_to("a/b")

    for depth, names in (
        (None, ["a", "link"]),
        (0, ["a", "link"]),
        (1, ["a", "link"]),
        (2, ["a", "b", "up", "link"]),
        (3, ["a", "b", "c", "file", "up", "link"]),
        (100, ["a", "b", "c", "file", "up", "link"]),
    ):
        assert names == await box.listed("~", depth), depth
    _, named = await box.rpc("ListDir", path="link")
    below = [str(home / "a" / "b" / name) for name in ("c", "file")]
    assert below == [each["path"] for each in named["entries"]], "one that is named is followed"
    assert (400, "invalid_argument") == await box.refused("ListDir", path="a", depth=-1)
    assert (400, "invalid_argument") == await box.refused("ListDir", path="a/b/file")
    assert (404, "not_found") == await box.refused("ListDir", path="nothing")
    assert (400, "invalid_argument") == await box.refused("ListDir", path="a/b/file/x")


async def test_a_list_is_bounded_in_entries_paths_and_depth(
    box: Box, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (20_000, 4 << 20, 64) == (
        filesystem._MOST_ENTRIES,
        filesystem._MOST_PATHS,
        filesystem._DEEPEST,
    )
    (home / "a" / "b" / "c").mkdir(parents=True)
    paths = sum(len(str(home / each)) for each in ("a", "a/b", "a/b/c"))
    for name, fits in (("_MOST_ENTRIES", 3), ("_MOST_PATHS", paths)):
        monkeypatch.setattr(filesystem, name, fits)
        assert ["a", "b", "c"] == await box.listed(".", 3), name
        monkeypatch.setattr(filesystem, name, fits - 1)
        assert (429, "resource_exhausted") == await box.refused("ListDir", path=".", depth=3), name
        monkeypatch.setattr(filesystem, name, 1 << 30)
    monkeypatch.setattr(filesystem, "_DEEPEST", 2)
    assert ["a", "b"] == await box.listed(".", 3)


async def test_a_directory_is_made_with_those_above_it_and_once(box: Box, home: Path) -> None:
    (home / "file").touch()
    (home / "old").mkdir()
    (home / "link").symlink_to("old")
    (home / "broken").symlink_to("nothing")
    status, answer = await box.rpc("MakeDir", path="new/below")
    assert (200, str(home / "new" / "below")) == (status, answer["entry"]["path"])
    assert "FILE_TYPE_DIRECTORY" == answer["entry"]["type"]
    for path, refusal in (
        ("new/below", (409, "already_exists")),
        ("link", (409, "already_exists")),
        ("file", (400, "invalid_argument")),
        ("file/x", (500, "internal")),
        ("broken", (400, "invalid_argument")),
    ):
        assert refusal == await box.refused("MakeDir", path=path), path
    assert {"file", "old", "link", "broken", "new"} == {*os.listdir(home)}


async def test_what_is_moved_is_there_under_its_new_name_alone(box: Box, home: Path) -> None:
    (home / "one").write_text("1")
    (home / "other").write_text("2")
    status, answer = await box.rpc("Move", source="one", destination="new/below/two")
    target = home / "new" / "below" / "two"
    assert (200, str(target)) == (status, answer["entry"]["path"])
    assert ("1", {"new", "other"}) == (target.read_text(), {*os.listdir(home)})
    assert 200 == (await box.rpc("Move", source="other", destination=str(target)))[0]
    assert "2" == target.read_text(), "it takes the place of what was there"
    for source in ("one", "new/below/two/x"):
        assert (404, "not_found") == await box.refused(
            "Move", source=source, destination="made/no"
        ), source
    assert ["new"] == os.listdir(home), "for what is not there nothing is made"


async def test_what_is_removed_takes_along_what_is_below_and_not_what_it_points_to(
    box: Box, home: Path
) -> None:
    (home / "kept").mkdir()
    (home / "kept" / "file").touch()
    (home / "tree" / "below").mkdir(parents=True)
    (home / "link").symlink_to("kept")
    for path in ("link", "tree", "tree", "kept/file/x", "nothing/at/all"):
        assert (200, {}) == await box.rpc("Remove", path=path), path
    assert (["kept"], ["file"]) == (os.listdir(home), os.listdir(home / "kept"))


async def test_an_entry_is_described_as_it_is_and_a_link_with_where_it_leads(
    box: Box, home: Path
) -> None:
    (home / "file").write_text("123")
    (home / "file").chmod(0o640)
    (home / "link").symlink_to("file")
    (home / "broken").symlink_to("../nothing")
    os.mkfifo(home / "pipe")

    async def stat(path: str) -> dict[str, Any]:
        status, answer = await box.rpc("Stat", path=path)
        assert 200 == status, answer
        found: dict[str, Any] = answer["entry"]
        return found

    file = await stat("file")
    assert ("file", str(home / "file"), "FILE_TYPE_FILE", "3", 0o640, "-rw-r-----") == tuple(
        file[key] for key in ("name", "path", "type", "size", "mode", "permissions")
    )
    assert ("user", "user", False) == (file["owner"], file["group"], "symlinkTarget" in file)
    link = await stat("link")
    assert ("FILE_TYPE_FILE", str(home / "link"), str(home / "file"), "L") == (
        link["type"],
        link["path"],
        link["symlinkTarget"],
        link["permissions"][0],
    )
    broken = await stat("broken")
    assert ("FILE_TYPE_SYMLINK", str(home.parent / "nothing")) == (
        broken["type"],
        broken["symlinkTarget"],
    )
    assert "FILE_TYPE_UNSPECIFIED" == (await stat("pipe"))["type"]
    assert "d" == (await stat("."))["permissions"][0]
    for path in ("nothing", "file/x"):
        assert (404, "not_found") == await box.refused("Stat", path=path), path


async def until_idle(here: Here, live: Live) -> None:
    """Wait until no helper runs any more."""
    async with asyncio.timeout(30):
        while here.service.thread_pools._tasks[live.sandbox_id]:
            await asyncio.sleep(0.002)


async def test_a_watch_tells_changes_and_between_them_that_it_goes_on(
    here: Here, live: Live, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a directory that the client names is followed. A client that leaves leaves no helper."""
    monkeypatch.setattr(rpc, "_PING_S", 0.01)
    (home / "seen").mkdir()
    (home / "link").symlink_to("seen")
    told: list[dict[str, Any]] = []
    messages = await filesystem.watch_dir(here.call(live), {"path": "link"})
    async with asyncio.timeout(30):
        async for each in messages:
            told.append(each)
            if {"start": {}} == each:
                (home / "seen" / "new").touch()
            if {"start", "filesystem", "keepalive"} == {key for one in told for key in one}:
                break
    assert {"start": {}} == told[0]
    assert {"new"} == {each["filesystem"]["name"] for each in told if "filesystem" in each}
    assert 1 == here.service.thread_pools._tasks[live.sandbox_id]
    await messages.aclose()  # type: ignore[attr-defined]
    await until_idle(here, live)


async def test_a_watch_ends_at_the_deadline_of_its_request(
    here: Here, live: Live, box: Box
) -> None:
    headers = {
        **box.headers,
        "content-type": "application/connect+json",
        "connect-timeout-ms": "20",
    }
    answered = await here.ask(
        "POST", f"{AT}/WatchDir", headers=headers, content=frame({"path": "."})
    )
    *before, last = frames_of(answered.content)
    assert "deadline_exceeded" == last["error"]["code"]
    told = [each for each in before if each != {"keepalive": {}}]
    assert told in ([{"start": {}}], []), "beside a load it comes before the watch has begun"
    await until_idle(here, live)


async def test_entries_come_with_the_changes_where_that_is_asked_for(
    here: Here, live: Live, box: Box, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A helper here sees the host's directories.
    monkeypatch.setattr(watchers, "_MARKS", f"{here.root(live)}/run")
    (home / "seen" / "below").mkdir(parents=True)
    wanted = {"path": str(home / "seen"), "includeEntry": True}
    _, with_entries = await box.rpc("CreateWatcher", **wanted)
    _, without = await box.rpc("CreateWatcher", path="seen", recursive=True)
    (home / "seen" / "new").write_text("1")
    (home / "seen" / "below" / "deep").touch()

    async def told(watcher: dict[str, Any], name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(30):
            while not any(each["name"] == name for each in found):
                found += (await box.rpc("GetWatcherEvents", **watcher))[1]["events"]
        return found

    events = await told(with_entries, "new")
    assert {"new"} == {each["name"] for each in events}
    assert {str(home / "seen" / "new")} == {each["entry"]["path"] for each in events}
    deep = await told(without, "below/deep")
    assert not any("entry" in each for each in deep)
    for watcher in (with_entries, without):
        assert (200, {}) == await box.rpc("RemoveWatcher", **watcher)
        assert (404, "not_found") == await box.refused("GetWatcherEvents", **watcher)
    await until_idle(here, live)


class Quiet:
    """A watch that tells what the test puts into `found`; None is its end, an error its failure."""

    def __init__(self, live: Live) -> None:
        self.live, self.closed, self.marked = live, asyncio.Event(), asyncio.Event()
        self.found: asyncio.Queue[Any] = asyncio.Queue()

    async def begin(self) -> None:
        pass

    async def next(self, _wait_s: float) -> Any:
        found = await self.found.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def mark(self) -> None:
        self.marked.set()

    async def close(self) -> None:
        self.closed.set()


async def test_a_watch_is_closed_when_it_is_removed_has_ended_or_is_not_asked(
    here: Here, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = here.shared.watchers

    async def add() -> tuple[Quiet, str]:
        made: Any = Quiet(live)
        return made, await known.add(made)

    async def is_closed(watch: Quiet) -> None:
        async with asyncio.timeout(30):
            await watch.closed.wait()
            while known._known:
                await asyncio.sleep(0)

    watch, name = await add()
    watch.found.put_nowait([{"name": "a", "type": "x"}])
    for action in (known.events, known.remove):
        with pytest.raises(RpcError):
            await action("sbx-other", name)
    await asyncio.sleep(0)
    assert [["a"], []] == [
        [each["name"] for each in await known.events(live.sandbox_id, name)] for _ in range(2)
    ]
    assert not watch.closed.is_set()
    await known.remove(live.sandbox_id, name)
    await is_closed(watch)
    with pytest.raises(RpcError):
        await known.remove(live.sandbox_id, name)
    for end in (None, LifecycleError("the sandbox has ended"), OSError("gone"), RpcError("x", "x")):
        watch, name = await add()
        watch.found.put_nowait(end)
        await is_closed(watch)
    watch, name = await add()
    monkeypatch.setattr(watchers, "_IDLE_S", -1.0)
    watch.found.put_nowait([])
    await is_closed(watch)


@pytest.mark.parametrize(
    ("more", "is_truncated", "code"),
    [
        (0, False, ""),
        (0, True, "resource_exhausted"),
        (filesystem._MOST_ENTRIES - 1, False, ""),
        (filesystem._MOST_ENTRIES, False, "resource_exhausted"),
    ],
)
def test_what_another_user_may_list_is_listed_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, more: int, is_truncated: bool, code: str
) -> None:
    stdout = b"f 644 3 1.5 /d/a\0\0" + b"d 755 0 1.5 /d/b\0\0" * more
    found: Any = SimpleNamespace(
        exit_code=0, ok=True, stdout=stdout, truncated=is_truncated, stderr_text=""
    )
    call: Any = SimpleNamespace(
        inside=SimpleNamespace(sandbox=SimpleNamespace(exec=lambda *_args, **_how: found))
    )
    monkeypatch.setattr(filesystem, "user_of", lambda _call: "alice")
    if code:
        with pytest.raises(RpcError) as refused:
            filesystem._found_by_named(call, "/d", 1)
        assert code == refused.value.code
        return
    infos = filesystem._found_by_named(call, "/d", 1)
    assert 1 + more == len(infos)
    assert ("/d/a", 3, 0o644) == (infos[0].path, infos[0].size_bytes, infos[0].mode)
