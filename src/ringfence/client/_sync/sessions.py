# Made by tools/make_sync_client.py of the file of the same name in _async; change that one.
"""The session manager of a server, with the surface of one in this process."""

from __future__ import annotations

from ...model.acquire import AcquireOptions, AttachRequest
from ...model.base.helpful import helpful
from ...model.client_session import ClientSession, SessionState, id_of
from ...model.granted import SandboxCapabilities
from ...model.spec import SandboxSpec
from .pauses import made
from .sandbox import RemoteSandbox, body_of, new_key
from .transport import segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

    from ...model.client_session import SessionRef
    from .client import Client

    Sessions = list[ClientSession]  # `list` is a method here

_SESSIONS = "/v1/sessions"


@helpful
class RemoteLease:
    """A session of this client's at a server; as a context manager it is released at the end.

    Attributes:
        session: As the server said it last.
        sandbox: To work with.
        newly_created: False where the client had this session before.
    """

    def __init__(
        self,
        sessions: RemoteSessions,
        session: ClientSession,
        sandbox: RemoteSandbox,
        newly_created: bool,
    ) -> None:
        self._sessions, self.session, self.sandbox = sessions, session, sandbox
        self.newly_created = newly_created

    @property
    def id(self) -> str:
        """Of the session."""
        return self.session.session_id

    def capabilities(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do."""
        return self.sandbox.capabilities()

    def release(self, *, keep_alive: bool = False) -> None:
        """End it; with `keep_alive` a fresh one of the same kind is kept warm instead."""
        self.session = self._sessions.release(self.session, keep_alive=keep_alive)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.session.sandbox_id}>"


@helpful
class RemoteSessions:
    """`client.sessions`: the verbs of `SessionManager`, for the client whose key this is.

    A session may be given by its id, its sandbox's id, or as the object that has one.
    """

    def __init__(self, client: Client) -> None:
        self._client, self._transport = client, client._transport

    def acquire(
        self,
        spec: SandboxSpec | Mapping[str, Any] | None = None,
        options: AcquireOptions | Mapping[str, Any] | None = None,
        *,
        client_id: str | None = None,
    ) -> RemoteLease:
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
        return self._leased("", body)

    def attach(self, request: AttachRequest | Mapping[str, Any]) -> RemoteLease:
        """Work with a certain sandbox of this client's; see `SessionManager.attach`."""
        wanted = AttachRequest.taken(request, "request")
        body = wanted.to_json()
        if wanted.create_spec is not None:
            body["create_spec"] = body_of(wanted.create_spec)
        return self._leased("/attach", body)

    def _leased(self, path: str, body: dict[str, Any]) -> RemoteLease:
        return made(lambda: self._lease(path, body), RemoteLease.release)

    def _lease(self, path: str, body: dict[str, Any]) -> RemoteLease:
        answer = self._transport.json("POST", f"{_SESSIONS}{path}", body=body, repeat=True)
        session = ClientSession.from_json(answer["session"])
        sandbox = self._client.get(session.sandbox_id)
        return RemoteLease(self, session, sandbox, answer["newly_created"])

    def release(self, session: SessionRef, *, keep_alive: bool = False) -> ClientSession:
        """End a session that is no longer needed; releasing it twice is once."""
        return self._verb(session, "release", {"keep_alive": keep_alive})

    def detach(self, session: SessionRef) -> ClientSession:
        """Leave a session alone for a while; what runs goes on."""
        return self._verb(session, "detach")

    def suspend(self, session: SessionRef) -> ClientSession:
        """Freeze every process of a session."""
        return self._verb(session, "suspend")

    def resume(self, session: SessionRef) -> ClientSession:
        """Let the processes of a session go on, and make it active."""
        return self._verb(session, "resume")

    def touch(self, session: SessionRef) -> ClientSession:
        """Begin the timeouts of a session anew."""
        return self._verb(session, "touch")

    def extend(self, session: SessionRef, ttl_s: float) -> ClientSession:
        """Let a session end `ttl_s` seconds from now, whenever it was to end before."""
        at = f"/v1/sandboxes/{segment(id_of(session))}/extend"
        self._transport.json("POST", at, body={"ttl_s": ttl_s}, repeat=True)
        return self.get(session)

    def terminate(self, session: SessionRef) -> ClientSession:
        """End a session and its sandbox. Legal in every state; ending it twice is once."""
        return self._verb(session, "terminate")

    def _verb(
        self, session: SessionRef, verb: str, body: dict[str, Any] | None = None
    ) -> ClientSession:
        at = f"{_SESSIONS}/{segment(id_of(session))}/{verb}"
        answer = self._transport.json("POST", at, body=body, repeat=True)
        return ClientSession.from_json(answer)

    def get(self, session: SessionRef) -> ClientSession:
        """A session, also for a while after it has ended.

        Raises:
            SandboxNotFound: There is none, or it is another client's.
        """
        at = f"{_SESSIONS}/{segment(id_of(session))}"
        return ClientSession.from_json(self._transport.json("GET", at))

    def list(
        self, *, states: Sequence[SessionState | str] = (), labels: Mapping[str, str] | None = None
    ) -> Sessions:
        """Sessions that have not ended, oldest first."""
        label = [f"{key}={value}" for key, value in (labels or {}).items()]
        params = {"state": [str(each) for each in states], "label": label}
        page = self._transport.json("GET", _SESSIONS, params=params)
        return [ClientSession.from_json(each) for each in page["items"]]

    def sandbox(self, session: SessionRef) -> RemoteSandbox:
        """The sandbox of a session, to work with."""
        return self._client.get(id_of(session))

    def capabilities(self, session: SessionRef) -> SandboxCapabilities:
        """Read back from the kernel what a sandbox can do."""
        return (self.sandbox(session)).capabilities()

    def default_sandbox(self) -> ClientSession | None:
        """The session of this client's default sandbox; None when there is none, or it has ended."""
        return _session_in(self._transport.json("GET", f"{_SESSIONS}/default"))

    def set_default_sandbox(self, session: SessionRef | None) -> ClientSession | None:
        """Choose the sandbox that this client means when it names none; None: none."""
        body = {"sandbox_id": None if session is None else id_of(session)}
        at = f"{_SESSIONS}/default"
        return _session_in(self._transport.json("PUT", at, body=body, repeat=True))


def _session_in(answer: dict[str, Any]) -> ClientSession | None:
    found = answer["session"]
    return ClientSession.from_json(found) if found else None
