"""Host files in a machine by FUSE, over a line whose other end serves them; and who beats over a stream."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.linux.child import alone, result_of

from ringfence.guest import sharing, streamed
from ringfence.guest.channels import CLOCK
from ringfence.launcher import wire
from ringfence.launcher.fuse.serving import _Line
from ringfence.launcher.fuse.share import Share
from ringfence.launcher.link.line import CONTROL, DATA, frame
from ringfence.linux import fuse, mounts, namespaces


class Noting(Share):
    """A share that notes which operations it was asked for."""

    def __init__(self, root: int, told: int) -> None:
        super().__init__(root)
        self._told = told

    def answer(self, message: memoryview) -> bytes:
        os.write(self._told, bytes([fuse.HEADER.unpack_from(message)[1]]))
        return super().answer(message)


def children() -> list[int]:
    me = os.getpid()
    return [int(each) for each in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


@pytest.mark.root
def test_files_are_asked_for_over_the_line_and_what_is_the_kernels_own_is_not(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    require("fuse")
    (tmp_path / "place").mkdir()
    (tmp_path / "shown").mkdir()
    content = os.urandom(300_000)
    (tmp_path / "shown/file").write_bytes(content)

    def look() -> Any:
        signal.alarm(60)
        alone(namespaces.CLONE_NEWNS)
        mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
        ours, port = socket.socketpair()
        told, tell = os.pipe()
        place = str(tmp_path / "place")
        spared, spare = os.pipe()
        sharing.survive = lambda: os.write(spare, b"s")  # type: ignore[assignment]  # few may do it
        opened = len(os.listdir("/proc/self/fd"))
        sharing.mount(place, port.fileno())
        found: dict[str, Any] = {"opened": len(os.listdir("/proc/self/fd")) - opened}
        if os.fork() == 0:
            root = os.open(tmp_path / "shown", os.O_PATH | os.O_DIRECTORY)
            line = _Line(ours.fileno(), Noting(root, tell))
            while line.serve():
                pass
            os._exit(0)
        os.close(tell)
        try:
            found["same"] = (tmp_path / "place/file").read_bytes() == content
            found["flags"] = os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NODEV)
            found["spared"] = len(os.read(spared, 9))
            mounts.umount2(place, mounts.MNT_DETACH)
        finally:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        found["asked"] = sorted({*os.read(told, 1 << 16)})
        return found

    found = result_of(look)
    assert found["same"]
    assert 0 == found["opened"], "its device is the helpers' alone"
    assert os.ST_NOSUID | os.ST_NODEV == found["flags"]
    assert 2 == found["spared"], "both are the last to be killed for memory"
    assert {fuse.LOOKUP, fuse.READ} <= {*found["asked"]}
    assert not {fuse.INIT, fuse.INTERRUPT, fuse.DESTROY} & {*found["asked"]}


def test_answers_reach_the_kernel_one_by_one_however_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at once, and one in pieces. What comes after the last one is nobody's for long."""
    monkeypatch.setattr(sharing, "_PAUSE_S", 0.0)
    monkeypatch.setattr(sharing, "_PAUSES", 2)
    answers = [(4 + size).to_bytes(4, "little") + bytes([size]) * size for size in (5, 6, 7, 8)]
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, port = socket.socketpair()
    with kernel, device, ours, port:
        ours.sendall(answers[0] + answers[1] + answers[2][:3])
        reading = threading.Thread(target=sharing._answer, args=(device.fileno(), port.fileno()))
        reading.start()
        kernel.settimeout(20)
        found = [kernel.recv(100) for _ in range(2)]
        ours.sendall(answers[2][3:] + answers[3] + b"rest")
        ours.shutdown(socket.SHUT_WR)
        found += [kernel.recv(100) for _ in range(2)]
        reading.join(20)
        assert not reading.is_alive()

    assert answers == found


class TestBeats:
    """Each side says something once in a while, and ends once it has heard nothing for longer."""

    @pytest.fixture
    def ends(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        turns = itertools.count(0.0, 4.0)  # each turn takes so long, however busy the host is
        monkeypatch.setattr(streamed, "time", SimpleNamespace(monotonic=lambda: next(turns)))
        monkeypatch.setattr(streamed, "BEAT_S", 0.001)
        monkeypatch.setattr(streamed, "SILENT_S", 50.0)
        near, far = socket.socketpair()
        control, theirs = wire.socketpair()
        yield near, far, control, theirs
        for each in (near, far, control, theirs):
            each.close()

    def test_who_hears_nothing_ends_and_has_said_something(self, ends: Any) -> None:
        near, far, _control, theirs = ends
        streamed.Beating(near.fileno(), theirs, is_host=False).run()

        far.settimeout(0)
        beat = frame(CLOCK, CONTROL, b"0")
        said = far.recv(1 << 16)
        assert said.startswith(beat * 2), "not once alone"
        assert b"" == said.replace(beat, b"")

    def test_beats_are_nobodys_requests_and_keep_it_alive(
        self, ends: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(streamed, "SILENT_S", 1e9)
        near, far, control, theirs = ends
        far.sendall(frame(CLOCK, CONTROL, b"0"))
        wire.send_raw(control, b"an answer")
        control.shutdown(socket.SHUT_WR)
        streamed.Beating(near.fileno(), theirs, is_host=False).run()

        far.settimeout(0)
        assert frame(DATA, CONTROL, b"an answer") in far.recv(1 << 16)
        control.setblocking(False)
        with pytest.raises(BlockingIOError):
            wire.receive_raw(control)

    def test_another_descriptor_is_written_to_where_there_are_two_pipes(self, ends: Any) -> None:
        near, far, _control, theirs = ends
        read, write = os.pipe()
        streamed.Beating(near.fileno(), theirs, is_host=False, out=write).run()

        os.set_blocking(read, False)
        assert frame(CLOCK, CONTROL, b"0") in os.read(read, 1 << 16)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        os.close(read)
        os.close(write)
