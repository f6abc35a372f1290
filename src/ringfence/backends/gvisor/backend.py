"""The gVisor backend: provisions sandboxes through the jailer of this process."""

from __future__ import annotations

import os
from _thread import allocate_lock

from ...errors import IsolationError, SandboxLost
from ...launcher import wire
from ...launcher.machine_code.process_image import HEAD_IS_WRITTEN
from ...model.spec import STRONG
from ..local import journal
from ..local.acquired import Acquired
from ..local.answers import Refused, answer
from ..local.host import cgroups, identity
from ..local.host.accounts import own_root_refused
from ..local.host.facts import host, out_of_files
from ..local.jailed.jails import Jails, ask_for_process_image, kill
from ..local.jailed.saving import check_goes_on, tell_limits
from ..local.launched import appended_words
from ..local.mounts import template
from ..local.refusals import error_of
from ..local.sizes import sizes
from ..optional import Tenanted
from . import asked, runsc, warm
from . import plan as planning
from .ahead import Ahead
from .draft import Draft
from .runsc import KERNEL_BYTES, host_pids
from .sandbox import GvisorNetwork, GvisorSandbox
from .views import Views, is_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...egress.host.client import Egress
    from ...guest.settings import Settings
    from ...launcher.jail.jail import JailPlan
    from ...launcher.machine_code.process_image import ProcessImage
    from ...model.capabilities import BackendReport, Protection
    from ...model.granted import SandboxCapabilities
    from ...model.mount import Mount
    from ...model.session import Snapshot
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from ..local.jailed.jail_mounts import JailMounts
    from ..local.launched import Launched
    from ..local.mounts.images import Held
    from ..local.sizes import Sizes
    from .runsc import Runsc
    from .warm import GvisorWarm

NAME = asked.NAME
_READY_S = 60.0


class GvisorBackend(Jails, Tenanted):
    """See `Backend`.

    Args:
        path: The `runsc` to use; None looks on PATH and in the usual places.
        state_dir: Where snapshots are kept; None is this user's data directory.
        egress: Who serves networks and moves the data of forwarded connections; None is the process
            that this one shares.
        prebuilt: In a loop of creates, prebuild the next sandbox while the last one runs.
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
        prebuilt: bool = False,
        own_pages: bool | None = None,
    ) -> None:
        super().__init__(state_dir, egress)
        self._ahead = Ahead(self.prewarm) if prebuilt else None
        self._path = path
        self._process_images: tuple[Launched, ProcessImage | None] | None = None
        self._process_image_worked = False
        self.without_process_images = ""  # why agents start anew, where they should not have to
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
            from ..local.mounts import images

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
            except IsolationError as exc:
                if not self._gives_up_process_image():
                    raise
                self.without_process_images = exc.message
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
        here, uid, jailer = host(), identity.uid_of(spec.user), self.jailer()
        views = self.views(jailer)
        with Acquired() as passed, Acquired() as acquired:
            first = self.host_ids().take() if here.trusted_root else 0
            if first:
                acquired.callback(self.host_ids().give_back, first)
            draft = Draft(spec, sandbox_id, uid, first, image)
            passed.callback(draft.close)
            acquired.callback(
                lambda: journal.give_up(draft.protected, draft.note, sandbox_id, jailer)
            )
            process_image = self._process_image(jailer)
            draft.shares_pages = views.why_not(image)
            size = sizes(spec, here, most_pids=runsc.safe_pids())
            if size.on_disk:
                from ..local.mounts import disks

                draft.disk = disks.image_for(NAME, sandbox_id, size, first, spec)
                if draft.disk is not None:
                    passed.callback(draft.disk.close)
            if spec.network.needs_tls_termination:
                from ..local.mounts.trusted import trusted_for

                draft.trusted = trusted_for(spec.network, self.egress())
            plan = planning.make_plan(
                draft,
                here,
                program,
                size,
                has_content=content >= 0,
                memory=memory,
                process_image_bytes=process_image.size_bytes if process_image else 0,
                views=None if draft.shares_pages else views,
                tenant=self._tenants.get(sandbox_id, ""),
            )
            draft.note = plan["note"] = journal.note(sandbox_id, plan["placeholders"]) or ""
            most = size.memory_bytes + KERNEL_BYTES, host_pids(size.pids)
            group = self._plan_limits(plan, spec, *most)
            sandbox, network = self._launch(
                jailer, draft, plan, size, group, content, program, memory, process_image
            )
            acquired.pop_all()
        self._process_image_worked = self._process_image_worked or bool(
            plan["guest"]["process_image"]
        )
        self._jailed[sandbox_id] = sandbox
        # From here on it is the sandbox that gives everything back, when it ends.
        sandbox.complete(lambda: sandbox.join_network(network))
        return sandbox

    def belongs_to(self, sandbox_id: str, tenant: str) -> None:
        """The sandbox that will have this id is a tenant's: it has pages in common with theirs only.

        Of a tenant that is named like it, it is the only one. Others are of the one who has this backend.
        """
        self._tenants[sandbox_id] = tenant

    def views(self, jailer: Launched) -> Views:
        """Return the FUSE server for this jailer's jails; a new one when the last has ended."""
        with self._views_lock:
            found = self._views[-1] if self._views else None
            if (
                found is None
                or found.jailer is not jailer
                or not (found.alive and found.is_current)
            ):
                found = Views(self, jailer, wanted=self._own_pages)
                # Older ones end with the last sandbox that uses them.
                for each in self._views:
                    if each.jailer is not jailer or not each.alive:
                        each.close()
                self._views = [each for each in self._views if not each.is_closed] + [found]
            return found

    def _process_image(self, jailer: Launched) -> ProcessImage | None:
        """The agent as this jailer has started it ahead; None where it cannot."""
        with self._first_use:
            if self._process_images is None or self._process_images[0] is not jailer:
                self._process_images = jailer, self._take_process_image(jailer)
            return self._process_images[1]

    def _take_process_image(self, jailer: Launched) -> ProcessImage | None:
        try:
            return ask_for_process_image(jailer, planning.process_image())
        except Refused as exc:
            self.without_process_images = str(exc.strerror)
            return None  # it starts anew in every guest, which is slower and nothing else

    def _gives_up_process_image(self) -> bool:
        """After a start that failed: whether it may have been for a process image that never worked.

        It was taken on this host, by its kernel; that any gVisor there will be goes on from it,
        nobody can promise. Where it does not, agents start anew: slower, and with the same isolation.
        """
        with self._first_use:
            if (
                self._process_image_worked
                or self._process_images is None
                or self._process_images[1] is None
            ):
                return False
            self._process_images = self._process_images[0], None
            return True

    def _launch(
        self,
        jailer: Launched,
        draft: Draft,
        plan: JailPlan,
        size: Sizes,
        group: cgroups.Group,
        content: int,
        program: Runsc,
        memory: str,
        process_image: ProcessImage | None,
    ) -> tuple[GvisorSandbox, GvisorNetwork]:
        with Acquired() as passed, Acquired() as acquired:
            errors = appended_words("gvisor-says")
            acquired.callback(os.close, errors)
            ours, theirs = wire.socketpair()
            acquired.callback(ours.close)
            passed.callback(theirs.close)
            reply, last = ours, 0
            try:
                told = planning.settings(draft, host(), size)
                copied = process_image if plan["guest"]["process_image"] else None
                # It waits there until the agent reads it, as its first message of all.
                if memory:
                    reply = _wake(ours)
                    passed.callback(reply.close)
                elif copied is None:
                    wire.send(ours, told)
                content_fds = [content] if content >= 0 else []
                passed_on = [theirs.fileno(), errors, *content_fds, *draft.fds]
                body, [pidfd] = jailer.ask("create", plan, passed_on)
                acquired.callback(kill, pidfd)
                theirs.close()
                if copied is not None:
                    _bring(copied, ours, errors)
                    _tell(ours, told)  # now it may read
                sockets: list[int] = []
                if plan["network"] is not None:
                    _, sockets = answer(ours, _READY_S)
                    for fd in sockets:
                        acquired.callback(os.close, fd)
                said, _ = _answered(reply, errors)
                last = int(said) if memory else 0
                ours.settimeout(None)
                sandbox = GvisorSandbox(
                    self, draft, size, group, ours, int(body), pidfd, errors, jailer, program, last
                )
                network = GvisorNetwork(sandbox, sockets, draft.trusted)
            except Refused as exc:
                raise error_of(exc) from exc
            acquired.pop_all()
        return sandbox, network

    # -- the rest of the contract -------------------------------------------------------------

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        for sandbox in list(self._jailed.values()):
            sandbox.terminate()
        with self._views_lock:
            for each in self._views:
                each.close()
            self._views.clear()
        super().close()

    def report(self) -> BackendReport:
        from .report import backend_report

        return backend_report(self)

    def protections_of(self, sandbox: GvisorSandbox) -> tuple[Protection, ...]:
        from ..local.protections import protections_of
        from .posture import GvisorReader

        return protections_of(sandbox, lambda: GvisorReader(sandbox))

    def capabilities_of(self, sandbox: GvisorSandbox) -> SandboxCapabilities:
        from .inspection import granted

        return granted(sandbox)

    def attach(self, sandbox: GvisorSandbox, mount: Mount, more: JailMounts) -> None:
        from .attach import attach

        attach(sandbox, mount, more)

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
            again = spec or replace(taken_under, id=None, secrets=secrets or {})
            if not memory:
                return self._provision(again, content)
            check_goes_on(spec, taken_under)
            sandbox = self._provision(again, content, memory)
            sandbox.complete(lambda: tell_limits(sandbox, taken_under))
            return sandbox
        finally:
            os.close(content)

    def snapshot(
        self,
        sandbox: GvisorSandbox,
        metadata: Mapping[str, str],
        catalogue: Catalogue | None = None,
    ) -> Snapshot:
        from . import snapshots

        return snapshots.save(sandbox, catalogue or self.catalogue(), metadata)

    def checkpoint(self, sandbox: GvisorSandbox, metadata: Mapping[str, str]) -> Snapshot:
        from . import snapshots

        return snapshots.save_with_memory(sandbox, self.catalogue(), metadata)


def _bring(process_image: ProcessImage, control: wire.Socket, errors: int) -> None:
    """Fill the file that a jail made for it. The jail executes gVisor once it hears that the head is there.

    Raises:
        IsolationError: It cannot be, or there is no such jail any more.
    """
    _, [fd] = _answered(control, errors)
    try:
        process_image.write_head(fd)
        _say_head_is_written(control)
        process_image.write_rest(fd)
    except OSError as exc:
        raise IsolationError(f"the agent could not be copied into the guest: {exc}") from exc
    finally:
        os.close(fd)


def _say_head_is_written(control: wire.Socket) -> None:
    try:
        wire.send_raw(control, HEAD_IS_WRITTEN)
    except OSError:
        pass  # the jail has ended: what it said of that is next to be read


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
    """Wait for a word from inside: the jail's, or the agent's first.

    Raises:
        IsolationError: gVisor did not start, with its own words for it.
    """
    try:
        return answer(control, _READY_S)
    except SandboxLost as exc:
        said = runsc.last_words(errors)
        raise IsolationError(
            f"gVisor did not start: {said or 'it exited without printing an error'}",
            hint="run `ringfence doctor` to see what this host allows",
        ) from exc
