"""The session manager of a server, with the surface of one in this process."""

from __future__ import annotations

from ...model.acquire import AcquireOptions, AttachRequest
from ...model.base.helpful import helpful
from ...model.client_session import ClientSession, SessionState, id_of
from ...model.granted import SandboxCapabilities
from ...model.spec import SandboxSpec
from .pauses import made
from .sandbox import AsyncRemoteSandbox, body_of, new_key
from .transport import segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

    from ...model.client_session import SessionRef
    from .client import AsyncClient

    Sessions = list[ClientSession]  # `list` is a method here

_SESSIONS = "/v1/sessions"


@helpful
class AsyncRemoteLease:
    """A session of this client's at a server; as a context manager it is released at the end.

    Attributes:
        session: As the server said it last.
        sandbox: To work with.
        newly_created: False where the client had this session before.
    """

    def __init__(
        self,
        sessions: AsyncRemoteSessions,
        session: ClientSession,
        sandbox: AsyncRemoteSandbox,
        newly_created: bool,
    ) -> None:
        self._sessions, self.session, self.sandbox = sessions, session, sandbox
        self.newly_created = newly_created

    @property
    def id(self) -> str:
        """Of the session."""
        return self.session.session_id

    async def capabilities(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do."""
        return await self.sandbox.capabilities()

    async def release(self, *, keep_alive: bool = False) -> None:
        """End it; with `keep_alive` a fresh one of the same kind is kept warm instead."""
        self.session = await self._sessions.release(self.session, keep_alive=keep_alive)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.release()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.session.sandbox_id}>"


@helpful
class AsyncRemoteSessions:
    """`client.sessions`: the verbs of `SessionManager`, for the client whose key this is.

    A session may be given by its id, its sandbox's id, or as the object that has one.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._transport = client, client._transport

    async def acquire(
        self,
        spec: SandboxSpec | Mapping[str, Any] | None = None,
        options: AcquireOptions | Mapping[str, Any] | None = None,
        *,
        client_id: str | None = None,
    ) -> AsyncRemoteLease:
        """A session on a sandbox as `spec` asks, which no other client has ever used.

        Args:
            client_id: For whom; None is this client itself. Others are for admins.

        Raises: As `SessionManager.acquire`.
        """
        wanted = SandboxSpec() if spec is None else SandboxSpec.taken(spec, "spec")
        how = AcquireOptions() if options is None else AcquireOptions.taken(options, "options")
        if not how.key:  # repeating a lost request must not make two
            how = how.altered(key=new_key())
        body = {"spec": body_of(wanted), "options": how.to_json(), "client_id": client_id}
        return await self._leased("", body)

    async def attach(self, request: AttachRequest | Mapping[str, Any]) -> AsyncRemoteLease:
        """Work with a certain sandbox of this client's; see `SessionManager.attach`."""
        wanted = AttachRequest.taken(request, "request")
        body = wanted.to_json()
        if wanted.create_spec is not None:
            body["create_spec"] = body_of(wanted.create_spec)
        return await self._leased("/attach", body)

    async def _leased(self, path: str, body: dict[str, Any]) -> AsyncRemoteLease:
        return await made(lambda: self._lease(path, body), AsyncRemoteLease.release)

    async def _lease(self, path: str, body: dict[str, Any]) -> AsyncRemoteLease:
        answer = await self._transport.json("POST", f"{_SESSIONS}{path}", body=body, repeat=True)
        session = ClientSession.from_json(answer["session"])
        sandbox = await self._client.get(session.sandbox_id)
        return AsyncRemoteLease(self, session, sandbox, answer["newly_created"])

    async def release(self, session: SessionRef, *, keep_alive: bool = False) -> ClientSession:
        """End a session that is no longer needed; releasing it twice is once."""
        return await self._verb(session, "release", {"keep_alive": keep_alive})

    async def detach(self, session: SessionRef) -> ClientSession:
        """Leave a session alone for a while; what runs goes on."""
        return await self._verb(session, "detach")

    async def suspend(self, session: SessionRef) -> ClientSession:
        """Freeze every process of a session."""
        return await self._verb(session, "suspend")

    async def resume(self, session: SessionRef) -> ClientSession:
        """Let the processes of a session go on, and make it active."""
        return await self._verb(session, "resume")

    async def touch(self, session: SessionRef) -> ClientSession:
        """Begin the timeouts of a session anew."""
        return await self._verb(session, "touch")

    async def extend(self, session: SessionRef, ttl_s: float) -> ClientSession:
        """Let a session end `ttl_s` seconds from now, whenever it was to end before."""
        at = f"/v1/sandboxes/{segment(id_of(session))}/extend"
        await self._transport.json("POST", at, body={"ttl_s": ttl_s}, repeat=True)
        return await self.get(session)

    async def terminate(self, session: SessionRef) -> ClientSession:
        """End a session and its sandbox. Legal in every state; ending it twice is once."""
        return await self._verb(session, "terminate")

    async def _verb(
        self, session: SessionRef, verb: str, body: dict[str, Any] | None = None
    ) -> ClientSession:
        at = f"{_SESSIONS}/{segment(id_of(session))}/{verb}"
        answer = await self._transport.json("POST", at, body=body, repeat=True)
        return ClientSession.from_json(answer)

    async def get(self, session: SessionRef) -> ClientSession:
        """A session, also for a while after it has ended.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
        """
        at = f"{_SESSIONS}/{segment(id_of(session))}"
        return ClientSession.from_json(await self._transport.json("GET", at))

    async def list(
        self, *, states: Sequence[SessionState | str] = (), labels: Mapping[str, str] | None = None
    ) -> Sessions:
        """Sessions that have not ended, oldest first."""
        label = [f"{key}={value}" for key, value in (labels or {}).items()]
        params = {"state": [str(each) for each in states], "label": label}
        page = await self._transport.json("GET", _SESSIONS, params=params)
        return [ClientSession.from_json(each) for each in page["items"]]

    async def sandbox(self, session: SessionRef) -> AsyncRemoteSandbox:
        """The sandbox of a session, to work with."""
        return await self._client.get(id_of(session))

    async def capabilities(self, session: SessionRef) -> SandboxCapabilities:
        """Read back from the kernel what a sandbox can do."""
        return await (await self.sandbox(session)).capabilities()

    async def default_sandbox(self) -> ClientSession | None:
        """The session of this client's default sandbox; None when there is none, or it has ended."""
        return _session_in(await self._transport.json("GET", f"{_SESSIONS}/default"))

    async def set_default_sandbox(self, session: SessionRef | None) -> ClientSession | None:
        """Choose the sandbox that this client means when it names none; None: none."""
        body = {"sandbox_id": None if session is None else id_of(session)}
        at = f"{_SESSIONS}/default"
        return _session_in(await self._transport.json("PUT", at, body=body, repeat=True))


def _session_in(answer: dict[str, Any]) -> ClientSession | None:
    found = answer["session"]
    return ClientSession.from_json(found) if found else None
