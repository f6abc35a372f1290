"""E2B's process service in one process: what is found, told and forgotten, and how each end is told."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Limits
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.permissions import Permissions
from ringfence.api.service import Settings
from ringfence.api.streaming import runs
from ringfence.e2b import interpreter, processes, watchers
from ringfence.e2b.call import ApiError
from ringfence.e2b.codec import RpcError, frame
from ringfence.e2b.notes import Notes
from ringfence.errors import LifecycleError, SandboxLost, TaskFailed, TooManyRequests
from ringfence.model.execs.exec import KILLED_BY_TERMINATE
from ringfence.model.found import MOST_LINE_BYTES
from ringfence.sessions.live import Live
from tests.e2b.conftest import frames_of
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone

AT = "/process.Process"


@pytest.fixture
def here() -> Iterator[Here]:
    most = Ceilings(Limits(wall_time_s=2.0))
    with ExitStack() as stack:
        yield Here(stack, settings=Settings(permissions=Permissions(most=most)))


@pytest.fixture
def live(here: Here) -> Live:
    return here.live(notes=Notes())


class Box:
    """The process service of one sandbox."""

    def __init__(self, here: Here, live: Live) -> None:
        self.here = here
        self.headers = {
            "e2b-sandbox-id": live.sandbox_id,
            "x-access-token": here.shared.tokens.of(live),
        }

    async def stream(self, name: str, form: Any, **headers: str) -> list[dict[str, Any]]:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {"content-type": "application/connect+json", **more}
        body = form if isinstance(form, bytes) else frame(form)
        answered = await self.here.ask(
            "POST", f"{AT}/{name}", headers={**self.headers, **kind}, content=body
        )
        return frames_of(answered.content)

    async def run(self, *argv: str, headers: dict[str, str] | None = None, **form: Any) -> Any:
        process = {"cmd": argv[0], "args": [*argv[1:]], **form.pop("process", {})}
        form = {"process": process, "stdin": False, **form}
        return await self.stream("Start", form, **(headers or {}))

    async def rpc(self, name: str, form: Any) -> Any:
        answered = await self.here.ask("POST", f"{AT}/{name}", headers=self.headers, json=form)
        return answered.status_code, answered.json()

    async def tags(self) -> list[str]:
        _, form = await self.rpc("List", {})
        return [each.get("tag", "") for each in form["processes"]]

    async def until_listed(self, tag: str) -> None:
        async with asyncio.timeout(30):
            while tag not in await self.tags():
                await asyncio.sleep(0.005)


@pytest.fixture
def box(here: Here, live: Live) -> Box:
    return Box(here, live)


def said(messages: list[dict[str, Any]]) -> str:
    data = [each["event"].get("data", {}).get("stdout", "") for each in messages if "event" in each]
    return b"".join(map(base64.b64decode, data)).decode()


async def test_a_process_is_found_by_its_number_or_tag_in_its_own_sandbox_while_it_runs(
    here: Here, box: Box
) -> None:
    other = Box(here, here.live(notes=Notes()))
    running = asyncio.ensure_future(
        box.run("sleep", "1000", tag="one", process={"envs": {"A": "b"}})
    )
    await box.until_listed("one")
    _, form = await box.rpc("List", {})
    (listed,) = form["processes"]
    assert ("sleep", ["1000"], {"A": "b"}) == tuple(
        listed["config"][k] for k in ("cmd", "args", "envs")
    )
    for selector in ({"tag": "one"}, {"pid": listed["pid"]}):
        asked = {"process": selector, "signal": "SIGNAL_SIGKILL"}
        assert (404, "not_found") == (
            (found := await other.rpc("SendSignal", asked))[0],
            found[1]["code"],
        )
    for selector in ({"tag": "on"}, {"tag": ""}, {"pid": listed["pid"] + 1}, {"pid": 0}, {}):
        asked = {"process": selector, "signal": "SIGNAL_SIGKILL"}
        assert 404 == (await box.rpc("SendSignal", asked))[0], selector
    assert [] == await other.tags()
    for wrong in ("SIGNAL_SIGSTOP", "", None, 0, -9):
        unknown: dict[str, Any] = {"process": {"tag": "one"}, "signal": wrong}
        assert (501, "unimplemented") == (
            (found := await box.rpc("SendSignal", unknown))[0],
            found[1]["code"],
        )
    assert (
        200
        == (await box.rpc("SendSignal", {"process": {"tag": "one"}, "signal": "SIGNAL_SIGTERM"}))[0]
    )
    *_, end, last = await running
    assert ({}, -1) == (last, end["event"]["end"]["exitCode"])
    assert ({}, {}) == (here.shared.tags, here.shared.pids), "nothing is kept of what has ended"


async def test_calls_of_one_sandbox_wait_for_one_another_alone(here: Here, live: Live) -> None:
    queues = here.service.thread_pools._queues
    for about, found in ((live, [("control", live.sandbox_id)]), (None, [])):
        assert found == await here.call(about).call(lambda: [*queues])


@pytest.mark.parametrize(("size", "fits"), [(1024, True), (1025, False)])
async def test_a_tag_is_so_long(box: Box, size: int, fits: bool) -> None:
    messages = await box.run("true", tag="t" * size)
    assert fits == ("error" not in messages[-1])


@pytest.mark.parametrize("size", [29_000, 40_000, 300_000])
async def test_a_long_script_runs_and_leaves_no_file(
    here: Here, live: Live, box: Box, size: int
) -> None:
    script = f"echo begun; : {'x' * size}; echo $0 | wc -c; ls /tmp/.e2b-* 2>/dev/null | wc -l"
    messages = await box.run(
        "/bin/bash", "-l", "-c", script, process={"envs": {"PATH": os.environ["PATH"]}}
    )
    if size < 30_000:
        assert said(messages).startswith("begun\n")
    else:  # the script's place is below the sandbox's own root, which a program here does not see
        made = [each for each in os.listdir(f"{here.root(live)}/tmp") if each.startswith(".e2b-")]
        assert 1 == len(made)
        with open(f"{here.root(live)}/tmp/{made[0]}") as file:
            assert script == file.read()


async def test_a_command_has_no_more_time_than_a_client_gets(
    here: Here, live: Live, box: Box
) -> None:
    """The bound is of the server's configuration; a longer wish is cut, a shorter one holds."""
    for given, wanted in (("60000", 2.0), ("500", 0.5)):
        messages = asyncio.ensure_future(
            box.run("sleep", "1000", tag="t", headers={"connect_timeout_ms": given})
        )
        await box.until_listed("t")
        (run,) = here.execs.running_of(live.sandbox_id)
        assert wanted == run.view().timeout_s
        await box.rpc("SendSignal", {"process": {"tag": "t"}, "signal": 9})
        await messages


async def test_a_directory_that_is_not_there_and_input_for_what_takes_none(box: Box) -> None:
    (last,) = await box.run("true", process={"cwd": "/nowhere"})
    assert "'/nowhere' does not exist" in last["error"]["message"]
    running = asyncio.ensure_future(box.run("sleep", "1000", tag="deaf"))
    await box.until_listed("deaf")
    selector = {"process": {"tag": "deaf"}}
    text = base64.b64encode(b"x").decode()
    for name, form in (
        ("SendInput", {"input": {"stdin": text}, **selector}),
        ("SendInput", {"input": {"pty": text}, **selector}),
        ("SendInput", {"input": {}, **selector}),
        ("CloseStdin", selector),
    ):
        status, answer = await box.rpc(name, form)
        assert (400, "failed_precondition") == (status, answer["code"]), (name, form)
    assert (200, {}) == await box.rpc("Update", selector)
    (last,) = await box.stream("StreamInput", frame({"data": {"input": {"stdin": text}}}))
    assert "names no process" in last["error"]["message"]
    await box.rpc("SendSignal", {**selector, "signal": "SIGNAL_SIGKILL"})
    await running


async def test_input_comes_in_a_call_and_in_a_stream(box: Box) -> None:
    running = asyncio.ensure_future(box.run("cat", tag="cat", stdin=True))
    await box.until_listed("cat")
    selector = {"process": {"tag": "cat"}}
    text = base64.b64encode(b"ab").decode()
    assert 200 == (await box.rpc("SendInput", {"input": {"stdin": text}, **selector}))[0]
    body = (
        frame({"start": selector})
        + frame({"data": {"input": {"stdin": text}}})
        + frame({"other": {}})
    )
    assert [{}, {}] == await box.stream("StreamInput", body)
    assert 200 == (await box.rpc("CloseStdin", selector))[0]
    assert "abab" == said(await running)


async def test_input_is_open_unless_the_client_declines(box: Box) -> None:
    """And a terminal has a size where none is named."""
    process = {"cmd": "cat", "args": []}
    running = asyncio.ensure_future(box.stream("Start", {"process": process, "tag": "cat"}))
    await box.until_listed("cat")
    selector = {"process": {"tag": "cat"}}
    assert 200 == (await box.rpc("SendInput", {**selector, "input": {"stdin": given("a")}}))[0]
    assert 200 == (await box.rpc("CloseStdin", selector))[0]
    assert "a" == said(await running)
    shown = streams(await box.run("stty", "size", pty={}))
    assert ["24", "80"] == shown["pty"].split()


async def test_who_connects_sees_what_comes_from_then_on_until_its_deadline(box: Box) -> None:
    running = asyncio.ensure_future(box.run("sleep", "1000", tag="t"))
    await box.until_listed("t")
    first, last = await box.stream("Connect", {"process": {"tag": "t"}}, connect_timeout_ms="50")
    assert "start" in first["event"]
    assert "deadline_exceeded" == last["error"]["code"]
    assert ["t"] == await box.tags(), "the process does not notice"
    await box.rpc("SendSignal", {"process": {"tag": "t"}, "signal": "SIGNAL_SIGKILL"})
    await running


def streams(messages: list[dict[str, Any]]) -> dict[str, str]:
    """What came of each stream, by the name that it is told by."""
    found: dict[str, str] = {}
    for each in messages:
        for name, text in each.get("event", {}).get("data", {}).items():
            found[name] = found.get(name, "") + base64.b64decode(text).decode()
    return found


def given(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def test_who_connects_is_told_nothing_of_before_and_each_stream_by_its_name(
    here: Here, live: Live, box: Box
) -> None:
    script = "echo a; echo A >&2; read x; echo b; echo B >&2"
    running = asyncio.ensure_future(box.run("sh", "-c", script, tag="t", stdin=True))
    await box.until_listed("t")
    (run,) = here.execs.running_of(live.sandbox_id)
    async with asyncio.timeout(30):
        while run.spool.totals != (2, 2):
            await asyncio.sleep(0.002)
    selector = {"process": {"tag": "t"}}
    events = await processes.connect(here.call(live), selector)
    await box.rpc("SendInput", {**selector, "input": {"stdin": given("x\n")}})
    assert {"stdout": "b\n", "stderr": "B\n"} == streams([each async for each in events])
    assert {"stdout": "a\nb\n", "stderr": "A\nB\n"} == streams(await running)


async def test_a_terminal_has_one_stream_input_of_its_own_and_a_size(
    here: Here, live: Live, box: Box
) -> None:
    size = {"size": {"rows": 7, "cols": 9}}
    script = "stty size; read x; stty size; echo $x"
    running = asyncio.ensure_future(box.run("sh", "-c", script, tag="t", pty=size))
    await box.until_listed("t")
    selector = {"process": {"tag": "t"}}
    wrong = {**selector, "input": {"stdin": given("x\n")}}
    assert 400 == (await box.rpc("SendInput", wrong))[0]
    (run,) = here.execs.running_of(live.sandbox_id)
    async with asyncio.timeout(30):
        while not any(run.spool.totals):
            await asyncio.sleep(0.002)
    changed = {**selector, "pty": {"size": {"rows": 3, "cols": 4}}}
    assert (200, {}) == await box.rpc("Update", changed)
    right = {**selector, "input": {"pty": given("typed\n")}}
    assert (200, {}) == await box.rpc("SendInput", right)
    found = streams(await running)
    assert ["pty"] == [*found]
    assert ["7", "9", "typed", "3", "4", "typed"] == found["pty"].split()


async def test_variables_of_a_client_win_over_those_that_tell_of_the_sandbox(box: Box) -> None:
    show = ("sh", "-c", "echo $E2B_SANDBOX $E2B_TEMPLATE_ID")
    assert "true base\n" == said(await box.run(*show))
    envs = {"E2B_SANDBOX": "mine"}
    assert "mine base\n" == said(await box.run(*show, process={"envs": envs}))


async def test_of_two_with_a_tag_the_newer_is_meant_and_a_killed_one_is_not_found_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes once it has ended, be that soon or late."""
    waited: list[bool] = []

    async def wait_for(run: Any, _patience_s: float) -> None:
        await real(run, 30.0)
        waited.append(run.done.done())

    real = runs.wait_for
    monkeypatch.setattr(processes, "wait_for", wait_for)
    first = asyncio.ensure_future(box.run("sleep", "1000", tag="t"))
    await box.until_listed("t")
    second = asyncio.ensure_future(box.run("sleep", "1001", tag="t"))
    async with asyncio.timeout(30):
        while ["t", "t"] != await box.tags():
            await asyncio.sleep(0.002)
    for left in ([["1000"]], []):
        kill = {"process": {"tag": "t"}, "signal": "SIGNAL_SIGKILL"}
        assert 200 == (await box.rpc("SendSignal", kill))[0]
        _, form = await box.rpc("List", {})
        assert left == [each["config"]["args"] for each in form["processes"]]
    assert [True, True] == waited
    await asyncio.gather(first, second)


async def test_input_that_is_not_read_is_given_up(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_STALL_S", 0.05)
    running = asyncio.ensure_future(box.run("sleep", "1000", tag="t", stdin=True))
    await box.until_listed("t")
    form = {"process": {"tag": "t"}, "input": {"stdin": given("x" * (1 << 20))}}
    status, answer = await box.rpc("SendInput", form)
    assert (504, "deadline_exceeded") == (status, answer["code"])
    await box.rpc("SendSignal", {"process": {"tag": "t"}, "signal": "SIGNAL_SIGKILL"})
    await running


def status(**more: Any) -> Any:
    return SimpleNamespace(
        **{"exit_code": 0, "signal": None, "timed_out": False, "killed_by": None, **more}
    )


@pytest.mark.parametrize(
    ("found", "problem", "end"),
    [
        (status(), None, {"exited": True, "status": "exit status 0"}),
        (status(exit_code=3), None,
         {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}),
        (status(exit_code=None, signal=signal.SIGKILL), None,
         {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}),
        (status(timed_out=True, signal=9), None, "deadline_exceeded"),
        (status(killed_by=KILLED_BY_TERMINATE, signal=9), None, "unavailable"),
        (None, None, "unavailable"),
        (None, LifecycleError("over"), "unavailable"),
        (None, SandboxLost("its node is gone"), "unavailable: its node is gone"),
        (None, TaskFailed("a bug"), "TaskFailed"),
    ],
)  # fmt: skip
def test_each_end_is_told_as_e2b_does(found: Any, problem: Any, end: Any) -> None:
    told = None if problem is None else SimpleNamespace(
        code=problem.code, message=str(problem), error=lambda: problem
    )  # fmt: skip
    run: Any = SimpleNamespace(
        sandbox_id="sbx-1", view=lambda: SimpleNamespace(status=found, problem=told)
    )
    if isinstance(end, dict):
        assert end == processes._end(run)
        return
    with pytest.raises((RpcError, TaskFailed)) as refused:
        processes._end(run)
    code, _, words = end.partition(": ")
    assert code in (getattr(refused.value, "code", ""), type(refused.value).__name__)
    assert words in str(refused.value)


def test_a_number_follows_from_the_exec_and_is_no_pid_of_the_kernel() -> None:
    numbers = {processes.pid_of(f"exec-{each}") for each in range(1000)}
    assert 1000 == len(numbers)
    assert min(numbers) >= 1 << 22
    assert max(numbers) < 1 << 31
    assert processes.pid_of("exec-1") == processes.pid_of("exec-1")


async def test_what_goes_on_in_a_fork_keeps_its_tag(here: Here, live: Live, box: Box) -> None:
    running = asyncio.ensure_future(box.run("sleep", "1000", tag="t"))
    await box.until_listed("t")
    (run,) = here.execs.running_of(live.sandbox_id)
    fork = Box(here, forked := here.live(notes=Notes()))
    gone_on = asyncio.ensure_future(fork.run("sleep", "1000"))
    await fork.until_listed("")
    (copy,) = here.execs.running_of(forked.sandbox_id)
    call = here.call(live)
    processes.note_copies(call, forked.sandbox_id, [{"exec-other": copy.id}])
    assert [""] == await fork.tags()
    processes.note_copies(call, forked.sandbox_id, [{run.id: copy.id}])
    assert ["t"] == await fork.tags()
    for each in (box, fork):
        await each.rpc("SendSignal", {"process": {"tag": "t"}, "signal": "SIGNAL_SIGKILL"})
    await asyncio.gather(running, gone_on)
    assert {} == here.shared.tags


# -- watchers ------------------------------------------------------------------------------------


async def test_events_of_a_watcher_are_bounded_in_number_and_size(
    here: Here, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "_MOST_EVENTS", 3)
    monkeypatch.setattr(watchers, "_MOST_NAMES", 10)

    def event(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "type": "x", **more}

    watcher = watchers._Watcher(SimpleNamespace())  # type: ignore[arg-type]
    for kept, found in (
        ([event("a"), event("b"), event("c")], "abc"),
        ([event("a"), event("b"), event("c"), event("d")], "bcd"),
        ([event("aaaaa"), event("bbbbb")], "ab"),
        ([event("aaaaa"), event("bbbbbb")], "b"),
        ([event("a"), event("b", entry={"n": 1})], "ab"),
        ([event("a"), event("b", entry={"n": 10})], "b"),
    ):
        watcher._keep(kept)
        assert found == "".join(each["name"][0] for each in watcher.take()), kept
        assert (0, []) == (watcher._bytes, watcher.take())


@pytest.mark.full
async def test_a_watcher_that_nobody_asks_ends_and_leaves_no_helper(
    here: Here, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as many as may run: the next is refused, and takes the place of one that was removed."""
    known = here.shared.watchers
    at = here.root(live)

    def watch() -> watchers.Watch:
        return watchers.Watch(here.service, live, at, is_recursive=False, look=None)

    first = await known.add(watch())
    made = [await known.add(watch()) for _ in range(15)]
    with pytest.raises(TooManyRequests):
        await known.add(watch())
    await known.remove(live.sandbox_id, first)
    with pytest.raises(RpcError):
        await known.remove(live.sandbox_id, first)
    async with asyncio.timeout(30):
        while here.service.thread_pools._tasks[live.sandbox_id] > 15:
            await asyncio.sleep(0.005)
    again = await known.add(watch())
    with pytest.raises(RpcError):
        await known.events("sbx-other", again)
    open(f"{at}/new", "w").close()
    events = await known.events(live.sandbox_id, again)
    assert "new" in {each["name"] for each in events}
    monkeypatch.setattr(watchers, "_IDLE_S", 0.0)
    open(f"{at}/newer", "w").close()  # each looks at the time when something comes
    async with asyncio.timeout(30):
        while known._known:
            await asyncio.sleep(0.005)
    assert 0 == here.service.thread_pools._tasks[live.sandbox_id]
    assert 15 == len(made)


def changed(kind: str, path: str) -> bytes:
    return json.dumps({"kind": kind, "path": path}).encode() + b"\n"


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_changes_are_told_once_however_they_are_cut_into_pieces(
    here: Here, live: Live, size: int
) -> None:
    watch = watchers.Watch(here.service, live, "/at", is_recursive=False, look=None)
    kinds = {
        "created": "EVENT_TYPE_CREATE",
        "modified": "EVENT_TYPE_WRITE",
        "attributes": "EVENT_TYPE_CHMOD",
        "deleted": "EVENT_TYPE_REMOVE",
        "moved_from": "EVENT_TYPE_RENAME",
        "moved_to": "EVENT_TYPE_CREATE",
    }
    data = changed("watching", "/at") + changed("written", "/at/quiet")
    data += b"".join(changed(kind, f"/at/{kind}") for kind in kinds)
    found = []
    for start in range(0, len(data), size):
        found += watch._events(data[start : start + size])
    assert [*kinds.items()] == [(each["name"], each["type"]) for each in found]
    assert b"" == watch._left
    with pytest.raises(RpcError, match="changes were lost"):
        watch._events(changed("overflow", "/at"))
    watch._left = b""
    with pytest.raises(RpcError, match="too long"):
        watch._events(b"x" * (MOST_LINE_BYTES + 1))


async def test_a_mark_is_told_once_after_what_came_before_it(here: Here, live: Live) -> None:
    looked: list[list[str]] = []

    def look(paths: list[str]) -> dict[str, dict[str, Any]]:
        looked.append(paths)
        assert not watch.marked.is_set()
        return {path: {"path": path} for path in paths}

    watch = watchers.Watch(here.service, live, "/at", is_recursive=False, look=look)
    mark = b'{"kind": "mark"}\n'
    pieces = [
        changed("created", "/at/b") + changed("deleted", "/at/c") + mark,
        changed("created", "/at/d"),
        b"",
    ]

    async def read(*_: object) -> bytes:
        return pieces.pop(0)

    watch._early = watch._events(changed("created", "/at/a"))
    watch._running = SimpleNamespace(read=read)  # type: ignore[assignment]
    found = await watch.next(1)
    assert found is not None
    assert [("a", {"path": "/at/a"})] == [(each["name"], each.get("entry")) for each in found]
    found = await watch.next(1)
    assert found is not None
    assert [("b", True), ("c", False)] == [(each["name"], "entry" in each) for each in found]
    assert watch.marked.is_set()
    assert [["/at/a"], ["/at/b"]] == looked, "what is gone is not looked for"
    watch.marked.clear()
    found = await watch.next(1)
    assert found is not None
    assert ["d"] == [each["name"] for each in found]
    assert not watch.marked.is_set(), "that mark was told"
    assert await watch.next(1) is None
    assert watch.marked.is_set(), "nobody waits for a helper that has ended"
    assert await watch.next(1) is None


async def test_what_cannot_be_watched_is_said_and_holds_no_place(here: Here, live: Live) -> None:
    box = Box(here, live)
    path = f"{here.root(live)}/file"
    open(path, "w").close()
    for asked, status in (("/nowhere", 404), ("/file", 400)):
        answered = await here.ask(
            "POST",
            "/filesystem.Filesystem/CreateWatcher",
            headers=box.headers,
            json={"path": asked},
        )
        assert status == answered.status_code, asked
    missing = watchers.Watch(here.service, live, path + "x", is_recursive=False, look=None)
    with pytest.raises(Exception, match="file"):
        await missing.begin()
    assert 0 == here.service.thread_pools._tasks[live.sandbox_id]


# -- the interpreter -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "python"), ("py", "python"), ("PYTHON3", "python"), ("bash", "bash"), ("sh", "bash"),
        ("js", "node"), ("typescript", "node"), ("r", "r"), ("R", "r"), ("java", "java"),
    ],
)  # fmt: skip
def test_languages_have_the_names_of_e2b(given: str | None, found: str) -> None:
    assert found == interpreter._language(given)
    with pytest.raises(ApiError) as refused:
        interpreter._language("cobol")
    assert 501 == refused.value.status


@pytest.mark.parametrize("name", ["A=1;x", "1A", "", "A B", "é", "$(x)", "A\n"])
@pytest.mark.parametrize("language", ["python", "node", "bash", "r", "java"])
def test_a_variable_is_a_name_and_never_code(language: str, name: str) -> None:
    with pytest.raises(ApiError) as refused:
        interpreter._around(language, {name: "x"})
    assert 400 == refused.value.status
    assert ([], []) == interpreter._around(language, {})


@pytest.mark.parametrize("value", ["plain", "a'b", '"$(touch x)"', "`id`", "a\nb", "\\", ""])
def test_variables_of_one_cell_of_bash_are_set_and_taken_back(value: str) -> None:
    import subprocess

    before, after = interpreter._around("bash", {"NEW": value, "OLD": value})
    show = 'printf "%s|%s|" "${NEW-unset}" "${OLD-unset}"'
    script = "\n".join(["export OLD=old", *before, show, *after, show])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert f"{value}|{value}|unset|old|" == done.stdout


def test_variables_of_one_cell_of_python_are_set_and_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OLD_OF_E2B", "old")
    before, after = interpreter._around("python", {"NEW_OF_E2B": "x'\"", "OLD_OF_E2B": "y"})
    scope: dict[str, Any] = {}
    for each in before:
        exec(each, scope)
    assert ("x'\"", "y") == (os.environ["NEW_OF_E2B"], os.environ["OLD_OF_E2B"])
    for each in after:
        exec(each, scope)
    assert (None, "old") == (os.environ.get("NEW_OF_E2B"), os.environ["OLD_OF_E2B"])
    assert "__e2b" not in scope


@pytest.mark.parametrize(
    ("event", "lines"),
    [
        ({"type": "stdout", "text": "a\n"}, [{"type": "stdout", "text": "a\n"}]),
        ({"type": "stderr", "text": "a"}, [{"type": "stderr", "text": "a"}]),
        ({"type": "dropped", "bytes": 7},
         [{"type": "stderr", "text": "[7 bytes of output were dropped]\n"}]),
        ({"type": "heartbeat"}, [{"type": "keepalive"}]),
        ({"type": "other"}, []),
        ({"type": "end"}, [{"type": "end_of_execution"}]),
        ({"type": "end", "execution_count": 0, "error": {"name": "E"}},
         [{"type": "error", "name": "E"}, {"type": "number_of_executions", "execution_count": 0},
          {"type": "end_of_execution"}]),
        ({"type": "result", "is_main": True, "data": {"text/plain": "'x'", "a/b": "y"}},
         [{"type": "result", "is_main_result": True, "text": "x", "extra": {"a/b": "y"}}]),
        ({"type": "result", "is_main": False, "data": {"application/json": "{", "e2b/data": "[1]"}},
         [{"type": "result", "is_main_result": False, "data": [1], "extra": {"application/json": "{"}}]),
        ({"type": "result", "is_main": True, "data": {"e2b/raw": "", "text/plain": "x", "text/html": "h"}},
         [{"type": "result", "is_main_result": True, "html": "h"}]),
    ],
)  # fmt: skip
def test_each_event_is_told_as_e2b_tells_it(event: dict[str, Any], lines: list[Any]) -> None:
    text = interpreter._translate(json.dumps(event).encode(), "python")
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        each.pop("timestamp", None)
    assert lines == found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("  a\n  b", "a\nb"), ("\n  a\n    b", "\na\n  b"), ("a\n  b", "a\n  b"), ("\ta\n  b", "a\n  b"),
        ("", ""), ("\n", "\n"),
    ],
)  # fmt: skip
def test_the_indentation_of_the_first_line_is_taken_off(code: str, found: str) -> None:
    assert found == interpreter._dedented(code)
