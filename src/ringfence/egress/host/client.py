"""Library interface of the egress process."""

from __future__ import annotations

import os
from _thread import allocate_lock

from ...errors import NetworkPolicyError
from .line import Line
from .served import Served

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ...model.net.netlog import NetworkEvent
    from ...model.net.network import NetworkPolicy

PLAIN, TLS = "plain", "tls"


class Egress:
    """The egress processes of one host process: started when first needed. Thread-safe."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = allocate_lock()  # for both dicts
        self._lines: dict[str, Line] = {}
        self._kinds: dict[str, str] = {}  # by sandbox: which process has it

    def serve(
        self,
        sandbox_id: str,
        policy: NetworkPolicy,
        secrets: Mapping[str, str],
        network_bytes: int | None,
        listeners: list[int],
        *,
        authority: Mapping[str, str] | None = None,
        token: str = "",
    ) -> None:
        """Let a sandbox reach what `policy` allows. Returns before it is ready: clients wait.

        Args:
            secrets: Values by name; they are never inside.
            network_bytes: Most bytes in both directions together.
            listeners: Descriptors of its TCP listener and its UDP resolver, made in its network
                namespace; ours from then on, and closed even when this fails.
            authority: `cert` and `key`, from `make_authority`; for policies that end TLS.
            token: Hexadecimal, said first by who connects to a listener that is in no such namespace,
                and followed by the destination; empty: the kernel leads connections there.

        Raises:
            NetworkPolicyError: There is no process that could.
        """
        kind = _kind_of(policy)
        body = _body(sandbox_id, policy, secrets, network_bytes, authority, token)
        try:
            line = self._line(kind)
        except BaseException:
            for fd in listeners:
                os.close(fd)
            raise
        with self._lock:
            self._kinds[sandbox_id] = kind
        line.serve(body, list(listeners))

    def change(
        self,
        sandbox_id: str,
        policy: NetworkPolicy,
        secrets: Mapping[str, str],
        network_bytes: int | None,
        *,
        authority: Mapping[str, str] | None = None,
        token: str = "",
    ) -> None:
        """Give a sandbox another policy. Once this returns, it is in force.

        Connections that it does not allow any more are cut.

        Raises:
            NetworkPolicyError: It is not in force; the one before is.
        """
        body = _body(sandbox_id, policy, secrets, network_bytes, authority, token)
        old, new = self._kinds.get(sandbox_id), _kind_of(policy)
        if old is None:
            raise NetworkPolicyError(f"sandbox {sandbox_id} has no network that could be changed")
        if old == new:
            self._line(old).change(body)
            return
        self._move(sandbox_id, body, old, new)

    def drop(self, sandbox_id: str) -> list[NetworkEvent]:
        """Cut everything of a sandbox and close its sockets. Unknown ones are no error.

        Returns:
            As `events`, and what was cut.
        """
        with self._lock:
            kind = self._kinds.pop(sandbox_id, None)
            line = self._lines.get(kind) if kind is not None else None
        served = line.drop(sandbox_id) if line is not None else None
        return served.events() if served is not None else []

    def relay(self, sandbox_id: str, port: int, client: int, server: int) -> None:
        """Join two connected sockets: a client's on the host, and one to `port` inside.

        The caller closes its own descriptors.
        """
        with self._lock:
            kind = self._kinds.setdefault(sandbox_id, PLAIN)  # of one that may reach nothing
        self._line(kind).relay({"id": sandbox_id, "port": port}, [client, server])

    def expect(self, policy: NetworkPolicy) -> None:
        """Start what ends TLS, should `policy` need that: it is slow to come up, and others start too.

        Raises:
            NetworkPolicyError: There can be none.
        """
        if policy.needs_tls_termination:
            self._line(TLS)

    def make_authority(self, policy: NetworkPolicy) -> dict[str, str]:
        """A certificate authority for one sandbox: `cert`, for it to trust, and `key`; both PEM.

        It can speak for the hosts only whose requests `policy` judges or adds to.
        """
        hosts = {rule.host for rule in policy.all_rules if rule.needs_tls_termination}
        return self._line(TLS).make_authority(sorted(hosts))

    def check(self, sandbox_id: str) -> list[str]:
        """Make sure that somebody decides for a sandbox.

        Returns:
            What that process could not give up, in words; nothing on most machines.

        Raises:
            NetworkPolicyError: Nobody does; nothing is let through.
        """
        line = self._line_of(sandbox_id)
        if line is None:
            raise NetworkPolicyError(f"sandbox {sandbox_id} has no network")
        line.settle(sandbox_id)
        return line.missing

    def events(self, sandbox_id: str) -> list[NetworkEvent]:
        """List the events so far, oldest first; bounded.

        Kept are the newest thousand allowed events and as many others, and the first connection to
        each destination whatever its age. Open connections are last, with their bytes so far.
        """
        line = self._line_of(sandbox_id)
        if line is None:
            return []
        try:
            live = line.live(sandbox_id)
        except NetworkPolicyError:
            live = []  # it does not stay up: only its earlier events are left
        served = line.served(sandbox_id)
        return [*served.events(), *live] if served is not None else []

    def totals(self, sandbox_id: str) -> dict[str, int]:
        """Of all that has ended: `allowed`, `refused`, `missed`, `bytes_in`, `bytes_out`.

        `missed` decisions were too many to be told one by one.
        """
        line = self._line_of(sandbox_id)
        if line is None:
            return dict.fromkeys(Served.TOTALS, 0)
        try:
            line.flush()
        except NetworkPolicyError:
            pass
        served = line.served(sandbox_id)
        return {name: getattr(served, name, 0) for name in Served.TOTALS}

    def listen(self, sandbox_id: str, listener: Callable[[NetworkEvent], None] | None) -> None:
        """Have every further event told as it comes, from another thread; None: no longer."""
        line = self._line_of(sandbox_id)
        served = line.served(sandbox_id) if line is not None else None
        if served is not None:
            served.listener = listener

    @property
    def processes(self) -> list[int]:
        return [line.pid for line in self._lines.values()]

    def close(self) -> None:
        with self._lock:
            lines = list(self._lines.values())
            self._lines.clear()
            self._kinds.clear()
        for line in lines:
            line.close()

    # -- inside -------------------------------------------------------------------------------

    def _line(self, kind: str) -> Line:
        with self._lock:
            line = self._lines.get(kind)
            if line is None:
                line = self._lines[kind] = Line(kind, *(_tls_arguments() if kind == TLS else ()))
            return line

    def _line_of(self, sandbox_id: str) -> Line | None:
        return self._lines.get(self._kinds.get(sandbox_id, ""))

    def _move(self, sandbox_id: str, body: dict[str, Any], old: str, new: str) -> None:
        """To the other kind of process; what goes on is cut, because it is not looked into there."""
        taken = self._line(old).served(sandbox_id)
        if taken is None:
            raise NetworkPolicyError(f"sandbox {sandbox_id} has no network that could be changed")
        line = self._line(new)
        line.serve(body, [os.dup(fd) for fd in taken.fds], is_move=True)
        try:
            line.settle(sandbox_id)
        except BaseException:
            line.drop(sandbox_id)
            raise
        with self._lock:
            self._kinds[sandbox_id] = new
        self._line(old).drop(sandbox_id)
        self._line(old).flush()
        served = line.served(sandbox_id)
        if served is not None:
            served.inherit(taken)
        line.flush()

    def abandon(self) -> None:
        """In a forked child: close what is the parent's."""
        for line in self._lines.values():
            line.abandon()
        self._lines, self._kinds = {}, {}


_lock = allocate_lock()
_shared: Egress | None = None


def shared() -> Egress:
    """The one of this process; a forked child has its own."""
    global _shared
    with _lock:
        if _shared is None or _shared.owner != os.getpid():
            _shared = Egress()
        return _shared


def close_shared() -> None:
    """End the one of this process, if there is any."""
    global _shared
    with _lock:
        ours, _shared = _shared, None
    if ours is not None and ours.owner == os.getpid():
        ours.close()


def _after_fork() -> None:
    """A child that kept our sockets would keep sandboxes' networks alive, and the process with them."""
    global _lock, _shared
    _lock = allocate_lock()  # another thread of the parent may have held it
    ours, _shared = _shared, None
    if ours is not None:
        ours.abandon()


os.register_at_fork(after_in_child=_after_fork)


def _kind_of(policy: NetworkPolicy) -> str:
    return TLS if policy.needs_tls_termination else PLAIN


def _body(
    sandbox_id: str,
    policy: NetworkPolicy,
    secrets: Mapping[str, str],
    network_bytes: int | None,
    authority: Mapping[str, str] | None,
    token: str,
) -> dict[str, Any]:
    return {
        "id": sandbox_id,
        "policy": policy.to_json(),
        "secrets": dict(secrets),
        "network_bytes": network_bytes,
        "ca": dict(authority) if authority is not None else None,
        "token": token,
    }


def cannot_end_tls() -> str:
    """Why no policy with methods, paths or credentials can be enforced; "" where it can."""
    import importlib.util

    if importlib.util.find_spec("cryptography") is None:
        return "rules with methods, paths or credentials need the package cryptography"
    return ""


def _tls_arguments() -> list[str]:
    """The roots that this process trusts, and where it finds `cryptography`."""
    import sys

    if why_not := cannot_end_tls():
        raise NetworkPolicyError(why_not, hint="pip install 'ringfence[egress]'")
    return [
        os.environ.get("SSL_CERT_FILE", ""),
        *(path for path in sys.path if os.path.isabs(path)),
    ]
