"""Looking through a sandbox's files, and watching them: a helper inside does it, and we read its word."""

from __future__ import annotations

import json
import os

from ..errors import InvalidRequest, IoError
from ..model.found import FileChange, read_answer
from ..model.jsonform import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..backends.protocol import BackendFiles, Errand

MOST_FOUND_BYTES = 32 << 20
_CHUNK = 1 << 18


def ask(files: BackendFiles, what: str, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The JSON form of all that is found."""
    errand, text = files.errand(what, path, json.dumps(asked)), bytearray()
    try:
        while data := os.read(errand.stream, _CHUNK):
            text += data
            if len(text) > MOST_FOUND_BYTES:
                raise too_much()
    except BaseException:
        errand.abandon()
        raise
    errand.finish(path)
    return found_in(bytes(text))


def found_in(text: bytes) -> dict[str, Any]:
    """What a helper said, whole."""
    found = read_answer(text)
    if found is None:
        raise IoError("the helper inside was ended before it was done", retryable=True)
    return found


def too_much() -> InvalidRequest:
    """More than anybody would hold in memory."""
    return InvalidRequest("too much is found", field="pattern", hint="ask for less at a time")


class Watch:
    """One that watches, from its first word on; `close` ends it.

    Attributes:
        path: As it was asked for.
    """

    def __init__(self, files: BackendFiles, path: str, *, recursive: bool) -> None:
        self.path, self._left = path, b""
        self._errand: Errand | None = files.errand(
            "watch", path, json.dumps({"recursive": recursive})
        )
        try:
            self.early = self.read()[1:]  # the first says that it watches
        except BaseException:
            self.close()
            raise

    @property
    def stream(self) -> int:
        """Readable when `read` would not wait; -1 when it is over."""
        return self._errand.stream if self._errand is not None else -1

    def read(self) -> list[FileChange]:
        """What happened since the last read; waits for something; empty at the end.

        Raises:
            FileError: It cannot be watched, or not any more.
        """
        while self._errand is not None:
            data = os.read(self._errand.stream, _CHUNK)
            if not data:
                errand, self._errand = self._errand, None
                errand.finish(self.path)
                break
            *lines, self._left = (self._left + data).split(b"\n")
            if lines:
                return [FileChange.from_json(loads(line)) for line in lines]
        return []

    def close(self) -> None:
        """Watch no longer; idempotent."""
        errand, self._errand = self._errand, None
        if errand is not None:
            errand.abandon()
