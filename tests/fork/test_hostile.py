"""Sources that resist being copied: each is copied right or refused, and harms nobody but itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from ringfence.backends.native import live_copies
from ringfence.errors import Unsupported
from ringfence.linux import libc
from tests.features import has, require
from tests.native import refusing
from tests.native.callers import Caller

pytestmark = [
    pytest.mark.anyone,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]

_MACHINE_CODE = """
import ctypes, mmap, os, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def machine(text, *types, at=None):
    place = libc.mmap(at, 4096, 7, 0x22 | (0x10 if at else 0), -1, 0)
    ctypes.memmove(place, bytes.fromhex(text), len(text) // 2)
    return ctypes.CFUNCTYPE(ctypes.c_long, *types)(place)
def begin(function, *arguments):
    threading.Thread(target=function, args=arguments, daemon=True).start()
    time.sleep(0.05)
"""
_SPIN = "f390ebfc"  # loop: pause; jmp loop

_HOSTILE = {
    "handlers of the C library's signals": """
import ctypes
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda n: None)
class Action(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulong) for name in ('handler', 'flags', 'restorer', 'mask')]
place = ctypes.cast(handler, ctypes.c_void_p).value
for n in (32, 33):
    action = Action(place, 0x04000000, place, 0)
    ctypes.CDLL(None).syscall(13, n, ctypes.byref(action), None, 8)
""",
    "ten thousand mappings": """
import mmap
private, rights = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, (mmap.PROT_READ, 3)
maps = [mmap.mmap(-1, 4096, prot=rights[n % 2], flags=private) for n in range(10_000)]
""",
    "four sparse GiB": """
import mmap
sparse = mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
sparse[3 << 30] = 7
""",
    "a pending signal": """
import signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
""",
    "not dumpable": "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)",
    "a link in place of an open file": """
import os; opened = open('/tmp/opened', 'w+'); opened.write('mine'); opened.flush()
os.rename('/tmp/opened', '/tmp/elsewhere'); os.symlink('/proc/1/mem', '/tmp/opened')
""",
    "memory that changes meanwhile": """
import threading
busy = bytearray(1 << 20)
def change():
    while True:
        for i in range(0, len(busy), 4096): busy[i] = (busy[i] + 1) % 256
threading.Thread(target=change, daemon=True).start()
""",
    "a thread without a stack": f"{_MACHINE_CODE}begin(machine('31e4{_SPIN}'))",
    "a stack at no address": f"{_MACHINE_CODE}begin(machine('48bc00000000000000f0{_SPIN}'))",
    "a stack in a file that nobody may write": f"""{_MACHINE_CODE}
file = os.open('/usr/bin/env', os.O_RDONLY)
there = libc.mmap(None, 8192, 1, 1, file, 0)
begin(machine('4889fc{_SPIN}', ctypes.c_void_p), there + 4096)
""",
    # Its abort handler, below the section that it is in, enters it again and again.
    "a critical section over all memory": f"""{_MACHINE_CODE}
again = machine('53300553' + '48897708f390ebf8', ctypes.c_void_p, ctypes.c_void_p, at=0x20000)
section = ctypes.create_string_buffer(96)
at = (ctypes.addressof(section) + 31) // 32 * 32
struct.pack_into('=IIQQQ', section, at - ctypes.addressof(section), 0, 0, 0x30000, 1 << 46, 0x20004)
offset = ctypes.c_ssize_t.in_dll(libc, '__rseq_offset').value
libc.pthread_self.restype = ctypes.c_ulong
loop = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)(0x20004)
begin(lambda: loop(libc.pthread_self() + offset, at))
""",
    "a filter of its own": f"""{_MACHINE_CODE}
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_void_p)]
code = ctypes.create_string_buffer(bytes.fromhex('060000000000ff7f'))
assert 0 == libc.prctl(22, 2, ctypes.byref(Program(1, ctypes.addressof(code))))
""",
    "asking to be traced by PID 1": f"{_MACHINE_CODE}libc.ptrace(0, 0, 0, 0)",
    "a vdso without system calls": f"""{_MACHINE_CODE}
(line,) = [line for line in open('/proc/self/maps') if '[vdso]' in line]
start, end = (int(each, 16) for each in line.split()[0].split('-'))
place = libc.mmap(None, end - start, 3, 0x22, -1, 0)
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
moved = libc.mmap(None, 1 << 16, 0, 0x22, -1, 0)
libc.mprotect(ctypes.c_void_p(start), end - start, 7)
text = ctypes.string_at(start, end - start).replace(b'\\x0f\\x05', b'\\x0f\\x0b')
ctypes.memmove(start, text, len(text))
""",
    "a name that is no text": """
import os
strange = open(b'/tmp/\\xff\\xfe', 'w')
os.remove(b'/tmp/\\xff\\xfe')
""",
}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create() as made:
        yield made


@pytest.mark.full
@pytest.mark.parametrize("what", _HOSTILE)
def test_a_hostile_context_is_copied_right_or_refused(sandbox: Sandbox, what: str) -> None:
    sandbox.run_code("kept = 3")
    assert sandbox.run_code(_HOSTILE[what]).error is None
    forks = sandbox.fork(2)
    with forks[0], forks[1]:
        for fork in forks:
            report = fork.fork_report
            assert report is not None
            if report.has_processes:
                assert "3" == fork.run_code("kept").text
                assert "1000\n" == fork.run_code("!id -u").logs[0].text
            else:
                assert report.reason
                assert "EPROTO" not in report.reason
        assert "3" == sandbox.run_code("kept").text


def test_vector_registers_go_along(sandbox: Sandbox) -> None:
    """A thread that spins holds 32 bytes in ymm5, and writes them down when it is asked to."""
    sandbox.run_code(
        f"""{_MACHINE_CODE}
where = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
where[:32] = bytes(range(32))
hold = machine('c5fe6f2fc6474001f390807f410074f8c5fe7faf80000000c6474201c3', ctypes.c_void_p)
begin(hold, ctypes.addressof(ctypes.c_char.from_buffer(where)))
while not where[64]: time.sleep(0.001)
"""
    )
    ask = (
        "where[65] = 1\nwhile not where[66]: time.sleep(0.001)\nwhere[128:160] == bytes(range(32))"
    )
    forks = sandbox.fork(2, processes="required")
    with forks[0], forks[1]:
        for each in (*forks, sandbox):
            assert "True" == each.run_code(ask, timeout_s=10).text


def test_a_copy_may_use_tiles_as_its_source_may(sandbox: Sandbox) -> None:
    """Of AMX, which a process has to ask for; elsewhere nobody may."""
    sandbox.run_code(
        f"""{_MACHINE_CODE}
asked = libc.syscall(158, 0x1023, 18)
def permitted():
    mask = ctypes.c_ulong()
    libc.syscall(158, 0x1022, ctypes.byref(mask))
    return hex(mask.value & 1 << 18)
"""
    )
    expected = "'0x40000'" if has("amx") else "'0x0'"
    (fork,) = sandbox.fork(processes="required")
    with fork:
        for each in (fork, sandbox):
            assert expected == each.run_code("permitted()").text


def test_a_thread_with_data_in_tiles_is_refused(sandbox: Sandbox) -> None:
    """It loads a configuration, zeroes a tile and spins, until it is told to let go of them."""
    require("amx")
    sandbox.run_code(
        f"""{_MACHINE_CODE}
libc.syscall(158, 0x1023, 18)
where = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
where[0], where[16], where[48] = 1, 64, 16
hold = machine('c4e2784907c4e27b49c0c6474001f390807f410074f8c4e27849c0c6474201f390ebfc', ctypes.c_void_p)
begin(hold, ctypes.addressof(ctypes.c_char.from_buffer(where)))
while not where[64]: time.sleep(0.001)
"""
    )
    with pytest.raises(Unsupported, match="tiles of AMX"):
        sandbox.fork(processes="required")
    sandbox.run_code("where[65] = 1\nwhile not where[66]: time.sleep(0.001)")
    (fork,) = sandbox.fork(processes="required")
    with fork:
        assert "1" == fork.run_code("where[66]").text


def test_a_thread_that_does_not_stop_is_refused(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a child of vfork(2), whose parent is PID 1, and which shares its memory."""
    monkeypatch.setattr(live_copies, "_STOP_S", 0.5)
    sandbox.run_code(f"kept = 3{_MACHINE_CODE}")
    child = "b838000000bf11c100000f0585c07403c39090b8220000000f05ebf7"
    sandbox.run_code(
        f"stack = libc.mmap(None, 65536, 3, 0x22, -1, 0) + 65536\n"
        f"begin(machine('{child}', ctypes.c_long, ctypes.c_void_p), 0, stack)"
    )
    with pytest.raises(Unsupported, match="belongs to no exec"):
        sandbox.fork(processes="required")
    (fork,) = sandbox.fork()
    with fork:
        assert fork.fork_report is not None
        assert "it does not stop" in fork.fork_report.reason
    assert "3" == sandbox.run_code("kept").text


@pytest.mark.parametrize("by", ["rename", "remove"])
def test_a_program_that_a_link_replaces(sandbox: Sandbox, by: str) -> None:
    """After a rename the kernel knows its new place; one that was removed is nowhere."""
    sandbox.shell("cp /bin/cat mine")
    process = sandbox.start(["./mine"], stream_stdin=True)
    command = "mv mine other" if by == "rename" else "rm mine"
    sandbox.shell(f"{command}; ln -s /proc/1/exe mine")
    (fork,) = sandbox.fork()
    with fork:
        report = fork.fork_report
        assert report is not None
        if by == "remove":
            assert "removed" in report.reason
            return
        assert (process.id,) == report.processes
        copy = fork.process(process.id)
        assert copy.stdin is not None
        copy.stdin.write(b"goes on")
        copy.stdin.close()
        assert b"goes on" == copy.wait(10).stdout


def test_a_file_under_another_name_is_refused(sandbox: Sandbox) -> None:
    """Its name is gone and another link leads to it: a copy would open what has the name now."""
    sandbox.run_code(
        "import os; kept = 3; file = open('/tmp/a', 'w'); os.link('/tmp/a', '/tmp/b');"
        "os.remove('/tmp/a'); open('/tmp/a (deleted)', 'w').close()"
    )
    with pytest.raises(Unsupported, match="is not the file at"):
        sandbox.fork(processes="required")
    assert "3" == sandbox.run_code("kept").text


@pytest.mark.parametrize(
    ("refused", "why"),
    [("25 16:C0606610", "older than Linux 6.7"), ("25 16:C0606611", "")],
    ids=["PAGEMAP_SCAN", "control"],
)
def test_without_a_feature_of_the_kernel_files_are_copied(
    refused: str, why: str, tmp_path: Path
) -> None:
    """The control, another filter around this process such as a container's, keeps nothing from going along."""
    code = """
from ringfence.errors import Unsupported
with Sandbox.create(allow_degraded=["*"]) as source:
    source.run_code("kept = 1")
    source.files.write("file", "text")
    try:
        source.fork(processes="required")[0].terminate()
        say("")
    except Unsupported as exc:
        say(exc.message)
    (fork,) = source.fork()
    with fork:
        say([fork.fork_report.has_processes, fork.fork_report.reason, fork.files.read_text("file")])
    say(source.run_code("kept").text)
"""
    under = (sys.executable, refusing.__file__, *refused.split())
    env = {"XDG_DATA_HOME": str(tmp_path)}
    with Caller(code, under=under, env=env) as caller:
        assert why in caller.hear()
        has_processes, reason, text = caller.hear()
        assert (not why, "text") == (has_processes, text)
        assert why in reason
        assert "1" == caller.hear()


def test_limits_hold_in_a_burst_of_forks() -> None:
    """Of memory and of processes: in each copy by itself, whatever its siblings do."""
    limits = Limits(memory_bytes=96 << 20, pids=24)
    with Sandbox.create(limits=limits) as source:
        source.run_code("data = bytearray(b'x') * (48 << 20)")
        forks = source.fork(6, processes="required")
        try:
            grow = "more = bytearray(b'y') * (160 << 20)"
            begin = (
                "import threading\nwait = threading.Event().wait\n"
                "for n in range(100): threading.Thread(target=wait, daemon=True).start()"
            )
            grown = forks[0].run_code(grow)
            begun = forks[1].run_code(begin)
            assert grown.error is not None
            assert grown.error.name in ("MemoryError", "ContextEnded"), grown.error
            assert begun.error is not None
            assert begun.error.name == "RuntimeError", begun.error
            for each in (source, *forks[2:]):
                assert str(48 << 20) == each.run_code("len(data)").text
        finally:
            for each in forks:
                each.terminate()


def test_a_source_without_room_for_another_process_is_refused(sandbox: Sandbox) -> None:
    """The kernel makes the copy in the source's own cgroup first."""
    begin = (
        "import threading; kept = 3\n"
        "try:\n"
        "    while True: threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "except RuntimeError: pass"
    )
    with Sandbox.create(limits=Limits(pids=20)) as source:
        assert source.run_code(begin).error is None
        started = time.monotonic()
        (fork,) = source.fork()
        with fork:
            assert fork.fork_report is not None
            assert fork.fork_report.reason
        assert time.monotonic() - started < 60
        assert "3" == source.run_code("kept").text
