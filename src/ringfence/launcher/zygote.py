"""The zygote: one single-threaded, stdlib-only process that forks sandboxes on request.

It answers requests of the host process, one datagram each, and ends with it: when the host's end
of the socket closes, every sandbox is killed and every cgroup removed before it exits.
"""

from __future__ import annotations

import _signal as signal
import errno
import gc
import marshal
import posix as os
import sys
import time

from ..linux import files, mounts, privileges
from . import build, cgroups, enter, idmap, newborn, newroot, placeholders, wire
from .machine_code import hibernation_image
from .parent import CONTROL_FD, Parent, fork_helper, rename_process
from .pid1 import idle_pages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .boot import Template
    from .newborn import Newborn
    from .placeholders import Placeholder
    from .plan import Shape, Tree

_MOST_TEMPLATES = 16
_DYING_S = 5.0


def main() -> None:
    """Serve on descriptor 3 until it closes."""
    files.close_from(CONTROL_FD + 1)
    os.umask(0o022)
    rename_process(b"ringfence")
    try:
        privileges.adopt_orphans()  # helpers whose parent is done end here, not at the host's PID 1
    except PermissionError:
        pass  # a filter is around us; what it says to the first sandbox tells more
    idle_pages.learn()
    # Frozen objects are not touched by the collector, so children share their pages.
    gc.disable()
    gc.freeze()
    Zygote(wire.adopt(CONTROL_FD)).run()
    os._exit(0)  # an interpreter takes milliseconds to end in style


class Owned:
    """Cleanup of a sandbox, to run once it is empty.

    Attributes:
        read: The host reads its cgroups even then, and reports when it has.
        since_s: Time of its creation or claim.
    """

    def __init__(self, sandbox_id: str, directories: list[str], *, read: bool) -> None:
        self.id, self.directories, self.read = sandbox_id, directories, read
        self.since_s = time.monotonic()


class Expected:
    """A prebuild to start once its predecessor has had the processors for a while.

    Attributes:
        control: Its control socket, with its plan; the host already has the other end.
        due_s: When to start.
        rehearses: There is time to rehearse: with no delay, the next create comes at once.
    """

    def __init__(self, shape: Shape, delay_s: float, control: wire.Socket) -> None:
        self.shape, self.control = shape, control
        self.due_s, self.rehearses = time.monotonic() + delay_s, delay_s > 0


class Zygote(Parent):
    """Owns the processes and cgroups of every sandbox it made."""

    def __init__(self, host: wire.Socket) -> None:
        super().__init__(host)
        self.sandboxes: dict[int, Owned] = {}  # by pid of PID 1
        self.ended: dict[str, list[str]] = {}  # cgroups that the host may still read, by sandbox id
        # By sandbox id, cleanup that the host does, done here only when the host is gone: two that
        # remove the same at once disturb each other. And the files that record it.
        self.placeholders: dict[str, list[Placeholder]] = {}
        self.notes: dict[str, str] = {}
        self.warm: dict[str, Newborn] = {}  # by sandbox id: of a pool, and waiting for a claim
        self.complete: dict[str, int] = {}  # pid by sandbox id: locked down, and not claimed yet
        self.expected: Expected | None = None
        self.hibernation_image = hibernation_image.HibernationImage()
        self.templates: dict[bytes, Template] = {}  # so that no child has to unpack its own

    def serve_one(self) -> bool:
        message, fds = wire.receive(self.host)
        if message is None:
            return False
        verb, argument = message
        if verb in _NOTES:
            _NOTES[verb](self, argument, fds)
            return True
        reply = wire.adopt(fds.pop(0))
        try:
            _VERBS[verb](self, argument, reply, fds)
        except newroot.BuildError as exc:
            wire.refuse(reply, exc.cause, exc.step)
        except OSError as exc:
            wire.refuse(reply, exc, verb)
        except Exception as exc:  # noqa: BLE001  one request is not to end the sandboxes of all others
            wire.refuse(reply, OSError(errno.EPROTO, repr(exc)), verb)
        finally:
            reply.close()
            for fd in fds:
                os.close(fd)
        return True

    def hold(self, _: Any, _reply: wire.Socket, fds: list[int]) -> None:
        os.dup(fds[0])  # a lock of the host's, ours too until we end

    def released(self, sandbox_id: str, _reply: wire.Socket, _fds: list[int]) -> None:
        self.placeholders.pop(sandbox_id, None)
        self.notes.pop(sandbox_id, None)

    def keep_only(
        self, told: tuple[list[int], list[str]], reply: wire.Socket, _fds: list[int]
    ) -> None:
        """A new host has come, and goes on with these: end all others, also those half made.

        Answers with how many of those have not died yet.
        """
        self.cancel_expected()
        pids, ids = set(told[0]), set(told[1])
        doomed = [pid for pid in self.sandboxes if pid not in pids]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)  # cannot be a stranger: only we reap it
            cgroups.thaw(self.sandboxes[pid].directories)
        give_up = time.monotonic() + _DYING_S
        while any(pid in self.sandboxes for pid in doomed) and time.monotonic() < give_up:
            time.sleep(0.002)
            self.reap()
        for sandbox_id in [each for each in self.ended if each not in ids]:
            cgroups.remove(self.ended.pop(sandbox_id))  # whoever wanted to read them is gone
        for sandbox_id in [each for each in self.placeholders if each not in ids]:
            self.remove_placeholders(sandbox_id)
        wire.send_raw(reply, b"O%d" % sum(pid in self.sandboxes for pid in doomed))

    def remove_placeholders(self, sandbox_id: str) -> None:
        placeholders.remove(self.placeholders.pop(sandbox_id))
        if note := self.notes.pop(sandbox_id):
            placeholders.erase_note(note)

    # -- creating ---------------------------------------------------------------------------

    def create(self, shape: Shape, control: wire.Socket, pinned: list[int]) -> None:
        """Start one sandbox; it tells the host itself, on `control`, when it is ready or why not."""
        child = self.spawn(shape, control, disk=disk_of(shape, pinned))
        trees: list[int] = []
        try:
            if shape["trusted_root"]:
                trees = self.open_trees(shape["trees"], pinned)
            newborn.prefer(child.pid)
            child.give(None, [], trees)
        except (OSError, newroot.BuildError):
            os.kill(child.pid, signal.SIGKILL)
            raise
        finally:
            child.close()
            for fd in trees:
                os.close(fd)
        self.remember(shape)

    def prewarm(self, shape: Shape, reply: wire.Socket, fds: list[int]) -> None:
        """Build a sandbox for a pool; it tells the host itself that it waits for a claim."""
        disk = disk_of(shape, fds)
        self.warm[shape["id"]] = self.spawn(shape, reply, waits=True, rehearses=True, disk=disk)

    def prebuild(self, told: tuple[Shape, float], fds: list[int]) -> None:
        """Build a sandbox whose plan is in its control socket, in so many seconds or when the last one ends."""
        self.build_expected()
        self.expected = Expected(*told, wire.adopt(fds[0]))

    def build_expected(self) -> None:
        """Build it now, if one is expected: it is due, or a request must not find it missing."""
        expected, self.expected = self.expected, None
        if expected is None:
            return
        shape = expected.shape
        try:
            child = self.spawn(shape, expected.control, rehearses=expected.rehearses)
        except (OSError, newroot.BuildError):
            return  # the host reads that its control is closed
        finally:
            expected.control.close()
        try:
            child.give(None, [], [])
        except OSError:
            os.kill(child.pid, signal.SIGKILL)
        child.close()
        self.complete[shape["id"]] = child.pid

    def cancel_expected(self) -> None:
        if self.expected is not None:
            self.expected.control.close()
            self.expected = None

    def claimed(self, sandbox_id: str, _fds: list[int]) -> None:
        """The host has claimed this prebuilt sandbox, which needs nothing more of us."""
        if self.expected is not None and self.expected.shape["id"] == sandbox_id:
            self.expected.rehearses = False
        self.build_expected()
        if sandbox_id in self.complete:
            newborn.prefer(self.complete.pop(sandbox_id))
        child = self.warm.pop(sandbox_id, None)
        if child is not None:
            newborn.prefer(child.pid)
            child.close()

    def spawn(
        self,
        shape: Shape,
        control: wire.Socket,
        *,
        waits: bool = False,
        rehearses: bool = False,
        disk: int = -1,
    ) -> Newborn:
        """A process in new namespaces, ids and cgroups, which goes on by itself from there."""
        self.reap()  # one of the same id may just have ended: its cgroups go before ours are made
        layers: list[int] = []
        if shape["trusted_root"]:
            layers = self.open_trees(shape["layers"], [])
        try:
            template = self.template(shape["template"])
            child = newborn.clone(
                shape,
                template,
                control,
                layers,
                self.hibernation_image.fd,
                disk,
                waits=waits,
                rehearses=rehearses,
            )
        finally:
            for fd in layers:
                os.close(fd)
        # The host knows whether a prebuilt one was claimed, and says which to release.
        self.sandboxes[child.pid] = Owned(shape["id"], shape["cgroup_dirs"], read=True)
        try:
            child.let_go(shape)
        except OSError:
            os.kill(child.pid, signal.SIGKILL)
            child.close()
            raise
        return child

    def template(self, packed: bytes) -> Template:
        if packed not in self.templates:
            if len(self.templates) == _MOST_TEMPLATES:
                self.templates.clear()
            self.templates[packed] = marshal.loads(packed)
        return self.templates[packed]

    def remember(self, shape: Shape) -> None:
        """Record this sandbox's host files, to remove them if the host dies."""
        if shape["placeholders"]:
            self.placeholders[shape["id"]] = shape["placeholders"]
            self.notes[shape["id"]] = shape["note"]

    def claim(self, shape: Shape, control: wire.Socket, pinned: list[int]) -> None:
        """Give a warm sandbox the plan of who gets it; it answers on `control` as a new one does.

        Everything that depends on that comes here: limits, mounts and the lock-down.
        """
        child = self.warm.pop(shape["id"], None)
        if child is None:
            raise OSError(errno.ESRCH, "the warm sandbox has ended")
        tasks: list[int] = []
        trees: list[int] = []
        try:
            newborn.prefer(child.pid)
            owned = self.sandboxes[child.pid]
            new = [d for d in shape["cgroup_dirs"] if d not in owned.directories]
            owned.directories, owned.since_s = shape["cgroup_dirs"], time.monotonic()
            self.remember(shape)
            if new or shape["cgroup_values"] != child.values:
                cgroups.make(new, shape["cgroup_values"])
            if shape["cgroup_version"] == 1:
                tasks = cgroups.open_tasks(new)
            if shape["trusted_root"] or not shape["trees"]:
                trees = self.open_trees(shape["trees"], pinned)
                child.give(control, tasks, trees)
            elif os.fork() == 0:
                # It looks up paths of the user's, which may take its time: we have others to serve.
                fetch_trees(shape, child, control, tasks)
        finally:
            child.close()  # without a plan, the sandbox ends
            for fd in tasks + trees:
                os.close(fd)

    def open_trees(self, wanted: list[Tree], pinned: list[int]) -> list[int]:
        """As host root: copy what the user mounts from the host's own mounts, ids mapped."""
        made: dict[tuple[str, str], int] = {}
        trees: list[int] = []
        try:
            for tree in wanted:
                trees.append(self.open_one_tree(tree, pinned, made))
        except (OSError, newroot.BuildError):
            for fd in trees:
                os.close(fd)
            raise
        finally:
            for fd in made.values():
                os.close(fd)
        return trees

    def open_one_tree(self, tree: Tree, pinned: list[int], made: dict[tuple[str, str], int]) -> int:
        maps = (tree["idmap"], tree["idmap_gid"])
        idmap_fd = -1
        if tree["idmap"]:
            if maps not in made:
                made[maps] = idmap.user_namespace(*maps)
            idmap_fd = made[maps]
        if tree["fd"] < 0:
            opened: int = mounted(build.open_tree, f"open {tree['source']}", tree, idmap_fd)
            return opened
        fd = mounts.open_tree("", dir_fd=pinned[tree["fd"]], recursive=idmap_fd < 0)
        try:
            mounted(build.restrict_tree, f"restrict {tree['source']}", fd, tree, idmap_fd)
        except newroot.BuildError:
            os.close(fd)  # as where the file system takes no id map; it would hold that one
            raise
        return fd

    def enter(self, request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
        """Fork a helper that goes into a running sandbox; it answers on `reply` itself."""
        self.build_expected()  # a helper would hold its control for as long as it takes
        if request.get("placeholders"):
            sandbox_id = request["plan"]["id"]
            self.placeholders.setdefault(sandbox_id, []).extend(request["placeholders"])
            self.notes[sandbox_id] = request["note"]
        enter.prepare(request)
        fork_helper(enter.serve, request, reply, fds)

    # -- ending -----------------------------------------------------------------------------

    def drop_late(self) -> float | None:
        """Drop what is due; return how long, in ms, to wait for the next."""
        waits = [self.tend_expected(), self.tend_hibernation_image()]
        return min((wait for wait in waits if wait is not None), default=None)

    def tend_hibernation_image(self) -> float | None:
        """Make what PID 1s sleep in, once one has had nothing to do for a while; when to look again."""
        if self.hibernation_image.is_made:
            return None
        waiting = {child.pid for child in self.warm.values()}
        since_s = {pid: each.since_s for pid, each in self.sandboxes.items() if pid not in waiting}
        return self.hibernation_image.tend(since_s, time.monotonic())

    def tend_expected(self) -> float | None:
        """Build what is due; return how long, in ms, to wait for it."""
        if self.expected is None:
            return None
        left = self.expected.due_s - time.monotonic()
        if left > 0:
            return left * 1000
        self.build_expected()
        return None

    def drop(self, sandbox_id: str, _fds: list[int]) -> None:
        """Discard the prebuilt sandbox. On return its uid range and cgroups can be reused."""
        if self.expected is not None and self.expected.shape["id"] == sandbox_id:
            self.cancel_expected()
        self.complete.pop(sandbox_id, None)
        for pid, owned in self.sandboxes.items():
            if owned.id == sandbox_id:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.forget(pid)
                break
        self.release(sandbox_id, [])

    def forget(self, pid: int) -> None:
        """The PID namespace is empty now: nothing is left that the cgroups could hold."""
        owned = self.sandboxes.pop(pid, None)
        if owned and owned.read:
            self.ended[owned.id] = owned.directories
        elif owned:
            cgroups.remove(owned.directories)
        for sandbox_id in [key for key, child in self.warm.items() if child.pid == pid]:
            self.warm.pop(sandbox_id).close()
        for sandbox_id in [key for key, each in self.complete.items() if each == pid]:
            del self.complete[sandbox_id]

    def release(self, sandbox_id: str, fds: list[int]) -> None:
        """The host wants nothing more of it; with that come descriptors which take time to close."""
        self.build_expected()  # the one before it is over
        for fd in fds:
            os.close(fd)
        self.reap()
        if sandbox_id in self.ended:
            cgroups.remove(self.ended.pop(sandbox_id))
            return
        for owned in self.sandboxes.values():  # it could not be made, or does not die
            if owned.id == sandbox_id:
                owned.read = False

    def clean_up(self) -> None:
        """The host is gone: end everything, wait for it, leave nothing."""
        for pid, owned in self.sandboxes.items():
            owned.read = False
            os.kill(pid, signal.SIGKILL)  # cannot be a stranger: only we reap it
            cgroups.thaw(owned.directories)
        for directories in self.ended.values():
            cgroups.remove(directories)
        while self.sandboxes:
            pid, _status = os.waitpid(-1, 0)
            self.forget(pid)
        for sandbox_id in list(self.placeholders):
            self.remove_placeholders(sandbox_id)


_VERBS: dict[str, Callable[..., None]] = {
    "create": Zygote.create,
    "prewarm": Zygote.prewarm,
    "claim": Zygote.claim,
    "enter": Zygote.enter,
    "hold": Zygote.hold,
    "keep_only": Zygote.keep_only,
    "released": Zygote.released,
}
# Requests without an answer.
_NOTES: dict[str, Callable[..., None]] = {
    "claimed": Zygote.claimed,
    "drop": Zygote.drop,
    "prebuild": Zygote.prebuild,
    "release": Zygote.release,
}


def disk_of(shape: Shape, pinned: list[int]) -> int:
    """The mount that is to be the root, among the descriptors sent along; -1 for none."""
    disk = shape["disk"]
    return pinned[disk["fd"]] if disk and disk["fd"] >= 0 else -1


def fetch_trees(shape: Shape, child: Newborn, control: wire.Socket, tasks: list[int]) -> None:
    """In a process of its own, rootless: pass a claim on, with the mounts it asks for. Never returns."""
    try:
        child.give(control, tasks, enter.trees_of_own_namespace(shape["trees"]))
    except OSError as exc:
        wire.refuse(control, exc)
    except BaseException as exc:  # noqa: BLE001  the host must hear of it, whatever it is
        wire.refuse(control, OSError(errno.EPROTO, repr(exc)), "claim")
    finally:
        os._exit(0)


def mounted(function: Callable[..., Any], name: str, *args: Any) -> Any:
    """Call `function`; its failure names the step."""
    try:
        return function(*args)
    except OSError as exc:
        raise newroot.BuildError(name, exc) from exc


if __name__ == "__main__":
    sys.exit("started by the host process only")
