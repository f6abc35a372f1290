"""floods: two clients of a server, and its memory, while a third client attacks each of its doors.

`info` is `GET /v1/info`, `exec` a command that ends at once. How long the kernel let the server's loop,
or the client, wait for a processor is left out: that is this machine's other work, and not the server's.
The control is taken while as many processors are busy as an attack takes, but the server is left alone.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from ...daemon.memory import resident_bytes
from ..daemon import Daemon
from ..flooding import DOORS, SANDBOX
from ..plain import Plain
from ..rows import VALUE, Missing, Row, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..settings import Settings

INFO, EXEC = "info", "exec"
_MEASURE, _MIB = "floods", 1 << 20
_BETWEEN_S = 0.004  # two requests of a client
_BEGUN_S = 0.3  # until an attack has its connections
_LATER_S = 60.0
_BUSY = 2
_MOST_MS = 50.0


@dataclass
class Clients:
    """Two clients of one server, measured.

    Args:
        pid: The server's.
        at: The path of a sandbox of theirs.
    """

    address: str
    pid: int
    at: str

    def p99_ms(self, seconds: float) -> dict[str, float]:
        """Of 99 in 100 requests the longest, for each kind of request."""
        kinds: dict[str, Callable[[Plain], object]] = {
            INFO: lambda plain: plain.ask("GET", "/v1/info"),
            EXEC: lambda plain: plain.true_in(self.at),
        }
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        until = time.monotonic() + seconds

        def ask(kind: str) -> None:
            with Plain(self.address) as plain:
                while time.monotonic() < until:
                    began = time.perf_counter() - self._waited_s()
                    kinds[kind](plain)
                    taken[kind].append(time.perf_counter() - self._waited_s() - began)
                    time.sleep(_BETWEEN_S)

        threads = [threading.Thread(target=ask, args=(kind,)) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {kind: 1000 * sorted(each)[int(len(each) * 0.99)] for kind, each in taken.items()}

    def _waited_s(self) -> float:
        """How long the server's loop and this thread were ready to run and did not: sched-stats.rst."""
        waited = 0
        for place in (f"/proc/{self.pid}/task/{self.pid}", "/proc/thread-self"):
            with open(f"{place}/schedstat", encoding="ascii") as file:
                waited += int(file.read().split()[1])
        return waited / 1e9

    def control_ms(self, seconds: float) -> dict[str, float]:
        """The same on a machine that is busy with something else."""
        busy = [
            subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(_BUSY)
        ]
        try:
            return self.p99_ms(seconds)
        finally:
            for each in busy:
                each.kill()
                each.wait()


@dataclass
class Memory:
    """Resident memory of a process, sampled while this context is open.

    Attributes:
        before, most: In bytes.
    """

    pid: int
    before: int = 0
    most: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Memory:
        self.before = self.most = resident_bytes(self.pid)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, resident_bytes(self.pid))


class Attack:
    """An attack on one door, under way while this is a context. Its sandbox is its own."""

    def __init__(self, address: str, door: str) -> None:
        self._address, self._door = address, door

    def __enter__(self) -> Attack:
        with Plain(self._address) as plain:
            self._sandbox = plain.ask("POST", "/v1/sandboxes", SANDBOX)["id"]
        path = self._address.removeprefix("unix:")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ringfence.bench.flooding", path, self._sandbox, self._door],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.__exit__()
            raise OSError(f"the attack on {self._door} ended with {self._process.returncode}")
        time.sleep(_BEGUN_S)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.communicate()
        with Plain(self._address) as plain:
            plain.ask("DELETE", f"/v1/sandboxes/{self._sandbox}")


def measure(settings: Settings) -> Iterator[Row | Missing]:
    """A row for each door and client; then of each door's server the memory, a minute later."""
    try:
        from ...api.app import make_app  # noqa: F401  without the extra there is no server
    except ImportError as exc:
        yield Missing("ringfence serve", str(exc))
        return
    seconds = 2.0 if settings.quick else 5.0
    flooded: list[tuple[str, Daemon, Memory, float]] = []
    try:
        for door in DOORS:
            daemon = Daemon(["--e2b"], max_sandboxes=20)
            yield from _rows(door, daemon, seconds, flooded)
        for door, daemon, memory, over in flooded:
            time.sleep(max(0.0, over + _LATER_S - time.monotonic()))
            yield _later(door, memory, resident_bytes(daemon.process.pid))
    finally:
        for _door, daemon, _memory, _over in flooded:
            daemon.close()


def _rows(
    door: str, daemon: Daemon, seconds: float, flooded: list[tuple[str, Daemon, Memory, float]]
) -> Iterator[Row]:
    memory = Memory(daemon.process.pid)
    flooded.append((door, daemon, memory, 0.0))
    with Plain(daemon.address) as plain:
        at = "/v1/sandboxes/" + plain.ask("POST", "/v1/sandboxes", {})["id"]
    clients = Clients(daemon.address, daemon.process.pid, at)
    control = clients.control_ms(seconds)
    with memory, Attack(daemon.address, door):
        found = clients.p99_ms(seconds)
    flooded[-1] = door, daemon, memory, time.monotonic()
    for kind, p99 in found.items():
        yield Row(
            _MEASURE,
            f"{door}: p99 of another client's {kind}",
            "ms",
            p99,
            target=Target(VALUE, must=_MOST_MS + control[kind]),
            note=f"{control[kind]:.1f} ms on a busy machine without the attack",
        )


def _later(door: str, memory: Memory, now: int) -> Row:
    return Row(
        _MEASURE,
        f"{door}: the daemon's memory a minute later, beside before",
        "x",
        now / memory.before,
        target=Target(VALUE, must=1.2),
        note=f"{memory.before / _MIB:.0f} MiB before, {memory.most / _MIB:.0f} at most, "
        f"{now / _MIB:.0f} a minute later",
    )
