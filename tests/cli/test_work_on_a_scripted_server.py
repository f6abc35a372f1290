"""Commands that work in a sandbox of a server, against answers that the test writes: results, logs, code."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.cli.server import attached, code, forks, inside, remote, serving, sessions
from ringfence.contexts.execution import Result
from ringfence.errors import ExecNotFound, InvalidRequest
from tests.cli.test_commands_on_a_scripted_server import Capture, World, session_form
from tests.cli.test_commands_on_a_scripted_server import fixture_world as fixture_world
from tests.client.scripted import Answer, Request, as_json
from tests.client.test_asked_again import exec_view, sandbox_view

pytestmark = pytest.mark.anyone


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where standard input is written to; the rest of the test reads its end."""
    kept = os.dup(0)
    read, write = os.pipe()
    os.dup2(read, 0)
    os.close(read)
    try:
        yield write
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def lines(*events: dict[str, Any]) -> Answer:
    return Answer(b"".join(json.dumps(each).encode() + b"\n" for each in events))


# -- exec, logs, changes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"), [({"exit_code": 3}, 3), ({"signal": 9}, 137), ({"signal": 9, "timed_out": True}, 124)]
)  # fmt: skip
def test_a_result_as_json_has_the_exit_code_of_the_command(
    status: dict[str, Any], code: int, world: World, capfd: Capture, typed: int
) -> None:
    os.write(typed, b"input")
    os.close(typed)
    result = {"stdout": "out", "stderr": "", **status}
    world.told["POST execs"] = as_json(
        exec_view(state="ended", status=status, result=result).to_json()
    )
    assert code == inside.exec_(["--json", "one", "--", "x"])
    assert status.items() <= json.loads(capfd.readouterr().out).items()
    form = next(each for each in world.server.requests if each.path.endswith("/execs")).form
    assert ("input", True) == (form["stdin"], form["wait"])


def test_no_command_and_no_sandbox_are_mistakes(world: World) -> None:
    for words, field in ((["one"], "argv"), (["--", "x"], "SANDBOX")):
        with pytest.raises(InvalidRequest) as refused:
            inside.exec_(words)
        assert field == refused.value.field
    assert [] == world.server.requests


def test_a_terminal_is_for_three_of_them_or_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for terminals, given, wanted in (
        ({0, 1, 2}, {}, True), ({0, 1}, {}, False), ({1, 2}, {}, False), (set(), {"tty": True}, True),
    ):  # fmt: skip
        monkeypatch.setattr(os, "isatty", lambda fd, terminals=terminals: fd in terminals)
        assert wanted == inside._wants_terminal(given)


def test_a_command_on_a_terminal_has_its_size_and_the_callers_kind_unless_it_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    sandbox: Any = SimpleNamespace(start=lambda command, **how: started.append((command, how)))
    there = SimpleNamespace(run_through=lambda: 7)
    monkeypatch.setattr(attached, "Attached", lambda *_, **__: there)
    monkeypatch.setenv("TERM", "mine")
    for env, term in (({}, "mine"), ({"TERM": "its"}, "its")):
        assert 7 == inside._run(sandbox, ["x"], {"env": env, "cwd": "/w"}, on_terminal=True)
        _, how = started[-1]
        assert (term, "/w", 2) == (how["env"]["TERM"], how["cwd"], len(how["pty"]))
    monkeypatch.delenv("TERM")
    inside._run(sandbox, ["x"], {"env": {}}, on_terminal=True)
    assert {} == started[-1][1]["env"]
    null = os.open(os.devnull, os.O_RDONLY)
    kept = os.dup(0)
    try:
        for is_null in (True, False):
            os.dup2(null, 0) if is_null else os.dup2(kept, 0)
            expected = not (is_null or os.path.samestat(os.fstat(kept), os.stat(os.devnull)))
            inside._run(sandbox, ["x"], {"env": {}}, on_terminal=False)
            assert {"env": {}, "stream_stdin": expected} == started[-1][1]
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(null)


def test_a_shell_of_its_own_ends_with_its_sandbox_and_another_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def run(sandbox: Any, argv: Any, options: Any, *, on_terminal: bool) -> int:
        ran.append((sandbox.id, tuple(argv), on_terminal))
        return 5

    monkeypatch.setattr(inside, "_run", run)
    world.names["sbx-new"] = "shell"
    assert 5 == inside.shell(["one", "--", "python3", "-q"])
    assert [] == world.changes
    assert 5 == inside.shell([])
    assert [("a", ("python3", "-q"), True), ("sbx-new", inside._SHELL, True)] == ran
    assert "DELETE sbx-new" == world.changes[-1]
    with pytest.raises(InvalidRequest):
        inside.shell(["one", "two"])


def test_logs_that_are_followed_end_with_the_command_and_its_code(
    world: World, capfd: Capture
) -> None:
    view = exec_view(id="exec-1", state="ended", status={"exit_code": 6}).to_json()
    out = {"type": "output", "cursor": "1", "stream": "stdout", "offset": 0, "data": "out"}
    raw = {
        "type": "output",
        "cursor": "2",
        "stream": "stderr",
        "offset": 0,
        "data": "?",
        "data_base64": "/w==",
    }
    end = {"type": "end", "cursor": "3", "exec": view}
    asked: list[str] = []

    def output(request: Request) -> Answer:
        asked.append(request.query["follow"])
        return lines(out, raw, end)

    world.told |= {
        "GET output": output,
        "GET exec-1": as_json(view),
        "GET execs": as_json({"items": [view]}),
    }
    assert (6, "true") == (inside.logs(["-f", "one", "exec-1"]), asked[-1])
    assert (0, "false") == (inside.logs(["one", "exec-1"]), asked[-1])
    capfd.readouterr()
    assert 0 == inside.logs(["--json", "one", "exec-1"])
    found = [json.loads(each) for each in capfd.readouterr().out.splitlines()]
    assert ["out", "/w==", None] == [each.get("data_base64", each.get("data")) for each in found]
    assert 0 == inside.logs(["-l", "one"])
    head, row = capfd.readouterr().out.splitlines()
    assert "6" == row[head.index("CODE") :].split()[0]
    assert 0 == inside.logs(["-l", "--json", "one"])
    assert ["exec-1"] == [each["id"] for each in json.loads(capfd.readouterr().out)]


def test_events_of_the_network_steer_no_terminal(world: World, capfd: Capture) -> None:
    event = {
        "time": 1.0, "sandbox_id": "a", "kind": "http", "host": "a.test", "port": 80,
        "allowed": False, "path": "/\x1b[2J", "reason": "no rule",
    }  # fmt: skip
    world.told["GET log"] = as_json({"items": [event]})
    assert 0 == inside.logs(["--network", "one"])
    shown = capfd.readouterr().out
    assert ("\x1b" not in shown, "allowed=False" in shown, 1) == (
        True,
        True,
        len(shown.splitlines()),
    )
    assert 0 == inside.logs(["--network", "--json", "one"])
    assert "/\\x1b[2J" == json.loads(capfd.readouterr().out)[0]["path"]


def test_changes_are_those_since_a_snapshot_and_say_where_there_are_more(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    asked: list[Any] = []
    item = SimpleNamespace(change="added", kind="file", size_bytes=3, path="/a\x1b[2J")
    found = SimpleNamespace(
        items=[item],
        is_complete=True,
        to_json=lambda: {"items": 1},
        diff=lambda: "+a\x1b[2J\r\n-b\n",
    )

    def changes(since: str | None) -> Any:
        asked.append(since)
        return found

    sandbox = SimpleNamespace(changes=changes)
    monkeypatch.setattr(remote, "sandbox_of", lambda _client, word: sandbox)
    assert 0 == inside.changes(["one", "--since", "snap-1"])
    told = capfd.readouterr()
    assert ("\x1b" not in told.out, "3 B" in told.out, "") == (True, True, told.err)
    assert 0 == inside.changes(["one", "--diff"])
    assert ["snap-1", None] == asked
    assert "+a\x1b[2J\r\n-b\n" == capfd.readouterr().out, "as it is, for a file"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    found.is_complete = False
    assert 0 == inside.changes(["one", "--diff"])
    told = capfd.readouterr()
    assert "+a?[2J?\n-b\n" == told.out
    assert "there is more" in told.err
    assert 0 == inside.changes(["one", "--json"])
    assert {"items": 1} == json.loads(capfd.readouterr().out)


def test_standard_streams_are_copied_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], typed: int
) -> None:
    written = io.BytesIO()
    data = os.urandom(100_000)
    monkeypatch.setattr(written, "close", lambda: None)
    files = SimpleNamespace(
        open_write=lambda path: written, open_read=lambda path: io.BytesIO(data)
    )
    monkeypatch.setattr(remote, "sandbox_of", lambda *_: SimpleNamespace(files=files))
    monkeypatch.setattr(inside, "_CHUNK", 2000)
    os.write(typed, data[:5000])
    os.close(typed)
    assert 0 == inside.copy(["-", "one:x"])
    assert data[:5000] == written.getvalue()
    assert 0 == inside.copy(["one:x", "-"])
    assert data == capfdbinary.readouterr().out


class _OnTerminal:
    """A process on a terminal, which ends once it was told what the test waits for."""

    def __init__(self, begin: Any) -> None:
        self.begin, self.told, self.news = begin, list[Any](), threading.Semaphore(0)
        self.stdin = SimpleNamespace(write=self.note, close=lambda: self.note("closed"))

    def note(self, what: Any) -> None:
        self.told.append(what)
        self.news.release()

    def resize(self, rows: int, cols: int) -> None:
        self.note("resized")

    def events(self, *, follow: bool) -> Iterator[dict[str, Any]]:
        assert follow
        self.begin()
        assert self.news.acquire(timeout=60)
        yield {"type": "end", "exec": exec_view(state="ended", status={"exit_code": 4}).to_json()}


def test_a_terminal_there_gets_its_end_of_input_also_where_ours_is_none(typed: int) -> None:
    process: Any = _OnTerminal(lambda: os.close(typed))
    assert 4 == attached.Attached(process, on_terminal=True).run_through()
    assert [b"\x04"] == process.told


def test_our_terminal_is_raw_meanwhile_and_passes_its_size_on(
    typed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(typed)
    master, slave = os.openpty()
    os.dup2(slave, 0)
    before = termios.tcgetattr(slave)
    modes: list[Any] = []

    def begin() -> None:
        modes.append(termios.tcgetattr(slave)[3])
        os.kill(os.getpid(), signal.SIGWINCH)

    process: Any = _OnTerminal(begin)
    process.stdin = None
    try:
        assert 4 == attached.Attached(process, on_terminal=True).run_through()
        assert before == termios.tcgetattr(slave)
    finally:
        os.close(master)
        os.close(slave)
    assert (["resized"], 0) == (process.told, modes[0] & (termios.ECHO | termios.ICANON))


def test_a_list_of_commands_has_how_each_ended_and_its_words(world: World, capfd: Capture) -> None:
    """Words are quoted: they may be of somebody else, and must not look as others."""
    killed = exec_view(
        id="exec-1", state="ended", argv=["sh", "-c", "a b\x1b[2J"], status={"signal": 9, "duration_s": 90.0}
    )  # fmt: skip
    late = exec_view(id="exec-2", state="ended", status={"signal": 9, "timed_out": True})
    world.told["GET execs"] = as_json({"items": [killed.to_json(), late.to_json()]})
    assert 0 == inside.logs(["-l", "one"])
    head, first, second = capfd.readouterr().out.splitlines()
    cells = [head.index(name) for name in ("CODE", "TOOK", "COMMAND")]
    assert ["137", "2m", "sh"] == [first[at:].split()[0] for at in cells]
    assert first.endswith("sh -c 'a b?[2J'")
    assert "124" == second[cells[0] :].split()[0]


def test_a_copy_of_a_directory_itself_becomes_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`SANDBOX:.` has no name of its own to be put below the target."""
    got: list[Any] = []
    files = SimpleNamespace(download=lambda source, target, **how: got.append((source, target)))
    monkeypatch.setattr(remote, "sandbox_of", lambda *_: SimpleNamespace(files=files))
    here = str(tmp_path)
    for source in (".", "..", "/", "a/..", "a/", "/d/a"):
        assert 0 == inside.copy([f"one:{source}", here])
    assert [here] * 4 + [f"{here}/a"] * 2 == [target for _, target in got]


def test_a_copy_into_a_link_to_a_directory_goes_below_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stat(path: str, *, follow: bool = False) -> Any:
        return SimpleNamespace(kind="directory" if follow else "symlink")

    put: list[str] = []
    files = SimpleNamespace(stat=stat, upload=lambda source, target, **how: put.append(target))
    monkeypatch.setattr(remote, "sandbox_of", lambda *_: SimpleNamespace(files=files))
    assert 0 == inside.copy([str(tmp_path / "x"), "one:link"])
    assert ["link/x"] == put


# -- code ------------------------------------------------------------------------------------------


class Cells:
    """A sandbox with contexts, which notes the cells that run."""

    def __init__(self, **languages: str) -> None:
        self.languages, self.ran = languages, list[Any]()
        self.execution: Any = SimpleNamespace(
            results=[], error=None, timed_out=False, to_json=lambda: {"done": True}
        )

    def contexts(self) -> list[str]:
        return [*self.languages]

    def context(self, language: str | None = None, *, id: str | None = None) -> Any:
        if id is None:
            assert language is not None
            id = f"new-{language}"
            self.languages[id] = language
        if id not in self.languages:
            raise ExecNotFound("no such exec")

        def run(text: str, **how: Any) -> Any:
            self.ran.append((id, text, how))
            return self.execution

        def note(what: str) -> Any:
            return lambda: self.ran.append((id, what))

        return SimpleNamespace(
            id=id,
            language=self.languages[id],
            run=run,
            close=note("close"),
            interrupt=note("interrupt"),
        )


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Cells:
    made = Cells(b1="bash", p1="python", p2="python")
    monkeypatch.setattr(remote, "sandbox_of", lambda _client, word: made)
    return made


def test_code_runs_in_the_oldest_context_of_its_language_or_in_the_named_one(cells: Cells) -> None:
    for words, where in (
        (["--language", "bash"], "b1"), ([], "p1"), (["--context", "p2"], "p2"), (["--language", "r"], "new-r"),
        (["--new"], "new-python"),
    ):  # fmt: skip
        assert 0 == code.code(["one", "x", *words])
        assert (where, "x") == cells.ran[-1][:2]
    assert 0 == code.code(["one", "--close", "--context", "p2"])
    assert 0 == code.code(["one", "--interrupt", "--context", "p1"])
    assert [("p2", "close"), ("p1", "interrupt")] == cells.ran[-2:]
    with pytest.raises(ExecNotFound, match="no context 'none'") as refused:
        code.code(["one", "x", "--context", "none"])
    assert "--list" in str(refused.value.hint)
    for words in ([], ["one", "x", "y"]):
        with pytest.raises(InvalidRequest):
            code.code(words)


def test_a_cell_is_told_by_its_code_and_asks_only_where_nothing_else_is_read(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, capfd: Capture, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from standard input"))
    assert 0 == code.code(["one", "--timeout", "2s"])
    _, text, how = cells.ran[-1]
    assert ("from standard input", 2.0, None) == (text, how["timeout_s"], how["on_input"])
    assert 0 == code.code(["one", "x"])
    how = cells.ran[-1][2]
    how["on_stdout"]("out")
    how["on_stderr"]("err")
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed\n"))
    assert ("typed", None) == (how["on_input"]("name? "), how["on_input"]("more? "))
    told = capfd.readouterr()
    assert ("outname? more? ", "err") == (told.out, told.err)

    cells.execution.results = [Result({"text/plain": b"42"}), Result({"image/png": b"x"})]
    cells.execution.error = SimpleNamespace(name="E", value="why", traceback="")
    assert 1 == code.code(["one", "x"])
    told = capfd.readouterr()
    assert ("42\n", "E: why\n") == (told.out, told.err)
    cells.execution.timed_out, cells.execution.error.traceback = True, "Traceback\n"
    script = tmp_path / "x.py"
    script.touch()
    assert 124 == code.code(["one", str(script)])
    said = capfd.readouterr().err
    assert said.startswith("Traceback\nwhy\n")
    assert f"< {script}" in said
    assert 124 == code.code(["one", "x", "--json", "--timeout", "3s"])
    assert {"context": "p1", "done": True} == json.loads(capfd.readouterr().out)
    assert {"timeout_s": 3.0} == cells.ran[-1][2]
    ran = len(cells.ran)
    with pytest.raises(InvalidRequest) as refused:
        code.code(["one", "x", "--timeout", "0s"])
    assert ("timeout", ran) == (refused.value.field, len(cells.ran))


def test_contexts_are_listed(cells: Cells, capfd: Capture) -> None:
    assert 0 == code.code(["one", "--list", "--json"])
    assert [{"id": "b1", "language": "bash"}, {"id": "p1", "language": "python"}] == (
        json.loads(capfd.readouterr().out)[:2]
    )
    assert 0 == code.code(["one", "--list"])
    assert [["b1", "bash"], ["p1", "python"], ["p2", "python"]] == [
        row.split() for row in capfd.readouterr().out.splitlines()[1:]
    ]
    assert [] == cells.ran


# -- forks and sessions ----------------------------------------------------------------------------


def test_forks_have_the_labels_of_their_source_where_none_are_given(
    world: World, capfd: Any
) -> None:
    world.told["POST fork"] = as_json(
        {"items": [sandbox_view("f").to_json()], "execs": [{}], "report": {"parent": "a"}}
    )
    assert 0 == forks.fork(["one", "--json"])
    form = world.server.requests[-1].form
    assert (1, "auto", None) == (form["n"], form["processes"], form.get("labels"))
    assert ["f"] == [each["id"] for each in json.loads(capfd.readouterr().out)]


def test_a_merge_into_a_directory_of_this_machine_is_told_with_its_changes(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    asked: list[Any] = []
    change = SimpleNamespace(change="added", kind="file", size_bytes=3, path="x")
    merged = SimpleNamespace(conflicts=[], changes=[change], to_json=lambda: {"changes": 1})

    def merge(into: Any, **how: Any) -> Any:
        asked.append((into, how))
        return merged

    branch = SimpleNamespace(merge=merge)
    monkeypatch.setattr(remote, "sandbox_of", lambda _client, word: branch)
    assert 0 == forks.merge(["one", "--base", "s", "--to", "/d"])
    assert ("/d", {"base": "s", "path": ".", "prefer": None, "dry_run": False}) == asked[-1]
    assert ["added", "file", "3", "B", "x"] == capfd.readouterr().out.splitlines()[1].split()
    merged.conflicts = [SimpleNamespace(path="y", reason="both")]
    assert 1 == forks.merge(["one", "--base", "s", "--into", "two"])
    assert branch is asked[-1][0]
    shown = capfd.readouterr().out
    assert ("y  " in shown, "added" in shown) == (True, False), "nothing was written"
    assert 1 == forks.merge(["one", "--base", "s", "--to", "/d", "--json"])


def test_sessions_are_listed_by_their_states_and_labels(world: World, capfd: Any) -> None:
    form = {**session_form(), "metadata": {"k": "v"}, "time_remaining_s": 90.0}
    world.told["GET sessions"] = as_json({"items": [form], "next_cursor": None})
    words = ["--state", "active", "--state", "suspended", "--label", "k=v"]
    assert 0 == sessions.session(["list", *words])
    query = world.server.requests[-1].query
    assert ("suspended", "k=v") == (query["state"], query["label"])
    row = capfd.readouterr().out.splitlines()[1]
    assert ["sess-a", "a", "me", "active", "native"] == row.split()[:5]
    assert ["2m", "k=v"] == row.split()[-2:]
    for words in (
        *(["list", "x"], ["acquire", "x"], ["attach"], ["attach", "x", "y"], ["release"]),
        ["default", "x", "y"],
    ):
        with pytest.raises(InvalidRequest):
            sessions.session(words)


def test_nothing_of_a_sandbox_steers_the_terminal_in_a_tree_or_after_a_fork(
    world: World, capfd: Any
) -> None:
    world.names["a"] = "on\x1b[2Je"
    assert 0 == forks.tree([])
    assert "a  running  on?[2Je" == capfd.readouterr().out.splitlines()[0]
    report = {"parent": "a", "reason": "child 'x\x1b[2J\ny' has a terminal"}
    answer = {"items": [sandbox_view("f").to_json()], "execs": [{}], "report": report}
    world.told["POST fork"] = as_json(answer)
    assert 0 == forks.fork(["two"])
    assert "ringfence: left out: child 'x\\x1b[2J y' has a terminal\n" == capfd.readouterr().err


# -- what a server keeps ---------------------------------------------------------------------------


def test_a_snapshot_has_its_metadata_and_a_rotated_key_its_form(world: World, capfd: Any) -> None:
    made = {"id": "snap-1", "session_id": "a", "backend": "native", "created_at": 1.0}
    world.told["POST snapshots"] = as_json(made)
    assert 0 == serving.snapshot(["create", "one", "--meta", "k=v", "--meta", "l=w"])
    assert {"metadata": {"k": "v", "l": "w"}} == world.server.requests[-1].form
    key = "rf_" + "0" * 43
    world.told |= {
        f"POST {verb}": as_json({"id": "key-1", "key": key}) for verb in ("rotate", "keys")
    }
    for words in (["rotate", "key-1"], ["create", "me"]):
        capfd.readouterr()
        assert 0 == serving.keys([*words, "--e2b"])
        assert capfd.readouterr().out.startswith("e2b_")


def test_a_list_of_keys_has_when_each_ends(world: World, capfd: Any) -> None:
    key = {
        "id": "key-1", "owner": "me\x1b[2J", "scope": "user", "name": "n", "created_at": time.time() - 7201,
        "last_used_at": None, "expires_at": time.time() + 3 * 86_400, "sandbox_id": None,
    }  # fmt: skip
    over = {**key, "id": "key-2", "expires_at": time.time() - 60, "last_used_at": time.time() - 130}
    world.told["GET keys"] = as_json({"items": [key, over]})
    assert 0 == serving.keys(["list"])
    first, second = [row.split() for row in capfd.readouterr().out.splitlines()[1:]]
    assert ["key-1", "me?[2J", "user", "n", "2h", "3d"] == first
    assert ["2h", "2m", "0s"] == second[4:]
