"""Ids of a cluster's event stream, as a client sends them back."""

from __future__ import annotations

import base64

import pytest

from ringfence.cluster.scatter import _places, _written


def test_ids_are_read_as_they_were_written() -> None:
    places = {"0a1b2c3d": "18a2b3c4d5e6f7a8-12", "4e5f6a7b": "18a2b3c4d5e6f7a9-0"}
    assert places == _places(_written(places))
    assert {} == _places(b"")


@pytest.mark.parametrize(
    "text",
    [
        "0a1b2c3d=1-1\r\n\r\nDELETE /v1/sandboxes/another HTTP/1.1",
        "0a1b2c3d=1-1\nx: y",
        "0a1b2c3d=" + "1" * 65,
        "node=1-1",
        "0a1b2c3d",
        "0a1b2c3d=1-1,",
    ],
)
def test_an_id_that_no_stream_has_told_is_refused(text: str) -> None:
    """A place is sent to its node as a header field: a line break in it would begin another request."""
    assert _places(base64.urlsafe_b64encode(text.encode())) is None
