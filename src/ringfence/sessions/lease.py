"""A client's lease: a session and its sandbox."""

from __future__ import annotations

from ..model.base.helpful import helpful
from ..model.client_session import SessionState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.client_session import ClientSession
    from ..model.granted import SandboxCapabilities
    from ..sandbox.sync import Sandbox
    from .live import Live
    from .parts import Manager


@helpful
class Lease:
    """A session of a client's; as a context manager it is released at the end of the block.

    Attributes:
        sandbox: A `Sandbox` like any other. Using it keeps the session alive; terminating it ends
            the session. `AsyncSandbox(lease.sandbox)` is its asynchronous form.
        newly_created: False where the client had this session before.
    """

    def __init__(self, manager: Manager, live: Live, *, newly_created: bool = True) -> None:
        self._manager, self._live = manager, live
        self.sandbox: Sandbox = live.sandbox
        self.newly_created = newly_created

    @property
    def session(self) -> ClientSession:
        """The session as it is now; also when it has ended."""
        return self._live.view()

    @property
    def id(self) -> str:
        return self._live.id

    def capabilities(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do."""
        return self._manager.capabilities(self._live.id)

    def release(self, *, keep_alive: bool = False) -> None:
        if self._live.state == SessionState.TERMINATED:
            return
        self._manager.release(self._live.id, keep_alive=keep_alive)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {self._live.id} of {self._live.sandbox_id}: {self._live.state}>"
