"""Uploads and downloads of E2B's agent, in one process: what is left where one breaks off."""

from __future__ import annotations

import asyncio
import gzip
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from ringfence import SandboxSpec
from ringfence.e2b import envd
from ringfence.e2b.notes import Notes
from ringfence.errors import PermissionDenied
from ringfence.model.spec import OWN_ROOT
from ringfence.sessions.live import Live
from tests.e2b.here import Backend, Here, RootedFiles
from tests.native.outside import same_descriptors

pytestmark = pytest.mark.anyone

PIECE = 1 << 20
BOUNDARY = "xYzZY"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


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


def token(here: Here, live: Live) -> dict[str, str]:
    return {"e2b-sandbox-id": live.sandbox_id, "x-access-token": here.shared.tokens.of(live)}


async def cleared_up() -> None:
    """Wait for what is removed beside the event loop."""
    for thread in threading.enumerate():
        if thread.name == "ringfence-later":
            thread.join(30)


def open_files(home: Path) -> list[str]:
    """What this process has open of the sandbox."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(home.parent.parent)):
            found.append(target)
    return found


async def upload(
    here: Here,
    live: Live,
    pieces: list[bytes],
    *,
    query: str = "path=/home/user/file",
    headers: dict[str, str] | None = None,
    breaks_off: bool = False,
    before_end: Callable[[], Any] | None = None,
) -> int:
    """Send it; return the status, 0 where nothing was answered."""
    sent = await here.raw(
        "POST",
        "/files",
        pieces,
        {**token(here, live), **(headers or {})},
        query=query,
        breaks_off=breaks_off,
        before_end=before_end,
    )
    await cleared_up()
    assert here.is_idle()
    return int(sent[0]["status"]) if sent else 0


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        ([], b"before"),
        ([10], b"before"),
        ([PIECE - 1], b"before"),
        ([PIECE // 2, PIECE // 2 - 1], b"before"),
        ([PIECE], None),
        ([PIECE // 2, PIECE // 2], None),
        ([PIECE, 10], None),
    ],
)
async def test_an_upload_that_breaks_off_leaves_what_was_there_or_nothing(
    here: Here, live: Live, home: Path, sizes: list[int], left: bytes | None
) -> None:
    """Up to a megabyte nothing was written; of what was, no part is left."""
    (home / "file").write_bytes(b"before")
    (home / "other").write_bytes(b"other")

    assert 0 == await upload(here, live, [bytes(size) for size in sizes], breaks_off=True)

    assert left == ((home / "file").read_bytes() if (home / "file").exists() else None)
    assert b"other" == (home / "other").read_bytes()
    assert [] == open_files(home)
    assert 200 == await upload(here, live, [bytes(size) for size in sizes]), "the control"
    assert bytes(sum(sizes)) == (home / "file").read_bytes()
    assert [] == open_files(home)


@pytest.mark.parametrize("is_form", [False, True])
async def test_an_upload_whose_request_is_cancelled_leaves_nothing(
    here: Here, live: Live, home: Path, is_form: bool
) -> None:
    """The server stops, or its key was removed."""
    waits = asyncio.Event()

    async def wait() -> None:
        waits.set()
        await asyncio.Event().wait()

    body = (part("file", b"")[:-2] if is_form else b"") + bytes(2 * PIECE)
    more: dict[str, Any] = {"query": "", "headers": FORM} if is_form else {}
    uploading = asyncio.ensure_future(upload(here, live, [body], before_end=wait, **more))
    await waits.wait()
    assert ["file"] == os.listdir(home), "the control"
    uploading.cancel()
    await asyncio.wait([uploading])
    await cleared_up()

    assert ([], []) == (os.listdir(home), open_files(home))
    assert here.is_idle()


async def test_a_long_upload_is_seen_as_it_grows(here: Here, live: Live, home: Path) -> None:
    """As with E2B, whose clients watch it; up to a megabyte waits in memory."""
    seen: list[int] = []

    async def look() -> None:
        seen.append((home / "file").stat().st_size)

    await upload(here, live, [bytes(PIECE), bytes(7)], before_end=look)
    assert [PIECE] == seen


class RootsFiles(RootedFiles):
    """Files of which one is root's: the sandbox's own user may not write it."""

    def open_write(self, path: str, **more: Any) -> BinaryIO:
        if path.endswith("of-root"):
            raise PermissionDenied(f"{path}: permission denied", path=path)
        return super().open_write(path, **more)

    def open_read(self, path: str, **more: Any) -> BinaryIO:
        if path.endswith("of-root"):
            raise PermissionDenied(f"{path}: permission denied", path=path)
        return super().open_read(path, **more)


class WithRoot(Backend):
    """Sandboxes that have a root of their own."""

    profile_names = (*Backend.profile_names, OWN_ROOT)

    def _make(self, spec: SandboxSpec, content: str | None) -> Any:
        made = super()._make(spec, content)
        made.files = RootsFiles(made.root, made._check_alive, made._scope)
        return made


@pytest.fixture
def rooted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setattr("tests.e2b.here.Backend", WithRoot)
    with ExitStack() as stack:
        yield Here(stack)


@pytest.mark.parametrize("size", [10, PIECE])
async def test_what_is_written_aside_for_another_user_goes_and_the_target_stays(
    rooted: Here, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = rooted.live(notes=Notes(), spec=SandboxSpec(profile=OWN_ROOT))
    root = Path(rooted.root(live))
    (target := root / "of-root").write_bytes(b"before")
    aside: list[str] = []

    async def look() -> None:
        aside.extend(os.listdir(root / "tmp"))

    query = "path=/of-root&username=root"
    await upload(rooted, live, [bytes(size)], query=query, breaks_off=True, before_end=look)

    assert (1 if size >= PIECE else 0) == len(aside), "the control"
    assert [] == os.listdir(root / "tmp")
    assert b"before" == target.read_bytes()
    aside.clear()
    refused = await upload(rooted, live, [bytes(size)], query="path=/of-root", before_end=look)
    assert 400 == refused, "the sandbox's own user may not"
    assert [] == aside, "nothing was written for it"
    # No command finds it here: what was put aside goes as well where it cannot be copied.
    monkeypatch.setattr(WithRoot, "check_user", lambda *_: None)
    query = f"path={target}&username=root"
    assert 400 == await upload(rooted, live, [bytes(size)], query=query)
    assert ([], b"before") == (os.listdir(root / "tmp"), target.read_bytes())


@pytest.mark.parametrize(
    ("user", "exits", "status", "users"),
    [
        ("root", [0], 200, ["root"]),
        ("alice", [0, 0], 200, ["alice", "root"]),
        ("alice", [1], 400, ["alice"]),
        ("alice", [44], 404, ["alice"]),
        ("alice", [0, 1], 400, ["alice", "root"]),
        ("user", [], 403, []),
    ],
)
async def test_what_another_user_may_read_is_read_from_a_copy_that_goes_at_once(
    rooted: Here,
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    exits: list[int],
    status: int,
    users: list[str],
) -> None:
    """Who may not read it is refused before root copies anything."""
    live = rooted.live(notes=Notes(), spec=SandboxSpec(profile=OWN_ROOT))
    root, asked = Path(rooted.root(live)), []
    (root / "of-root").write_bytes(b"secret")
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("alice:x:1000:1000::/home/alice:/bin/sh\n")

    def run(command: list[str], *, user: str) -> Any:
        script, path, aside = command[2], command[4], command[5]
        asked.append(user)
        code = exits[len(asked) - 1]
        if not code and "cat" in script:
            assert "root" == user
            (root / aside[1:]).write_bytes((root / path[1:]).read_bytes())
        return SimpleNamespace(exit_code=code, ok=not code, stderr_text="may not")

    monkeypatch.setattr(live.sandbox, "exec", run)
    query = {"path": "/of-root", "username": user}
    answer = await rooted.ask("GET", "/files", headers=token(rooted, live), params=query)
    assert (status, users) == (answer.status_code, asked), answer.text
    assert (b"secret" == answer.content) == (status == 200)
    assert [] == os.listdir(root / "tmp")
    assert [] == open_files(root / "home/user")


async def test_a_full_disk_is_told_and_nothing_stays_open(
    here: Here, live: Live, home: Path
) -> None:
    with same_descriptors():
        for size in (10, PIECE):
            (home / "full").symlink_to("/dev/full")
            assert 507 == await upload(here, live, [bytes(size)], query="path=full")
            assert [] == os.listdir(home), "no part of it is left"


def part(name: str, data: bytes, *, is_file: bool = True) -> bytes:
    named = f'; filename="{name}"' if is_file else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"{named}\r\n\r\n'
    return head.encode() + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


@pytest.mark.parametrize("size", [10, PIECE + 10])
async def test_of_several_files_those_that_were_whole_stay(
    here: Here, live: Live, home: Path, size: int
) -> None:
    (home / "b").write_bytes(b"before")
    body = part("a", b"first") + part("b", bytes(size))
    await upload(here, live, [body], query="", headers=FORM, breaks_off=True)

    assert b"first" == (home / "a").read_bytes()
    assert (b"before" if size < PIECE else None) == (
        (home / "b").read_bytes() if (home / "b").exists() else None
    )
    assert [] == open_files(home)


@pytest.mark.parametrize(
    ("query", "body", "status", "names"),
    [
        ("", part("a", b"1") + part("d/b", b"2") + END, 200, {"a", "d"}),
        ("path=c", part("a", b"1") + END, 200, {"c"}),
        ("path=c", part("a", b"1") + part("b", b"2") + END, 400, {"c"}),
        ("", part("x", b"1", is_file=False) + part("a", b"1") + END, 200, {"a"}),
        ("", part("x", b"1", is_file=False) + END, 400, set()),
        ("", END, 400, set()),
        ("", b"x" + part("a", b"1") + END, 400, set()),
        ("", part("a", b"1"), 400, set()),
        ("", b"no form at all, but long enough for one", 400, set()),
    ],
)
async def test_a_form_has_files_each_with_a_place(
    here: Here, live: Live, home: Path, query: str, body: bytes, status: int, names: set[str]
) -> None:
    assert status == await upload(here, live, [body], query=query, headers=FORM)
    assert names == {*os.listdir(home)}
    assert [] == open_files(home)


async def test_a_form_has_so_many_files(
    here: Here, live: Live, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1000 == envd._MOST_FILES
    monkeypatch.setattr(envd, "_MOST_FILES", 3)
    body = b"".join(part(str(each), b"1") for each in range(3))
    assert 200 == await upload(here, live, [body + END], query="", headers=FORM)
    more = body + part("3", b"1") + END
    assert 413 == await upload(here, live, [more], query="", headers=FORM)
    assert {"0", "1", "2"} == {*os.listdir(home)}


async def test_a_body_is_uncompressed_or_gzip_and_whole(here: Here, live: Live, home: Path) -> None:
    data = gzip.compress(b"text")
    for encoding, body, status in (
        ("gzip", data, 200),
        ("identity", data, 200),
        ("gzip", data[:-1], 400),
        ("gzip", b"text", 400),
        ("br", data, 415),
        ("GZIP", data, 415),
    ):
        found = await upload(here, live, [body], headers={"content-encoding": encoding})
        assert status == found, encoding
    assert data == (home / "file").read_bytes(), "what was refused has changed nothing"


@pytest.mark.parametrize("query", ["", "path=", "path=/home/user"])
async def test_an_upload_needs_a_place_that_is_a_file(here: Here, live: Live, query: str) -> None:
    assert 400 == await upload(here, live, [b"1"], query=query)


async def test_what_is_read_and_what_is_not(here: Here, live: Live, home: Path) -> None:
    (home / "file").write_bytes(b"0123456789")
    headers = token(here, live)

    async def read(path: str, **more: str) -> Any:
        answered = await here.ask("GET", f"/files?path={path}", headers={**headers, **more})
        assert [] == open_files(home), path
        return answered

    assert b"0123456789" == (await read("file")).content
    assert 'inline; filename="file"' == (await read("file")).headers["content-disposition"]
    part = await read("file", range="bytes=2-4")
    assert (206, b"234") == (part.status_code, part.content)
    for asked, status in (
        ("bytes=9-", 206),
        ("bytes=10-", 416),
        ("bytes=-10", 200),
        ("x=1-2", 200),
    ):
        assert status == (await read("file", range=asked)).status_code, asked
    changed = await read("file", **{"range": "bytes=2-4", "if-range": '"other"'})
    assert (200, b"0123456789") == (changed.status_code, changed.content)
    for path, status in (("/home/user", 400), ("gone", 404), ("file/x", 404), ("", 400)):
        assert status == (await read(path)).status_code, path


@pytest.mark.parametrize(
    ("accepts", "is_gzip"),
    [
        ("gzip", True),
        (" gzip ", True),
        ("gzip, br", False),
        ("identity", False),
        ("gzip;q=0", False),
    ],
)
async def test_a_file_is_compressed_where_the_client_takes_nothing_else(
    here: Here, live: Live, home: Path, accepts: str, is_gzip: bool
) -> None:
    (home / "file").write_bytes(b"zip" * 1000)
    headers = {**token(here, live), "accept-encoding": accepts}
    answered = await here.ask("GET", "/files?path=file", headers=headers)
    assert is_gzip == (answered.headers.get("content-encoding") == "gzip")
    assert is_gzip != ("content-length" in answered.headers)
    assert b"zip" * 1000 == answered.content
    part = await here.ask("GET", "/files?path=file", headers={**headers, "range": "bytes=0-1"})
    assert "content-encoding" not in part.headers
    assert (206, b"zi") == (part.status_code, part.content)


async def test_the_boot_id_follows_from_the_sandbox_and_its_starts(here: Here, live: Live) -> None:
    """Where the kernel has none for it, as gVisor's; with a root of its own the file is not there."""
    path = "/files?path=/proc/sys/kernel/random/boot_id"
    first = (await here.ask("GET", path, headers=token(here, live))).text
    live.metadata = Notes(boots=1).written({})
    other = here.live(notes=Notes())
    found = [
        (await here.ask("GET", path, headers=token(here, each))).text for each in (live, other)
    ]
    assert 3 == len({first, *found})
    assert all(len(each) == 37 for each in (first, *found))


async def test_what_the_agent_tells_of_itself(here: Here, live: Live) -> None:
    headers = token(here, live)
    assert 204 == (await here.ask("GET", "/health", headers=headers)).status_code
    assert 403 == (await here.ask("POST", "/init", headers=headers)).status_code
    assert {} == (await here.ask("GET", "/envs", headers=headers)).json()
    with_env = here.live(notes=Notes(), spec=SandboxSpec(env={"A": "b"}))
    shown = await here.ask("GET", "/envs", headers=token(here, with_env))
    assert {"A": "b"} == shown.json()
    told = (await here.ask("GET", "/metrics", headers=headers)).json()
    assert told["cpu_count"] >= 1


async def test_metadata_of_a_file_go_with_what_replaces_it(
    here: Here, live: Live, home: Path
) -> None:
    (home / "file").touch()
    try:
        os.setxattr(home / "file", "user.try", b"")
    except OSError:
        pytest.skip("no extended attributes here")
    os.removexattr(home / "file", "user.try")
    for headers, names in (({"x-metadata-by": "ann"}, ["user.e2b.by"]), ({}, [])):
        assert 200 == await upload(here, live, [b"1"], query="path=file", headers=headers)
        assert names == os.listxattr(home / "file")


async def test_a_sandbox_that_has_ended_by_itself_is_not_healthy(here: Here, live: Live) -> None:
    headers = token(here, live)
    assert 204 == (await here.ask("GET", "/health", headers=headers)).status_code
    live.inner.terminate()
    for _ in range(2):
        assert 502 == (await here.ask("GET", "/health", headers=headers)).status_code


def test_a_copy_of_what_only_root_may_read_is_its_receivers_alone_or_not_there(
    tmp_path: Path,
) -> None:
    """Other users inside may list the directory of copies."""
    source, aside = tmp_path / "source", tmp_path / "aside"
    source.write_text("secret")
    source.chmod(0o644)

    def take(path: Path, reference: Path) -> int:
        command = ["/bin/sh", "-c", envd._TAKE, "sh", str(path), str(aside), str(reference)]
        before = os.umask(0)
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        finally:
            os.umask(before)
        return done.returncode

    assert 0 == take(source, tmp_path)
    assert ("secret", 0o600) == (aside.read_text(), stat.S_IMODE(aside.stat().st_mode))
    aside.unlink()
    assert 44 == take(tmp_path / "none", tmp_path)
    assert 1 == take(source, tmp_path / "none")
    assert not aside.exists(), "of what could not be given away nothing is left"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain-1.txt", "plain-1.txt"),
        ('a"b', "a?b"),
        ("a\nb: c", "a?b: c"),
        ("a\\b", "a?b"),
        ("é", "?"),
    ],
)
async def test_a_name_of_a_file_ends_no_field_of_the_answer(
    here: Here, live: Live, home: Path, name: str, shown: str
) -> None:
    (home / name).write_bytes(b"x")
    query = {"path": name}
    answer = await here.ask("GET", "/files", headers=token(here, live), params=query)
    assert (200, b"x") == (answer.status_code, answer.content)
    assert f'inline; filename="{shown}"' == answer.headers["content-disposition"]
