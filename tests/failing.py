"""The steps of a call to a backend, each of which can be made to fail once at its start."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import ringfence

_ROOT = f"{Path(ringfence.__file__).parent}/"
# Steps that give back or hand over by themselves, as any `close` does: where they fail, something stays.
OF_THEMSELVES = {
    "Acquired.__init__",
    "Acquired.__enter__",
    "Acquired.__exit__",
    "Acquired.callback",
    "Acquired.pop_all",
}


class StepError(OSError):
    """Put in by a test."""


class Step(NamedTuple):
    """A function of the backend."""

    file: str
    name: str


class Steps:
    """The steps of a call, in this thread. Each is told by its file and qualified name.

    Args:
        rooms: Packages whose functions are steps, as `backends/native`.
    """

    def __init__(self, *rooms: str) -> None:
        self.seen: dict[Step, None] = {}
        self._rooms = tuple(f"{_ROOT}{room}/" for room in rooms)
        self._fails: Step | None = None

    def of(self, call: Callable[[], object]) -> list[Step]:
        self._fails = None
        self._run(call)
        return [*self.seen]

    def fail(self, step: Step, call: Callable[[], object]) -> None:
        """Call it while that step fails once. What the call does of it is its own matter."""
        self._fails = step
        with suppress(Exception):  # which error it is made of is not the question here
            self._run(call)

    def _run(self, call: Callable[[], object]) -> None:
        sys.setprofile(self._look)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._rooms):
            step = Step(code.co_filename.removeprefix(_ROOT), code.co_qualname)
            if self._fails is None:
                self.seen[step] = None
            elif step == self._fails:
                raise StepError(errno.EIO, f"no {step.name} today")  # this ends the profile too


class Held(Protocol):
    """What this process has of the host for sandboxes of a backend."""

    kinds: list[Callable[[], Any]]

    def at_rest(self) -> dict[str, Any]:
        """Count it, when what ends by itself has ended."""

    def unlike(self, before: dict[str, Any]) -> dict[str, Any]:
        """Tell what is other than before, once all that ends by itself has ended."""


def left_by_creates(
    held: Held, rooms: tuple[str, ...], is_exempt: Callable[[str], bool]
) -> tuple[dict[Step, dict[str, Any]], int]:
    """Let each step of each kind of create fail once; what stayed, by step, and how many were tried.

    Args:
        is_exempt: Whether a function of that qualified name is no step.
    """
    tried: set[str] = set()
    left, before = {}, held.at_rest()
    for create in held.kinds:
        made: list[Any] = []

        def begin(create: Callable[[], Any] = create, made: list[Any] = made) -> None:
            made.append(create())

        steps = Steps(*rooms)
        for step in steps.of(begin):
            if step.name in tried or is_exempt(step.name) or step.name.endswith(".close"):
                continue
            tried.add(step.name)
            steps.fail(step, begin)
            while made:
                made.pop().terminate()
            if found := held.unlike(before):
                left[step] = found
                before = held.at_rest()
    return left, len(tried)
