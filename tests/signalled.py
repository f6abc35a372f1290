"""What a program is handed of signals: seen by coreutils' `env`, which can also change it."""

from __future__ import annotations

from ringfence import Sandbox

_LIST = ["env", "--list-signal-handling", "env"]


def assert_nothing_is_ignored_or_blocked(sandbox: Sandbox) -> None:
    """Alone, and beside others; with the control that what is ignored and blocked is told."""
    changed = ["env", "--ignore-signal=HUP", "--block-signal=USR1", *_LIST]
    told = [line.split()[0] for line in sandbox.exec(changed).stderr_text.splitlines()]
    assert ["HUP", "USR1"] == told, "the control"
    assert "" == sandbox.exec(_LIST).stderr_text
    # Beside another process, programs are started in another way.
    sandbox.start(["sleep", "600"])
    assert "" == sandbox.exec(_LIST).stderr_text
