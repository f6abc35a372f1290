"""The gVisor backend: provisions sandboxes through the keeper of this process."""

from __future__ import annotations

import os
from _thread import allocate_lock

from ...errors import IsolationError, SandboxLost
from ...launcher import wire
from ...model.spec import STRONG
from ..local import cgroups, identity, journal, template
from ..local.accounts import own_root_refused
from ..local.answers import Refused, answer
from ..local.host import host, out_of_files
from ..local.hulls import Hulls, kill, take_still
from ..local.refusals import error_of
from ..local.saving import check_goes_on
from ..local.sizes import sizes
from ..local.words import last_words, room_for_words
from . import asked, runsc, waits, warm
from . import plan as planning
from .ahead import Ahead
from .draft import Draft
from .limits import KERNEL_BYTES, host_pids
from .network import GvisorNetwork
from .sandbox import GvisorSandbox
from .views import Views, is_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...egress.client import Egress
    from ...guest.settings import Settings
    from ...launcher.hull import HullPlan
    from ...launcher.still_file import Still
    from ...model.capabilities import BackendReport
    from ...model.snapshot import Snapshot
    from ...model.spec import SandboxSpec
    from ..local.images import Held
    from ..local.launched import Launched
    from ..local.sizes import Sizes
    from .runsc import Runsc
    from .warm import GvisorWarm

NAME = asked.NAME
_READY_S = 60.0


class GvisorBackend(Hulls):
    """See `Backend`.

    Args:
        path: The `runsc` to use; None looks on PATH and in the usual places.
        state_dir: Where snapshots are kept; None is this user's data directory.
        egress: Who serves networks and moves the data of forwarded connections; None is the process
            that this one shares.
        ahead: In a burst, build the next sandbox while the last one runs.
        own_pages: Show the host's read-only files through a view of each tenant's own, so that no page of
            the page cache is two tenants'; where that cannot be had, `protections()` says why.
    """

    name = NAME
    tiers = (STRONG,)
    never = asked.NEVER
    profile_names = asked.PROFILES
    least = asked.LEAST
    refuses = staticmethod(own_root_refused)

    def __init__(
        self,
        *,
        path: str | None = None,
        state_dir: str | None = None,
        egress: Callable[[], Egress] | None = None,
        ahead: bool = False,
        own_pages: bool | None = None,
    ) -> None:
        super().__init__(state_dir, egress)
        self._ahead = Ahead(self.prewarm) if ahead else None
        self._path = path
        self._stills: tuple[Launched, Still | None] | None = None
        self._still_worked = False
        self._own_pages = is_on() if own_pages is None else own_pages
        self._views: list[Views] = []  # the last one is for who comes
        self._views_lock = allocate_lock()
        self._tenants: dict[str, str] = {}

    def runsc(self) -> Runsc:
        """The program.

        Raises:
            BackendUnavailable: There is none.
        """
        return runsc.find(self._path)

    # -- provisioning -----------------------------------------------------------------------

    def provision(self, spec: SandboxSpec) -> GvisorSandbox:
        if self._ahead is None:
            return self._provision(spec, content=-1)
        sandbox = self._ahead.take(spec) or self._provision(spec, content=-1)
        self._ahead.follow(spec)
        return sandbox

    def _provision(self, spec: SandboxSpec, content: int, memory: str = "") -> GvisorSandbox:
        try:
            if spec.image is None:
                return self._provision_over(None, spec, content, memory)
            from ..local import images

            return images.made_from(
                spec, lambda spec, image: self._provision_over(image, spec, content, memory)
            )
        finally:
            if spec.id is not None:
                self._tenants.pop(spec.id, None)

    def _provision_over(
        self, image: Held | None, spec: SandboxSpec, content: int, memory: str
    ) -> GvisorSandbox:
        asked.check(spec)
        program = self.runsc()
        sandbox_id = self._new_id(spec)
        try:
            try:
                return self._make(spec, sandbox_id, program, content, memory, image)
            except IsolationError:
                if not self._gives_up_still():
                    raise
                return self._make(spec, sandbox_id, program, content, memory, image)
        except OSError as exc:
            if problem := out_of_files(exc):
                raise problem from exc
            raise
        finally:
            self._making.discard(sandbox_id)

    def _make(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        program: Runsc,
        content: int,
        memory: str,
        image: Held | None,
    ) -> GvisorSandbox:
        here, uid, keeper = host(), identity.uid_of(spec.user), self.keeper()
        views = self.views(keeper)
        first = self.host_ids().take() if here.trusted_root else 0
        draft = Draft(spec, sandbox_id, uid, first, image)
        try:
            still = self._still(keeper)
            draft.shares_pages = views.why_not(image)
            size = sizes(spec, here)
            if spec.network.needs_tls_termination:
                from ..local.trusted import trusted_for

                draft.trusted = trusted_for(spec.network, self.egress())
            plan = planning.make_plan(
                draft,
                here,
                program,
                size,
                has_content=content >= 0,
                memory=memory,
                still_bytes=still.size_bytes if still else 0,
                views=None if draft.shares_pages else views,
                tenant=self._tenants.get(sandbox_id, ""),
            )
            draft.note = plan["note"] = journal.note(sandbox_id, plan["placeholders"]) or ""
            most = size.memory_bytes + KERNEL_BYTES, host_pids(size.pids)
            group = self._plan_limits(plan, spec, *most)
            sandbox = self._launch(
                keeper, draft, plan, size, group, content, program, memory, still
            )
        except BaseException:
            journal.give_up(draft.protected, draft.note, sandbox_id, keeper)
            if first:
                self.host_ids().give_back(first)
            raise
        finally:
            draft.close()
        self._still_worked = self._still_worked or bool(plan["guest"]["still"])
        self._hulled[sandbox_id] = sandbox
        return sandbox

    def belongs_to(self, sandbox_id: str, tenant: str) -> None:
        """The sandbox that will have this id is a tenant's: it has pages in common with theirs only.

        Of a tenant that is named like it, it is the only one. Others are of the one who has this backend.
        """
        self._tenants[sandbox_id] = tenant

    def views(self, keeper: Launched) -> Views:
        """Who serves the host's files to this keeper's hulls; another one when the last has ended."""
        with self._views_lock:
            found = self._views[-1] if self._views else None
            if (
                found is None
                or found.keeper is not keeper
                or not (found.alive and found.is_current)
            ):
                found = Views(self, keeper, wanted=self._own_pages)
                # Those before end with the last sandbox that they have.
                for each in self._views:
                    if each.keeper is not keeper or not each.alive:
                        each.close()
                self._views = [each for each in self._views if not each.is_closed] + [found]
            return found

    def _still(self, keeper: Launched) -> Still | None:
        """The agent as this keeper has started it ahead; None where it cannot."""
        with self._first_use:
            if self._stills is None or self._stills[0] is not keeper:
                self._stills = keeper, take_still(keeper, planning.still())
            return self._stills[1]

    def _gives_up_still(self) -> bool:
        """After a start that failed: whether it may have been for a still that never worked.

        It was taken on this host, by its kernel; that any gVisor there will be goes on from it,
        nobody can promise. Where it does not, agents start anew: slower, and with the same walls.
        """
        with self._first_use:
            if self._still_worked or self._stills is None or self._stills[1] is None:
                return False
            self._stills = self._stills[0], None
            return True

    def _launch(
        self,
        keeper: Launched,
        draft: Draft,
        plan: HullPlan,
        size: Sizes,
        group: cgroups.Group,
        content: int,
        program: Runsc,
        memory: str,
        still: Still | None,
    ) -> GvisorSandbox:
        errors = room_for_words("gvisor-says")
        ours, theirs = wire.socketpair()
        pidfd, sockets = -1, list[int]()
        try:
            reply, last = ours, 0
            told = planning.settings(draft, host(), size)
            copied = still if plan["guest"]["still"] else None
            # It waits there until the agent reads it, as its first message of all.
            if memory:
                reply = _wake(ours)
            elif copied is None:
                wire.send(ours, told)
            passed = [theirs.fileno(), errors, *([content] if content >= 0 else []), *draft.fds]
            try:
                body, [pidfd] = keeper.ask("create", plan, passed)
            finally:
                theirs.close()
            if copied is not None:
                _bring(copied, ours, errors)
                _tell(ours, told)  # now it may read
            if plan["network"] is not None:
                _, sockets = answer(ours, _READY_S)
            said, _ = _answered(reply, errors)
            if memory:
                reply.close()
                last = int(said)
            ours.settimeout(None)
            sandbox = GvisorSandbox(
                self, draft, size, group, ours, int(body), pidfd, errors, keeper, program, last
            )
        except BaseException as exc:
            ours.close()
            for fd in (errors, *sockets):
                os.close(fd)
            if pidfd >= 0:
                kill(pidfd)
            if isinstance(exc, Refused):
                raise error_of(exc) from exc
            raise
        sandbox.join_network(GvisorNetwork(sandbox, sockets, draft.trusted))
        return sandbox

    # -- the rest of the contract -------------------------------------------------------------

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        for sandbox in list(self._hulled.values()):
            sandbox.terminate()
        with self._views_lock:
            for each in self._views:
                each.close()
            self._views.clear()
        super().close()

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)

    def prewarm(self, spec: SandboxSpec) -> GvisorWarm:
        warm.check(spec)
        return warm.GvisorWarm(self._provision(spec, content=-1))

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> GvisorSandbox:
        from dataclasses import replace

        catalogue = self.catalogue()
        _saved, taken_under, content = catalogue.open(snapshot_id)
        try:
            memory = catalogue.memory_of(snapshot_id)
            if memory:
                check_goes_on(spec, taken_under)
            again = spec or replace(taken_under, id=None, secrets=secrets or {})
            return self._provision(again, content, memory)
        finally:
            os.close(content)

    def snapshot(self, sandbox: GvisorSandbox, metadata: Mapping[str, str]) -> Snapshot:
        from . import snapshots

        return snapshots.save(sandbox, self.catalogue(), metadata)

    def checkpoint(self, sandbox: GvisorSandbox, metadata: Mapping[str, str]) -> Snapshot:
        from . import snapshots

        return snapshots.save_with_memory(sandbox, self.catalogue(), metadata)


def _bring(still: Still, control: wire.Socket, errors: int) -> None:
    """Fill the file that a hull made for it.

    Raises:
        IsolationError: It cannot be, or there is no such hull any more.
    """
    _, [fd] = _answered(control, errors)
    try:
        still.write(fd)
    except OSError as exc:
        raise IsolationError(f"the agent could not be copied into the guest: {exc}") from exc
    finally:
        os.close(fd)


def _tell(control: wire.Socket, told: Settings) -> None:
    try:
        wire.send(control, told)
    except OSError:
        pass  # it has ended: what it said of that is next to be read


def _wake(control: wire.Socket) -> wire.Socket:
    """Where the restored agent will answer: it gets a name that no other sandbox has."""
    ours, theirs = wire.socketpair()
    wire.send(control, ("wake", template.new_hostname()), [theirs.fileno()])
    theirs.close()
    return ours


def _answered(control: wire.Socket, errors: int) -> tuple[bytes, list[int]]:
    """Wait for a word from inside: the hull's, or the agent's first.

    Raises:
        IsolationError: gVisor did not start, with its own words for it.
    """
    try:
        return answer(control, _READY_S)
    except SandboxLost as exc:
        said = last_words(errors, waits.SAYS)
        raise IsolationError(
            f"gVisor did not start: {said or 'it exited without printing an error'}",
            hint="run `ringfence doctor` to see what this host allows",
        ) from exc
