"""Run by test_pythons.py with each interpreter: what a sandbox needs of the Python that starts it."""

from __future__ import annotations

import sys
import threading
import time

from ringfence import Sandbox


def main() -> None:
    for turn in range(4):  # the later ones are prebuilt
        with Sandbox.create(network="none") as sandbox:
            line = b"%d\n" % turn
            assert line == sandbox.exec(["sh", "-c", "read x; echo $x"], stdin=line).stdout
    with Sandbox.create(network=["example.com"]) as sandbox:
        sandbox.files.write("kept.txt", "kept")
        look_up = "import socket; socket.getaddrinfo('denied.test', 80)"
        assert sandbox.exec(["python3", "-c", look_up]).exit_code == 1
        _exec_in_threads(sandbox)
        snapshot = sandbox.snapshot()
    try:
        with Sandbox.restore(snapshot.id) as restored:
            assert "kept" == restored.files.read_text("kept.txt")
            time.sleep(2)  # PID 1 hibernates after a second without work
            assert b"awake\n" == restored.exec(["echo", "awake"]).stdout
    finally:
        Sandbox.delete_snapshot(snapshot.id)
    print("{}.{}".format(*sys.version_info))


def _exec_in_threads(sandbox: Sandbox) -> None:
    codes = []
    threads = [
        threading.Thread(target=lambda: codes.append(sandbox.exec(["true"]).exit_code))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [0] * 8 == codes


if __name__ == "__main__":
    main()
