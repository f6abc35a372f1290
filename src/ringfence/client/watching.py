"""Output given to a function as it comes, and input written, each from a thread of its own."""

from __future__ import annotations

import threading
from contextlib import suppress

from ..errors import ExecError, RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..model.execs.exec_view import ExecView
    from ._sync.transport import Transport


def watch(transport: Transport, at: str, name: str, callback: Callable[[bytes], None]) -> None:
    """Call `callback` with each piece of stream `name` of the exec at `at`."""

    def run() -> None:
        from ._sync.stream import RemoteStream

        try:
            for chunk in RemoteStream(transport, at, name):
                callback(chunk)
        except RingfenceError:
            pass  # whoever waits for the process is told

    threading.Thread(target=run, name=f"ringfence-{name}", daemon=True).start()


def feed(transport: Transport, at: str, view: ExecView, data: bytes) -> None:
    """Write `data` to the exec at `at`, then end its input. Input that cannot arrive ends the exec."""

    def run() -> None:
        from ._sync.process import RemoteStdin

        stdin = RemoteStdin(transport, at, view)
        try:
            stdin.write(data)
            stdin.close()
        except ExecError:
            pass  # it needed no more
        except RingfenceError:
            with suppress(RingfenceError):
                transport.json("POST", f"{at}/kill", repeat=True)

    threading.Thread(target=run, name="ringfence-stdin", daemon=True).start()
