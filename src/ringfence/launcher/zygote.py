"""The zygote: one single-threaded, stdlib-only process that forks sandboxes on request.

It answers requests of the host process, one datagram each, and ends with it: when the host's end
of the socket closes, every sandbox is killed and every cgroup removed before it exits.
"""

from __future__ import annotations

import _signal as signal
import errno
import gc
import posix as os
import select
import sys
import time

from ..linux import cdata, files, mounts, namespaces, privileges, signals
from . import build, cgroups, enter, idmap, init, lockdown, network, placeholders, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .placeholders import Placeholder
    from .plan import Plan, Tree

CONTROL_FD = 3
_BURST_S = 0.1  # creates this close together are a burst


def main() -> None:
    """Serve on descriptor 3 until it closes."""
    files.close_from(CONTROL_FD + 1)
    os.umask(0o022)
    rename_process(b"ringfence")
    try:
        privileges.adopt_orphans()  # helpers whose parent is done end here, not at the host's PID 1
    except PermissionError:
        pass  # a filter is around us; what it says to the first sandbox tells more
    # Frozen objects are not touched by the collector, so children share their pages.
    gc.disable()
    gc.freeze()
    Zygote(wire.adopt(CONTROL_FD)).run()
    os._exit(0)  # an interpreter takes milliseconds to end in style


def rename_process(name: bytes) -> None:
    """Replace the command line, which would show paths of the host to every sandbox."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: proc(5), stat 48 and 49
    cdata.memset(start, 0, end - start)
    cdata.memmove(start, name, min(len(name), end - start - 1))
    privileges.set_name(name)


class Zygote:
    """Owns the processes and cgroups of every sandbox it made."""

    def __init__(self, host: wire.Socket) -> None:
        self.host = host
        self.sandboxes: dict[int, list[str]] = {}  # pid of PID 1 -> its cgroup directories
        # What the host removes, and we only when it is gone, by sandbox id: two who remove the same
        # at once each find something in their way. And the files that tell of it.
        self.placeholders: dict[str, list[Placeholder]] = {}
        self.notes: dict[str, str] = {}
        self.newborn: Newborn | None = None  # the next sandbox's process, in a burst of them
        self.warm: dict[str, Newborn] = {}  # by sandbox id: built ahead, and waiting for a claim
        self.last_create_s = 0.0
        self.signal_fd = signals.signalfd([signal.SIGCHLD])

    def run(self) -> None:
        """Serve, then clean up."""
        poll = select.poll()
        poll.register(self.host.fileno(), select.POLLIN)
        poll.register(self.signal_fd, select.POLLIN)
        while True:
            ready = poll.poll(_BURST_S * 1000 if self.newborn else None)
            if not ready:
                self.drop_newborn()
            for fd, _event in ready:
                if fd == self.signal_fd:
                    os.read(self.signal_fd, 4096)
                    self.reap()
                elif not self.serve_one():
                    return self.clean_up()

    def serve_one(self) -> bool:
        message, fds = wire.receive(self.host)
        if message is None:
            return False
        verb, argument = message
        reply = wire.adopt(fds[0])
        try:
            if verb == "create":
                self.create(argument, reply, fds[1:])
            elif verb == "claim":
                self.claim(argument, reply, fds[1:])
            elif verb == "hold":
                os.dup(fds[1])  # a lock of the host's, ours too until we end
            elif verb == "released":
                self.placeholders.pop(argument, None)
                self.notes.pop(argument, None)
            elif verb == "enter":
                self.enter(argument, reply, fds[1:])
            elif verb == "remove_cgroups":
                cgroups.remove(argument)
                wire.send_raw(reply, b"O")
        except build.BuildError as exc:
            init.refuse(reply, exc.cause, exc.step)
        except OSError as exc:
            init.refuse(reply, exc, verb)
        finally:
            reply.close()
            for fd in fds[1:]:
                os.close(fd)
        return True

    # -- creating ---------------------------------------------------------------------------

    def create(self, plan: Plan, control: wire.Socket, pinned: list[int]) -> None:
        """Start one sandbox; it tells the host itself, on `control`, when it is ready or why not."""
        self.reap()  # one of the same id may just have ended: its cgroups go before ours are made
        trees = self.open_trees(plan, pinned)
        child: Newborn | None = None
        try:
            child = self.take_newborn(plan)
            # The plan first: the child opens the template's trees while we map its ids.
            opened = [fd for fd in trees if fd >= 0]
            wire.send(child.go, (plan, [fd >= 0 for fd in trees]), [control.fileno(), *opened])
            self.let_go(plan, child)
        except OSError:
            if child is not None:
                os.kill(child.pid, signal.SIGKILL)
                child.close()
            cgroups.remove(plan["cgroup_dirs"])
            raise
        finally:
            for fd in trees:
                if fd >= 0:
                    os.close(fd)
        self.sandboxes[child.pid] = plan["cgroup_dirs"]
        if plan["warm"]:
            self.warm[plan["id"]] = child
        else:
            child.close()
        self.remember(plan)
        self.expect_another(plan)

    def remember(self, plan: Plan) -> None:
        """What of this sandbox we remove ourselves should the host die."""
        if plan["placeholders"]:
            self.placeholders[plan["id"]] = plan["placeholders"]
            self.notes[plan["id"]] = plan["note"]

    def claim(self, plan: Plan, control: wire.Socket, pinned: list[int]) -> None:
        """Give a warm sandbox the plan of who gets it; it answers on `control` as a new one does.

        Everything that depends on that comes here: limits, mounts and the lock-down.
        """
        child = self.warm.pop(plan["id"], None)
        if child is None:
            raise OSError(errno.ESRCH, "the warm sandbox has ended")
        passed: list[int] = []
        try:
            new = [d for d in plan["cgroup_dirs"] if d not in self.sandboxes[child.pid]]
            self.sandboxes[child.pid] = plan["cgroup_dirs"]
            self.remember(plan)
            cgroups.make(plan["cgroup_dirs"], plan["cgroup_values"])
            if plan["cgroup_version"] == 1:
                passed += cgroups.open_tasks(new)
            tasks = len(passed)
            if plan["trusted_root"] or not plan["trees"]:
                passed += self.open_trees(plan, pinned)
                wire.send(child.go, (plan, tasks), [control.fileno(), *passed])
            elif os.fork() == 0:
                # It looks up paths of the user's, which may take its time: we have others to serve.
                fetch_trees(plan, child.go, control, passed)
        finally:
            child.close()  # without a plan, the sandbox ends
            for fd in passed:
                os.close(fd)

    def let_go(self, plan: Plan, child: Newborn) -> None:
        """Give a booting sandbox its ids and cgroups, and the word to go on."""
        tasks: list[int] = []
        try:
            if plan["cgroup_version"] == 1:
                cgroups.make(plan["cgroup_dirs"], plan["cgroup_values"])
                tasks = cgroups.open_tasks(plan["cgroup_dirs"])
            namespaces.write_id_maps(
                child.pid, plan["uid_map"], plan["gid_map"], deny_setgroups=plan["deny_setgroups"]
            )
            prefer(child.pid)
            # With it, its own pidfd, for the host: one wake-up of the host is enough.
            wire.send_raw(child.go, b"%d" % child.pid, [child.pidfd, *tasks])
        finally:
            for fd in tasks:
                os.close(fd)

    def take_newborn(self, plan: Plan) -> Newborn:
        """A process in the plan's new namespaces: the one kept ready where it fits, else a new one."""
        ready, self.newborn = self.newborn, None
        # Its view of the host's mounts is up to _BURST_S old: not for paths that it must look up.
        looks_up = any(t["inode"] for t in plan["trees"]) and not plan["trusted_root"]
        if ready and ready.namespaces == plan["namespaces"] and not looks_up:
            return ready
        if ready:
            self.end_newborn(ready)
        if plan["cgroup_version"] != 2:
            return bear(plan["namespaces"])
        # Version 2 clones straight into its cgroup; version 1 is made while the clone boots.
        cgroups.make(plan["cgroup_dirs"], plan["cgroup_values"])
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        cgroup_fd = os.open(plan["cgroup_dirs"][0], flags)
        try:
            return bear(plan["namespaces"], cgroup_fd)
        finally:
            os.close(cgroup_fd)

    def expect_another(self, plan: Plan) -> None:
        """In a burst, fork the next sandbox's process while this one boots; it knows nothing yet."""
        now = time.monotonic()
        in_burst, self.last_create_s = now - self.last_create_s < _BURST_S, now
        if in_burst and plan["cgroup_version"] != 2:
            try:
                self.newborn = bear(plan["namespaces"])
            except OSError:
                self.newborn = None  # the next create will say what is wrong

    def drop_newborn(self) -> None:
        """The burst is over: keep no process and no namespace that nobody uses."""
        if self.newborn is not None:
            self.end_newborn(self.newborn)
            self.newborn = None

    def end_newborn(self, child: Newborn) -> None:
        """It holds nothing yet; `reap` collects it."""
        os.kill(child.pid, signal.SIGKILL)
        child.close()

    def open_trees(self, plan: Plan, pinned: list[int]) -> list[int]:
        """As host root: copy what the user mounts from the host's own mounts, ids mapped.

        Returns -1 for the trees that the sandbox can open itself, while its ids are being mapped.
        """
        made: dict[tuple[str, str], int] = {}
        trees: list[int] = []
        try:
            for tree in plan["trees"]:
                ours = plan["trusted_root"] and tree["inode"]
                trees.append(self.open_one_tree(tree, pinned, made) if ours else -1)
        except OSError:
            for fd in trees:
                if fd >= 0:
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
        mounted(build.restrict_tree, f"restrict {tree['source']}", fd, tree, idmap_fd)
        return fd

    def enter(self, request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
        """Fork a helper that goes into a running sandbox; it answers on `reply` itself."""
        if request.get("placeholders"):
            sandbox_id = request["plan"]["id"]
            self.placeholders.setdefault(sandbox_id, []).extend(request["placeholders"])
            self.notes[sandbox_id] = request["note"]
        if os.fork() == 0:
            status = 1
            try:
                enter.serve(request, reply, fds)
                status = 0
            finally:
                os._exit(status)

    # -- ending -----------------------------------------------------------------------------

    def reap(self) -> None:
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.newborn is not None and self.newborn.pid == pid:
                self.newborn.close()
                self.newborn = None
            self.forget(pid)

    def forget(self, pid: int) -> None:
        """The PID namespace is empty now: nothing is left that the cgroups could hold."""
        directories = self.sandboxes.pop(pid, None)
        if directories:
            cgroups.remove(directories)
        for sandbox_id in [key for key, child in self.warm.items() if child.pid == pid]:
            self.warm.pop(sandbox_id).close()

    def clean_up(self) -> None:
        """The host is gone: end everything, wait for it, leave nothing."""
        self.drop_newborn()
        for pid, directories in self.sandboxes.items():
            os.kill(pid, signal.SIGKILL)  # cannot be a stranger: only we reap it
            cgroups.thaw(directories)
        while self.sandboxes:
            pid, _status = os.waitpid(-1, 0)
            self.forget(pid)
        for sandbox_id, made in self.placeholders.items():
            placeholders.remove(made)
            if note := self.notes[sandbox_id]:
                placeholders.erase_note(note)


class Newborn:
    """A process in new namespaces that waits for its plan.

    Attributes:
        go: Our end of the socket on which it gets the plan, and then the word to go on.
    """

    def __init__(self, pid: int, pidfd: int, go: wire.Socket, flags: int) -> None:
        self.pid, self.pidfd, self.go, self.namespaces = pid, pidfd, go, flags

    def close(self) -> None:
        """Close our descriptors of it; without a plan it ends."""
        self.go.close()
        os.close(self.pidfd)


def bear(flags: int, cgroup_fd: int = -1) -> Newborn:
    """Clone a newborn into new namespaces."""
    theirs, ours = wire.socketpair()
    try:
        pid, pidfd = namespaces.clone3(flags, cgroup_fd=cgroup_fd)
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        ours.close()
        become_sandbox(theirs, flags)
    theirs.close()
    return Newborn(pid, pidfd, ours, flags)


def prefer(pid: int) -> None:
    """Let PID 1 run before a thousand spinning children of its own; they start at nice 0 again."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, -15)
        os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    except PermissionError:
        pass  # an ordinary user: the scheduler's autogroup keeps sessions apart


def fetch_trees(plan: Plan, go: wire.Socket, control: wire.Socket, tasks: list[int]) -> None:
    """In a process of its own, rootless: pass a claim on, with the mounts it asks for. Never returns."""
    try:
        trees = enter.trees_of_own_namespace(plan["trees"], plan)
        wire.send(go, (plan, len(tasks)), [control.fileno(), *tasks, *trees])
    except OSError as exc:
        init.refuse(control, exc)
    except BaseException as exc:  # noqa: BLE001  the host must hear of it, whatever it is
        init.refuse(control, OSError(errno.EPROTO, repr(exc)), "claim")
    finally:
        os._exit(0)


def mounted(function: Callable[..., Any], name: str, *args: Any) -> Any:
    """Call `function`; its failure names the step."""
    try:
        return function(*args)
    except OSError as exc:
        raise build.BuildError(name, exc) from exc


def become_sandbox(go: wire.Socket, flags: int) -> None:
    """In the new process: wait for a plan, build, lock down, serve as PID 1. Never returns."""
    try:
        wake_up(flags)
        message, fds = wire.receive(go)
    except BaseException:  # noqa: BLE001  nobody listens yet; the zygote sees that we are gone
        os._exit(1)
    if message is None:
        os._exit(0)  # no longer wanted
    plan, opened = message
    control = wire.adopt(fds[0])
    given = iter(fds[1:])
    trees = [next(given) if is_open else -1 for is_open in opened]
    built = reported(control, boot, plan, go, trees)
    if plan["warm"]:
        go, built = reported(control, rest, control, go, built)
        plan, control, tasks, trees = receive_claim(go)
        built.sockets = reported(control, complete, plan, tasks, trees)
    go.close()
    reported(control, serve, plan, control, built)


def reported(control: wire.Socket, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`; when that fails, the host hears why, and this process ends."""
    try:
        return function(*args)
    except build.BuildError as exc:
        init.refuse(control, exc.cause, exc.step)
    except OSError as exc:
        init.refuse(control, exc, "lock down")
    except BaseException as exc:  # noqa: BLE001  the host must hear of it, whatever it is
        init.refuse(control, OSError(errno.EPROTO, repr(exc)), "boot")
    os._exit(1)


def wake_up(flags: int) -> None:
    """What needs no plan, no ids and no cgroup."""
    os.setsid()
    # Python's own handler would let anybody inside interrupt PID 1; without a handler the kernel
    # drops every signal that PID 1 gets from its own namespace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    build.leave_host_network(flags)
    build.make_mounts_private()


class Built:
    """What the process of a built sandbox holds.

    That is its pid as text, its pidfd, its oom_score_adj, and the sockets of its network.
    """

    def __init__(self, pid: bytes, pidfd: int, oom_score_fd: int, *sockets: int) -> None:
        self.pid, self.pidfd, self.oom_score_fd = pid, pidfd, oom_score_fd
        self.sockets = list(sockets)


def boot(plan: Plan, go: wire.Socket, trees: list[int]) -> Built:
    """From new namespaces to a root of its own; nothing is locked down yet, and nothing runs."""
    # While the zygote maps our ids and makes our cgroups, what needs neither.
    namespaces.sethostname(plan["hostname"])
    build.open_trees(plan["trees"], trees)
    sockets = network.set_up(plan["network"])
    pid, [*passed] = wire.receive_raw(go)
    if not pid:
        os._exit(1)  # the zygote gave up before our ids were mapped
    cgroups.join(passed[1:])
    namespaces.unshare(namespaces.CLONE_NEWCGROUP)
    if not plan["deny_setgroups"]:
        os.setgroups([])
    # Unmapped ids cannot create files (EOVERFLOW): take mapped ones before the first mkdir.
    os.setresgid(*[plan["setup_gid"]] * 3)
    os.setresuid(*[plan["setup_uid"]] * 3)
    # The change of ids hid our own /proc files from us; no guest exists yet.
    privileges.set_dumpable(True)
    return Built(pid, passed[0], build.build_root(plan, trees), *sockets)


def rest(control: wire.Socket, go: wire.Socket, built: Built) -> tuple[wire.Socket, Built]:
    """A warm sandbox: tell the host, hold nothing but what is needed, and end with the zygote."""
    wire.send_raw(control, b"O" + built.pid, [built.pidfd])
    control.close()
    kept = init.pack_descriptors([go.detach(), built.pidfd, built.oom_score_fd])
    privileges.die_with_parent(signal.SIGKILL)
    return wire.adopt(kept[0]), Built(built.pid, *kept[1:])


def receive_claim(go: wire.Socket) -> tuple[Plan, wire.Socket, list[int], list[int]]:
    """Wait until somebody gets this sandbox: plan, control, cgroup tasks to join, trees to mount."""
    message, fds = wire.receive(go)
    if message is None:
        os._exit(0)  # no longer wanted
    plan, count = message
    return plan, wire.adopt(fds[0]), fds[1 : 1 + count], fds[1 + count :]


def complete(plan: Plan, tasks: list[int], trees: list[int]) -> list[int]:
    """Make a warm sandbox what one built for this plan would be; returns its network's sockets."""
    if tasks:
        cgroups.join(tasks)
        namespaces.unshare(namespaces.CLONE_NEWCGROUP)  # else their names could be seen from inside
    build.complete_root(plan, trees)
    return network.set_up(plan["network"])


def serve(plan: Plan, control: wire.Socket, built: Built) -> None:
    """Lock down for good, tell the host, and be PID 1."""
    told = [built.pidfd]  # what the host gets with the word that we are ready
    told += [
        os.open(f"/proc/self/ns/{n}", os.O_RDONLY | os.O_CLOEXEC) for n in ("user", "mnt", "pid")
    ]
    told += built.sockets
    signal_fd = signals.signalfd([signal.SIGCHLD])
    io_fd = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)  # while it is still ours to open
    init.point_standard_descriptors_at_null()
    privileges.set_name(b"ringfence-init")
    own = [control.detach(), signal_fd, built.oom_score_fd, io_fd]
    control_fd, signal_fd, oom_score_fd, io_fd, *told = init.pack_descriptors([*own, *told])
    control = wire.adopt(control_fd)
    reported(control, lock_down, plan)
    wire.send_raw(control, b"READY" + built.pid, told)
    for fd in told:
        os.close(fd)
    init.Init(plan, control, signal_fd, oom_score_fd, io_fd).run()
    os._exit(0)


def lock_down(plan: Plan) -> None:
    """From here on there is no way back."""
    lockdown.apply_rlimits(plan["rlimits"])
    lockdown.become_user(plan, plan["uid"], plan["gid"])
    lockdown.seal(plan)


if __name__ == "__main__":
    sys.exit("started by the host process only")
