"""The Docker backend: one hardened container per sandbox, whose PID 1 is an agent of ours."""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile

from ...errors import (
    BackendUnavailable,
    IsolationError,
    SandboxLost,
)
from ...guest import walls as guest_walls
from ...launcher import wire
from ...linux import files
from ...model.spec import SandboxSpec
from ..local import agent_code, identity, template
from ..local.agents import (
    AGENT,
    LEAST_OPEN_FILES,
    AgentBackend,
    make_workdir,
    own_mounts,
    settings,
    wants_filter,
)
from ..local.answers import Refused, answer
from ..local.host import host
from ..local.session import is_below, is_own, session_root
from ..local.sizes import sizes
from . import engine, image
from .options import LABEL, Options
from .sandbox import DockerSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ...egress.client import Egress
    from ...model.capabilities import BackendReport
    from ..local.images import Held
    from ..local.sizes import Sizes

NAME = "docker"
_ENGINES = ("/sys", "/dev/mqueue")  # what an engine mounts, and no program of ours needs
_READY_S = 60.0
_LEAST = {
    "open_files": LEAST_OPEN_FILES,
    "memory_bytes": (32 << 20, "the agent lives in it too"),
}


class NoWallsError(Exception):
    """The agent may not put up walls of its own here; the message says what was refused."""


class DockerBackend(AgentBackend):
    """See `Backend`.

    Args:
        engine_host: Such as `unix:///run/docker.sock`; None is what the environment says.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    name = NAME
    held = ("memory_bytes", "pids", "cpus", "open_files")
    least = _LEAST
    not_strong = "a container shares the host's kernel"
    has_own_mounts = True
    not_root = "root in a container is the host's root: name another user, who then owns all files of an image"
    no_rules = "containers do not go through the egress engine"

    def __init__(
        self, engine_host: str | None = None, *, egress: Callable[[], Egress] | None = None
    ) -> None:
        super().__init__(egress)
        self._engine_host = engine_host
        self._engine: Any = None
        self._has_walls = True  # until the host has refused them
        self._host_ids: identity.HostIds | None = None

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> DockerSandbox:
        if spec.image is None:
            return self._provision(spec, None)
        from ..local import images

        spec, held = images.hold(spec)
        try:
            return self._provision(spec, held)
        finally:
            held.close()  # the engine has a copy

    def _provision(self, spec: SandboxSpec, held: Held | None) -> DockerSandbox:
        self.check(spec)
        sandbox_id = self._new_id(spec)
        try:
            sandbox = self._make(spec, sandbox_id, held)
            self._live[sandbox_id] = sandbox
            return sandbox
        finally:
            self._making.discard(sandbox_id)

    def root_is_nobody(self) -> bool:
        """Whether the engine gives containers ids of their own: `userns-remap`, or itself rootless."""
        options = self.client().info().get("SecurityOptions") or []
        return any(each.startswith(("name=userns", "name=rootless")) for each in options)

    def _make(self, spec: SandboxSpec, sandbox_id: str, held: Held | None) -> DockerSandbox:
        """With walls that the agent puts up itself; where a host allows none, what the engine has must do."""
        if self._has_walls and wants_filter(spec):
            try:
                return self._make_one(spec, sandbox_id, held, walls=True)
            except NoWallsError:
                self._has_walls = False  # which every report says: it is read back
        return self._make_one(spec, sandbox_id, held, walls=False)

    def _make_one(
        self, spec: SandboxSpec, sandbox_id: str, held: Held | None, *, walls: bool
    ) -> DockerSandbox:
        self.client()  # without an engine, or its SDK, nothing is taken or made
        uid = identity.uid_of(spec.user)
        # An image is in the engine once, for all: its files are one user's.
        alone = walls and held is None and host().trusted_root and not self.root_is_nobody()
        host_ids = self._ids().take() if alone else 0
        owner = identity.host_id(host_ids, uid) if alone else uid
        place = tempfile.mkdtemp(prefix="ringfence-docker-", dir="/var/tmp")
        container: Any = None
        from docker.errors import DockerException

        try:
            size = sizes(spec, host())
            listener = _furnish(place, uid)
            with listener:
                options = self._options(spec, size, place, held, uid=uid, owner=owner)
                container = options.create(self.client(), sandbox_id, walls=walls)
                container.start()
                control = _accept(listener, container)
            covered = [*template.masked(), *_ENGINES, AGENT] if walls else []
            most = size.pids + 1 if alone else 0
            wire.send(control, settings(spec, uid, filtered=True, covered=covered, processes=most))
            _wait_for_agent(control, container)
            container.reload()
            sandbox = DockerSandbox(
                self,
                spec,
                sandbox_id,
                uid,
                own_mounts(spec),
                control,
                container.attrs["State"]["Pid"],
                container,
                place,
                host_ids,
            )
        except BaseException as exc:
            _remove(container, place)
            if host_ids:
                self._ids().give_back(host_ids)
            if isinstance(exc, DockerException):
                raise IsolationError(f"the engine did not start the container: {exc}") from exc
            raise
        make_workdir(sandbox)
        return sandbox

    def _options(
        self, spec: SandboxSpec, size: Sizes, place: str, held: Held | None, *, uid: int, owner: int
    ) -> Options:
        engine = self.client()
        if held:
            name, volumes = image.image_from(engine, held, uid), _shown(uid, held)
        else:
            name, volumes = image.image_of(engine, uid, owner), _shown(uid, held)
        for path in template.written(uid):
            volumes[place + path] = {"bind": path, "mode": "ro"}
        return Options(
            image=name,
            command=_agent_argv(foreign=held is not None),
            user=owner,
            cpus=spec.limits.cpus,
            size=size,
            tmpfs=_own_directories(spec, owner, held),
            volumes={**volumes, place: {"bind": AGENT, "mode": "ro"}},
        )

    def client(self) -> Any:
        """The engine.

        Raises:
            BackendUnavailable: There is none that can be used.
        """
        with self._lock:
            if self._engine is None:
                self._engine = engine.connect(self._engine_host)
            return self._engine

    def released(self, sandbox: DockerSandbox) -> None:
        """Called by a sandbox whose PID 1 has ended."""
        _remove(sandbox.container, sandbox.place)
        if sandbox.first_host_id:
            self._ids().give_back(sandbox.first_host_id)
        self._live.pop(sandbox.id, None)

    def _ids(self) -> identity.HostIds:
        with self._lock:
            if self._host_ids is None:
                self._host_ids = identity.HostIds("/run/ringfence/ids", lambda _fd: None)
            return self._host_ids

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)

    def close(self) -> None:
        super().close()
        with self._lock:
            if self._host_ids is not None:
                self._host_ids.close()
                self._host_ids = None
            if self._engine is not None:
                self._engine.close()
                self._engine = None


def _furnish(place: str, uid: int) -> socket.socket:
    """The agent's file, and the socket that it will connect to; and what the engine would put into /etc."""
    os.chmod(place, 0o755)
    os.mkdir(f"{place}/etc", 0o755)
    for path, content in template.written(uid).items():
        with open(place + path, "xb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
    with open(f"{place}/{agent_code.NAME}", "xb") as file:
        file.write(agent_code.packed())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(f"{place}/control")
    os.chmod(f"{place}/control", 0o666)  # the container's user is another
    listener.listen(1)
    return listener


def _shown(uid: int, held: Held | None) -> dict[str, dict[str, str]]:
    """What of the host is seen inside, as the engine's volumes."""
    wanted = agent_code.foreign_trees() if held else agent_code.interpreter()[1]
    trees = {source: {"bind": target, "mode": "ro"} for source, target, _ in wanted}
    return trees if held else {**image.shown(uid), **trees}


def _agent_argv(*, foreign: bool) -> list[str]:
    """The agent, after it has taken the socket for its standard input."""
    *python, code = agent_code.argv(AGENT, foreign=foreign)
    connect = (
        "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        f"s.connect('{AGENT}/control'); os.dup2(s.fileno(), 0); s.close(); "
    )
    return [*python, connect + code]


def _accept(listener: socket.socket, container: Any) -> wire.Socket:
    """The first to connect is the agent: nothing else runs in the container yet."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if not poll.poll(_READY_S * 1000):
        raise IsolationError(f"the agent did not start: {_said(container)}")
    accepted, _address = listener.accept()
    return wire.adopt(accepted.detach())


def _wait_for_agent(control: wire.Socket, container: Any) -> None:
    try:
        answer(control, _READY_S)
        control.settimeout(None)
    except (SandboxLost, Refused) as exc:
        control.close()
        if isinstance(exc, Refused) and (exc.strerror or "").startswith(f"{guest_walls.STEP}:"):
            raise NoWallsError(str(exc.strerror)) from exc
        raise IsolationError(f"the agent did not start: {_said(container)}") from exc


def _said(container: Any) -> str:
    text = container.logs(tail=3).decode("utf-8", "replace").strip()
    return text.replace("\n", " / ")[:1000] or "without a word"


def _remove(container: Any, place: str) -> None:
    from docker.errors import DockerException

    if container is not None:
        try:
            container.remove(force=True)
        except DockerException:
            pass  # the engine is gone, and with it what it ran; or it was removed
    shutil.rmtree(place, ignore_errors=True)


def _own_directories(spec: SandboxSpec, uid: int, held: Held | None) -> dict[str, str]:
    """The session's root and mounts where nothing has them yet: the engine's own / is root's."""
    wanted = [each.target for each in spec.mounts]
    root = session_root(spec)
    if not any(is_below(root, each) for each in wanted):
        if held:
            wanted += [] if _has(held, root) else [root]
        elif is_own(root) and not any(is_below(root, each) for each in image.OWN):
            wanted.append("/" + root.split("/")[1])
    return dict.fromkeys(wanted, f"uid={uid},gid={uid},mode=0755,exec")


def _has(held: Held, path: str) -> bool:
    """Whether something is there in an image, wherever its own links lead."""
    top = os.open(held.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        resolve = files.RESOLVE_IN_ROOT | files.RESOLVE_NO_MAGICLINKS
        os.close(files.openat2(top, path, os.O_PATH, resolve=resolve))
    except OSError:
        return False
    finally:
        os.close(top)
    return True


__all__ = ["LABEL", "BackendUnavailable", "DockerBackend"]
