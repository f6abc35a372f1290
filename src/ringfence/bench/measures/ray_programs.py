"""placement and ray: decisions over 1,000 nodes; sandboxes in a Ray program beside actors and the library."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

from ...cluster.placement import Fleet, Need, NodeState
from ..rows import VALUE, Missing, Row, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..settings import Settings

NODES = 1_000
ACTOR = "empty actor"
_TIMEOUT_S = 300
_PATH = "import sys; sys.path[:0] = {!r}\n"
# `ray.experimental.sandbox` takes an actor for each sandbox, and images by erofs-utils 1.7, which Debian 12
# lacks: what an actor costs alone is the least that it can cost.
_SCRIPT = """
import json, os, statistics, sys, time
import ray
from ringfence import Sandbox as LibrarySandbox
from ringfence.ray import Sandbox

rounds, directory = int(sys.argv[1]), sys.argv[2]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
    _temp_dir=directory, _node_ip_address="127.0.0.1")

@ray.remote(num_cpus=0)
class Empty:
    def ready(self):
        pass

def life(kind):
    started = time.perf_counter()
    with kind.create() as sandbox:
        sandbox.exec(["true"])
    return (time.perf_counter() - started) * 1e3

def actor():
    started = time.perf_counter()
    handle = Empty.remote()
    ray.get(handle.ready.remote())
    ray.kill(handle)
    return (time.perf_counter() - started) * 1e3

@ray.remote(num_cpus=0)
def in_a_task(rounds):
    life(Sandbox), life(LibrarySandbox)
    times = {Sandbox: [], LibrarySandbox: []}
    for number in range(rounds):
        for kind in sorted(times, key=lambda each: (each is Sandbox) ^ (number % 2)):
            times[kind].append(life(kind))
    return [statistics.median(each) for each in times.values()]

def kib():
    family, total = {os.getpid()}, 0
    parents = {}
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal():
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            pass
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    for pid in family:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            pass
    return total

life(Sandbox), actor()
lives = [(life(Sandbox), actor()) for _ in range(rounds)]
task = ray.get(in_a_task.remote(rounds * 5))
before = kib()
idle = [Sandbox.create() for _ in range(20)]
for sandbox in idle:
    sandbox.exec(["true"])
settled = time.monotonic() + 10  # they hibernate
now = kib()
while time.monotonic() < settled:
    time.sleep(0.5)
    now = min(now, kib())
ours = (now - before) / len(idle)
before = kib()
actors = [Empty.remote() for _ in range(3)]
ray.get([each.ready.remote() for each in actors])
theirs = (kib() - before) / len(actors)
for sandbox in idle:
    sandbox.terminate()
ray.shutdown()
print(json.dumps([[statistics.median(each) for each in zip(*lives)], [ours, theirs], task]))
"""


def measure_placement(settings: Settings) -> Iterator[Row]:
    """Decide over so many nodes, each with 20 of 200 images, as a gateway does."""
    source = random.Random(20)
    images = [f"image{number}" for number in range(200)]
    fleet = Fleet(
        NodeState(
            f"node{number}",
            "",
            tiers=("light", "strong") if number % 3 == 0 else ("light",),
            backends=("native",),
            free_memory_bytes=source.randrange(1 << 35),
            cpus=8.0,
            load=source.random() * 8,
            warm={f"pool{number % 5}": 2},
            images=frozenset(source.sample(images, 20)),
        )
        for number in range(NODES)
    )
    times = []
    for number in range(200 if settings.quick else 5000):
        need = Need(
            tier="strong" if number % 10 == 0 else "light",
            backend="native",
            image=images[number % 200],
            memory_bytes=1 << 30,
            pool_key=f"pool{number % 5}",
            pulls_image=True,
        )
        started = time.perf_counter()
        fleet.choose(need, source)
        times.append((time.perf_counter() - started) * 1e3)
    yield Row(
        "placement",
        f"a decision over {NODES:,} nodes",
        "ms",
        statistics.median(times),
        target=Target(VALUE, must=0.2, aim=0.05),
        samples=len(times),
    )


def measure_ray(settings: Settings) -> Iterator[Row | Missing]:
    """Start a cluster of one node in a process of its own, and measure from its driver."""
    if importlib.util.find_spec("ray") is None:
        yield Missing("ray", 'not installed: pip install "ringfence[ray]"')
        return
    rounds = settings.slow_rounds
    with tempfile.TemporaryDirectory(prefix="rf-ray-", dir="/tmp") as directory:
        run = subprocess.run(
            [sys.executable, "-c", _PATH.format(sys.path) + _SCRIPT, str(rounds), directory],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            # Nothing is reported to anybody.
            env={
                **os.environ,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_raylet_start_wait_time_s": "100",
            },
        )
    if run.returncode:
        yield Missing("ray", run.stderr.strip().rpartition("\n")[2])
        return
    life, memory, task = json.loads(run.stdout.strip().rpartition("\n")[2])
    for what, unit, (ours, theirs), peer, target, samples in (
        (
            "create, exec and end from a Ray driver",
            "ms",
            life,
            ACTOR,
            Target(must=0.1, aim=0.02),
            rounds,
        ),
        ("memory of an idle sandbox", "KiB", memory, ACTOR, Target(must=0.05, aim=0.01), 20),
        (
            "the same life in a Ray task",
            "ms",
            task,
            "library",
            Target(must=1.2, aim=1.05),
            rounds * 5,
        ),
    ):
        yield Row("ray", what, unit, ours, peer, theirs, target, samples)
