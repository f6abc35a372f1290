"""Parts of the client that need no server: addresses, keys, answers, and files read in pieces."""

from __future__ import annotations

import os
import socket
import ssl
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import address, uploads
from ringfence.client.address import Address, hint_of, key_of
from ringfence.client.answers import (
    as_json,
    error_of,
    object_of,
    pause_s,
    with_query,
)
from ringfence.client.copies import FileReader, _unless, write_params
from ringfence.client.exposure import RemoteExposure, _join, _listen, connect, refusal
from ringfence.errors import (
    ConnectError,
    FileError,
    FileNotFound,
    InvalidRequest,
    LifecycleError,
    ServerUnreachable,
)

pytestmark = pytest.mark.anyone

PATH = "/" + "x" * 106


@pytest.mark.parametrize(
    ("given", "url", "unix"),
    [
        ("unix:/a/b", "http://localhost", "/a/b"),
        ("unix:///a", "http://localhost", "/a"),
        (f"unix:{PATH}", "http://localhost", PATH),
        (f"unix:/{'é' * 53}", "http://localhost", f"/{'é' * 53}"),
        ("http://host", "http://host", ""),
        ("http://host:1/", "http://host:1", ""),
        ("https://h:65535", "https://h:65535", ""),
        ("http://[::1]:80", "http://[::1]:80", ""),
        ("http://host/below/", "http://host/below", ""),
    ],
)
def test_an_address_is_read(given: str, url: str, unix: str) -> None:
    found = Address.parse(given)
    assert (url, unix, given) == (found.url, found.unix, found.shown)


@pytest.mark.parametrize(
    "given",
    [
        "", 1, b"unix:/x", "unix:", "unix:rel", f"unix:{PATH}x", "unix:/a\0b", "/a/sock", "host:80",
        f"unix:/{'é' * 54}",
        "ftp://host", "http://", "http:///x", "http://user@host", "http://user:pw@host", "http://h:",
        "http://h:65536", "http://h:x", "http://h:1?q", "http://h#f", "http://h?q",
        "http://h/x?q", "http://a b", "http://[::1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Address.parse(given)
    assert "server" == refused.value.field
    if given in ("http://user:pw@host",):
        assert "pw" not in str(refused.value)


def test_an_address_and_a_key_of_the_environment_are_taken_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGFENCE_SERVER", "http://there:1")
    monkeypatch.setenv("RINGFENCE_API_KEY", " secret\n")
    assert ("http://there:1", "secret") == (Address.parse(None).url, key_of(None))
    assert ("http://here", "") == (Address.parse("http://here").url, key_of(""))
    monkeypatch.delenv("RINGFENCE_SERVER")
    monkeypatch.delenv("RINGFENCE_API_KEY")
    assert Address.parse(None).unix.endswith("/ringfence.sock")
    assert "" == key_of(None)


@pytest.mark.parametrize("key", ["two words", "line\n", "ä", "a\0", 1, b"x", "x\r\ny: z"])
def test_what_no_header_can_have_is_no_key(key: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        key_of(key)
    assert "key" == refused.value.field
    assert "two words" not in str(refused.value)


def test_a_connection_that_failed_is_explained(tmp_path: Path) -> None:
    there = Address.parse("https://h:1")
    assert "http://h:1" in hint_of(there, OSError("SSL: WRONG_VERSION_NUMBER"))
    assert "certificate" in hint_of(there, OSError("CERTIFICATE_VERIFY_FAILED"))
    directory = Address.parse(f"unix:{tmp_path}")
    assert f"{tmp_path}/ringfence.sock" in hint_of(directory, OSError())
    assert "ringfence serve" in hint_of(there, OSError())


def test_only_public_authorities_vouch_for_a_server_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that may set a variable must not decide which server gets the key."""
    (tmp_path / "none.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    address._public_authorities.cache_clear()
    try:
        public = Address.parse("https://h").tls_context()
        assert public is Address.parse("https://other:1").tls_context(), "read once"
    finally:
        address._public_authorities.cache_clear()
    none = Address.parse("http://h").tls_context()
    assert [True, False] == [len(each.get_ca_certs()) > 10 for each in (public, none)]
    for each in (public, none):
        assert (True, ssl.CERT_REQUIRED) == (each.check_hostname, each.verify_mode)


# -- answers ---------------------------------------------------------------------------------------


def test_only_a_problem_of_the_server_is_its_error() -> None:
    form = {"code": "connect_failed", "detail": "why", "hint": "what"}
    found = error_of(502, "application/problem+json; charset=utf-8", form)
    assert (ConnectError, "why", "what") == (type(found), found.message, found.hint)
    for media, other in (
        ("application/json", form),
        ("application/problem+json", {"detail": "x"}),
        ("application/problem+json", [form]),
        ("text/html", None),
    ):
        assert ServerUnreachable is type(error_of(502, media, other))


@pytest.mark.parametrize("content", [b"", b"[]", b"1", b"{", b"<html>", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_object_is_of_something_else(content: bytes) -> None:
    with pytest.raises(ServerUnreachable):
        object_of(content)
    assert {"a": 1} == object_of(b'{"a": 1}')


def test_pauses_grow_to_a_bound_and_are_those_that_the_server_says() -> None:
    assert (2.0, 5.0, 0.0) == tuple(pause_s(9, {"retry-after": t}) for t in ("2", "60", "0"))
    for told in ("", "-1", "soon", "1.5"):
        assert 0.05 <= pause_s(0, {"retry-after": told}) <= 0.1
    for attempt, most in ((1, 0.2), (4, 1.6), (6, 5.0), (50, 5.0)):
        found = [pause_s(attempt, {}) for _ in range(50)]
        assert most / 2 <= min(found) < max(found) <= most, "spread out"


def test_a_query_has_what_is_given() -> None:
    assert "/x" == with_query("/x", None) == with_query("/x", {"a": None})
    assert "/x?a=true&b=1&c=a%26b+%2F&d=1&d=2" == with_query(
        "/x", {"a": True, "b": 1, "c": "a&b /", "d": [1, 2]}
    )
    assert "/x?p=caf%E9" == with_query("/x", {"p": os.fsdecode(b"caf\xe9")})
    with pytest.raises(InvalidRequest):
        with_query("/x", {"p": "a\0b"})


def test_a_body_is_ascii_and_has_no_number_that_is_none() -> None:
    assert b'{"a":"\\ud800\\u00e9"}' == as_json({"a": "\ud800é"})
    with pytest.raises(ValueError, match="JSON"):
        as_json({"a": float("nan")})


# -- files -----------------------------------------------------------------------------------------


def test_a_file_is_read_on_where_its_connection_broke() -> None:
    reader = FileReader("f")
    assert {} == reader.request()["headers"]
    assert not reader.begin(200, {"etag": "one"})
    assert b"abc" == reader.take(b"abc")
    assert {"range": "bytes=3-", "if-range": "one"} == reader.request()["headers"]
    assert not reader.begin(206, {"etag": "one"})
    assert b"d" == reader.take(b"d")
    assert reader.begin(200, {"etag": "two"}), "another file: from the beginning"
    assert b"xyz" == reader.take(b"xyz")
    assert {"range": "bytes=3-", "if-range": "two"} == reader.request()["headers"]


def test_a_part_of_a_file_that_is_sent_whole_is_taken_out_of_it() -> None:
    reader = FileReader("f", 5)
    assert {"range": "bytes=5-"} == reader.request()["headers"]
    assert not reader.begin(200, {})
    assert [b"", b"5", b"67"] == [reader.take(each) for each in (b"012", b"345", b"67")]
    assert reader.begin(200, {}), "what was read is read again"
    assert [b"", b"56"] == [reader.take(each) for each in (b"01234", b"56")]


def test_connections_that_bring_nothing_are_given_up() -> None:
    reader, broken = FileReader("f"), ServerUnreachable("x")
    for _ in range(3):
        assert reader.broken(broken) > 0
    reader.take(b"")
    with pytest.raises(ServerUnreachable):
        reader.broken(broken)
    reader.take(b"a")
    for _ in range(3):
        reader.broken(broken)
    assert {"path": "p", "append": True, "mode": "644"} == write_params(
        "p", append=True, mode=0o644
    )


def test_a_tree_that_could_not_be_read_does_not_look_whole() -> None:
    assert [b"a"] == [*_unless(iter([b"a"]), [], "x")]
    found: list[bytes] = []
    with pytest.raises(FileError, match="x: why"):
        found.extend(_unless(iter([b"a"]), [OSError(5, "why")], "x"))


class Asked:
    """A server that has nothing, and what it was sent."""

    def __init__(self, present: bool = False) -> None:
        self.present, self.sent = present, list[bytes]()
        self.paths: list[str] = []

    def json(self, _method: str, path: str) -> Any:
        self.paths.append(path)
        return {"present": self.present}

    def request(self, _method: str, path: str, *, content: Callable[[], Any], repeat: bool) -> None:
        assert repeat
        self.paths.append(path)
        self.sent = [b"".join(content()) for _ in "12"]


def test_the_same_files_have_the_same_digest_whenever_they_are_sent(tmp_path: Path) -> None:
    for number, name in enumerate(("one", "two")):
        (tmp_path / name / "d").mkdir(parents=True)
        for file in ("b", "a")[:: 1 if number else -1]:
            (tmp_path / name / file).write_text(file)
            os.utime(tmp_path / name / file, (number, number))
    asked, there = Asked(), Asked(present=True)
    digest = uploads.upload(asked, str(tmp_path / "one"))  # type: ignore[arg-type]
    assert digest == uploads.upload(there, str(tmp_path / "two"))  # type: ignore[arg-type]
    assert ([], 2, 1) == (there.sent, len(asked.sent), len({*asked.sent}))
    assert {f"/v1/uploads/{digest}"} == {*asked.paths}
    (tmp_path / "two" / "a").chmod(0o755)
    assert digest != uploads.upload(there, str(tmp_path / "two"))  # type: ignore[arg-type]
    with suppress(PermissionError):
        os.chown(tmp_path / "one" / "a", 12, 34)  # an ordinary user's is of others than root anyway
    (tmp_path / "link").symlink_to(tmp_path / "one" / "a")
    uploads.upload(asked, str(tmp_path / "link"))  # type: ignore[arg-type]
    (tmp_path / "tar").write_bytes(asked.sent[0])
    with tarfile.open(tmp_path / "tar") as tar:
        (member,) = tar
        assert ("link", True) == (member.name, member.isreg())
        assert (0, 0, "", "", 0) == (
            member.uid, member.gid, member.uname, member.gname, member.mtime
        )  # fmt: skip
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("none", "dangling"):
        with pytest.raises(FileNotFound):
            uploads.upload(asked, str(tmp_path / name))  # type: ignore[arg-type]


# -- servers inside --------------------------------------------------------------------------------


class Channel:
    """A WebSocket that answers with what it is sent."""

    def __init__(self) -> None:
        self._news, self.words = threading.Semaphore(0), list[str]()
        self._pieces: list[bytes] = []

    def send_bytes(self, data: bytes) -> None:
        self._pieces.append(data)
        self._news.release()

    def send_text(self, text: str) -> None:
        self.words.append(text)
        self._news.release()

    def receive_bytes(self) -> bytes:
        self._news.acquire()
        if not self._pieces:
            raise ConnectionError
        return self._pieces.pop(0)


class Transport:
    def __init__(self, state: str = "", exc: Exception | None = None) -> None:
        self.state, self.exc = state, exc
        self.paths: list[str] = []
        self.channels: list[Channel] = []

    @contextmanager
    def websocket(self, path: str) -> Any:
        self.paths.append(path)
        if self.exc is not None:
            raise self.exc
        self.channels.append(Channel())
        yield self.channels[-1]

    def json(self, _method: str, _path: str) -> Any:
        return {"state": self.state}


@pytest.mark.parametrize(
    ("state", "exc", "error"),
    [
        ("running", OSError("x"), ConnectError),
        ("terminated", OSError("x"), LifecycleError),
        ("suspended", OSError("x"), LifecycleError),
        ("running", ServerUnreachable("x"), ServerUnreachable),
    ],
)
def test_a_connection_that_is_refused_says_why(state: str, exc: Exception, error: type) -> None:
    transport: Any = Transport(state, exc)
    assert error is type(refusal(transport, "/s", exc, 80))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error):
        connect(transport, "/s", 80)
    for thread in threading.enumerate():
        if thread.name == "ringfence-port-80":
            thread.join()
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_connection_passes_bytes_and_its_end_and_gives_all_back() -> None:
    transport: Any = Transport()
    before = len(os.listdir("/proc/self/fd"))
    sock = connect(transport, "/s", 80)
    sock.sendall(b"hello")
    assert b"hello" == sock.recv(99)
    sock.shutdown(socket.SHUT_WR)
    assert b"" == sock.recv(99)
    sock.close()
    for thread in threading.enumerate():
        if thread.name == "ringfence-port-80":
            thread.join()
    assert (["eof"], ["/s/ports/80/tcp"]) == (transport.channels[0].words, transport.paths)
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_connection_that_ends_there_ends_here_though_its_program_holds_on() -> None:
    class Ended:
        def receive_bytes(self) -> bytes:
            raise ConnectionError

        def send_bytes(self, _data: bytes) -> None: ...

        def send_text(self, _text: str) -> None: ...

    program, ours = socket.socketpair()
    with program, ours:
        joining = threading.Thread(target=_join, args=(Ended(), ours), daemon=True)
        joining.start()
        program.settimeout(30)
        assert b"" == program.recv(9)
        joining.join(30)
        assert not joining.is_alive()


def test_an_exposure_may_be_at_an_address_of_ipv6() -> None:
    transport: Any = Transport()
    try:
        exposure = RemoteExposure(transport, "/s", 80, "::1", 0, None)
    except InvalidRequest as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    with exposure, socket.socket(socket.AF_INET6) as peer:
        assert "::1" == exposure.address[0]
        peer.connect(exposure.address)
        peer.sendall(b"x")
        assert b"x" == peer.recv(9)


@pytest.mark.parametrize("is_unix", [False, True])
def test_an_exposure_is_closed_once_and_leaves_nothing(tmp_path: Path, is_unix: bool) -> None:
    transport: Any = Transport()
    path = str(tmp_path / "s") if is_unix else None
    before = len(os.listdir("/proc/self/fd"))
    exposure = RemoteExposure(transport, "/s", 80, "127.0.0.1", 0, path)
    family = socket.AF_UNIX if is_unix else socket.AF_INET
    with socket.socket(family) as peer:
        peer.connect(exposure.address)
        peer.sendall(b"x")
        assert b"x" == peer.recv(9)
        if path:
            assert 0o600 == os.stat(path).st_mode & 0o777
        peer.shutdown(socket.SHUT_WR)
        assert b"" == peer.recv(9)
    for _ in range(2):
        exposure.close()
    assert path is None or not os.path.exists(path)
    with socket.socket(family) as peer, pytest.raises(OSError, match=r"refused|No such file"):
        peer.connect(exposure.address)
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/fd")) > before:  # its connection has a thread of its own
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_exposure_may_follow_another_at_its_port_at_once() -> None:
    """A connection that this side has closed keeps the port for a minute, but from whoever listens."""
    transport: Any = Transport(exc=None)
    with RemoteExposure(transport, "/s", 80, "127.0.0.1", 0, None) as first:
        port = first.address[1]
        with socket.create_connection(("127.0.0.1", int(port))) as peer:
            peer.sendall(b"x")
            assert b"x" == peer.recv(9)
            transport.channels[0].send_text("its end")  # nothing more comes from inside
            assert b"" == peer.recv(9)
    with RemoteExposure(transport, "/s", 80, "127.0.0.1", int(port), None) as second:
        assert ("127.0.0.1", port) == second.address


@pytest.mark.parametrize("is_socket", [False, True])
def test_what_took_the_place_of_its_socket_is_left_alone(is_socket: bool, tmp_path: Path) -> None:
    transport: Any = Transport()
    path = tmp_path / "s"
    exposure = RemoteExposure(transport, "/s", 80, "127.0.0.1", 0, str(path))
    path.rename(tmp_path / "kept")  # or the next one could have its number
    with socket.socket(socket.AF_UNIX) as other:
        if is_socket:
            other.bind(str(path))
        else:
            path.touch()
        exposure.close()
        assert path.exists()


def test_an_address_that_is_taken_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    (tmp_path / "s").write_text("mine")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidRequest) as refused:
        _listen("", 0, path)
    assert ("unix", "mine") == (refused.value.field, (tmp_path / "s").read_text())
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(InvalidRequest) as taken:
        _listen("127.0.0.1", other.getsockname()[1], None)
    assert "host_port" == taken.value.field
    assert before == len(os.listdir("/proc/self/fd"))
