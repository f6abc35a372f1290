"""Codes with which a WebSocket may be closed: RFC 6455, 7.4.1 and 7.4.2."""

from __future__ import annotations

import pytest

from ringfence.api.streaming.tunnel import _sendable

pytestmark = pytest.mark.anyone

BROKEN = 1011


@pytest.mark.parametrize("code", [1000, 1003, 1007, 1011, 3000, 4999])
def test_a_code_of_a_peer_is_passed_on(code: int) -> None:
    assert code == _sendable(code)


@pytest.mark.parametrize("code", [None, 0, 999, 1004, 1005, 1006, 5000])
def test_a_code_that_no_frame_may_have_is_told_as_an_error(code: int | None) -> None:
    assert BROKEN == _sendable(code)
