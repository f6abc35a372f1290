"""Contexts that go on in forks: their state, what keeps copies apart, and what is refused."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native.live_copies import NativeTemplate, refused
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.errors import (
    Unsupported,
)
from ringfence.launcher.live import steps
from ringfence.launcher.live.source import _leave_sequence
from ringfence.linux import libc
from tests.posture.reading import Process, processes_in

pytestmark = pytest.mark.skipif(
    libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"
)

_STATE = """
import hashlib, os, random, threading, time
data = bytearray(os.urandom(1 << 20) * 20)
table = {number: str(number) for number in range(10_000)}
numbers = (n for n in range(100)); next(numbers)
file = open('/tmp/lines', 'w+'); file.write('one\\ntwo\\nthree\\n'); file.flush()
file.seek(0); file.readline()
again = os.dup(file.fileno())
event, ticks = threading.Event(), []
def tick():
    while not event.wait(0.01): ticks.append(1)
threading.Thread(target=tick, daemon=True).start()
random.seed(7)
"""


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        yield made


def native(sandbox: Sandbox) -> NativeSandbox:
    assert isinstance(sandbox._inner, NativeSandbox)
    return sandbox._inner


def test_each_fork_has_a_hostname_of_its_own_and_keeps_it(sandbox: Sandbox) -> None:
    names = "import os, socket; name = os.uname().nodename; name, socket.gethostbyname(name)"
    before = sandbox.run_code(names).text
    with ExitStack() as stack:
        forks = [stack.enter_context(each) for each in sandbox.fork(2)]
        found = {each.run_code(names).text for each in forks}
        files = [each.files.read_text("/etc/hostname").strip() for each in forks]
        with forks[0].mark() as mark:
            for _ in range(3):
                forks[0].rewind(mark)
        own = forks[0].run_code(names).text

        assert "('ringfence', '127.0.0.1')" == before == sandbox.run_code(names).text
        assert found == {f"('{name}', '127.0.0.1')" for name in files}
        assert 2 == len(found)
        assert f"('{files[0]}', '127.0.0.1')" == own


def test_variables_files_and_threads_go_on_apart(sandbox: Sandbox) -> None:
    sandbox.run_code(_STATE)
    tell = "hashlib.md5(data).hexdigest(), len(table), file.tell(), os.lseek(again, 0, 1)"
    before = sandbox.run_code(tell).text
    with ExitStack() as stack:
        forks = [stack.enter_context(each) for each in sandbox.fork(3, processes="required")]
        assert {before} == {each.run_code(tell).text for each in forks}
        report = forks[0].fork_report
        assert report is not None
        assert (True, 1, "") == (report.has_processes, len(report.contexts), report.reason)
        for number, fork in enumerate(forks):
            fork.run_code(f"data[0] = {number}; table.clear(); data.extend(b'x' * {number})")
        assert before == sandbox.run_code(tell).text
        assert ["0", "1", "2"] == [each.run_code("data[0]").text for each in forks]
        for fork in forks:
            assert "('two\\n', 1)" == fork.run_code("file.readline(), next(numbers)").text
            ticked = "n = len(ticks); time.sleep(0.1); len(ticks) > n"
            assert "True" == fork.run_code(ticked).text
            assert "True" == fork.run_code("event.set(); threading.active_count() > 1").text


def test_what_draws_random_numbers_draws_others(sandbox: Sandbox) -> None:
    sandbox.run_code("import random, secrets, ssl, tempfile, uuid; random.seed(7)")
    sandbox.run_code("random.random(), ssl.RAND_bytes(8), tempfile.mktemp()")
    drawn = (
        "[random.random(), secrets.token_hex(), ssl.RAND_bytes(8).hex(), tempfile.mktemp(),"
        " str(uuid.uuid4()), os.urandom(8).hex()]"
    )
    with ExitStack() as stack:
        forks = [stack.enter_context(each) for each in sandbox.fork(3)]
        rows = [each.run_code(f"import os; {drawn}").results[-1].text for each in (sandbox, *forks)]
        columns = list(zip(*(str(row).split(", ") for row in rows), strict=True))
        assert 6 == len(columns)
        assert [4] * 6 == [len(set(each)) for each in columns]


def test_a_copy_starts_programs_and_is_interrupted_and_ended(sandbox: Sandbox) -> None:
    sandbox.run_code("kept = 5")
    (fork,) = sandbox.fork()
    with fork:
        assert "1000\n" in fork.run_code("!id -u").logs[0].text
        late = fork.run_code("while True: pass", timeout_s=0.3)
        assert late.error is not None
        assert "CellTimeout" == late.error.name
        assert "5" == fork.run_code("kept").text
        program = fork.run_code("import os; os.readlink('/proc/self/exe')").text
        assert program == sandbox.run_code("import os; os.readlink('/proc/self/exe')").text
        fork.suspend()
        fork.resume()
        ((context, _),) = fork._its_contexts.running()
        pid = fork.run_code("os.getpid()").text
        assert 0 == fork.exec(["test", "-d", f"/proc/{pid}"]).exit_code
        context.close()
        assert 1 == fork.exec(["test", "-d", f"/proc/{pid}"]).exit_code
        assert sandbox.run_code("kept").text == "5"


def test_forks_of_forks(sandbox: Sandbox) -> None:
    sandbox.run_code("generation = 0")
    with ExitStack() as stack:
        last = sandbox
        for number in range(1, 4):
            (last,) = last.fork(processes="required")
            stack.enter_context(last)
            assert str(number) == last.run_code("generation += 1; generation").text
        assert "0" == sandbox.run_code("generation").text


def test_several_contexts_keep_their_places(sandbox: Sandbox) -> None:
    sandbox.run_code("which = 'default'")
    sandbox.context().run("which = 'other'")
    (fork,) = sandbox.fork(processes="required")
    with fork:
        assert "'default'" == fork.run_code("which").text
        found = {context.run("which").text for context, _ in fork._its_contexts.running()}
        assert {"'default'", "'other'"} == found


_LOCKS = """
import fcntl, os, subprocess, time
whole, part, again = (open(f'/tmp/{name}', 'w+') for name in ('whole', 'part', 'part'))
fcntl.flock(whole, fcntl.LOCK_EX)
fcntl.lockf(part, fcntl.LOCK_EX, 10, 5); fcntl.lockf(part, fcntl.LOCK_SH, 0, 50)
child = subprocess.Popen(['sleep', '1000'], stdout=whole)
def locks():
    rows = [line.split() for line in open('/proc/locks')]
    names = {os.stat(f'/tmp/{name}').st_ino: name for name in ('whole', 'part')}
    found = [(names.get(int(row[5].split(':')[2])), row[1], row[3], *row[6:]) for row in rows]
    return sorted(row for row in found if row[0])
"""


def test_locks_are_taken_on_the_files_of_each_copy(sandbox: Sandbox) -> None:
    sandbox.run_code(_LOCKS)
    before = sandbox.run_code("locks()").text
    assert before is not None
    assert 3 == before.count("'WRITE'") + before.count("'READ'"), before
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1], forks[0].fork(processes="required")[0] as third:
        for each in (*forks, third):
            assert before == each.run_code("locks()").text
            assert 1 == each.exec(["flock", "-n", "/tmp/whole", "true"]).exit_code
        third.run_code("whole.close(); child.kill(); child.wait()")
        assert 0 == third.exec(["flock", "-n", "/tmp/whole", "true"]).exit_code


_FLAGS = """
import fcntl, os, socket
pipe, pair = os.pipe(), [each.detach() for each in socket.socketpair()]
event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
log = os.open('/tmp/log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for fd in (pipe[0], pair[1]): os.set_blocking(fd, False)
for fd in (pipe[1], pair[0]): os.set_inheritable(fd, True)
def flags():
    return [[fcntl.fcntl(fd, get) for get in (fcntl.F_GETFL, fcntl.F_GETFD)]
        for fd in (*pipe, *pair, event, log)]
def read(fd):
    try: return os.read(fd, 8)
    except BlockingIOError: return 'would wait'
"""


def test_open_files_keep_their_flags(sandbox: Sandbox) -> None:
    """A program that trusts that its pipe does not block would wait in a copy for ever."""
    sandbox.run_code(_FLAGS)
    before = sandbox.run_code("flags()").text
    (fork,) = sandbox.fork(processes="required")
    with fork:
        assert before == fork.run_code("flags()").text
        told = fork.run_code("[read(fd) for fd in (pipe[0], pair[1], event)]", timeout_s=30)

    assert "['would wait', 'would wait', 'would wait']" == told.text


@pytest.mark.full
def test_timers_have_the_time_that_was_left(sandbox: Sandbox) -> None:
    sandbox.run_code(
        "import ctypes, os, signal, struct, time\n"
        "def timer(flags, *words):\n"
        "  fd = ctypes.CDLL(None).timerfd_create(1, flags)\n"
        "  ctypes.CDLL(None).timerfd_settime(fd, 0, struct.pack('4Q', *words), None)\n"
        "  return fd\n"
        "count = lambda fd: int.from_bytes(os.read(fd, 8), 'little')\n"
        "one, often, over = timer(0, 0, 0, 2, 0), timer(0, 0, 10**7, 0, 10**7), timer(0, 0, 0, 0, 1)\n"
        "never, alarms = timer(0o4000, 0, 0, 1000, 0), []\n"
        "signal.signal(signal.SIGALRM, lambda *_: alarms.append(1)); signal.alarm(2)"
    )
    ask = (
        "from contextlib import suppress\n"
        "with suppress(BlockingIOError): alarms.append(count(never))\n"
        "before = len(alarms); found = count(over), count(often) > 0, count(one)\n"
        "while not alarms: time.sleep(0.01)\n"
        "*found, before <= 1, alarms"
    )
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for each in (*forks, sandbox):
            assert "(1, True, 1, True, [1])" == each.run_code(ask, timeout_s=20).text


_OF_KERNEL = """
import ctypes, faulthandler, os, queue, resource, signal, threading
c = ctypes.CDLL(None, use_errno=True)
c.pthread_self.restype = ctypes.c_ulong
faulthandler.enable(); os.umask(0o26); os.chdir('/tmp')
signal.signal(signal.SIGHUP, signal.SIG_IGN)
asked, told = queue.Queue(), queue.Queue()
def work():
    c.prctl(15, b'working', 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [12])
    while True: told.put(asked.get()())
def there(what):
    asked.put(what)
    return told.get()
worker = threading.Thread(target=work, daemon=True)
worker.start(); there(int)
signal.pthread_kill(worker.ident, 12)
signal.pthread_sigmask(signal.SIG_BLOCK, [10]); signal.pthread_kill(threading.get_ident(), 10)
def of_thread():
    area = c.pthread_self() + ctypes.c_ssize_t.in_dll(c, '__rseq_offset').value
    registered = c.syscall(334, ctypes.c_ulong(area), 32, 0, 0x53053053), ctypes.get_errno()
    robust = [ctypes.c_ulong(), ctypes.c_ulong()]
    robust.append(c.syscall(274, 0, *(ctypes.byref(each) for each in robust)))
    stack = ctypes.create_string_buffer(24)
    c.sigaltstack(None, stack)
    name = open('/proc/thread-self/comm').read()
    waiting = sorted(signal.sigpending()), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    return registered, [getattr(each, 'value', each) for each in robust], stack.raw, name, waiting
def status():
    names = 'Umask', 'Threads', 'SigPnd', 'ShdPnd', 'SigBlk', 'SigIgn', 'SigCgt'
    return [row.split() for row in open('/proc/self/status') if row.split(':')[0] in names]
limits = lambda: [resource.getrlimit(each) for each in range(15)]
# Securebits, no_new_privs, and whether it is dumpable. Then how many rulesets of Landlock may be added yet.
told_by_prctl = lambda: [c.prctl(each, 0, 0, 0, 0) for each in (27, 39, 3)]
def layers():
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    handled, made = ctypes.c_uint64(1), 0
    while (fd := c.syscall(444, ctypes.byref(handled), 8, 0)) >= 0 and not c.syscall(446, fd, 0):
        os.close(fd)
        made += 1
    os._exit(made)
"""


def test_the_kernel_knows_of_a_copy_what_it_knew_of_its_source(sandbox: Sandbox) -> None:
    """The C library relies on it, and has no way to hear that it is in another process."""
    assert sandbox.run_code(_OF_KERNEL).error is None
    tell = (
        "of_thread(), there(of_thread), status(), limits(), os.getcwd(), told_by_prctl(), layers()"
    )
    before = sandbox.run_code(tell).text
    assert before is not None
    (fork,) = sandbox.fork(processes="required")
    with fork:
        found = fork.run_code(tell).text

    assert before == found
    # EBUSY: just so it is registered for restartable sequences.
    registered = "print([each()[0] for each in (of_thread, lambda: there(of_thread))])"
    assert "[(-1, 16), (-1, 16)]\n" == sandbox.run_code(registered).logs[0].text, "the control"


_TIMES = """
import ctypes, fcntl, os, select, signal, struct
c = ctypes.CDLL(None)
def timer(clock, flags, *words):
    fd = c.timerfd_create(clock, flags)
    c.timerfd_settime(fd, 0, struct.pack('4q', *words), None)
    return fd
def left(fd):
    words = ctypes.create_string_buffer(32)
    c.timerfd_gettime(fd, words)
    *interval, seconds, _ = struct.unpack('4q', words.raw)
    clock = open(f'/proc/self/fdinfo/{fd}').read().partition('clockid:')[2].split()[0]
    return [clock, *interval, seconds // 100, fcntl.fcntl(fd, 1), fcntl.fcntl(fd, 3) & 0o4000]
once, often = timer(1, 0, 0, 0, 1050, 0), timer(1, 0o4000, 5, 500, 2050, 0)
of_day, over = timer(0, 0, 0, 0, 3050, 0), timer(1, 0, 0, 0, 0, 1)
unset = c.timerfd_create(1, 0o2000000)
poll = select.poll(); poll.register(over); poll.poll()
signal.setitimer(signal.ITIMER_PROF, 1050, 7); signal.setitimer(signal.ITIMER_VIRTUAL, 2050)
"""


def test_timers_are_set_in_a_copy_as_in_its_source(sandbox: Sandbox) -> None:
    assert sandbox.run_code(_TIMES).error is None
    (fork,) = sandbox.fork(processes="required")
    tell = (
        "[left(fd) for fd in (once, often, of_day, unset)], int.from_bytes(os.read(over, 8), 'little'),"
        " [(part // 100, whole) for part, whole in map(signal.getitimer, (2, 1, 0))]"
    )
    with fork:
        found = [each.run_code(tell, timeout_s=20).text for each in (fork, sandbox)]

    files = (
        "[['1', 0, 0, 10, 0, 0], ['1', 5, 500, 20, 0, 2048], ['0', 0, 0, 30, 0, 0],"
        " ['1', 0, 0, 0, 1, 0]]"
    )
    assert [f"({files}, 1, [(10.0, 7.0), (20.0, 0.0), (0.0, 0.0)])"] * 2 == found


@pytest.mark.parametrize(
    ("at", "how", "goes_on"),
    [
        (0, "inside", "aside"), (15, "inside", "aside"), (16, "inside", "there"), (-1, "inside", "there"),
        (0, "in none", "there"), (0, "nowhere", "there"), (0, "not registered", "there"),
    ],
)  # fmt: skip
def test_a_thread_in_a_restartable_sequence_goes_on_where_it_is_to(
    at: int, how: str, goes_on: str
) -> None:
    """As after a switch: a copy may run on another processor than the one that the sequence is about."""
    start, aside = 1 << 40, 77
    sequence = ctypes.create_string_buffer(struct.pack("=IIQQQ", 0, 0, start, 16, aside), 32)
    place = {"in none": 0, "nowhere": 16}.get(how, ctypes.addressof(sequence))
    area = ctypes.create_string_buffer(struct.pack("=IIQ", 3, 3, place), 32)
    registered = 0 if "not registered" == how else ctypes.addressof(area)
    state: Any = SimpleNamespace(sequences=(registered, 32, 0), registers={"rip": start + at})
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    _leave_sequence(state, memory)
    os.close(memory)

    assert (aside if "aside" == goes_on else start + at) == state.registers["rip"]


_COUNTER = "n=0; while read -r line; do n=$((n+1)); echo $line $n; done; echo end"


def test_a_timeout_holds_in_a_copy_too_and_begins_anew(sandbox: Sandbox) -> None:
    """The control has none. The original, with a longer one, goes on."""
    limited = sandbox.start(["sleep", "1000"], timeout_s=600)
    free = sandbox.start(["sleep", "1000"])
    (fork,) = sandbox.fork(processes="required")
    with fork:
        found = [fork.process(each.id)._pump for each in (limited, free)]
        assert [600, None] == [each.timeout_s for each in found]
        assert found[0].deadline is not None
        assert limited._pump.deadline is not None
        assert limited._pump.deadline < found[0].deadline
        assert found[1].deadline is None
    for each in (limited, free):
        each.kill()
        each.wait(10)


@pytest.mark.full
def test_a_copy_is_ended_by_its_timeout(sandbox: Sandbox) -> None:
    process = sandbox.start(["sleep", "1000"], timeout_s=2)
    (fork,) = sandbox.fork(processes="required")
    with fork:
        assert fork.process(process.id).wait(30).timed_out
        assert process.wait(30).timed_out


def test_processes_go_on_under_their_ids(sandbox: Sandbox) -> None:
    counter = sandbox.start(["sh", "-c", _COUNTER], stream_stdin=True)
    idle = sandbox.start(["sleep", "1000"])
    assert counter.stdin is not None
    counter.stdin.write(b"a\n")
    assert b"a 1\n" == next(iter(counter.stdout))
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for number, fork in enumerate(forks):
            report = fork.fork_report
            assert report is not None
            assert (counter.id, idle.id) == report.processes
            copy = fork.process(counter.id)
            assert copy.stdin is not None
            for _ in range(number + 1):
                copy.stdin.write(b"b\n")
            copy.stdin.close()
            wanted = b"b 2\nb 3\nend\n" if number else b"b 2\nend\n"
            assert wanted == copy.wait(10).stdout
            assert fork.process(idle.id).running
            fork.process(idle.id).kill()
            assert "caller" == fork.process(idle.id).wait(10).killed_by
        assert counter.running
        assert idle.running
    counter.stdin.write(b"c\n")
    counter.stdin.close()
    assert b"a 1\nc 2\nend\n" == counter.wait(10).stdout


def test_an_event_loop_goes_on(sandbox: Sandbox) -> None:
    """With its epoll descriptor, its socket pair, and what was scheduled."""
    sandbox.run_code(
        "import asyncio, os, selectors\n"
        "async def later():\n await asyncio.sleep(0.01)\n return 'slept'\n"
        "queue = asyncio.Queue(); await queue.put(3); task = asyncio.create_task(later())\n"
        "counter = os.eventfd(5); poll = selectors.EpollSelector()\n"
        "poll.register(counter, selectors.EVENT_READ, 'ready')"
    )
    with ExitStack() as stack:
        forks = [stack.enter_context(each) for each in sandbox.fork(2, processes="required")]
        for each in (sandbox, *forks):
            assert "(3, 'slept')" == each.run_code("await queue.get(), await task").text
            asked = "[key.data for key, _ in poll.select(0)], os.eventfd_read(counter)"
            assert "(['ready'], 5)" == each.run_code(asked).text
            threaded = "await asyncio.get_running_loop().run_in_executor(None, lambda: 6)"
            assert "6" == each.run_code(threaded).text


def test_servers_listen_on_in_each_copy(sandbox: Sandbox) -> None:
    sandbox.run_code(
        "import asyncio, socket\n"
        "old = socket.create_server(('::1', 8001), family=socket.AF_INET6, backlog=7)\n"
        "async def echo(reader, writer):\n"
        " writer.write(await reader.readline()); writer.close()\n"
        "server = await asyncio.start_server(echo, '127.0.0.1', 8002)"
    )
    ask = (
        "client = socket.create_connection(('::1', 8001)); taken = old.accept()\n"
        "reader, writer = await asyncio.open_connection('127.0.0.1', 8002)\n"
        "writer.write(b'line\\n'); line = await reader.readline(); writer.close()\n"
        "line, old.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[28]"
    )
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for each in (*forks, sandbox):
            assert "(b'line\\n', 7)" == each.run_code(ask).text
        with pytest.raises(Unsupported, match="has a connection"):
            sandbox.fork(processes="required")


def test_memory_that_children_do_not_inherit_goes_along(sandbox: Sandbox) -> None:
    """JavaScript engines mark their heap so: madvise(2), MADV_DONTFORK."""
    sandbox.run_code(
        "import mmap, os\nkept = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "kept[:] = bytes(range(256)) * 4096; kept.madvise(mmap.MADV_DONTFORK)\n"
        "flags = lambda: open('/proc/self/smaps').read().count(' dc ')"
    )
    ask = "kept[:] == bytes(range(256)) * 4096, flags()"
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1], forks[0].fork(processes="required")[0] as third:
        for each in (sandbox, *forks, third):
            assert "(True, 1)" == each.run_code(ask).text


def test_a_mapped_file_that_can_be_written_goes_along_as_it_was(sandbox: Sandbox) -> None:
    """A copy has its content: what the source writes to the file later is not the copy's to see."""
    sandbox.run_code(
        "import mmap; open('/tmp/mapped', 'wb').write(b'a' * 8192); file = open('/tmp/mapped', 'rb+')\n"
        "view = mmap.mmap(file.fileno(), 8192, mmap.MAP_PRIVATE)\nview[0]"
    )
    (fork,) = sandbox.fork()
    with fork:
        sandbox.run_code("file.write(b'b' * 8192); file.flush()")
        assert "98" == sandbox.run_code("view[4096]").text, (
            "the control: Linux shows what was written"
        )
        assert "97" == fork.run_code("view[4096]").text
        assert {"a"} == set(fork.files.read_text("/tmp/mapped"))


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_node_goes_on(sandbox: Sandbox) -> None:
    """With its heap, its event loop, its eleven threads and its server."""
    code = (
        "let n = 0; require('http').createServer((q, r) => r.end(String(++n)))"
        ".listen(8003, '127.0.0.1', () => console.log('ready'))"
    )
    process = sandbox.start(["node", "-e", code])
    assert b"ready\n" == next(iter(process.stdout))
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8003').read())"
    assert b"b'1'\n" == sandbox.exec(["python3", "-c", ask]).stdout
    # An open connection cannot be copied, and node closes one a moment after its client has.
    gone = "until ! grep -q ' 01 ' /proc/net/tcp; do sleep 0.01; done"
    assert sandbox.shell(gone, timeout_s=30).ok
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for each in (sandbox, *forks):
            assert b"b'2'\n" == each.exec(["python3", "-c", ask]).stdout


def test_a_database_is_read_on_and_opened_anew_to_write(sandbox: Sandbox) -> None:
    """SQLite knows its file by its inode, which is another one in a fork; it then writes nothing."""
    sandbox.run_code("import sqlite3; base = sqlite3.connect('base')")
    sandbox.run_code("base.execute('create table t (x)'); base.execute('insert into t values (1)')")
    sandbox.run_code("base.commit()")
    (fork,) = sandbox.fork(processes="required")
    with fork:
        count = "base.execute('select count(*) from t').fetchone()"
        assert "(1,)" == fork.run_code(count).text
        insert = "base.execute('insert into t values (2)'); base.commit()"
        error = fork.run_code(insert).error
        assert error is not None
        assert "readonly" in error.value
        assert fork.run_code(f"base = sqlite3.connect('base'); {insert}").error is None
        assert "(2,)" == fork.run_code(count).text
        assert "(1,)" == sandbox.run_code(count).text


@pytest.mark.root
def test_a_copy_is_as_locked_down_as_its_source(sandbox: Sandbox) -> None:
    """But for its streams and its socket, which are new ones, all that the kernel tells is the same."""
    sandbox.run_code(_STATE)
    (fork,) = sandbox.fork(processes="required")
    with fork:
        fork.exec(["true"])
        source, copy = (only_context(each) for each in (sandbox, fork))
        assert (source.inside, source.threads, source.name) == (
            copy.inside,
            copy.threads,
            copy.name,
        )
        assert (source.command, source.limits, source.traceable) == (
            copy.command,
            copy.limits,
            copy.traceable,
        )
        assert open_files(source) == open_files(copy)
        (mine,), (theirs,) = source.identities, copy.identities
        (first,) = init_of(fork).identities
        assert first.namespaces == theirs.namespaces != mine.namespaces
        for name in ("groups", "capabilities", "no_new_privs", "seccomp", "setgroups", "root"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert (first.uids, first.gids, first.uid_map) == (theirs.uids, theirs.gids, theirs.uid_map)
        assert copy.control_groups == siblings_groups(fork)
        facts = [status(each.pid) for each in (source, copy)]
        assert facts[0]["Seccomp_filters"] == facts[1]["Seccomp_filters"] == "2"
        assert 1 < copy.threads
        assert ["2"] * copy.threads == filters_of_threads(copy.pid)
        scores = [Path(f"/proc/{each.pid}/oom_score_adj").read_text() for each in (source, copy)]
        assert scores[0] == scores[1]
        fields = Path(f"/proc/{copy.pid}/stat").read_text().rpartition(")")[2].split()
        assert [copy.pid] * 2 == [int(fields[2]), int(fields[3])]


@pytest.mark.root
def test_no_copy_has_the_key_of_its_filter(sandbox: Sandbox) -> None:
    """The pages that its filters came in are gone before anything of it runs."""
    sandbox.run_code("x = 1")
    (fork,) = sandbox.fork(processes="required")
    with fork:
        plan = native(fork).lockdown
        code = plan["seccomp"]
        at = code.index((plan["tag_key"] & 0xFFFFFFFF).to_bytes(4, "little"))
        wanted = code[at - 4 : at + 12]
        assert wanted in plan["seccomp"]
        assert wanted not in memory_of(only_context(fork).pid)


def test_a_failed_copy_leaves_no_fork(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.run_code("kept = 2")
    made = len(Sandbox.snapshots())
    with monkeypatch.context() as patch:
        patch.setattr(NativeTemplate, "load", lambda self: self.close())
        with pytest.raises((Unsupported, OSError)):
            sandbox.fork(2, processes="required")
    assert made == len(Sandbox.snapshots())
    assert "2" == sandbox.run_code("kept").text


@pytest.mark.parametrize("in_place", [False, True])
def test_a_fork_that_fails_at_its_second_copy_closes_the_first(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    for _ in range(2):
        sandbox.start(["sleep", "1000"])
    copy, made = NativeTemplate.copy, list[Any]()

    def once(self: NativeTemplate, *arguments: Any) -> Any:
        if made:
            raise refused("the kernel refused a step of it")
        made.append(copy(self, *arguments))
        return made[0]

    with sandbox.mark(processes="required") as mark:
        monkeypatch.setattr(NativeTemplate, "copy", once)
        with pytest.raises(Unsupported, match="refused a step"):
            sandbox.rewind(mark) if in_place else sandbox.fork(at=mark)
        assert -1 == made[0]._report.fileno()
        assert (None, None) == (made[0].run.stdout, made[0].run.stderr)


def test_a_step_that_fails_says_which() -> None:
    program = steps.Steps(0)
    program.begin("only")
    program.exactly(5, 39)
    content = program.content()
    record = bytearray(content[-steps.STEP_BYTES :])
    record[72:80] = (-17).to_bytes(8, "little", signed=True)
    problem = steps.failure(bytes(record))
    assert 17 == problem.errno
    assert "system call 39" in str(problem)


def open_files(process: Process) -> dict[int, str]:
    """Without the numbers of pipes, which are new ones."""
    return {fd: re.sub(r"\[\d+\]", "", text) for fd, text in process.files.items()}


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def filters_of_threads(pid: int) -> list[str]:
    """How many filters each thread is under: one alone may have been left out."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [status(int(each.name))["Seccomp_filters"] for each in threads]


def init_of(sandbox: Sandbox) -> Process:
    (found,) = [each for each in processes_in(native(sandbox).pid) if each.inside == 1]
    return found


def only_context(sandbox: Sandbox) -> Process:
    found = [each for each in processes_in(native(sandbox).pid) if "python" in each.command[0]]
    assert 1 == len(found)
    return found[0]


def siblings_groups(sandbox: Sandbox) -> frozenset[str]:
    """The control groups of what PID 1 itself starts."""
    process = sandbox.start(["sleep", "100"])
    try:
        sandbox.exec(["true"])
        (found,) = [
            each for each in processes_in(native(sandbox).pid) if "sleep" in each.command[0]
        ]
        return found.control_groups
    finally:
        process.kill()
        process.wait()


def memory_of(pid: int) -> bytes:
    """All that a process can read of itself."""
    found = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            place, rights = line.split()[:2]
            if "r" not in rights or "[v" in line:
                continue
            start, end = (int(each, 16) for each in place.split("-"))
            try:
                found.append(os.pread(memory.fileno(), end - start, start))
            except OSError:
                continue
    return b"".join(found)
