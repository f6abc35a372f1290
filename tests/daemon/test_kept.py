"""What a daemon keeps of sandboxes that are over: records on disk, and next to nothing in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.daemon.counted import count
from tests.daemon.servers import Server
from tests.native.outside import until

pytestmark = pytest.mark.anyone

CYCLES, AT_ONCE = 60, 4
LEAST_OF_ONE = 20  # objects that a sandbox consists of, at the very least
# Python's sqlite3 forgets what it knows of its cursors at every 200th.
NOISE = 250


def cycle(server: Server) -> None:
    sandbox = server.make()
    made = server.run(sandbox, "echo out; echo err >&2; echo x > file", wait=True)
    server.ask("GET", f"/sandboxes/{sandbox}/execs/{made}")
    assert b"x\n" == server.http.get(f"/v1/sandboxes/{sandbox}/files/content?path=file").content
    server.ask("DELETE", f"/sandboxes/{sandbox}")


@pytest.mark.full
def test_nothing_stays_in_memory_of_sandboxes_that_are_over(server: Server) -> None:
    server.module = "tests.daemon.counted"
    server.start()
    place = str(server.step)
    with ThreadPoolExecutor(AT_ONCE) as clients:
        list(clients.map(cycle, [server] * (CYCLES // 3)))  # what is made on first use
        before = count(place)

        list(clients.map(cycle, [server] * CYCLES))

    assert until(lambda: count(place) < before + NOISE, 30)
    before = count(place)
    alive = [server.make() for _ in range(10)]
    assert count(place) > before + LEAST_OF_ONE * len(alive), "the control: what lives is seen"
