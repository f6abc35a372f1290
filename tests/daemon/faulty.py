"""`ringfence serve` that kills itself at a labelled step, once a file names the step.

    python -m tests.daemon.faulty FILE serve --state-dir ...

A label is `CLASS.METHOD before|after`. The step is taken when the file says so at that moment, so that
what the daemon does by itself at its start does not count.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.fd_store.handover import Handover
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.cli.main import main
from ringfence.execs.execs import Execs
from ringfence.execs.pump import SpooledPump
from ringfence.sessions.catalogue.index import SessionIndex
from ringfence.sessions.maker import Maker
from ringfence.sessions.manager import SessionManager
from ringfence.snapshots.catalogue import Catalogue
from ringfence.spool.spool import Spool
from ringfence.store.store import Store

CLASSES: dict[str, type] = {
    each.__name__: each
    for each in (
        SessionIndex,
        Catalogue,
        Execs,
        Handover,
        Maker,
        NativeBackend,
        NativeSandbox,
        SessionManager,
        Spool,
        SpooledPump,
        Store,
    )
}
STEPS = {
    "create": (
        "Store.add_sandbox",
        "NativeBackend.provision",
        "Handover.begin",
        "Store.add_session",
        "SessionIndex.enter",
    ),
    "exec": (
        "Execs._put",
        "Handover.begin_exec",
        "NativeSandbox.send",
        "Execs._attend",
        "Spool.take",
        "SpooledPump.result",
        "Handover._end_exec",
    ),
    "snapshot": (
        "NativeSandbox.snapshot",
        "Catalogue._write_description",
        "Store.add_snapshot",
    ),
    "suspend": ("NativeSandbox.suspend", "Store.change_session"),
    "resume": ("NativeSandbox.resume", "Store.change_session"),
    "delete": (
        "SessionManager.end",
        "Handover.end",
        "NativeSandbox.terminate",
        "Maker.ended",
        "SessionIndex.leave",
    ),
}
"""What is done, and where the daemon is killed while it does it: before each, and after the last."""
LABELS = [
    (verb, label)
    for verb, places in STEPS.items()
    for label in [*(f"{where} before" for where in places), f"{places[-1]} after"]
]


def wrap(cls: type, name: str, file: str) -> None:
    whole: Callable[..., Any] = getattr(cls, name)
    label = f"{cls.__name__}.{name}"

    def die_at(when: str) -> None:
        try:
            with open(file, encoding="utf-8") as wanted:
                is_it = wanted.read() == f"{label} {when}"
        except FileNotFoundError:
            return
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(whole)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        die_at("before")
        result = whole(self, *args, **options)
        die_at("after")
        return result

    setattr(cls, name, call)


def install(file: str) -> None:
    for where in {where for places in STEPS.values() for where in places}:
        cls, _, name = where.partition(".")
        wrap(CLASSES[cls], name, file)


if __name__ == "__main__":
    install(sys.argv.pop(1))
    sys.exit(main())
