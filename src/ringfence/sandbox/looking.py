"""Search and watch a sandbox's files through a helper that runs inside; its output is untrusted."""

from __future__ import annotations

import json
import os

from ..errors import InvalidRequest, IoError
from ..model.base.helpful import helpful
from ..model.base.jsonform import loads
from ..model.found import FileChange, read_answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..backends.protocol import BackendFiles, HelperTask

MOST_FOUND_BYTES = 32 << 20
_CHUNK = 1 << 18


def ask(files: BackendFiles, what: str, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The JSON form of all that is found."""
    task, text = files.start_helper(what, path, json.dumps(asked)), bytearray()
    try:
        while data := os.read(task.stream, _CHUNK):
            text += data
            if len(text) > MOST_FOUND_BYTES:
                raise too_much()
    except BaseException:
        task.abandon()
        raise
    task.finish(path)
    return found_in(bytes(text))


def found_in(text: bytes) -> dict[str, Any]:
    """Parse the complete answer of a helper."""
    found = read_answer(text)
    if found is None:
        raise IoError("the helper process in the sandbox was killed", retryable=True)
    return found


def too_much() -> InvalidRequest:
    return InvalidRequest("the result is too large", field="pattern", hint="request a smaller part")


@helpful
class Watch:
    """A running watch: changes are reported from construction until `close`.

    Attributes:
        path: As it was asked for.
    """

    def __init__(self, files: BackendFiles, path: str, *, recursive: bool) -> None:
        self.path, self._left = path, b""
        self._task: HelperTask | None = files.start_helper(
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
        return self._task.stream if self._task is not None else -1

    def read(self) -> list[FileChange]:
        """Read the changes since the last read; wait for the first; empty at the end.

        Raises:
            FileError: It cannot be watched, or not any more.
        """
        while self._task is not None:
            data = os.read(self._task.stream, _CHUNK)
            if not data:
                task, self._task = self._task, None
                task.finish(self.path)
                break
            *lines, self._left = (self._left + data).split(b"\n")
            if lines:
                return [FileChange.from_json(loads(line)) for line in lines]
        return []

    def close(self) -> None:
        """Watch no longer; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.abandon()
