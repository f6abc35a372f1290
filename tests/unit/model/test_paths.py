"""One reading of an HTTP path that every server shares, or a refusal."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote_to_bytes, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import InvalidRequest
from ringfence.model.net.paths import matches, read_path, read_pattern

pytestmark = pytest.mark.anyone

PIECES = st.sampled_from(
    ["/", "a", "B", ".", "..", "...", "%2e", "%2F", "%41", "%c3%a9", "%", "%zz", "%25", "%252e",
     ";", "%3b", "\\", "%5C", "\0", "%00", "?q=/..", "#f", "*", "%2A", "é", " ", "%20", "~", "&"]
)  # fmt: skip
TARGETS = st.lists(PIECES, max_size=8).map(lambda parts: "/" + "".join(parts))


def read(given: str) -> str | None:
    try:
        return read_path(given)
    except InvalidRequest:
        return None


@given(TARGETS | st.text(max_size=20))
def test_reading_twice_changes_nothing(target: str) -> None:
    once = read(target)

    assert once is None or once == read(once)


@given(TARGETS)
def test_what_is_accepted_has_one_meaning(target: str) -> None:
    """Decoded once or twice, resolved or not, split by a URL reader or by us: the same path."""
    once = read(target)
    if once is None:
        return
    raw = urlsplit(f"http://a.test{target}").path or "/"
    decoded = unquote_to_bytes(raw)
    resolved = posixpath.normpath(decoded)

    assert decoded == unquote_to_bytes(once) == unquote_to_bytes(decoded)
    assert resolved == (decoded.rstrip(b"/") or b"/")
    assert not set(decoded) & set(b"\\;\0")


@pytest.mark.parametrize(
    "target",
    [
        "", "a", "*", "http://a/b", "//", "/a//b", "/a/../b", "/..", "/a/..", "/a/.", "/./a",
        "/%2e%2e/a", "/.%2e/a", "/%2E/a", "/a%2fb", "/a%2Fb", "/a%5cb", "/a\\..\\b", "/a/..;/b",
        "/a;x=1", "/a%3bx", "/a\0", "/a%00", "/a%0d%0aX:", "/a\r\nX:", "/a b", "/é", "/a%", "/a%4",
        "/a%zz", "/a%252e", "/a%25", "/a#b", "/...", "/a/.. ", "/a/..%20", "/a/%20", "/a%7f",
        "/<", '/"', "/a|b", "/a^b", "/a`b", "/{a}", "/[a]",
    ],
)  # fmt: skip
def test_what_two_servers_may_read_differently(target: str) -> None:
    assert read(target) is None


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/", "/"), ("/?a=/../%2e", "/"), ("/%41%7E", "/A~"), ("/caf%c3%a9", "/caf%C3%A9"),
        ("/a/", "/a/"), ("/a.b/..c/d..", "/a.b/..c/d.."), ("/.git/config", "/.git/config"),
        ("/a%26b", "/a&b"), ("/a*", "/a%2A"), ("/%2A", "/%2A"), ("/a%3fb", "/a%3Fb"),
        ("/@scope%40x/-/y.tgz", "/@scope@x/-/y.tgz"), ("/a%20b", "/a%20b"),
    ],
)  # fmt: skip
def test_spellings(target: str, path: str) -> None:
    assert path == read_path(target)


@pytest.mark.parametrize(
    ("pattern", "path", "does"),
    [
        ("/v1/*", "/v1/a", True), ("/v1/*", "/v1/", True), ("/v1/*", "/v1", False),
        ("/v1*", "/v10", True), ("/a", "/a/", False), ("/a", "/a", True), ("/*", "/", True),
        ("/%41*", "/Ab", True), ("/a%2A", "/a*", True), ("/a%2A", "/ab", False),
        ("/caf%c3%a9*", "/caf%C3%A9s", True),
    ],
)  # fmt: skip
def test_patterns(pattern: str, path: str, does: bool) -> None:
    assert does == matches(read_pattern(pattern, "paths"), read_path(path))


@pytest.mark.parametrize(
    "pattern", ["*", "", "a*", "/a*b", "/a**", "/a/../*", "/%2*", "/a%*", "/a?b*", "/a?b", "//*"]
)
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_pattern(pattern, "paths")

    assert "paths" == refusal.value.field


@given(TARGETS, TARGETS)
def test_patterns_are_canonical_too(one: str, other: str) -> None:
    try:
        pattern = read_pattern(one + "*", "paths")
    except InvalidRequest:
        return
    path = read(one + other.removeprefix("/"))

    assert pattern == read_pattern(pattern, "paths")
    assert path is None or matches(pattern, path)
