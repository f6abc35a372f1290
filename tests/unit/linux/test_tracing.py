"""A process that is stopped and looked into, and goes on as if nothing had been."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import struct
from collections.abc import Iterator

import pytest

from ringfence.linux import cdata, libc, mappings, namespaces, tracing
from ringfence.linux.tracing import Thread

if "x86_64" != os.uname().machine:
    pytest.skip("registers are x86-64's", allow_module_level=True)

_GETPID, _GETPPID, _CLOSE = 39, 110, 3
_SYSCALL = b"\x0f\x05\xcc"


@pytest.fixture(scope="module")
def at() -> int:
    """Address of a `syscall` instruction, here and in every child."""
    return mappings.map_code(_SYSCALL)


@pytest.fixture
def pid() -> Iterator[int]:
    """A child that says a byte for each that it is given, until there is none; SIGUSR2 is blocked."""
    ours, theirs = os.pipe(), os.pipe()
    child = namespaces.fork_with(0)
    if child == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.close(ours[1])
        os.write(theirs[1], b"!")
        while data := os.read(ours[0], 1):
            os.write(theirs[1], data)
        os._exit(4)
    os.close(ours[0])
    os.close(theirs[1])
    assert b"!" == os.read(theirs[0], 1)
    yield child
    os.write(ours[1], b"x")
    assert b"x" == os.read(theirs[0], 1), "it did not go on"
    os.close(ours[1])
    os.close(theirs[0])
    assert 4 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(") ")[2][0]


def test_it_makes_calls_for_us_and_goes_on(pid: int, at: int) -> None:
    thread = Thread(pid)
    thread.stop()
    try:
        assert "t" == state_of(pid)
        assert 1 << signal.SIGUSR2 - 1 == thread.mask
        assert not thread.is_suspended
        assert thread.extended
        assert pid == thread.call(at, _GETPID)
        assert os.getpid() == thread.call(at, _GETPPID)
        assert -errno.EBADF == thread.call(at, _CLOSE, 999)
        # Six arguments, each in its place: mmap(2).
        where = 0x10_0000_0000
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        assert where == thread.call(at, 9, where, 4096, 3, flags, (1 << 64) - 1, 0)
        thread.block(tracing.EVERY_SIGNAL)
        thread.restore()
    finally:
        thread.release()
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        assert f"SigBlk:\t{1 << signal.SIGUSR2 - 1:016x}\n" in file.read()


def test_who_was_stopped_by_a_signal_is_known(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    thread = Thread(pid)
    thread.stop()
    assert thread.is_suspended
    thread.release()
    os.kill(pid, signal.SIGCONT)


def test_a_signal_that_waits_is_told_and_comes_afterwards(pid: int) -> None:
    """Of its process, or of the thread itself."""
    os.kill(pid, signal.SIGUSR2)
    thread = Thread(pid)
    thread.stop()
    try:
        assert [] == thread.pending(of_process=False)
        (told,) = thread.pending(of_process=True)
        assert (signal.SIGUSR2, 128) == (struct.unpack_from("=i", told)[0], len(told))
        thread.restore()
    finally:
        thread.release()


def test_a_signal_that_comes_while_it_is_stopped_is_taken_and_not_lost() -> None:
    """It stops for the signal first, then for us."""
    (waits, ends), (ready, says) = os.pipe(), os.pipe()
    pid = namespaces.fork_with(0)
    if pid == 0:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))
        os.close(ends)
        os.write(says, b"!")
        os.read(waits, 1)
        os._exit(4)
    assert b"!" == os.read(ready, 1)
    for fd in (waits, ready, says):
        os.close(fd)
    thread = Thread(pid)
    tracing._call(tracing._SEIZE, pid)
    try:
        os.kill(pid, signal.SIGUSR1)
        status = thread.wait()
        assert signal.SIGUSR1 == status >> 8 & 0x7F
        tracing._call(tracing._INTERRUPT, pid)
        assert tracing._EVENT_STOP == thread._put_back(status) >> 16
    finally:
        thread.release()
    os.close(ends)
    assert 5 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_who_is_traced_already_or_has_ended_is_told(pid: int) -> None:
    thread = Thread(pid)
    thread.stop()
    try:
        with pytest.raises(PermissionError):
            Thread(pid).stop()
    finally:
        thread.release()
    ended = namespaces.fork_with(0)
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    with pytest.raises(ProcessLookupError):
        Thread(ended).stop()
    Thread(ended).release()  # nothing, then


def test_a_copy_of_it_stands_still_and_ends_with_its_tracer(pid: int, at: int) -> None:
    thread = Thread(pid)
    thread.stop()
    try:
        copy = thread.clone(at, 0)  # and no signal comes when it ends
        try:
            assert "t" == state_of(copy)
            other = Thread(copy)
            other.registers, other.ends_with_us = dict(thread.registers), True
            assert copy == other.call(at, _GETPID)
            assert pid == other.call(at, _GETPPID)
        finally:
            os.kill(copy, signal.SIGKILL)
            os.waitpid(copy, 0x40000000)
        # It is its parent's to wait for.
        status = thread.call(at, 61, (1 << 64) - 1, 0, 0x40000001, 0)  # wait4(2), WNOHANG
        assert status in (copy, 0)
        thread.restore()
    finally:
        thread.release()


def test_a_copy_that_cannot_be_made_is_told(pid: int, at: int) -> None:
    thread = Thread(pid)
    thread.stop()
    try:
        with pytest.raises(OSError, match="no copy") as told:
            thread.clone(at, 0x00000200 | namespaces.CLONE_NEWNS)
        assert errno.EINVAL == told.value.errno
        thread.restore()
    finally:
        thread.release()


def test_pages_of_its_own_are_those_that_were_written() -> None:
    size = 3 * mmap.PAGESIZE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        start = cdata.addressof(cdata.c_ulong.from_buffer(memory))
        assert not _covers(start, size)
        memory[mmap.PAGESIZE] = 7
        assert _covers(start + mmap.PAGESIZE, mmap.PAGESIZE)
        assert not _covers(start + 2 * mmap.PAGESIZE, mmap.PAGESIZE)
    before = os.listdir("/proc/self/fd")
    tracing.own_pages(os.getpid())
    assert before == os.listdir("/proc/self/fd")


def _covers(start: int, size: int) -> bool:
    pages = tracing.own_pages(os.getpid())
    return any(first < start + size and start < last for first, last in pages)


def test_code_is_run_and_cannot_be_written(at: int) -> None:
    run = cdata.function_at(mappings.map_code(b"\xb8\x2a\0\0\0\xc3"), cdata.c_int)
    assert 42 == run()
    assert "r-xp" == _rights(at), "the kernel may have joined it with its neighbour"


def _rights(at: int) -> str:
    with open("/proc/self/maps", encoding="ascii") as file:
        for line in file:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            if start <= at < end:
                return line.split()[1]
    return ""


def test_memory_is_mapped_where_nothing_is_and_nowhere_else() -> None:
    start, size = 0x20_0000_0000, 2 * mmap.PAGESIZE
    assert start == mappings.map_at(start, size, b"content")
    try:
        assert b"content\0" == libc.bytes_at(start, 8)
        with pytest.raises(FileExistsError):
            mappings.map_at(start + mmap.PAGESIZE, mmap.PAGESIZE, b"other")
        assert bytes(5) == libc.bytes_at(start + mmap.PAGESIZE, 5)
        with open("/proc/self/maps", encoding="ascii") as file:
            assert f"{start:x}-{start + size:x} rw-p" in file.read()
    finally:
        libc.munmap(start, size)
    with pytest.raises(OSError, match="Input/output"):
        libc.bytes_at(start, 1)
