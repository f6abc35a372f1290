"""Answers that never arrive: what is asked again has happened once, however often the line breaks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ringfence.client import Client
from tests.api.conftest import Daemon


class Line:
    """A server's socket through which the first `lost` answers to POST requests do not come back."""

    def __init__(self, path: Path, server: str, lost: int) -> None:
        self._server, self.lost = server, lost
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server, posts = socket.socket(socket.AF_UNIX), threading.Event()
        server.connect(self._server)

        def requests() -> None:
            with suppress(OSError):
                while data := client.recv(1 << 16):
                    if data.startswith(b"POST"):
                        posts.set()
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)

        threading.Thread(target=requests, daemon=True).start()
        with client, server, suppress(OSError):
            while answer := server.recv(1 << 16):
                if posts.is_set() and self.lost > 0:
                    self.lost -= 1
                    client.shutdown(socket.SHUT_RDWR)
                    return  # the server has done it, and nobody hears of it
                client.sendall(answer)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def bad_line(daemon: Daemon, tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path / "line", daemon.socket, 0)
    yield line
    line.close()


def test_a_lost_answer_makes_no_second_sandbox_and_no_second_run(
    client: Client, bad_line: Line, tmp_path: Path
) -> None:
    before = len(client.list())
    with Client(f"unix:{tmp_path}/line") as through:
        bad_line.lost = 2
        sandbox = through.create()
        assert (before + 1, 0) == (len(client.list()), bad_line.lost)
        for run in (1, 2):
            bad_line.lost = 2
            said = sandbox.exec(["sh", "-c", "echo x >> runs; wc -l < runs"]).text
            assert (f"{run}\n", 0) == (said, bad_line.lost)
        bad_line.lost = 1
        process = sandbox.start(["sh", "-c", "echo x >> runs"])
        assert process.wait(30).ok
        assert "x\nx\nx\n" == sandbox.files.read_text("runs")
        assert 3 == len(sandbox.execs())
        sandbox.terminate()
