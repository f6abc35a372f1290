"""A body that breaks off: the connection is closed in its middle, so that nobody takes it for whole."""

from __future__ import annotations

import logging

from starlette.responses import StreamingResponse
from starlette.types import Send

_logger = logging.getLogger("ringfence.api")


class BrokenOff(Exception):  # noqa: N818 (it says what happened, and never leaves this room)
    """The rest of a body cannot be had."""


class BreakableResponse(StreamingResponse):
    """A streamed body that may raise `BrokenOff`."""

    async def stream_response(self, send: Send) -> None:
        """See `StreamingResponse`; without its last message the server closes the connection."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        try:
            async for piece in self.body_iterator:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BrokenOff as exc:
            _logger.info("a body broke off: %s", exc)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Unsaid(logging.Filter):
    """Leaves out what uvicorn says of answers that end as they are meant to."""

    _LINES = (
        "ASGI callable returned without completing response.",
        "ASGI callable returned without completing handshake.",
        "Cancel %s running task(s), timeout graceful shutdown exceeded",  # they are answered
    )

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg not in self._LINES


def quiet_server() -> None:
    """Keep it from calling broken-off bodies and refused WebSockets errors of ours."""
    logging.getLogger("uvicorn.error").addFilter(_Unsaid())
