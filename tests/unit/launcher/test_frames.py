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
