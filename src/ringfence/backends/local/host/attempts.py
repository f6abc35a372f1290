"""System calls that are tried inside a sandbox, to know which kinds are refused there."""

from __future__ import annotations

from ....errors import SandboxLost
from ....launcher import wire
from ....policy import categories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Call = tuple[int, tuple[int, ...]]

_ANSWER_S = 5.0


def blocked_categories(tell: Callable[[list[Call], int], None]) -> tuple[str, ...]:
    """The kinds of system calls that are refused inside, each tried by a child of PID 1.

    Args:
        tell: Asks PID 1 to try some calls, and to say each outcome on a descriptor, the caller's.
    """
    wanted = list(categories.numbered().items())
    blocked: list[str] = []
    while wanted:
        answers = _try(tell, [call for _category, call in wanted])
        for (category, _call), number in zip(wanted, answers, strict=False):
            if number in categories.REFUSED:
                blocked.append(category)
        if len(answers) < len(wanted):  # a filter of the user's own killed whoever tried that one
            blocked.append(wanted[len(answers)][0])
        wanted = wanted[len(answers) + 1 :]
    return tuple(sorted(blocked))


def _try(tell: Callable[[list[Call], int], None], calls: list[Call]) -> list[int]:
    """Return the kernel's answer to each call, in order: an errno or 0; the list may be short."""
    ours, theirs = wire.socketpair()
    try:
        try:
            tell(calls, theirs.fileno())
        finally:
            theirs.close()
        ours.settimeout(_ANSWER_S)
        answers: list[int] = []
        while data := wire.receive_raw(ours)[0]:
            answers.append(int(data))
        return answers
    except TimeoutError as exc:
        raise SandboxLost("system calls could not be tried: no answer") from exc
    finally:
        ours.close()
