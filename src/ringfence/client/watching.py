"""Output given to a function as it comes, from a thread of its own."""

from __future__ import annotations

import threading

from ..errors import RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
