"""Commands on sandboxes of a server, each against answers that the test writes: ended, doubled and refused."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli.server import attached, code, forks, inside, remote, sandboxes, serving, sessions
from ringfence.errors import ExecNotFound, InvalidRequest, SandboxNotFound, ServerUnreachable
from ringfence.model.spec import LINEAGE
from tests.client.scripted import (
    Answer,
    Request,
    ScriptedServer,
    as_json,
    problem,
    served,
    without_pauses,
)
from tests.client.test_asked_again import exec_view, process_of, sandbox_view

pytestmark = pytest.mark.anyone


class World:
    """Sandboxes of a server by id, and how some requests are answered instead.

    Attributes:
        told: By the method and the last part of the path, an answer.
    """

    def __init__(self, **names: str) -> None:
        self.names = names
        self.told: dict[str, Answer | Callable[[Request], Answer]] = {}
        self.server: ScriptedServer

    def __call__(self, request: Request) -> Answer:
        last = request.path.rpartition("/")[2]
        told = self.told.get(f"{request.method} {last}")
        if told is not None:
            return told if isinstance(told, Answer) else told(request)
        if request.path == "/v1/sandboxes":
            if request.method == "POST":
                return as_json(sandbox_view("sbx-new").to_json())
            wanted = request.query.get("name")
            found = [id for id, name in self.names.items() if wanted in (None, name)]
            return as_json({"items": [self.view(id) for id in found], "next_cursor": None})
        if last in self.names:
            return as_json(self.view(last))
        return problem(404, "sandbox_not_found")

    def view(self, id: str) -> dict[str, Any]:
        return sandbox_view(id, name=self.names[id]).to_json()

    @property
    def changes(self) -> list[str]:
        """What was asked for but reading."""
        return [
            f"{each.method} {each.path.removeprefix('/v1/sandboxes/')}"
            for each in self.server.requests
            if each.method != "GET"
        ]


@pytest.fixture(name="world")
def fixture_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    without_pauses(monkeypatch)
    world = World(a="one", b="two", c="twin", d="twin")
    with served(tmp_path / "s", world) as (_client, server):
        world.server = server
        monkeypatch.setenv("RINGFENCE_SERVER", f"unix:{tmp_path}/s")
        yield world


Capture = pytest.CaptureFixture[str]


# -- rm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("words", "ended", "code"),
    [
        (["a", "none", "b"], ["a", "b"], 125),
        (["none", "one", "twin", "b"], ["a", "b"], 125),
        (["a", "none"], ["a"], 125),
        (["none"], [], 125),
        (["b", "--", "one"], ["b", "a"], 0),
        (["--all"], ["a", "b", "c", "d"], 0),
    ],
)
def test_one_that_cannot_be_removed_does_not_keep_the_others(
    words: list[str], ended: list[str], code: int, options: list[str], world: World, capfd: Capture
) -> None:
    assert code == sandboxes.remove([*options, *words])
    told = capfd.readouterr()
    found = json.loads(told.out)["ended"] if options else told.out.split()
    assert (ended, [f"DELETE {each}" for each in ended]) == (found, world.changes)
    assert (code != 0) == bool(told.err)
    assert len(words) - len(ended) == len(told.err.splitlines()) or code == 0


def test_one_whose_end_fails_is_not_among_the_ended(world: World, capfd: Capture) -> None:
    world.told["DELETE b"] = problem(403, "forbidden")
    assert 125 == sandboxes.remove(["--all"])
    told = capfd.readouterr()
    assert (["a", "c", "d"], 1) == (told.out.split(), len(told.err.splitlines()))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([], "SANDBOX"),
        (["--all", "a"], "SANDBOX"),
        (["--label", "k=v"], "SANDBOX"),
        (["--label", "k=v", "a"], "label"),
        (["--label", "bare", "--all"], "label"),
        (["--label", "=v", "--all"], "label"),
        (["--label", "k=v", "--label", "k=w", "--all"], "label"),
    ],
)
def test_what_would_remove_more_than_is_meant_is_refused(
    words: list[str], field: str, world: World
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sandboxes.remove(words)
    assert (field, []) == (refused.value.field, world.server.requests)


def test_only_those_with_a_label_are_removed(world: World) -> None:
    def of_label(request: Request) -> Answer:
        assert {"k=v"} == {request.query["label"]}
        return as_json({"items": [world.view("b")], "next_cursor": None})

    world.told["GET sandboxes"] = of_label
    assert 0 == sandboxes.remove(["--all", "--label", "k=v"])
    assert ["DELETE b"] == world.changes


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "found", "error"),
    [
        ("a", "a", None),
        ("two", "b", None),
        ("twin", "", InvalidRequest),
        ("none", "", SandboxNotFound),
        ("snap-x", "", InvalidRequest),
        ("", "", SandboxNotFound),
    ],
)
def test_a_word_is_an_id_or_the_name_of_one_alone(
    word: str, found: str, error: Any, world: World
) -> None:
    with remote.client_of({}) as client:
        if error is None:
            assert found == remote.sandbox_of(client, word).id
        else:
            with pytest.raises(error):
                remote.sandbox_of(client, word)
    is_listed = "GET sandboxes" in world.server.asked
    assert is_listed == (word not in ("a", "")), "no name is asked for where the id is there"


def test_a_word_that_is_no_id_may_be_a_name(world: World) -> None:
    world.told["GET Mine%2C%20too"] = problem(400, "invalid_request")
    with (
        remote.client_of({}) as client,
        pytest.raises(InvalidRequest, match="no sandbox is called"),
    ):
        remote.sandbox_of(client, "Mine, too")
    world.names["a"] = "Mine, too"
    with remote.client_of({}) as client:
        assert "a" == remote.sandbox_of(client, "Mine, too").id
    world.names["b"] = "snap-shot"
    with remote.client_of({}) as client:
        assert "b" == remote.sandbox_of(client, "snap-shot").id
    world.told["GET a"] = problem(403, "forbidden")
    with remote.client_of({}) as client, pytest.raises(Exception, match="so it is"):
        remote.sandbox_of(client, "a")


def test_a_key_is_of_its_file_alone(tmp_path: Path, world: World) -> None:
    (tmp_path / "key").write_text(" secret \n")
    with remote.client_of({"key-file": str(tmp_path / "key")}) as client:
        client.list()
    assert "Bearer secret" == world.server.requests[-1].headers["authorization"]
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "odd").write_bytes(b"\xff")
    for name in ("empty", "odd", "none"):
        with pytest.raises(InvalidRequest) as refused:
            remote.client_of({"key-file": str(tmp_path / name)})
        assert "key-file" == refused.value.field


def test_options_stand_anywhere_and_are_added_up() -> None:
    from ringfence.cli.server.commands import LIST, RM

    given, words, after = remote.read(
        RM, ["a", "--label", "x=1", "b", "--label", "y=2", "--", "-c"]
    )
    assert (["x=1", "y=2"], ["a", "b"], ["-c"]) == ([*given["label"]], words, after)
    given, words, after = remote.read(LIST, ["--state", "a", "--server", "s", "--state", "b"])
    assert (["a", "b"], "s", [], []) == ([*given["state"]], given["server"], words, after)
    again, _, _ = remote.read(RM, ["--server", "s", "a", "--all", "--server", "s", "b", "--all"])
    assert {"server": "s", "all": True} == again
    with pytest.raises(InvalidRequest, match="given twice") as refused:
        remote.read(RM, ["--server", "s", "a", "--server", "t"])
    assert "--server" == refused.value.field


# -- update, create, list, top ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["--name", "n"], {"name": "n", "labels": {}}),
        (["--name", ""], {"name": "", "labels": {}}),
        (["--unlabel", "x"], {"labels": {"x": None}}),
        (["--label", "k=v", "--unlabel", "x"], {"labels": {"k": "v", "x": None}}),
        (["--label", "k=v", "--unlabel", "k"], {"labels": {"k": "v"}}),
    ],
)
def test_what_is_changed_of_a_sandbox(words: list[str], body: dict[str, Any], world: World) -> None:
    world.told["PATCH b"] = as_json(world.view("b"))
    assert 0 == sandboxes.update([*words, "two"])
    assert (body, ["PATCH b"]) == (world.server.requests[-1].form, world.changes)


def test_a_sandbox_is_made_as_the_options_say(
    world: World, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--name",
        "n",
        "--label",
        "k=v",
        "--ttl",
        "2m",
        "--idle-timeout",
        "3m",
        "--memory",
        "1g",
    ]
    words += ["--backend", "native"]
    assert 0 == sandboxes.create([*words, "--no-pool", "--pids", "77"])
    assert "sbx-new" == capfd.readouterr().out.strip()
    (request,) = world.server.requests
    form = request.form
    assert ("native", "n", {"k": "v"}, 120.0, False) == tuple(
        form[name] for name in ("backend", "name", "labels", "ttl_s", "use_pool")
    )
    assert (180.0, 1 << 30, 77) == tuple(
        form["limits"][name] for name in ("idle_timeout_s", "memory_bytes", "pids")
    )
    monkeypatch.setenv("TOKEN", "hunter2")
    assert 0 == sandboxes.create(["--secret", "a.test=TOKEN"])
    assert {"TOKEN": "hunter2"} == world.server.requests[-1].form["secrets"]
    assert 0 == sandboxes.create([])
    form = world.server.requests[-1].form
    assert (True, {}, None) == (form["use_pool"], form["labels"], form["ttl_s"])


@pytest.mark.parametrize(
    "words",
    [
        ["--name", " "], ["--name", ""], ["--snapshot", "s", "--memory", "1g"],
        ["--snapshot", "s", "--no-pool"],
        ["--snapshot", "s", "--idle-timeout", "1m"], ["--snapshot", "s", "--backend", "native"], ["x"],
    ],
)  # fmt: skip
def test_a_sandbox_that_cannot_be_as_asked_is_not_made(words: list[str], world: World) -> None:
    with pytest.raises(InvalidRequest):
        sandboxes.create(words)
    assert [] == world.server.requests


def test_one_of_a_snapshot_has_what_was_given_and_no_more(world: World) -> None:
    words = ["--snapshot", "snap-x", "--name", "n", "--label", "k=v", "--ttl", "1m"]
    assert 0 == sandboxes.create(words)
    (request,) = world.server.requests
    assert {
        "snapshot_id": "snap-x",
        "name": "n",
        "labels": {"k": "v"},
        "ttl_s": 60.0,
    } == request.form
    assert 0 == sandboxes.create(["--snapshot", "snap-x"])
    assert {"snapshot_id": "snap-x", "name": ""} == world.server.requests[-1].form


def test_one_that_ends_meanwhile_is_left_out_of_the_table(world: World, capfd: Capture) -> None:
    form = {"state": "running", "cpu_ns": 2_500_000_000, "execs": 3}

    def stats(request: Request) -> Answer:
        return problem(404, "sandbox_not_found") if "/b/" in request.path else as_json(form)

    world.told["GET stats"] = stats
    assert 0 == sandboxes.top(["--json"])
    assert ["a", "c", "d"] == [each["sandbox"]["id"] for each in json.loads(capfd.readouterr().out)]
    assert 0 == sandboxes.top([])
    head, *rows = capfd.readouterr().out.splitlines()
    assert "SANDBOX" in head
    assert ["a", "c", "d"] == [row.split()[0] for row in rows]
    assert all("2.50 s" in row for row in rows)


def test_a_share_of_the_processor_is_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringfence.model.stats import SandboxStats

    clock = iter([10.0, 12.0, 12.0, 13.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    before: dict[str, tuple[float, int]] = {}
    view = sandbox_view("a")

    def share(cpu_ns: int | None) -> str:
        stats = SandboxStats.from_json({"state": "running", "cpu_ns": cpu_ns})
        return sandboxes._used_row(view, stats, before)[3]

    assert ["1.00 s", "50.0 %", "2.00 s", "100.0 %"] == [
        share(1_000_000_000), share(2_000_000_000), share(2_000_000_000), share(3_000_000_000),
    ]  # fmt: skip


# -- exec and its output ---------------------------------------------------------------------------

STATUSES: list[tuple[dict[str, Any], int]] = [
    ({"exit_code": 0}, 0),
    ({"exit_code": 7}, 7),
    ({"signal": 9}, 137),
    ({"signal": 9, "timed_out": True}, 124),
    ({"exit_code": 0, "timed_out": True}, 124),
    ({"signal": 9, "oom_killed": True}, 137),
]


@pytest.mark.parametrize(("status", "code"), STATUSES)
def test_the_code_of_a_command_is_that_of_its_end(
    status: dict[str, Any], code: int, capfd: Capture
) -> None:
    view = exec_view(state="ended", status=status, timeout_s=2.0)
    assert code == attached.exit_code(view)
    told = capfd.readouterr().err
    assert ("timed out after 2 s" in told) == bool(status.get("timed_out"))
    assert ("memory limit" in told) == bool(status.get("oom_killed"))
    plain = {"exit_code": None, "signal": None, "timed_out": False, **status}
    plain.pop("oom_killed", None)
    timed_out = plain.pop("timed_out")
    assert code == inside._code(plain["exit_code"], plain["signal"], timed_out=timed_out)


def test_a_command_whose_end_is_not_known_is_an_error() -> None:
    lost = {"code": "sandbox_lost", "message": "gone"}
    with pytest.raises(Exception, match="gone"):
        attached.exit_code(exec_view(state="lost", problem=lost))
    assert 0 == attached.exit_code(exec_view())


def test_output_goes_to_the_stream_that_it_was_written_to(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    view = exec_view(state="ended", status={"exit_code": 5}).to_json()
    events = [
        {"type": "output", "cursor": "1", "stream": "stdout", "offset": 0, "data": "out"},
        {"type": "output", "cursor": "2", "stream": "stderr", "offset": 0, "data": "err"},
        {"type": "dropped", "cursor": "3", "stream": "stderr", "bytes": 77},
        {"type": "end", "cursor": "4", "exec": view},
    ]
    body = b"".join(json.dumps(each).encode() + b"\n" for each in events)
    with served(tmp_path / "s", lambda _: Answer(body)) as (client, _server):
        assert 5 == attached.show(process_of(client))
    told = capfdbinary.readouterr()
    assert b"out" == told.out
    assert told.err.startswith(b"err")
    assert b"77 bytes of stderr were dropped" in told.err


class _Process:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.news = threading.Semaphore(0)
        self.stdin = None

    def signal_group(self, number: int) -> None:
        self.told.append(number)
        self.news.release()
        if number == signal.SIGHUP:
            raise ServerUnreachable("once")

    def kill(self) -> None:
        self.told.append("kill")
        self.news.release()

    def resize(self, rows: int, cols: int) -> None:
        self.told.append("resize")
        self.news.release()

    def events(self, *, follow: bool) -> Iterator[dict[str, Any]]:
        assert follow
        mine = os.getpid()
        for number in (
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGINT,
            signal.SIGQUIT,
            signal.SIGTERM,
        ):
            os.kill(mine, number)
            assert self.news.acquire(timeout=60)
        yield {"type": "end", "exec": exec_view(state="ended", status={"exit_code": 4}).to_json()}


def test_each_signal_is_passed_on_once_and_the_second_kills() -> None:
    """Also after one that did not reach the server; and none is taken any more afterwards."""
    numbers = [*attached._PASSED_ON, signal.SIGWINCH]
    before = [signal.getsignal(number) for number in numbers]
    process: Any = _Process()
    assert 4 == attached.Attached(process, on_terminal=False).run_through()
    assert [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, "kill"] == process.told
    assert before == [signal.getsignal(number) for number in numbers]


def test_a_changed_window_is_passed_on_each_time() -> None:
    process: Any = _Process()
    there = attached.Attached(process, on_terminal=True)
    threading.Thread(target=there._obey, daemon=True).start()
    for _ in range(3):
        there._orders.put(signal.SIGWINCH)
        assert process.news.acquire(timeout=60)
    assert ["resize"] * 3 == process.told


@pytest.mark.parametrize(
    ("argv", "words", "command"),
    [
        (["a", "--", "x", "--", "-y"], ["a"], ["x", "--", "-y"]),
        (["--env", "A=b", "a", "x", "--env", "y"], ["a"], ["x", "--env", "y"]),
        (["a"], ["a"], []),
        (["--", "x"], [], ["x"]),
    ],
)
def test_what_follows_the_sandbox_is_the_command(
    argv: list[str], words: list[str], command: list[str]
) -> None:
    given, found, rest = inside._split(argv)
    assert (words, command) == (found, rest)
    assert ("env" in given) == ("A=b" in argv)


def test_a_command_has_its_options(world: World, capfd: Capture) -> None:
    world.told["POST execs"] = as_json(exec_view().to_json())
    words = ["-d", "--timeout", "2s", "--workdir", "/w", "--user", "u", "--env", "A=b=c", "one"]
    assert 0 == inside.exec_([*words, "--", "x", "y"])
    assert "exec-a" == capfd.readouterr().out.strip()
    form = world.server.requests[-1].form
    assert (["x", "y"], 2.0, "/w", "u", {"A": "b=c"}) == tuple(
        form[name] for name in ("argv", "timeout_s", "cwd", "user", "env")
    )
    assert "/v1/sandboxes/a/execs" == world.server.requests[-1].path


def test_logs_are_of_the_newest_command_or_the_named_one(world: World, capfd: Any) -> None:
    items = [exec_view(id=name).to_json() for name in ("exec-1", "exec-2")]

    def execs(request: Request) -> Answer:
        return as_json({"items": items})

    def output(request: Request) -> Answer:
        exec_id = request.path.split("/")[-2]
        assert ("false", "0") == (request.query["follow"], request.query["offset"])
        event = {"type": "running", "cursor": "1", "exec": exec_view(id=exec_id).to_json()}
        out = {"type": "output", "cursor": "0", "stream": "stdout", "offset": 0, "data": exec_id}
        return Answer(b"".join(json.dumps(each).encode() + b"\n" for each in (out, event)))

    world.told |= {"GET execs": execs, "GET output": output}
    world.told |= {
        f"GET {name}": as_json(exec_view(id=name).to_json()) for name in ("exec-1", "exec-2")
    }
    assert 0 == inside.logs(["one"])
    assert "exec-2" == capfd.readouterr().out
    assert 0 == inside.logs(["one", "exec-1"])
    assert "exec-1" == capfd.readouterr().out
    items.clear()
    with pytest.raises(ExecNotFound):
        inside.logs(["one"])


# -- cp --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("a:b", ("a", "b")), ("a:", ("a", ".")), ("a:b:c", ("a", "b:c")), ("./a:b", ("", "./a:b")),
        ("/x:y", ("", "/x:y")), (":b", ("", ":b")), ("ab", ("", "ab")), ("-", ("", "-")),
    ],
)  # fmt: skip
def test_a_colon_before_any_slash_names_a_sandbox(word: str, place: tuple[str, str]) -> None:
    assert place == inside._place(word)


@pytest.mark.parametrize(
    ("target", "is_directory", "put"),
    [
        ("x/", None, "x/file"),
        ("x", True, "x/file"),
        ("x", False, "x"),
        ("x", None, "x"),
        ("/", None, "/file"),
    ],
)
def test_a_copy_into_a_directory_keeps_its_name(
    target: str, is_directory: bool | None, put: str, world: World, tmp_path: Path
) -> None:
    form = {"path": "/x", "name": "x", "size_bytes": 1, "mode": 0o644, "mtime_s": 1.0}
    there = as_json({**form, "kind": "directory" if is_directory else "file"})
    world.told["GET stat"] = problem(404, "file_not_found") if is_directory is None else there
    world.told["PUT content"] = Answer()
    (tmp_path / "file").write_text("data")
    assert 0 == inside.copy([str(tmp_path / "file"), f"one:{target}"])
    sent = world.server.requests[-1]
    assert (put, b"data", "PUT") == (sent.query["path"], sent.body, sent.method)


def test_a_copy_out_goes_into_a_directory_and_replaces_as_cp_does(
    world: World, tmp_path: Path
) -> None:
    form = {"path": "/d/x", "name": "x", "size_bytes": 1, "mode": 0o644, "mtime_s": 1.0}
    world.told |= {"GET stat": as_json({**form, "kind": "file"}), "GET content": Answer(b"data")}
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "x").write_text("before, and longer")
    assert 0 == inside.copy(["one:/d/x", str(tmp_path / "to")])
    assert "data" == (tmp_path / "to" / "x").read_text()
    assert 0 == inside.copy(["one:/d/x", str(tmp_path / "new")])
    assert "data" == (tmp_path / "new").read_text()
    for words in (["a", "b"], ["one:a", "two:b"], ["one:a"], ["one:a", "b", "c"]):
        with pytest.raises(InvalidRequest):
            inside.copy(words)


# -- code ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--list", "--close"], "close"), (["--close", "--interrupt", "--context", "x"], "interrupt"),
        (["--list", "--interrupt"], "interrupt"), (["--list", "1"], "CODE"), (["--close", "1"], "CODE"),
        (["--interrupt", "1"], "CODE"), (["--context", "x", "--new"], "new"),
        (["--context", "x", "--language", "bash"], "language"), (["--close"], "context"),
        (["--interrupt"], "context"),
    ],
)  # fmt: skip
def test_options_without_effect_are_refused(words: list[str], field: str, world: World) -> None:
    with pytest.raises(InvalidRequest) as refused:
        code.code(["one", *words])
    assert (field, []) == (refused.value.field, world.changes)


# -- sessions, forks, snapshots, keys, the pool ----------------------------------------------------


def session_form(name: str = "sess-a", state: str = "active") -> dict[str, Any]:
    return {
        "session_id": name, "sandbox_id": "a", "client_id": "me", "state": state, "backend": "native",
        "created_at": 1.0, "last_active_at": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "others"),
    [
        ("acquire", ["attach", "release", "list"]), ("attach", ["acquire"]), ("list", ["acquire", "release"]),
        ("release", ["acquire", "list"]), ("touch", ["acquire", "release", "list"]),
    ],
)  # fmt: skip
def test_an_option_is_of_its_verbs_alone(verb: str, others: list[str]) -> None:
    options = {
        "acquire": ["id", "fresh", "meta", "no-pool", "memory", "label", "client"],
        "attach": ["create"],
        "release": ["keep-alive"],
        "list": ["state"],
    }
    mine = [*options.get(verb, []), "server", "key-file", "json"]
    sessions._check_options(dict.fromkeys(mine, "x"), verb)
    for other in others:
        for name in options[other]:
            if (verb, name) in (("list", "label"), ("attach", "client")):
                sessions._check_options({name: "x"}, verb)
                continue
            with pytest.raises(InvalidRequest) as refused:
                sessions._check_options({name: "x"}, verb)
            assert name == refused.value.field
    if verb == "attach":
        sessions._check_options({"create": True, "memory": "1g", "label": []}, verb)


def test_a_session_is_acquired_as_the_options_say(world: World, capfd: Any) -> None:
    answer = {"session": session_form(), "newly_created": True}
    world.told |= {"POST sessions": as_json(answer), "POST attach": as_json(answer)}
    words = [
        "--id",
        "p",
        "--fresh",
        "--no-pool",
        "--backend",
        "native",
        "--meta",
        "k=v",
        "--client",
        "c",
    ]
    assert 0 == sessions.session(["acquire", *words, "--pids", "77"])
    assert "sess-a" == capfd.readouterr().out.strip()
    form = next(each for each in world.server.requests if each.method == "POST").form
    assert ("p", True, False, "native", {"k": "v"}) == tuple(
        form["options"][name]
        for name in ("preferred_id", "require_fresh", "use_pool", "preferred_backend", "metadata")
    )
    assert ("c", 77) == (form["client_id"], form["spec"]["limits"]["pids"])
    world.server.requests.clear()
    assert 0 == sessions.session(["attach", "x", "--create", "--pids", "78"])
    assert 0 == sessions.session(["attach", "y", "--client", "c"])
    first, second = [each.form for each in world.server.requests if each.method == "POST"]
    assert ("x", True, 78) == (
        first["sandbox_id"], first["create_if_missing"], first["create_spec"]["limits"]["pids"],
    )  # fmt: skip
    assert ("y", "c", False) == (
        second["sandbox_id"], second["client_id"], second.get("create_if_missing", False),
    )  # fmt: skip


def test_a_verb_is_for_each_of_the_sessions(world: World, capfd: Any) -> None:
    def answer(request: Request) -> Answer:
        return as_json(session_form(request.path.split("/")[3]))

    for verb in ("detach", "touch", "suspend", "resume", "terminate", "release"):
        world.told[f"POST {verb}"] = answer
        assert 0 == sessions.session([verb, "s1", "s2"])
        rows = capfd.readouterr().out.splitlines()[1:]
        assert ["s1", "s2"] == [row.split()[0] for row in rows]
        assert [verb] * 2 == [each.path.rpartition("/")[2] for each in world.server.requests[-2:]]
    assert {"keep_alive": False} == world.server.requests[-1].form
    assert 0 == sessions.session(["release", "--keep-alive", "s1"])
    assert {"keep_alive": True} == world.server.requests[-1].form
    world.told["GET s1"] = as_json(session_form("s1"))
    assert 0 == sessions.session(["show", "s1", "--json"])
    assert "GET s1" == world.server.asked[-1]


def test_no_default_sandbox_is_a_word_of_its_own(world: World, capfd: Any) -> None:
    world.told |= {
        "PUT default": lambda r: as_json(
            {"session": session_form() if r.form["sandbox_id"] else None}
        ),
        "GET default": as_json({"session": None}),
    }
    assert 0 == sessions.session(["default", "x"])
    assert 0 == sessions.session(["default", "none"])
    assert 0 == sessions.session(["default"])
    assert ["x", None] == [r.form["sandbox_id"] for r in world.server.requests if r.method == "PUT"]
    assert "sess-a\n" == capfd.readouterr().out
    assert 0 == sessions.session(["default", "--json"])
    assert "null\n" == capfd.readouterr().out


def test_snapshots_and_keys_are_removed_one_by_one(world: World, capfd: Any) -> None:
    for name in ("x", "y"):
        world.told[f"DELETE {name}"] = Answer()
    assert 0 == serving.snapshot(["rm", "x", "y"])
    assert 0 == serving.keys(["rm", "y", "x"])
    assert 0 == serving.keys(["rm", "--this-key", "x"])
    assert ["x", "y", "y", "x", "x"] == [r.path.rpartition("/")[2] for r in world.server.requests]
    assert [{}] * 4 + [{"this_key": "true"}] == [each.query for each in world.server.requests]
    world.server.requests.clear()
    for call, words in (
        (serving.snapshot, ["rm"]), (serving.keys, ["rm"]), (serving.keys, ["create"]),
        (serving.keys, ["create", "a", "b"]), (serving.keys, ["rotate"]), (serving.keys, ["list", "x"]),
        (serving.keys, ["create", "a", "--expires", "30"]),
        (serving.keys, ["create", "a", "--max-requests", "x"]),
        (serving.snapshot, ["list", "x"]), (serving.snapshot, ["create", "a", "b"]),
        (serving.snapshot, ["create"]),
        (serving.pool, ["set"]), (serving.pool, ["set", "x"]), (serving.pool, ["unset", "x=1"]),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            call(words)
    assert [] == world.server.requests


def test_a_key_has_the_bounds_that_were_given(world: World, capfd: Any) -> None:
    world.told |= {"POST keys": as_json({"id": "key-1", "key": "rf_1"})}
    world.told["POST rotate"] = as_json({"id": "key-1", "key": "rf_2"})
    assert 0 == serving.keys(["create", "me"])
    assert {"owner": "me", "scope": "user", "name": ""} == world.server.requests[-1].form
    words = ["--scope", "admin", "--name", "n", "--expires", "2h", "--max-sandboxes", "0"]
    assert 0 == serving.keys(["create", "me", *words, "--max-requests", "9"])
    assert {
        "owner": "me", "scope": "admin", "name": "n", "expires_in_s": 7200.0, "max_sandboxes": 0,
        "max_requests": 9,
    } == world.server.requests[-1].form  # fmt: skip
    for overlap, seconds in ((["--overlap", "1m"], 60.0), ([], 0.0)):
        assert 0 == serving.keys(["rotate", "key-1", *overlap])
        assert {"overlap_s": seconds} == world.server.requests[-1].form
    assert ["rf_1", "rf_1", "rf_2", "rf_2"] == capfd.readouterr().out.split()


def test_a_pool_keeps_what_was_not_changed(world: World, capfd: Any) -> None:
    pools = {
        "config": {"min_warm": 1, "max_warm": 2, "profiles": []},
        "warm": 0,
        "given_up": {},
        "last_error": "",
    }
    world.told |= {"GET pools": as_json(pools), "PUT pools": as_json(pools)}
    assert 0 == serving.pool(["set", "max_warm=7", "name=text", "flag=true"])
    assert {"min_warm": 1, "max_warm": 7, "profiles": [], "name": "text", "flag": True} == (
        world.server.requests[-1].form
    )
    assert 0 == serving.pool([])
    assert "GET pools" == world.server.asked[-1]


@pytest.mark.parametrize("count", ["0x2", "-1", "²", "", "1.5"])
def test_a_number_of_forks_is_one(count: str, world: World) -> None:
    with pytest.raises(InvalidRequest) as refused:
        forks.fork(["--n", count, "one"])
    assert ("n", []) == (refused.value.field, world.server.requests)


def test_forks_are_told_of_with_what_was_left_out_once(world: World, capfd: Any) -> None:
    views = [sandbox_view(f"fork-{n}").to_json() for n in range(2)]
    report = {"parent": "a", "reason": "exec-1 has a terminal"}
    world.told["POST fork"] = as_json({"items": views, "execs": [{}, {}], "report": report})
    assert 0 == forks.fork(["--n", "2", "--label", "k=v", "--processes", "auto", "one"])
    told = capfd.readouterr()
    assert ["fork-0", "fork-1"] == told.out.split()
    assert ["ringfence: left out: exec-1 has a terminal"] == told.err.splitlines()
    assert (2, "auto", {"k": "v"}) == tuple(
        world.server.requests[-1].form[name] for name in ("n", "processes", "labels")
    )
    for words in (["a"], ["a", "--base", "s"], ["a", "--base", "s", "--into", "b", "--to", "d"]):
        with pytest.raises(InvalidRequest):
            forks.merge(words)


@pytest.mark.parametrize("conflicts", [[], [{"path": "f", "reason": "both"}]])
def test_a_merge_with_conflicts_is_no_success(
    conflicts: list[Any], world: World, capfd: Any
) -> None:
    world.told["POST merge"] = as_json({"conflicts": conflicts, "changes": []})
    words = ["one", "--into", "two", "--base", "s", "--path", "p", "--prefer", "ours", "--dry-run"]
    assert (1 if conflicts else 0) == forks.merge(words)
    last = world.server.requests[-1]
    assert "/v1/sandboxes/a/merge" == last.path
    assert {"into": "b", "base": "s", "path": "p", "dry_run": True, "prefer": "ours"} == last.form


def test_a_tree_hangs_each_fork_below_its_nearest_ancestor_that_lives(
    world: World, capfd: Any
) -> None:
    def view(name: str, *lineage: str) -> dict[str, Any]:
        labels = {LINEAGE: " ".join(lineage)} if lineage else {}
        return sandbox_view(name, labels=labels).to_json()

    items = [
        view("a"), view("b", "a"), view("c", "a", "b"), view("d", "gone"), view("e", "a", "gone"), view("f"),
    ]  # fmt: skip
    world.told["GET sandboxes"] = as_json({"items": items, "next_cursor": None})
    assert 0 == forks.tree([])
    lines = capfd.readouterr().out.splitlines()
    assert ["a", "  b", "    c", "  e", "d", "f"] == [each.split("  running")[0] for each in lines]
