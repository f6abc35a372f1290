"""Files, trees, and servers inside, through a server."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.client import AsyncClient, RemoteSandbox
from ringfence.errors import (
    ConnectError,
    DirectoryNotEmpty,
    FileError,
    FileExists,
    FileNotFound,
    InvalidRequest,
    IsADirectory,
    PermissionDenied,
)
from tests.api.conftest import Daemon
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

SERVER = """
import socket
with socket.create_server(("127.0.0.1", 8000)) as listener:
    print("up", flush=True)
    while True:
        peer, _ = listener.accept()
        data = b""
        while chunk := peer.recv(65536):
            data += chunk
        peer.sendall(b"got %d bytes" % len(data))
        peer.close()
"""


@pytest.mark.full
def test_files_as_values(sandbox: RemoteSandbox) -> None:
    files = sandbox.files
    data = os.urandom(3_000_000)
    files.write("deep/down/file", data, parents=True, mode=0o600)
    assert data == files.read("deep/down/file")
    assert data[:10] == files.read("deep/down/file", max_bytes=10)
    assert data[100:110] == files.read("deep/down/file", offset=100, max_bytes=10)
    assert b"" == files.read("deep/down/file", offset=len(data))
    files.write("deep/down/file", "more", append=True)
    assert (len(data) + 4, 0o600) == (
        files.stat("deep/down/file").size_bytes,
        files.stat("deep/down/file").mode,
    )
    files.move("deep/down/file", "moved")
    assert ["deep", "moved"] == [each.name for each in files.list() if each.name[0] != "."]
    assert not files.exists("deep/down/file")
    files.make_dir("a/b")
    files.remove("a", recursive=True)
    sandbox.shell("ln -s moved link")
    assert ("symlink", "file") == (files.stat("link").kind, files.stat("link", follow=True).kind)
    files.write("text", "ä")
    assert "ä" == files.read_text("text")


def test_a_file_that_does_not_say_how_long_it_is(sandbox: RemoteSandbox) -> None:
    files = sandbox.files
    assert sandbox.exec(["cat", "/proc/cpuinfo"]).stdout[:60] == files.read("/proc/cpuinfo")[:60]
    assert files.read("/proc/version")[6:13] == files.read("/proc/version", offset=6, max_bytes=7)
    files.write("empty", b"")
    assert (b"", b"") == (files.read("empty"), files.read("empty", offset=3))


def test_files_as_streams(sandbox: RemoteSandbox) -> None:
    with sandbox.files.open_write("streamed") as file:
        file.write(b"one ")
        file.write(b"two")
    with sandbox.files.open_read("streamed") as file:
        assert (b"one", b" two") == (file.read(3), file.read())


def test_what_is_wrong_with_a_path_is_said(sandbox: RemoteSandbox) -> None:
    files = sandbox.files
    files.make_dir("full/inner")
    for error, call in (
        (FileNotFound, lambda: files.read("none")),
        (FileNotFound, lambda: files.open_write("none/file")),
        (IsADirectory, lambda: files.read("full")),
        (DirectoryNotEmpty, lambda: files.remove("full")),
        (PermissionDenied, lambda: files.write("/usr/bin/x", b"")),
        (FileNotFound, lambda: files.remove("none")),
        (FileNotFound, lambda: files.upload("/no/such/file", "x")),
        (FileNotFound, lambda: files.download("none", "/tmp/never")),
    ):
        with pytest.raises(error):
            call()


def test_trees_go_in_and_out_whole(sandbox: RemoteSandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "tool").write_bytes(os.urandom(2_000_000))
    (tree / "below" / "tool").chmod(0o755)
    (tree / "link").symlink_to("/etc/passwd")
    seen: list[int] = []
    sandbox.files.upload(str(tree), "copy", progress=lambda count, _name: seen.append(count))
    sandbox.files.download("copy", str(tmp_path / "back"))
    for what, local in (("copy", "back"), ("copy/below/tool", "back/below/tool")):
        with pytest.raises(FileExists, match=r"tool|link"):
            sandbox.files.download(what, str(tmp_path / local))
        sandbox.files.download(what, str(tmp_path / local), overwrite=True)

    back = tmp_path / "back"
    assert (tree / "below" / "tool").read_bytes() == (back / "below" / "tool").read_bytes()
    assert 0o755 == (back / "below" / "tool").stat().st_mode & 0o777
    assert "/etc/passwd" == os.readlink(back / "link")
    assert seen[-1] >= 2_000_000
    os.mkfifo(tree / "pipe")
    with pytest.raises(FileError):
        sandbox.files.upload(str(tree), "again")


def test_a_download_that_fails_leaves_no_part(sandbox: RemoteSandbox, tmp_path: Path) -> None:
    """So that it can be tried again without `overwrite`."""
    place = str(tmp_path / "local")

    def fail(_count: int, name: str) -> None:
        raise KeyError(name)

    with Sandbox.create(backend=Unconfined()) as own:
        for each in (sandbox, own):
            each.files.write("large", b"x" * 3_000_000)
            with pytest.raises(KeyError):
                each.files.download("large", place, progress=fail)
            each.files.download("large", place)
            with pytest.raises(KeyError):
                each.files.download("large", place, overwrite=True, progress=fail)
            os.unlink(place)


def test_sparse_files_stay_sparse_and_hard_links_stay(
    sandbox: RemoteSandbox, tmp_path: Path
) -> None:
    tree, back = tmp_path / "tree", tmp_path / "back"
    tree.mkdir()
    with (tree / "sparse").open("wb") as file:
        file.write(b"head")
        file.truncate(64 << 20)
    (tree / "dense").write_bytes(os.urandom(4 << 20))
    os.link(tree / "dense", tree / "link")

    sandbox.files.upload(str(tree), "tree")
    sandbox.files.upload(str(tree / "sparse"), "single")
    sandbox.files.write("odd", (odd := b"x" * 5 + bytes(1 << 20) + b"y" + bytes(70_000)))
    assert odd == sandbox.files.read("odd")
    sandbox.files.download("tree", str(back))
    sandbox.files.download("tree/sparse", str(tmp_path / "single"))

    inside = sandbox.exec(
        ["stat", "-c", "%s %b %h", "tree/sparse", "single", "tree/link"]
    ).stdout_text
    sparse, single, link = (line.split() for line in inside.splitlines())
    copies = [each.stat() for each in (back / "sparse", tmp_path / "single")]
    assert (tree / "sparse").read_bytes() == (tmp_path / "single").read_bytes()
    sizes = [(int(each[0]), int(each[1])) for each in (sparse, single)]
    for size, blocks in (*sizes, *((each.st_size, each.st_blocks) for each in copies)):
        assert 64 << 20 == size
        assert blocks * 512 < 4 << 20
    assert "2" == link[2]
    assert (back / "dense").samefile(back / "link")
    assert (tree / "dense").read_bytes() == (back / "link").read_bytes()


def test_a_server_inside_is_reached(sandbox: RemoteSandbox, tmp_path: Path) -> None:
    server = sandbox.start(["python3", "-c", SERVER])
    assert b"up\n" == server.stdout.read(20)
    with sandbox.connect(8000) as peer:
        peer.sendall(b"x" * 200_000)
        peer.shutdown(socket.SHUT_WR)
        assert b"got 200000 bytes" == peer.recv(100)
        assert b"" == peer.recv(100)
    with sandbox.expose(8000) as exposure:
        assert isinstance(exposure.address, tuple)
        host, port = exposure.address
        assert "127.0.0.1" == host
        for _ in range(2):
            with socket.create_connection((host, port), 20) as peer:
                peer.sendall(b"abc")
                peer.shutdown(socket.SHUT_WR)
                assert b"got 3 bytes" == peer.recv(100)
    path = str(tmp_path / "socket")
    sandbox.expose(8000, unix=path)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        peer.shutdown(socket.SHUT_WR)
        assert b"got 0 bytes" == peer.recv(100)


def test_nobody_listens_inside(sandbox: RemoteSandbox) -> None:
    with pytest.raises(ConnectError):
        sandbox.connect(9)
    with pytest.raises(InvalidRequest):
        sandbox.connect(0)
    with sandbox.expose(9) as exposure:
        assert isinstance(exposure.address, tuple)
        host, port = exposure.address
        peer = socket.create_connection((host, port), 20)
        with peer, pytest.raises(ConnectionResetError):
            assert b"" != peer.recv(100)


def test_names_that_are_no_utf8_are_names_as_any_other(
    sandbox: RemoteSandbox, daemon: Daemon, tmp_path: Path
) -> None:
    """A sandbox's files have whatever names their maker likes; none is out of reach, or another's."""
    odd, other = os.fsdecode(b"caf\xe9.txt"), os.fsdecode(b"d\xff/x \xfe+&%41")
    sandbox.shell(r"mkdir m; printf made > m/$(printf 'caf\351.txt')")

    assert [odd] == [each.name for each in sandbox.files.list("m")]
    assert b"made" == sandbox.files.read(f"m/{odd}")
    assert "made" == sandbox.exec(["cat", odd], cwd="m", env={"NAME": odd}).stdout_text
    sandbox.files.write(other, "written", parents=True)
    assert "written" == sandbox.shell(r"cat d$(printf '\377')/x*").stdout_text
    sandbox.files.move(f"m/{odd}", f"m/2{odd}")
    assert 4 == sandbox.files.stat(f"m/2{odd}").size_bytes
    assert [f"/home/sandbox/m/2{odd}"] == [each.path for each in sandbox.files.glob("m/*").items]
    sandbox.files.download("m", str(tmp_path / "m"))
    assert b"made" == (tmp_path / "m" / f"2{odd}").read_bytes()
    with daemon.client() as plain:
        at = f"/v1/sandboxes/{sandbox.id}/files"
        assert "made" == plain.get(f"{at}/content?path=m/2caf%e9.txt").text
        page = plain.get(f"{at}/list?path=m&cursor=2caf%e8").json()
        assert ([f"2{odd}"], None) == (
            [each["name"] for each in page["items"]],
            page["next_cursor"],
        )
    sandbox.files.remove(f"m/2{odd}")
    with pytest.raises(InvalidRequest):
        sandbox.files.read("\ud800")
    with pytest.raises(FileNotFound):
        sandbox.files.read(f"m/2{odd}")


async def test_files_of_the_asynchronous_half(async_client: AsyncClient, tmp_path: Path) -> None:
    async with await async_client.create() as sandbox:
        await sandbox.files.write("file", b"content")
        await sandbox.files.download("file", str(tmp_path / "file"))
        assert b"content" == (tmp_path / "file").read_bytes()
        with await sandbox.files.open_read("file") as file:
            assert b"content" == file.read()
        with pytest.raises(FileNotFound):
            await sandbox.files.read("none")
        with pytest.raises(ConnectError):
            await sandbox.connect(9)


def test_a_file_read_as_a_whole_is_bounded(
    sandbox: RemoteSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest makes one of any size for nothing; its parts can be read."""
    monkeypatch.setattr("ringfence.client._sync.files.MOST_READ", 100)
    sandbox.files.write("long", bytes(101))

    with pytest.raises(FileError, match=r"long: is longer than .*max_bytes="):
        sandbox.files.read("long")
    assert bytes(101) == sandbox.files.read("long", max_bytes=200)
