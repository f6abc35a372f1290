"""Each check of a process that is to be copied, alone: without a sandbox, which lets few of them refuse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher.live import descriptors, frames, source
from ringfence.launcher.live.sockets import CannotCopy
from ringfence.launcher.live.source import Source
from ringfence.launcher.live.steps import CODE
from ringfence.launcher.live.template import Template
from ringfence.launcher.live.tree import Tree
from ringfence.linux import libc, ptrace, tracing
from tests.native.outside import until
from tests.unit.linux.child import result_of

pytestmark = pytest.mark.skipif(
    libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"
)
_PROGRAM = """
import ctypes, fcntl, mmap, os, signal, struct, sys, termios, threading
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def filters(count):
    c.prctl(38, 1, 0, 0, 0)
    rules = (ctypes.c_char * 8)(*struct.pack('=HBBI', 6, 0, 0, 0x7FFF0000))
    for _ in range(count):
        assert 0 == c.prctl(22, 2, struct.pack('=H6xQ', 1, ctypes.addressof(rules)), 0, 0)
def become(*uids):
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(23456, 23456, 23456)
        os.setresuid(*uids)
def spin(before):
    "In a page that begins with these bytes."
    place = c.mmap(None, 4096, 7, 0x22, -1, 0)
    code = before + bytes.fromhex('f390ebfc')
    ctypes.memmove(place, code, len(code))
    ctypes.CFUNCTYPE(None)(place + len(before))()
def as_a_program():
    become(23456, 23456, 23456)
    filters(2)
def tell(pid=os.getpid()):
    print(pid, flush=True)
"""


@contextmanager
def running(body: str, **how: Any) -> Iterator[int]:
    """The pid that a program tells, which runs until it is ended here."""
    with ExitStack() as stack:
        read, write = os.pipe()
        stack.callback(os.close, read)
        how = {"start_new_session": True, **how}
        code = f"{_PROGRAM}\n{body}\nsignal.pause()"
        with open(write, "wb") as out:
            process = subprocess.Popen([sys.executable, "-c", code], stdout=out, **how)
        stack.callback(process.wait)
        with open(os.dup(read), "rb") as file:
            said = file.readline()
        pid = int(said or process.pid)
        if pid != process.pid:
            stack.callback(os.kill, pid, signal.SIGKILL)
        stack.callback(process.kill)
        assert said, "it has ended"
        yield pid


def opened_here() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def stopped(pid: int) -> Iterator[Source]:
    before, opened = opened_here(), dict[tuple[int, int], int]()
    made = Source(pid, None, opened)
    try:
        made.stop()
        yield made
    finally:
        made.release()
        made.drop_child()
        for fd in opened.values():
            if fd >= 0:
                os.close(fd)
        assert before == opened_here()


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BEGINS_S", -1.0)
    monkeypatch.setattr(source, "_COPY_BEGINS_S", 0.01)


# What it does, how it is started, and why it cannot be copied; "": it can.
_PROGRAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "as programs are": ("as_a_program(); tell()", {}, ""),
    "no filter": ("become(23456, 23456, 23456); tell()", {}, "filter of its own"),
    "a filter too few": ("become(23456, 23456, 23456); filters(1); tell()", {}, "filter of its own"),
    "a filter too many": ("as_a_program(); filters(1); tell()", {}, "filter of its own"),
    "a group of its own in our session": (
        "as_a_program(); tell()", {"start_new_session": False, "process_group": 0}, "",
    ),
    "our group": (
        "as_a_program(); tell()", {"start_new_session": False}, "neither a session nor a process group",
    ),
    "a session that its parent left": (
        "as_a_program()\nif pid := os.fork(): os.setsid(); tell(pid)\nelse: os.setpgid(0, 0)",
        {"start_new_session": False}, "neither a session nor a process group",
    ),
    "a terminal": (
        "as_a_program(); made = os.openpty(); fcntl.ioctl(made[1], termios.TIOCSCTTY, 0); tell()",
        {}, "it has a terminal",
    ),
    "suspended": ("as_a_program(); tell(); os.kill(os.getpid(), signal.SIGSTOP)", {}, "suspended by a signal"),
    "traced": ("as_a_program(); c.ptrace(0, 0, 0, 0); tell()", {}, "traced by another process"),
    "a copy at work on its steps": (
        f"as_a_program(); tell(); spin(bytes.fromhex('{CODE.hex()}'))", {}, "has not begun to run",
    ),
    "at work on other code": (
        f"as_a_program(); tell(); spin(bytes.fromhex('{CODE[:-1].hex()}00'))", {}, "",
    ),
}  # fmt: skip


def reason_of(pid: int) -> str:
    try:
        with stopped(pid):
            return ""
    except CannotCopy as exc:
        return str(exc)


@pytest.mark.anyone
@pytest.mark.parametrize("what", _PROGRAMS)
def test_only_what_is_as_programs_are_started_is_copied(what: str) -> None:
    body, how, reason = _PROGRAMS[what]
    with running(body, **how) as pid:
        if "suspended" == what:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        if "code" in what or "steps" in what:
            while not _is_beyond_the_libraries(pid):
                os.sched_yield()
        told = reason_of(pid)

    assert reason in told
    assert bool(reason) == bool(told)


def _is_beyond_the_libraries(pid: int) -> bool:
    """Return whether it runs in memory of no file."""
    thread = tracing.Thread(pid)
    thread.stop()
    thread.release()
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    place = thread.registers["rip"]
    ranges = [(each[0].split("-"), each[1]) for each in lines]
    return any(
        int(at, 16) <= place < int(end, 16) and "rwxp" == rights for (at, end), rights in ranges
    )


@pytest.mark.root
@pytest.mark.parametrize(
    "body",
    [
        "filters(2)",
        "become(23456, 23457, 23456); filters(2)",
        "become(23456, 23456, 23457); filters(2)",
        "become(23457, 23456, 23456); filters(2)",
    ],
)
def test_nothing_with_rights_or_several_users_is_copied(body: str) -> None:
    with running(f"{body}; tell()") as pid:
        assert "it has capabilities, or several user ids" == reason_of(pid)


@pytest.mark.anyone
def test_a_process_whose_first_thread_has_ended_is_refused() -> None:
    body = (
        "as_a_program()\n"
        "def go_on():\n"
        "    while open(f'/proc/self/stat').read().rpartition(')')[2].split()[0] != 'Z': pass\n"
        "    tell()\n    signal.pause()\n"
        "threading.Thread(target=go_on).start(); c.syscall(60, 0)"
    )
    with running(body) as pid:
        told = reason_of(pid)

    assert told in ("its first thread has ended", "it is traced by another process")


@pytest.mark.anyone
def test_a_process_that_has_ended_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises((ProcessLookupError, FileNotFoundError)):
        Source(process.pid, None, {}).stop()


@pytest.mark.anyone
def test_memory_that_the_kernel_does_not_tell_of_is_not_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = source._read
    for number in (26, 27, 45, 46, 47, 28, 48, 49, 50, 51):

        def hidden(path: str, number: int = number) -> bytes:
            before, mark, after = read(path).rpartition(b")")
            if path.endswith("/stat"):
                fields = after.split()
                fields[number - 3] = b"0"
                after = b" " + b" ".join(fields)
            return before + mark + after

        with running("as_a_program(); tell()") as pid, monkeypatch.context() as patch:
            patch.setattr(source, "_read", hidden)
            assert "its memory is not ours to look into" == reason_of(pid)


@pytest.mark.anyone
def test_what_it_is_asked_leaves_its_memory_as_it_was() -> None:
    """The answers of the kernel go to its stack, where nothing is kept; it may keep something there."""
    with running("as_a_program(); tell()") as pid, stopped(pid) as made:
        place = made.stopped[pid].registers["rsp"] - source._SCRATCH & ~15
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
        kept = bytes(range(1, 251))
        os.pwrite(memory, kept, place)
        made.look({})
        found = os.pread(memory, len(kept), place)
        registers = made.stopped[pid].registers
        made.stopped[pid].restore()
        after = ptrace.registers(pid)
        os.close(memory)

    assert kept == found
    assert registers == after


@pytest.mark.anyone
def test_a_signal_that_comes_meanwhile_is_taken_afterwards() -> None:
    body = (
        "signal.signal(10, lambda *_: os.write(1, b'taken\\n')); as_a_program(); tell()\n"
        "while True: signal.pause()"
    )
    program = [sys.executable, "-c", f"{_PROGRAM}\n{body}"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.pid == int(process.stdout.readline())
        with stopped(process.pid) as made:
            os.kill(process.pid, signal.SIGUSR1)
            made.look({})
            made.clone()
        told = process.stdout.readline()
        process.kill()

    assert b"taken\n" == told


@pytest.mark.anyone
def test_a_thread_with_data_in_tiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("as_a_program(); tell()") as pid:
        assert "" == reason_of(pid)
        monkeypatch.setattr(frames, "uses_tiles", lambda _thread: True)
        assert "a thread of it computes with the tiles of AMX just now" == reason_of(pid)


@pytest.mark.anyone
def test_its_program_and_its_directory_are_required_where_the_kernel_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program of a process may be mapped nowhere, and is executed again in each copy."""
    required: list[tuple[str, tuple[int, int], str]] = []

    def require(_root: int, path: str, status: os.stat_result, what: str) -> None:
        required.append((path, (status.st_dev, status.st_ino), what))

    monkeypatch.setattr(source, "require_file", require)
    with running("as_a_program(); os.chdir('/proc'); tell()") as pid, stopped(pid) as made:
        made.look({})
        wanted = [
            (os.readlink(f"/proc/{pid}/{name}"), os.stat(f"/proc/{pid}/{name}"), what)
            for name, what in (("exe", "its program"), ("cwd", "its directory"))
        ]

    assert [(path, (info.st_dev, info.st_ino), what) for path, info, what in wanted] == required


_OWN_VDSO = """
(line,) = [line for line in open('/proc/self/maps') if '[vdso]' in line]
start, end = (int(each, 16) for each in line.split()[0].split('-'))
c.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 7)
text = ctypes.string_at(start, end - start).replace(bytes.fromhex('0f05'), bytes.fromhex('0f0b'))
ctypes.memmove(start, text, len(text))
"""


@pytest.mark.anyone
def test_a_vdso_that_was_written_over_is_refused() -> None:
    """An instruction of it is what makes system calls there."""
    with running("as_a_program(); tell()") as pid, stopped(pid) as made:
        made.look({})
    refused = pytest.raises(CannotCopy, match="its vdso is not the kernel's")
    with running(f"as_a_program()\n{_OWN_VDSO}tell()") as pid, stopped(pid) as made, refused:
        made.look({})


@contextmanager
def with_child(parent: str, child: str) -> Iterator[str]:
    """Why a process with a child cannot be copied; both run such code first."""
    body = (
        "read, write = os.pipe()\n"
        f"if os.fork():\n    os.read(read, 1)\n    {parent}\n    tell()\n"
        f"else:\n    {child}\n    c.prctl(1, 9); os.write(write, b'.')"
    )
    with running(body, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as pid:
        made = Tree(pid, [os.stat(f"/proc/{pid}/fd/1").st_ino], {})
        try:
            made.stop()
            told = ""
        except CannotCopy as exc:
            told = str(exc)
        finally:
            made.release()
            made.drop()
            # The end of its parent does not kill what is another user's.
            for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(each), signal.SIGKILL)
        yield told


@pytest.mark.anyone
def test_who_adopts_the_children_of_its_children_is_refused() -> None:
    with with_child("as_a_program()", "as_a_program()") as told:
        assert "" == told
    with with_child("as_a_program(); c.prctl(36, 1, 0, 0, 0)", "as_a_program()") as told:
        assert "it adopts the children of its children" == told


@pytest.mark.root
@pytest.mark.parametrize(
    ("child", "reason"),
    [
        ("as_a_program()", ""),
        ("become(23457, 23457, 23457); filters(2)", "is another user's"),
        ("os.setgroups([7]); os.setresgid(23456, 23456, 23456); os.setresuid(23456, 23456, 23456); filters(2)",
         "is another user's"),
        ("c.unshare(0x04000000); as_a_program()", "is in another namespace"),  # CLONE_NEWUTS
        ("c.unshare(0x40000000); as_a_program()", "is in another namespace"),  # CLONE_NEWNET
        ("c.unshare(0x20000000); as_a_program()", "is in another namespace"),  # CLONE_NEWPID, for its children
    ],
)  # fmt: skip
def test_children_are_of_the_same_user_and_in_the_same_namespaces(child: str, reason: str) -> None:
    with with_child("as_a_program()", child) as told:
        assert bool(reason) == bool(told)
        assert told.endswith(reason)


@pytest.mark.root
def test_a_template_holds_its_socket_alone() -> None:
    """It says that it is ready just before."""
    with running(
        "as_a_program(); tell()", stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as pid:
        made = Tree(pid, [os.stat(f"/proc/{pid}/fd/1").st_ino], {})
        try:
            made.stop()
            template = Template(made)
            try:
                assert until(lambda: 1 == len(os.listdir(f"/proc/{template.pid}/fd")))
            finally:
                template.close()
        finally:
            made.release()
            made.drop()


def test_a_file_that_the_helper_may_not_look_for_is_left_to_the_copy(tmp_path: Path) -> None:
    """Behind a directory that its user has closed, which programs inside may enter no more than it."""
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        (tmp_path / name / "other").touch()
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    status = {name: os.stat(tmp_path / name / "file") for name in ("closed", "open")}
    for each in (tmp_path, tmp_path / "open"):
        each.chmod(0o755)
    (tmp_path / "closed").chmod(0)

    def told() -> list[str]:
        if os.geteuid() == 0:
            os.seteuid(23456)
        found = []
        for name, file in (
            ("closed", "other"),
            ("open", "other"),
            ("open", "file"),
            ("open", "no"),
        ):
            try:
                descriptors.require_file(root, f"/{name}/{file}", status[name], "it")
                found.append("")
            except CannotCopy as exc:
                found.append(str(exc))
        return found

    told_there = result_of(told)
    (tmp_path / "closed").chmod(0o700)
    os.close(root)
    assert [
        "", "it is not the file at /open/other", "",
        "it is not at /open/no: openat2: No such file or directory",
    ] == told_there  # fmt: skip
