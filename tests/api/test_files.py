"""Files and trees over HTTP; what a hostile client or guest makes of them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import threading

import httpx
import pytest

from ringfence.bench.attacker import Wire
from tests.api.conftest import Daemon

pytestmark = pytest.mark.anyone

TAR = {"content-type": "application/x-tar"}


@pytest.fixture
def base(sandbox_id: str) -> str:
    return f"/v1/sandboxes/{sandbox_id}/files"


def _run(client: httpx.Client, base: str, script: str) -> str:
    url = base.replace("/files", "/execs")
    ran = client.post(url, json={"argv": ["sh", "-c", script], "wait": True}).json()["result"]
    assert 0 == ran["exit_code"], ran
    text: str = ran["stdout"]
    return text


@pytest.mark.full
def test_a_large_file_goes_in_and_comes_out(client: httpx.Client, base: str) -> None:
    data = os.urandom(5 << 20) + b"the end"
    written = client.put(f"{base}/content", params={"path": "big", "mode": "600"}, content=data)
    back = client.get(f"{base}/content", params={"path": "big"})
    part = client.get(f"{base}/content", params={"path": "big"}, headers={"range": "bytes=-7"})
    beyond = client.get(
        f"{base}/content", params={"path": "big"}, headers={"range": f"bytes={len(data)}-"}
    )

    assert (len(data), 0o600) == (written.json()["size_bytes"], written.json()["mode"])
    assert data == back.content
    assert (206, b"the end") == (part.status_code, part.content)
    assert f"bytes {len(data) - 7}-{len(data) - 1}/{len(data)}" == part.headers["content-range"]
    assert 416 == beyond.status_code
    assert hashlib.sha256(data).hexdigest() in _run(client, base, "sha256sum big")


@pytest.mark.parametrize("zeros", [1 << 16, (1 << 20) + 1])
def test_zeros_at_the_end_are_part_of_a_file(client: httpx.Client, base: str, zeros: int) -> None:
    """Blocks of zeros are skipped as holes, of which the last needs its end set."""
    data = b"a" * (1 << 16) + bytes(zeros)
    written = client.put(f"{base}/content", params={"path": "holes"}, content=data)

    assert len(data) == written.json()["size_bytes"]
    assert data == client.get(f"{base}/content", params={"path": "holes"}).content


def test_a_chunked_upload_and_append(client: httpx.Client, base: str) -> None:
    pieces = (b"x" * 100_000 for _ in range(30))
    client.put(f"{base}/content", params={"path": "a"}, content=pieces)
    added = client.put(f"{base}/content", params={"path": "a", "append": True}, content=b"more")

    assert 3_000_004 == added.json()["size_bytes"]


@pytest.mark.parametrize(("mode", "answer"), [("444", 403), ("644", 200)])
def test_a_file_that_may_not_be_written_is_not_replaced(
    client: httpx.Client, base: str, mode: str, answer: int
) -> None:
    """Its directory may be written, so that a rename over it would pass."""
    _run(client, base, f"echo old > closed; chmod {mode} closed")
    put = client.put(f"{base}/content", params={"path": "closed"}, content=b"new\n")

    assert answer == put.status_code
    assert ("new\n" if 200 == answer else "old\n") == _run(client, base, "cat closed; rm -f closed")


def test_an_upload_that_breaks_off_leaves_nothing(
    daemon: Daemon, client: httpx.Client, base: str
) -> None:
    _run(client, base, "echo old > whole")
    wire = Wire(daemon.socket)
    wire.ask("PUT", f"{base}/content?path=whole", "Transfer-Encoding: chunked")
    wire.sock.sendall(b"10000\r\n" + bytes(65_536) + b"\r\n")
    while ".ringfence-" not in _run(client, base, "ls -a"):
        pass
    wire.sock.close()

    while ".ringfence-" in (left := _run(client, base, "ls -a; cat whole")):
        pass
    assert left.endswith("old\n")


def test_names(client: httpx.Client, base: str) -> None:
    made = client.post(f"{base}/dirs", json={"path": "d/e"})
    client.put(f"{base}/content", params={"path": "d/e/f.txt"}, content=b"hi")
    moved = client.post(f"{base}/move", json={"source": "d/e/f.txt", "target": "d/g.txt"})
    listed = client.get(f"{base}/list", params={"path": "d", "limit": 1}).json()
    rest = client.get(f"{base}/list", params={"path": "d", "cursor": listed["next_cursor"]}).json()
    refused = client.delete(base, params={"path": "d"})
    gone = client.delete(base, params={"path": "d", "recursive": True})

    assert ("directory", "/home/sandbox/d/e") == (made.json()["kind"], made.json()["path"])
    assert 2 == moved.json()["size_bytes"]
    assert [["e"], ["g.txt"]] == [[i["name"] for i in page["items"]] for page in (listed, rest)]
    assert rest["next_cursor"] is None
    assert (409, "directory_not_empty") == (refused.status_code, refused.json()["code"])
    assert 204 == gone.status_code
    assert 404 == client.get(f"{base}/stat", params={"path": "d"}).status_code


def _tar(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for each in members:
            if isinstance(each, tarfile.TarInfo):
                tar.addfile(each)
            else:
                info = tarfile.TarInfo(each[0])
                info.size = len(each[1])
                tar.addfile(info, io.BytesIO(each[1]))
    return stream.getvalue()


def _special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o755
    return info


def a_tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("one", "two"):
            tar.addfile(tarfile.TarInfo(name))
    return made.getvalue()


SENT = {
    "whole": a_tar(),
    "compressed": gzip.compress(a_tar()),
    "broken-off": a_tar()[: tarfile.BLOCKSIZE + 100],
    "something-else": b"no tar" * 500,
}


@pytest.mark.parametrize("what", SENT)
def test_only_a_whole_tar_stream_is_taken(client: httpx.Client, base: str, what: str) -> None:
    url = f"{base}/tree?path={what}"
    answer = client.put(url, content=SENT[what], headers=TAR)

    if "whole" == what:
        assert 200 == answer.status_code
        return
    assert (422, "file_error") == (answer.status_code, answer.json()["code"])
    assert "not a whole, uncompressed tar stream" in answer.json()["detail"]


def test_a_tree_there_and_back(client: httpx.Client, base: str) -> None:
    sent = _tar(
        _special("sub", tarfile.DIRTYPE),
        ("sub/one.txt", b"one"),
        ("two.bin", bytes(range(256)) * 1000),
        _special("link", tarfile.SYMTYPE, "sub/one.txt"),
    )
    put = client.put(f"{base}/tree", params={"path": "tree"}, content=sent, headers=TAR)
    got = client.get(f"{base}/tree", params={"path": "tree"})

    assert 200 == put.status_code, put.text
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        names = {each.name: each for each in tar.getmembers()}
        one = tar.extractfile("./sub/one.txt")
        assert one is not None
        assert b"one" == one.read()
    assert "sub/one.txt" == names["./link"].linkname
    assert 256_000 == names["./two.bin"].size
    assert "one" == _run(client, base, "cat tree/link")
    single = client.get(f"{base}/tree", params={"path": "tree/two.bin"})
    assert (409, "not_a_directory") == (single.status_code, single.json()["code"])


@pytest.mark.parametrize(
    "archive",
    [
        _tar(("../outside", b"x")),
        _tar(("/home/sandbox/outside", b"x")),
        _tar(("a/../../outside", b"x")),
        _tar(_special("l", tarfile.SYMTYPE, ".."), ("l/outside", b"x")),
        _tar(_special("l", tarfile.SYMTYPE, "/home/sandbox"), ("l/outside", b"x")),
        _tar(_special("l", tarfile.SYMTYPE, "../secret"), _special("l", tarfile.DIRTYPE)),
        _tar(_special("h", tarfile.LNKTYPE, "../kept")),
        _tar(_special("h", tarfile.LNKTYPE, "/home/sandbox/kept")),
        _tar(_special("d", tarfile.CHRTYPE)),
        _tar(_special("p", tarfile.FIFOTYPE)),
        _tar(("fine", b"x"))[:600],
        b"no tar at all" * 100,
    ],
    ids=[
        "climb",
        "absolute",
        "inner-climb",
        "link-up",
        "link-absolute",
        "dir-over-link",
        "hard-climb",
        "hard-absolute",
        "device",
        "pipe",
        "cut-short",
        "nonsense",
    ],
)
def test_a_stream_that_plays_games_is_refused(
    client: httpx.Client, base: str, archive: bytes
) -> None:
    _run(client, base, "mkdir secret && chmod 700 secret && echo mine > kept")
    refused = client.put(f"{base}/tree", params={"path": "into"}, content=archive, headers=TAR)

    assert 422 == refused.status_code, refused.text
    assert "application/problem+json" == refused.headers["content-type"]
    assert "0\n" == _run(client, base, "find . / -xdev -name outside 2>/dev/null | wc -l")
    assert "700 1\n" == _run(client, base, "stat -c %a secret | tr '\\n' ' '; stat -c %h kept")


def test_a_stream_over_a_link_replaces_the_link(client: httpx.Client, base: str) -> None:
    _run(client, base, "mkdir into && echo kept > kept && ln -s ../kept into/f")
    client.put(f"{base}/tree", params={"path": "into"}, content=_tar(("f", b"new")), headers=TAR)

    assert "kept\nnew" == _run(client, base, "cat kept into/f")


def test_bombs_end_at_the_sandboxs_own_limits(client: httpx.Client) -> None:
    """Of bytes and of files; a compressed one is not even looked at."""
    limits = {"disk_bytes": 4 << 20, "inodes": 500}
    sandbox_id = client.post("/v1/sandboxes", json={"limits": limits}).json()["id"]
    base = f"/v1/sandboxes/{sandbox_id}/files"

    def put(archive: bytes, **headers: str) -> httpx.Response:
        return client.put(
            f"{base}/tree", params={"path": "t"}, content=archive, headers={**TAR, **headers}
        )

    large = put(_tar(("large", b"x" * (8 << 20))))
    many = put(_tar(*((f"f{i}", b"") for i in range(2000))))
    sparse = tarfile.TarInfo("sparse")
    sparse.type, sparse.size = tarfile.GNUTYPE_SPARSE, 0
    holes = put(_tar(sparse))
    squeezed = put(b"\x1f\x8b", **{"content-encoding": "gzip"})
    file = client.put(f"{base}/content", params={"path": "f"}, content=bytes(8 << 20))

    for each in (large, many, file):
        assert each.status_code in (503, 507), each.text
        assert each.json()["code"] in ("resource_exhausted", "storage_full")
    assert 422 == holes.status_code
    assert 422 == squeezed.status_code
    client.delete(base, params={"path": "t", "recursive": True})
    client.delete(base, params={"path": "f"})
    assert 200 == put(_tar(("fits", b"x"))).status_code
    client.delete(f"/v1/sandboxes/{sandbox_id}")


def test_no_path_leads_to_the_hosts_files(
    client: httpx.Client, base: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Not by climbing, nor by a link; what is inside is found by the same paths."""
    outside = tmp_path_factory.mktemp("host") / "secret"
    outside.write_text("the host's")
    _run(client, base, f"ln -s /../../.. link; ln -s {outside} direct; echo inside > /tmp/inside")
    for start in ("../../../..", "link", "/proc/1/root", "/proc/self/root"):
        found = client.get(f"{base}/content", params={"path": f"{start}{outside}"})
        assert 404 == found.status_code, found.text
    assert 404 == client.get(f"{base}/content", params={"path": "direct"}).status_code

    for start in ("../../../..", "link"):
        found = client.get(f"{base}/content", params={"path": f"{start}/tmp/inside"})
        assert "inside\n" == found.text


@pytest.mark.parametrize("odd", ["..%2f..%2fetc", "%2e%2e", "..", "a%00b", "A", "-x", "x" * 64])
def test_no_id_is_ever_a_path(client: httpx.Client, odd: str) -> None:
    for path in (
        f"/v1/sandboxes/{odd}",
        f"/v1/sandboxes/{odd}/files/list",
        f"/v1/snapshots/{odd}",
        f"/v1/sessions/{odd}",
    ):
        answer = client.get(path)
        assert answer.status_code in (404, 422), path
        assert "application/problem+json" == answer.headers["content-type"]


def test_looking_through_a_tree(client: httpx.Client, base: str) -> None:
    _run(client, base, "mkdir -p s/in && printf 'a\\nneedle 1\\n' > s/x.py && cp s/x.py s/in/y.txt")
    _run(client, base, "printf 'needle\\0' > s/binary; ln -s /etc s/away")

    def ask(what: str, **params: str | int | bool) -> list[dict[str, object]]:
        answer = client.get(f"{base}/{what}", params={"path": "s", **params})
        assert 200 == answer.status_code, answer.text
        found: list[dict[str, object]] = answer.json()["items"]
        return found

    assert ["x.py"] == [each["name"] for each in ask("glob", pattern="*.py")]
    assert ["y.txt", "x.py"] == [each["name"] for each in ask("glob", pattern="**/*.*")]
    lines = ask("search", pattern="needle")
    assert [2, 2] == [each["line"] for each in lines]
    assert 1 == len(
        ask("search", pattern=r"^NEEDLE \d$", regex=True, ignore_case=True, glob="*.py")
    )
    assert 422 == client.get(f"{base}/search", params={"pattern": "(", "regex": True}).status_code
    one = client.get(f"{base}/glob", params={"path": "s", "pattern": "**", "limit": 1}).json()
    assert (1, True) == (len(one["items"]), one["truncated"])


def test_replacing_text(client: httpx.Client, base: str) -> None:
    _run(client, base, "echo 'a.b a.b' > one; echo none > two")
    body = {"paths": ["one", "two", "three"], "pattern": "a.b", "replacement": "\\1"}
    answer = client.post(f"{base}/replace", json=body).json()["items"]

    assert [2, 0, 0] == [each["replacements"] for each in answer]
    assert [None, None, "No such file or directory"] == [each["error"] for each in answer]
    assert "\\1 \\1\n" == _run(client, base, "cat one")


def test_watching(client: httpx.Client, base: str) -> None:
    _run(client, base, "mkdir w")
    seen: list[tuple[str, str]] = []
    params: dict[str, str | bool] = {"path": "w", "recursive": True}
    with client.stream("GET", f"{base}/watch", params=params) as stream:
        kind = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            if line.startswith("data: "):
                seen.append((kind, json.loads(line.removeprefix("data: "))["path"]))
                if "watching" == kind:
                    script = "mkdir w/d && echo x > w/d/f && mv w/d/f w/g && rm -r w"
                    changing = threading.Thread(target=_run, args=(client, base, script))
                    changing.start()
                if ("deleted", "/home/sandbox/w") == seen[-1]:
                    break

    changing.join()
    assert ("watching", "/home/sandbox/w") == seen[0]
    for expected in [("created", "w/d"), ("moved_to", "w/g"), ("deleted", "w/g")]:
        assert (expected[0], f"/home/sandbox/{expected[1]}") in seen
