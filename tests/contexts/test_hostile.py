"""Cells against their kernel and against the host."""

from __future__ import annotations

import contextlib
import json
import resource
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import Sandbox
from ringfence.contexts import Context
from ringfence.contexts.context import variables_of
from ringfence.contexts.execution import (
    MOST_LOGS,
    MOST_OUTPUT_BYTES,
    MOST_PART_BYTES,
    MOST_PARTS,
    MOST_PROMPTS,
    MOST_RESULTS,
    Cell,
    Result,
)
from ringfence.contexts.frames import (
    MOST_CODE_BYTES,
    MOST_FRAME_BYTES,
    BrokenFrameError,
    Reader,
    request,
)
from ringfence.errors import ExecError, InvalidRequest
from tests.contexts import forged

pytestmark = pytest.mark.anyone

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


@pytest.mark.full
def test_a_long_line_without_end_of_it_is_capped(context: Context) -> None:
    found = context.run("!head -c 300000000 /dev/zero", timeout_s=120)

    assert 300_000_000 == len(found.stdout) + found.dropped_bytes


def test_processes_left_behind_do_not_hold_the_cell(context: Context) -> None:
    assert context.run("!sleep 1000 & echo on", timeout_s=60).error is None
    assert "1" == context.run("1").text


@pytest.mark.parametrize("how", forged.ENDS)
def test_bytes_that_are_no_frame_end_the_context_alone(sandbox: Sandbox, how: str) -> None:
    with sandbox.context() as hostile, sandbox.context() as other:
        code = f"{forged.PRELUDE}\n{forged.ENDS[how]}\nimport time; time.sleep(1000)"
        found = hostile.run(code, timeout_s=60)

        assert found.error is not None
        assert "damaged" in found.error.value
        assert "2" == other.run("1 + 1").text


@pytest.mark.full
@pytest.mark.parametrize("how", forged.LASTS)
def test_forged_frames_are_the_cells_own(context: Context, how: str) -> None:
    """What they say is read within bounds, and the next cell finds all as it was."""
    before = forged.reset_peak()
    found = context.run(f"kept = 7\n{forged.PRELUDE}\n{forged.LASTS[how]}", timeout_s=120)
    for result in found.results[:1]:
        assert result.text is None or len(result.text) <= MOST_FRAME_BYTES
        with contextlib.suppress(InvalidRequest):
            assert len(repr(result.json)) < 1 << 30
    assert found.to_json()

    assert "CellTimeout" != getattr(found.error, "name", "")
    assert "7" == context.run("kept").text
    assert forged.peak() - before < forged.GROWTH_BYTES


def test_variables_that_are_no_list_of_the_kernels_are_refused(context: Context) -> None:
    """Decoded, so many values would take some hundred bytes each of the host's memory."""
    before = forged.reset_peak()
    context.run(
        f"{forged.PRELUDE}\n_kernel = next(o for o in gc.get_objects() if type(o).__name__ == 'Kernel')\n"
        "many = b'[' + b'[],' * 5_000_000 + b'0]'\n"
        "type(_kernel)._variables = lambda self, _: self.wire.result('main', {'application/json': many})"
    )
    with pytest.raises(ExecError, match="bytes long"):
        context.variables()
    assert forged.peak() - before < 100 << 20


@pytest.mark.full
def test_prompts_whose_answers_nothing_reads_end_with_the_time_limit(context: Context) -> None:
    before, began = forged.reset_peak(), time.monotonic()
    found = context.run(f"{forged.PRELUDE}\n{forged.PROMPTS}", timeout_s=2)

    assert "CellTimeout" == getattr(found.error, "name", "")
    assert time.monotonic() - began < 25, "30 s are for an answer without a time limit"
    assert forged.peak() - before < 128 << 20


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


_DAMAGED = st.builds(
    lambda kind, cell, length, name, payload, ends: (
        b"\x1e%s %s %s %s%s" % (kind, cell, length or b"%d" % len(payload), name, ends) + payload
    ),
    st.sampled_from([b"out", b"err", b"part", b"main", b"error", b"input", b"done", b"hello", b"x"])
    | st.binary(max_size=9),
    st.sampled_from([b"ab", b"-", b"0" * 32, b"0" * 33, b"AB", b""]),
    st.none()
    | st.sampled_from([b"0", b"3", b"99", b"16777217", b"9" * 9, b"9" * 30, b"-1", b"+1"]),
    st.sampled_from([b"-", b"application/json", b"image/png", b"value", b"\xff", b"n" * 101, b""]),
    st.binary(max_size=99)
    | st.sampled_from(
        [b"\xff" * 9, b"[" * 99_999, b"9" * 9_999, b"1 " + b"9" * 99, b"\xed\xa0\x80"]
    ),
    st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b""]),
)


@given(st.lists(_DAMAGED, max_size=8), st.booleans(), st.integers(1, 300))
def test_frames_that_are_nearly_right_are_read_or_end_the_stream(
    frames: list[bytes], in_the_middle: bool, size: int
) -> None:
    """Whatever is kept of them can be shown, and no more is held than came."""
    stream, seen = b"".join(frames), 0
    reader, cell = Reader(in_the_middle=in_the_middle), Cell("ab")
    try:
        for at in range(0, len(stream), size):
            for kind, cell_id, name, payload in reader.feed(stream[at : at + size]):
                seen += len(payload)
                assert len(payload) <= MOST_FRAME_BYTES
                if cell_id == "ab":
                    cell.take(kind, name, payload)
    except BrokenFrameError:
        pass
    assert seen <= len(stream)
    assert reader.consumed <= len(stream)
    json.dumps(cell.execution.to_json())
    for result in cell.execution.results:
        again = Result.from_json(result.to_json())
        assert result.text == again.text
        for name in ("json", "chart"):
            with contextlib.suppress(InvalidRequest):
                getattr(again, name)
    assert variables_of(None) == variables_of([1, "x", [[]]]) == []


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


def test_what_a_cell_keeps_of_each_kind_is_bounded() -> None:
    """A kernel that a program has taken over sends frames for as long as nobody asks for them."""
    cell = Cell("ab")
    for more in (MOST_PROMPTS, 1):
        for _ in range(more + 50):
            cell.take("input", "-", b"x" * (1 << 17))
        prompts = cell.wait(0.0, wants_pieces=False)[2]
        assert [1 << 16] * min(MOST_PROMPTS, more + 50) == [len(each) for each in prompts]
    execution = cell.execution
    for number in range(MOST_PARTS + 5):
        cell.take("part", f"text/{number}", b"x")
    cell.take("main", "-", b"")
    assert MOST_PARTS == len(execution.results[0].data)
    large = bytes(MOST_PART_BYTES)
    for number in range(3):
        cell.take("part", "text/plain", large[number:])
        cell.take("part", "text/html", b"more")
        cell.take("display", "-", b"")
    assert [["text/plain"]] == [[*each.data] for each in execution.results[1:]]
    assert 2 == execution.dropped_results
    for _ in range(MOST_LOGS // 2 + 2):
        cell.take("out", "-", b"x")
        cell.take("err", "-", b"y")
    assert (MOST_LOGS, 4) == (len(execution.logs), execution.dropped_bytes)
