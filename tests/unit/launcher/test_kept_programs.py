"""A program that is kept where it stopped: what goes on in its copies, what is kept, and what cannot be."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.backends.local.agents import agent_code
from ringfence.launcher.machine_code import process_image_elf, process_images
from ringfence.launcher.machine_code.process_image import ProcessImage

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="they are for x86-64")

_SECRET = "mine-alone-77d2"
_STOPS = """
import os, signal
before = [sorted(os.listdir('/proc/self/fd')), os.getsid(0) == os.getpid(), os.getcwd(), dict(os.environ)]
caught = [signal.getsignal(each) == signal.SIG_DFL for each in (signal.SIGCHLD, signal.SIGHUP)]
before += [sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), caught, os.readlink('/proc/self/fd/1')]
# But for two signals of the C library's own, whose dispositions no program can set.
before.append([f"{int(row.split()[1], 16) & ~(3 << 31):016x}"
    for row in open('/proc/self/status') if row[:6] in ('SigIgn', 'SigBlk')])
kept = bytearray(1 << 20)
kept[:4], kept[-4:] = b'head', b'tail'
x = 40
os.kill(os.getpid(), signal.SIGSTOP)
print(x + 2, bytes(kept[:4] + kept[-4:]), len(kept), sorted(os.listdir('/proc/self/fd')))
print(os.getpid())
print(before)
"""


def argv(code: str) -> list[str]:
    return [agent_code.interpreter()[0], "-I", "-S", "-X", "utf8", "-c", code]


def children() -> str:
    """Those that have ended too, unless somebody has waited for them."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()


@pytest.fixture
def code() -> Iterator[int]:
    """What a program finds as descriptor 3."""
    fd = os.open("/dev/zero", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ProcessImage]:
    place = tmp_path_factory.mktemp("kept") / "program"
    null = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(null, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", _SECRET)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        ignored = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            image = process_images.take(argv(_STOPS), {"LC_ALL": "C"}, null, str(place))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            signal.signal(signal.SIGPIPE, ignored)
            os.close(null)
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    image.write_head(fd)
    image.write_rest(fd)
    assert os.fstat(fd).st_size == image.size_bytes
    os.close(fd)
    return place, image


def test_each_copy_goes_on_where_the_program_stopped_as_another_process(
    kept: tuple[Path, ProcessImage],
) -> None:
    said = []
    for _ in range(2):
        done = subprocess.run([kept[0]], capture_output=True, text=True, check=True)
        said.append(done.stdout.splitlines())

    assert ["42 b'headtail' 1048576 ['0', '1', '2', '3']"] * 2 == [lines[0] for lines in said]
    assert said[0][1] != said[1][1]
    opened = "['0', '1', '2', '3', '4']"  # its streams, what it finds as 3, and by which it looks
    before = (
        f"[{opened}, True, '/', {{'LC_ALL': 'C', 'GLIBC_TUNABLES': '{process_images.TUNABLES}'}}"
    )
    assert [True, True] == [lines[2].startswith(before) for lines in said], said[0][2]
    # Python itself ignores two signals, whatever its parent does.
    assert said[0][2].endswith(
        ", [], [True, True], '/dev/null', ['0000000000000000', '0000000001001000']]"
    ), said[0][2]


def test_nothing_of_the_takers_is_in_it_and_no_zeros(kept: tuple[Path, ProcessImage]) -> None:
    content = kept[0].read_bytes()

    assert b"LC_ALL=C" in content, "the control: its own environment is"
    assert _SECRET.encode() not in content
    assert b"head" + bytes(4096) not in content
    assert not os.get_inheritable(kept[1].fd)


@pytest.mark.parametrize(
    ("program", "number", "text"),
    [
        ("pass", errno.ECHILD, "ended"),
        ("import os; os.abort()", errno.ECHILD, "ended"),
        (
            "import os, signal as s, threading as t;t.Thread(target=s.pause).start();os.kill(os.getpid(), 19)",
            errno.ENOSYS,
            "threads",
        ),
    ],
)
def test_what_cannot_be_kept_is_ended(code: int, program: str, number: int, text: str) -> None:
    before = os.listdir("/proc/self/fd"), children()
    with pytest.raises(OSError, match=text) as refused:
        process_images.take(argv(program), {}, code, "/none")

    assert number == refused.value.errno
    assert before == (os.listdir("/proc/self/fd"), children())


def test_a_program_that_is_not_there_is_an_error_too(code: int) -> None:
    with pytest.raises(OSError, match="ended") as refused:
        process_images.take(["/no/such/program"], {}, code, "/none")
    assert errno.ECHILD == refused.value.errno


def test_signals_reach_a_program_on_its_way(code: int) -> None:
    """It stands still at each, and goes on with it."""
    program = (
        "import os, signal; got = []; signal.signal(signal.SIGUSR1, lambda *_: got.append(1));"
        " os.kill(os.getpid(), signal.SIGUSR1); assert got; os.kill(os.getpid(), signal.SIGSTOP)"
    )
    assert process_images.take(argv(program), {}, code, "/none").size_bytes


def test_memory_without_a_heap_is_all_there_is(code: int) -> None:
    program = "import os, signal; x = bytearray(1 << 18); os.kill(os.getpid(), signal.SIGSTOP)"
    regions, registers = process_images.take_memory(argv(program), code)

    names = {region.name for region in regions}
    assert "[heap]" not in names
    assert "[stack]" in names
    assert not names.intersection(("[vdso]", "[vvar]", "[vsyscall]"))
    assert all(region.is_own and region.rights for region in regions)
    assert any(region.start <= registers["rip"] < region.end for region in regions)
    assert all(len(region.content) <= region.end - region.start for region in regions)


def test_small_files_are_kept_whole_and_large_ones_by_name() -> None:
    def region(size: int, name: str) -> process_image_elf.Region:
        return process_image_elf.Region(0, size, 5, name, 0)

    most = process_images._SMALL_BYTES
    regions = [
        region(most, "/small"), region(most - 4096, "/both"), region(4096, "/both"), region(most, "/too"),
        region(4096, "/too"), region(4096, ""),
    ]  # fmt: skip
    process_images._own_the_small(regions)
    assert [True, True, True, False, False, False] == [each.is_own for each in regions]
