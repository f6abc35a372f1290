"""Sandboxes at the far end of a stream of bytes: `ssh HOST`, `lxc-attach`, `docker exec -i`.

The launcher here carries standard input and output only. At the other end `guest.far_start` becomes
bubblewrap, in which the agent runs; requests and their descriptors cross as frames (decision 61).
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import threading
import time
import zlib

from ...errors import IsolationError
from ...guest.streamed import Beating
from ...launcher import wire
from ...launcher.link.line import split
from ...model.state import State
from ...model.stats import SandboxStats
from ..local.agents import agent_code
from ..local.agents.agents import AgentBackend, make_workdir, own_mounts, settings
from ..local.agents.guest import GuestSandbox
from ..local.answers import answer
from ..local.host import identity
from ..local.launched import last_words, room_for_words
from ..local.mounts import template
from ..local.sizes import DEFAULT_PIDS
from .far import FarLauncher
from .limits import LEAST_MEMORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ...egress.host.client import Egress
    from ...model.capabilities import BackendReport
    from ...model.granted import SandboxCapabilities
    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec
    from ..local.protections import Reader

_READY_S = 60.0
_ANY_MEMORY = 1 << 60  # how much the far host has is not known
_PATIENCE_S = 10.0
_PIECE = 1 << 16
_MOST_HELLO = 1 << 16
_ELSEWHERE = ("mounts", "memory_dir", "deny", "python_env")
_NOT_HERE = "the sandbox is on another host, which has none of this one's files"
_COPY = "copy what it needs with its files: `sandbox.files.upload`"
_INNER = """
import json, os, struct, sys, zlib
def read(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data
told = json.loads(zlib.decompress(read(struct.unpack("<I", read(4))[0])))
there = {"__name__": "loader"}
exec(told["loader"], there)
there["install"](told["modules"])
from ringfence.guest.streamed import main
main(sys.argv[1], told)
"""


class StreamBackend(AgentBackend):
    """See `Backend`.

    Args:
        launcher: What carries the stream, and what confines at its other end.
    """

    not_strong = "a launcher shares the far host's kernel"
    no_limits = "Ringfence has no cgroup on the far host"
    not_root = "a launcher maps one user, without root"
    no_images = "the far host's programs are shown"
    no_rules = "the far host does not go through the egress engine"
    held = ("open_files", "memory_bytes")
    least: Mapping[str, tuple[int, str]] = {**AgentBackend.least, "memory_bytes": LEAST_MEMORY}

    def __init__(
        self,
        launcher: FarLauncher,
        *,
        state_dir: str | None = None,
        egress: Callable[[], Egress] | None = None,
    ) -> None:
        super().__init__(egress, state_dir)
        self.launcher, self.name = launcher, launcher.name

    def check(self, spec: SandboxSpec) -> None:
        for name in _ELSEWHERE:
            if getattr(spec, name):
                raise self.refusal(name, name, _NOT_HERE, _COPY)
        super().check(spec)

    def no_disk(self, spec: SandboxSpec) -> str:
        del spec
        return "the files of its sandboxes are in the memory of the far host"

    def provision(self, spec: SandboxSpec) -> StreamSandbox:
        self.check(spec)
        self.launcher.check()
        sandbox_id = self._new_id(spec)
        try:
            sandbox = self._make(spec, sandbox_id)
            self._live[sandbox_id] = sandbox
            sandbox.complete(lambda: make_workdir(sandbox))
            return sandbox
        finally:
            self._making.discard(sandbox_id)

    def _make(self, spec: SandboxSpec, sandbox_id: str) -> StreamSandbox:
        uid = identity.uid_of(spec.user)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        errors = room_for_words("launcher-says")
        process = None
        try:
            process = subprocess.Popen(
                self.launcher.command(_far_command(self.launcher, uid)),
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=errors,
                start_new_session=True,
            )
            far.close()
            facts, rest = self._hello(near, process, errors)
            line = _Line(near, rest)
            limits = spec.limits
            told = settings(
                spec,
                uid,
                filtered=True,
                policy=self.policies.get(spec.profile),
                samples=(limits.pids or DEFAULT_PIDS, limits.memory_bytes or _ANY_MEMORY),
            )
            wire.send(line.control, told)
            answer(line.control, _READY_S)
            line.control.settimeout(None)
            mounts = own_mounts(spec)
            return StreamSandbox(self, spec, sandbox_id, uid, mounts, line, process, facts)
        except BaseException as exc:
            near.close()
            far.close()
            if process is not None:
                process.kill()
                process.wait()
            if isinstance(exc, OSError):
                raise IsolationError(f"{self.name} did not start: {exc}") from exc
            raise
        finally:
            os.close(errors)

    def _hello(
        self, near: socket.socket, process: subprocess.Popen[bytes], errors: int
    ) -> tuple[dict[str, Any], bytes]:
        """Read the far end's first message; return it and the bytes behind it.

        Raises:
            IsolationError: It did not come up, or gives no PID namespace.
        """
        near.settimeout(_READY_S)
        data = b""
        try:
            near.sendall(_packed())
            while not (found := split(data)):
                piece = near.recv(_PIECE)
                if not piece or len(data) > _MOST_HELLO:
                    raise ConnectionError("it ended, or its first message was unreadable")
                data += piece
            facts: dict[str, Any] = json.loads(found[0])
            if facts["pid"] != 1 or facts["inner"]["pid"] == facts["outer"]["pid"]:
                why = "its launcher gives no PID namespace: processes could outlive the sandbox"
            elif facts["machine"] != os.uname().machine:
                why = f"its machine is {facts['machine']}, this host's {os.uname().machine}: no filter fits"
            else:
                near.settimeout(None)
                return facts, found[1]
        except (OSError, ValueError, KeyError, TypeError) as exc:
            why = _last_words(process, errors) or str(exc)
        raise IsolationError(
            f"{self.name} did not start the agent: {why}",
            hint="run the command by hand; check that the far host has Python 3.9 and bubblewrap",
        )

    def released(self, sandbox: StreamSandbox) -> None:
        self._live.pop(sandbox.id, None)

    def report(self) -> BackendReport:
        from .far import report

        return report(self)


class StreamSandbox(GuestSandbox):
    """See `BackendSandbox`. What `pidfd` is of carries the stream, and ends when the far end has ended."""

    can_suspend = False
    namespace_fds: tuple[int, ...] = ()
    mounting = None
    may_reach_sockets = False

    def __init__(
        self,
        backend: StreamBackend,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        mounts: list[ResolvedMount],
        line: _Line,
        process: subprocess.Popen[bytes],
        facts: dict[str, Any],
    ) -> None:
        pidfd = os.pidfd_open(process.pid)
        super().__init__(backend, spec, sandbox_id, uid, mounts, line.control, pidfd)
        self.owner, self.facts = backend, facts
        self._line, self._process = line, process

    def _read_stats(self, state: State) -> SandboxStats:
        pids = memory = None
        if state in (State.PROVISIONED, State.RUNNING):
            pids, memory, *_disk = (int(word) for word in self.ask("usage")[0].split())
        return SandboxStats(
            state=state,
            memory_bytes=memory,
            pids=pids,
            uptime_s=time.monotonic() - self._created,
            execs=self._execs,
            degraded=self.owner.degraded(self.spec),
        )

    def _reader(self) -> Reader:
        from .far import FarReader

        return FarReader(self)

    def granted(self) -> SandboxCapabilities:
        from ..local.agents.guest_granted import granted

        return granted(self)

    def _end(self, was_suspended: bool) -> None:
        """Close the stream: the far PID 1 exits, and the launcher here after it."""
        del was_suspended
        with self._send_lock:
            self.control.close()
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(_PATIENCE_S * 1000):
            # Its end cannot be observed any more; without our connection, the far end stops by
            # itself.
            self._process.kill()

    def _let_go(self) -> None:
        self._process.wait()
        self._line.join()
        self.owner.released(self)


class _Line:
    """The near end of the stream, and the thread that carries requests over it.

    Attributes:
        control: To send requests on, with descriptors.
    """

    def __init__(self, sock: socket.socket, data: bytes) -> None:
        self.control, theirs = wire.socketpair()
        carrier = Beating(sock.fileno(), theirs, is_host=True)
        carrier.feed(data)
        self._thread = threading.Thread(
            target=_carry, args=(carrier, theirs, sock), name="ringfence-line", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread. Precondition: what carried the stream has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)


def _carry(carrier: Beating, control: wire.Socket, sock: socket.socket) -> None:
    """Carry; then let the launcher hear the end of its input, and hear it out until its own."""
    try:
        carrier.run()
    finally:
        control.close()
        try:
            sock.setblocking(True)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(_PIECE):
                pass
        except OSError:
            pass  # it has ended already
        sock.close()


def _packed() -> bytes:
    modules = agent_code.sources()
    told = {"loader": modules["ringfence.guest.loader"][1], "modules": modules}
    data = zlib.compress(json.dumps(told).encode(), 1)
    return struct.pack("<I", len(data)) + data


def _far_command(launcher: FarLauncher, uid: int) -> list[str]:
    told = {"launcher": launcher.there, "uid": uid, "inner": _INNER, **template.far_root(uid)}
    source = agent_code.sources()["ringfence.guest.far_start"][1]
    return [launcher.python, "-I", "-S", "-c", f"{source}\nmain(sys.argv[1])", json.dumps(told)]


def _last_words(process: subprocess.Popen[bytes], errors: int) -> str:
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return ""
    return last_words(errors)
