"""Contexts and processes with children: the whole tree goes on in each copy, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from ringfence.errors import Unsupported
from ringfence.linux import libc
from tests.fork.test_live import filters_of_threads, memory_of, native, open_files, status
from tests.posture.reading import Process, processes_in

pytestmark = pytest.mark.skipif(
    libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"
)
_BEGIN = "import multiprocessing, os, signal, subprocess, threading, time\nPIPE = -1\n"
_WORKER = """
def work(end):
    for _ in range(3): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    while True: end.send(end.recv() * 2 + threading.active_count())
ours, theirs = multiprocessing.Pipe()
child = multiprocessing.get_context('fork').Process(target=work, args=(theirs,), daemon=True)
child.start(); ours.send(1); ours.recv()
"""
_FILE = """
file = open('/tmp/file', 'w+b', buffering=0); file.write(b'abcdef'); file.seek(1)
read, write = os.pipe(); answer, told = os.pipe()
child = os.fork()
if not child:
    while os.read(read, 1): os.write(told, os.read(file.fileno(), 1))
    os._exit(0)
"""
_DIES_WITH_PARENT = """
import ctypes
bind = lambda: ctypes.CDLL(None).prctl(1, 9)
child = subprocess.Popen(['sh', '-c', 'sleep 1000 & echo $! $$; exec cat'], stdout=PIPE, stdin=PIPE,
                         preexec_fn=bind)
child.stdout.readline()
"""

_AT_THE_END = """
code = '\\n'.join(['import ctypes, sys; c, n = ctypes.CDLL(None), ctypes.c_int()',
    'c.prctl(1, {}); print(flush=True)',
    'for _ in sys.stdin: c.prctl(2, ctypes.byref(n)); print(n.value, flush=True)'])
children = [subprocess.Popen(['python3', '-c', code.format(each)], stdin=PIPE, stdout=PIPE) for each in (10, 0)]
[each.stdout.readline() for each in children] and None
"""

_SHARED = """
import mmap
shared, value = mmap.mmap(-1, 20480), multiprocessing.Value('i', 4); shared[5000], shared[20479] = 6, 5
child = os.fork()
if not child:
    while shared[1] != 7: time.sleep(0.001)
    shared[2] = 7; time.sleep(1000)
"""
_NAMED = """
import mmap
from multiprocessing.shared_memory import SharedMemory as named
file = open('/tmp/mapped', 'w+b'); file.truncate(8192)
mapped = mmap.mmap(file.fileno(), 8192); mapped[5000] = 7
shared = named(create=True, size=5000); shared.buf[4000] = 3
"""
_REMOVED = """
import tempfile
one = tempfile.TemporaryFile(buffering=0); one.write(b'hello'); one.seek(2)
two = open(f'/proc/self/fd/{one.fileno()}', 'rb')
three = open('/tmp/three', 'w+'); os.remove('/tmp/three'); three.write('written'); three.flush()
four = os.open('/tmp/four', os.O_WRONLY | os.O_CREAT | os.O_APPEND); os.write(four, b'first')
own = lambda fd: open(f'/proc/self/fd/{fd}', 'rb').read()
os.remove('/tmp/four')
"""

# What a context begins, what is asked in it and in each copy, and the answer.
_FIRST = ("pipes", "sessions and groups", "shared memory")
"""In the first gear."""
_TREES = {
    "pipes": (
        "child = subprocess.Popen(['cat'], stdin=PIPE, stdout=PIPE)",
        (
            "child.stdin.write(b'line\\n'); child.stdin.flush(); line = child.stdout.readline()\n"
            "line, child.poll(), child.communicate(), child.returncode"
        ),
        "(b'line\\n', None, (b'', None), 0)",
    ),
    "what is in a pipe": (
        (
            "child = subprocess.Popen(['sleep', '1000'], stdin=PIPE);"
            " child.stdin.write(b'kept'); child.stdin.flush()"
        ),
        "os.read(os.open(f'/proc/{child.pid}/fd/0', os.O_RDONLY), 9)",
        "b'kept'",
    ),
    "children that have ended": (
        (
            "one = subprocess.Popen(['sh', '-c', 'echo out; exit 7'], stdout=PIPE)\n"
            "two = subprocess.Popen(['sleep', '1000']); two.kill()\n"
            "for each in (one, two): os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)\n"
            "ended = []; signal.signal(signal.SIGCHLD, lambda *_: ended.append(1)) and None"
        ),
        "one.stdout.read(), one.wait(), two.wait(), ended",
        "(b'out\\n', 7, -9, [])",
    ),
    "grandchildren": (
        (
            "child = subprocess.Popen(['sh', '-c', 'sleep 1000 & sleep 1001 & echo; wait'], stdout=PIPE)\n"
            "child.stdout.read(1) and None"
        ),
        (
            "own = open(f'/proc/{child.pid}/task/{child.pid}/children').read().split()\n"
            "for each in own: os.kill(int(each), 9)\n"
            "len(own), child.wait()"
        ),
        "(2, 0)",
    ),
    "sessions and groups": (
        (
            "leader = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
            "group = subprocess.Popen(['sh', '-c', 'sleep 1000 & wait'], process_group=0)\n"
            "member = subprocess.Popen(['sleep', '1000'], process_group=group.pid)"
        ),
        (
            "own = os.getsid(leader.pid) == leader.pid, os.getpgid(member.pid) == group.pid\n"
            "os.killpg(group.pid, 9); os.killpg(leader.pid, 15)\n"
            "*own, group.wait(), member.wait(), leader.wait()"
        ),
        "(True, True, -9, -9, -15)",
    ),
    "a job of pipes": (
        "child = subprocess.Popen(['bash', '-c', 'set -m; cat | cat | cat'], stdin=PIPE, stdout=PIPE)",
        "child.communicate(b'through')[0], child.returncode",
        "(b'through', 0)",
    ),
    "threads in a child, and a pair of sockets": (
        _WORKER,
        "ours.send(19); ours.recv(), child.is_alive()",
        "(42, True)",
    ),
    "one position in a file": (
        _FILE,
        "os.write(write, b'x'); os.read(answer, 1), file.tell()",
        "(b'b', 2)",
    ),
    "a set of events of two processes": (
        (
            "import select; event, poll = os.eventfd(0), select.epoll(); poll.register(event, 1)\n"
            "child = os.fork()\nif not child: time.sleep(1000)"
        ),
        "before = poll.poll(0); os.eventfd_write(event, 1); before, poll.poll(0) == [(event, 1)]",
        "([], True)",
    ),
    "a child that ends with its parent": (
        _DIES_WITH_PARENT,
        (
            "found = open(f'/proc/{child.pid}/task/{child.pid}/children')\n"
            "child.stdin.write(b'a\\n'); child.stdin.flush(); line = child.stdout.readline()\n"
            "line, len(found.read().split())"
        ),
        "(b'a\\n', 1)",
    ),
    "the signal at the end of its parent": (
        _AT_THE_END,
        (
            "[(each.stdin.write(b'\\n'), each.stdin.flush(), each.stdout.readline())[2] for each in children]"
        ),
        "[b'10\\n', b'0\\n']",
    ),
    "shared memory": (
        _SHARED,
        (
            "shared[1] = 7\nfor _ in range(2000):\n  if shared[2] == 7: break\n  time.sleep(0.01)\n"
            "[shared[at] for at in (1, 2, 5000, 20479)], value.value"
        ),
        "([7, 7, 6, 5], 4)",
    ),
    "shared memory with names": (
        _NAMED,
        (
            "mapped[5000] += 1; shared.buf[4001] = 1; again = named(shared.name)\n"
            "open('/tmp/mapped', 'rb').read()[5000], again.buf[4000], again.buf[4001]"
        ),
        "(8, 3, 1)",
    ),
    "a pool of new interpreters": (
        (
            "import concurrent.futures, operator; context = multiprocessing.get_context('spawn')\n"
            "pool = concurrent.futures.ProcessPoolExecutor(2, mp_context=context)\n"
            "list(pool.map(operator.neg, [1, -2])) and None"
        ),
        "list(pool.map(operator.neg, [-3, -4])), pool.shutdown()",
        "([3, 4], None)",
    ),
    "a pool": (
        "pool = multiprocessing.get_context('fork').Pool(2); pool.map(abs, [1, -2]) and None",
        "pool.map(abs, [-3, -4]), pool.close(), pool.join()",
        "([3, 4], None, None)",
    ),
    "an executor": (
        (
            "import concurrent.futures; pool = concurrent.futures.ProcessPoolExecutor(2)\n"
            "list(pool.map(abs, [1, -2])) and None"
        ),
        "list(pool.map(abs, [-3, -4])), pool.shutdown()",
        "([3, 4], None)",
    ),
    "removed files": (
        _REMOVED,
        "one.read(), two.read(), three.seek(0), three.read(), os.write(four, b'!'), own(four)",
        "(b'llo', b'hello', 0, 'written', 1, b'first!')",
    ),
    "asyncio's": (
        "import asyncio; child = await asyncio.create_subprocess_exec('cat', stdin=PIPE, stdout=PIPE)",
        (
            "child.stdin.write(b'a\\n'); line = await child.stdout.readline(); child.stdin.close()\n"
            "line, await child.wait()"
        ),
        "(b'a\\n', 0)",
    ),
}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        yield made


def asked(sandbox: Sandbox, code: str) -> str | None:
    found = sandbox.run_code(code, timeout_s=20)
    assert found.error is None, found.error
    return found.text


@pytest.mark.parametrize(
    "what",
    [each if each in _FIRST else pytest.param(each, marks=pytest.mark.full) for each in _TREES],
)
def test_children_go_along(sandbox: Sandbox, what: str) -> None:
    """In copies, and in copies of these."""
    begin, ask, wanted = _TREES[what]
    asked(sandbox, _BEGIN + begin)
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1], forks[0].fork(processes="required")[0] as third:
        for each in (sandbox, *forks, third):
            assert wanted == asked(each, ask)


def test_shared_memory_of_two_contexts(sandbox: Sandbox) -> None:
    """The copies of both have one file, whichever is made first."""
    begin = "from multiprocessing.shared_memory import SharedMemory as named; shared = named({})"
    first, second = sandbox.context(), sandbox.context()
    first.run(begin.format("'one', create=True, size=5000") + "; shared.buf[0] = 4")
    second.run(begin.format("'one'"))
    (fork,) = sandbox.fork(processes="required")
    with fork:
        one, other = (context for context, _ in fork._its_contexts.running())
        one.run("shared.buf[0] += 1")
        assert "5" == other.run("shared.buf[0]").text
        assert "4" == second.run("shared.buf[0]").text


@pytest.mark.root
def test_each_copy_has_the_ids_that_it_knows(sandbox: Sandbox) -> None:
    asked(sandbox, f"{_BEGIN}child = subprocess.Popen(['sh', '-c', 'sleep 1000 & wait'])")
    ask = "open(f'/proc/{child.pid}/status').read().partition('PPid:')[2].split()[0] == str(os.getpid())"
    (fork,) = sandbox.fork(processes="required")
    with fork:
        assert "True" == asked(fork, ask)
        names = [sorted((each.inside, each.name) for each in tree(s)) for s in (sandbox, fork)]
        assert names[0] == names[1]
        fork.run_code("child.kill()")
        assert "-9" == asked(fork, "child.wait()")
        assert "True" == asked(sandbox, "child.poll() is None")


def test_a_server_in_the_background_of_a_shell(sandbox: Sandbox) -> None:
    server = "python3 -m http.server --bind 127.0.0.1 8004"
    process = sandbox.start(["sh", "-c", f"{server} & echo begun; wait $!; echo $?"])
    assert b"begun\n" == next(iter(process.stdout))
    ask = "curl -sf --retry 50 --retry-connrefused --retry-delay 1 http://127.0.0.1:8004/ -o /dev/null"
    assert sandbox.shell(ask, timeout_s=60).ok
    gone = "until ! grep -q ' 01 ' /proc/net/tcp; do sleep 0.01; done"
    assert sandbox.shell(gone, timeout_s=30).ok
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for each in forks:
            assert each.shell(ask, timeout_s=60).ok
            assert each.shell("pkill python3").ok
            assert b"143\n" == each.process(process.id).wait(20).stdout
        assert sandbox.shell(ask, timeout_s=60).ok


def test_a_kill_ends_the_whole_tree_of_a_copy(sandbox: Sandbox) -> None:
    process = sandbox.start(["sh", "-c", "setsid sleep 1000 & sleep 1001 & echo begun; wait"])
    assert b"begun\n" == next(iter(process.stdout))
    (fork,) = sandbox.fork(processes="required")
    with fork:
        copy = fork.process(process.id)
        copy.kill()
        copy.wait(20)
        assert 1 == fork.exec(["pgrep", "sleep"]).exit_code
        assert 2 == len(sandbox.shell("pgrep sleep").stdout_text.split())


_REFUSED = {
    "more processes": (
        "children = [subprocess.Popen(['sleep', '1000']) for _ in range(70)]",
        "more than 64 processes",
    ),
    "more open files": (
        (
            "files = [os.open('/dev/null', 0) for _ in range(60)]\n"
            "children = [subprocess.Popen(['sleep', '1000'], pass_fds=files) for _ in range(40)]"
        ),
        "exec-1 cannot be copied: it and its child processes have more than 2048 open files",
    ),
    "more ended children": (
        (
            "children = [subprocess.Popen(['true']) for _ in range(70)]\n"
            "for each in children: os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)"
        ),
        "more than 64 ended children",
    ),
    "a stopped child": (
        (
            "child = subprocess.Popen(['sleep', '1000']); os.kill(child.pid, signal.SIGSTOP)\n"
            "os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT) and None"
        ),
        "sleep is suspended by a signal",
    ),
    "a child with what no copy can have": (
        (
            "code = 'import ctypes; ctypes.CDLL(None).inotify_init(); print(); input()'\n"
            "child = subprocess.Popen(['python3', '-c', code], stdin=PIPE, stdout=PIPE)\n"
            "child.stdout.read(1)"
        ),
        "child process python3 cannot: descriptor 3 is anon_inode: anon_inode:inotify",
    ),
    "a pipe with much in it": (
        (
            "import fcntl; child = subprocess.Popen(['sleep', '1000'], stdin=PIPE)\n"
            "fcntl.fcntl(child.stdin, 1031, 1 << 20); os.write(child.stdin.fileno(), bytes(1 << 17))"
        ),
        "pipe with 131072 bytes",
    ),
    "a child in a directory that was removed": (
        (
            "os.mkdir('/tmp/gone'); child = subprocess.Popen(['sleep', '1000'], cwd='/tmp/gone')\n"
            "os.rmdir('/tmp/gone')"
        ),
        "child process sleep cannot: its directory is not at",
    ),
    "much in many pipes": (
        (
            "pipes = [os.pipe() for _ in range(20)]; child = subprocess.Popen(['sleep', '1000'])\n"
            "for _, end in pipes: os.write(end, bytes(65536))"
        ),
        "pipes with more than 1 MiB",
    ),
    "a child's file that it may not open again": (
        (
            "file = open('/tmp/file', 'w'); child = subprocess.Popen(['sleep', '1000'], stdout=file)\n"
            "file.close(); os.chmod('/tmp/file', 0)"
        ),
        "no copy of exec-1 was made: .* system call 2",
    ),
    "memory shared with a child": (
        (
            "import ctypes\n"
            "child = subprocess.Popen(['python3', '-c', '''import ctypes, time\n"
            "c = ctypes.CDLL(None); c.mmap.restype = ctypes.c_void_p\n"
            "stack = c.mmap(None, 65536, 3, 0x22, -1, 0) + 65536\n"
            "pause = ctypes.cast(c.pause, ctypes.c_void_p)\n"
            "c.clone(pause, ctypes.c_void_p(stack), 0x100 | 17, None); print(flush=True); time.sleep(1000)\n"
            "'''], stdout=PIPE); child.stdout.read(1)"
        ),
        "shares memory or descriptors",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("what", _REFUSED)
def test_a_tree_that_cannot_be_copied_is_refused_and_goes_on(what: str) -> None:
    begin, reason = _REFUSED[what]
    with Sandbox.create(limits=Limits(pids=200)) as sandbox:
        asked(sandbox, f"kept = 4; {_BEGIN}{begin}")
        with pytest.raises(Unsupported, match=reason):
            sandbox.fork(processes="required")
        assert "4" == asked(sandbox, "kept")


@pytest.mark.full
def test_children_that_come_and_go_meanwhile(sandbox: Sandbox) -> None:
    """Each copy goes on with the children that it had, or is refused; none hangs, and the source goes on."""
    asked(
        sandbox,
        f"{_BEGIN}kept = 6\n"
        "def churn():\n"
        "  while True:\n"
        "    children = [subprocess.Popen(['sh', '-c', 'sleep 0.01 & wait']) for _ in range(3)]\n"
        "    children[0].kill()\n"
        "    for each in children: each.wait()\n"
        "threading.Thread(target=churn, daemon=True).start()",
    )
    copied = 0
    for _ in range(15):
        (fork,) = sandbox.fork()
        with fork:
            report = fork.fork_report
            assert report is not None
            copied += report.has_processes
            assert report.has_processes or "cannot be copied" in report.reason
            if report.has_processes:
                assert "6" == asked(fork, "kept")
        assert "6" == asked(sandbox, "kept")
    assert copied


@pytest.mark.full
def test_children_that_another_exec_kills(sandbox: Sandbox) -> None:
    asked(
        sandbox,
        f"{_BEGIN}kept = 6\n"
        "def churn():\n"
        "  while True:\n"
        "    for each in [subprocess.Popen(['sh', '-c', 'cat & cat'], stdin=PIPE) for _ in range(3)]:\n"
        "      each.wait()\n"
        "threading.Thread(target=churn, daemon=True).start()",
    )
    killer = sandbox.start(["sh", "-c", "while :; do pkill -9 cat; pkill -9 -x sh -P 2; done"])
    copied = 0
    for _ in range(15):
        (fork,) = sandbox.fork()
        with fork:
            report = fork.fork_report
            assert report is not None
            copied += bool(report.contexts)
            if report.contexts:
                assert "6" == asked(fork, "kept")
        assert "6" == asked(sandbox, "kept")
    killer.kill()
    killer.wait(20)
    assert copied


def test_a_child_that_makes_siblings_is_found_whole(sandbox: Sandbox) -> None:
    """By CLONE_PARENT it adds children to a parent that stands still already."""
    code = (
        "import ctypes, os; c = ctypes.CDLL(None)\n"
        "print(flush=True)\n"
        "while True:\n"
        "  if not c.syscall(56, 0x8000 | 17, 0, 0, 0, 0):\n"
        "    os.pause() if hasattr(os, 'pause') else c.pause()\n"
        "  for _ in range(300000): pass"
    )
    asked(
        sandbox,
        f"{_BEGIN}code = {code!r}\nchild = subprocess.Popen(['python3', '-c', code], stdout=PIPE)\n"
        "child.stdout.readline()\n"
        "def children():\n"
        "  found = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split()\n"
        "  return len(found)",
    )
    (fork,) = sandbox.fork(processes="required")
    with fork:
        assert int(asked(fork, "children()") or "") >= 1


@pytest.mark.root
def test_no_process_of_a_copy_has_the_key_of_its_filter(sandbox: Sandbox) -> None:
    asked(sandbox, f"{_BEGIN}{_WORKER}child = subprocess.Popen(['cat'], stdin=PIPE)")
    (fork,) = sandbox.fork(processes="required")
    with fork:
        plan = native(fork).lockdown
        code = plan["seccomp"]
        at = code.index((plan["tag_key"] & 0xFFFFFFFF).to_bytes(4, "little"))
        wanted = code[at - 4 : at + 12]
        copies = tree(fork)
        assert 3 == len(copies)
        for each in copies:
            assert wanted not in memory_of(each.pid)


@pytest.mark.root
def test_each_process_of_a_copy_is_as_locked_down_as_its_source(sandbox: Sandbox) -> None:
    asked(sandbox, f"{_BEGIN}{_WORKER}{_BEGIN}{_FILE}")
    asked(sandbox, "cat = subprocess.Popen(['cat'], stdin=PIPE, stdout=PIPE)")
    (fork,) = sandbox.fork(processes="required")
    with fork:
        fork.exec(["true"])
        (first,) = (each for each in processes_in(native(fork).pid) if each.inside == 1)
        sources, copies = tree(sandbox), tree(fork)
        assert 4 == len(sources) == len(copies)
        for source, copy in zip(sources, copies, strict=True):
            assert (source.inside, source.threads, source.name, source.command) == (
                copy.inside,
                copy.threads,
                copy.name,
                copy.command,
            )
            assert (source.limits, source.traceable) == (copy.limits, copy.traceable)
            assert open_files(source) == open_files(copy)
            (mine,), (theirs,) = source.identities, copy.identities
            (one,) = first.identities
            assert one.namespaces == theirs.namespaces != mine.namespaces
            for name in ("groups", "capabilities", "no_new_privs", "seccomp", "setgroups", "root"):
                assert getattr(mine, name) == getattr(theirs, name), name
            assert (one.uids, one.gids, one.uid_map) == (theirs.uids, theirs.gids, theirs.uid_map)
            assert copies[0].control_groups == copy.control_groups
            facts = [status(each.pid) for each in (source, copy)]
            for name in ("Seccomp_filters", "SigBlk", "SigIgn", "SigCgt", "Umask"):
                assert facts[0][name] == facts[1][name], name
            assert ["2"] * copy.threads == filters_of_threads(copy.pid)
            assert _shown_maps(source.pid) <= _shown_maps(copy.pid)
            assert not re.search(r"^\S+ .w.s ", _maps(copy.pid), re.MULTILINE)


def tree(sandbox: Sandbox) -> list[Process]:
    """Its processes but PID 1, by their ids inside."""
    found = [each for each in processes_in(native(sandbox).pid) if each.inside != 1]
    return sorted(found, key=lambda each: each.inside)


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def _shown_maps(pid: int) -> set[tuple[str, str]]:
    """Addresses and names of files."""
    rows = [line.split(None, 5) for line in _maps(pid).splitlines()]
    return {(row[0], row[5].strip()) for row in rows if len(row) == 6 and "/" in row[5]}
