# Made by tools/make_sync_client.py of the file of the same name in _async; change that one.
"""A Ringfence server, from the outside."""

from __future__ import annotations

from contextlib import closing

from ...errors import InvalidRequest, SandboxNotFound
from ...model.base.helpful import helpful
from ...model.calls import make_spec, others_in
from ...model.client_session import SessionTimeouts
from ...model.event import Event
from ...model.execution.config import ExecutionConfig
from ...model.execution.execution import ExecutionRequest, ExecutionResult
from ...model.execution.info import ExecutionInfo
from ...model.manager_stats import Health, ManagerStats
from ...model.sandbox import SandboxView
from ...model.session import Snapshot
from ...model.spec import SandboxSpec
from .happening import follow
from .pauses import made
from .sandbox import RemoteSandbox, body_of, new_key
from .sessions import RemoteSessions
from .templates import RemoteTemplates
from .transport import Transport, segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import Any, Self, Unpack

    from ...model.calls import Mounts, Network, StrPath
    from ...model.limits import Limits
    from ...model.parts import SandboxParts
    from ..forms import Info, Key, MadeKey, Pools

    # `list` is a method here.
    Views = list[SandboxView]
    Snapshots = list[Snapshot]
    Events = list[Event]
    Forms = list[dict[str, Any]]
    Keys = list[Key]

_EXECUTIONS = "/api/v1/sandbox"
_PAGE = 1000


@helpful
class Client:
    """A server. Its sandboxes are worked with as local ones are.

    Attributes:
        sessions: Its session manager: `acquire`, `attach`, `detach`, `touch`, ...
        templates: Templates that it builds and keeps: `build`, `list`, `delete`, ...

    Args:
        server: `unix:PATH`, `http://HOST:PORT` or `https://HOST`; None takes $RINGFENCE_SERVER, else
            the socket of this user's own `ringfence serve`.
        key: An API key or a sandbox's token; None takes $RINGFENCE_API_KEY. None is needed for the
            unix socket.
        timeout_s: Without a byte from the server. Waiting for a command is not bounded by it.
        retries: How often a request that is safe to repeat is repeated.

    Raises:
        InvalidRequest: `server` is malformed. Nothing is connected before the first request.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 7,
    ) -> None:
        self._transport = Transport(server, key, timeout_s, retries)
        self.sessions = RemoteSessions(self)
        self.templates = RemoteTemplates(self._transport)

    @property
    def server(self) -> str:
        """Where it is."""
        return self._transport.address.shown

    # -- sandboxes ------------------------------------------------------------------------------

    def create(
        self,
        spec: SandboxSpec | None = None,
        *,
        mounts: Mounts = (),
        network: Network = "none",
        limits: Limits | Mapping[str, Any] | None = None,
        backend: str = "",
        name: str = "",
        timeouts: SessionTimeouts | None = None,
        metadata: Mapping[str, str] | None = None,
        use_pool: bool = True,
        idempotency_key: str | None = None,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str | int | None = None,
        workdir: StrPath | None = None,
        ttl_s: float | None = None,
        python_env: bool | None = None,
        disk_root: bool | None = None,
        protect: Sequence[str] | None = None,
        unprotect: Sequence[str] | None = None,
        deny: Sequence[str] | None = None,
        memory_dir: StrPath | None = None,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
        tier: str | None = None,
        profile: str | None = None,
        template: str | None = None,
        allow_degraded: Sequence[str] | None = None,
    ) -> RemoteSandbox:
        """Make a sandbox; see `Sandbox.create`. Paths of mounts are the server's.

        Args:
            name: For people.
            timeouts: How long it may be idle, detached or suspended; None takes the server's.
            use_pool: Whether a warm sandbox will do.
            idempotency_key: Asking again under the same key gives the same sandbox; None makes one
                up, so that repeating a lost request never makes two.
        """
        others = others_in(locals())
        wanted = make_spec(spec, mounts, network, limits, others)
        body = body_of(
            wanted,
            name=name,
            backend=backend,
            use_pool=use_pool,
            timeouts=timeouts.to_json() if timeouts else None,
            metadata=dict(metadata or {}),
        )
        return made(lambda: self._create(body, wanted, idempotency_key), RemoteSandbox.terminate)

    def _create(
        self, body: dict[str, Any], spec: SandboxSpec | None, key: str | None
    ) -> RemoteSandbox:
        answer = self._transport.json(
            "POST", "/v1/sandboxes", body=body, key=new_key() if key is None else key
        )
        view = SandboxView.from_json(answer)
        return RemoteSandbox(self._transport, view, spec or _spec_of(view))

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        name: str = "",
        idempotency_key: str | None = None,
        **changes: Unpack[SandboxParts],
    ) -> RemoteSandbox:
        """A new sandbox with the files of a snapshot; see `Sandbox.restore`.

        Args:
            changes: Fields of the spec, such as `ttl_s`, instead of those it was saved under.
        """
        given = {key: value for key, value in changes.items() if value is not None}
        if spec is not None and given:
            name = next(iter(given))
            hint = f"remove {name}=, or set it in the spec"
            raise InvalidRequest("excludes spec=", field=name, hint=hint)
        body = body_of(spec) if spec is not None else _changed(given)
        body |= {"snapshot_id": snapshot_id, "name": name}
        return made(lambda: self._create(body, spec, idempotency_key), RemoteSandbox.terminate)

    def get(self, sandbox_id: str) -> RemoteSandbox:
        """A sandbox that is there already.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
        """
        if not sandbox_id:
            raise SandboxNotFound("the sandbox id is empty")
        answer = self._transport.json("GET", f"/v1/sandboxes/{segment(sandbox_id)}")
        view = SandboxView.from_json(answer)
        return RemoteSandbox(self._transport, view, _spec_of(view))

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] = (),
        name: str | None = None,
    ) -> Views:
        """Sandboxes, oldest first; without `states` those that live."""
        label = [f"{key}={value}" for key, value in (labels or {}).items()]
        params = {"label": label, "state": [*states], "name": name}
        found = self._pages("/v1/sandboxes", params)
        return [SandboxView.from_json(each) for each in found]

    def _pages(self, path: str, params: Mapping[str, Any] | None = None) -> Forms:
        found: Forms = []
        cursor: str | None = None
        while True:
            wanted = {**(params or {}), "limit": _PAGE, "cursor": cursor}
            page = self._transport.json("GET", path, params=wanted)
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    def snapshots(self) -> Snapshots:
        """Every snapshot that is kept, oldest first."""
        return [Snapshot.from_json(each) for each in self._pages("/v1/snapshots")]

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove a snapshot; sandboxes restored from it are not touched."""
        at = f"/v1/snapshots/{segment(snapshot_id)}"
        self._transport.request("DELETE", at, repeat=False)

    # -- the execution service --------------------------------------------------------------------

    def execute(
        self, command: str | ExecutionRequest, *args: str, **options: Any
    ) -> ExecutionResult:
        """Run one command in a sandbox of its own, to its end; options as in `ExecutionRequest`."""
        asked = command if isinstance(command, ExecutionRequest) else None
        if isinstance(options.get("stdin"), str):
            options["stdin"] = options["stdin"].encode()
        request = asked or ExecutionRequest(str(command), args, **options)
        body = {"id": f"execution-{new_key()}", **_given(request)}
        # Taken first, waited for then: a connection that breaks meanwhile loses nothing.
        answer = self._transport.json(
            "POST", f"{_EXECUTIONS}/execute?plain=false", body=body, key=body["id"], timeout_s=None
        )
        return ExecutionResult.from_json(answer)

    def execution(self, execution_id: str) -> ExecutionResult:
        """An execution as it stands, or its result.

        Raises:
            ExecutionNotFound: There is none, or it is another client's.
        """
        at = f"{_EXECUTIONS}/status/{segment(execution_id)}?plain=false"
        return ExecutionResult.from_json(self._transport.json("GET", at))

    def kill_execution(self, execution_id: str) -> ExecutionResult:
        """End an execution; returns when its whole process tree is gone."""
        at = f"{_EXECUTIONS}/kill/{segment(execution_id)}?plain=false"
        return ExecutionResult.from_json(self._transport.json("POST", at, repeat=True))

    def execution_info(self) -> ExecutionInfo:
        """Which tiers there are, the config, and the system-call policy."""
        return ExecutionInfo.from_json(self._transport.json("GET", f"{_EXECUTIONS}/info"))

    def configure_executions(self, **changes: Any) -> ExecutionConfig:
        """Replace some keys of the config, such as `network_enabled`; for admins."""
        answer = self._transport.json("PATCH", f"{_EXECUTIONS}/config", body=changes, repeat=True)
        return ExecutionConfig.from_json(answer)

    # -- the server -----------------------------------------------------------------------------

    def health(self) -> Health:
        """Check everything that the server needs."""
        return Health.from_json(self._transport.json("GET", "/v1/health"))

    def stats(self) -> ManagerStats:
        """Counts and times, of all clients together."""
        return ManagerStats.from_json(self._transport.json("GET", "/v1/stats"))

    def info(self) -> Info:
        """Return the server's version, the identity of this client, and the backends that work on its host."""
        found: Info = self._transport.json("GET", "/v1/info")
        return found

    def events(self, since: int = 0) -> Events:
        """The last events of this client's sandboxes after that `seq`, oldest first."""
        page = self._transport.json("GET", "/v1/events", params={"since": since})
        return [Event.from_json(each) for each in page["items"]]

    def follow_events(self, since: int = 0) -> Generator[Event, None, None]:
        """Events as they happen, through as many connections as it takes.

        One of kind `gap` says, in `reason`, that others before it were missed for good.

        Raises:
            ServerUnreachable: The server is gone, and does not come back.
        """
        with closing(follow(self._transport, since)) as events:
            for event in events:
                yield event

    def make_key(
        self,
        owner: str,
        *,
        scope: str = "user",
        name: str = "",
        expires_in_s: float | None = None,
        max_sandboxes: int | None = None,
        max_requests: int | None = None,
    ) -> MadeKey:
        """A new key, under `key` this once; for admins. It has the bounds that are given."""
        body: dict[str, Any] = {"owner": owner, "scope": scope, "name": name}
        bounds = {
            "expires_in_s": expires_in_s,
            "max_sandboxes": max_sandboxes,
            "max_requests": max_requests,
        }
        body |= {key: value for key, value in bounds.items() if value is not None}
        found: MadeKey = self._transport.json("POST", "/v1/keys", body=body)
        return found

    def keys(self) -> Keys:
        """Every key, without what opens; for admins."""
        answer = self._transport.json("GET", "/v1/keys")
        found: Keys = answer["items"]
        return found

    def rotate_key(self, key_id: str, *, overlap_s: float = 0.0) -> MadeKey:
        """Another secret for a key, under `key` this once; the one before opens for `overlap_s` more."""
        at, body = f"/v1/keys/{segment(key_id)}/rotate", {"overlap_s": overlap_s}
        found: MadeKey = self._transport.json("POST", at, body=body)
        return found

    def delete_key(self, key_id: str, *, this_key: bool = False) -> None:
        """Let a key, and the tokens made with it, open nothing more, at once; for admins.

        Args:
            this_key: It may be the very key that this client uses.
        """
        at = f"/v1/keys/{segment(key_id)}{'?this_key=true' if this_key else ''}"
        self._transport.request("DELETE", at, repeat=False)

    def pool(self) -> Pools:
        """Return the configuration and the state of the pool; for admins."""
        found: Pools = self._transport.json("GET", "/v1/pools")
        return found

    def change_pool(self, **changes: Any) -> Pools:
        """Keep other sandboxes warm from now on; for admins."""
        config = {**(self.pool())["config"], **changes}
        found: Pools = self._transport.json("PUT", "/v1/pools", body=config, repeat=True)
        return found

    def close(self) -> None:
        """Close the connections; sandboxes live on, and can still be asked. Idempotent."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.server}>"


def _spec_of(view: SandboxView) -> SandboxSpec:
    """Rebuild the known part of the spec of a sandbox that another client made."""
    return SandboxSpec(
        labels=view.labels,
        network=view.network,
        limits=view.limits,
        template=view.template,
        tier=view.tier,
        profile=view.profile,
    )


def _changed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of some fields of a spec."""
    parts = {"mounts": (), "network": "none", "limits": None, **given}
    spec = make_spec(None, parts.pop("mounts"), parts.pop("network"), parts.pop("limits"), parts)
    return {name: value for name, value in body_of(spec).items() if name in given}


def _given(request: ExecutionRequest) -> dict[str, Any]:
    return {name: value for name, value in request.to_json().items() if value is not None}
