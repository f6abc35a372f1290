"""Odd names, sizes, limits and orders by E2B's own SDK, and the errors that it makes of our answers."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxQuery,
    TimeoutException,
)
from tests.suites.remote import serving_e2b

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
METADATA = {"ü": "漢 字", "empty": "", "signs": "a=b&c d"}
NAMES = [
    "ü 漢.txt", ".dot", "a b", "q?x=1&y#z%20", "new\nline", "-dash", "'\"`$(id)", "trailing ", "%2e%2e",
    "x" * 255,
]  # fmt: skip


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """A sandbox of the module."""
    with serving_e2b():
        envs = {"LINES": "a\nb", "U": "ü", "E": ""}
        with Sandbox.create(timeout=300, metadata=METADATA, envs=envs) as made:
            yield made
        gc.collect()


def test_texts_are_kept_as_they_are(box: Sandbox) -> None:
    assert METADATA == box.get_info().metadata
    printed = box.commands.run('printf "%s|%s|%s|%s" "$LINES" "$U" "$E" "$X"', envs={"X": "=\n"})
    assert "a\nb|ü||=\n" == printed.stdout
    found = Sandbox.list(query=SandboxQuery(metadata=METADATA)).next_items()
    assert [box.sandbox_id] == [each.sandbox_id for each in found]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_any_name(box: Sandbox, name: str) -> None:
    files = box.files
    assert name == files.write(name, "c").name
    assert ("c", True) == (files.read(name), files.exists(name))
    assert name in [each.name for each in files.list(".")]
    files.remove(name)
    assert not files.exists(name)


def test_sizes_and_paths(box: Sandbox) -> None:
    files = box.files
    files.write("empty", "")
    assert ("", b"") == (files.read("empty"), files.read("empty", format="bytes"))
    deep = "/".join(["d" * 200] * 15) + "/f"
    files.write(deep, b"\0\xff")
    assert b"\0\xff" == files.read(deep, format="bytes")
    for path in ("x" * 256, "/".join(["d" * 200] * 30)):
        with pytest.raises(InvalidArgumentException, match="longer"):
            files.write(path, "1")
    assert 20_000_000 == len(box.commands.run("head -c 20000000 /dev/zero | tr '\\0' x").stdout)


def test_what_files_refuse(box: Sandbox) -> None:
    files = box.files
    files.write("/tmp/afile", "x")
    box.commands.run("mkfifo pipe; ln -s loop loop; ln -s /tmp/afile link")
    assert ("x", "/tmp/afile") == (files.read("link"), files.get_info("link").symlink_target)
    for call in (files.read, files.list, files.watch_dir, lambda path: files.rename(path, "b")):
        with pytest.raises(NotFoundException, match="does not exist"):
            call("nowhere")
    for call, path, why in [
        (files.read, "/home/user", "is a directory"),
        (files.read, "pipe", "not a regular file"),
        (files.list, "/tmp/afile", "not a directory"),
        (files.watch_dir, "/tmp/afile", "not a directory"),
        (files.make_dir, "/tmp/afile", "not a directory"),
        (lambda path: files.write(path, "1"), "/tmp", "is a directory"),
        (lambda path: files.write(path, "1"), "/tmp/afile/x", "Not a directory"),
        (lambda path: files.list(path, depth=0), ".", "at least"),
    ]:
        with pytest.raises(InvalidArgumentException, match=why):
            call(path)


def test_ends_of_commands(box: Sandbox) -> None:
    commands = box.commands
    assert "end\n" == commands.run("cat; echo end").stdout, "no stdin is an empty one"
    assert "k\n" == commands.run("sleep 1; echo k", timeout=0).stdout
    for script, code in [("exit 255", 255), ("nosuch", 127), ("kill -TERM $$", -1)]:
        with pytest.raises(CommandExitException) as failed:
            commands.run(script)
        assert code == failed.value.exit_code
    with pytest.raises(CommandExitException) as failed:
        commands.run("setsid sh -c 'sleep 0.1; exit 3'")
    assert 3 == failed.value.exit_code
    with pytest.raises(TimeoutException):
        commands.run("sleep 4471 & sleep 4471", timeout=1)
    assert "" == commands.run("pgrep -f '[s]leep 4471' || true").stdout
    handle = commands.run("sleep 60", background=True)
    assert [True, False, False] == [handle.kill(), handle.kill(), commands.kill(999_999)]
    for call in (commands.connect, lambda pid: commands.send_stdin(pid, "x")):
        with pytest.raises(NotFoundException, match="not found"):
            call(handle.pid)
    deaf = commands.run("sleep 60", background=True, stdin=False)
    with pytest.raises(SandboxException, match="stdin=True"):
        commands.send_stdin(deaf.pid, "x")
    assert deaf.kill()


def test_who_and_where(box: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="'/no/where' does not exist"):
        box.commands.run("true", cwd="/no/where")
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-x'"):
        box.commands.run("true", user="nobody-x")
    box.files.make_dir("below")
    assert "/home/user/below\n" == box.commands.run("pwd", cwd="below").stdout


def test_watchers_of_one_directory(box: Sandbox) -> None:
    box.files.make_dir("watched")
    watchers = [box.files.watch_dir("watched", recursive=True) for _ in range(6)]  # 8 are the bound
    box.files.write("watched/deep/ü", "1")
    for watcher in watchers:
        names: set[str] = set()
        until = time.monotonic() + 20
        while "deep/ü" not in names and time.monotonic() < until:
            names |= {each.name for each in watcher.get_new_events()}
        assert "deep/ü" in names
        watcher.stop()


def test_a_terminal_is_gone_after_its_end(box: Sandbox) -> None:
    pty = box.pty.create(PtySize(24, 80), cwd="/tmp", envs={"V": "1"})
    seen = bytearray()
    box.pty.send_stdin(pty.pid, b"echo $V$PWD; exit 3\n")
    with pytest.raises(CommandExitException) as failed:
        pty.wait(on_pty=seen.extend)
    assert 3 == failed.value.exit_code
    assert b"1/tmp" in seen
    assert not box.pty.kill(pty.pid)


def test_what_the_control_plane_refuses(box: Sandbox) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"template": "nowhere"}, "template 'nowhere' not found"),
        ({"timeout": -1}, "timeout: -1 seconds"),
        ({"timeout": 10**9}, "timeout: 1000000000 seconds"),
        ({"metadata": {"a": 5}}, "metadata: every value must be a string"),
        ({"envs": {"1x": "a"}}, "'1x' is not a variable name"),
        ({"mcp": {"x": {}}}, "MCP gateway is not supported"),
    ]
    for options, why in refused:
        with pytest.raises(SandboxException, match=why):
            Sandbox.create(**options)
    for seconds in (-1, 10**9):
        with pytest.raises(SandboxException, match=f"timeout: {seconds} seconds"):
            box.set_timeout(seconds)
    for name in ("nowhere", "../x", "ü", "x" * 300):
        with pytest.raises(NotFoundException):
            Sandbox.connect(name)


def test_pages_end(box: Sandbox) -> None:
    made = [Sandbox.create(metadata={"page": "x y&z"}) for _ in range(3)]
    pages = Sandbox.list(query=SandboxQuery(metadata={"page": "x y&z"}), limit=2)
    found = [pages.next_items(), pages.next_items()]
    assert ([2, 1], False) == ([len(each) for each in found], pages.has_next)
    assert {each.sandbox_id for each in made} == {each.sandbox_id for each in found[0] + found[1]}
    assert box.sandbox_id not in [each.sandbox_id for each in found[0]]
    for each in made:
        assert each.kill()
