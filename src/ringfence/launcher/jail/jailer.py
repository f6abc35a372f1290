"""The jailer: one single-threaded, stdlib-only process that starts programs in jails, and ends them.

As the zygote does for sandboxes of its own making, it answers requests of the host process, one
datagram each, and ends with it: when the host's end of the socket closes, every jail is killed and
every cgroup removed before it exits. A jail dies with the jailer, and all that is in it.
"""

from __future__ import annotations

import _signal as signal
import errno
import gc
import posix as os
from _functools import partial

from ...linux import files, mounts, namespaces, privileges
from .. import build, cgroups, idmap, newroot, placeholders, wire
from ..fuse import views
from ..machine_code import process_images
from ..parent import CONTROL_FD, Parent, fork_helper, rename_process
from . import jail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..placeholders import Placeholder
    from ..plan import Tree
    from .jail import JailPlan


def main() -> None:
    """Serve on descriptor 3 until it closes."""
    files.close_from(CONTROL_FD + 1)
    os.set_inheritable(CONTROL_FD, False)
    os.umask(0o022)
    rename_process(b"ringfence-jail")
    privileges.adopt_orphans()
    gc.disable()
    gc.freeze()
    Jailer(wire.adopt(CONTROL_FD)).run()
    os._exit(0)


class JailRecord:
    """Cleanup of a jail, to run once it is empty."""

    def __init__(self, plan: JailPlan) -> None:
        self.id, self.directories = plan["id"], plan["cgroup_dirs"]
        self.server = 0  # of the views that it has
        self.views: list[views.Key] = []


class Jailer(Parent):
    """Owns the processes and cgroups of every jail it made."""

    def __init__(self, host: wire.Socket) -> None:
        super().__init__(host)
        self.jails: dict[int, JailRecord] = {}  # by pid of PID 1
        # By sandbox id, the host's own cleanup, done here only when the host is gone; see
        # zygote.Zygote.
        self.placeholders: dict[str, tuple[list[Placeholder], str]] = {}
        self.space: views.MountSpace | None = None
        self.views: dict[int, views.Views] = {}  # by the pid of who serves them

    def serve_one(self) -> bool:
        message, fds = wire.receive(self.host)
        if message is None:
            return False
        verb, argument = message
        reply = wire.adopt(fds[0])
        try:
            if verb == "hold":
                os.dup(fds[1])  # a lock of the host's, ours too until we end
            elif verb == "released":
                self.placeholders.pop(argument, None)
            elif verb in _VERBS:
                _VERBS[verb](self, argument, reply, fds[1:])
        except newroot.BuildError as exc:
            wire.refuse(reply, exc.cause, exc.step)
        except OSError as exc:
            wire.refuse(reply, exc, verb)
        finally:
            reply.close()
            for fd in fds[1:]:
                os.close(fd)
        return True

    def take_process_image(
        self, wanted: dict[str, Any], reply: wire.Socket, fds: list[int]
    ) -> None:
        """Take one. It is the host's, who writes what copies jails have.

        Args:
            wanted: What `process_images.take` is told besides its code.
            fds: That one.
        """
        process_image = process_images.take(code=fds[0], **wanted)
        wire.send_raw(reply, b"O", [process_image.fd])

    # -- what jails see of the host ---------------------------------------------------------

    def make_space(self, wanted: dict[str, Any], reply: wire.Socket, _fds: list[int]) -> None:
        """Be where views can be mounted, from now on.

        Args:
            wanted: What `views.MountSpace` is told.
        """
        if self.space is None:
            self.space = views.MountSpace(**wanted)
        wire.send_raw(reply, b"O")

    def show_through(self, wanted: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
        """From now on jails may have views. Answers with "1" where their ids can be mapped.

        Args:
            wanted: "server", the pid of who answers for them, and "probe", the tree to try it with.
            fds: Our end of the server's socket.
        """
        if self.space is None:
            raise OSError(errno.EINVAL, "make the mount space first")
        for each in self.views.values():
            each.retire()
        made = views.Views(self.space, wanted["server"], wire.adopt(os.dup(fds[0])))
        self.views[made.server] = made
        maps = made.can_map_ids(wanted["probe"])
        wire.send_raw(reply, b"O1" if maps else b"O0")

    # -- creating ---------------------------------------------------------------------------

    def create(self, plan: JailPlan, reply: wire.Socket, fds: list[int]) -> None:
        """Start one jail. Answers with its pid and pidfd; the rest the program's own socket tells.

        Args:
            fds: The program's standard input; its standard output and error; what it gets besides;
                the snapshot to unpack, where the plan has one; what pins the mount sources.
        """
        self.reap()  # one of the same id may just have ended: its cgroups go before ours are made
        control, errors, *pinned = fds
        passed_on = plan["passes"]
        if plan["share"] is not None:
            from ..fuse import serving  # so that the jail's process has it

            passed_on += serving.LINES + 1
        more, pinned = pinned[:passed_on], pinned[passed_on:]
        content = []
        if plan["guest"]["has_content"]:
            from ..helpers import layers as _for_the_jail  # noqa: F401

            content.append(pinned.pop(0))
        if not plan["argv"]:
            from ..fuse import view as _for_the_view  # noqa: F401
        trees = self.open_trees(plan, pinned)
        passed = list(trees)
        try:
            pid, pidfd, go = self.clone(plan, control, errors, more)
            passed.append(pidfd)
            try:
                tasks = []
                if plan["cgroup_version"] == 1:
                    cgroups.make(plan["cgroup_dirs"], plan["cgroup_values"])
                    tasks = cgroups.open_tasks(plan["cgroup_dirs"])
                passed += tasks
                namespaces.write_id_maps(
                    pid, plan["uid_map"], plan["gid_map"], deny_setgroups=plan["deny_setgroups"]
                )
                wire.send(go, (len(tasks), bool(content)), [*tasks, *trees, *content])
            except OSError:
                os.kill(pid, signal.SIGKILL)  # cannot be a stranger: only we reap it
                cgroups.remove(plan["cgroup_dirs"])
                raise
            finally:
                go.close()
            self.jails[pid] = record = JailRecord(plan)
            if plan["view"] is not None:
                record.server = plan["view"]["server"]
                record.views = self.views[record.server].use(plan["view"])
            if plan["placeholders"]:
                self.placeholders[plan["id"]] = plan["placeholders"], plan["note"]
            wire.send_raw(reply, b"O%d" % pid, [pidfd])
        finally:
            for fd in passed:
                os.close(fd)

    def clone(
        self, plan: JailPlan, control: int, errors: int, more: list[int]
    ) -> tuple[int, int, wire.Socket]:
        """A new process in new namespaces, on its way to being the program."""
        theirs, ours = wire.socketpair()
        cgroup_fd = -1
        try:
            if plan["cgroup_version"] == 2:
                cgroups.make(plan["cgroup_dirs"], plan["cgroup_values"])
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                cgroup_fd = os.open(plan["cgroup_dirs"][0], flags)
            owner = namespaces.parse_id_map(plan["uid_map"])[0][1] if plan["trusted_root"] else 0
            pid, pidfd = namespaces.clone3(plan["namespaces"], cgroup_fd=cgroup_fd, owner=owner)
            if pid == 0:
                ours.close()
                jail.become(plan, theirs, wire.adopt(control), errors, more)
        except OSError:
            ours.close()
            cgroups.remove(plan["cgroup_dirs"])
            raise
        finally:
            theirs.close()
            if cgroup_fd >= 0:
                os.close(cgroup_fd)
        return pid, pidfd, ours

    def open_trees(self, plan: JailPlan, pinned: list[int]) -> list[int]:
        """Open the trees that a jail cannot open itself, in the order of its trees.

        They are those seen through a view, and, as host root, the user's mounts: copied from the
        host's own mounts, ids mapped.
        """
        made: list[int] = []
        try:
            for i in sorted(jail.trees_of_jailer(plan)):
                made.append(self.open_tree(plan, i, pinned))
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        return made

    def open_tree(self, plan: JailPlan, index: int, pinned: list[int]) -> int:
        tree, view = plan["trees"][index], plan["view"]
        if view is None or index not in (*view["trees"], view["image"]):
            return self.open_pinned(tree, pinned)
        source = view["image_source"] if index == view["image"] else None
        opener = None if source is None else partial(self.open_pinned, source, pinned)
        try:
            if view["server"] not in self.views:
                raise OSError(errno.ENOTCONN, "the file server is gone")
            return self.views[view["server"]].open(tree, view, opener)
        except OSError as exc:
            raise newroot.BuildError(f"view of {tree['source']}", exc) from exc

    def open_pinned(self, tree: Tree, pinned: list[int]) -> int:
        """A directory that the host process has resolved, or nothing else."""
        if tree["fd"] < 0:
            return build.open_tree(tree, -1)
        if self.space is None:
            return _open_tree(tree, pinned[tree["fd"]])
        return self.space.outside(lambda: _open_tree(tree, pinned[tree["fd"]]))

    # -- going into one ---------------------------------------------------------------------

    def enter(self, request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
        """Fork a helper that goes into a jail; it answers on `reply` itself."""
        from ..link import connection_relay as _for_the_jail  # noqa: F401  there our files may be out of sight
        from . import aboard

        self.remember(request)
        serve = aboard.serve
        if self.space is not None and request["op"] == "mount":
            serve = partial(self.space.from_outside, serve)
        fork_helper(serve, request, reply, fds)

    def join(self, request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
        """Fork a helper that goes into what somebody else has started; it answers on `reply` itself.

        See `remember`.
        """
        from .. import enter
        from . import contained as _needed_inside  # noqa: F401

        self.remember(request)
        fork_helper(enter.serve, request, reply, fds)

    def remember(self, request: dict[str, Any]) -> None:
        """Placeholders that a request tells of are ours to remove, should the host be gone."""
        if request.get("placeholders"):
            self.placeholders[request["id"]] = request["placeholders"], request["note"]

    # -- ending -----------------------------------------------------------------------------

    def forget(self, pid: int) -> None:
        """The PID namespace is empty now: nothing is left that the cgroups could hold."""
        record = self.jails.pop(pid, None)
        if record is None:
            return
        cgroups.remove(record.directories)
        if pid in self.views:
            self.end_views(pid)
        elif record.server in self.views:
            self.views[record.server].release(record.views)

    def end_views(self, server: int) -> None:
        """Kill the jails of an ended view server: they would wait for its answers or get only errors."""
        self.views.pop(server).close()
        for pid, record in self.jails.items():
            if record.server == server:
                os.kill(pid, signal.SIGKILL)
                cgroups.thaw(record.directories)

    def clean_up(self) -> None:
        """The host is gone: end everything, wait for it, leave nothing."""
        for pid, record in self.jails.items():
            os.kill(pid, signal.SIGKILL)
            cgroups.thaw(record.directories)
        while self.jails:
            pid, _status = os.waitpid(-1, 0)
            self.forget(pid)
        for made, note in self.placeholders.values():
            placeholders.remove(made)
            if note:
                placeholders.erase_note(note)


_VERBS: dict[str, Callable[[Jailer, Any, wire.Socket, list[int]], None]] = {
    "create": Jailer.create,
    "process_image": Jailer.take_process_image,
    "mount_space": Jailer.make_space,
    "views": Jailer.show_through,
    "enter": Jailer.enter,
    "join": Jailer.join,
}


def _open_tree(tree: Tree, pinned: int) -> int:
    """A detached copy of what `pinned` is, restricted as planned, ids mapped."""
    if not tree["source"]:
        return os.dup(pinned)  # a mount of the host process's own making
    try:
        copy = mounts.open_tree("", dir_fd=pinned, recursive=not tree["idmap"])
        return idmap.restricted(copy, tree)
    except OSError as exc:
        raise newroot.BuildError(f"mount {tree['source']}", exc) from exc
