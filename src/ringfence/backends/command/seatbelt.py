"""Profiles of macOS's `sandbox-exec`, written from our policy. Pure: text out."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD = """(version 1)
(deny default)
(allow process-fork)
(allow process-exec)
(allow signal (target same-sandbox))
(allow sysctl-read)
(allow file-read-metadata)
"""
_SYSTEM = ("/usr", "/bin", "/sbin", "/System", "/Library", "/private/etc", "/dev")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/tty")


def profile(
    readable: Sequence[str],
    writable: Sequence[str],
    *,
    denied: Sequence[str] = (),
    network: bool = False,
) -> str:
    """A profile that denies everything but this; later rules win, so that denials come last.

    Args:
        readable: Absolute paths that may be read, with all below, besides the system's own.
        writable: Those that may be read and written.
        denied: Those that may be neither, wherever they lie.
        network: Whether the host's network may be used; a list of hosts needs a proxy in front.
    """
    lines = [_HEAD]
    lines += [f"(allow file-read* (subpath {_quoted(p)}))\n" for p in (*_SYSTEM, *readable)]
    lines += [f"(allow file-write* (literal {_quoted(p)}))\n" for p in _DEVICES]
    lines += [f"(allow file-read* file-write* (subpath {_quoted(p)}))\n" for p in writable]
    lines.append("(allow network*)\n" if network else "(deny network*)\n")
    lines += [f"(deny file-read* file-write* (subpath {_quoted(p)}))\n" for p in denied]
    return "".join(lines)


def _quoted(path: str) -> str:
    """A string of the profile language; a path with a quote must not end it.

    Raises:
        ValueError: It is not absolute, or has a character that no profile can hold.
    """
    if not path.startswith("/") or "\0" in path or "\n" in path:
        raise ValueError(f"{path!r} cannot be written in a Seatbelt profile")
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
