"""Frames, fields and errors of Connect's JSON form, at both sides of each bound."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from typing import Any

import pytest

from ringfence import errors
from ringfence.api.bodies import SHORT
from ringfence.e2b import codec, rpc
from ringfence.e2b.codec import (
    MOST_FRAME_BYTES,
    Frames,
    Inflate,
    RpcError,
    field,
    frame,
    from_base64,
    json_object,
    last_frame,
    rpc_error,
    timestamp,
    to_base64,
)
from ringfence.e2b.multipart import boundary_of, parts
from tests.e2b.here import Here

pytestmark = pytest.mark.anyone


def code_of(action: Any, *args: Any, **more: Any) -> str:
    """The code of the error that it raises."""
    with pytest.raises(RpcError) as refused:
        action(*args, **more)
    return refused.value.code


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [
        (errors.Unauthenticated, "unauthenticated", 401),
        (errors.Forbidden, "permission_denied", 403),
        (errors.PermissionDenied, "permission_denied", 403),
        (errors.FileNotFound, "not_found", 404),
        (errors.ExecNotFound, "not_found", 404),
        (errors.FileExists, "already_exists", 409),
        (errors.SandboxNotFound, "unavailable", 503),
        (errors.SandboxLost, "unavailable", 503),
        (errors.ServerUnreachable, "unavailable", 503),
        (errors.LifecycleError, "failed_precondition", 400),
        (errors.ExecError, "invalid_argument", 400),
        (errors.TimeoutExceeded, "deadline_exceeded", 504),
        (errors.IoError, "internal", 500),
        (errors.TaskFailed, "internal", 500),
        (errors.ResourceExhausted, "resource_exhausted", 429),
        (errors.QuotaExceeded, "resource_exhausted", 429),
        (errors.StorageFull, "resource_exhausted", 429),
        (errors.TooLarge, "resource_exhausted", 429),
        (errors.TooManyRequests, "resource_exhausted", 429),
        (errors.InvalidRequest, "invalid_argument", 400),
        (errors.NotADirectory, "invalid_argument", 400),
        (ValueError, "internal", 500),
    ],
)
def test_each_error_has_its_code_and_status(kind: Any, code: str, status: int) -> None:
    found = rpc_error(kind("the cause"))
    assert (code, status) == (found.code, codec.STATUS[found.code])
    assert ("the cause" in found.message) == issubclass(kind, errors.RingfenceError), (
        "no bug is told"
    )


def test_what_cannot_be_done_says_so() -> None:
    found = rpc_error(errors.Unsupported("x", backend="b", operation="o"))
    assert ("unimplemented", 501) == (found.code, codec.STATUS[found.code])
    own = RpcError("canceled", "x")
    assert own is rpc_error(own)
    assert {"code": "canceled", "message": "x"} == own.form
    assert {
        "canceled": 499,
        "not_found": 404,
        "already_exists": 409,
    }.items() <= codec.STATUS.items()


# -- frames --------------------------------------------------------------------------------------


def framed(text: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(text).to_bytes(4, "big") + text


def messages(frames: Frames, data: bytes) -> list[bytes]:
    """The messages, uncompressed."""
    return [
        codec.inflated(text) if is_compressed else text for text, is_compressed in frames.feed(data)
    ]


def test_frames_come_out_of_pieces_of_any_size() -> None:
    whole = frame({"a": 1}) + framed(b"") + framed(b"three") + last_frame()
    for size in (1, 2, 4, 5, 6, 7, len(whole)):
        frames, found = Frames(), list[bytes]()
        for at in range(0, len(whole), size):
            found += messages(frames, whole[at : at + size])
        frames.finish()
        assert [b'{"a":1}', b"", b"three"] == found, size


@pytest.mark.parametrize("cut", [1, 4, 5, 6])
def test_a_stream_does_not_end_within_a_frame(cut: int) -> None:
    frames = Frames()
    assert [b"x"] == messages(frames, framed(b"x") + framed(b"yy")[:cut])
    assert "invalid_argument" == code_of(frames.finish)


def test_a_frame_is_as_long_as_it_may_be_and_no_longer() -> None:
    longest = bytes(MOST_FRAME_BYTES)
    assert [longest] == messages(Frames(), framed(longest))
    head = b"\0" + (MOST_FRAME_BYTES + 1).to_bytes(4, "big")
    assert "resource_exhausted" == code_of(messages, Frames(), head)


def test_a_compressed_frame_is_so_by_gzip_that_was_agreed_on_and_bounded() -> None:
    assert [b"text"] == messages(Frames(is_gzip=True), framed(gzip.compress(b"text"), 1))
    assert [b"text"] == messages(Frames(is_gzip=True), framed(b"text"))
    assert "unimplemented" == code_of(messages, Frames(), framed(gzip.compress(b"text"), 1))
    fits, over = (gzip.compress(bytes(MOST_FRAME_BYTES + more)) for more in (0, 1))
    assert [bytes(MOST_FRAME_BYTES)] == messages(Frames(is_gzip=True), framed(fits, 1))
    assert "resource_exhausted" == code_of(messages, Frames(is_gzip=True), framed(over, 1))


def test_the_end_of_a_stream_is_no_message() -> None:
    assert [] == messages(Frames(), framed(b"{}", 2))
    assert framed(b"{}", 2) == last_frame()
    error = json.loads(last_frame(RpcError("internal", "why"))[5:])
    assert {"error": {"code": "internal", "message": "why"}} == error


def test_gzip_is_undone_in_bounded_pieces() -> None:
    data = gzip.compress(bytes(3 << 20))
    inflate = Inflate()
    pieces = list(inflate.pieces(data))
    assert 3 << 20 == sum(map(len, pieces))
    assert max(map(len, pieces)) <= 1 << 18
    assert inflate.is_whole
    for most, fits in ((10, True), (9, False)):
        bounded = Inflate(most)
        if fits:
            assert b"0123456789" == b"".join(bounded.pieces(gzip.compress(b"0123456789")))
        else:
            found = bounded.pieces(gzip.compress(b"0123456789"))
            assert "resource_exhausted" == code_of(list, found)


def test_gzip_that_is_none_or_is_cut_or_goes_on() -> None:
    assert "invalid_argument" == code_of(list, Inflate().pieces(b"text"))
    assert "invalid_argument" == code_of(list, Inflate().pieces(zlib.compress(b"text")))
    cut = Inflate()
    assert b"text" == b"".join(cut.pieces(gzip.compress(b"text")[:-1]))
    assert not cut.is_whole
    more = Inflate()
    assert b"text" == b"".join(more.pieces(gzip.compress(b"text") + b"behind its end"))
    assert more.is_whole


# -- fields --------------------------------------------------------------------------------------


def test_a_body_is_an_object_or_nothing() -> None:
    for text, found in ((b"", {}), (b" \r\n", {}), (b"{}", {}), (b'{"a": 1}', {"a": 1})):
        assert found == json_object(text)
    for bad in (b"{", b"[]", b"1", b"null", b"\xff", b"[" * 20_000, b'{"a": 1} x'):
        assert "invalid_argument" == code_of(json_object, bad), bad[:9]
    long = json.dumps({"a": "x" * SHORT}).encode()
    assert SHORT == len(json_object(long)["a"])
    assert "invalid_argument" == code_of(json_object, long[:-1])


@pytest.mark.parametrize(
    ("form", "name", "kind", "default", "found"),
    [
        ({"aB": "x"}, "aB", str, None, "x"),
        ({"a_b": "x"}, "aB", str, None, "x"),
        ({"a_b": "y", "aB": "x"}, "aB", str, None, "x"),
        ({}, "aB", str, "d", "d"),
        ({"aB": None}, "aB", str, "d", "d"),
        ({"a": ""}, "a", str, "d", ""),
        ({"a": False}, "a", bool, True, False),
        ({"a": 0}, "a", int, 7, 0),
        ({"a": "-12"}, "a", int, None, -12),
        ({"a": "9223372036854775807"}, "a", int, None, 2**63 - 1),
        ({"a": [1]}, "a", list, None, [1]),
        ({"a": {}}, "a", dict, None, {}),
    ],
)  # fmt: skip
def test_a_field_comes_in_either_spelling(
    form: dict[str, Any], name: str, kind: type, default: Any, found: Any
) -> None:
    assert found == field(form, name, kind, default)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, str), ("1", bool), (1, bool), (True, int), (False, int), ("x", int), ("", int), ("-", int),
        ("1.5", int), (1.5, int), ("²", int), ({}, list), ([], dict), ("[]", list),
        (2**63, int), (-(2**63), int), ("9" * 19, int), ("9" * 5000, int),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_refused_by_its_name(value: Any, kind: type) -> None:
    with pytest.raises(RpcError, match="someField") as refused:
        field({"some_field": value}, "someField", kind)
    assert "invalid_argument" == refused.value.code


def test_bytes_are_base64_of_either_alphabet_padded_or_not() -> None:
    data = bytes(range(256))
    for text in (
        to_base64(data),
        to_base64(data).rstrip("="),
        base64.urlsafe_b64encode(data).decode(),
        base64.urlsafe_b64encode(data).decode().rstrip("="),
    ):
        assert data == from_base64(text)
    assert b"" == from_base64("")
    assert "invalid_argument" == code_of(from_base64, "A")
    assert "invalid_argument" == code_of(from_base64, "é")


def test_times_are_of_utc_and_never_before_1970() -> None:
    assert "1970-01-01T00:00:00.000000000Z" == timestamp(-5)
    assert "2001-09-09T01:46:40.500000000Z" == timestamp(1e9 + 0.5)


# -- calls ---------------------------------------------------------------------------------------


class Asked:
    """A call of which nothing but its header fields is looked at."""

    def __init__(self, **headers: str) -> None:
        self.request = self
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("", None),
        ("1", 0.001),
        ("0", 0.001),
        ("1500", 1.5),
        ("31622400000", 366 * 86_400),
        ("31622400001", 366 * 86_400),
        ("99999999999", 366 * 86_400),
    ],
)
def test_a_deadline_is_of_milliseconds_and_bounded(given: str, seconds: float | None) -> None:
    call: Any = Asked(connect_timeout_ms=given)
    assert seconds == rpc.deadline_s(call)


@pytest.mark.parametrize("given", ["-1", "x", "1.5", "1" * 12, "²"])
def test_a_deadline_that_is_none_is_refused(given: str) -> None:
    call: Any = Asked(connect_timeout_ms=given)
    assert "invalid_argument" == code_of(rpc.deadline_s, call)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("", 90), ("0", 1), ("1", 1), ("50", 50), ("99999", 99_999), ("100000", 90), ("x", 90)],
)
def test_keepalives_come_as_often_as_asked_but_not_more_than_once_a_second(
    given: str, seconds: float
) -> None:
    call: Any = Asked(keepalive_ping_interval=given)
    assert seconds == rpc.ping_s(call)


def basic(name: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:".encode()).decode()


@pytest.mark.parametrize(
    ("profile", "header", "query", "found"),
    [
        ("os_hardened", "", None, None),
        ("os_hardened", basic("user"), None, None),
        ("os_hardened", basic("sandbox"), None, None),
        ("os_hardened", basic(""), None, None),
        ("os_hardened", basic("root"), None, "unauthenticated"),
        ("os_hardened", basic("root"), "user", None),
        ("os_hardened", "", "root", "unauthenticated"),
        ("os_hardened", "Bearer x", None, None),
        ("os_hardened", "Basic é", None, "unauthenticated"),
        ("os_hardened", "Basic A", None, "unauthenticated"),
        ("own_root", basic("root"), None, "root"),
        ("own_root", basic("alice"), "root", "root"),
        ("own_root", basic("alice"), None, "alice"),
        ("own_root", "basic " + basic("alice")[6:], None, "alice"),
        ("debug", basic("root"), None, "unauthenticated"),
    ],
)
def test_users_are_named_where_the_sandbox_has_a_root_of_its_own(
    profile: str, header: str, query: str | None, found: str | None
) -> None:
    from types import SimpleNamespace

    call: Any = Asked(authorization=header)
    call.inside = SimpleNamespace(spec=SimpleNamespace(profile=profile))
    if found == "unauthenticated":
        assert found == code_of(rpc.user_of, call, query)
    else:
        assert found == rpc.user_of(call, query)


async def test_a_call_has_one_message_and_its_stream_an_end() -> None:
    """Its errors come in the stream, of which the status says nothing."""
    from contextlib import ExitStack

    from ringfence.e2b.notes import Notes

    with ExitStack() as stack:
        here = Here(stack)
        live = here.live(notes=Notes())
        headers = {
            "e2b-sandbox-id": live.sandbox_id,
            "x-access-token": here.shared.tokens.of(live),
            "content-type": codec.STREAM,
        }
        for body, words in (
            (b"", "none came"),
            (frame({}) + frame({}), "more came"),
            (frame({})[:-1], "within a message"),
            (framed(b"{"), "not JSON"),
            (framed(gzip.compress(b"{}"), 1), "gzip only"),
        ):
            answered = await here.ask(
                "POST", "/process.Process/Connect", headers=headers, content=body
            )
            assert (200, 2) == (answered.status_code, answered.content[0]), words
            assert words in json.loads(answered.content[5:])["error"]["message"]
        agreed = {**headers, "connect-content-encoding": "gzip"}
        body = framed(gzip.compress(b"{}"), 1)
        answered = await here.ask("POST", "/process.Process/Connect", headers=agreed, content=body)
        assert "not_found" == json.loads(answered.content[5:])["error"]["code"]
        assert here.is_idle()


# -- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('multipart/form-data; BOUNDARY="a b;c"', b"a b;c"),
        ("multipart/form-data; boundary=abc; charset=x", b"abc"),
        ("multipart/form-data; boundary=" + "b" * 70, b"b" * 70),
    ],
)
def test_a_form_names_its_boundary(text: str, boundary: bytes) -> None:
    assert boundary == boundary_of(text)


@pytest.mark.parametrize("text", ["multipart/form-data", "x; boundary="])
def test_a_form_without_a_boundary_is_none(text: str) -> None:
    assert "invalid_argument" == code_of(boundary_of, text)


async def read(body: bytes, size: int, boundary: bytes = b"BB") -> list[tuple[str, bytes]]:
    """The parts, with their data joined, of a body that comes in pieces of a size."""

    async def pieces() -> Any:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    found: list[tuple[str, bytes]] = []
    async for name, data in parts(pieces(), boundary):
        if name is not None:
            found.append((name, b""))
        else:
            found[-1] = found[-1][0], found[-1][1] + data
    return found


def one(name: str, data: bytes) -> bytes:
    return (
        f'--BB\r\nContent-Disposition: form-data; filename="{name}"\r\n\r\n'.encode()
        + data
        + b"\r\n"
    )


async def test_parts_are_the_same_however_they_come() -> None:
    almost = b"\r\n--B\r\n--BA\r\n--\r\r\n--"
    body = one("a", b"first") + one("", b"") + one("b", almost) + b"--BB--\r\nafter it"
    wanted = [("a", b"first"), ("", b""), ("b", almost)]
    for size in (*range(1, 12), len(body)):
        assert wanted == await read(body, size), size


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a b", "a b"), ('a\\"b', 'a"b'), ("a%22b", 'a"b'), ("a%0D%0Ab", "a\r\nb"), ("a\\\\b", "a\\b"),
        ("../x", "../x"), ("é", "é"),
    ],
)  # fmt: skip
async def test_names_are_as_browsers_and_clients_write_them(written: str, name: str) -> None:
    assert [(name, b"x")] == await read(one(written, b"x") + b"--BB--", 7)


async def test_the_head_of_a_part_is_bounded() -> None:
    def long(size: int) -> bytes:
        return b"--BB\r\n" + b"X: " + b"x" * size + b"\r\n\r\n"

    assert [("", b"x")] == await read(long(16_000) + b"x\r\n--BB--", 1000)
    with pytest.raises(RpcError, match="too long"):
        await read(long(17_000) + b"x\r\n--BB--", 1000)


@pytest.mark.parametrize(
    "body", [b"", b"--BB", b"--BB\r\n\r\nx", b"--BB\r\n\r\nx\r\n--BB", b"x--BB--", b"--BC--\r\n"]
)
async def test_a_form_that_breaks_off_or_is_damaged_is_refused(body: bytes) -> None:
    with pytest.raises(RpcError):
        await read(body, 3)
