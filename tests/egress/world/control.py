"""Asking the world's servers what they saw, and telling them what to do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from . import places
from .record import Event


class Control:
    """One server process of the world; safe to use from several threads."""

    def __init__(self, directory: Path, role: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(directory / f"{role}.control"))
        self._file = self._socket.makefile("r", encoding="utf-8")
        self._turn = threading.Lock()

    def ask(self, verb: str, **arguments: Any) -> Any:
        with self._turn:
            self._socket.sendall(json.dumps([verb, arguments]).encode() + b"\n")
            answer = json.loads(self._file.readline())
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def mark(self) -> int:
        """Where the record ends now."""
        return cast(int, self.ask("mark"))

    def seen(self, mark: int = 0, **facts: Any) -> list[Event]:
        """What was put on record from `mark` on, if it holds all of `facts`."""
        events = cast(list[Event], self.ask("since", number=mark))
        return [event for event in events if facts.items() <= event.items()]

    def wait(self, mark: int = 0, patience_s: float = 10.0, **facts: Any) -> list[Event]:
        """The same, as soon as there is any; empty after `patience_s`."""
        found = self.ask("wait", number=mark, facts=facts, patience_s=patience_s)
        return cast(list[Event], found)

    def zone(self, name: str, records: places.Records | Sequence[places.Records]) -> None:
        """From now on `name` has these records; of several sets each is answered once, in turn."""
        self.ask("zone", name=name, records=records)

    def spawn(self, argv: Sequence[str], log: Path, **options: Any) -> Program:
        """Run a program where this process runs."""
        return Program(self, self.ask("spawn", argv=list(argv), log=str(log), **options))

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Program:
    """A program that runs in another network; a context manager that ends it."""

    def __init__(self, control: Control, pid: int) -> None:
        self._control, self.pid = control, pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._control.ask("end", pid=self.pid)
