"""Frames that copies of threads begin from: the kernel takes vector registers only from one that fits."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.launcher.live import frames

pytestmark = pytest.mark.anyone

WITHOUT_TILES, WITH_TILES = 0x200E7, 0x600E7  # features of processors: bit 18 is the data of tiles
_SMALL, _LARGE = 2816, 2816 + 8192


def thread(size: int, features: int, in_use: int = 0x7) -> Any:
    extended = bytearray(size)
    struct.pack_into("=Q", extended, 464, features)
    struct.pack_into("=Q", extended, 512, in_use)
    extended[_SMALL - 1] = 7
    return SimpleNamespace(extended=bytes(extended), mask=5)


@pytest.mark.parametrize(("size", "features"), [(_SMALL, WITHOUT_TILES), (_LARGE, WITH_TILES)])
def test_a_frame_has_no_room_for_tiles(size: int, features: int) -> None:
    registers = dict.fromkeys((*frames._ORDER, "orig_rax"), 0)
    state: Any = SimpleNamespace(
        thread=thread(size, features), registers=registers, alternate_stack=bytes(24)
    )
    frame, at = frames.signal_frame(state, 0x1000)
    magic, whole, told, inner = struct.unpack_from("=IIQI", frame, 464)
    assert (0x46505853, _SMALL + 4, WITHOUT_TILES, _SMALL) == (magic, whole, told, inner)
    assert (7, 0x46505845) == (frame[_SMALL - 1], *struct.unpack_from("=I", frame, _SMALL))
    assert at % 64 == 0


@pytest.mark.parametrize(
    ("in_use", "uses"), [(0x7, False), (1 << 17, False), (1 << 18, True), (0x600E7, True)]
)
def test_a_thread_is_known_by_data_in_its_tiles(in_use: int, uses: bool) -> None:
    assert uses == frames.uses_tiles(thread(_LARGE, WITH_TILES, in_use))


def test_a_processor_without_such_registers_has_no_header() -> None:
    assert not frames.uses_tiles(SimpleNamespace(extended=bytes(512)))  # type: ignore[arg-type]


def test_a_frame_has_each_register_the_signal_mask_and_no_single_step() -> None:
    registers = {name: number for number, name in enumerate(frames._ORDER, 100)}
    registers |= {"orig_rax": (1 << 64) - 1, "eflags": 0x100 | 0x246, "rax": 0}
    stack = struct.pack("=QQQ", 1, 2, 3)
    state: Any = SimpleNamespace(
        thread=thread(_SMALL, WITHOUT_TILES), registers=registers, alternate_stack=stack
    )
    frame, at = frames.signal_frame(state, 0x1000)
    context = frame[at - 0x1000 :]

    assert stack == context[16:40]
    words = struct.unpack_from("=18Q", context, 40)
    wanted = [registers[name] for name in frames._ORDER[:-1]]
    assert [*wanted, 0x246] == list(words)
    assert (0x33, 0, 0, 0x2B) == struct.unpack_from("=4H", context, 184)
    assert 0x1000 == struct.unpack_from("=Q", context, 224)[0], "where the vector registers are"
    assert 5 == struct.unpack_from("=Q", context, 296)[0], "the mask"
    assert 0x346 == registers["eflags"], "those of the source stay as they are"


@pytest.mark.parametrize(
    ("answer", "begins_again"),
    [
        (-512, True),
        (-513, True),
        (-514, True),
        (-516, True),
        (-515, False),
        (-4, False),
        (0, False),
    ],
)
@pytest.mark.parametrize("is_in_call", [True, False])
def test_an_interrupted_system_call_begins_again_and_nothing_else(
    answer: int, begins_again: bool, is_in_call: bool
) -> None:
    """What is in no system call may have such a number in a register by chance."""
    rax = answer & (1 << 64) - 1
    registers = {"rax": rax, "orig_rax": 35 if is_in_call else (1 << 64) - 1, "rip": 1000}
    state: Any = SimpleNamespace(registers=registers)
    found = frames.resumed(state)

    wanted = (35, 998) if begins_again and is_in_call else (rax, 1000)
    assert wanted == (found["rax"], found["rip"])
