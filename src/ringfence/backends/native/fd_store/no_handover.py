"""Null object for a process without an fd store: its sandboxes end with it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...local.agents.execs import LocalExec
    from ...local.host import cgroups
    from ..live import LiveSandbox
    from ..zygote import Zygote


class NoHandover:
    """The same as `Handover`, for a backend without an fd store."""

    outlives = False
    layout: tuple[int, dict[str, str], str] | None = None

    def open(self) -> None:
        """There is no earlier process."""

    def change_zygote(self, zygote: Zygote) -> None: ...

    def change_layout(self, layout: cgroups.Layout) -> None: ...

    def add_ids(self, lock_fd: int) -> None: ...

    def expect(self, sandbox: LiveSandbox) -> None: ...

    def begin(self, sandbox: LiveSandbox, sockets: list[int]) -> None: ...

    def change(self, sandbox: LiveSandbox) -> None: ...

    def change_network(self, sandbox: LiveSandbox, sockets: list[int]) -> None: ...

    def add_agent(self, sandbox: LiveSandbox, uid: int) -> None: ...

    def begin_exec(self, sandbox: LiveSandbox, run: LocalExec) -> None: ...

    def change_paused(self, sandbox: LiveSandbox, paused: bool) -> None: ...

    def end(self, sandbox: LiveSandbox) -> None: ...

    def leave(self) -> None:
        """Preconditions: there is an fd store."""
        raise AssertionError("without an fd store sandboxes cannot survive a restart")

    def close(self) -> None: ...
