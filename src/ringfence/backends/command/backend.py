"""The command backend: sandboxes under an outer launcher, with an agent inside that starts programs."""

from __future__ import annotations

import os
import subprocess

from ...errors import IsolationError, SandboxLost
from ...launcher import wire
from ...model.spec import SandboxSpec
from ..local import agent_code, identity
from ..local.agents import AGENT, AgentBackend, make_workdir, own_mounts, settings
from ..local.answers import Refused, answer
from ..local.host import host
from ..local.inside import first_inside
from . import launchers, place
from .sandbox import CommandSandbox, end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...egress.client import Egress
    from ...model.capabilities import BackendReport

_READY_S = 60.0


class CommandBackend(AgentBackend):
    """See `Backend`. As host root, a launcher runs as a user that nobody else is.

    Args:
        launcher: What confines, and how.
        egress: Who moves the data of forwarded connections; None is the process that this one shares.
    """

    held = ("open_files",)
    not_strong = "a launcher shares the host's kernel"
    not_root = "a launcher maps one user, who is not root"
    no_limits = "launchers set no limits"

    def __init__(
        self,
        launcher: launchers.Launcher | None = None,
        *,
        egress: Callable[[], Egress] | None = None,
    ) -> None:
        self.launcher = launcher or launchers.bubblewrap()
        self.name = self.launcher.name
        self.no_rules = f"{self.name} does not go through the egress engine"
        super().__init__(egress)
        self._host_ids: identity.HostIds | None = None
        self._swept = False

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> CommandSandbox:
        self.check(spec)
        self.launcher.check()
        sandbox_id = self._new_id(spec)
        try:
            return self._make(spec, sandbox_id)
        finally:
            self._making.discard(sandbox_id)

    def _make(self, spec: SandboxSpec, sandbox_id: str) -> CommandSandbox:
        with self._lock:
            if not self._swept:
                place.sweep()
                self._swept = True
        uid = identity.uid_of(spec.user)
        slot = self._ids().take() if host().trusted_root else 0
        try:
            made = place.Place(uid, slot or host().uid, self.launcher.shows)
            try:
                sandbox = self._launch(spec, sandbox_id, uid, slot, made)
            except BaseException:
                made.remove()
                raise
        except BaseException:
            if slot:
                self._ids().give_back(slot)
            raise
        self._live[sandbox_id] = sandbox
        return sandbox

    def _launch(
        self, spec: SandboxSpec, sandbox_id: str, uid: int, slot: int, made: place.Place
    ) -> CommandSandbox:
        errors = os.memfd_create("launcher-says", os.MFD_CLOEXEC)
        ours, theirs = wire.socketpair()
        process: subprocess.Popen[bytes] | None = None
        try:
            wire.send(ours, settings(spec, uid, filtered=self.launcher.filtered))
            words = {**made.words, "uid": str(uid)}
            process = subprocess.Popen(
                [*self.launcher.command(words, made.shown), *agent_code.argv(AGENT)],
                stdin=theirs.fileno(),
                stdout=errors,
                stderr=errors,
                env=self.launcher.environment(words),
                cwd="/",
                start_new_session=True,
                user=slot or None,
                group=slot or None,
                extra_groups=[] if slot else None,
            )
            theirs.close()
            self._wait_for_agent(ours, errors)
            pid = first_inside(process.pid)
            if pid is None:
                raise IsolationError(
                    f"{self.name} gives no PID namespace: processes could outlive the sandbox"
                )
            sandbox = CommandSandbox(
                self, spec, sandbox_id, uid, own_mounts(spec), ours, pid, process, made, slot
            )
        except BaseException as exc:
            ours.close()
            theirs.close()
            if process is not None:
                process.kill()
                end(process)
            if isinstance(exc, OSError) and not isinstance(exc, Refused):
                raise IsolationError(f"{self.name} did not start: {exc}") from exc
            raise
        finally:
            os.close(errors)
        make_workdir(sandbox)
        return sandbox

    def _wait_for_agent(self, control: wire.Socket, errors: int) -> None:
        try:
            answer(control, _READY_S)
            control.settimeout(None)
        except (SandboxLost, Refused, IsolationError) as exc:
            text = os.pread(errors, 1 << 16, 0).decode("utf-8", "replace")
            said = " / ".join(line for line in text.splitlines()[-3:] if line.strip())[:1000]
            raise IsolationError(
                f"{self.name} did not start the agent: {said or exc}",
                hint="run its command by hand to see what this host allows",
            ) from exc

    def released(self, sandbox: CommandSandbox) -> None:
        """Called by a sandbox whose PID namespace was seen empty."""
        if sandbox.host_ids:
            self._ids().give_back(sandbox.host_ids)
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
        if self._host_ids is not None:
            self._host_ids.close()
            self._host_ids = None
