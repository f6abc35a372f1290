"""The Docker backend: one hardened container per sandbox, whose PID 1 is an agent of ours."""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile

from ...errors import IsolationError, SandboxLost
from ...launcher import wire
from ...model.spec import SandboxSpec
from ..local.agents import agent_code
from ..local.agents.agents import (
    LEAST_OPEN_FILES,
    AgentBackend,
    NoIsolationError,
    isolation_refused,
    own_mounts,
    settings,
    wants_filter,
)
from ..local.agents.contained import AGENT, NO_NAMESPACE_FDS
from ..local.answers import Refused, answer
from ..local.host import identity
from ..local.host.facts import host
from ..local.mounts import template
from ..local.mounts.mounting import shows_the_host
from ..local.mounts.trusted import trusted_for
from ..local.sizes import sizes
from . import engine, image
from .draft import Draft
from .engine import is_podman
from .options import Options
from .sandbox import QUOTAS, DockerSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from ...egress.host.client import Egress
    from ...model.capabilities import BackendReport
    from ..local.mounts.images import Held
    from ..local.sizes import Sizes

NAME = "docker"
_ENGINES = (
    "/sys",
    "/dev/mqueue",
    "/run/.containerenv",
)  # what an engine mounts, and no program of ours needs
_READY_S = 60.0
NO_QUOTA = "files of an image are the engine's to bound, whose storage driver cannot"
_LEAST = {
    "open_files": LEAST_OPEN_FILES,
    "memory_bytes": (32 << 20, "the agent lives in it too"),
    "inodes": (64, "the sandbox's own directories are some of them"),
}


class DockerBackend(AgentBackend):
    """See `Backend`.

    Args:
        engine_host: Such as `unix:///run/docker.sock`; None is what the environment says.
        state_dir: Where snapshots are kept; None is this user's data directory.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    name = NAME
    held = (*("memory_bytes", "pids", "cpus", "open_files", "network_bytes"), *QUOTAS)
    least = _LEAST
    not_strong = "a container shares the host's kernel"
    lets_in = saves = True
    not_root = "root in a container is the host's root: name another user, who then owns all files of an image"

    def __init__(
        self,
        engine_host: str | None = None,
        *,
        state_dir: str | None = None,
        egress: Callable[[], Egress] | None = None,
    ) -> None:
        super().__init__(egress, state_dir)
        self._engine_host = engine_host
        self._engine: Any = None
        self._isolates = True  # until the host has refused them

    def beside(self, state_dir: str) -> DockerBackend:
        return DockerBackend(self._engine_host, state_dir=state_dir)

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> DockerSandbox:
        return self._provision(spec)

    def provision_with(
        self, spec: SandboxSpec, taken_under: SandboxSpec, content: int
    ) -> DockerSandbox:
        sandbox = self._provision(spec, taken_under)
        sandbox.complete(lambda: sandbox.load(content))
        return sandbox

    def _provision(
        self, spec: SandboxSpec, taken_under: SandboxSpec | None = None
    ) -> DockerSandbox:
        if spec.image is None:
            return self._provision_over(spec, None, taken_under)
        from ..local.mounts import images

        spec, held = images.hold(spec)
        try:
            return self._provision_over(spec, held, taken_under)
        finally:
            held.close()  # the engine has a copy

    def _provision_over(
        self, spec: SandboxSpec, held: Held | None, taken_under: SandboxSpec | None
    ) -> DockerSandbox:
        self.check(spec)
        sandbox_id = self._new_id(spec)
        try:
            draft = Draft(spec, sandbox_id, held, taken_under)
            if spec.network.needs_tls_termination:
                draft.trusted = trusted_for(spec.network, self.egress())
            sandbox = self._make(draft)
            self._live[sandbox_id] = sandbox
            sandbox.complete(lambda: sandbox.join_network(sandbox.network))
            return sandbox
        finally:
            self._making.discard(sandbox_id)

    def root_is_nobody(self) -> bool:
        """Return whether the engine maps container ids: `userns-remap`, or itself rootless."""
        options = self.client().info().get("SecurityOptions") or []
        return any(each.startswith(("name=userns", "name=rootless")) for each in options)

    def _make(self, draft: Draft) -> DockerSandbox:
        """Prefer isolation that the agent sets up; else use the engine's own."""
        if self._isolates and wants_filter(draft.spec):
            try:
                return self._make_one(draft, isolated=True)
            except NoIsolationError:
                self._isolates = False  # which every report says: it is read back
        self.check_without_isolation(draft.spec, restores=draft.restores)
        self.refuse_limits(draft.spec, QUOTAS, NO_NAMESPACE_FDS)
        return self._make_one(draft, isolated=False)

    def _make_one(self, draft: Draft, *, isolated: bool) -> DockerSandbox:
        self.client()  # without an engine, or its SDK, nothing is taken or made
        if draft.held:
            self.refuse_limits(draft.spec, ("inodes",), NO_QUOTA)
        spec, uid = draft.spec, draft.uid
        host_ids, owner = self._owner(draft, isolated=isolated)
        place = ""
        container: Any = None
        control: wire.Socket | None = None
        namespace_fds: list[int] = []
        from docker.errors import DockerException

        try:
            place = tempfile.mkdtemp(prefix="ringfence-docker-", dir="/var/tmp")
            size = sizes(spec, host())
            listener = _furnish(place, draft)
            with listener:
                options = self._options(draft, size, place, owner)
                try:
                    container = options.create(self.client(), draft.id, isolated=isolated)
                except DockerException as exc:
                    if options.disk_bytes:
                        self._no_disk_quota(exc)
                    raise
                if not options.tmpfs:
                    for top in draft.made_in():
                        container.put_archive(
                            "/", image.one_of_the_users(top, owner, is_file=False)
                        )
                container.start()
                control = _accept(listener, container)
            told = settings(
                spec,
                uid,
                filtered=True,
                policy=self.policies.get(spec.profile),
                covered=[*template.masked(), *_ENGINES, AGENT] if isolated else [],
                processes=size.pids + 1 if host_ids else 0,
                unix_sockets=not shows_the_host(spec),
                room=draft.room(size) if isolated else None,
            )
            wire.send(control, told)
            namespace_fds = _wait_for_agent(control, container)
            container.reload()
            sandbox = DockerSandbox(
                self,
                spec,
                draft.id,
                uid,
                own_mounts(spec),
                control,
                namespace_fds,
                container.attrs["State"]["Pid"],
                container,
                place,
                host_ids,
                size,
                draft,
                owner,
                options.tmpfs,
                isolated=isolated,
            )
        except BaseException as exc:
            _close(control, namespace_fds)
            _remove(container, place)
            if host_ids:
                self._ids().give_back(host_ids)
            if isinstance(exc, DockerException):
                raise IsolationError(f"the engine did not start the container: {exc}") from exc
            raise
        sandbox.complete(lambda: draft.complete(sandbox))
        return sandbox

    def _owner(self, draft: Draft, *, isolated: bool) -> tuple[int, int]:
        """The first of host ids that are the container's alone, or 0; and its user, as the engine counts."""
        if not isolated or self.root_is_nobody():
            return 0, draft.uid
        if not host().trusted_root:
            return 0, os.geteuid()  # whose namespaces we may enter, and who needs no other's leave
        if draft.held:  # an image is in the engine once, for all: its files are one user's
            return 0, draft.uid
        first = self._ids().take()
        return first, identity.host_id(first, draft.uid)

    def _options(self, draft: Draft, size: Sizes, place: str, owner: int) -> Options:
        engine, uid = self.client(), draft.uid
        held = draft.held
        name = image.image_from(engine, held, owner) if held else image.image_of(engine, uid, owner)
        volumes = _shown(uid, held)
        for path in draft.shown():
            volumes[place + path] = {"bind": path, "mode": "ro"}
        disk_bytes = (draft.spec.limits.disk_bytes or 0) if held else 0
        own = f"uid={owner},gid={owner},mode=0755,exec"
        tmpfs = dict.fromkeys(draft.made_in(), f"{own},size={disk_bytes}" if disk_bytes else own)
        if is_podman(engine):
            tmpfs = {}  # it lets none be a user's: they are made in the container instead
        return Options(
            image=name,
            command=_agent_argv(foreign=held is not None),
            user=owner,
            cpus=draft.spec.limits.cpus,
            size=size,
            tmpfs=tmpfs,
            volumes={**volumes, place: {"bind": AGENT, "mode": "ro"}},
            disk_bytes=disk_bytes,
        )

    def no_disk(self, spec: SandboxSpec) -> str:
        if spec.image:
            return ""  # the engine keeps the files of a container, on its disk
        return (
            "files of a container without an image are in a tmpfs with a size: an engine has no such "
            "limit on disk; give an image, or use the native backend"
        )

    def _no_disk_quota(self, exc: Exception) -> NoReturn:
        """Of the engine's words, which say whether it is this that it cannot do."""
        if "storage" in str(exc).lower():
            raise self.refusal("disk_quota", "limits.disk_bytes", f"{NO_QUOTA}: {exc}") from exc
        raise IsolationError(f"the engine did not make the container: {exc}") from exc

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

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)

    def close(self) -> None:
        super().close()
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None


def _furnish(place: str, draft: Draft) -> socket.socket:
    """The agent's file, and the socket that it will connect to; and what the engine would put into /etc."""
    for path, content in {**draft.written(), f"/{agent_code.NAME}": agent_code.packed()}.items():
        target = place + path
        directory = os.path.dirname(target)
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o755)  # whatever our umask is: the container's user is another
        with open(target, "xb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(f"{place}/control")
    os.chmod(f"{place}/control", 0o666)  # the container's user is another
    listener.listen(1)
    return listener


def _shown(uid: int, held: Held | None) -> dict[str, dict[str, str]]:
    """List the host paths shown inside, as the engine's volumes."""
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


def _wait_for_agent(control: wire.Socket, container: Any) -> list[int]:
    """Descriptors of the namespaces that it has made."""
    try:
        _said_nothing, namespace_fds = answer(control, _READY_S)
        control.settimeout(None)
        return namespace_fds
    except (SandboxLost, Refused) as exc:
        control.close()
        if isinstance(exc, Refused):
            isolation_refused(exc)
        raise IsolationError(f"the agent did not start: {_said(container)}") from exc


def _said(container: Any) -> str:
    text = container.logs(tail=3).decode("utf-8", "replace").strip()
    return text.replace("\n", " / ")[:1000] or "it printed no error"


def _close(control: wire.Socket | None, namespace_fds: list[int]) -> None:
    if control is not None:
        control.close()
    for fd in namespace_fds:
        os.close(fd)


def _remove(container: Any, place: str) -> None:
    from docker.errors import DockerException

    if container is not None:
        try:
            container.remove(force=True)
        except DockerException:
            pass  # the engine is gone, and with it what it ran; or it was removed
    shutil.rmtree(place, ignore_errors=True)
