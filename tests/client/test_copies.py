"""Files that are copied through connections that break, and what that leaves on this machine."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import copies
from ringfence.client._sync import files as remote_files
from ringfence.errors import (
    FileError,
    FileExists,
    FileNotFound,
    InvalidRequest,
    IoError,
    NotADirectory,
    PermissionDenied,
    RingfenceError,
    ServerUnreachable,
)
from ringfence.model.files import DIRECTORY, FILE
from tests.client.scripted import Answer, Request, as_json, problem, served, without_pauses
from tests.client.test_asked_again import sandbox_of, sandbox_view

pytestmark = pytest.mark.anyone

MIB = 1 << 20


@pytest.fixture(name="waits", autouse=True)
def fixture_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return without_pauses(monkeypatch)


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """Afterwards there are as many descriptors as before, and no thread of a copy."""
    before = descriptors()
    yield
    assert before == descriptors()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"ringfence-upload", "ringfence-download"}


def stat_of(kind: str, **changes: Any) -> Answer:
    form = {"path": "/f", "name": "f", "kind": kind, "size_bytes": 1, "mode": 0o644, "mtime_s": 1.0}
    return as_json({**form, **changes})


# -- into the sandbox ------------------------------------------------------------------------------


@pytest.mark.parametrize("append", [False, True])
def test_an_append_is_sent_once_and_a_whole_file_as_often_as_it_takes(
    append: bool, tmp_path: Path
) -> None:
    """Of an answer that is lost it is unknown what was written."""
    data = os.urandom(3 * MIB + 1)

    def script(request: Request) -> Answer | None:
        is_lost = request.body and sum(1 for each in server.requests if each.body) <= 1
        return None if is_lost else Answer()

    with served(tmp_path / "s", script) as (client, server):
        file = sandbox_of(client).files.open_write("f", append=append, mode=0o640)
        file.write(data)
        if append:
            with pytest.raises(ServerUnreachable):
                file.close()
        else:
            file.close()
        file.close()  # once more sends nothing more
        assert file.closed
        first, *sent = server.requests
    assert ({"path": "f", "append": "true", "mode": "640"}, b"") == (first.query, first.body)
    assert [data] * (1 if append else 2) == [each.body for each in sent]
    assert {(str(append).lower(), "640")} == {
        (each.query["append"], each.query["mode"]) for each in sent
    }


def test_a_file_whose_writing_failed_here_is_not_sent(tmp_path: Path) -> None:
    with served(tmp_path / "s", lambda _: Answer()) as (client, server):
        files = sandbox_of(client).files
        with suppress(KeyError), files.open_write("f") as file:
            file.write(b"half")
            raise KeyError
        assert (file.closed, 1) == (True, len(server.requests))
        with files.open_write("f") as file:
            file.write(b"whole")
        assert [b"", b"", b"whole"] == [each.body for each in server.requests]


def test_a_file_is_sent_from_its_beginning_each_time(tmp_path: Path) -> None:
    data, seen = os.urandom(2 * MIB + 7), list[int]()
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "file").chmod(0o4751)

    def script(_: Request) -> Answer | None:
        return None if len(server.requests) < 3 else Answer()

    with nothing_is_left(), served(tmp_path / "s", script, retries=2) as (client, server):
        sandbox_of(client).files.upload(
            str(tmp_path / "file"), "f", progress=lambda count, _: seen.append(count)
        )
    assert [data] * 3 == [each.body for each in server.requests]
    assert {("f", "false", "751")} == {
        (each.query["path"], each.query["append"], each.query["mode"]) for each in server.requests
    }
    assert [MIB, 2 * MIB, len(data)] * 3 == seen
    with served(tmp_path / "t", script) as (client, server), pytest.raises(FileNotFound):
        sandbox_of(client).files.upload(str(tmp_path / "none"), "f")
    assert [] == server.requests


def test_a_tree_is_one_stream_and_its_errors_are_told(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "large").write_bytes(bytes(3 * MIB))
    with nothing_is_left(), served(tmp_path / "s", lambda _: Answer()) as (client, server):
        sandbox_of(client).files.upload(str(tree), "to")
        (sent,) = server.requests
    assert ("PUT", "to") == (sent.method, sent.query["path"])
    assert "application/x-tar" == sent.headers["content-type"]
    with tarfile.open(fileobj=io.BytesIO(sent.body)) as tar:
        assert {".": None, "d": None, "d/large": 3 * MIB} == {
            os.path.normpath(each.name): each.size if each.isreg() else None for each in tar
        }
    answers = [problem(403, "permission_denied"), None]
    for answer, error in zip(answers, (PermissionDenied, ServerUnreachable), strict=True):
        with (
            nothing_is_left(),
            served(tmp_path / error.__name__, lambda _, it=answer: it) as (client, server),  # type: ignore[misc]
            pytest.raises(error),
        ):
            sandbox_of(client).files.upload(str(tree), "to")
        assert 1 == len(server.requests)


def test_a_server_that_reads_no_further_ends_the_packing(tmp_path: Path) -> None:
    """The rest of the tree does not fit into the pipe, and its writer must not wait for ever."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "large").write_bytes(bytes(8 * MIB))

    class Refusing:
        def request(self, *_: Any, content: Any, **__: Any) -> None:
            next(iter(content()))
            raise PermissionDenied("no")

    with nothing_is_left(), pytest.raises(PermissionDenied):
        copies.upload(Refusing(), "/s", str(tree), "to", None)  # type: ignore[arg-type]


def test_a_tree_that_cannot_be_read_whole_is_not_sent_as_if_it_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(fd: int, *_: Any, **__: Any) -> None:
        os.write(fd, b"half")
        raise PermissionError(errno.EACCES, "Permission denied", "/tree/closed")

    class Taking:
        def request(self, *_: Any, content: Any, **__: Any) -> None:
            for piece in content():
                taken.append(piece)

    taken: list[bytes] = []
    monkeypatch.setattr("ringfence.launcher.helpers.trees.pack", pack)
    with nothing_is_left(), pytest.raises(FileError, match="/tree/closed: Permission denied"):
        copies.upload(Taking(), "/s", str(tmp_path), "to", None)  # type: ignore[arg-type]
    assert [b"half"] == taken


@pytest.mark.parametrize("mode", [-1, 0o1000, True, "644"])
def test_permissions_that_no_file_has_are_refused_before_anything_is_sent(mode: Any) -> None:
    assert "777" == copies.write_params("f", append=False, mode=0o777)["mode"]
    with pytest.raises(InvalidRequest):
        copies.write_params("f", append=False, mode=mode)


# -- out of the sandbox ----------------------------------------------------------------------------


def content(data: bytes, cuts: list[int], tag: str = "one") -> Any:
    """A script that sends `data`; each connection breaks off after so many more bytes."""

    def script(request: Request) -> Answer:
        if request.path.endswith("/stat"):
            return stat_of(FILE)
        start = int(request.headers.get("range", "bytes=0-")[6:-1])
        part = data[start:]
        sent = part[: cuts.pop(0)] if cuts else part
        return Answer(sent, 206 if start else 200, {"etag": tag}, len(part))

    return script


HOLES = {
    "at the beginning": bytes(2 * MIB) + b"end",
    "in the middle": b"a" * MIB + bytes(2 * MIB) + b"end",
    "at the end": b"begin" + bytes(3 * MIB),
    "alone": bytes(3 * MIB),
    "none": os.urandom(3 * MIB + 5),
    "single zeros": b"\0x\0",
    "empty": b"",
}


@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("cuts", [[], [MIB], [MIB, MIB], [MIB + 1, MIB + 2]])
def test_zeros_become_holes_and_stay_zeros(holes: str, cuts: list[int], tmp_path: Path) -> None:
    data = HOLES[holes]
    with nothing_is_left(), served(tmp_path / "s", content(data, [*cuts])) as (client, server):
        sandbox_of(client).files.download("f", str(tmp_path / "file"))
    assert data == (tmp_path / "file").read_bytes()
    ranges = [each.headers.get("range") for each in server.requests[1:]]
    assert ranges[0] is None
    assert len(ranges) == len(set(ranges)), "each connection goes on where the last one broke"
    if holes == "alone" and not cuts:
        assert 0 == os.stat(tmp_path / "file").st_blocks
    with served(tmp_path / "t", content(data, [*cuts])) as (client, server):
        files = sandbox_of(client).files
        with files.open_read("f") as file:
            assert data == file.read()
        assert data == files.read("f")


@pytest.mark.parametrize("way", ["download", "open_read", "read"])
def test_a_file_that_became_a_shorter_one_has_no_rest_of_the_former(
    way: str, tmp_path: Path
) -> None:
    first, second = b"a" * (3 * MIB), b"b" * MIB + b"c"

    def script(request: Request) -> Answer:
        if request.path.endswith("/stat"):
            return stat_of(FILE)
        if "range" not in request.headers:
            return Answer(first[: 2 * MIB], 200, {"etag": "one"}, len(first))
        assert "one" == request.headers["if-range"]
        return Answer(second, 200, {"etag": "two"})

    with nothing_is_left(), served(tmp_path / "s", script) as (client, server):
        files = sandbox_of(client).files
        if way == "download":
            files.download("f", str(tmp_path / "file"))
            found = (tmp_path / "file").read_bytes()
        elif way == "read":
            found = files.read("f")
        else:
            with files.open_read("f") as file:
                found = file.read()
    assert second == found
    assert 2 == sum(1 for each in server.requests if each.path.endswith("/content"))


@pytest.mark.parametrize("way", ["download", "open_read", "read"])
def test_connections_that_bring_nothing_end_the_copy_and_leave_no_file(
    way: str, tmp_path: Path, waits: list[float]
) -> None:
    data, cuts = os.urandom(5 * MIB), [2 * MIB, 0, 0, MIB, 0, 0, 0, 0, 0, 0]
    with (
        nothing_is_left(),
        served(tmp_path / "s", content(data, cuts)) as (client, server),
    ):
        more = [str(tmp_path / "file")] if way == "download" else []
        with pytest.raises(ServerUnreachable):
            getattr(sandbox_of(client).files, way)("f", *more)
    assert not (tmp_path / "file").exists()
    asked = [each.headers.get("range") for each in server.requests if "content" in each.path]
    assert [None, *[f"bytes={2 * MIB}-"] * 3, *[f"bytes={3 * MIB}-"] * 3] == asked
    assert 6 == len(waits)


def test_an_error_of_the_server_is_one_of_the_copy(tmp_path: Path) -> None:
    answers = iter([stat_of(FILE), problem(403, "permission_denied")] * 2)
    (tmp_path / "mine").write_text("mine")
    with nothing_is_left(), served(tmp_path / "s", lambda _: next(answers)) as (client, _server):
        files = sandbox_of(client).files
        with pytest.raises(PermissionDenied):
            files.download("f", str(tmp_path / "file"))
        assert not (tmp_path / "file").exists()
        assert stat_of(FILE).body == next(answers).body
        with pytest.raises(PermissionDenied):
            files.open_read("f")
    with served(tmp_path / "t", lambda _: stat_of(FILE)) as (client, server):
        with pytest.raises(FileExists):
            sandbox_of(client).files.download("f", str(tmp_path / "mine"))
        with pytest.raises(FileNotFound):
            sandbox_of(client).files.download("f", str(tmp_path / "none" / "file"))
    assert ["GET stat"] * 2 == server.asked
    assert "mine" == (tmp_path / "mine").read_text()


# -- trees out of the sandbox ----------------------------------------------------------------------


def tree_of(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


TREE = {"a": b"1" * 2000, "b": os.urandom(2 * MIB), "c": b"3"}


def trees(cuts: list[int | None]) -> Any:
    """A script that sends TREE; the connections break off after so many bytes, None: with no answer."""
    whole = tree_of(**TREE)

    def script(request: Request) -> Answer | None:
        if request.path.endswith("/stat"):
            return stat_of(DIRECTORY)
        if not cuts:
            return Answer(whole)
        cut = cuts.pop(0)
        return None if cut is None else Answer(whole[:cut], length=len(whole))

    return script


@pytest.mark.parametrize("cuts", [[], [5000], [MIB, 5000], [1, MIB, 5000], [0, 0, 0], [-1], [-512]])
def test_a_tree_is_asked_for_again_as_a_whole(
    cuts: list[int | None], tmp_path: Path, waits: list[float]
) -> None:
    """Four times at most. What an earlier attempt made is replaced. The last byte counts as well."""
    failures = len(cuts)
    with nothing_is_left(), served(tmp_path / "s", trees(cuts)) as (client, server):
        sandbox_of(client).files.download("d", str(tmp_path / "tree"))
    assert TREE == {each.name: each.read_bytes() for each in (tmp_path / "tree").iterdir()}
    assert ["GET stat", *["GET tree"] * (failures + 1)] == server.asked
    assert failures == len(waits)
    with (
        nothing_is_left(),
        served(tmp_path / "t", trees([5000] * 9)) as (client, server),
        pytest.raises(ServerUnreachable),
    ):
        sandbox_of(client).files.download("d", str(tmp_path / "other"))
    assert 4 == server.asked.count("GET tree")


def test_a_tree_replaces_only_what_it_has_made(tmp_path: Path) -> None:
    local = tmp_path / "tree"
    local.mkdir()
    (local / "c").write_text("mine")
    with nothing_is_left(), served(tmp_path / "s", trees([5000])) as (client, _server):
        files = sandbox_of(client).files
        with pytest.raises(FileExists, match="c"):
            files.download("d", str(local))
        assert "mine" == (local / "c").read_text()
        files.download("d", str(local), overwrite=True)
    assert TREE == {each.name: each.read_bytes() for each in local.iterdir()}


def test_a_tree_that_fails_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    garbage = iter([stat_of(DIRECTORY), Answer(b"x" * 4096)])
    refused = iter([stat_of(DIRECTORY), problem(403, "permission_denied")])
    with nothing_is_left(), served(tmp_path / "s", lambda _: next(garbage)) as (client, _):
        with pytest.raises(IoError) as broken:
            sandbox_of(client).files.download("d", str(tmp_path / "tree"))
        assert "not copied completely" in str(broken.value)
    with (
        nothing_is_left(),
        served(tmp_path / "t", lambda _: next(refused)) as (client, _),
        pytest.raises(PermissionDenied),
    ):
        sandbox_of(client).files.download("d", str(tmp_path / "other"))
    with (
        nothing_is_left(),
        served(tmp_path / "u", trees([])) as (client, _),
        pytest.raises(IoError),
    ):
        sandbox_of(client).files.download("d", str(tmp_path / "file"))
    assert "mine" == (tmp_path / "file").read_text()


def test_one_side_of_a_merge_is_a_directory_or_nothing(tmp_path: Path) -> None:
    """A directory that is not there is an empty side; a file in its place is an error."""
    whole = tree_of(**TREE)
    cases: list[tuple[Answer, type[RingfenceError] | None, bytes]] = [
        (problem(404, "file_not_found"), None, b""),
        (stat_of(FILE), NotADirectory, b""),
        (problem(403, "permission_denied"), PermissionDenied, b""),
        (stat_of(DIRECTORY), None, whole),
    ]
    made = as_json(sandbox_view("sbx-made").to_json())
    for number, (answer, error, expected) in enumerate(cases):

        def script(request: Request, told: Answer = answer) -> Answer:
            if request.path == "/v1/sandboxes":
                return made
            if request.method == "DELETE":
                return Answer()
            return told if request.path.endswith("/stat") else Answer(whole)

        with served(tmp_path / f"s{number}", script) as (client, server):
            out = io.BytesIO()
            with pytest.raises(error) if error else nullcontext():
                copies.pack_snapshot(client._transport, "snap-a", "d", out)
            assert expected == out.getvalue()
        first, last = server.requests[0], server.requests[-1]
        assert ("DELETE", "/v1/sandboxes/sbx-made") == (last.method, last.path)
        assert {"/v1/sandboxes/sbx-made/files"} == {
            each.path.rpartition("/")[0] for each in server.requests[1:-1]
        }
        assert ("snap-a", [], {"mode": "limited", "allowed_hosts": []}) == (
            first.form["snapshot_id"],
            first.form["mounts"],
            first.form["network"],
        )
        assert 0 < first.form["ttl_s"] <= 3600, "it ends by itself where this process dies"
        assert first.headers["idempotency-key"]


# -- whole values and listings ---------------------------------------------------------------------


def test_a_listing_has_each_page_once(tmp_path: Path) -> None:
    pages: dict[str | None, tuple[list[str], str | None]] = {
        None: (["a", "b"], "b"),
        "b": ([], "still"),
        "still": (["c"], None),
    }

    def script(request: Request) -> Answer:
        names, cursor = pages[request.query.get("cursor")]
        form = {"kind": FILE, "size_bytes": 1, "mode": 0o644, "mtime_s": 1.0}
        items = [{**form, "path": f"/{name}", "name": name} for name in names]
        return as_json({"items": items, "next_cursor": cursor})

    with served(tmp_path / "s", script) as (client, server):
        assert ["a", "b", "c"] == [each.name for each in sandbox_of(client).files.list("d")]
    assert [None, "b", "still"] == [each.query.get("cursor") for each in server.requests]
    assert {"d"} == {each.query["path"] for each in server.requests}


def test_a_value_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "MOST_READ", 100)
    size = 100

    def script(request: Request) -> Answer:
        answer: Answer = content(bytes(size), [])(request)
        return answer

    with served(tmp_path / "s", script) as (client, _server):
        files = sandbox_of(client).files
        assert bytes(100) == files.read("f")
        size = 101
        with pytest.raises(FileError, match="is longer than"):
            files.read("f")
        assert bytes(101) == files.read("f", max_bytes=101)
        assert bytes(7) == files.read("f", max_bytes=7)
        assert b"" == files.read("f", max_bytes=0)


@pytest.mark.parametrize(("size", "offset", "asked"), [(9, 9, 0), (9, 10, 0), (9, 8, 1), (0, 3, 1)])
def test_what_is_behind_the_end_is_nothing(
    size: int, offset: int, asked: int, tmp_path: Path
) -> None:
    """A file that says it has no bytes may have some all the same, as in /proc: it is read."""
    data = b"012345678"

    def script(request: Request) -> Answer:
        if request.path.endswith("/stat"):
            return stat_of(FILE, size_bytes=size)
        return Answer(data)  # whole, as what has no length is sent

    with served(tmp_path / "s", script) as (client, server):
        found = sandbox_of(client).files.read("f", offset=offset)
    assert (data[offset:], asked) == (found, server.asked.count("GET content"))


def test_links_are_followed_from_where_they_are(tmp_path: Path) -> None:
    """Joined, not normalised; 40 in a row are a circle."""
    targets = {"/a/near": "../b", "/a/../b": "/abs", "far": "/a/near", "/round": "/round"}

    def script(request: Request) -> Answer:
        path = request.query["path"]
        target = targets.get(path)
        kind = FILE if target is None else "symlink"
        return stat_of(kind, path=path, link_target=target)

    with served(tmp_path / "s", script) as (client, server):
        files = sandbox_of(client).files
        assert "/abs" == files.stat("far", follow=True).path
        assert ["far", "/a/near", "/a/../b", "/abs"] == [r.query["path"] for r in server.requests]
        assert "/a/near" == files.stat("far").link_target
        server.requests.clear()
        with pytest.raises(FileError, match="symbolic links"):
            files.stat("/round", follow=True)
        assert 40 == len(server.requests)


@pytest.mark.parametrize("parents", [False, True])
@pytest.mark.parametrize("path", ["a/b/c", "c"])
def test_directories_of_a_file_are_made_only_where_asked(
    parents: bool, path: str, tmp_path: Path
) -> None:
    def script(request: Request) -> Answer:
        is_first = request.method == "PUT" and len(server.requests) == 1
        return problem(404, "file_not_found") if is_first else Answer()

    with served(tmp_path / "s", script) as (client, server):
        files = sandbox_of(client).files
        if parents and "/" in path:
            files.write(path, "ä", append=True, mode=0o600, parents=True)
            assert ["PUT content", "POST dirs", "PUT content"] == server.asked
            assert {"path": "a/b", "parents": True} == server.requests[1].form
            first, _, last = server.requests
            assert (first.query, first.body) == (last.query, last.body)
            assert ("true", "600", "ä".encode()) == (
                last.query["append"],
                last.query["mode"],
                last.body,
            )
            return
        with pytest.raises(FileNotFound):
            files.write(path, "x", parents=parents)
        assert ["PUT content"] == server.asked


@pytest.mark.parametrize(
    ("code", "status", "exists"),
    [
        ("file_not_found", 404, False),
        ("not_a_directory", 409, False),
        ("permission_denied", 403, None),
    ],
)
def test_only_what_is_not_there_does_not_exist(
    code: str, status: int, exists: bool | None, tmp_path: Path
) -> None:
    with served(tmp_path / "s", lambda _: problem(status, code)) as (client, _server):
        files = sandbox_of(client).files
        if exists is None:
            with pytest.raises(PermissionDenied):
                files.exists("f")
        else:
            assert exists is files.exists("f")


# -- how far a file was read -----------------------------------------------------------------------


def test_a_file_that_has_become_another_is_read_on_from_what_is_known_of_that() -> None:
    reader = copies.FileReader("/f")
    assert ({"path": "/f"}, {}) == (reader.request()["params"], reader.request()["headers"])
    assert not reader.begin(200, {"etag": "one"})
    assert b"abc" == reader.take(b"abc")
    assert {"range": "bytes=3-", "if-range": "one"} == reader.request()["headers"]
    assert not reader.begin(206, {"etag": "one"})
    assert b"d" == reader.take(b"d")
    assert reader.begin(200, {"etag": "other"}), "what was read is of another file"
    assert b"xy" == reader.take(b"xy")
    assert {"range": "bytes=2-", "if-range": "other"} == reader.request()["headers"]


def test_a_part_that_comes_with_the_whole_begins_where_it_was_asked_for() -> None:
    reader = copies.FileReader("/f", 4)
    assert {"range": "bytes=4-"} == reader.request()["headers"]
    for again in (False, True):
        assert again == reader.begin(200, {}), "nothing was read before, or it is read again"
        assert [b"", b"ef", b"gh"] == [reader.take(each) for each in (b"abc", b"def", b"gh")]
        assert {"range": "bytes=8-"} == reader.request()["headers"]
    assert not reader.begin(206, {})
    assert b"ij" == reader.take(b"ij")


def test_connections_that_bring_nothing_new_are_given_up() -> None:
    reader, exc = copies.FileReader("/f", 4), ServerUnreachable("it broke")
    for piece in (b"", b"ab", b"abcd"):
        reader.begin(200, {})
        assert b"" == reader.take(piece)
        assert reader.broken(exc) > 0
    reader.begin(200, {})
    assert b"e" == reader.take(b"abcde")
    for _ in range(3):
        reader.broken(exc)
    with pytest.raises(ServerUnreachable):
        reader.broken(exc)
