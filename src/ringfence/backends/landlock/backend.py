"""The landlock backend: makes sandboxes where the host refuses namespaces. It is never a default."""

from __future__ import annotations

import os
from dataclasses import replace

from ...errors import BackendUnavailable, InvalidRequest, IsolationError, SandboxLost
from ...guest.without_namespaces import landlocked
from ...launcher import wire
from ...launcher.cgroups import open_tasks, remove
from ...model.capabilities import NAMESPACES
from ...model.net.network import NetworkPolicy
from ...model.session import ResolvedMount
from ...model.spec import OS_HARDENED
from ...policy.landlock import SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL
from ..command import limits
from ..command.backend import CommandBackend
from ..command.launchers import Launcher
from ..local.acquired import Acquired
from ..local.agents.agents import make_workdir, own_mounts, settings
from ..local.agents.inside import descendants
from ..local.answers import Refused, answer
from ..local.host import cgroups
from ..local.host.facts import host
from ..local.host.mountinfo import read_text
from ..local.launched import last_words, room_for_words
from ..local.mounts.trusted import trusted_for
from ..local.network import check_given_secrets
from ..local.sizes import sizes
from . import filters, rules
from .network import Loopback
from .place import SHARED_MEMORY, Place
from .sandbox import LandlockSandbox
from .starter import Starter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from ...egress.host.client import Egress
    from ...model.capabilities import BackendReport
    from ...model.mount import Mount
    from ...model.spec import SandboxSpec
    from ..local.mounts.trusted import Trusted

NAME = "landlock"
UNASKED = "a filter around this process has a listener: no fork waits for the agent"
_READY_S = 60.0


class LandlockBackend(CommandBackend):
    """See `Backend`. As host root, each sandbox runs as a user that nobody else is.

    Args:
        state_dir: Where snapshots are kept; None is this user's data directory.
        egress: Who decides about connections; None is the process that this one shares.
    """

    not_strong = "Landlock and filters share the host's kernel"
    not_root = "it maps no ids: root inside would be root on the host"
    no_images = "without a mount namespace the programs are the host's"
    saves = True

    def __init__(
        self, *, state_dir: str | None = None, egress: Callable[[], Egress] | None = None
    ) -> None:
        super().__init__(Launcher(NAME, (), filtered=True), state_dir=state_dir, egress=egress)
        self.policies = {OS_HARDENED: None}
        self._starter = Starter()

    def beside(self, state_dir: str) -> LandlockBackend:
        return LandlockBackend(state_dir=state_dir)

    def layout(self) -> cgroups.Layout:
        found = super().layout()
        # Without a cgroup each fork waits for the agent if there is a limit of processes.
        self.held = tuple(dict.fromkeys((*self.held, "pids", "network_bytes")))
        self.saves = True
        return found

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what takes namespaces, before anything is made."""
        is_root = spec.user in ("root", "0")
        if spec.user not in (None, "sandbox", str(os.geteuid())) and not is_root:
            raise InvalidRequest(f"no user {spec.user!r}: it maps no ids", field="user")
        rules.check_mounts(spec, self.name, is_owner=not host().changes_users)
        check_given_secrets(spec)
        if host().changes_users:
            rules.check_python(spec, self.name)
        plain = replace(spec, mounts=(), memory_dir=None, secrets={}, user=None, python_env=False)
        if not spec.network.is_unrestricted:
            plain = replace(plain, network=NetworkPolicy())
        super().check(replace(plain, user="root") if is_root else plain)
        if abi() < rules.LEAST_ABI:
            raise BackendUnavailable(
                f"Landlock ABI {abi()} does not judge truncation; {rules.LEAST_ABI} does (Linux 6.2)"
                if abi()
                else "this kernel has no Landlock, or disables it (lsm= on its command line)",
                hint="use a newer kernel, or the native backend",
            )

    def degraded(self, spec: SandboxSpec, lacking: Container[str] = ()) -> tuple[str, ...]:
        """See `AgentBackend`; also the lack that is this backend's own, where it was allowed by name."""
        own = [NAMESPACES] if NAMESPACES in spec.allow_degraded else []
        return (*super().degraded(spec, lacking), *own)

    def provision(self, spec: SandboxSpec) -> LandlockSandbox:
        made = super().provision(spec)
        assert isinstance(made, LandlockSandbox)
        return made

    def provision_with(
        self, spec: SandboxSpec, taken_under: SandboxSpec, content: int
    ) -> LandlockSandbox:
        del taken_under
        sandbox = self.provision(spec)
        sandbox.complete(lambda: sandbox.load(content))
        return sandbox

    def _make(self, spec: SandboxSpec, sandbox_id: str) -> LandlockSandbox:
        slot = self._ids().take() if host().changes_users else 0
        try:
            trusted = None
            if spec.network.needs_tls_termination:
                trusted = trusted_for(spec.network, self.egress())
            mount = _mount_of_workdir(spec)
            workdir = None if mount else spec.workdir
            mounts = {each.target: each.source and rules.host_path(each) for each in spec.mounts}
            mounts |= {each.target: each.target for each in rules.python_mounts(spec)}
            made = Place(slot or host().uid, workdir, mounts, spec.memory_dir, trusted)
            try:
                sandbox = self._start(spec, sandbox_id, slot, made, trusted)
            except BaseException:
                made.remove()
                raise
        except BaseException:
            if slot:
                self._ids().give_back(slot)
            raise
        self._live[sandbox_id] = sandbox
        if mount is None or rules.is_own(mount):
            sandbox.complete(lambda: make_workdir(sandbox))
        return sandbox

    def _settings(
        self,
        spec: SandboxSpec,
        slot: int,
        made: Place,
        opened: list[tuple[int, int]],
        loopback: Loopback,
    ) -> dict[str, object]:
        handled = rules.handled(abi())
        is_counted = bool(self.layout().version)
        size = sizes(spec, host())
        # A socket of the host's could be moved out of a writable directory, where none is refused.
        has_sockets = not any(m.is_writable for m in rules.shown(spec))
        told = settings(
            spec,
            slot or host().uid,
            filtered=True,
            policy=self.policies.get(spec.profile),
            processes=size.pids + 4 if slot else 0,
            by_init=True,
            samples=(0, 0) if is_counted else (size.pids, size.memory_bytes),
        )
        roots = [*made.writable, *(m.target for m in rules.shown(spec) if m.is_writable)]
        own = [rules.own_rule(path, sockets=has_sockets) for path in made.writable]
        return {
            **told,
            "ids": slot or (-1 if host().uid == 0 else 0),
            "ruleset": handled,
            "rules": [
                *rules.system_rules(handled[0]),
                *((each.source, rules.READ) for each in rules.python_mounts(spec)),
                *own,
                *((path, rules.READ) for path in made.readable),
                *(("", access) for _fd, access in opened),
            ],
            "refused": filters.second_filter(scopes_signals=bool(handled[2] & SCOPE_SIGNAL)),
            "judged": {
                "calls": filters.judged_calls(owns_files_outside=not slot),
                "roots": roots,
            },
            "network": loopback.network(
                made.writable if has_sockets else [],
                is_scoped=bool(handled[2] & SCOPE_ABSTRACT_UNIX_SOCKET),
            ),
            "shared": {"calls": filters.shared_calls(), "place": made.mapped(SHARED_MEMORY)},
            "segments": filters.segment_calls(),
            "scheduling": filters.scheduling_calls(),
            # Only if it is asked for: a signal can interrupt what waits.
            "forks": filters.fork_calls() if spec.limits.pids and not (is_counted or slot) else [],
            "tag_base": _new_base(),
        }

    def _start(
        self, spec: SandboxSpec, sandbox_id: str, slot: int, made: Place, trusted: Trusted | None
    ) -> LandlockSandbox:
        layout = self.layout()
        group = cgroups.Group(layout, cgroups.group_name(sandbox_id), cpus=bool(spec.limits.cpus))
        with Acquired() as passed, Acquired() as acquired:
            loopback = Loopback()
            acquired.callback(loopback.close)
            opened = rules.open_mounts(rules.shown(spec))
            for fd, _access in opened:
                passed.callback(os.close, fd)
            errors = room_for_words("guardian-says")
            passed.callback(os.close, errors)
            acquired.callback(remove, group.directories)
            told = self._settings(spec, slot, made, opened, loopback)
            limits.make(group, spec)
            tasks = open_tasks(group.directories) if layout.version == 1 else []
            for fd in tasks:
                passed.callback(os.close, fd)
            ours, theirs = wire.socketpair()
            acquired.callback(ours.close)
            passed.callback(theirs.close)
            process = self._starter.start(theirs.fileno(), errors, tasks)
            # The guardian ends everything when nobody is at the other end.
            acquired.callback(process.wait)
            acquired.callback(theirs.close)
            acquired.callback(ours.close)
            if layout.version == 2:
                limits.join(group, process.pid)
            wire.send(ours, told, [fd for fd, _access in opened])
            theirs.close()
            try:
                told_ready, _fds = answer(ours, _READY_S)
            except (SandboxLost, Refused, IsolationError) as exc:
                raise IsolationError(
                    f"the landlock backend did not start: {last_words(errors) or exc}"
                ) from exc
            ours.settimeout(None)
            asks = not told_ready
            if told["forks"] and not asks:
                self.refuse_limits(spec, ["pids"], UNASKED)
            agent = _child_of(process.pid)
            if layout.version:
                limits.check(group, agent)
            mounts = [
                ResolvedMount(
                    each.target, each.access, os.path.realpath(each.source) if each.source else None
                )
                for each in spec.mounts
            ]
            base = told["tag_base"]
            assert isinstance(base, int)
            sandbox = LandlockSandbox(
                self,
                spec,
                sandbox_id,
                slot or host().uid,
                [*own_mounts_of(spec), *mounts],
                ours,
                process,
                agent,
                group,
                made,
                slot,
                base,
                loopback,
                trusted,
                asks_about_forks=bool(told["forks"]) and asks,
            )
            acquired.pop_all()
        return sandbox

    def close(self) -> None:
        super().close()
        self._starter.close()

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)


def abi() -> int:
    """The Landlock ABI that is used: that of this kernel."""
    return host().landlock_abi


def _child_of(pid: int) -> int:
    """Source: proc(5), children, CONFIG_PROC_CHILDREN; without it all processes of the host are looked at."""
    try:
        found = read_text(f"/proc/{pid}/task/{pid}/children").split()
    except OSError:
        found = []
    return int(found[0]) if found else descendants(pid)[0]


def own_mounts_of(spec: SandboxSpec) -> list[ResolvedMount]:
    return own_mounts(replace(spec, mounts=()))


def _mount_of_workdir(spec: SandboxSpec) -> Mount | None:
    """The innermost mount that the session's root is in."""
    workdir = spec.workdir or ""
    around = [m for m in spec.mounts if workdir == m.target or workdir.startswith(f"{m.target}/")]
    return max(around, key=lambda mount: len(mount.target), default=None)


def _new_base() -> int:
    """Tags that no other sandbox has: 40 random bits, above all limits that anybody means."""
    return ((1 << 61) | int.from_bytes(os.urandom(5), "big") << 20) + landlocked.TAGS - 1
