"""Cells against their kernel and against the host."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import Sandbox
from ringfence.contexts import Context
from ringfence.contexts.execution import MOST_OUTPUT_BYTES, MOST_RESULTS, Cell
from ringfence.contexts.frames import (
    MOST_CODE_BYTES,
    MOST_FRAME_BYTES,
    BrokenFrameError,
    Reader,
    request,
)
from ringfence.errors import InvalidRequest

# Finds the wire as a hostile program would: every descriptor that is a pipe of the kernel.
WIRE = """
import os
def wire(data):
    for fd in range(200, 210):
        try: os.write(fd, data)
        except OSError: pass
"""


def test_a_fork_is_no_second_kernel(context: Context) -> None:
    found = context.run(
        "import os\npid = os.fork()\nprint('child' if not pid else 'parent', flush=True)\n"
        "_ = os.waitpid(pid, 0) if pid else None\npid > 0"
    )

    assert ["child", "parent"] == sorted(found.stdout.split())
    assert "True" == found.text
    assert "2" == context.run("1 + 1").text


def test_closed_streams_are_back_with_the_next_cell(context: Context) -> None:
    assert "z\n" == context.run("import os, sys\nos.close(1); os.close(2)\nprint('z')").stdout
    assert context.run("sys.stdout.close()").error is None
    assert "1\n2\n" == context.run("print(1)\n!echo 2").stdout


def test_a_cell_may_hold_very_many_descriptors(context: Context) -> None:
    found = context.run(
        "import resource\nmost = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "held = [open('/dev/null') for _ in range(min(most, 5000) - 400)]\nheld[-1].fileno() > 1023"
    )
    assert "True" == found.text, found.error
    assert "said\n" == context.run("print('said')").stdout
    assert "1\n2\n" == context.run("print(1)\n!echo 2").stdout


@pytest.mark.parametrize(
    "end", ["os._exit(9)", "os.kill(os.getpid(), 9)", "os.closerange(3, 5000)"]
)
def test_the_end_of_the_kernel_is_told(context: Context, end: str) -> None:
    found = context.run(f"import os\nprint('said', flush=True)\n{end}", timeout_s=2)

    assert found.error is not None
    assert "lost" in found.error.value
    assert not context.running
    context.restart()
    assert "1" == context.run("1").text


def test_a_long_line_without_end_of_it_is_capped(context: Context) -> None:
    found = context.run("!head -c 300000000 /dev/zero", timeout_s=120)

    assert 300_000_000 == len(found.stdout) + found.dropped_bytes


def test_processes_left_behind_do_not_hold_the_cell(context: Context) -> None:
    assert context.run("!sleep 1000 & echo on", timeout_s=60).error is None
    assert "1" == context.run("1").text


@pytest.mark.parametrize(
    "forged",
    [
        b"no frame at all" * 100,
        b"\x1eout - 999999999 -\n",
        b"\x1eout - 99999999999999999999 -\n" * 10,
        b"\x00" * 100_000,
    ],
)
def test_bytes_that_are_no_frame_end_the_context_alone(sandbox: Sandbox, forged: bytes) -> None:
    with sandbox.context() as hostile, sandbox.context() as other:
        found = hostile.run(
            f"{WIRE}\nwire({forged!r})\nimport time; time.sleep(1000)", timeout_s=60
        )

        assert found.error is not None
        assert "damaged" in found.error.value
        assert "2" == other.run("1 + 1").text


def test_forged_frames_are_the_cells_own_and_bounded(context: Context) -> None:
    """A million results and 300 MB of output, for this cell and for ones that are none."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = context.run(
        WIRE + "import gc, __main__\n"
        "kernel = next(o for o in gc.get_objects() if type(o).__name__ == 'Wire')\n"
        "cell = kernel.cell.encode()\n"
        "for _ in range(300):\n"
        "    os.write(kernel._out, b'\\x1emain %s 0 -\\n' % cell * 1000)\n"
        "    data = b'\\x1eout %s 65536 -\\n' % cell + b'x' * 65536\n"
        "    kernel_write = lambda d: os.write(kernel._out, d)\n"
        "    left = memoryview(data * 16)\n"
        "    while left: left = left[kernel_write(left):]\n",
        timeout_s=120,
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10

    assert MOST_RESULTS == len(found.results)
    assert 0 < found.dropped_results
    assert len(found.stdout) <= MOST_OUTPUT_BYTES
    assert grown < 256 << 20


def test_a_kernel_that_reads_nothing_blocks_nobody(context: Context) -> None:
    """It is stopped, so that neither code nor interrupts arrive."""
    context.run("import os, signal, threading")
    found = context.run("os.kill(os.getpid(), signal.SIGSTOP)", timeout_s=0.3)

    assert found.timed_out
    assert "killed" in str(found.error)


def test_code_is_bounded(context: Context) -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        context.run("#" * (MOST_CODE_BYTES + 1))
    assert "1000000" == context.run(f"len({'x' * 1_000_000!r})").text
    assert request("run", code="\ud800").isascii()


def _frame(kind: str, payload: bytes, name: str = "-") -> bytes:
    return f"\x1e{kind} ab {len(payload)} {name}\n".encode() + payload


@given(
    st.lists(st.tuples(st.sampled_from(["out", "part", "main"]), st.binary(max_size=300))),
    st.data(),
)
def test_frames_come_apart_wherever_they_are_cut(
    frames: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(_frame(kind, payload) for kind, payload in frames)
    reader, found = Reader(), []
    while stream:
        count = data.draw(st.integers(1, max(1, len(stream))))
        found += [(kind, payload) for kind, _, _, payload in reader.feed(stream[:count])]
        stream = stream[count:]

    assert frames == found


@given(st.lists(st.binary(max_size=400), max_size=30))
def test_no_bytes_do_more_than_end_the_stream(pieces: list[bytes]) -> None:
    reader, cell = Reader(), Cell("ab")
    try:
        for piece in pieces:
            for kind, _, name, payload in reader.feed(piece):
                cell.take(kind, name, payload)
    except BrokenFrameError:
        pass
    cell.execution.to_json()


def test_a_reader_that_begins_in_the_middle_finds_the_next_frame() -> None:
    stream = b"rest of a payload" * 50 + _frame("out", b"a") + _frame("out", b"b")
    reader = Reader(in_the_middle=True)
    found = [
        each[3] for at in range(0, len(stream), 7) for each in reader.feed(stream[at : at + 7])
    ]

    assert [b"a", b"b"] == found


def test_a_frame_is_bounded() -> None:
    with pytest.raises(BrokenFrameError):
        list(Reader().feed(f"\x1eout ab {MOST_FRAME_BYTES + 1} -\n".encode()))
