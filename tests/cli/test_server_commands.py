"""The commands that speak to a server, as their users type them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence.cli.main import main
from tests.api.conftest import Daemon, common_daemon, daemon, start_daemon
from tests.cli.command import PATIENCE_S, RINGFENCE, environment, ringfence_command
from tests.cli.test_run_terminal import Terminal
from tests.features import require

pytestmark = pytest.mark.anyone

__all__ = ["common_daemon", "daemon", "start_daemon"]
Type = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="module", autouse=True)
def _user_namespaces() -> None:
    require("user namespaces")


@pytest.fixture(name="server")
def fixture_server(daemon: Daemon) -> str:
    return f"unix:{daemon.socket}"


@pytest.fixture(name="type_")
def fixture_type(
    server: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Type:
    """`type_("list", "--json")`: `ringfence list --json`, on the daemon of the module.

    In this process, which has read all its modules already; with `stdin` in one of its own.
    """
    monkeypatch.setenv("RINGFENCE_SERVER", server)

    def run(*args: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        if stdin is not None:
            return ringfence_command(*args, stdin=stdin)
        monkeypatch.setattr(sys, "argv", ["ringfence", *args])
        code = main()
        return subprocess.CompletedProcess(args, code, *capfdbinary.readouterr())

    return run


@pytest.fixture(name="sandbox")
def fixture_sandbox(type_: Type) -> Iterator[str]:
    made = type_("create", "--name", "mine", "--label", "team=a", "--ttl", "10m")
    assert 0 == made.returncode, made.stderr
    sandbox_id = made.stdout.decode().strip()
    yield sandbox_id
    assert 0 == type_("rm", sandbox_id).returncode


def test_a_name_stands_for_its_id_where_it_is_the_only_one(
    type_: Type, sandbox: str, tmp_path: Path
) -> None:
    assert b"42\n" == type_("exec", "mine", "--", "sh", "-c", "echo 42").stdout
    (tmp_path / "note").write_text("a note")
    assert 0 == type_("cp", str(tmp_path / "note"), "mine:note").returncode
    assert b"a note" == type_("cp", "mine:note", "-").stdout
    odd = type_("create", "--name", "Mine, too").stdout.decode().strip()  # no id looks like that
    assert [odd] == type_("rm", "Mine, too").stdout.decode().split()

    other = type_("create", "--name", "mine").stdout.decode().strip()
    refused = type_("rm", "mine")

    assert 125 == refused.returncode
    assert sandbox.encode() in refused.stderr
    assert other.encode() in refused.stderr
    assert [other] == type_("rm", other).stdout.decode().split()
    assert 125 == type_("exec", "nobody-s", "--", "true").returncode


def test_what_was_made_is_listed_and_ended(type_: Type, sandbox: str) -> None:
    assert sandbox in type_("list").stdout.decode()
    (told,) = json.loads(type_("list", "--label", "team=a", "--json").stdout)
    assert (sandbox, "mine", "provisioned") == (told["id"], told["name"], told["state"])
    assert b"" == type_("list", "-q", "--label", "team=b").stdout
    other = type_("create").stdout.decode().strip()
    assert [other] == type_("rm", other).stdout.decode().split()
    assert 0 == type_("rm", other).returncode  # twice is once
    missing = type_("rm", "sbx-nothing")
    assert (125, True) == (missing.returncode, b"sbx-nothing" in missing.stderr)


def test_a_name_and_labels_are_changed(type_: Type, sandbox: str) -> None:
    words = ("--name", "hers", "--label", "step=2", "--unlabel", "team", "mine", "--json")
    told = json.loads(type_("update", *words).stdout)

    assert (sandbox, "hers", {"step": "2"}) == (told["id"], told["name"], told["labels"])
    assert b"" == type_("update", "--label", "step=3", "hers").stdout
    assert sandbox in type_("list", "--label", "step=3", "-q").stdout.decode()


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 3", 3), ("kill -9 $$", 137), ("no-such-program", 127), ("exec sleep 60", 124)],
)
def test_exit_codes_pass_through(type_: Type, sandbox: str, script: str, code: int) -> None:
    options = ["--timeout", "0.3s"] if code == 124 else []

    assert code == type_("exec", *options, sandbox, "--", "sh", "-c", script).returncode


def test_streams_pass_through(type_: Type, sandbox: str) -> None:
    script = 'echo "$W $PWD"; cat; echo err >&2'
    data = os.urandom(300_000)
    ran = type_(
        *("exec", "--env", "W=w", "--workdir", "/tmp", sandbox, "--", "sh", "-c", script),
        stdin=data,
    )

    assert b"w /tmp\n" + data == ran.stdout
    assert b"err\n" == ran.stderr
    told = json.loads(type_("exec", "--json", sandbox, "--", "echo", "x").stdout)
    assert ("x\n", 0) == (told["stdout"], told["exit_code"])


def test_a_signal_reaches_the_command(server: str, sandbox: str) -> None:
    script = "trap 'echo got; exit 5' TERM; echo up; while :; do sleep 0.02; done"
    process = subprocess.Popen(
        [*RINGFENCE, "exec", sandbox, "--", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(RINGFENCE_SERVER=server),
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        assert b"up\n" == stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert b"got\n" == stdout.read()
    assert 5 == process.wait(PATIENCE_S)


def test_code_keeps_its_variables_between_commands(type_: Type, sandbox: str) -> None:
    assert 0 == type_("code", sandbox, "x = 41").returncode
    shown = type_("code", sandbox, "print('o')\nx + 1")
    assert (0, b"o\n42\n") == (shown.returncode, shown.stdout)
    failed = type_("code", sandbox, stdin=b"1 / 0")
    assert (1, True) == (failed.returncode, b"ZeroDivisionError" in failed.stderr)
    assert 124 == type_("code", "--timeout", "300ms", sandbox, "while True: pass").returncode

    form = json.loads(type_("code", "--json", sandbox, "x").stdout)
    assert "41" == form["results"][0]["data"]["text/plain"]
    assert form["context"] in type_("code", "-l", sandbox).stdout.decode()
    assert b"hi\n" == type_("code", "--language", "bash", sandbox, "echo hi").stdout
    contexts = json.loads(type_("code", "--list", "--json", sandbox).stdout)
    assert ["bash", "python"] == sorted(each["language"] for each in contexts)
    for each in contexts:
        assert 0 == type_("code", "--close", "--context", each["id"], sandbox).returncode
    assert 125 == type_("code", "--close", sandbox).returncode


def test_what_runs_in_the_background_is_followed(type_: Type, sandbox: str) -> None:
    script = "echo one; sleep 0.2; echo two; exit 4"
    exec_id = type_("exec", "-d", sandbox, "--", "sh", "-c", script).stdout.decode().strip()
    followed = type_("logs", "-f", sandbox)
    again = type_("logs", sandbox, exec_id)
    lines = type_("logs", "--json", sandbox).stdout.decode().splitlines()

    assert (4, b"one\ntwo\n") == (followed.returncode, followed.stdout)
    assert (0, b"one\ntwo\n") == (again.returncode, again.stdout)
    assert "end" == json.loads(lines[-1])["type"]
    assert exec_id in type_("logs", "-l", sandbox).stdout.decode()


def test_files_go_in_and_out(type_: Type, sandbox: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "file").write_bytes(b"\0content")
    (tree / "link").symlink_to("below/file")

    assert 0 == type_("cp", str(tree), f"{sandbox}:copy").returncode
    assert 0 == type_("cp", f"{sandbox}:copy", str(tmp_path / "back")).returncode
    assert b"\0content" == (tmp_path / "back" / "below" / "file").read_bytes()
    assert "below/file" == os.readlink(tmp_path / "back" / "link")
    assert 0 == type_("cp", "-", f"{sandbox}:from-stdin", stdin=b"piped").returncode
    assert b"piped" == type_("cp", f"{sandbox}:from-stdin", "-").stdout
    assert 0 == type_("cp", f"{sandbox}:from-stdin", str(tmp_path)).returncode
    assert b"piped" == (tmp_path / "from-stdin").read_bytes()
    for wrong in (("a", "b"), (f"{sandbox}:a", f"{sandbox}:b"), (f"{sandbox}:none", "-")):
        assert 125 == type_("cp", *wrong).returncode


def test_a_shell_is_one(server: str, sandbox: str) -> None:
    terminal = Terminal.__new__(Terminal)
    _open(terminal, server, "shell", sandbox)
    terminal.type(b"stty size; tty; echo a$((40 + 2))b\n")
    seen = terminal.read_until(b"a42b")
    assert b"33 99" in seen
    assert b"/dev/pts/" in seen
    terminal.resize(40, 120)
    os.kill(terminal.process.pid, signal.SIGWINCH)
    deadline = time.monotonic() + PATIENCE_S
    while b"40 120" not in terminal.seen:  # the size follows soon, not at once
        assert time.monotonic() < deadline
        terminal.seen = b""
        terminal.type(b"stty size; echo en''d\n")
        terminal.read_until(b"end")
    terminal.type(b"exit 6\n")
    assert 6 == terminal.wait()
    terminal.close()


def _open(terminal: Terminal, server: str, *words: str) -> None:
    """A terminal whose foreground job is another command than `run`."""
    import pty
    import termios

    terminal.master, terminal.slave = pty.openpty()
    terminal.resize(33, 99)
    terminal.before, terminal.seen = termios.tcgetattr(terminal.slave), b""
    terminal.process = subprocess.Popen(
        [*RINGFENCE, *words],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env=environment(TERM="vt100", RINGFENCE_SERVER=server),
        preexec_fn=terminal._take,  # noqa: PLW1509  nothing of ours runs beside it
    )


def test_snapshots_keys_and_the_pool(type_: Type, sandbox: str) -> None:
    type_("exec", sandbox, "--", "sh", "-c", "echo kept > ~/file")
    saved = type_("snapshot", "create", sandbox, "--meta", "step=3").stdout.decode().strip()
    type_("exec", sandbox, "--", "sh", "-c", "echo more >> ~/file")
    listed = type_("changes", "--since", saved, sandbox).stdout.decode()
    assert ["changed", "file", "10", "B", "/home/sandbox/file"] == listed.splitlines()[1].split()
    assert "+kept\n+more\n" in type_("changes", "--diff", sandbox).stdout.decode()
    assert json.loads(type_("changes", "--json", sandbox).stdout)["is_complete"]
    assert "step=3" in type_("snapshot", "list").stdout.decode()
    words = ("--name", "again", "--ttl", "1h", "--label", "step=4")
    again = type_("create", "--snapshot", saved, *words).stdout.decode().strip()
    (listed,) = json.loads(type_("list", "--label", "step=4", "--json").stdout)
    assert (again, "again") == (listed["id"], listed["name"])
    assert 0 < listed["expires_in_s"] <= 3600
    assert b"kept\n" == type_("exec", again, "--", "cat", "file").stdout
    assert 0 == type_("rm", again).returncode
    assert 0 == type_("snapshot", "rm", saved).returncode
    assert [] == json.loads(type_("snapshot", "list", "--json").stdout)

    bounds = (
        "--scope",
        "read_only",
        "--expires",
        "2d",
        "--max-sandboxes",
        "3",
        "--max-requests",
        "9",
    )
    key = json.loads(type_("keys", "create", "team", "--name", "ci", *bounds, "--json").stdout)
    listed = type_("keys", "list").stdout.decode()
    assert key["id"] in listed
    assert re.search(r" (2d|47h|48h)\n", listed)
    assert ("read_only", 3, 9) == (key["scope"], key["max_sandboxes"], key["max_requests"])
    again = type_("keys", "rotate", key["id"], "--overlap", "1m").stdout.decode().strip()
    assert again.startswith(f"rf_{key['id']}.")
    assert again != key["key"]
    assert 0 == type_("keys", "rm", key["id"]).returncode
    assert [] == json.loads(type_("keys", "list", "--json").stdout)

    assert 0 == type_("pool", "set", "max_warm=7").returncode
    assert 7 == json.loads(type_("pool", "--json").stdout)["config"]["max_warm"]


def test_what_is_used_is_told(type_: Type, sandbox: str) -> None:
    type_("exec", sandbox, "--", "true")
    told = json.loads(type_("top", "--json", "--label", "team=a").stdout)

    assert [(sandbox, 1)] == [(each["sandbox"]["id"], each["stats"]["execs"]) for each in told]
    assert sandbox in type_("top").stdout.decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("exec", "x"), "no command given"),
        (("exec",), "no command given"),
        (("rm",), "SANDBOX: is missing"),
        (("update", "--name", "x"), "SANDBOX: is missing"),
        (("update", "x"), "--name: is missing"),
        (("update", "--name", "x", "y", "z"), "unexpected argument"),
        (("create", "--label", "bare"), "not K=V"),
        (("create", "--snapshot", "x", "--memory", "1g"), "--memory"),
        (("keys", "forge"), "unknown verb 'forge'"),
        (("list", "surplus"), "unexpected argument"),
        (("logs",), "missing"),
        (("code",), "missing"),
        (("list", "--server", "ftp://x"), "is not a server address"),
        (("list", "--key-file", "/no/such/file"), "No such file"),
    ],
)
def test_mistakes_are_told(type_: Type, words: tuple[str, ...], said: str) -> None:
    told = type_(*words)

    assert 125 == told.returncode
    assert said in told.stderr.decode()
    assert 1 == len(told.stderr.decode().splitlines())


def test_sessions_are_left_and_come_back_to(type_: Type) -> None:
    def told(*words: str) -> str:
        ran = type_("session", *words)
        assert 0 == ran.returncode, ran.stderr
        return ran.stdout.decode().strip()

    session = told("acquire", "--meta", "why=test", "--label", "team=s", "--ttl", "10m")
    (view,) = json.loads(told("show", "--json", session))
    assert ({"why": "test"}, "active") == (view["metadata"], view["state"])
    assert b"42\n" == type_("exec", session, "--", "echo", "42").stdout
    for verb, state in (("detach", "detached"), ("suspend", "suspended"), ("resume", "active")):
        assert state in told(verb, session)
    assert session == told("attach", view["sandbox_id"])
    assert session in told("touch", session)
    assert "" == told("default")
    assert [session, session] == [told("default", session), told("default")]
    assert "" == told("default", "none")
    assert session in told("list", "--label", "team=s", "--state", "active")
    assert session not in told("list", "--label", "team=other")
    assert "terminated" in told("release", "--keep-alive", session)
    assert "terminated" in told("terminate", session)
    made = told("attach", "mine-alone", "--create", "--pids", "77")
    assert session != made
    assert "terminated" in told("release", made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), b"VERB"),
        (("aquire",), b"acquire"),
        (("detach",), b"ID"),
        (("detach", "sess-none"), b"sess-none"),
        (("acquire", "--keep-alive"), b"keep-alive"),
        (("attach", "x", "--memory", "1g"), b"memory"),
        (("touch", "x", "--label", "a=b"), b"label"),
        (("release", "x", "--state", "active"), b"state"),
    ],
)
def test_mistakes_with_sessions_are_told(type_: Type, words: tuple[str, ...], said: bytes) -> None:
    ran = type_("session", *words)

    assert (125, True) == (ran.returncode, said in ran.stderr), ran.stderr
