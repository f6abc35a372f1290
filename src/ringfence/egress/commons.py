"""State shared by all sandboxes of one egress process."""

from __future__ import annotations

import resource

from .dns.own import OwnAddresses
from .dns.resolve import Resolver
from .io.pipes import Pipes
from .record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .io.loop import Loop
    from .rules import Ruled
    from .tls.ca import Authority
    from .tls.terminator import Terminator

_RESERVED = 256  # descriptors: modules, resolver threads, pipes in use for a moment
_A_SANDBOX, _A_CONNECTION = 4, 6  # descriptors: two sockets each, and two pipes that are full


class Commons:
    """Made once.

    Args:
        tell: Takes messages for the host process.
        terminator: Ends TLS; None in a process that cannot.
    """

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[dict[str, Any]], bool],
        terminator: Terminator | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        self.loop = loop
        self.sandboxes: dict[str, Ruled] = {}
        self.connections = 0
        self.pipes = Pipes()
        self.record = Record(loop, tell)
        self.resolver = resolver or Resolver(loop)
        self.terminator = terminator
        self.own = OwnAddresses(loop, self._rejudge)
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED

    def has_room_for(self, sandbox: Ruled) -> bool:
        """Return whether `sandbox` may have one more connection, given the shares of the others.

        While a quarter is free, any sandbox may; the last quarter is divided among all.
        """
        most = (self._most - _A_SANDBOX * len(self.sandboxes)) // _A_CONNECTION
        if self.connections < most * 3 // 4:
            return True
        share = max(1, most // (4 * max(1, len(self.sandboxes))))
        return self.connections < most and len(sandbox.connections) <= share

    def authority_of(self, given: dict[str, str] | None) -> Authority | None:
        """The certificate authority that was `given` to a sandbox; None where there is none."""
        if given is None or self.terminator is None:
            return None
        return self.terminator.authority(given)

    def _rejudge(self) -> None:
        for sandbox in list(self.sandboxes.values()):
            sandbox.rejudge()

    def close(self) -> None:
        """End everything; sandboxes first."""
        for sandbox in list(self.sandboxes.values()):
            sandbox.close()
        self.sandboxes.clear()
        self.record.flush()
        self.resolver.close()
        self.own.close()
        self.pipes.close()
