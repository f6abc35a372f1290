"""Cgroups of a sandbox: where they go, what is written into them, what is read back; v1 and v2."""

from __future__ import annotations

import errno
import os

from ....launcher import cgroups as launcher_cgroups
from ....model.limits import Limits
from . import owner, reread

_ROOT = "/sys/fs/cgroup"
# v1 hierarchies that a sandbox joins; blkio is left out: proc(5) io counts what files moved.
_V1 = ("memory", "pids", "cpu", "cpuacct", "freezer")
_V2_CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "ringfence."
_ABANDONED_S = 60
_AT_ONCE = 16  # of them a start removes itself: those of some sandboxes
_SOME_SECONDS = 5.0  # for processes that were killed to be gone
_HOST_LEAF = "ringfence-host"  # no sandbox's, so never swept: what runs in it may be the user's
_PERIOD_US = 100_000
_PIECE = 1 << 14
_TO_START_BYTES = 4 << 20
MEMORY_AND_SWAP = "/memory.memsw.limit_in_bytes"
# v1 counts the buffers of TCP and UDP, on loopback too, apart, and only where this is set.
SOCKETS = "/memory.kmem.tcp.limit_in_bytes"
_MOST_FOR_SOCKETS = 256 << 20  # all of a host's TCP shares what net.ipv4.tcp_mem says
OWN_PROCESSES = 1  # PID 1 counts against pids.max, and is not the user's
_MOST_PIDS = 4_194_304  # include/linux/threads.h PID_MAX_LIMIT


class Layout:
    """Where this process may make cgroups, found by trying.

    Attributes:
        version: 2, 1, or 0 when nothing is delegated.
        bases: v1: controller to directory; v2: "" to directory.
        why: Why the version is 0, or what is missing.
    """

    def __init__(self, known: tuple[int, dict[str, str], str] | None = None) -> None:
        """Args: known: version, bases and why, as another process found them."""
        self.bases: dict[str, str] = {}
        self.version, self.why = 0, ""
        if known is not None:
            self.version, self.bases, self.why = known
            return
        chosen = os.environ.get("RINGFENCE_CGROUP", "")
        mounts = _mounts()
        memberships = _memberships()
        if "" in mounts and self._try_v2(mounts[""], chosen, memberships.get("", "/")):
            return
        if "memory" in mounts:
            self.why = ""  # version 2 is only there beside version 1
        self._try_v1(mounts, chosen, memberships)

    def _try_v2(self, mount: str, chosen: str, own: str) -> bool:
        if os.path.basename(own) == _HOST_LEAF:
            own = os.path.dirname(own)  # where we, or who started us, had been before
        ours = mount + own.rstrip("/")
        for base in _candidates(mount, chosen, own):
            try:
                if not self._prepare_v2(base, ours, alone=bool(chosen) or os.geteuid() == 0):
                    continue
            except OSError as exc:
                self.why = self.why or f"{base}: {exc.strerror}"
                continue
            self.version, self.bases, self.why = 2, {"": os.path.realpath(base)}, ""
            return True
        return False

    def _prepare_v2(self, base: str, ours: str, *, alone: bool) -> bool:
        """Let cgroups in `base` have limits; whether the kernel offers what that takes.

        Args:
            ours: The cgroup that this process is in.
            alone: No manager of the user's decides what is enabled in `base`.
        """
        available = _read(base + "/cgroup.controllers").split()
        if "memory" not in available or "pids" not in available:
            self.why = self.why or f"{base}: no memory and pids controllers are delegated to it"
            return False
        _try_directory(base)
        # To clone into a cgroup is to move there: allowed from below a common one of ours.
        common = os.path.commonpath([base, ours])
        if not os.access(common + "/cgroup.procs", os.W_OK):
            raise PermissionError(13, "this process was not started below it", base)
        enabled = _read(base + "/cgroup.subtree_control").split()
        if "memory" in enabled and "pids" in enabled and base != ours and not alone:
            return True  # what we add to what the manager chose, it may take away again
        missing = " ".join(f"+{c}" for c in _V2_CONTROLLERS if c in available and c not in enabled)
        if missing:
            _enable(base, missing)
        return True

    def _try_v1(self, mounts: dict[str, str], chosen: str, memberships: dict[str, str]) -> None:
        for controller in _V1:
            if controller not in mounts:
                continue
            own = chosen or memberships.get(controller, "/")
            base = mounts[controller] + own.rstrip("/")
            try:
                _try_directory(base)
            except OSError as exc:
                self.why = self.why or f"{base}: {exc.strerror}"
            else:
                self.bases[controller] = os.path.realpath(base)
        if "memory" in self.bases and "pids" in self.bases:
            self.version = 1
        elif not self.why:
            self.why = "no cgroup hierarchy is mounted"

    def has(self, controller: str) -> bool:
        """Return whether limits of this controller can be set."""
        if self.version == 2:
            return controller in _read(self.bases[""] + "/cgroup.subtree_control").split()
        return self.version == 1 and controller in self.bases


class Group:
    @classmethod
    def known(cls, version: int, paths: dict[str, str], quota: int) -> Group:
        """Cgroups that another process made, with its limits in them."""
        self = cls.__new__(cls)
        self.version, self.paths, self._quota = version, paths, quota
        self.directories = list(dict.fromkeys(paths.values()))
        self.holds_cpus = quota > 0
        return self

    def __init__(self, layout: Layout, name: str, *, cpus: bool) -> None:
        self.version = layout.version
        self.paths = {
            controller: f"{base}/{name}"
            for controller, base in layout.bases.items()
            if self.version
        }
        self.directories = list(dict.fromkeys(self.paths.values()))
        self.holds_cpus = cpus and layout.has("cpu")
        self._quota = 0

    @property
    def of_programs(self) -> list[str]:
        """The cgroups that hold the programs but not PID 1; at most `launcher.cgroups.MOST_APART`.

        They are of version 1: there a process moves itself by a descriptor in 4 us. Version 2 would wait
        for a grace period, and wants a cgroup beside it for PID 1. Memory, as `Apart` says. And the
        processor: all programs share what one sandbox gets, and PID 1 need not. They are the same with and
        without a limit, which a prewarmed sandbox may get later.
        """
        if self.version != 1:
            return []
        places = list(self.paths.values())
        apart = [self.paths[each] for each in ("memory", "cpu") if each in self.paths]
        return [each for each in apart if places.count(each) == 1]

    @property
    def quota(self) -> int:
        """Of the processor, in microseconds of each period; 0 for none."""
        return self._quota

    def values(self, limits: Limits, memory_bytes: int, pids: int) -> list[tuple[str, str]]:
        """List the files to write and their values, in order."""
        quota = max(1000, int((limits.cpus or 0) * _PERIOD_US))
        self._quota = quota if self.holds_cpus else 0
        if self.version == 2:
            base = self.paths[""]
            # No memory.high: above it the kernel lets a memory bomb crawl (17 s instead of 1 s from
            # 90 % of 128 MiB to its end on Linux 6.1) where an OOM kill would say what is wrong.
            values = [
                (base + "/memory.max", str(memory_bytes)),
                (base + "/memory.swap.max", "0"),
                (base + "/pids.max", str(min(pids + OWN_PROCESSES, _MOST_PIDS))),
            ]
            if self._quota:
                values.append((base + "/cpu.max", f"{self._quota} {_PERIOD_US}"))
            return values
        if self.version != 1:
            return []
        memory = self.paths["memory"]
        values = [
            (memory + "/memory.limit_in_bytes", str(memory_bytes)),
            (self.paths["pids"] + "/pids.max", str(min(pids + OWN_PROCESSES, _MOST_PIDS))),
        ]
        above = os.path.dirname(memory)
        if os.path.exists(above + MEMORY_AND_SWAP):
            values.insert(1, (memory + MEMORY_AND_SWAP, str(memory_bytes)))
        if os.path.exists(above + SOCKETS):
            values.append((memory + SOCKETS, str(for_sockets(memory_bytes))))
        if self._quota:
            values.append((self.paths["cpu"] + "/cpu.cfs_period_us", str(_PERIOD_US)))
            values.append((self.paths["cpu"] + "/cpu.cfs_quota_us", str(self._quota)))
        return values

    # -- reading ----------------------------------------------------------------------------

    def oom_kills(self, *, again: bool = False) -> int | None:
        """How many processes the kernel killed here for lack of memory.

        Args:
            again: It will be asked soon again: what tells it stays open for that, until `asked_last`.
        """
        path = self._oom_path()
        if not path:
            return None
        # Twice for each exec, so without a look at every line; it is the first in neither file.
        text = reread.read(path) if again else _read(path)
        said = text.partition("\noom_kill ")[2].partition("\n")[0]
        return int(said) if said.isdigit() else None

    def asked_last(self) -> None:
        """Nothing stays open any more."""
        if path := self._oom_path():
            reread.forget(path)

    def open_if_full(self) -> tuple[int, int] | None:
        """Where less memory is free than a program takes to start: a file that says how much is used, open.

        Returns:
            The descriptor, the caller's to close, and how much it should say at most; None: enough is free.
        """
        if not self.version:
            return None
        base = self.paths["" if self.version == 2 else "memory"]
        names = ("current", "max") if self.version == 2 else ("usage_in_bytes", "limit_in_bytes")
        most, used = _number(f"{base}/memory.{names[1]}"), self.memory_bytes()
        if most is None or used is None or used + _TO_START_BYTES <= most:
            return None
        return os.open(
            f"{base}/memory.{names[0]}", os.O_RDONLY | os.O_CLOEXEC
        ), most - _TO_START_BYTES

    def _oom_path(self) -> str:
        if self.version == 2:
            return self.paths[""] + "/memory.events"
        return self.paths["memory"] + "/memory.oom_control" if self.version else ""

    def forks_refused(self) -> int | None:
        """How many times the processes limit said no."""
        if self.version:
            return _field(self.paths["pids" if self.version == 1 else ""] + "/pids.events", "max")
        return None

    def cpu_ns(self) -> int | None:
        if self.version == 2:
            usec = _field(self.paths[""] + "/cpu.stat", "usage_usec")
            return None if usec is None else usec * 1000
        return (
            _number(self.paths["cpuacct"] + "/cpuacct.usage") if "cpuacct" in self.paths else None
        )

    def memory_bytes(self) -> int | None:
        if self.version == 2:
            return _number(self.paths[""] + "/memory.current")
        return _number(self.paths["memory"] + "/memory.usage_in_bytes") if self.version else None

    def peak_memory_bytes(self) -> int | None:
        if self.version == 2:
            return _number(self.paths[""] + "/memory.peak")  # Linux 5.19
        return (
            _number(self.paths["memory"] + "/memory.max_usage_in_bytes") if self.version else None
        )

    def pids(self) -> int | None:
        if not self.version:
            return None
        count = _number(self.paths["pids" if self.version == 1 else ""] + "/pids.current")
        return None if count is None else count - OWN_PROCESSES

    # -- acting -----------------------------------------------------------------------------

    def unthrottle(self, on: bool) -> None:
        """Lift the processor limit while processes are being killed: dying takes time too."""
        if not self._quota:
            return
        if self.version == 2:
            value = "max" if on else str(self._quota)
            launcher_cgroups.write(self.paths[""] + "/cpu.max", f"{value} {_PERIOD_US}")
        elif "cpu" in self.paths:
            path = self.paths["cpu"] + "/cpu.cfs_quota_us"
            launcher_cgroups.write(path, "-1" if on else str(self._quota))

    @property
    def can_freeze(self) -> bool:
        return self.version == 2 or "freezer" in self.paths

    def freeze(self) -> None:
        """Stop every process, PID 1 included; returns when the kernel says that all are."""
        self._set_frozen(True)

    def thaw(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        import time

        deadline = time.monotonic() + 10
        if self.version == 2:
            launcher_cgroups.write(self.paths[""] + "/cgroup.freeze", "1" if frozen else "0")
            # Until it says the contrary no more: it may also be gone, killed while frozen.
            while _field(self.paths[""] + "/cgroup.events", "frozen") == int(not frozen):
                self._wait(deadline, frozen)
            return
        path = self.paths["freezer"] + "/freezer.state"
        wanted = "FROZEN" if frozen else "THAWED"
        launcher_cgroups.write(path, wanted)
        while _read(path).strip() != wanted:
            launcher_cgroups.write(path, wanted)  # v1 gives up on a task that was busy: ask again
            self._wait(deadline, frozen)

    def _wait(self, deadline: float, freezing: bool) -> None:
        import time

        if time.monotonic() > deadline:
            if freezing:
                launcher_cgroups.thaw(self.directories)  # not half of it
            verb = "freeze" if freezing else "thaw"
            raise TimeoutError(110, f"the kernel did not {verb} every process within 10 s")
        time.sleep(0.001)


def for_sockets(memory_bytes: int) -> int:
    """How much of a memory limit version 1 allows for the buffers of sockets, beside that limit."""
    return min(memory_bytes // 4, _MOST_FOR_SOCKETS)


def group_name(sandbox_id: str, label: str = "") -> str:
    """A directory name that says whose it is, so that a later start can sweep what is left.

    Args:
        label: Of the process with which the sandbox ends; empty for this one.
    """
    return f"{_PREFIX}{label or owner.label()}.{sandbox_id}"


def sweep(layout: Layout) -> list[str]:
    """Remove the cgroups of processes that no longer exist; returns what was removed.

    A sandbox's processes die with their zygote; a frozen one dies only when it is thawed here. What is not
    empty at once, and many, is left to a thread, for some seconds, and to the next start: nobody waits for it.
    """
    orphaned, strangers = left_behind(layout)
    busy = _end(orphaned[:_AT_ONCE], 0) + orphaned[_AT_ONCE:]
    if busy:
        from _thread import start_new_thread

        start_new_thread(_end_rest, (busy,))
    kept = set(busy)  # there may be ten thousand
    removed = [directory for directory in orphaned if directory not in kept]
    return removed + [directory for directory in strangers if _removed_abandoned(directory)]


def _end(orphaned: list[str], patience_s: float) -> list[str]:
    """Kill what is in cgroups of dead processes and remove them; returns those that are still there."""
    # All of them before any is removed: in version 1 what is frozen sits in several of them.
    trees = [each for directory in orphaned for each in launcher_cgroups.below(directory)]
    for directory in trees:
        _kill_members(directory)
    launcher_cgroups.thaw(trees)
    return launcher_cgroups.remove(orphaned, patience_s)


def _end_rest(orphaned: list[str]) -> None:
    busy = []
    for i in range(0, len(orphaned), _AT_ONCE):
        busy += _end(orphaned[i : i + _AT_ONCE], 0)
    _end(busy, _SOME_SECONDS)


def left_behind(layout: Layout) -> tuple[list[str], list[str]]:
    """The cgroups of processes that no longer exist, and those of which nobody here can say that."""
    orphaned: list[str] = []
    strangers: list[str] = []
    lists: dict[tuple[int, int, int], list[str]] = {}  # one dead process may have left thousands
    for base in dict.fromkeys(layout.bases.values()):
        for name in os.listdir(base):
            words = name.removeprefix(_PREFIX).split(".")
            whose = owner.read(words[:3]) if name.startswith(_PREFIX) else None
            if whose is None:
                continue
            if whose not in lists:
                is_gone = owner.is_gone(whose)
                lists[whose] = (
                    strangers if owner.is_stranger(whose) else orphaned if is_gone else []
                )
            lists[whose].append(f"{base}/{name}")
    return orphaned, strangers


def _removed_abandoned(directory: str) -> bool:
    """Of another PID namespace nothing is known: only what is old goes, and rmdir(2) wants it empty."""
    import time

    try:
        if time.time() - os.stat(directory).st_mtime < _ABANDONED_S:
            return False  # its sandbox may be about to move in
        os.rmdir(directory)
    except OSError:
        return False
    return True


def _kill_members(directory: str) -> None:
    for word in _read(directory + "/cgroup.procs").split():
        pid = int(word)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            # Pinned by the descriptor, then checked: a reused pid is not in this cgroup.
            if word in _read(directory + "/cgroup.procs").split():
                import signal

                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            pass
        finally:
            os.close(pidfd)


def _mounts() -> dict[str, str]:
    """Controller (v2: "") to mount point."""
    found: dict[str, str] = {}
    for line in _read("/proc/self/mounts").splitlines():
        _source, target, kind, options = line.split(" ")[:4]
        if kind == "cgroup2":
            found.setdefault("", target)
        elif kind == "cgroup":
            for option in options.split(","):
                if option in _V1:
                    found.setdefault(option, target)
    return found


def _memberships() -> dict[str, str]:
    """Controller (v2: "") to the cgroup that this process is in: cgroups(7), /proc/PID/cgroup."""
    found: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _candidates(mount: str, chosen: str, own: str) -> list[str]:
    """Version 2: where to try, the narrowest first, so that limits set on us hold for sandboxes."""
    if chosen:
        return [mount + chosen.rstrip("/")]
    found = []
    if not own.startswith("/.."):  # else outside what our cgroup namespace shows
        found = [mount + own.rstrip("/"), mount + os.path.dirname(own).rstrip("/")]
    if os.geteuid() == 0:
        # Slices between belong to the host's service manager; everybody may add to the root.
        found = [*found[:1], mount]
    return list(dict.fromkeys(found))


def _enable(base: str, controllers: str) -> None:
    try:
        launcher_cgroups.write(base + "/cgroup.subtree_control", controllers)
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        _move_down(base)
        launcher_cgroups.write(base + "/cgroup.subtree_control", controllers)


def _move_down(base: str) -> None:
    """Move to a leaf: a cgroup with members cannot hand controllers on, says cgroups(7)."""
    members = _read(base + "/cgroup.procs").split()
    if not _is_delegated(base):
        if os.geteuid() == 0 and not os.path.ismount(base):  # a mount: all that a container has
            raise OSError(errno.EBUSY, "the cgroup has processes and was not delegated", base)
        if not all(_is_ours(int(word)) for word in members):
            raise OSError(errno.EBUSY, "processes that are not Ringfence's are in it", base)
    leaf = f"{base}/{_HOST_LEAF}"
    launcher_cgroups.make([leaf], [])
    for word in members:
        try:
            launcher_cgroups.write(leaf + "/cgroup.procs", word)
        except ProcessLookupError:
            continue  # it has ended


def _is_delegated(base: str) -> bool:
    """Return whether systemd delegated it (Delegate=yes): then the delegate may move all members."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            return os.getxattr(base, name) == b"1"
        except OSError:
            continue
    return False


def _is_ours(pid: int) -> bool:
    """Return whether it is this process or descends from it."""
    while pid > 1 and pid != os.getpid():
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
    return pid == os.getpid()


def _try_directory(base: str) -> None:
    if not os.access(base, os.W_OK | os.X_OK):
        raise PermissionError(13, "not writable by this user", base)
    if not os.access(base + "/cgroup.procs", os.W_OK):
        raise PermissionError(13, "not delegated to this user", base)


def _read(path: str) -> str:
    # Every exec and every end reads some: a file object around five bytes costs more than they do.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    pieces = []
    try:
        while piece := os.read(fd, _PIECE):
            pieces.append(piece)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return b"".join(pieces).decode("utf-8", "replace")


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _field(path: str, name: str) -> int | None:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None
