"""Building blocks of probes: outcomes, the register, and system calls by name."""

from __future__ import annotations

import ctypes
import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ESCAPED, HELD, INCONCLUSIVE = "escaped", "held", "inconclusive"
PLAIN, MOUNTED, BOTH = "plain", "mounted", "both"
COPIED = "copied"  # a process that goes on in a fork; every plain probe
LIMITED = "limited"  # a policy that allows one service of the host; every plain network probe too

# Where a probe must fire; anything else is "none: " and the reason why no control can be had.
NO_SECCOMP = "profile without the system-call filter"
BARE = "profile with nothing but namespaces and mounts"
LOOSE_MOUNTS = "the same directories mounted writable, nothing protected"
UNIX_SOCKETS = "profile that lets programs make unix sockets"
NETWORK = "the host's network, asked for by name"
ROOMY = "no limits set"
HOST = "a plain process on the host"
HOST_ROOT = "a plain process of root on the host"
HOST_NOBODY = "a plain process of nobody on the host"
HOST_USERNS = "root of new namespaces on the host"
HOST_AMBIENT = "a process of root with ambient capabilities"
HOST_GROUPS = "a process of root with another group"
HOST_FD = "a plain process on the host with a directory left open"

REFUSED = (errno.EPERM, errno.ENOSYS)
NO_SOCKET = (errno.EAFNOSUPPORT, errno.ESOCKTNOSUPPORT)


class Outcome:
    """Result of a probe, with its evidence."""

    __slots__ = ("evidence", "status")

    def __init__(self, status: str, evidence: str) -> None:
        self.status, self.evidence = status, evidence


def escaped(evidence: object) -> Outcome:
    return Outcome(ESCAPED, str(evidence))


def held(evidence: object) -> Outcome:
    return Outcome(HELD, str(evidence))


def inconclusive(evidence: object) -> Outcome:
    return Outcome(INCONCLUSIVE, str(evidence))


class Probe:
    """A probe: the forbidden effect, its severity, and a function that tries it."""

    def __init__(
        self,
        id: str,
        severity: str,
        description: str,
        control: str,
        where: str,
        run: Callable[[dict[str, Any]], Outcome],
    ) -> None:
        self.id, self.severity, self.description = id, severity, description
        self.control, self.where, self.run = control, where, run

    @property
    def area(self) -> str:
        return self.id.partition(".")[0]


PROBES: dict[str, Probe] = {}


def probe(
    id: str, severity: str, control: str, *, where: str = PLAIN, about: str = ""
) -> Callable[[Callable[[dict[str, Any]], Outcome]], Callable[[dict[str, Any]], Outcome]]:
    """Register a probe; its docstring says what must not happen."""

    def register(run: Callable[[dict[str, Any]], Outcome]) -> Callable[[dict[str, Any]], Outcome]:
        add(
            Probe(id, severity, about or " ".join((run.__doc__ or "").split()), control, where, run)
        )
        return run

    return register


def add(new: Probe) -> None:
    """Register one made by hand, as tables of probes are."""
    if new.id in PROBES:
        raise ValueError(f"two probes are called {new.id}")
    PROBES[new.id] = new


# -- system calls -----------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
NUMBERS: dict[str, int] = {}  # filled by main from what the host sent


def raw(number: int, *args: Any) -> int:
    """Make a system call; return its result, or the negated errno."""
    words = [ctypes.c_long(_word(a)) if isinstance(a, int) else a for a in args]
    result = int(_libc.syscall(ctypes.c_long(number), *words))
    return -ctypes.get_errno() if result == -1 else result


def call(name: str, *args: Any) -> int:
    """The same by name; LookupError where this machine has no such call."""
    return raw(NUMBERS[name], *args)


def _word(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def said(result: int) -> str:
    """A result of `call` in words."""
    return errno.errorcode.get(-result, str(result)) if result < 0 else f"returned {result}"


def refused(name: str, *args: Any, but: tuple[int, ...] = ()) -> Outcome:
    """Held when the call is refused before its arguments are looked at; wrong arguments tell."""
    if name not in NUMBERS:
        return inconclusive(f"{name}: not a call of this machine")
    result = call(name, *args)
    if result < 0 and -result in (*REFUSED, *but):
        return held(f"{name}: {said(result)}")
    return escaped(f"{name} reached the kernel: {said(result)}")


def attempt(action: Callable[..., Any], what: str, *arguments: Any) -> Outcome:
    """Escaped when the action works; held when the kernel refuses it."""
    try:
        result = action(*arguments)
    except OSError as exc:
        return held(f"{what}: {errno.errorcode.get(exc.errno or 0, str(exc))}")
    return escaped(f"{what}: worked ({result!r})")


def cannot_open(path: str, flags: int = os.O_RDONLY) -> Outcome:
    """Held when `path` cannot be opened. Nothing is read or written; no device is waited for."""
    how = {os.O_RDONLY: "read", os.O_WRONLY: "write"}.get(flags & os.O_ACCMODE, "read and write")

    def open_and_close() -> str:
        os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK))
        return "open"

    return attempt(open_and_close, f"open {path} to {how}")


def first_escape(outcomes: list[Outcome]) -> Outcome:
    """Combine the outcomes of several attempts: the first that escaped, else that all held."""
    for outcome in outcomes:
        if outcome.status == ESCAPED:
            return outcome
    shown = "; ".join(outcome.evidence for outcome in outcomes[:3])
    return held(f"{len(outcomes)} attempts, among them: {shown}" if len(outcomes) > 3 else shown)


# -- small readers ----------------------------------------------------------------------------


def read(path: str, most: int = 1 << 16) -> bytes:
    """The beginning of a file; empty when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return b""
    data = b""
    try:
        # The kernel gives of a long list a page at a time.
        while len(data) < most and (more := os.read(fd, most - len(data))):
            data += more
    except OSError:
        pass
    finally:
        os.close(fd)
    return data


def status_of(pid: int | str) -> dict[str, str]:
    """/proc/PID/status as a mapping."""
    text = read(f"/proc/{pid}/status").decode("utf-8", "replace")
    return {
        key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())
    }


def pids() -> list[int]:
    """Every process that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def holds(data: bytes, digest: str) -> bool:
    """Return whether some word of `data` has this digest: the token itself is never sent here."""
    import hashlib

    return any(
        hashlib.sha256(word).hexdigest() == digest for word in data.replace(b"\0", b" ").split()
    )


PATIENCE_S = 10.0
"""Seconds without a reply after which a peer counts as silent. A verdict of held never rests on it."""


def in_child(action: Callable[[], int]) -> int:
    """Run `action` in a child: its exit code, or the signal below zero.

    Raises:
        TimeoutError: It hangs.
    """
    import signal
    import time

    pid = os.fork()
    if pid == 0:
        code = 125
        try:
            code = action()
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError("the child hangs")
        time.sleep(0.002)
