"""The landlock backend: what it refuses and ends without namespaces, and hosts that refuse these."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ringfence import Mount, Sandbox, SandboxSpec
from ringfence.backends.command import place
from ringfence.backends.landlock import stopping
from ringfence.backends.landlock.backend import LandlockBackend
from ringfence.backends.landlock.sandbox import LandlockSandbox
from ringfence.errors import (
    BackendUnavailable,
    FileError,
    InvalidRequest,
    IsolationError,
    RingfenceError,
    Unsupported,
)
from ringfence.guest.without_namespaces import landlocked
from ringfence.guest.without_namespaces.landlocked import members, signal_members
from ringfence.model.execs.exec import ExecResult
from ringfence.policy.seccomp import Condition, Rule, SeccompPolicy, compile_filter
from ringfence.sandbox.process import Process
from tests.features import require
from tests.native.outside import open_count
from tests.native.service_there import EVERYTHING
from tests.strangers import let_others_in

pytestmark = pytest.mark.full

PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module", autouse=True)
def _landlock() -> None:
    require("landlock")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    backend = LandlockBackend()
    with Sandbox.create(backend=backend) as made:
        yield made
    backend.close()


def inside(sandbox: Sandbox, code: str) -> ExecResult:
    return sandbox.exec([PYTHON, "-c", code], timeout_s=30)


def of(sandbox: Sandbox) -> LandlockSandbox:
    inner = sandbox._inner
    assert isinstance(inner, LandlockSandbox)
    return inner


def left(sandbox: Sandbox) -> list[int]:
    """Processes of the sandbox, as the host finds them: the agent among them."""
    return members(of(sandbox)._tag_base)


def none_is_left(sandbox: Sandbox) -> bool:
    deadline = time.monotonic() + 20
    while left(sandbox) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left(sandbox)


DAEMON = (
    "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
    "  print('up', flush=True); time.sleep(600)\n os._exit(0)\ntime.sleep(600)"
)


def start_daemon(sandbox: Sandbox) -> Process:
    process = sandbox.start([PYTHON, "-c", DAEMON])
    said = b""
    while b"up" not in said:
        said += process.stdout.read()
    return process


def test_an_exec_is_killed_with_its_daemons(sandbox: Sandbox) -> None:
    process = start_daemon(sandbox)
    before = len(left(sandbox))
    process.kill()
    process.wait(timeout_s=60)

    assert before >= 3
    assert 1 == len(left(sandbox))  # the agent


@pytest.mark.parametrize("victims", [("guardian",), ("agent",), ("guardian", "agent")])
def test_a_killed_process_of_ours_leaves_nothing(
    sandbox: Sandbox, victims: tuple[str, ...]
) -> None:
    start_daemon(sandbox)
    pids = {"guardian": of(sandbox)._launcher.pid, "agent": of(sandbox).pid}
    for each in victims:
        os.kill(pids[each], signal.SIGSTOP)
    for each in victims:
        os.kill(pids[each], signal.SIGKILL)
    if len(victims) > 1:
        sandbox.terminate()

    assert none_is_left(sandbox)


RUNS = (
    "import time\nfrom ringfence import Sandbox\n"
    "sandbox = Sandbox.create(backend='landlock')\n"
    f"process = sandbox.start([{PYTHON!r}, '-c', {DAEMON!r}])\n"
    "said = b''\n"
    "while b'up' not in said: said += process.stdout.read()\n"
    "print(sandbox._inner._tag_base, sandbox._inner._launcher.pid, flush=True)\ntime.sleep(600)\n"
)


@pytest.mark.parametrize(
    "also", ["", "the guardian", *(f"the guardian {n} ms later" for n in range(4))]
)
def test_a_killed_caller_leaves_nothing(also: str) -> None:
    """Also with the guardian: then the agent ends everybody, whatever the guardian has begun to end."""
    with subprocess.Popen([sys.executable, "-c", RUNS], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        base, guardian = map(int, caller.stdout.readline().split())
        before = len(members(base))
        if also == "the guardian":
            os.kill(guardian, signal.SIGSTOP)
        caller.kill()
        if also:
            time.sleep(int(also.split()[2]) / 1000 if "later" in also else 0)
            with suppress(ProcessLookupError):
                os.kill(guardian, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while members(base) and time.monotonic() < deadline:
        time.sleep(0.01)

    found = members(base)
    signal_members(found, base, signal.SIGKILL)
    assert before >= 3
    assert not found


def test_what_a_user_has_once_is_not_all_the_sandboxs(sandbox: Sandbox) -> None:
    """Without a user of its own it takes the caller's: memory locks, queues, pending signals."""
    code = (
        "import ctypes, os, resource as r\n"
        "kinds = r.RLIMIT_MEMLOCK, r.RLIMIT_MSGQUEUE, r.RLIMIT_SIGPENDING\n"
        "print(*(r.getrlimit(each)[1] for each in kinds))\n"
        "libc, timers = ctypes.CDLL(None, use_errno=True), 0\n"
        "while timers < 5000 and not libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())): timers += 1\n"
        "print(timers)"
    )
    limits, timers = sandbox.exec([PYTHON, "-c", code]).text.splitlines()
    locked, queues, signals = (
        (2 << 20, 200 << 10, 1024) if os.geteuid() else (8 << 20, 800 << 10, 4096)
    )

    assert [locked, queues, signals] == [int(each) for each in limits.split()]
    assert 0 < int(timers) <= signals


def test_a_killed_starter_ends_no_sandbox_and_is_replaced() -> None:
    backend = LandlockBackend()
    with Sandbox.create(backend=backend) as first:
        starter = backend._starter._launched
        assert starter is not None
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait()
        with Sandbox.create(backend=backend) as second:
            ran = [each.exec(["echo", "hi"]).text for each in (first, second)]
            guardians = [of(each)._launcher.pid for each in (first, second)]
            children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
            own = {int(pid) for each in children for pid in each.read_text().split()}
    backend.close()

    assert ["hi\n", "hi\n"] == ran
    assert own.issuperset(guardians)  # whom this process can wait for
    assert not any(Path(f"/proc/{pid}").exists() for pid in guardians)


def test_files_of_the_host_are_out_of_reach(sandbox: Sandbox, tmp_path: Path) -> None:
    """Read, written or changed: neither by a command nor by the files API through a link."""
    os.chmod(tmp_path, 0o755)
    secret = tmp_path / "secret"
    secret.write_text("canary")
    os.chmod(secret, 0o666)
    was = os.stat(secret)
    sandbox.exec(["ln", "-s", str(secret), "link"])
    read = sandbox.exec(["cat", str(secret)])
    sandbox.exec(["sh", "-c", f"echo x > {secret}; truncate -s0 {secret}; rm {secret}"])
    sandbox.exec(["sh", "-c", f"chmod 777 {secret}; touch -d yesterday {secret}; ln {secret} own"])
    with pytest.raises(FileError):
        sandbox.files.read("link")
    with pytest.raises(FileError):
        sandbox.files.write("link", b"x")
    now = os.stat(secret)

    assert not read.ok
    assert b"canary" == secret.read_bytes()
    assert (was.st_mode, was.st_mtime_ns) == (now.st_mode, now.st_mtime_ns)
    assert 1 == now.st_nlink


MOVES = """
import os
os.mkdir('a'); os.mkdir('b'); open('a/f', 'w').close(); os.mkdir('a/d')
os.rename('a/f', 'b/f'); os.rename('a/d', 'b/d'); os.link('b/f', 'a/g')
print(os.stat('a/g').st_nlink, sorted(os.listdir('b')))
for other in ('/etc/passwd', '/usr/bin/env'):
    for do in (os.link, os.rename):
        try: do(other, 'a/out')
        except OSError: continue
        print(do.__name__, other)
"""


def test_files_move_between_own_directories_only(sandbox: Sandbox) -> None:
    assert "2 ['d', 'f']\n" == inside(sandbox, MOVES).text


COUNTS = "n=0; while :; do n=$((n+1)); echo $n >> counted; done"
TREE = """
mkdir -p d/e; echo first > d/f; chmod 750 d; ln d/f linked; ln -s d/f sym; mkfifo d/p
echo t > $TMPDIR/t
"""


def test_a_snapshot_copies_its_own_directories_at_one_moment(tmp_path: Path) -> None:
    """Names are those of other backends, so that snapshots compare; programs go on afterwards."""
    with closing(LandlockBackend(state_dir=str(tmp_path / "saved"))) as backend:
        with Sandbox.create(backend=backend) as made:
            assert made.shell(TREE).ok
            counts = made.start(["sh", "-c", COUNTS])
            while not made.files.exists("counted"):
                pass
            saved = made.snapshot()
            made.files.write("d/f", b"second")
            changed = {each.path: each.change for each in made.changes(saved.id).items}
            made.suspend()
            still = made.snapshot()
            made.resume()
            counted = len(made.files.read("counted"))
            while len(made.files.read("counted")) == counted:
                pass
            counts.kill()
        with Sandbox.restore(saved.id, backend=backend) as restored:
            told = restored.shell("cat linked sym $TMPDIR/t; stat -c '%a %h %F' d d/f d/p")
        for each in (saved, still):
            backend.delete_snapshot(each.id)

    assert "changed" == changed["/home/sandbox/d/f"]
    assert [
        "first",
        "first",
        "t",
        "750 3 directory",
        "644 2 regular file",
        "644 1 fifo",
    ] == told.text.splitlines()


def test_programs_go_on_after_a_snapshot_that_failed(tmp_path: Path) -> None:
    """Nothing can be kept: a file is where the directory for it is to be."""
    (tmp_path / "saved").touch()
    backend = LandlockBackend(state_dir=str(tmp_path / "saved"))
    with closing(backend), Sandbox.create(backend=backend) as made:
        counts = made.start(["sh", "-c", COUNTS])
        while not made.files.exists("counted"):
            pass
        with pytest.raises((RingfenceError, OSError)):
            made.snapshot()
        counted = len(made.files.read("counted"))
        while len(made.files.read("counted")) == counted:
            pass
        counts.kill()
        assert 9 == counts.wait().signal


@pytest.mark.root
def test_one_that_cannot_be_made_gives_everything_back(tmp_path: Path) -> None:
    """Its own directory, cgroups and ids, of which there are so many: where it is, a path gets too long."""
    too_long = Mount("/tmp" + f"/{'x' * 200}" * 20 + "/" + "y" * 65, "/usr/share")
    with closing(LandlockBackend()) as backend, Sandbox.create(backend=backend) as control:
        before = held_by(backend)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="File name too long"):
                Sandbox.create(backend=backend, mounts=[too_long])
        after = held_by(backend)
        assert control.exec(["true"]).ok

    assert before == after
    assert before[0]


def held_by(backend: LandlockBackend) -> tuple[list[int], list[str], list[str]]:
    """Ids that are free, directories of sandboxes, and their cgroups."""
    bases = set(backend.layout().bases.values())
    cgroups = [name for base in bases for name in os.listdir(base) if name.startswith("ringfence.")]
    return sorted(backend._ids()._free), os.listdir(place.base()), sorted(cgroups)


def test_a_fork_has_the_files(sandbox: Sandbox) -> None:
    sandbox.files.write("own", b"parent")
    (fork,) = sandbox.fork(1)
    with fork:
        fork.files.write("own", b"child")

    assert b"parent" == sandbox.files.read("own")


def test_processes_of_the_host_are_out_of_reach(sandbox: Sandbox) -> None:
    """Signals, limits, priorities and memory: each works on a child of one's own."""
    code = (
        "import os, resource, signal, subprocess, sys\n"
        "def worked(do):\n try: do(); return 1\n except (OSError, ValueError): return 0\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pid = {pid}\n"
        "print(worked(lambda: os.kill(child.pid, 0)), worked(lambda: os.kill(pid, 0)),\n"
        " worked(lambda: os.kill(os.getppid(), 0)),\n"
        " worked(lambda: resource.prlimit(pid, resource.RLIMIT_CPU)),\n"
        " worked(lambda: os.setpriority(0, pid, 19)), worked(lambda: os.sched_setaffinity(pid, [0])),\n"
        " worked(lambda: os.pidfd_open(pid)), worked(lambda: open(f'/proc/{{pid}}/environ').read()),\n"
        " worked(lambda: open(f'/proc/{{os.getppid()}}/environ').read()),\n"
        " worked(lambda: open(f'/proc/{{pid}}/mem', 'rb')))\n"
        "child.kill()\n"
    )
    with subprocess.Popen(["sleep", "60"]) as other:
        told = inside(sandbox, code.format(pid=other.pid))
        control = subprocess.run(
            [PYTHON, "-c", code.format(pid=other.pid)], capture_output=True, text=True, check=True
        )
        other.kill()

    assert "1 0 0 0 0 0 0 0 0 0" == told.text.strip()
    assert control.stdout.split()[:8] == ["1"] * 8


TERMINAL = """
import fcntl, os, sys, termios
def number(do):
    try: do()
    except OSError as exc: return exc.errno
    return 0
print(os.isatty(0), os.getpgrp() == os.tcgetpgrp(0), *os.get_terminal_size(),
 number(lambda: open('/dev/tty', 'r+b', buffering=0).write(b'told\\n')),
 number(lambda: fcntl.ioctl(0, termios.TIOCSTI, b'x')),
 *(number(lambda: os.open(path, os.O_RDWR | os.O_NOCTTY)) for path in sys.argv[1:]))
"""


def test_a_terminal_is_the_sandboxes_own() -> None:
    """Of all terminals of its user, and of new ones, it can open its own alone, by /dev/tty."""
    master, slave = os.openpty()
    paths = [os.ttyname(slave), "/dev/ptmx", "/dev/pts/ptmx"]
    control = os.open(paths[0], os.O_RDWR | os.O_NOCTTY)
    with Sandbox.create(backend="landlock") as sandbox:
        process = sandbox.start([PYTHON, "-c", TERMINAL, *paths], pty=(24, 80))
        told = b""
        while piece := process.stdout.read():
            told += piece
        without = sandbox.exec(["sh", "-c", "echo x > /dev/tty"])
    for fd in (master, slave, control):
        os.close(fd)

    first, second = told.decode().splitlines()
    assert ("told", "True True 80 24 0 25 13 13 13") == (first, second)
    assert not without.ok


CALLS = (
    "import ctypes, os, socket\n"
    "libc = ctypes.CDLL(None)\n"
    "def worked(do):\n try: do(); return 1\n except OSError: return 0\n"
    "segment = libc.shmget(0, 4096, 0o1600)\n"
    "print(worked(lambda: socket.socket(socket.AF_INET, 2)), worked(lambda: socket.socket(16, 3, 0)),\n"
    " worked(lambda: socket.socketpair()), int(segment >= 0),\n"
    " int(libc.inotify_init() >= 0))\n"
    "libc.shmctl(segment, 0, 0)\n"
)


def test_kernel_objects_of_the_host_are_out_of_reach(sandbox: Sandbox) -> None:
    control = subprocess.run([PYTHON, "-c", CALLS], capture_output=True, text=True, check=True)

    assert "0 0 1 1 0" == inside(sandbox, CALLS).text.strip()  # the segment is its own
    assert "1 1 1 1 1" == control.stdout.strip()


SEGMENTS = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def tell(result): return result if result >= 0 else -ctypes.get_errno()
def attached(id): return libc.shmat(id, None, 0)
CREAT, EXCL = 0o1000, 0o2000
theirs, key = int(sys.argv[1]), int(sys.argv[2])
buffer = ctypes.create_string_buffer(200)
id = libc.shmget(key, 4096, CREAT | EXCL | 0o600)
ctypes.memset(attached(id), 65, 4)
pid = os.fork()
if pid == 0: os._exit(ctypes.string_at(attached(libc.shmget(key, 0, 0)), 1)[0])
read = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
told = [id >= 0, read, tell(libc.shmget(key, 1, CREAT | EXCL)), tell(libc.shmctl(id, 2, buffer)),
    tell(libc.shmget(key, 1 << 20, 0)), tell(libc.shmctl(id, 0, None)), tell(libc.shmctl(id, 2, buffer)),
    tell(libc.shmget(key, 0, 0)), tell(libc.shmget(0, 65 << 20, CREAT | 0o600)),
    attached(theirs) == ctypes.c_void_p(-1).value, tell(libc.shmctl(theirs, 2, buffer)),
    tell(libc.shmctl(theirs, 0, None)), tell(libc.shmctl(0, 13, buffer)), tell(libc.shmctl(0, 14, buffer))]
print(json.dumps(told))
"""


def test_shared_memory_of_system_v_is_the_sandboxes_own(sandbox: Sandbox) -> None:
    """The agent has made it, and it goes with the sandbox; a segment of the host is no segment inside."""
    libc = ctypes.CDLL(None)
    key = os.getpid() << 8
    theirs = libc.shmget(key, 4096, 0o1666)
    try:
        ran = sandbox.exec([PYTHON, "-c", SEGMENTS, str(theirs), str(key)])
        there = libc.shmget(key, 0, 0)
    finally:
        libc.shmctl(theirs, 0, None)
    sandbox.exec([PYTHON, "-c", "import ctypes; ctypes.CDLL(None).shmget(7, 4096, 0o1600)"])
    sandbox.terminate()

    einval, eexist, enoent, enospc = (-number for number in (22, 17, 2, 28))
    own = [True, 65, eexist, 0, einval, 0, einval, enoent, enospc]
    assert [*own, True, einval, einval, einval, einval] == json.loads(ran.text), ran
    assert theirs == there
    assert not [line for line in _segments() if line[0] == 7]


TOGETHER = """
import ctypes
libc, ids = ctypes.CDLL(None, use_errno=True), []
def made(size):
    id = libc.shmget(0, size, 0o600)
    if id < 0: return -ctypes.get_errno()
    ids.append(id)
    return 0
def removed(id): return libc.shmctl(id, 0, None)
print(made(40 << 20), made(24 << 20), made(1), removed(ids.pop(0)), made(41 << 20), made(40 << 20))
for id in ids: removed(id)
print(sum(made(1) == 0 for _ in range(100)), made(1), removed(ids.pop()), made(1), made(1))
"""


def test_shared_memory_of_system_v_is_bounded_as_a_whole(sandbox: Sandbox) -> None:
    """64 MiB in 64 segments, as it counts as no program's memory. What is removed makes room."""
    told = inside(sandbox, TOGETHER).stdout_text.splitlines()

    assert ["0 0 -28 0 -28 0", "64 -28 0 0 -28"] == told


def _segments() -> list[list[int]]:
    """Key and id of each segment of this host."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return [[int(word) for word in line.split()[:2]] for line in lines]


ABSTRACT = """
import errno, socket, sys
name = "\\0" + sys.argv[1]
for call in (lambda s: s.connect(name), lambda s: s.bind(name + "-own"), lambda s: s.bind("")):
    with socket.socket(socket.AF_UNIX) as sock:
        try: call(sock); print(0)
        except OSError as exc: print(exc.errno)
"""


def test_abstract_sockets_of_the_host_are_out_of_reach(sandbox: Sandbox) -> None:
    """Neither connected to, nor a name taken that programs of the host may look for."""
    name = f"ringfence-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        control = subprocess.run(
            [PYTHON, "-c", ABSTRACT, name], capture_output=True, text=True, check=True
        )
        ran = sandbox.exec([PYTHON, "-c", ABSTRACT, name])

    assert "0\n0\n0\n" == control.stdout
    refused, taken, chosen = ran.text.split()
    assert refused in ("1", "13", "111"), ran
    assert ("13", "0") == (taken, chosen)


def test_no_name_of_a_socket_forges_a_line_about_others(sandbox: Sandbox, tmp_path: Path) -> None:
    """/proc/net/unix, in which the agent looks types up, shows a newline of a name as it is."""
    name = "x\n0: 2 0 10000 0002 01 123456789"
    code = f"import socket\nwith socket.socket(socket.AF_UNIX) as s: s.bind({name!r})"

    subprocess.run([PYTHON, "-c", code], cwd=tmp_path, check=True)
    ran = sandbox.exec([PYTHON, "-c", code])

    assert "PermissionError" in ran.stderr_text, ran


def test_what_is_missing_is_reported(sandbox: Sandbox) -> None:
    status = {each.name: each.status for each in sandbox.protections()}

    assert {"missing"} == {status[n] for n in ("namespaces", "host_identity", "network")}
    assert {"enforced"} == {status[n] for n in ("seccomp", "landlock", "no_new_privs")}
    with pytest.raises(Unsupported):
        Sandbox.create(backend="landlock", network="unrestricted")


# -- hosts that refuse namespaces -------------------------------------------------------------------

_NEW_NAMESPACES = 0x7E020000  # include/uapi/linux/sched.h


def refusing_filter() -> bytes:
    """EPERM for every namespace, as a container's filter and AppArmor say."""
    flags = Condition(0, 32, _NEW_NAMESPACES, (0,), negated=True)
    rules = (
        Rule(("clone3",), "ENOSYS"),
        Rule(("clone", "unshare"), "EPERM", (flags,)),
        Rule(("setns",), "EPERM"),
    )
    return compile_filter(policy=SeccompPolicy("allow", "allow", (), rules))


BEHIND_THE_FILTER = (
    "import os, sys; from ringfence.linux import privileges, seccomp\n"
    "privileges.set_no_new_privs()\n"
    "seccomp.install_filter(bytes.fromhex(sys.argv[1]))\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'ringfence', 'run', *sys.argv[2:]])"
)


SERVICE = str(Path(__file__).with_name("service_there.py"))


@pytest.mark.full
def test_every_part_of_the_service_works_where_namespaces_are_refused(tmp_path: Path) -> None:
    """Server, contexts, sessions, pool, files, terminals, snapshots, kill -9 and restart."""
    command = BEHIND_THE_FILTER.replace("'-m', 'ringfence', 'run', ", "")
    assert EVERYTHING == _printed([command, refusing_filter().hex(), SERVICE, str(tmp_path)])


@pytest.mark.full
def test_every_part_of_the_service_works_without_user_namespaces(tmp_path: Path) -> None:
    """As an ordinary user with `user.max_user_namespaces=0`, of a namespace of the test's own."""
    require("user namespaces")
    if 0 == os.geteuid():
        pytest.skip("it is about an ordinary user")
    command = NONE_ALLOWED.replace("'-m', 'ringfence', 'run', ", "")
    assert EVERYTHING == _printed([command, SERVICE, str(tmp_path)])


def _printed(words: list[str]) -> object:
    ran = subprocess.run(
        [sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True, check=True, timeout=200
    )
    return json.loads(ran.stdout)


def run_refused(*options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEHIND_THE_FILTER, refusing_filter().hex(), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(each) for each in sys.path),
        },
    )


def test_a_refusal_names_its_cause_and_the_way_on() -> None:
    refused = run_refused("--", "sh", "-c", "echo hi")

    assert (125, "") == (refused.returncode, refused.stdout)
    assert "a system-call filter around this process" in refused.stderr
    assert "--security-opt seccomp=unconfined" in refused.stderr
    assert "--anywhere" in refused.stderr


def test_anywhere_works_where_namespaces_are_refused() -> None:
    ran = run_refused("--anywhere", "--", "sh", "-c", "echo hi")

    assert (0, "hi\n") == (ran.returncode, ran.stdout)
    assert "without namespaces" in ran.stderr


def test_anywhere_prefers_namespaces() -> None:
    require("user namespaces")
    argv = [sys.executable, "-m", "ringfence", "run", "--anywhere", "--", "pwd"]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)

    assert "/home/sandbox\n" == ran.stdout


NO_NAMESPACES_LEFT = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'


@pytest.mark.full
def test_without_user_namespaces_left() -> None:
    require("user namespaces")
    fence = ["unshare", "-Ur", "sh", "-c", NO_NAMESPACES_LEFT, "sh"]
    argv = [*fence, sys.executable, "-m", "ringfence", "run"]
    refused, ran = (
        subprocess.run(
            [*argv, *option, "--", "sh", "-c", "echo hi"],
            capture_output=True,
            text=True,
            check=False,
        )
        for option in ([], ["--anywhere"])
    )

    assert "user.max_user_namespaces is 0: sysctl -w" in refused.stderr
    assert (125, 0, "hi\n") == (refused.returncode, ran.returncode, ran.stdout)


NONE_ALLOWED = (
    "import ctypes, os, sys\nuid, gid = os.getuid(), os.getgid()\n"
    "assert 0 == ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER\n"
    "for name, value in (('/proc/self/setgroups', 'deny'), ('/proc/self/uid_map', f'{uid} {uid} 1'),\n"
    "                    ('/proc/self/gid_map', f'{gid} {gid} 1'),\n"
    "                    ('/proc/sys/user/max_user_namespaces', '0')):\n"
    "    with open(name, 'w') as file: file.write(value)\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'ringfence', 'run', *sys.argv[1:]])"
)


@pytest.mark.parametrize("option", ["--anywhere", "--allow-degraded=namespaces"])
def test_a_user_who_may_have_no_namespaces_goes_without(option: str) -> None:
    """`user.max_user_namespaces=0`, of a namespace of the test's own."""
    require("user namespaces")
    if 0 == os.geteuid():
        pytest.skip("it is about an ordinary user")
    outcomes = []
    for options in ((), (option,)):
        ran = subprocess.run(
            [sys.executable, "-c", NONE_ALLOWED, *options, "--", "sh", "-c", "echo hi"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        outcomes.append((ran.returncode, ran.stdout))
        assert "namespaces" in ran.stderr

    assert [(125, ""), (0, "hi\n")] == outcomes


# -- what it gives back, and whom it takes for its own ---------------------------------------------


@pytest.mark.parametrize("step", ["start", "answer"])
def test_a_start_that_fails_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its directory, cgroups, ids, addresses and descriptors, wherever it fails."""
    with closing(LandlockBackend()) as backend, Sandbox.create(backend=backend) as control:
        assert control.exec(["true"]).ok
        before = (*held_by(backend), len(os.listdir("/proc/self/fd")))

        def fail(*_: object) -> None:
            raise OSError(errno.EMFILE, "no descriptor is left")

        with monkeypatch.context() as patched:
            if step == "start":
                patched.setattr(backend._starter, "start", fail)
            else:
                patched.setattr("ringfence.backends.landlock.backend.answer", fail)
            for _ in range(2):
                with pytest.raises((OSError, RingfenceError)):
                    Sandbox.create(backend=backend)
        assert before == (*held_by(backend), len(os.listdir("/proc/self/fd")))
        with Sandbox.create(backend=backend) as again:
            assert again.exec(["true"]).ok


@pytest.mark.parametrize(
    ("abi", "says"), [(0, "no Landlock"), (2, "does not judge truncation"), (3, "")]
)
def test_a_landlock_that_does_not_judge_truncation_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, abi: int, says: str
) -> None:
    monkeypatch.setattr("ringfence.backends.landlock.backend.abi", lambda: abi)
    with closing(LandlockBackend()) as backend:
        if not says:
            backend.check(SandboxSpec())
            return
        with pytest.raises(BackendUnavailable, match=says):
            backend.check(SandboxSpec())


@pytest.mark.root
def test_the_agent_has_no_groups_and_no_descriptors_of_mounts(tmp_path: Path) -> None:
    """Nor has the starter anything of a sandbox that it has started."""
    let_others_in(tmp_path)
    groups = os.getgroups()
    os.setgroups([*groups, 4711])
    try:
        with closing(LandlockBackend()) as backend:
            with Sandbox.create(backend=backend):
                launched = backend._starter._launched
                assert launched is not None
                starter = f"/proc/{launched.pid}"
                before = open_count(launched.pid)
                mounts = [Mount(f"/shown/{i}", str(tmp_path)) for i in range(3)]
                with Sandbox.create(backend=backend, mounts=mounts) as second:
                    agent = f"/proc/{of(second).pid}"
                    after = open_count(launched.pid)
                    opened = {
                        os.path.realpath(f"{agent}/fd/{fd}") for fd in os.listdir(f"{agent}/fd")
                    }
                    status = Path(f"{agent}/status").read_text()
            control = Path(f"{starter}/status").read_text()
    finally:
        os.setgroups(groups)

    assert before == after
    assert str(tmp_path) not in opened
    assert "4711" in control.partition("\nGroups:")[2].splitlines()[0]
    assert "" == status.partition("\nGroups:")[2].splitlines()[0].strip()


@pytest.fixture
def tagged() -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Begins processes with a tag, as those of a sandbox have; 0: none."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(tag: int) -> subprocess.Popen[bytes]:
        code = f"import os, resource\nif tag := {tag}: resource.setrlimit(resource.RLIMIT_RTTIME, (tag, tag))"
        code += "\nprint(flush=True); os.execvp('sleep', ['sleep', '600'])"
        begun.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        assert begun[-1].stdout is not None
        begun[-1].stdout.readline()
        return begun[-1]

    yield begin
    for each in begun:
        each.kill()
        each.wait()
        if each.stdout is not None:
            each.stdout.close()


BASE = (1 << 61) + 12345 * landlocked.TAGS


@pytest.mark.anyone
def test_only_processes_with_a_tag_of_the_sandbox_are_its_own(
    tagged: Callable[[int], subprocess.Popen[bytes]],
) -> None:
    """Both bounds; and a number that is another process's by then gets no signal."""
    inside = [tagged(BASE).pid, tagged(BASE - landlocked.TAGS + 1).pid]
    others = [tagged(tag).pid for tag in (BASE + 1, BASE - landlocked.TAGS, 0)]

    assert sorted(inside) == sorted(members(BASE))
    assert 2 == landlocked.count(BASE)
    signal_members([*others, *inside], BASE, signal.SIGSTOP)
    for pid in inside:
        assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT) is not None
    assert not {_state(pid) for pid in others} & {"T", "t"}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.anyone
def test_programs_that_do_not_stand_still_are_let_go_on(
    monkeypatch: pytest.MonkeyPatch, tagged: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    program = tagged(BASE)
    tell = stopping._tell

    def one_runs_on(base: int, agent: int) -> tuple[set[int], set[int]]:
        told, _running = tell(base, agent)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
        return told, {program.pid}

    monkeypatch.setattr(stopping, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(stopping, "_tell", one_runs_on)
    with pytest.raises(IsolationError, match="1 programs inside do not stop"):
        stopping.stop(BASE, 0)

    assert os.waitid(os.P_PID, program.pid, os.WCONTINUED) is not None
