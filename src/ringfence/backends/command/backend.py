"""The command backend: sandboxes under an outer launcher, with an agent inside that starts programs."""

from __future__ import annotations

import os
import subprocess
from _thread import start_new_thread

from ...errors import IsolationError, SandboxLost
from ...launcher import wire
from ...launcher.cgroups import remove
from ...model import capabilities as can
from ...model.spec import SandboxSpec
from ..local.acquired import Acquired
from ..local.agents import agent_code
from ..local.agents.agents import (
    AgentBackend,
    NoIsolationError,
    isolation_refused,
    make_workdir,
    own_mounts,
    settings,
    wants_filter,
)
from ..local.agents.contained import AGENT, NO_NAMESPACE_FDS
from ..local.agents.inside import first_inside
from ..local.answers import Refused, answer
from ..local.host import cgroups, identity
from ..local.host.facts import host
from ..local.launched import last_words, room_for_words
from ..local.mounts import template
from ..local.mounts.mounting import Mounting, shows_the_host
from ..local.mounts.trusted import trusted_for
from ..local.sizes import sizes
from . import launchers, limits, place
from .sandbox import CommandSandbox, end, inodes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...egress.host.client import Egress
    from ...model.capabilities import BackendReport
    from ..local.mounts.trusted import Trusted

_READY_S = 60.0


class CommandBackend(AgentBackend):
    """See `Backend`. As host root, a launcher runs as a user that nobody else is.

    Args:
        launcher: What confines, and how.
        state_dir: Where snapshots are kept; None is this user's data directory.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    not_strong = "a launcher shares the host's kernel"
    not_root = "a launcher maps one user, without root"
    no_images = "a launcher shows the host's programs"

    def __init__(
        self,
        launcher: launchers.Launcher | None = None,
        *,
        state_dir: str | None = None,
        egress: Callable[[], Egress] | None = None,
    ) -> None:
        self.launcher = launcher or launchers.bubblewrap()
        self.name = self.launcher.name
        self.no_rules = f"{self.name} does not go through the egress engine"
        self.lets_in = bool(self.launcher.within)
        self._isolates = self.lets_in or bool(self.launcher.anew)  # until the host has refused them
        super().__init__(egress, state_dir)
        self._layout: cgroups.Layout | None = None
        self.can_stop = False
        self._swept = False

    def beside(self, state_dir: str) -> CommandBackend:
        return CommandBackend(self.launcher, state_dir=state_dir)

    def layout(self) -> cgroups.Layout:
        """Where cgroups go, found on first use: and so what is held, and whether anything can stand still."""
        with self._lock:
            if self._layout is None:
                layout = cgroups.Layout()
                cgroups.sweep(layout)
                group = cgroups.Group(layout, self.name, cpus=False)
                self.held = ("open_files", *limits.held(layout))
                self.held += ("network_bytes",) if self.lets_in else ()
                self.can_stop = group.can_freeze
                self.saves = self.lets_in and self.can_stop
                self.least = {**self.least, "memory_bytes": limits.LEAST_MEMORY}
                if not layout.version:
                    self.no_limits = f"no cgroup may be used here: {layout.why}"
                self._layout = layout
            return self._layout

    def check(self, spec: SandboxSpec) -> None:
        self.layout()
        super().check(spec)

    def refuse_limits(self, spec: SandboxSpec, names: Sequence[str], why: str) -> None:
        from .report import lacking

        reasons = lacking(self)
        for name in names:
            super().refuse_limits(spec, [name], reasons.get(can.LIMITED_BY[name], why))

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> CommandSandbox:
        self.check(spec)
        self.launcher.check()
        sandbox_id = self._new_id(spec)
        try:
            sandbox = self._make(spec, sandbox_id)
            sandbox.complete(lambda: sandbox.join_network(sandbox.network))
            return sandbox
        finally:
            self._making.discard(sandbox_id)

    def provision_with(
        self, spec: SandboxSpec, taken_under: SandboxSpec, content: int
    ) -> CommandSandbox:
        del taken_under
        sandbox = self.provision(spec)
        if not sandbox.namespace_fds:
            sandbox.terminate()
            raise self.refusal("restore", "", NO_NAMESPACE_FDS)
        sandbox.complete(lambda: sandbox.load(content))
        return sandbox

    def _make(self, spec: SandboxSpec, sandbox_id: str) -> CommandSandbox:
        """Prefer isolation that the agent sets up; else use the launcher's own."""
        if self._isolates and wants_filter(spec):
            if not self.lets_in:
                self.check_without_isolation(spec)
            try:
                return self._make_one(spec, sandbox_id, isolated=True)
            except NoIsolationError:
                self._isolates = False
        self.check_without_isolation(spec)
        return self._make_one(spec, sandbox_id, isolated=False)

    def _make_one(self, spec: SandboxSpec, sandbox_id: str, *, isolated: bool) -> CommandSandbox:
        with self._lock:
            if not self._swept:
                # In thousands of trees, each as large as its guest made it: nobody waits for that.
                start_new_thread(place.sweep, ())
                self._swept = True
        uid = identity.uid_of(spec.user)
        slot = self._ids().take() if host().trusted_root else 0
        try:
            trusted = None
            if spec.network.needs_tls_termination:
                trusted = trusted_for(spec.network, self.egress())
            steps = [
                step for step in (trusted.steps if trusted else ()) if step[0] != "bind_inside"
            ]
            made = place.Place(uid, slot or host().uid, self.launcher.shows, steps)
            try:
                sandbox = self._launch(
                    spec, sandbox_id, uid, slot, made, trusted, isolated=isolated
                )
            except BaseException:
                made.remove()
                raise
        except BaseException:
            if slot:
                self._ids().give_back(slot)
            raise
        self._live[sandbox_id] = sandbox
        sandbox.complete(lambda: _furnish(sandbox, trusted), lambda: make_workdir(sandbox))
        return sandbox

    def _launch(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        slot: int,
        made: place.Place,
        trusted: Trusted | None,
        *,
        isolated: bool,
    ) -> CommandSandbox:
        layout, size = self.layout(), sizes(spec, host())
        group = cgroups.Group(layout, cgroups.group_name(sandbox_id), cpus=bool(spec.limits.cpus))
        told = settings(
            spec,
            uid,
            filtered=self.launcher.filtered,
            policy=self.policies.get(spec.profile),
            covered=[*template.masked(), AGENT, *self.launcher.anew] if isolated else [],
            anew=isolated and not self.lets_in,
            # PID 1, the launcher's and who was the agent first are of the same user, who is nobody else.
            processes=size.pids + 4 if slot and layout.version else 0,
            unix_sockets=not shows_the_host(spec),
            samples=(0, 0) if layout.version else (size.pids, size.memory_bytes),
        )
        with Acquired() as passed, Acquired() as acquired:
            try:
                errors = room_for_words("launcher-says")
                passed.callback(os.close, errors)
                ours, theirs = wire.socketpair()
                acquired.callback(ours.close)
                passed.callback(theirs.close)
                wire.send(ours, told)
                process = self._start_launcher(
                    group, spec, made, uid, slot, theirs, errors, isolated
                )
                acquired.callback(remove, group.directories)
                acquired.callback(end, process)
                acquired.callback(process.kill)
                # First of all the agent ends, which may be in a cgroup of ours.
                acquired.callback(ours.close)
                theirs.close()
                namespace_fds = self._wait_for_agent(ours, errors)
                for fd in namespace_fds:
                    acquired.callback(os.close, fd)
                pid = first_inside(process.pid)
                if pid is None:
                    raise IsolationError(
                        f"{self.name} gives no PID namespace: processes could outlive the sandbox"
                    )
                if layout.version:
                    limits.check(group, pid)
                anew = isolated and not self.lets_in
                sandbox = CommandSandbox(
                    self,
                    spec,
                    sandbox_id,
                    uid,
                    own_mounts(spec),
                    ours,
                    [] if anew else namespace_fds,
                    pid,
                    (first_inside(process.pid, below=2) or pid) if anew else pid,
                    inodes_of(namespace_fds) if anew else None,
                    process,
                    group,
                    made,
                    slot,
                    trusted,
                )
            except OSError as exc:
                if isinstance(exc, Refused):
                    raise
                raise IsolationError(f"{self.name} did not start: {exc}") from exc
            acquired.pop_all()
            for fd in namespace_fds if anew else []:
                os.close(fd)
        return sandbox

    def _start_launcher(
        self,
        group: cgroups.Group,
        spec: SandboxSpec,
        made: place.Place,
        uid: int,
        slot: int,
        control: wire.Socket,
        errors: int,
        isolated: bool,
    ) -> subprocess.Popen[bytes]:
        words = {**made.words, "uid": str(uid)}
        self.launcher.prepare(words, made.shown, isolated=isolated)
        command = self.launcher.command(words, made.shown, isolated=isolated)
        user = (slot or None) if not self.launcher.maps_ids else None
        return limits.start(
            group,
            spec,
            [*command, *agent_code.argv(AGENT)],
            stdin=control.fileno(),
            stderr=errors,
            env=self.launcher.environment(words),
            cwd="/",
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )

    def _wait_for_agent(self, control: wire.Socket, errors: int) -> list[int]:
        try:
            _said_nothing, namespace_fds = answer(control, _READY_S)
            control.settimeout(None)
            return namespace_fds
        except (SandboxLost, Refused, IsolationError) as exc:
            if isinstance(exc, Refused):
                isolation_refused(exc)
            raise IsolationError(
                f"{self.name} did not start the agent: {last_words(errors, *self.launcher.idle) or exc}",
                hint="run the launcher by hand to see its error",
            ) from exc

    def released(self, sandbox: CommandSandbox) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        if sandbox.host_ids:
            self._ids().give_back(sandbox.host_ids)
        self._live.pop(sandbox.id, None)

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)


def _furnish(sandbox: CommandSandbox, trusted: Trusted | None) -> None:
    """Mount what takes an agent that runs."""
    if sandbox.namespace_fds:
        steps = trusted.steps if trusted else []
        binds = [step for step in steps if step[0] == "bind_inside"]
        sandbox.furnish(Mounting(sandbox.spec, binds))
