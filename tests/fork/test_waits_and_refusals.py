"""Processes that cannot be copied, or not yet: forks refuse them by name, or wait for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence import Sandbox
from ringfence.errors import (
    ExecNotFound,
    Unsupported,
)
from ringfence.launcher.live import steps
from ringfence.linux import libc

pytestmark = pytest.mark.skipif(
    libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"
)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        yield made


_REFUSED = {
    "stopped child": (
        "import os, signal, subprocess; child = subprocess.Popen(['sleep', '100']);"
        "os.kill(child.pid, signal.SIGSTOP); os.waitid(os.P_PID, child.pid, os.WSTOPPED)"
    ),
    "connection": (
        "import socket; server = socket.create_server(('127.0.0.1', 8001));"
        "client = socket.create_connection(('127.0.0.1', 8001))"
    ),
    "full pair": "import socket; pair = socket.socketpair(); pair[0].send(b'x')",
    "shared memory with a name that leads elsewhere": (
        "import mmap, os; named = open('/tmp/a', 'w+b'); named.truncate(4096);"
        "shared = mmap.mmap(named.fileno(), 4096); named.close(); os.link('/tmp/a', '/tmp/b');"
        "os.remove('/tmp/a'); open('/tmp/a (deleted)', 'w').close()"
    ),
    "much shared memory": "import mmap; shared = mmap.mmap(-1, 65 << 20)",
    "removed": "import os; os.mkdir('/tmp/lost'); lost = os.open('/tmp/lost', 0); os.rmdir('/tmp/lost')",
    "inotify": "import ctypes; ctypes.CDLL(None).inotify_init()",
    "timers": "import ctypes; n = ctypes.c_void_p()\nctypes.CDLL(None).timer_create(1, None, ctypes.byref(n))",
}


@pytest.mark.full
@pytest.mark.parametrize("what", _REFUSED)
def test_what_cannot_be_copied_is_refused_before_anything_happens(
    sandbox: Sandbox, what: str
) -> None:
    sandbox.run_code(f"kept = 1; {_REFUSED[what]}")
    made = len(Sandbox.snapshots())
    with pytest.raises(Unsupported, match="exec-1 cannot be copied"):
        sandbox.fork(processes="required")
    assert made == len(Sandbox.snapshots())
    (fork,) = sandbox.fork()
    with fork:
        assert fork.fork_report is not None
        assert "cannot be copied" in fork.fork_report.reason
        assert not fork.fork_report.has_processes
        assert "1" == sandbox.run_code("kept").text
        error = fork.run_code("kept").error
        assert error is not None
        assert "NameError" == error.name


_STOPS_NEXT = """
import os, signal, time
pid = os.getpid() + 1
print(flush=True)
while True:
    try:
        os.kill(pid, signal.SIGSTOP)
        break
    except ProcessLookupError:
        pass
print(open(f'/proc/{pid}/comm').read(), end='', flush=True)
time.sleep(0.5)
os.kill(pid, signal.SIGCONT)
signal.pause()
"""


def test_a_process_that_has_not_begun_its_program_is_waited_for() -> None:
    """Until then it is a copy of PID 1, which maps files of the host's."""
    for _ in range(20):
        with Sandbox.create() as sandbox:
            said = iter(sandbox.start(["python3", "-c", _STOPS_NEXT]).stdout)
            assert b"\n" == next(said)
            sandbox.start(["sleep", "1000"])
            try:
                (fork,) = sandbox.fork(1, processes="required")
            except Unsupported as exc:  # it began on another processor before the signal came
                if "it is suspended by a signal" not in exc.message:
                    raise
                continue
            with fork:
                if b"sleep\n" == (name := next(said)):
                    continue  # it had begun, and went on before the fork looked at it
                assert b"ringfence-init\n" == name, "it was stopped before it began"
                assert b"python3\nsleep\n" == fork.shell("cat /proc/[23]/comm").stdout
            break
    else:
        pytest.fail("it always began before it was stopped")


def test_a_suspended_process_is_refused_and_stays_suspended(sandbox: Sandbox) -> None:
    sandbox.start(["sleep", "1000"])
    state = "grep -q 'State:.T' /proc/2/status"
    assert 0 == sandbox.shell(f"kill -STOP 2; until {state}; do :; done").exit_code
    with pytest.raises(Unsupported, match=r"exec-1 cannot be copied: it is suspended by a signal"):
        sandbox.fork(1, processes="required")
    assert 0 == sandbox.shell(state).exit_code
    assert 0 == sandbox.shell("kill -CONT 2").exit_code
    (fork,) = sandbox.fork(1, processes="required")
    fork.terminate()


def test_a_running_cell_and_another_command_are_refused(sandbox: Sandbox) -> None:
    context = sandbox.context()
    sandbox.fork(processes="required")[0].terminate()
    code = "import ctypes; ctypes.CDLL(None).inotify_init(); print('ready', flush=True); input()"
    process = sandbox.start(["python3", "-c", code], stream_stdin=True)
    assert b"ready\n" == next(iter(process.stdout))
    with pytest.raises(Unsupported, match=r"inotify \(python3\)"):
        sandbox.fork(processes="required")
    (fork,) = sandbox.fork()
    with fork:
        report = fork.fork_report
        assert report is not None
        assert (context.id,) == report.contexts
        assert (f"{process.id} (python3)",) == report.left_out
        assert "inotify" in report.reason
        with pytest.raises(ExecNotFound):
            fork.process(process.id)
    process.kill()
    process.wait()
    for background in ("", "sleep 1000 >/dev/null 2>&1 &"):
        sandbox.shell(background)
        sandbox.suspend()
        with pytest.raises(Unsupported, match="suspended"):
            sandbox.fork(processes="required")
        sandbox.resume()
    # What was begun last may be a shell still.
    assert 0 == sandbox.shell("until pkill sleep; do :; done", timeout_s=60).exit_code
    assert context.hold()
    with pytest.raises(Unsupported, match="runs a cell"):
        sandbox.fork(processes="required")
    context.let_go()


_IN_STEPS = """
import ctypes, mmap, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
code, data = bytes.fromhex('CODE'), bytes.fromhex('DATA')
def place(at, content, rights):
    assert at == libc.mmap(at, 4096, 3, 0x32, -1, 0)
    ctypes.memmove(at, content, len(content))
    assert 0 == libc.mprotect(ctypes.c_void_p(at), 4096, rights)
place(DATA_AT, data, 3)
place(CODE_AT, code, 5)
run = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong)(CODE_AT)
threading.Thread(target=run, args=(DATA_AT, 99), daemon=True).start()
word = ctypes.c_int.from_address(WORD_AT)
while word.value != 1: pass
def go_on():
    word.value = 0
    libc.syscall(202, ctypes.c_void_p(WORD_AT), 1, 1, 0, 0, 0)
"""


@pytest.mark.full
def test_a_copy_that_has_not_begun_its_program_is_waited_for(sandbox: Sandbox) -> None:
    """A thread of it may still work through the steps that restore it, on no stack."""
    code_at, data_at = 0x20000000, 0x30000000
    program = steps.Steps(data_at)
    program.begin("only")
    word = program.put((2).to_bytes(8, "little"))
    program.add(steps.BARRIER, word)
    program.add(60, 0)  # exit(2), of the thread alone
    values = {
        "CODE_AT": hex(code_at),
        "DATA_AT": hex(data_at),
        "WORD_AT": hex(word),
        "CODE": steps.CODE.hex(),
        "DATA": program.content().hex(),
    }
    guest = _IN_STEPS
    for name, value in values.items():
        guest = guest.replace(name, value)
    assert sandbox.run_code(guest).error is None
    with pytest.raises(Unsupported, match="a copy that has not begun to run its program"):
        sandbox.fork(processes="required")
    assert sandbox.run_code("threading.Timer(0.5, go_on).start()").error is None
    (fork,) = sandbox.fork(processes="required")
    with fork:
        assert "0" == fork.run_code("word.value").text
