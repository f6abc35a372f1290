"""A process of a sandbox and all that descend from it, stopped at once: what its copies begin from."""

from __future__ import annotations

import posix as os

from ...linux import libc
from . import descriptors
from .objects import Objects
from .sockets import CannotCopy
from .source import MOST_MAPPINGS, Source, Zombie

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_PROCESSES, MOST_THREADS, MOST_DESCRIPTORS = 64, 256, 2048
_MOST_CHILD_BYTES = 512 << 20
_NAMESPACES = ("user", "mnt", "pid", "pid_for_children", "net", "ipc", "uts", "cgroup")


class Tree:
    """Processes that stand still from `stop` to `release`.

    Args:
        pid: Of the first process of an exec, as we see it.
        streams: Inodes of the pipes that its copies get others for, in their order.
        files: See `Source.look`.

    Attributes:
        processes: Parents before their children.
        shared: Open files that several of them have, each as it is in one of these.
    """

    def __init__(self, pid: int, streams: list[int], files: dict[tuple[int, int], bytes]) -> None:
        self._opened: dict[tuple[int, int], int] = {}
        self._streams = streams
        self.files = files
        self.root = Source(pid, None, self._opened)
        self.processes = [self.root]
        self.pipes: dict[int, bytes] = {}  # content by inode
        self.pairs: list[tuple[int, int, int]] = []  # kind, and both inodes
        self.shared: list[descriptors.Descriptor] = []
        self.objects = Objects()

    def stop(self) -> None:
        """Stop all of it, learn what copies need, and have the kernel copy it.

        Raises:
            CannotCopy: A process has something that no copy can have; all go on.
            OSError: As the kernel refused; all go on.
        """
        try:
            self.root.stop()
            while not self._has_all():
                continue
            self._bound(sum(len(each.stopped) for each in self.processes), "threads", MOST_THREADS)
            for source in self.processes:
                self._about(source, self._look, source)
                mappings = sum(len(each.mappings) for each in self.processes)
                self._bound(mappings, "mappings", MOST_MAPPINGS)
                opened = sum(len(each.descriptors) for each in self.processes)
                self._bound(opened, "open files", MOST_DESCRIPTORS)
            self._link()
            for source in self.processes:
                self._about(source, source.clone)
            self._bound_memory()
        except BaseException:
            self.release()
            self.drop()
            raise

    def release(self) -> None:
        """Let all go on; idempotent."""
        for source in self.processes:
            source.release()

    def drop(self) -> None:
        """End the kernel's copies; idempotent."""
        for source in self.processes:
            source.drop_child()
        self.objects.close()
        opened = [fd for fd in self._opened.values() if fd >= 0]
        self._opened.clear()
        for fd in opened:
            os.close(fd)

    def describe(self) -> dict[str, Any]:
        """Facts for the host."""
        ids = [thread.id_inside for each in self.processes for thread in each.threads]
        ids += [zombie.id for each in self.processes for zombie in each.zombies]
        runs = [run for each in self.processes for run in each.runs]
        size = sum(end - start for start, end in runs)
        processes = [(each.id, descriptors.shown(each.threads[0].name)) for each in self.processes]
        return {"ids": ids, "bytes": size, "files": self.files, "processes": processes}

    # -- finding --------------------------------------------------------------------------------

    def _has_all(self) -> bool:
        """Stop what descends from those that stand still; False: one may have had another child before."""
        before = len(self.processes)
        for source in self.processes:  # which grows meanwhile
            source.zombies.clear()
            self._find_children(source)
        return len(self.processes) == before

    def _find_children(self, source: Source) -> None:
        known = {each.pid for each in source.children}
        for pid in source.children_found():
            if pid in known:
                continue
            fields = _fields(pid)
            if fields and fields[0] in b"Tt":
                raise CannotCopy(f"its child process {_name(pid)} is suspended by a signal")
            child = Source(pid, source, self._opened)
            try:
                if fields and fields[0] != b"Z":
                    self._bound(len(self.processes) + 1, "processes", MOST_PROCESSES)
                    self.processes.append(child)
                    self._about(child, child.stop)
                    self._place(child)
                    source.children.append(child)
                    continue
            except (ProcessLookupError, CannotCopy):
                if _fields(pid)[:1] not in ([], [b"Z"]):
                    raise
                self.processes.remove(child)  # killed meanwhile
                child.release()
            if _fields(pid):
                source.zombies.append(_zombie(pid))
                ended = sum(len(each.zombies) for each in self.processes)
                self._bound(ended, "ended children", MOST_PROCESSES)

    def _place(self, child: Source) -> None:
        """Refuse a session or a process group that cannot be made again."""
        parent = child.parent
        assert parent is not None
        if child.session not in (child.id, parent.session):
            raise CannotCopy(
                f"its child process {_name(child.pid)} is in a session that its parent left"
            )
        if child.user != parent.user:
            raise CannotCopy(f"its child process {_name(child.pid)} is another user's")
        for name in _NAMESPACES:
            own, other = (_namespace(each.pid, name) for each in (child, parent))
            if not own or own != other:
                raise CannotCopy(f"its child process {_name(child.pid)} is in another namespace")

    def _groups(self) -> None:
        for source in self.processes:
            leaders = {source.group, *(each.id for each in source.children)}
            leaders |= {each.id for each in source.zombies}
            born: list[Source | Zombie] = [*source.children, *source.zombies]
            for child in born:
                if child.group not in leaders:
                    raise CannotCopy(
                        f"its child process {child.id} is in a process group of another's"
                    )

    def _bound(self, number: int, what: str, most: int) -> None:
        if number > most:
            raise CannotCopy(f"it and its child processes have more than {most} {what}")

    def _bound_memory(self) -> None:
        children = self.processes[1:]
        if sum(end - start for each in children for start, end in each.runs) > _MOST_CHILD_BYTES:
            most = _MOST_CHILD_BYTES >> 20
            raise CannotCopy(f"its child processes have more than {most} MiB of memory")

    # -- looking --------------------------------------------------------------------------------

    def _look(self, source: Source) -> None:
        source.look(self.files)
        source.descriptors = descriptors.read(source.pid, source.root, self._streams)

    def _about(self, source: Source, function: Any, *arguments: Any) -> None:
        """Have the reason of a refusal name the child that it is about."""
        try:
            function(*arguments)
        except CannotCopy as exc:
            if source.parent is None:
                raise
            raise CannotCopy(f"its child process {_name(source.pid)} cannot: {exc}") from None

    def _link(self) -> None:
        """Find what they have in common."""
        self._groups()
        for i, one in enumerate(self.processes):
            for other in self.processes[:i]:
                if libc.share_memory_or_files(one.pid, other.pid):
                    raise CannotCopy(
                        f"its child process {_name(one.pid)} shares memory or descriptors with it"
                    )
        holders = [(each.pid, each.descriptors) for each in self.processes]
        self.pipes = descriptors.pipes_of(holders)
        self.pairs = descriptors.pairs_of(self.root.pid, holders)
        self.objects.read(self.processes)
        if len(self.processes) > 1:
            self._find_shared()

    def _find_shared(self) -> None:
        """Find open files that several processes have: kcmp(2), KCMP_FILE."""
        seen: dict[Any, list[tuple[int, int, descriptors.Descriptor]]] = {}
        for source in self.processes:
            for number, each in source.descriptors.items():
                if each.key is None or each.same_as >= 0:
                    continue
                others = seen.setdefault(each.key, [])
                for pid, other, first in others:
                    if pid != source.pid and libc.same_file(pid, other, source.pid, number):
                        if first.shared < 0:
                            first.shared = len(self.shared)
                            self.shared.append(first)
                        each.shared = first.shared
                        break
                else:
                    others.append((source.pid, number, each))


def _fields(pid: int) -> list[bytes]:
    """/proc/PID/stat from the state on; none: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _namespace(pid: int, name: str) -> str:
    """Read which one it is in; "": it has ended, or nobody has begun one that it made for its children."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{name}")
    except FileNotFoundError:
        return ""


def _zombie(pid: int) -> Zombie:
    with open(f"/proc/{pid}/status", "rb") as file:
        text = file.read()
    inside, group = (
        int(text.partition(b"\n%s:" % name)[2].partition(b"\n")[0].split()[-1])
        for name in (b"NSpid", b"NSpgid")
    )
    return Zombie(inside, group)


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return descriptors.shown(file.read().rstrip(b"\n"))
    except OSError:
        return str(pid)
