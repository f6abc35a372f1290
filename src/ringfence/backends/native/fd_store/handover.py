"""Handover of a native backend to a later process, and takeover from an earlier one."""

from __future__ import annotations

import os
import weakref
from _thread import RLock

from ....errors import RingfenceError, SandboxLost, ServerUnreachable
from ....launcher.spawn import Started
from ....launcher.wire import adopt
from ...local import journal
from ...local.answers import Refused
from ...local.fd_store import Item
from ...local.host import cgroups, owner
from ..zygote import Zygote
from . import handover_items
from .no_handover import NoHandover

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...local.agents.execs import LocalExec
    from ...local.fd_store import FdStore
    from ..live import LiveSandbox
    from ..runtime import Runtime

_HOST = ""  # whose is what belongs to no sandbox
_ZYGOTE, _LAYOUT, _IDS = "zygote", "layout", "ids "


class Handover(NoHandover):
    """The backend's items in the fd store. Thread-safe.

    Attributes:
        outlives: True if sandboxes can outlive this process.
        layout: Cgroup layout of an earlier process, which this one continues; None: detect it.
    """

    outlives = True

    def __init__(self, backend: Runtime, fd_store: FdStore) -> None:
        self._backend, self._fd_store = backend, fd_store
        self._lock, self._open = RLock(), False
        self._runs: weakref.WeakValueDictionary[tuple[str, int], LocalExec] = (
            weakref.WeakValueDictionary()
        )
        self._sockets: dict[str, list[int]] = {}  # of networks: our own copies, to give again
        self._ids: dict[str, int] = {}
        self._zygote: Zygote | None = None
        self.layout = None

    # -- going on -----------------------------------------------------------------------------

    def open(self) -> None:
        """Go on with what an earlier process left; on first use."""
        with self._lock:
            if self._open:
                return
            self._open = True  # what is called below comes by here again
            self._fd_store.refill = self._everything
            theirs: dict[str, dict[str, Item]] = {}
            for item in self._fd_store.open():
                theirs.setdefault(item.whose, {})[item.name] = item
            shared = theirs.pop(_HOST, {})
            zygote = _zygote_from(shared.pop(_ZYGOTE, None))
            if zygote is not None:
                self._go_on(zygote, shared, theirs)
            self._close_rest(shared, theirs)

    def _go_on(
        self, zygote: Zygote, shared: dict[str, Item], theirs: dict[str, dict[str, Item]]
    ) -> None:
        backend = self._backend
        alive = {
            sandbox_id: items[handover_items.SANDBOX].note["pid"]
            for sandbox_id, items in theirs.items()
            if handover_items.SANDBOX in items and handover_items.COUNT in items
        }
        try:
            body, _fds = zygote.ask("keep_only", (list(alive.values()), list(alive)))
        except (Refused, SandboxLost):
            return  # it has just died, and they with it
        self._zygote = zygote
        if _LAYOUT in shared:
            self.layout = shared[_LAYOUT].note
        backend.use(zygote)
        journal.sweep(owner.label(zygote.pid), alive)
        used = set()
        for sandbox_id in alive:
            items = theirs.pop(sandbox_id)
            used.add(items[handover_items.SANDBOX].note["first_host_id"])
            self._take_back(zygote, sandbox_id, items)
        for name, item in list(shared.items()):
            if name.startswith(_IDS):
                del shared[name]
                self._ids[item.note] = item.fds[0]
                if body == b"0":  # else somebody with one of them has not died yet
                    backend.host_ids().go_on_with(item.note, item.fds[0], used)

    def _take_back(self, zygote: Zygote, sandbox_id: str, items: dict[str, Item]) -> None:
        if handover_items.NETWORK in items:
            self._sockets[sandbox_id] = [os.dup(fd) for fd in items[handover_items.NETWORK].fds]
        try:
            sandbox = handover_items.take_back(self._backend, zygote, sandbox_id, items)
        except (RingfenceError, KeyError):
            for item in items.values():
                item.close()  # its control socket too: it ends
            self._close_sockets(sandbox_id)
            self._fd_store.change([], [(sandbox_id, "")])
            return
        for run in list(sandbox.runs.values()):
            self._watch(sandbox, run)
            if run.never_began():
                run.discard()
        self._backend.count(sandbox)
        try:
            sandbox.network.serve()
        except RingfenceError as exc:
            if isinstance(exc.__cause__, (OSError, RuntimeError)):
                raise  # no process or thread may be started now: the next daemon may be able to
            sandbox.terminate()

    def _close_rest(self, shared: dict[str, Item], theirs: dict[str, dict[str, Item]]) -> None:
        for whose, items in theirs.items():
            for item in items.values():
                item.close()
            self._fd_store.change([], [(whose, "")])
        for name, item in shared.items():
            item.close()
            if name != _LAYOUT or self.layout is None:
                self._fd_store.change([], [(_HOST, name)])

    # -- keeping ------------------------------------------------------------------------------

    def change_zygote(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._fd_store.change([self._zygote_item(zygote)])

    def change_layout(self, layout: cgroups.Layout) -> None:
        self.layout = layout.version, layout.bases, layout.why
        self._fd_store.change([Item(_HOST, _LAYOUT, self.layout, [])])

    def add_ids(self, lock_fd: int) -> None:
        """A block of host ids is ours, as long as this lock is held."""
        path = os.readlink(f"/proc/self/fd/{lock_fd}")
        self._ids[path] = lock_fd
        self._fd_store.change([Item(_HOST, _IDS + path, path, [lock_fd])])

    def expect(self, sandbox: LiveSandbox) -> None:
        """It is being made: what can be put together of it before it is there."""
        sandbox.spec_text = sandbox.spec, handover_items.text_of(sandbox.spec)

    def begin(self, sandbox: LiveSandbox, sockets: list[int]) -> None:
        """A new sandbox; nothing has been run in it."""
        if sockets:
            self._sockets[sandbox.id] = [os.dup(fd) for fd in sockets]
        self._fd_store.change(handover_items.everything(sandbox, self._sockets.get(sandbox.id, [])))

    def change(self, sandbox: LiveSandbox) -> None:
        """It has another policy, or another mount."""
        self._fd_store.change([handover_items.whole(sandbox), *handover_items.locks(sandbox)])

    def change_network(self, sandbox: LiveSandbox, sockets: list[int]) -> None:
        had_any = sandbox.id in self._sockets  # not after its end: then nothing of it is kept
        self._close_sockets(sandbox.id)
        if sockets:
            self._sockets[sandbox.id] = [os.dup(fd) for fd in sockets]
            self._fd_store.change([Item(sandbox.id, handover_items.NETWORK, None, sockets)])
        elif had_any:
            self._fd_store.change([], [(sandbox.id, handover_items.NETWORK)])

    def add_agent(self, sandbox: LiveSandbox, uid: int) -> None:
        """Store the process that starts programs of another user."""
        self._fd_store.change([handover_items.agent(sandbox, uid)])

    def begin_exec(self, sandbox: LiveSandbox, run: LocalExec) -> None:
        """Hand over an exec before PID 1 hears of it: one that the fd store does not have never began.

        Raises:
            ServerUnreachable: Everything has been left to the next process.
        """
        self._watch(sandbox, run)
        count = Item(sandbox.id, handover_items.COUNT, sandbox.count, [])
        if not self._fd_store.change([handover_items.exec_item(run), count]):
            raise ServerUnreachable("the daemon is being stopped")

    def _watch(self, sandbox: LiveSandbox, run: LocalExec) -> None:
        self._runs[sandbox.id, run.number] = run
        run.keep, run.let_go = self._change_exec, self._end_exec

    def _change_exec(self, run: LocalExec) -> None:
        if (run.home_id, run.number) in self._runs and run.done >= 0:
            self._fd_store.change([handover_items.exec_item(run)])

    def _end_exec(self, run: LocalExec) -> None:
        if self._runs.pop((run.home_id, run.number), None) is not None:
            self._fd_store.change([], [(run.home_id, f"{handover_items.EXEC}{run.number}")])

    def change_paused(self, sandbox: LiveSandbox, paused: bool) -> None:
        if paused:
            self._fd_store.change([Item(sandbox.id, handover_items.PAUSED, None, [])])
        else:
            self._fd_store.change([], [(sandbox.id, handover_items.PAUSED)])

    def end(self, sandbox: LiveSandbox) -> None:
        for run in self._all_runs():
            if run.home_id == sandbox.id:
                self._runs.pop((run.home_id, run.number), None)
        self._close_sockets(sandbox.id)
        self._fd_store.change([], [(sandbox.id, "")])

    def leave(self) -> None:
        """Everything lives on."""
        self._fd_store.leave()

    def close(self) -> None:
        """Nothing lives on. Preconditions: every sandbox has ended."""
        self._fd_store.end()

    def _close_sockets(self, sandbox_id: str) -> None:
        for fd in self._sockets.pop(sandbox_id, []):
            os.close(fd)

    def _all_runs(self) -> list[LocalExec]:
        # Not `values()`: it fails when another thread adds an exec meanwhile.
        return [run for each in self._runs.valuerefs() if (run := each()) is not None]

    def _everything(self) -> list[Item]:
        items = [Item(_HOST, _IDS + path, path, [fd]) for path, fd in self._ids.items()]
        if self._zygote is not None:
            items.append(self._zygote_item(self._zygote))
        if self.layout is not None:
            items.append(Item(_HOST, _LAYOUT, self.layout, []))
        for sandbox in self._backend.living():
            items += handover_items.everything(sandbox, self._sockets.get(sandbox.id, []))
        return items + [handover_items.exec_item(run) for run in self._all_runs()]

    def _zygote_item(self, zygote: Zygote) -> Item:
        note = zygote.pid, zygote.started
        return Item(_HOST, _ZYGOTE, note, [zygote.control_fd])


def _zygote_from(item: Item | None) -> Zygote | None:
    """The zygote of an earlier process; None when it has ended."""
    if item is None:
        return None
    pid, started = item.note
    if not started or owner.start_time(pid) != started:
        item.close()
        return None
    return Zygote(Started(pid, adopt(item.fds.pop())))
