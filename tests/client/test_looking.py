"""Looking through files, watching them, and what happens: local and remote, with and without `await`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ringfence import AsyncSandbox, Sandbox
from ringfence.client import AsyncClient, Client, RemoteSandbox
from ringfence.errors import FileError, FileNotFound, InvalidRequest, Unsupported

pytestmark = pytest.mark.anyone

AnySandbox = Sandbox | RemoteSandbox


@pytest.fixture(params=["local", "remote"])
def any_sandbox(request: pytest.FixtureRequest) -> Iterator[AnySandbox]:
    if request.param == "remote":
        yield request.getfixturevalue("sandbox")
        return
    with Sandbox.create() as sandbox:
        yield sandbox


@pytest.mark.full
def test_files_are_looked_through_where_they_are(any_sandbox: AnySandbox) -> None:
    files = any_sandbox.files
    files.write("src/deep/one.py", "first\nbuilt = 1\n", parents=True)
    files.write("src/two.txt", "Built here")

    found = files.glob("**/*.py", "./src")
    assert (["/home/sandbox/src/deep/one.py"], False) == (
        [each.path for each in found.items],
        found.truncated,
    )
    lines = files.search("built", "src", ignore_case=True)
    assert [("one.py", 2, 1, "built = 1"), ("two.txt", 1, 1, "Built here")] == [
        (each.path.rpartition("/")[2], each.line, each.column, each.text) for each in lines.items
    ]
    one = files.search("b.*t", "src", regex=True, ignore_case=True, limit=1)
    assert (1, True) == (len(one.items), one.truncated)
    assert 1 == len(files.search("b", "src", glob="**/*.py", limit=5).items)

    replaced = files.replace(["src/two.txt", "none"], "(B)uilt", "\\1roken", regex=True)
    assert [(1, True), (0, False)] == [
        (each.replacements, each.error is None) for each in replaced.items
    ]
    with pytest.raises(InvalidRequest, match="NUL") as refused:
        files.replace(["src/two.txt", "a\0b"], "here", "there")
    assert "paths[1]" == refused.value.field
    assert "Broken here" == files.read_text("src/two.txt")
    assert found.items == files.glob("./**/*.py", "src").items
    assert (list(found), len(found)) == (list(found.items), len(found.items))
    assert "1" in [each.name for each in files.glob("*", "/proc").items]
    assert files.glob("*/cwd", "/proc").items, "though nobody may know where it leads"
    for nowhere in ("/home/**", "../*", "a/../b"):  # would find nothing, whatever is there
        with pytest.raises(FileError, match="not a pattern of names below"):
            files.glob(nowhere)
    with pytest.raises(FileError, match=r"^\.: not a regular expression"):
        files.search("(", regex=True)
    with pytest.raises(FileNotFound):
        files.glob("*", "none")


_DEEP = """
import os
for name, levels in (("d", 600), ("e" * 250, 20)):
    os.chdir("/home/sandbox")
    for _ in range(levels):
        os.mkdir(name)
        os.chdir(name)
    open("needle", "w").write("needle")
"""


@pytest.mark.full
def test_what_lies_too_deep_is_told(any_sandbox: AnySandbox) -> None:
    """In levels, and in bytes of a path."""
    files = any_sandbox.files
    assert any_sandbox.exec(["python3", "-c", _DEEP]).ok

    for top in ("d", "e" * 250):
        found, lines = files.glob("**/needle", top), files.search("needle", top)
        assert [((), True), ((), True)] == [(each.items, each.too_deep) for each in (found, lines)]
        with pytest.raises(FileError, match="too deep"), files.watch(top, recursive=True):
            pass
    assert not files.glob("*").truncated
    files.make_dir("flat")
    assert not files.glob("**", "flat").too_deep


def test_parts_and_permissions_that_no_file_has_are_refused_alike(any_sandbox: AnySandbox) -> None:
    files = any_sandbox.files
    files.write("closed", b"content", mode=0o40)  # not even its owner may read it
    files.write("file", b"content")

    assert (0o40, b"") == (files.stat("closed").mode, files.read("file", max_bytes=0))
    for part in ({"offset": -1}, {"max_bytes": -1}):
        with pytest.raises(InvalidRequest) as refused:
            files.read("file", **part)
        assert next(iter(part)) == refused.value.field
    for mode in (0o4755, -1):
        with pytest.raises(InvalidRequest) as refused:
            files.write("other", b"", mode=mode)
        assert "mode" == refused.value.field
    assert not files.exists("other")


def test_changes_are_told_from_the_beginning_of_the_block(any_sandbox: AnySandbox) -> None:
    files = any_sandbox.files
    files.make_dir("seen")
    with files.watch("seen", recursive=True) as changes:
        any_sandbox.shell("echo 1 > seen/new; mkdir seen/below")
        kinds = []
        for change in changes:
            kinds.append((change.kind, change.path.rpartition("/")[2], change.is_directory))
            if change.is_directory:
                break
    assert ("created", "new", False) == kinds[0]
    assert ("written", "new", False) in kinds
    assert ("created", "below", True) == kinds[-1]

    with files.watch("seen") as changes:
        files.remove("seen", recursive=True)
        assert "deleted" in {
            change.kind for change in changes
        }  # and then there is nothing to watch
    with pytest.raises(FileNotFound), files.watch("seen"):
        pass


@pytest.mark.parametrize("where", ["local", "remote"])
async def test_the_same_with_await(where: str, async_client: AsyncClient) -> None:
    server = async_client if where == "remote" else None
    async with await AsyncSandbox.create(server=server) as sandbox:
        await sandbox.files.write("here.txt", "text")
        assert ["here.txt"] == [each.name for each in (await sandbox.files.glob("*.txt")).items]
        async with sandbox.files.watch(".") as changes:
            await sandbox.shell("echo 2 > other")
            async for change in changes:
                if change.kind == "written":
                    break
        assert "/home/sandbox/other" == change.path
        assert (await sandbox.capabilities()).syscall_filter_active


def test_events_are_followed_and_never_told_twice(client: Client) -> None:
    before = max((event.seq for event in client.events()), default=0)
    seen = []

    def follow() -> None:
        for event in client.follow_events(before):
            seen.append((event.kind, event.sandbox_id))
            if event.kind == "ended":
                return

    thread = threading.Thread(target=follow)
    thread.start()
    with client.create() as sandbox:
        sandbox.suspend()
        sandbox.resume()
    thread.join(60)

    mine = [kind for kind, sandbox_id in seen if sandbox_id == sandbox.id]
    assert ["created", "suspended", "active", "ended"] == mine
    told = [event.kind for event in client.events(before) if event.sandbox_id == sandbox.id]
    assert mine == told


def test_memory_is_saved_where_the_backend_can_and_otherwise_nothing_happens(
    any_sandbox: AnySandbox,
) -> None:
    with pytest.raises(Unsupported):
        any_sandbox.checkpoint()
    assert any_sandbox.exec(["true"]).ok
