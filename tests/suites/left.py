"""Whether a command that was ended early left a process: looked for by a program that is seen to find one."""

from __future__ import annotations

LEFT, NONE = "left", "none"


def look(seconds: int) -> str:
    """A shell script that says whether a `sleep` of so many seconds runs.

    The control comes first: another one is started, and looked for until it is found.
    """
    return (
        f"sleep 9{seconds} & until pgrep -fx 'sleep 9{seconds}' >/dev/null; do :; done; kill $!; "
        f"if pgrep -fx 'sleep {seconds}' >/dev/null; then echo {LEFT}; else echo {NONE}; fi"
    )


TIMEOUTS_S = (1, 5, 25)
"""A command says something at once; on a busy machine at once may be late: then a longer one is tried."""
