"""Commands on a server's state or a cluster of machines, and the options of `ringfence mcp`."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringfence.cli import backup, cluster, main, mcp
from ringfence.cli.server.hosting import NODES
from ringfence.errors import InvalidRequest

pytestmark = pytest.mark.anyone

Capture = pytest.CaptureFixture[str]


# -- backup and restore ----------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from ringfence.store import backup as store

    found: list[Any] = []
    form = {"snapshots": ["a", "b"], "snapshots_elsewhere": 0}

    def note(*given: Any) -> Any:
        found.append(given)
        return form

    monkeypatch.setattr(store, "save", note)
    monkeypatch.setattr(store, "restore", note)
    return found


def test_a_backup_is_of_a_state_directory_and_in_another(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    from ringfence import __version__

    monkeypatch.chdir(tmp_path)
    state, copy = f"{tmp_path}/state", f"{tmp_path}/copy"
    for words in (
        ["--state-dir", "state", "copy"],
        ["copy", "--state-dir", state],
        [copy, "--state-dir=state"],
    ):
        assert 0 == backup.save(words)
        assert (state, copy, __version__) == asked.pop()
        assert f"saved in {copy}: 2 snapshots\n" == capfd.readouterr().out
        assert 0 == backup.restore(words)
        assert (copy, state) == asked.pop()
        assert f"restored in {state}: 2 snapshots\n" == capfd.readouterr().out
    assert 0 == backup.save(["copy", "--json"])
    assert ["a", "b"] == json.loads(capfd.readouterr().out)["snapshots"]
    from ringfence.model.places import state_directory

    assert os.path.abspath(state_directory()) == asked[-1][0], "that of a server without the option"


@pytest.mark.parametrize(
    "words", [[], [""], ["a", "b"], ["a", "--state-dir", "s", "b"], ["--state-dir=s", "a", "--state-dir=t"]]
)  # fmt: skip
def test_a_backup_has_one_place(words: list[str], asked: list[Any]) -> None:
    for command in (backup.save, backup.restore):
        with pytest.raises(InvalidRequest):
            command(words)
        assert 0 == command(["--help"])
    assert [] == asked


def test_what_is_not_in_a_backup_is_said(capfd: Capture) -> None:
    backup._tell({}, {"snapshots": [], "snapshots_elsewhere": 3}, "saved in x")
    first, second = capfd.readouterr().out.splitlines()
    assert "saved in x: 0 snapshots" == first
    assert "not in the backup: 3 snapshots that their backends store elsewhere" == second


# -- cluster and nodes -----------------------------------------------------------------------------


class Cluster:
    """What is asked of a cluster, and its answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.is_empty, self.nodes, self.ray = True, [self.node("a")], ["ray-a"]

    @staticmethod
    def node(tag: str) -> dict[str, Any]:
        return {
            "node": tag, "ray_id": f"ray-{tag}", "host": "h", "status": "ready", "active": 1,
            "max_sandboxes": 9, "load": 0.5, "cpus": 2.0, "free_memory_bytes": 3 << 20,
            "tiers": ["light"], "backends": ["native", "gvisor"],
        }  # fmt: skip


@pytest.fixture(name="there")
def fixture_there(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    from ringfence.cluster import admin, directory

    there = Cluster()
    found = SimpleNamespace(ray_nodes=lambda: dict.fromkeys(there.ray))

    def note(name: str, answer: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            there.asked.append(
                (name, *(each for each in given if each is not found), *more.values())
            )
            return answer() if callable(answer) else answer

        return call

    def wait(_directory: Any, tag: str, most_s: float, tell: Any) -> bool:
        there.asked.append(("wait", tag, most_s))
        tell([{"id": "s", "owner": "o", "outcome": "kept", "snapshot": "", "why": "busy"}])
        return there.is_empty

    monkeypatch.setattr(directory, "connect", note("connect", found))
    for name, answer in (
        ("up", "ray said\n"), ("down", 2), ("start", lambda: there.nodes), ("nodes", lambda: there.nodes),
        ("drain", None), ("troubles", {}),
    ):  # fmt: skip
        monkeypatch.setattr(admin, name, note(name, answer))
    monkeypatch.setattr(admin, "wait_drained", wait)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    return there


def test_ray_is_started_unless_one_runs_and_a_node_without_a_server_is_no_success(
    there: Cluster, capfd: Capture
) -> None:
    connected = ("connect", "auto", "default")
    assert 0 == cluster.cluster(["up"])
    assert [("up", ""), connected, ("start",), ("troubles",)] == there.asked
    assert capfd.readouterr().out.startswith("ray said\n")
    there.asked.clear()
    assert 0 == cluster.cluster(["up", "--address", "h:1", "--cluster-name", "mine"])
    assert [("connect", "h:1", "mine"), ("start",)] == there.asked[:2]
    there.asked.clear()
    assert 0 == cluster.cluster(["--join", "h:1", "up", "--json"])
    assert [("up", "h:1"), connected, ("start",)] == there.asked
    assert ["a"] == [each["node"] for each in json.loads(capfd.readouterr().out.splitlines()[-1])]
    there.asked.clear()
    assert 0 == cluster.cluster(["up", "--join", "h:1", "--address", "h:2"])
    assert [("up", "h:1"), ("connect", "h:2", "default")] == there.asked[:2]
    capfd.readouterr()
    there.ray.append("ray-b")
    assert 1 == cluster.cluster(["up"])
    assert "1 Ray nodes have no server yet" in capfd.readouterr().err
    assert 0 == cluster.cluster(["status"]), "which only shows"
    assert "nodes" == there.asked[-2][0]


def test_why_a_node_does_not_start_is_told_and_steers_no_terminal(
    there: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    from ringfence.cluster import admin

    monkeypatch.setattr(admin, "troubles", lambda _directory: {"b": "no room\x1b[2J\nhere"})
    assert 0 == cluster.nodes([])
    assert "node b does not start: no room?[2J?here\n" == capfd.readouterr().err


def test_what_a_thread_of_ray_prints_is_not_among_the_output(
    there: Cluster, capfd: Capture
) -> None:
    assert 0 == cluster.cluster(["status", "--json"])
    thread = threading.Thread(target=print, args=("a warning",))
    thread.start()
    thread.join()
    told = capfd.readouterr()
    assert (1, "a warning\n") == (len(json.loads(told.out)), told.err)


def test_a_cluster_ends_with_the_number_of_its_nodes(there: Cluster, capfd: Capture) -> None:
    assert 0 == cluster.cluster(["down"])
    assert 0 == cluster.cluster(["down", "--json"])
    assert ["ended 2 nodes", '{"ended": 2}'] == capfd.readouterr().out.splitlines()
    there.asked.clear()
    for words in ([], ["upp"], ["up", "down"]):
        with pytest.raises(InvalidRequest) as refused:
            cluster.cluster(words)
        assert "VERB" == refused.value.field
    for command in (cluster.cluster, cluster.nodes):
        assert 0 == command(["--help"])
    assert [] == there.asked


def test_a_node_is_drained_until_it_is_empty_or_the_time_is_over(
    there: Cluster, capfd: Capture
) -> None:
    assert 0 == cluster.nodes(["drain", "a", "--wait", "2m"])
    assert [("drain", "a", True), ("wait", "a", 120.0)] == there.asked[1:]
    shown = capfd.readouterr().out
    assert "busy" in shown
    assert shown.endswith("node a has no sandbox: stop Ray there\n")
    there.is_empty = False
    assert 1 == cluster.nodes(["--json", "drain", "a"])
    assert ("wait", "a", 10.0) == there.asked[-1]
    assert ["s"] == [each["id"] for each in json.loads(capfd.readouterr().out)]
    there.asked.clear()
    assert 0 == cluster.nodes(["undrain", "a"])
    assert [("drain", "a", False)] == there.asked[1:], "nothing is waited for"
    assert 0 == cluster.nodes([])
    assert ["a", "h", "ready", "1/9", "0.5/2", "3", "MiB", "light", "native,gvisor"] == (
        capfd.readouterr().out.splitlines()[1].split()
    )
    for words in (["drain"], ["drain", "a", "b"], ["list", "a"], ["a"]):
        with pytest.raises(InvalidRequest):
            cluster.nodes(words)


def test_options_stand_before_and_after_a_verb_but_once(there: Cluster) -> None:
    given, words = cluster._read(NODES, ["--json", "drain", "--wait", "1s", "a", "--json"])
    assert ({"json": True, "wait": "1s"}, ["drain", "a"]) == (given, words)
    with pytest.raises(InvalidRequest, match="given twice"):
        cluster.nodes(["--wait", "1s", "drain", "a", "--wait", "2s"])
    assert [] == there.asked


# -- mcp -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "8765", ":8765", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:²"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not HOST:PORT") as refused:
        mcp._address(text)
    assert "http" == refused.value.field


def test_only_this_machine_reaches_a_server_that_authenticates_nobody_else() -> None:
    for text, found in (
        ("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65_535)),
        ("localhost:80", ("localhost", 80)),
    ):  # fmt: skip
        assert found == mcp._address(text)
    for host in ("0.0.0.0", "192.0.2.1", "[::]", "example.com", "127.0.0.1.example.com"):
        with pytest.raises(InvalidRequest, match="can be reached by other machines"):
            mcp._address(f"{host}:8765")


def test_a_token_is_the_callers_or_made_anew(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setenv(mcp.TOKEN, "mine")
    assert ("mine", "") == (mcp._token(), capfd.readouterr().err)
    monkeypatch.setenv(mcp.TOKEN, "")
    first, second = mcp._token(), mcp._token()
    told = capfd.readouterr().err
    assert first != second
    assert min(len(first), len(second)) >= 40
    assert all(f"Authorization: Bearer {each}\n" in told for each in (first, second))


def test_an_image_is_fetched_here_and_never_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringfence.cli import image

    fetched: list[Any] = []
    monkeypatch.setattr(image, "needed", fetched.append)
    with pytest.raises(InvalidRequest) as refused:
        mcp._fetch_image({"server": "http://x", "pull": "always"})
    assert "--pull" == refused.value.field
    mcp._fetch_image({"server": "http://x", "image": "debian"})
    mcp._fetch_image({})
    assert [] == fetched
    for given in ({"image": "debian"}, {"pull": "never"}):
        mcp._fetch_image(given)
        assert given == fetched[-1]


def test_a_server_of_tools_has_its_sandboxes_from_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Any] = []
    stand_in: Any = ModuleType("ringfence.integrations.mcp.server")
    stand_in.serve_http = lambda origin, *how: served.append((origin, *how))
    stand_in.serve_stdio = lambda origin: served.append((origin,))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setenv(mcp.TOKEN, "mine")
    words = ["--server", "unix:/s", "--backend", "landlock", "--memory", "64m"]
    assert 0 == mcp.main(["--http", "127.0.0.1:8765", *words])
    origin, *how = served.pop()
    assert ["127.0.0.1", 8765, "mine"] == how
    options = origin.options
    assert ("unix:/s", "landlock", 64 << 20) == (
        origin.server, options["backend"], options["spec"].limits.memory_bytes,
    )  # fmt: skip
    assert 0 == mcp.main([])
    [origin] = served.pop()
    assert (None, {"spec"}) == (origin.server, {*origin.options})
    for wrong in (["--protect", "x"], ["--http", "0.0.0.0:1"], ["x"]):
        with pytest.raises(InvalidRequest):
            mcp.main(wrong)
    assert [] == served


# -- the command itself ----------------------------------------------------------------------------


def test_the_native_backend_is_begun_only_where_it_will_be_used() -> None:
    for words, begins in (
        (["run", "--", "x"], True), (["run", "x"], True), (["run", "--memory", "1g", "x"], True),
        (["run", "--backend", "gvisor", "x"], False), (["run", "--backend=gvisor", "--", "x"], False),
        (["run", "-h"], False), (["run", "--help"], False), (["run"], False),
        (["run", "--", "x", "--backend", "y"], True), (["run", "--", "--help"], True),
    ):  # fmt: skip
        assert begins == main._starts_native(words), words


def test_a_failure_is_one_line_and_the_code_of_ours(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def ends(error: BaseException) -> int:
        def fail(_argv: Any) -> int:
            raise error

        monkeypatch.setattr(main, "_dispatch", fail)
        return main.main()

    monkeypatch.setattr(sys, "argv", ["ringfence", "list", "--server", "x"])
    assert 125 == ends(InvalidRequest("is wrong", field="server", hint="do so"))
    assert "ringfence: --server: is wrong (do so)\n" == capfd.readouterr().err
    assert 125 == ends(ZeroDivisionError("by zero"))
    assert "internal error: ZeroDivisionError: by zero" in capfd.readouterr().err
    assert (130, "") == (ends(KeyboardInterrupt()), capfd.readouterr().err)
    with pytest.raises(SystemExit):
        ends(SystemExit(0))
    monkeypatch.setattr(main, "_dispatch", len)
    assert 3 == main.main()


def test_without_a_command_it_helps_and_that_is_a_mistake_unless_it_was_asked_for(
    capfd: Capture,
) -> None:
    for words, code in (
        ([], 125),
        (["help"], 0),
        (["-h"], 0),
        (["--help"], 0),
        (["help", "rm"], 0),
    ):
        assert code == main._dispatch(words)
        assert "ringfence" in capfd.readouterr().out
    for words in (["help", "nonesuch"], ["nonesuch"], ["--server", "list"]):
        with pytest.raises(InvalidRequest) as refused:
            main._dispatch(words)
        assert ("COMMAND", True) == (
            refused.value.field,
            bool(refused.value.hint) or "nonesuch" in words,
        )
    assert "options follow the command" in refused.value.hint


def test_closed_streams_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is opened next must not be taken for one of them."""
    kept = os.dup(0)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "stdin", None)
    try:
        os.close(0)
        main._open_standard_descriptors()
        there = os.readlink("/proc/self/fd/0")
        stdin: Any = sys.stdin
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert "/dev/null" == there
    assert isinstance(stdin, io.TextIOWrapper)
    assert before - 1 == len(os.listdir("/proc/self/fd"))
