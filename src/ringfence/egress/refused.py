"""A refusal: why something was not let through, in words for the record and for the client.

Kept separate: the readers of HTTP, TLS and SOCKS raise it, and import nothing else of the proxy.
"""

from __future__ import annotations


class Refused(Exception):  # noqa: N818  (it says what happened)
    """This is not let through.

    Args:
        reason: One line, without anything that came from a client unescaped.
        status: The HTTP status for a client that speaks HTTP; others are cut.
    """

    def __init__(self, reason: str, *, status: int = 403) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
