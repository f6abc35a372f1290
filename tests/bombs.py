"""Bombs of every kind that a program can make against its own limits, and one run of one of them.

Each runs into the small limits of `limits_of`, or into its timeout; without either it would stop by itself.
"""

from __future__ import annotations

import time

from ringfence import ExecResult, Limits, Sandbox
from ringfence.errors import ExecError, ResourceExhausted

MIB = 1 << 20
_OF_FILES = {
    "disk_bytes": 32 * MIB,
    "inodes": 2000,
}  # what a launcher's host directories do not have
TIMEOUT_S = 1.0  # of what ends in no other way
EMULATED_TIMEOUT_S = 10.0  # without KVM a guest's first Python takes 3 s to start, alone
NEVER_BEGAN = "never began"
_START = """
import ctypes, fcntl, mmap, os, resource, signal, socket, sys, threading, time
os.write(1, b"begun\\n")
libc, kept = ctypes.CDLL(None, use_errno=True), []
def until_refused(make, most=100_000):
    try:
        for count in range(most): kept.append(make(count))
        print("all", most, flush=True)
    except (OSError, MemoryError, RuntimeError) as exc:
        print("refused", exc, flush=True)
def child(work=signal.pause):
    pid = os.fork()
    if not pid:
        try: work()
        finally: os._exit(0)
    return pid
def full(fd, piece=bytes(65536)):
    os.set_blocking(fd, False)
    try:
        while os.write(fd, piece): pass
    except BlockingIOError: pass
def checked(value):
    if value < 0: raise OSError(ctypes.get_errno(), 'refused')
def grown(ends): fcntl.fcntl(ends[1], 1031, 1 << 20); full(ends[1]); return ends
def locked(n): fcntl.flock(os.open(f'/tmp/{n}', os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
def loop(work):
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try: work()
        except OSError: pass
"""
_PYTHON = {
    # processes and threads
    "fork": "loop(os.fork)",
    "fork and wait": "until_refused(lambda n: child()); os.killpg(0, 9)",
    "daemons": "loop(lambda: os.fork() or (os.setsid(), os.fork()))",
    "zombies": "until_refused(lambda n: child(lambda: None)); time.sleep(0.2)",
    "vfork": "loop(lambda: os.posix_spawn('/bin/sleep', ['sleep', '9'], {}))",
    "threads": "until_refused(lambda n: threading.Thread(target=time.sleep, args=(9,)).start()); os._exit(0)",
    # memory
    "malloc": "until_refused(lambda n: b'x' * (1 << 20), 300)",
    "shared mapping": "m = mmap.mmap(-1, 300 << 20)\nfor n in range(0, 300 << 20, 4096): m[n] = 1",
    "memfd": "fd = os.memfd_create(''); until_refused(lambda n: os.write(fd, bytes(1 << 20)), 300)",
    "dev shm": "f = open('/dev/shm/x', 'wb'); until_refused(lambda n: f.write(bytes(1 << 20)), 300)",
    "page tables": "m = mmap.mmap(-1, 64 << 30, flags=0x4022)\nfor n in range(0, 64 << 30, 2 << 20): m[n]",
    "stack": "resource.setrlimit(resource.RLIMIT_STACK, (resource.getrlimit(resource.RLIMIT_STACK)[1],) * 2)\n"
    "threading.stack_size(256 << 20); sys.setrecursionlimit(10**9)\n"
    "def deep(n): return deep([n]) + 1\n"
    "threading.Thread(target=deep, args=(0,)).start()",
    "many small": "until_refused(lambda n: child(lambda: (kept.append(b'x' * (8 << 20)), signal.pause())), 20);"
    " time.sleep(0.5); os.killpg(0, 9)",
    # files
    "open files": "until_refused(lambda n: os.open('/dev/null', 0))",
    "inodes": "until_refused(lambda n: os.close(os.open(f'/tmp/{n}', os.O_CREAT | os.O_WRONLY)))",
    "disk": "f = open('/tmp/x', 'wb', 0); until_refused(lambda n: f.write(bytes(1 << 20)), 300)",
    "sparse": "f = open('/tmp/x', 'wb', 0); until_refused(lambda n: f.truncate(1 << (30 + n)), 40)",
    "deep directories": "until_refused(lambda n: (os.mkdir('d'), os.chdir('d')), 5000)",
    "huge directory": "until_refused(lambda n: os.symlink('x' * 200, f'/tmp/{n}'))",
    # pipes, terminals, output
    "pipes": "until_refused(lambda n: (ends := os.pipe(), full(ends[1])))",
    "large pipes": "until_refused(lambda n: grown(os.pipe()))",
    "terminals": "until_refused(lambda n: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY))",
    "output": "loop(lambda: os.write(1, bytes(65536)))",
    # signals and timers
    "signal all": "os.kill(-1, 9)",
    "stop all": "child(); os.kill(-1, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)",
    "signal the first": "loop(lambda: [os.kill(1, n) for n in (1, 2, 3, 9, 11, 15, 19)] and time.sleep(0.01))",
    "queued signals": "signal.pthread_sigmask(0, range(34, 65))\n"
    "until_refused(lambda n: checked(libc.sigqueue(os.getpid(), 40, 0)))",
    "timers": "t = ctypes.c_void_p()\n"
    "for n in range(100_000):\n if libc.timer_create(1, None, ctypes.byref(t)): print('refused', n); break",
    # sockets
    "sockets": "until_refused(lambda n: socket.socket())",
    "unix backlog": "s = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen(4096)\n"
    "def dial(n): c = socket.socket(socket.AF_UNIX); c.setblocking(False); c.connect('/tmp/s'); return c\n"
    "until_refused(dial)",
    "descriptors in flight": "def send(n):\n"
    " a, b = socket.socketpair(); a.setblocking(False)\n"
    " socket.send_fds(a, [b'x'], [a.fileno(), b.fileno()]); os.dup2(os.open('/dev/null', 0), b.fileno())\n"
    "until_refused(send, 2000)",
    "loopback": "s = socket.create_server(('127.0.0.1', 0))\n"
    "kept.append(c := socket.create_connection(s.getsockname())); kept.append(s.accept()); full(c.fileno())\n"
    "print('refused: the buffers are full')",
    # locks and watches
    "flock": "until_refused(locked)",
    "posix locks": "f = open('/tmp/x', 'wb+')\n"
    "until_refused(lambda n: fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * n), 20_000)",
    "inotify": "until_refused(lambda n: checked(libc.inotify_init()), 200)",
}
BOMBS: dict[str, list[str]] = {
    "shell": ["sh", "-c", "echo begun; f() { f | f & }; f; sleep 1"],
    **{name: ["python3", "-c", _START + code] for name, code in _PYTHON.items()},
}


def limits_of(backend: str) -> Limits:
    """Small ones, as far as the backend has them."""
    of_files = _OF_FILES if backend in ("native", "gvisor", "microvm") else {}
    return Limits(pids=32, memory_bytes=96 * MIB, open_files=128, **of_files)


def timeout_of(backend: str) -> float:
    """Long enough for a bomb to begin."""
    return EMULATED_TIMEOUT_S if backend == "microvm" else TIMEOUT_S


def _run_once_there_is_room(sandbox: Sandbox, argv: list[str]) -> ExecResult:
    """Run a program: what `kill` has ended counts as processes for some milliseconds more."""
    until = time.monotonic() + 5
    while True:
        try:
            return sandbox.exec(argv, timeout_s=60)
        except ExecError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _forks_refused(sandbox: Sandbox) -> int:
    """Count them: PID 1 can answer once the kernel has collected the descriptors in flight of what ended."""
    until = time.monotonic() + 5
    while True:
        try:
            return sandbox.stats().forks_refused or 0
        except ResourceExhausted:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def set_off(sandbox: Sandbox, name: str, timeout_s: float = TIMEOUT_S) -> str:
    """Let one go off, and say how it ended, or that it never began.

    The sandbox runs another program after it, or this raises.
    """
    before = _forks_refused(sandbox)
    bomb = sandbox.start(BOMBS[name], timeout_s=timeout_s, max_output_bytes=4096)
    result = bomb.wait(90)
    bomb.kill()  # what it left
    after = _run_once_there_is_room(sandbox, ["echo", "alive"])
    assert after.stdout == b"alive\n", after
    told = [result.killed_by or ""] if not result.oom_killed else ["out of memory"]
    if _forks_refused(sandbox) > before:
        told.append("processes limit")
    is_refused = "refused" in result.stdout_text or "Error" in result.stderr_text
    if is_refused or "fork" in result.stderr_text or result.exit_code:
        told.append("told the program")
    elif "\nall " in result.stdout_text:
        told.append("all made: below every limit of this backend")
    if result.truncated:
        told.append("output truncated")
    if not result.stdout.startswith(b"begun\n"):
        told.append(NEVER_BEGAN)
    return ", ".join(filter(None, told)) or f"exit {result.exit_code}, signal {result.signal}"
