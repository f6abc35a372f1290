"""The client: makes, ends and resumes the sandboxes of sessions.

Source: agents.sandbox.session.sandbox_client (0.24).
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Literal

from agents.sandbox.manifest import Manifest
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.snapshot import resolve_snapshot

from ...errors import SandboxNotFound
from ..origin import Origin
from .session import RingfenceSandboxSession, RingfenceSandboxSessionState
from .workspace import granted, mounts_of

if TYPE_CHECKING:
    from agents.sandbox.session import SandboxSession, SandboxSessionState
    from agents.sandbox.session.dependencies import Dependencies
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec

    from ...model.mount import Mount
    from ...sandbox import AsyncSandbox


class RingfenceSandboxClientOptions(BaseSandboxClientOptions):
    """Options of a run beyond those of the client; all of them JSON.

    Attributes:
        exposed_ports: Ports that `resolve_exposed_port` accepts.
        create: Further keyword arguments of `Sandbox.create`.
    """

    type: Literal["ringfence"] = "ringfence"
    exposed_ports: tuple[int, ...] = ()
    create: dict[str, Any] = {}  # noqa: RUF012  pydantic copies defaults


class RingfenceSandboxClient(BaseSandboxClient[RingfenceSandboxClientOptions]):
    """Sandboxes of this process or of a server.

    Args:
        server, options: See `Origin`; the options must be JSON, as sessions are resumed from it.
        instrumentation, dependencies: The framework's own.
    """

    backend_id = "ringfence"
    supports_default_options = True

    def __init__(
        self,
        *,
        server: str | None = None,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
        **options: Any,
    ) -> None:
        self._server, self._options = server, options
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: RingfenceSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """A new sandbox, whose workspace is a directory of its own at the manifest's root."""
        given = options or RingfenceSandboxClientOptions()
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        create = {**self._options, **given.create}
        sandbox = await _make(create, self._server, manifest)
        session_id = uuid.uuid4()
        state = RingfenceSandboxSessionState(
            session_id=session_id,
            manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            exposed_ports=given.exposed_ports,
            sandbox_id=sandbox.id,
            server=self._server,
            create=create,
        )
        return self._wrapped(RingfenceSandboxSession(state, sandbox))

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End its sandbox."""
        inner = session._inner
        if not isinstance(inner, RingfenceSandboxSession):
            raise TypeError("not a session of Ringfence")
        await inner.shutdown()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """The sandbox if it still lives; else a new one, which the framework fills from the snapshot."""
        if not isinstance(state, RingfenceSandboxSessionState):
            raise TypeError("not a state of Ringfence")
        state.assert_path_grants_rebound()
        lives = True
        try:
            sandbox = await Origin(server=state.server).async_find(state.sandbox_id)
            _check_grants(sandbox, granted(state.server, state.manifest))
        except SandboxNotFound:
            lives = False
            sandbox = await _make(state.create, state.server, state.manifest)
            state.sandbox_id = sandbox.id
            state.workspace_root_ready = False
        inner = RingfenceSandboxSession(state, sandbox)
        inner._set_start_state_preserved(lives, system=lives)
        return self._wrapped(inner)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """From JSON."""
        return self._deserialize_session_state_payload(payload, RingfenceSandboxSessionState)

    def _wrapped(self, inner: RingfenceSandboxSession) -> SandboxSession:
        return self._wrap_session(inner, instrumentation=self._instrumentation)


async def _make(create: dict[str, Any], server: str | None, manifest: Manifest) -> AsyncSandbox:
    """A sandbox with a writable directory at the manifest's root, and what that grants of the host."""
    mounts = mounts_of(create, server, manifest)
    return await Origin({**create, "mounts": mounts}, server).async_lasting()


def _check_grants(sandbox: AsyncSandbox, grants: list[Mount]) -> None:
    """Refuse changed host grants: a running sandbox's mounts do not change."""
    for mount in grants:
        if mount not in sandbox.spec.mounts:
            raise ValueError(
                f"the manifest's grant of {mount.target} changed since the sandbox was made: "
                "make a new session"
            )
