"""Helpers that enter a running sandbox for the host: live mounts, trees, other users.

Each is forked from the zygote, does one thing in the sandbox's own namespaces and is gone (an agent
for another user stays, locked down like PID 1). Nothing here resolves a guest's name outside them.
"""

from __future__ import annotations

import _signal as signal
import errno
import posix as os

from ..linux import mounts, namespaces, privileges, signals
from . import build, cgroups, idmap, lockdown, network, newborn, newroot, wire
from .pid1 import init

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .plan import Plan, Tree


def serve(request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
    """Do one request; answers on `reply` with "O" or "E"."""
    try:
        _OPERATIONS[request["op"]](request, reply, fds)
    except newroot.BuildError as exc:
        wire.refuse(reply, exc.cause, exc.step)
    except OSError as exc:
        wire.refuse(reply, exc, request["op"])
    except Exception as exc:  # noqa: BLE001  the host must hear of it, whatever it is
        wire.refuse(reply, OSError(errno.EPROTO, repr(exc)), request["op"])


# -- live mounts ------------------------------------------------------------------------------


def _mount(request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
    """Add a mount: request has plan, tree, target, steps, link; fds are user and mnt namespace, source."""
    plan: Plan = request["plan"]
    tree: Tree | None = request["tree"]
    trees = []
    if tree is not None:
        own = plan["trusted_root"]
        trees = [host_tree(tree, fds[2])] if own else trees_of_own_namespace([tree])
    join(fds[0], fds[1], plan["setup_uid"], plan["setup_gid"])
    root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    root = newroot.NewRoot(root_fd, plan, trees)
    os.chdir("/")
    newroot.run_or_undo(root, request["steps"])
    if request["link"]:
        # Landlock is decided when a sandbox starts: a new writable place must lie in a writable one.
        parent, _, name = request["link"].rpartition("/")
        if parent:
            root.make_dir(parent)
        directory = root.open(parent or "/", os.O_PATH | os.O_DIRECTORY)
        os.symlink(request["target"], name, dir_fd=directory)
    wire.send_raw(reply, b"O")


def host_tree(tree: Tree, source_fd: int) -> int:
    """A detached copy of what is open as `source_fd`, restricted as planned, for who is host root."""
    fd = mounts.open_tree("", dir_fd=source_fd, recursive=not tree["idmap"])
    idmap_fd = idmap.user_namespace(tree["idmap"], tree["idmap_gid"]) if tree["idmap"] else -1
    build.restrict_tree(fd, tree, idmap_fd)
    return fd


def trees_of_own_namespace(wanted: list[Tree]) -> list[int]:
    """An ordinary user may copy host mounts only in a mount namespace of its own."""
    ours, theirs = wire.socketpair()
    go_read, go_write = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = namespaces.clone3(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS)
    if pid == 0:
        try:
            os.close(go_write)
            if not os.read(go_read, 1):
                os._exit(1)  # our ids were not mapped, which the host hears from who has started us
            mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
            wire.send_raw(theirs, b"O", build.open_trees(wanted))
        except newroot.BuildError as exc:
            wire.refuse(theirs, exc.cause, exc.step)
        finally:
            os._exit(0)
    theirs.close()
    os.close(pidfd)
    os.close(go_read)
    maps = f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1"
    try:
        namespaces.write_id_maps(pid, *maps, deny_setgroups=True)
        os.write(go_write, b"g")
    finally:
        os.close(go_write)
    data, fds = wire.receive_raw(ours)
    os.waitpid(pid, 0)
    if data != b"O":
        number, _, text = data[1:].partition(b" ")
        raise OSError(int(number or b"5"), text.decode("utf-8", "replace"))
    return fds


def join(user_fd: int, mount_fd: int, uid: int, gid: int) -> None:
    """Go into these namespaces, and be that user there."""
    namespaces.setns(user_fd, namespaces.CLONE_NEWUSER)
    namespaces.setns(mount_fd, namespaces.CLONE_NEWNS)
    privileges.drop_groups()
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


# -- network ----------------------------------------------------------------------------------


def _network(request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
    """Change the network of a live sandbox: request has a network plan; fds are user and net namespace.

    Answers with the sockets that the plan asks for. No guest sees this process: it is in none of
    their PID namespaces.
    """
    namespaces.setns(fds[0], namespaces.CLONE_NEWUSER)
    namespaces.setns(fds[1], namespaces.CLONE_NEWNET)
    wire.send_raw(reply, b"O", network.set_up(request["network"]))


# -- trees ------------------------------------------------------------------------------------


def _tree(request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
    """Pack, unpack or remove a tree: fds are user, mnt and pid namespace, and the pipe.

    `as_root`: for snapshots, as the namespace's own root, which reads and owns every file of the
    writable layer; else locked down as the sandbox's user.
    """
    run = _task(request["direction"], request.get("options", ""))
    plan: Plan = request["plan"]
    user_fd, mount_fd, pid_fd, *stream = fds
    # Before any guest can see us: without root we have its uid, and hold the host's files open.
    privileges.set_dumpable(False)
    cgroups.join(cgroups.open_procs(request["cgroup_dirs"], plan["cgroup_version"]))
    namespaces.setns(user_fd, namespaces.CLONE_NEWUSER)
    namespaces.setns(pid_fd, namespaces.CLONE_NEWPID)
    namespaces.setns(mount_fd, namespaces.CLONE_NEWNS)
    child = os.fork()  # into the PID namespace: it dies with the sandbox
    if child:
        os.waitpid(child, 0)
        return
    try:
        privileges.drop_groups()
        if request["as_root"]:
            os.setresgid(*[plan["setup_gid"]] * 3)
            os.setresuid(*[plan["setup_uid"]] * 3)
        else:
            lockdown.bound(plan)
            lockdown.become_user(plan, plan["uid"], plan["gid"])
            lockdown.seal(plan, with_parent=False)
        run(*stream, request["path"], one_file_system=request["as_root"])
        wire.send_raw(reply, b"O")
    except OSError as exc:
        wire.refuse(reply, exc)
    except Exception as exc:  # noqa: BLE001
        wire.refuse(reply, OSError(errno.EPROTO, repr(exc)))
    finally:
        os._exit(0)


def prepare(request: dict[str, Any]) -> None:
    """In the zygote: import what helpers need, once for all of them. `tarfile` takes 12 ms, `live` 7 ms."""
    operation = request["op"]
    if operation in _prepared:
        return
    if operation == "tree":
        from .helpers import layers as _layers

        _prepared[operation] = _layers
    elif operation == "live":
        from .live import server

        _prepared[operation] = server


_prepared: dict[str, object] = {}


def _task(what: str, options: str) -> Callable[..., None]:
    """Return the tree operation, with all its imports done: inside there may be no Python."""
    from .helpers import trees

    if what.startswith("layer "):
        from functools import partial

        from .helpers import layers

        packs = partial(layers.pack, passes_over=True)
        return packs if what == "layer out" else layers.unpack
    if what == "out" and options:
        from functools import partial

        return partial(trees.pack, **trees.packing(options))
    if what in trees.OPERATIONS:
        known: Callable[..., None] = trees.OPERATIONS[what]
        return known
    from .helpers import attributes, finding, watching

    more: dict[str, Callable[[int, str, str], None]] = {
        "find": finding.find,
        "search": finding.search,
        "replace": finding.replace,
        "watch": watching.watch,
        "attributes": attributes.attributes,
    }
    chosen = more[what]

    def run(stream: int, path: str, *, one_file_system: bool) -> None:
        del one_file_system
        chosen(stream, path, options)

    return run


# -- other users ------------------------------------------------------------------------------


def _agent(request: dict[str, Any], _reply: wire.Socket, fds: list[int]) -> None:
    """Start an agent for another user: like PID 1, but of that user.

    fds are its control and, with what `namespaces` of the request says of each, descriptors of
    namespaces; the user namespace first, for without root the others are entered by its rights.
    """
    plan: Plan = request["plan"]
    control_fd, *places = fds
    privileges.set_dumpable(False)
    tasks = cgroups.open_tasks(cgroups.around(plan))
    cgroups.join(cgroups.open_procs(request["cgroup_dirs"], plan["cgroup_version"]))
    apart = cgroups.Apart(tuple(tasks))
    apart.leave()
    newborn.spare(os.getpid())
    proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for fd, flags in zip(places, request["namespaces"], strict=True):
        namespaces.setns(fd, flags)
    if os.fork():
        return
    control = wire.adopt(control_fd)
    try:
        os.setsid()
        os.setgroups([])
        privileges.adopt_orphans()  # a tree's last process must end under our eyes
        os.chdir("/")
        signal_fd = signals.signalfd([signal.SIGCHLD])
        # Else only the host's root may open it. Nobody inside has our capabilities, so nobody traces us.
        privileges.set_dumpable(True)
        io_fd = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        # The sandbox's own /proc is read-only.
        score = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc_fd)
        privileges.set_dumpable(False)
        build.point_standard_at_null()
        held = [control.detach(), signal_fd, score, io_fd, *tasks]
        control_fd, signal_fd, score, io_fd, *tasks = build.pack(held)
        control, apart = wire.adopt(control_fd), cgroups.Apart(tuple(tasks))
        lockdown.apply_rlimits(plan["rlimits"])
        lockdown.bound(plan)
        lockdown.become_agent(plan, plan["uid"], plan["gid"])
        listener_fd = lockdown.seal(plan, with_parent=False, serves=True, is_agent=True)
        becoming = lockdown.Becoming(plan)
        becoming.check()
        wire.send_raw(control, b"READY")
        init.Init(
            plan, control, signal_fd, score, io_fd, listener_fd, apart=apart, become=becoming
        ).run()
    except OSError as exc:
        wire.refuse(control, exc, "agent")
    finally:
        os._exit(0)


# -- containers ---------------------------------------------------------------------------------


def _contained(request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
    """See `contained`: request names the operation; fds are user and mnt namespace, and its own."""
    from .jail import contained

    contained.OPERATIONS[request["do"]](request, fds)
    wire.send_raw(reply, b"O")


# -- live copies --------------------------------------------------------------------------------


def _live(_request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
    """See `live.server`: fds is its control socket."""
    from .live import server

    pidfd = os.pidfd_open(os.getpid())
    wire.send_raw(reply, b"O", [pidfd])
    reply.close()
    server.serve(fds[0])


_OPERATIONS = {
    "mount": _mount,
    "network": _network,
    "tree": _tree,
    "agent": _agent,
    "contained": _contained,
    "live": _live,
}
