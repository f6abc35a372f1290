"""What no copy can have: it is refused by name, the process goes on, and nothing of ours is left."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.launcher.live import descriptors, objects, source, tree
from ringfence.launcher.live.sockets import CannotCopy
from ringfence.launcher.live.template import Template
from ringfence.launcher.live.tree import Tree
from ringfence.linux import libc, mounts, namespaces
from tests.unit.linux.child import alone, result_of

pytestmark = [
    pytest.mark.anyone,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]
_LINES = """
import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
c, made = ctypes.CDLL(None), {}
def child(work=signal.pause):
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return pid
def end(*pids):
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
def ended():
    pid = child(int)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid
print(flush=True)
for line in sys.stdin:
    try:
        exec(line)
        print(flush=True)
    except Exception as exc:
        print(repr(exc), flush=True)
"""


class Program:
    """A program of a sandbox that does what it is told, line by line."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._process = sandbox.start(["python3", "-c", _LINES], stream_stdin=True)
        self._said = iter(self._process.stdout)
        self.hear()
        assert isinstance(sandbox._inner, NativeSandbox)
        first = sandbox._inner.pid
        (self.pid,) = map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())
        self.streams = [os.stat(f"/proc/{self.pid}/fd/{number}").st_ino for number in range(3)]

    def do(self, line: str) -> None:
        self.tell(line.encode() + b"\n")
        self.hear()

    def hear(self, answers: int = 1) -> None:
        said = b""
        while said.count(b"\n") < answers:
            said += next(self._said)
        assert b"" == said.strip()

    def tell(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def look(self, look: Callable[[Tree], object] = Tree.describe) -> object:
        """Stop it and all that descends from it, look, and let all go on."""
        stopped = Tree(self.pid, self.streams, {})
        stopped.stop()
        try:
            return look(stopped)
        finally:
            stopped.release()
            stopped.drop()

    def reason(self) -> str:
        with pytest.raises(CannotCopy) as refused:
            self.look()
        return str(refused.value)


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with Sandbox.create() as sandbox:
        yield Program(sandbox)


# What it does, why it cannot be copied then, and what undoes it.
_REFUSED = {
    "inotify": (
        "made = c.inotify_init()",
        "is anon_inode: anon_inode:inotify",
        "os.close(made)",
    ),
    "a place": ("made = os.open('/tmp', os.O_PATH)", "is a place", "os.close(made)"),
    "a FIFO": (
        "os.mkfifo('/tmp/fifo'); made = os.open('/tmp/fifo', os.O_RDWR)",
        "is /tmp/fifo, a device or a pipe",
        "os.close(made); os.remove('/tmp/fifo')",
    ),
    "a removed directory": (
        "os.mkdir('/tmp/gone'); made = os.open('/tmp/gone', 0); os.rmdir('/tmp/gone')",
        "is a directory that was removed",
        "os.close(made)",
    ),
    "a file that is not the one with its name": (
        (
            "made = open('/tmp/old', 'w'); os.link('/tmp/old', '/tmp/kept'); os.remove('/tmp/old')"
            "; open('/tmp/old (deleted)', 'w').close()"
        ),
        "is not the file at /tmp/old (deleted)",
        "made.close(); os.remove('/tmp/kept'); os.remove('/tmp/old (deleted)')",
    ),
    "a pair with something in it": (
        "made = socket.socketpair(); made[0].send(b'xy')",
        "is a socket with 2 bytes in it",
        "[each.close() for each in made]",
    ),
    "half a pair": (
        "made = socket.socketpair(); made[1].close()",
        "has a connection, or leads to another process",
        "made[0].close()",
    ),
    "a pair with another process": (
        (
            "read, write = os.pipe(); made = socket.socketpair(); first = child(lambda: os.fork() or ("
            "made[0].close(), os.write(write, b'%d' % os.getpid()), signal.pause()))"
            "; os.waitpid(first, 0); made[1].close(); other = int(os.read(read, 9))"
            "; os.close(read); os.close(write)"
        ),
        "has a connection, or leads to another process",
        "os.kill(other, 9); made[0].close()",
    ),
    "a datagram socket": (
        "made = socket.socket(type=socket.SOCK_DGRAM); made.bind(('127.0.0.1', 0))",
        "has a connection, or leads to another process",
        "made.close()",
    ),
    "a socket that does not listen": (
        "made = socket.socket(); made.bind(('127.0.0.1', 0))",
        "has a connection, or leads to another process",
        "made.close()",
    ),
    "a pipe with too much in it": (
        "made = os.pipe(); fcntl.fcntl(made[1], 1031, 1 << 17); os.write(made[1], bytes((1 << 16) + 1))",
        "is a pipe with 65537 bytes in it",
        "[os.close(each) for each in made]",
    ),
    "a POSIX timer": (
        "made = ctypes.c_void_p(); c.timer_create(1, None, ctypes.byref(made))",
        "it has POSIX timers",
        "c.timer_delete(made)",
    ),
    "shared memory": (
        "made = mmap.mmap(-1, (64 << 20) + 4096)",
        "more than 64 MiB of shared memory",
        "made.close()",
    ),
    "a removed file that it maps": (
        (
            "open('/tmp/mapped', 'wb').write(bytes(4096)); file = open('/tmp/mapped', 'rb')"
            "; made = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)"
            "; os.remove('/tmp/mapped'); file.close()"
        ),
        "it maps a file that was removed: /tmp/mapped (deleted)",
        "made.close()",
    ),
    "a directory that was removed": (
        "os.mkdir('/tmp/here'); os.chdir('/tmp/here'); os.rmdir('/tmp/here')",
        "its directory is not at /tmp/here (deleted)",
        "os.chdir('/')",
    ),
    "a suspended child": (
        "made = child(); os.kill(made, signal.SIGSTOP); os.waitid(os.P_PID, made, os.WSTOPPED)",
        "its child process python3 is suspended by a signal",
        "end(made)",
    ),
    "a child with what it cannot have": (
        (
            "read, write = os.pipe()"
            "; made = child(lambda: (c.inotify_init(), os.write(write, b'.'), signal.pause()))"
            "; os.read(read, 1)"
        ),
        "its child process python3 cannot: descriptor",
        "end(made); os.close(read); os.close(write)",
    ),
    "a child with a filter of its own": (
        (
            "read, write = os.pipe(); rules = (ctypes.c_char * 8)(*struct.pack('=HBBI', 6, 0, 0, 0x7FFF0000))"
            "; code = struct.pack('=H6xQ', 1, ctypes.addressof(rules))"
            "; made = child(lambda: (c.prctl(22, 2, code, 0, 0), os.write(write, b'.'), signal.pause()))"
            "; os.read(read, 1)"
        ),
        "has a system-call filter of its own",
        "end(made); os.close(read); os.close(write)",
    ),
    "memory of System V": (
        "number = c.shmget(0, 4096, 0o600); c.shmat.restype = ctypes.c_void_p; made = c.shmat(number, None, 0)",
        "it shares memory: /SYSV",
        "c.shmdt(ctypes.c_void_p(made)); c.shmctl(number, 0, None)",
    ),
    "a child that has its descriptors": (
        "made = c.syscall(56, 0x400 | 17, 0, 0, 0, 0) or signal.pause()",
        "shares memory or descriptors with it",
        "end(made)",
    ),
    "a child with a terminal": (
        (
            "read, write = os.pipe(); made = child(lambda: (os.setsid(), "
            "os.open(os.ttyname(os.openpty()[1]), os.O_RDWR), os.write(write, b'.'), signal.pause()))"
            "; os.read(read, 1)"
        ),
        "it has a terminal",
        "end(made); os.close(read); os.close(write)",
    ),
    "a grandchild in a session that its parent left": (
        (
            "read, write = os.pipe(); made = child(lambda: ((pid := os.fork()) and ("
            "os.setsid(), os.write(write, b'%d' % pid)), signal.pause())); other = int(os.read(read, 9))"
        ),
        "is in a session that its parent left",
        "end(made); os.kill(other, 9); os.close(read); os.close(write)",
    ),
    "a grandchild in a group of another's": (
        (
            "read, write = os.pipe(); first = child(lambda: (os.setpgid(0, 0), os.write(write, b'.'), "
            "signal.pause())); os.read(read, 1); made = child(lambda: ((pid := os.fork()) and ("
            "os.setpgid(pid, first), os.write(write, b'%d' % pid)), signal.pause()))"
            "; other = int(os.read(read, 9))"
        ),
        "is in a process group of another's",
        "end(made, first); os.kill(other, 9); os.close(read); os.close(write)",
    ),
    "a child whose first thread has ended": (
        (
            "read, write = os.pipe(); made = child(lambda: (threading.Thread(target=lambda: ("
            "os.write(write, b'.'), signal.pause())).start(), c.syscall(60, 0))); os.read(read, 1)"
            "; [time.sleep(0.001) for _ in iter(lambda: open(f'/proc/{made}/stat').read().split()[2], 'Z')]"
        ),
        "a child process of it has just ended",
        "end(made); os.close(read); os.close(write)",
    ),
    "a pipe to another process": (
        (
            "read, write = os.pipe(); made = child(lambda: os.fork() or ("
            "os.close(read), os.write(write, b'%d' % os.getpid()), signal.pause()))"
            "; os.waitpid(made, 0); os.close(write); other = int(os.read(read, 9))"
        ),
        "is a pipe to another process",
        "os.kill(other, 9); os.close(read)",
    ),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_what_no_copy_can_have_is_refused_by_name(program: Program, what: str) -> None:
    begin, reason, undo = _REFUSED[what]
    before = os.listdir("/proc/self/fd")
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    ours = children.read_text()
    program.do(begin)
    told = program.reason()
    program.do(undo)

    assert reason in told
    assert (before, ours) == (os.listdir("/proc/self/fd"), children.read_text())
    program.look()
    assert before == os.listdir("/proc/self/fd")


def test_locks_that_a_copy_cannot_take_are_refused(tmp_path: Path) -> None:
    """A filter of the user's own may let a program have them."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    everything = struct.pack("=hh4xqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    nothing = struct.pack("=hh4xqqi4x", fcntl.F_UNLCK, 0, 0, 0, 0)
    take = 37  # fcntl(2), F_OFD_SETLK
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        for command, held, free in (
            (take, everything, nothing),
            (fcntl.F_SETLEASE, fcntl.F_WRLCK, fcntl.F_UNLCK),
        ):
            fcntl.fcntl(number, command, held)
            with pytest.raises(CannotCopy, match=f"descriptor {number} holds a lease or an OFD"):
                descriptors._descriptor(os.getpid(), root, number, [])
            fcntl.fcntl(number, command, free)
            found = descriptors._descriptor(os.getpid(), root, number, [])
            assert ("file", []) == (found.kind, found.locks)
        fcntl.lockf(file, fcntl.LOCK_EX, 3, 5)
        (lock,) = descriptors._descriptor(os.getpid(), root, number, []).locks
        assert ("POSIX", True, 5, 3) == (lock.kind, lock.is_exclusive, lock.start, lock.length)
    os.close(root)


def test_input_that_waits_is_refused(program: Program) -> None:
    """A copy gets a pipe of its own, which has nothing in it."""
    program.do(
        "signal.pthread_sigmask(signal.SIG_BLOCK, [10]); print(flush=True); signal.sigwait([10])"
    )
    program.tell(b"pass\n")
    told = program.reason()
    os.kill(program.pid, signal.SIGUSR1)
    program.hear(2)

    assert "descriptor 0, its input, has 5 bytes that it has not read" == told
    program.look()


# Where a bound is, and how many of them a tree of processes has.
_BOUNDS: dict[str, tuple[object, str, Callable[[Tree], int]]] = {
    "more than {} processes": (tree, "MOST_PROCESSES", lambda made: len(made.processes)),
    "more than {} threads": (
        tree,
        "MOST_THREADS",
        lambda made: sum(len(each.threads) for each in made.processes),
    ),
    "child processes have more than {} open files": (
        tree,
        "MOST_DESCRIPTORS",
        lambda made: sum(len(each.descriptors) for each in made.processes),
    ),
    "child processes have more than {} mappings": (
        tree,
        "MOST_MAPPINGS",
        lambda made: sum(len(each.mappings) for each in made.processes),
    ),
    "it has more than {} open files": (
        descriptors,
        "MOST_DESCRIPTORS",
        lambda made: len(made.root.descriptors),
    ),
    "it has more than {} mappings": (source, "MOST_MAPPINGS", lambda made: len(made.root.mappings)),
    "child processes have more than": (
        tree,
        "_MOST_CHILD_BYTES",
        lambda made: sum(end - at for each in made.processes[1:] for at, end in each.runs),
    ),
}


def test_bounds_hold_for_all_processes_together(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.do("made = child()")
    program.look(
        lambda made: [
            monkeypatch.setattr(where, name, count(made)) for where, name, count in _BOUNDS.values()
        ]
    )
    program.look()
    for text, (where, name, _count) in _BOUNDS.items():
        with monkeypatch.context() as patch:
            most = getattr(where, name) - 1
            patch.setattr(where, name, most)
            assert text.format(most) in program.reason()
    program.do("end(made)")
    program.look()


def test_children_that_have_ended_are_known_by_what_ended_them(program: Program) -> None:
    program.do("made = [child(lambda: os._exit(7)), child()]; os.kill(made[1], 9)")
    program.do("[os.waitid(os.P_PID, each, os.WEXITED | os.WNOWAIT) for each in made]")
    told = program.look(lambda made: sorted((each.code, each.signal) for each in made.root.zombies))
    program.do("[os.waitpid(each, 0) for each in made]")
    assert [(0, signal.SIGKILL), (7, 0)] == told


def test_children_that_have_ended_are_known_once_and_lead_their_groups_still(
    program: Program,
) -> None:
    """Beside others, for which all are looked at again."""
    program.do("made = [child() for _ in range(3)]; [os.setpgid(each, made[0]) for each in made]")
    program.do("os.kill(made[0], 9); os.waitid(os.P_PID, made[0], os.WEXITED | os.WNOWAIT)")

    def look(made: Tree) -> object:
        ids: Any = made.describe()["ids"]
        ended = [each.id for each in made.root.zombies]
        groups = {each.group for each in made.root.children}
        groups |= {each.group for each in made.root.zombies}
        return ended, groups, len(ids), ids.count(ended[0])

    told = program.look(look)
    program.do("end(*made)")
    leader = told[0][0] if isinstance(told, tuple) else 0

    assert ([leader], {leader}, 4, 1) == told


def test_of_a_file_so_much_is_copied_as_it_has_pages(program: Program) -> None:
    """Where a program inside can write to it; beyond its end there is nothing to read."""
    program.do("open('/tmp/short', 'wb').write(b'x' * 5000); file = open('/tmp/short', 'rb')")
    program.do(
        "made = [mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=at) "
        "for at in (0, 4096)]"
    )
    program.do("os.truncate('/tmp/short', 8192)")
    program.do("made.append(mmap.mmap(file.fileno(), 8192, mmap.MAP_PRIVATE, mmap.PROT_READ))")
    sizes = []
    for size in (8192, 5000, 4097, 4096, 1, 0):
        program.do(f"os.truncate('/tmp/short', {size})")
        sizes.append(
            program.look(
                lambda made: sorted(
                    (each.offset, each.size)
                    for each in made.root.mappings
                    if each.name == b"/tmp/short"
                )
            )
        )
    program.do("[each.close() for each in made]; file.close(); os.remove('/tmp/short')")

    assert [
        [(0, first), (0, first), (4096, second)]
        for first, second in (
            (8192, 4096),
            (8192, 4096),
            (8192, 4096),
            (4096, 0),
            (4096, 0),
            (0, 0),
        )
    ] == sizes


def test_children_that_have_ended_have_a_bound(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.do("made = [ended() for _ in range(2)]")
    monkeypatch.setattr(tree, "MOST_PROCESSES", 2)
    program.look()
    monkeypatch.setattr(tree, "MOST_PROCESSES", 1)
    assert "more than 1 ended children" in program.reason()
    program.do("end(*made)")
    program.look()


def test_bounds_of_threads_pipes_and_shared_memory(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.do("made = threading.Event(); thread = threading.Thread(target=made.wait)")
    program.do("thread.start(); shared = mmap.mmap(-1, 8192); pipes = os.pipe(), os.pipe()")
    program.do("[os.write(end, b'1234') for _, end in pipes]")
    for where, name, most, text in (
        (source, "MOST_THREADS", 2, "it has more than 1 threads"),
        (descriptors, "_MOST_IN_PIPES", 8, "it has pipes with more than"),
        (descriptors, "_MOST_PIPE_BYTES", 4, "is a pipe with 4 bytes in it"),
        (objects, "_MOST_BYTES", 8192, "of shared memory and removed files"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, most)
            program.look()
            patch.setattr(where, name, most - 1)
            assert text in program.reason()
    program.do("made.set(); thread.join(); shared.close()")
    program.do("[os.close(each) for pair in pipes for each in pair]")


_TIMERS = (
    "made = [c.timerfd_create(1, 0) for _ in range(3)]"
    "; c.timerfd_settime(made[0], 0, struct.pack('=4q', 7, 5, 1000, 0), None)"
    "; c.timerfd_settime(made[1], 0, struct.pack('=4q', 1000, 0, 0, 1), None)"
    "; __import__('select').select(made[1:2], [], [])"
)


def test_timers_are_described_as_they_are_set(program: Program) -> None:
    program.do(_TIMERS)
    program.do("signal.setitimer(signal.ITIMER_VIRTUAL, 1000, 7)")

    def look(made: Tree) -> object:
        timers = [each.timer for each in made.root.descriptors.values() if each.timer is not None]
        assert {1} == made.root.timers.keys()
        interval, _, left, _ = struct.unpack("=4q", made.root.timers[1])
        assert 7 == interval
        assert 900 < left <= 1000
        return [(each.clock, each.ticks, each.interval, any(each.value)) for each in timers]

    assert [(1, 0, (7, 5), True), (1, 1, (1000, 0), False), (1, 0, (0, 0), False)] == program.look(
        look
    )
    program.do("signal.setitimer(signal.ITIMER_VIRTUAL, 0); [os.close(each) for each in made]")


def test_counters_and_servers_are_described_as_they_are(program: Program) -> None:
    program.do("made = [os.eventfd(26), os.eventfd(3, os.EFD_SEMAPHORE), os.eventfd(0)]")
    program.do(
        "four = socket.create_server(('127.0.0.1', 8101), backlog=7)"
        "; six = socket.create_server(('::1', 8102), family=socket.AF_INET6, backlog=9)"
        "; both = socket.create_server(('::', 8103), family=socket.AF_INET6, dualstack_ipv6=True)"
    )
    semaphore = os.eventfd(0, os.EFD_SEMAPHORE)
    tells = "eventfd-semaphore" in Path(f"/proc/self/fdinfo/{semaphore}").read_text()
    os.close(semaphore)

    def look(made: Tree) -> object:
        opened = [made.root.descriptors[number] for number in sorted(made.root.descriptors)]
        events = [(each.count, each.is_semaphore) for each in opened if each.kind == "event"]
        servers = [each.server for each in opened if each.server is not None]
        options = [[value for *_name, value in each.options] for each in servers]
        ports = [int.from_bytes(each.address[2:4], "big") for each in servers]
        return events, ports, options, [each.backlog for each in servers]

    found = program.look(look)
    program.do("[os.close(each) for each in made]; [each.close() for each in (four, six, both)]")

    assert (
        [(26, False), (3, tells), (0, False)],
        [8101, 8102, 8103],
        [[1, 0], [1, 0, 1], [1, 0, 0]],
        [7, 9, 128],
    ) == found


def test_a_pipe_that_nobody_reads_any_more_is_empty_in_a_copy(program: Program) -> None:
    program.do("made = os.pipe(); os.write(made[1], b'xy'); os.close(made[0])")
    assert [b""] == program.look(lambda made: list(made.pipes.values()))
    program.do("os.close(made[1])")


@pytest.mark.parametrize("order", ["8192, 4096", "4096, 8192"])
def test_memory_that_is_mapped_in_parts_is_copied_as_far_as_any_reaches(
    program: Program, order: str
) -> None:
    """Python's own mappings keep a descriptor; these are known by the mappings alone."""
    program.do("file = open('/tmp/parts', 'w+b'); file.truncate(12288); os.remove('/tmp/parts')")
    program.do(
        "c.mmap.restype = ctypes.c_void_p; c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]"
    )
    program.do(
        "c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]"
    )
    program.do(
        f"parts = [(size, 0) for size in ({order})]; parts.insert(1, (4096, 8192))"
        "; made = [c.mmap(None, size, 3, 1, file.fileno(), at) for size, at in parts]; file.close()"
    )
    program.do("large = parts.index((8192, 0)); ctypes.memmove(made[large] + 8191, b'A', 1)")
    program.do("ctypes.memmove(made[1] + 5, b'B', 1)")

    def look(made: Tree) -> object:
        (place,) = (each for each in made.objects.places.values() if each[1])
        content = os.pread(made.objects.content, place[1], place[0])
        return len(content), content[8191:8198]

    found = program.look(look)
    program.do("[c.munmap(at, size) for at, (size, _) in zip(made, parts)]")
    assert (12288, b"A\0\0\0\0\0B") == found


def test_a_removed_file_that_may_not_be_opened_again_goes_along(program: Program) -> None:
    program.do("made = open('/tmp/own', 'w+'); made.write('mine'); made.flush()")
    program.do("os.chmod('/tmp/own', 0); os.remove('/tmp/own')")

    def look(made: Tree) -> object:
        return os.pread(made.objects.content, made.objects.size, 0).rstrip(b"\0")

    found = program.look(look)
    program.do("made.close()")
    assert b"mine" == found


def test_signals_that_wait_are_those_of_the_process_or_of_a_thread(program: Program) -> None:
    program.do("signal.pthread_sigmask(signal.SIG_BLOCK, [10, 12]); os.kill(os.getpid(), 10)")
    program.do("signal.pthread_kill(threading.get_ident(), 12)")

    def look(made: Tree) -> object:
        waiting = made.root.pending, made.root.threads[0].pending
        return [[struct.unpack_from("=i", info)[0] for info in each] for each in waiting]

    assert [[signal.SIGUSR1], [signal.SIGUSR2]] == program.look(look)
    program.do("signal.sigwait([10]); signal.sigwait([12])")
    program.do("signal.pthread_sigmask(signal.SIG_UNBLOCK, [10, 12])")


def test_a_mapped_file_is_the_one_with_its_name_and_copies_map_it_where_none_can_write(
    tmp_path: Path,
) -> None:
    for name in ("shown", "free"):
        place = tmp_path / name
        (place / "directory").mkdir(parents=True)
        (place / "file").write_text("content")
        (place / "other").write_text("content")
        (place / "link").symlink_to("file")
        os.mkfifo(place / "pipe")
    asked = [
        (f"{place}/{name}", f"{place}/{mapped}")
        for place in ("shown", "free")
        for name, mapped in (
            ("file", "file"), ("file", "other"), ("link", "file"), ("absent", "file"),
            ("directory", "directory"), ("pipe", "pipe"), ("../free/file", "../free/file"),
        )
    ]  # fmt: skip

    def found() -> list[list[bool]]:
        alone(namespaces.CLONE_NEWNS)
        mounts.mount("", "/", "", mounts.MS_REC | mounts.MS_PRIVATE)
        tree = mounts.open_tree(str(tmp_path / "shown"))
        mounts.mount_setattr(tree, mounts.MOUNT_ATTR_RDONLY)
        mounts.move_mount(tree, str(tmp_path / "shown"))
        os.close(tree)
        root = os.open("/", os.O_PATH | os.O_DIRECTORY)
        before = os.listdir("/proc/self/fd")
        results = []
        for name, mapped in asked:
            status = os.stat(tmp_path / mapped)
            path = os.fsencode(tmp_path / name)
            mapping: Any = SimpleNamespace(name=path, key=(status.st_dev, status.st_ino))
            fd = source._open_read_only(root, mapping, path)
            results.append([source._is_there(root, mapping), fd >= 0])
            if fd >= 0:
                os.close(fd)
        assert before == os.listdir("/proc/self/fd")
        return results

    no, there, both = [False, False], [True, False], [True, True]
    assert [both, *[no] * 5, there, there, *[no] * 5, there] == result_of(found)


def test_a_template_is_made_and_ended_and_leaves_nothing(program: Program) -> None:
    program.do("made = [child(), ended()]; shared = mmap.mmap(-1, 8192)")
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text(), os.listdir("/proc/self/fd")

    def make(made: Tree) -> object:
        opened = len(os.listdir("/proc/self/fd"))
        template = Template(made)
        more = len(os.listdir("/proc/self/fd")) - opened
        status = Path(f"/proc/{template.pid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        owner = os.stat(f"/proc/{template.pid}/environ").st_uid
        template.close()
        return more, owner, blocked | 1 << signal.SIGKILL - 1 | 1 << signal.SIGSTOP - 1

    assert (1, 0, (1 << 64) - 1) == program.look(make), "it has a socket, and nobody traces it"
    assert before == (children.read_text(), os.listdir("/proc/self/fd"))
    program.do("end(*made); shared.close()")


_NO_CHILDREN = (
    "made = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE); made[:] = b'x' * len(made)"
    "; made.madvise(10, 4096, 8192)"
)


def test_memory_that_children_do_not_get_goes_along_and_stays_so(program: Program) -> None:
    def not_inherited(made: Tree) -> object:
        """How many bytes they are, and how many bytes of them the kernel's copy has."""
        ranges = made.root.not_inherited
        held = [
            min(end, range_end) - max(start, range_start)
            for start, end in made.root.runs
            for range_start, range_end in ranges
        ]
        total = sum(end - start for start, end in ranges)
        return total, sum(each for each in held if each > 0)

    program.do(_NO_CHILDREN)
    twice = [program.look(not_inherited) for _ in range(2)]
    program.do("made.close()")
    after = program.look(not_inherited)

    assert [(8192, 8192)] * 2 == twice, "the program's own children still do not get it"
    assert (0, 0) == after


def test_memory_that_no_copy_gets_is_refused(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a device, about which the kernel takes no advice."""
    program.do(_NO_CHILDREN)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text(), os.listdir("/proc/self/fd")
    program.look()
    with monkeypatch.context() as patch:
        patch.setattr(source, "_DO_FORK", source.DO_NOT_FORK)
        assert "it has memory that no child process gets" == program.reason()
    assert before == (children.read_text(), os.listdir("/proc/self/fd"))
    program.do("made.close()")
    program.look()


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ([(10, 20), (20, 30), (40, 50)], []),
        ([(10, 30), (40, 50)], []),
        ([(10, 50)], []),
        ([], [(10, 20), (20, 30), (40, 50)]),
        ([(20, 30), (40, 50)], [(10, 20)]),
        ([(10, 20), (40, 50)], [(20, 30)]),
        ([(10, 20), (20, 30)], [(40, 50)]),
        ([(10, 20), (20, 29), (40, 50)], [(20, 30)]),
        ([(10, 20), (21, 30), (40, 50)], [(20, 30)]),
        ([(10, 15), (15, 20), (20, 30), (40, 50)], []),
        ([(10, 15), (16, 20), (20, 30), (40, 50)], [(10, 20)]),
        ([(0, 9), (10, 20), (20, 30), (31, 39), (40, 50)], []),
    ],
)
def test_memory_is_missing_where_the_kernels_copy_has_not_all_of_a_mapping(
    there: list[tuple[int, int]],
    missing: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lines(ranges: list[tuple[int, int]], name: str = "") -> bytes:
        rows = (f"{start:x}-{end:x} rw-p 00000000 00:00 0 {name}\n" for start, end in ranges)
        return "".join(rows).encode()

    made = source.Source(1, None, {})
    own = lines([(10, 20), (20, 30), (40, 50)]) + lines([(60, 70)], "[vvar]")
    made.mappings = [source.Mapping(line) for line in own.splitlines()]
    monkeypatch.setattr(source, "_read", lambda _path: lines(there))

    assert missing == made._missing_in_child()


def test_memory_that_children_get_zeroed_is_known(program: Program) -> None:
    program.do("made = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE); made[:] = b'x' * len(made)")

    def wiped(made: Tree) -> int:
        made.root.look_at_copy()
        return sum(each.end - each.start for each in made.root.mappings if each.is_wiped)

    before = program.look(wiped)
    program.do("made.madvise(18, 4096, 8192)")
    after = program.look(wiped)
    assert isinstance(before, int)
    assert before + 8192 == after
    program.do("made.close()")
