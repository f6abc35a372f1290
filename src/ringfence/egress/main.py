"""The egress process: accepts for every sandbox of one host process, and dials in its stead.

    python -I -S -c "...main()" PACKAGE_PARENT plain
    python -I -S -c "...main()" PACKAGE_PARENT tls ROOTS_FILE MODULE_PATH...

It talks with its host process over descriptor 3 and ends with it. What it is told is in `client`.
"""

from __future__ import annotations

import gc
import os
import sys

from ..launcher import wire
from ..linux import files, privileges
from . import confine
from .commons import Commons
from .control import CONTROL_FD, Control
from .inbound import Inbound, Unruled
from .io.loop import Loop
from .sandbox import Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .tls.terminator import Terminator

PLAIN, TLS = "plain", "tls"
# Of the loop: what the kernel has for us already is taken in the next, and leads to its end in some.
_TURNS_TO_SETTLE = 4
_MOST_LIVE = 64  # events in a message: it must fit a datagram


def main() -> None:
    """Serve until the host process is gone."""
    files.close_from(CONTROL_FD + 1)
    privileges.set_name(b"rf-egress")
    host = os.pidfd_open(os.getppid())
    terminator = _terminator() if sys.argv[2] == TLS else None
    _import_the_rest()
    missing = confine.confine()
    gc.collect()
    gc.freeze()  # what was imported never becomes garbage
    Egress(wire.adopt(CONTROL_FD), host, terminator, missing).run()
    os._exit(0)


def _terminator() -> Terminator:
    """Make the object that ends TLS; modules and trusted roots are the host process's own."""
    roots, *path = sys.argv[3:]
    if roots:
        os.environ["SSL_CERT_FILE"] = roots
    sys.path += path
    from .tls.terminator import Terminator

    return Terminator()


def _import_the_rest() -> None:
    """Import all lazy imports now: after the confinement their files cannot be read."""
    import _sha1  # noqa: F401
    import binascii  # noqa: F401  the proof of a WebSocket's server
    import ipaddress  # noqa: F401

    from ..model.net import hosts, netlimits, network, paths, rules  # noqa: F401


class Egress:
    """All of it, over the socket to the host process.

    Args:
        host: A pidfd of the host process: a child that it forked may hold its end of the socket open.
        missing: What this process could not give up; told to the host process.
    """

    def __init__(
        self, sock: wire.Socket, host: int, terminator: Terminator | None, missing: list[str]
    ) -> None:
        self.loop = Loop()
        self.loop.on_fault = self._tell_fault
        self.control = Control(self.loop, sock, self._serve, self.loop.stop)
        self.loop.watch(host, lambda _events: self.loop.stop())
        self.commons = Commons(self.loop, self.control.tell, terminator)
        self.unruled: dict[str, Unruled] = {}
        self.control.tell({"ready": True, "missing": missing}, must=True)

    def run(self) -> None:
        """Serve; when it returns, every connection was cut."""
        self.loop.run()
        self.commons.close()

    def _serve(self, request: tuple[str, dict[str, Any]], fds: list[int]) -> None:
        verb, body = request
        try:
            if verb == "serve":
                self._add(body, fds)
            elif verb == "change":
                self.commons.sandboxes[body["id"]].apply(body)
            elif verb == "drop":
                self._drop(body["id"])
            elif verb == "relay":
                self._relay(body, fds)
            elif verb == "flush":
                self._flush(body["token"], body.get("id", ""))
            elif verb == "authority":
                self._make_authority(body)
        except Exception as exc:  # noqa: BLE001  one sandbox's trouble is not the others'
            for fd in fds:
                os.close(fd)
            refused = {"verb": verb, "id": body.get("id", ""), "reason": told(exc)}
            self.control.tell({"refused": refused}, must=True)
            if "token" in body:  # somebody waits for an answer
                self.control.tell({"flushed": body["token"]}, must=True)

    def _add(self, body: dict[str, Any], fds: list[int]) -> None:
        """Serve a sandbox; a policy that is refused leaves nothing open."""
        listener, datagrams = (wire.Socket(fileno=fd) for fd in fds)
        fds.clear()
        try:
            sandbox = Sandbox(self.commons, body["id"], body, listener, datagrams)
        except BaseException:
            listener.close()
            datagrams.close()
            raise
        before = self.commons.sandboxes.pop(body["id"], None)
        if before is not None:
            before.close()
        self.commons.sandboxes[body["id"]] = sandbox

    def _drop(self, sandbox_id: str) -> None:
        for known in (self.commons.sandboxes, self.unruled):
            sandbox = known.pop(sandbox_id, None)
            if sandbox is not None:
                sandbox.close()

    def _relay(self, body: dict[str, Any], fds: list[int]) -> None:
        """Join two connected sockets: a client on the host and a server inside."""
        client, server = (wire.Socket(fileno=fd) for fd in fds)
        fds.clear()
        ruled = self.commons.sandboxes.get(body["id"])
        sandbox = ruled or self.unruled.setdefault(body["id"], Unruled(self.commons))
        Inbound(sandbox, client, server).start()

    def _make_authority(self, body: dict[str, Any]) -> None:
        terminator = self.commons.terminator
        made = terminator.make(body["hosts"]) if terminator is not None else {}
        self.control.tell({"authority": {"token": body["token"], **made}}, must=True)

    def _flush(self, token: int, sandbox_id: str, turns: int = _TURNS_TO_SETTLE) -> None:
        """Answer once everything is on record that had happened before this was asked.

        With the id of a sandbox, also what goes on there: many pieces, as that may be much.
        """
        if turns:
            self.loop.soon(lambda: self._flush(token, sandbox_id, turns - 1))
            return
        self.commons.record.flush()
        sandbox = self.commons.sandboxes.get(sandbox_id)
        for live in pieces(sandbox.live() if sandbox is not None else [], _MOST_LIVE):
            self.control.tell({"live": {"token": token, "events": live}}, must=True)
        self.control.tell({"flushed": token}, must=True)

    def _tell_fault(self, error: BaseException) -> None:
        self.control.tell({"fault": told(error)})


def pieces(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def told(error: BaseException) -> str:
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {error} ({' '.join(places[-4:])})"
