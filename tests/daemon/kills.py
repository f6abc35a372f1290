"""Kill -9 of a daemon again and again under load, and what of it clients and the host see.

    python -m tests.daemon.kills --kills 100 --clients 50 --burners 11

Each client makes sandboxes, runs commands whose output and exit code it knows, and compares. Then
everything of this daemon that could leak is counted, whatever else runs on the machine; see `Own`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ringfence import Client
from ringfence.errors import RingfenceError
from tests.daemon.servers import Server
from tests.leaks import Census, cgroups, descendants, wait_for_calm
from tests.native.outside import children_of

_CALM_S = 60.0
_RETRIES = 60
_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct", "freezer")  # each a hierarchy of version 1
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_EARLY = 0.2  # of the kills come before the daemon answers


@dataclass
class Report:
    """What was seen.

    Attributes:
        errors: How often each code was raised to a client.
        wrong: Results that are not those of the command: bytes, exit codes, runs.
        restarts_s: From the start of the process to its first answer.
        left: What grew on the host.
    """

    sandboxes: int = 0
    execs: int = 0
    kills: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield f"{self.kills} kills, {self.sandboxes} sandboxes, {self.execs} execs"
        times = sorted(self.restarts_s)
        middle, last = times[len(times) // 2], times[-1]
        yield f"restart to first answer: median {middle:.2f} s, longest {last:.2f} s"
        yield f"errors told to clients: {dict(self.errors) or 'none'}"
        yield f"wrong results (bytes, exit codes, runs): {len(self.wrong)}"
        yield from self.wrong[:20]
        yield f"left on the host: {len(self.left)}"
        yield from (f"  {kind}: {what}" for kind, what in self.left[:20])


class Own:
    """What only the daemons of this run can have made: nobody else's work on the machine is counted.

    Every process of them is a descendant of this one, which is a subreaper: prctl(2). Their temporary
    directories are below the state directory's, and so are their cgroups below one of this run's where
    root can make such (version 1); elsewhere it is their names that say whose they are.
    """

    def __init__(self, state: Path) -> None:
        self._place, self._before = str(state.parent), frozenset(children_of(os.getpid()))
        self._temporary = state.parent / f"{state.name}.tmp"
        self._temporary.mkdir()
        self.env = {"TMPDIR": str(self._temporary)}
        self._cgroups: list[Path] = []
        roots = [Path("/sys/fs/cgroup", name) for name in _CONTROLLERS]
        if 0 == os.geteuid() and all((each / "tasks").exists() for each in roots):
            name = f"kills-{os.getpid()}"
            self._cgroups = [each / name for each in roots]
            self.env["RINGFENCE_CGROUP"] = f"/{name}"

    def census(self) -> Census:
        """Everything there is of it. The state directory itself stays."""
        found = [("process", line) for line in descendants()]
        found += [("path", path) for path in glob.glob(f"{self._temporary}/**", recursive=True)]
        found += [("path", path) for path in glob.glob(f"{self._place}/**/*.sock", recursive=True)]
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
        found += [("mount", line) for line in lines if self._place in line]
        for each in glob.glob("/sys/block/loop*/loop/backing_file"):
            with contextlib.suppress(OSError):  # it has just gone
                if self._place in Path(each).read_text():
                    found.append(("loop device", each))
        names = [path for each in self._cgroups for path in glob.glob(f"{each}/*/")]
        found += [("cgroup", path) for path in (names if self._cgroups else cgroups())]
        return frozenset(found)

    def __enter__(self) -> Own:
        for each in self._cgroups:
            each.mkdir()
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
        return self

    def __exit__(self, *_: object) -> None:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 0)
        for each in self._cgroups:
            with contextlib.suppress(OSError):  # what is left in it has been told
                each.rmdir()

    def reap(self, server: Server) -> None:
        """Forget who has ended of those that a killed daemon left to us."""
        known = server.process.pid if server.process else 0
        for pid in children_of(os.getpid()):
            if pid not in (known, *self._before):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def run(
    state: Path, kills: int, clients: int, *, seed: int = 0, pause_s: float = 1.5
) -> tuple[Report, Server]:
    """Kill a daemon so often while clients work; it is stopped at the end."""
    report, chance = Report(), random.Random(seed)
    config = state.parent / f"{state.name}.json"
    config.write_text(json.dumps({"manager": {"max_sandboxes": 4 * clients}}))
    options = ("--config", str(config), "--log-level", "error")
    with Own(state) as own:
        before = own.census()
        server, over = Server(state, own.env), threading.Event()
        server.start(*options, faulty=False)
        threads = [
            threading.Thread(target=_work, args=(server, over, report, seed * 1000 + each))
            for each in range(clients)
        ]
        for each in threads:
            each.start()
        try:
            for _ in range(kills):
                over.wait(chance.uniform(0.1, pause_s))
                _kill(server, report)
                if chance.random() < _EARLY:
                    server.begin(*options, faulty=False)
                    over.wait(chance.uniform(0.0, pause_s / 2))
                    _kill(server, report)
                own.reap(server)
                began = time.monotonic()
                server.start(*options, faulty=False)
                server.ask("GET", "/info")
                report.restarts_s.append(time.monotonic() - began)
        finally:
            over.set()
            for each in threads:
                each.join()
        left = server.ask("GET", "/sandboxes")["items"]
        report.left = [("sandbox", each["id"]) for each in left]
        server.stop()

        def take() -> Census:
            own.reap(server)
            return own.census()

        report.left += wait_for_calm(before, patience_s=_CALM_S, take=take)
    return report, server


def _kill(server: Server, report: Report) -> None:
    server.kill()
    report.kills += 1


def _work(server: Server, over: threading.Event, report: Report, seed: int) -> None:
    """One client, until it is over."""
    chance = random.Random(seed)
    with Client(f"unix:{server.state}/ringfence.sock", retries=_RETRIES) as client:
        while not over.is_set():
            try:
                _one_sandbox(client, over, report, chance)
            except RingfenceError as exc:
                report.errors[exc.code] += 1
                report.wrong.append(f"{type(exc).__name__}: {exc}")


def _one_sandbox(
    client: Client, over: threading.Event, report: Report, chance: random.Random
) -> None:
    with client.create() as sandbox:
        report.sandboxes += 1
        ran = []
        for number in range(chance.randint(1, 6)):
            lines, code = chance.choice((1, 10, 2000)), chance.randint(1, 100)
            script = (
                f"echo {number} >> ran; i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); done;"
                f" {chance.choice((':', 'sleep 0.2'))}; exit {code}"
            )
            ran.append(number)
            result = (
                sandbox.shell(script)
                if chance.random() < 0.5
                else sandbox.start(["sh", "-c", script]).wait()
            )
            report.execs += 1
            wanted = "".join(f"line {i}\n" for i in range(lines)).encode()
            if (code, wanted) != (result.exit_code, result.stdout):
                report.wrong.append(
                    f"exec: {result.exit_code} for {code}, {len(result.stdout)} bytes for {len(wanted)}"
                )
            if over.is_set():
                break
        told = sandbox.shell("cat ran").stdout.split()
        if [str(each).encode() for each in ran] != told:
            report.wrong.append(f"ran {told!r} for {ran!r}")


def main() -> int:
    """The command; 1 where anything was wrong or left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--burners", type=int, default=0, help="processes that use a core each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=1.5, help="longest time between kills")
    given = parser.parse_args()
    burn = [sys.executable, "-c", "while True: pass"]
    with tempfile.TemporaryDirectory(prefix="rf-kills-") as place, contextlib.ExitStack() as stack:
        for _ in range(given.burners):
            burner = subprocess.Popen(burn)
            stack.callback(burner.wait)
            stack.callback(burner.kill)
        report, _ = run(
            Path(place, "s"), given.kills, given.clients, seed=given.seed, pause_s=given.pause
        )
    print(*report.lines(), sep="\n")
    return 1 if report.wrong or report.left or report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
