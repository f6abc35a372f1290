"""Parts of a file that a client asks for (RFC 9110, 14.1.2): at both sides of its ends."""

from __future__ import annotations

import pytest

from ringfence.api.routes.files import part_of

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=0-", (0, 10)),
        ("bytes=0-0", (0, 1)),
        ("bytes=0-9", (0, 10)),
        ("bytes=0-99", (0, 10)),
        ("bytes=2-4", (2, 5)),
        (" bytes=2-4 ", (2, 5)),
        ("bytes=9-", (9, 10)),
        ("bytes=9-9", (9, 10)),
        ("bytes=-1", (9, 10)),
        ("bytes=-10", (0, 10)),
        ("bytes=-99", (0, 10)),
        ("", None),
        ("bytes=", None),
        ("bytes=-", None),
        ("bytes=5-4", None),
        ("bytes=0-1,3-4", None),
        ("bytes=x-1", None),
        ("lines=0-1", None),
    ],
)
def test_a_part_is_from_one_byte_to_another_and_what_is_not_understood_is_the_whole(
    header: str, part: tuple[int, int] | None
) -> None:
    assert part == part_of(header, 10)


@pytest.mark.parametrize(
    ("header", "size"),
    [("bytes=10-", 10), ("bytes=10-11", 10), ("bytes=-0", 10), ("bytes=-1", 0), ("bytes=0-", 0)],
)
def test_a_part_of_which_nothing_is_there_is_refused(header: str, size: int) -> None:
    with pytest.raises(ValueError):
        part_of(header, size)
