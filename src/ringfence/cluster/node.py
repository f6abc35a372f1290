"""A node: a detached Ray actor that starts and watches the daemon of its machine.

Sandboxes belong to the daemon, which outlives the actor: an actor that Ray has started again finds it.
A node that Ray has lost, or that a gateway has given up, is never the same one again: its daemon ends
with its sandboxes when nobody renews its lease, and what comes next has another name.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

from ..backends.local.host.owner import start_time
from ..daemon import succession
from ..daemon.config import SOCKET
from ..daemon.membership import ADDRESSES, DRAINED, LEASE, SECRET, lease
from ..errors import RingfenceError
from ..images.store import ImageStore
from ..model.capabilities import MEMORY_SNAPSHOT
from ..model.places import state_directory
from .directory import Directory, namespace_of
from .draining import Draining, can_restore
from .moved import MOVED, Moved
from .nodes import await_gateways, machine
from .tls import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BEAT_S = 0.5
LEASE_S = 15.0
_HEAD_S = 60.0  # without an answer of Ray's head; a raylet without one ends then, too
_OUTLIVE_S = 30.0  # of sandboxes whose daemon and actor are both gone
_START_S = 60.0
_ANSWER_S = 5.0
_SAVE_S = 300.0  # a sandbox, with gigabytes of memory
_CORES_OF_SHARD, _MOST_SHARDS = 4, 32
_CHANGES_BEATS = 20  # after a daemon's start; by then every gateway knows the node
_FACTS_S = 15.0  # between two looks at what changes seldom
_MOST_SHOWN = 2000  # sandboxes of which a gateway can tell something once they are lost
_MOST_WHY = 1000
_CERTIFICATE, _KEY = "node.pem", "node.key"
_PASSING = (
    RingfenceError,
    OSError,
    ValueError,  # an answer that was cut off
    http.client.HTTPException,
    subprocess.SubprocessError,  # a daemon that takes too long to start
)
"""What the next look may find otherwise."""
_SHOWN = ("id", "session_id", "owner", "name", "state", "created_at", "labels")

logger = logging.getLogger("ringfence.cluster")


def ensure(name: str, ray_id: str) -> Any:
    """Start the actor of a node, or find it. Its handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {
        "name": f"node-{ray_id}",
        "namespace": namespace_of(name),
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray_id, soft=False),
    }
    return ray.remote(**options)(Node).remote(name, ray_id)


def find(name: str, ray_id: str) -> Any:
    """The handle of a node's actor.

    Raises:
        ValueError: There is none.
    """
    import ray

    return ray.get_actor(f"node-{ray_id}", namespace=namespace_of(name))


class Node:
    """The actor: one shard for every so many processors, as one Python daemon uses little more than one."""

    def __init__(self, name: str, ray_id: str) -> None:
        count = Directory(name).config().get("shards") or _shards()
        self._shards = [Shard(name, ray_id, i, count) for i in range(count)]
        self._release = threading.Lock()  # asked for again and again until it is done

    def tag(self) -> str:
        """The first shard's name in ids."""
        return self._shards[0].tag

    def stop(self) -> None:
        """End every shard's daemon with its sandboxes, and be no node any more."""
        for each in self._shards:
            each.stop()

    def settle(self, tag: str) -> list[dict[str, Any]]:
        """Save the sandboxes of one of the shards; see `Draining.settle`."""
        return [form for each in self._shards if each.tag == tag for form in each.settle()]

    def release(self) -> None:
        """End every shard, of which none has a sandbox, and then this actor, so that Ray may end the node."""
        import ray

        if all(e.may_go() for e in self._shards) and self._release.acquire(blocking=False):
            if not all(each.release() for each in self._shards):
                os._exit(1)  # one was told to go on meanwhile: Ray starts this actor anew
            ray.actor.exit_actor()


class Shard:
    """A daemon. A thread renews its lease, and says how it is, twice a second.

    For gateways each shard is a node: ids have its name.
    """

    def __init__(self, name: str, ray_id: str, index: int, count: int) -> None:
        self._directory, self._ray_id, self._count = Directory(name), ray_id, count
        config = self._directory.config()
        default = os.path.join(state_directory(), "nodes", name)
        self._base = config.pop("base", "") or default
        self._above = state_directory() if self._base == default else os.path.dirname(self._base)
        self._config = config
        self._raylet = os.getppid()
        self._beat, self._facts_at, self._started_at = 0, 0.0, 0
        self._changed: dict[str, bytes] = {}
        self._drains = False
        has_store = bool(config.get("snapshot_store"))
        self._draining = Draining(
            self._ask, has_store=has_store, obstacle=self._obstacle, publish=self._publish
        )
        self._facts: dict[str, Any] = {}
        self._listed: list[dict[str, Any]] = []
        self._ended, self._lock = threading.Event(), threading.Lock()
        # Of this Ray node there was a daemon before, if the actor is here for the second time.
        self._tag_key = f"tag/{ray_id}/{index}" if index else f"tag/{ray_id}"
        # Ray's own ids may have a common beginning: those of its fake provider do.
        first = hashlib.sha256(f"{ray_id}/{index}".encode()).hexdigest()
        self._tag = (self._directory.get(self._tag_key) or b"").decode() or first[:8]
        self._directory.put(f"claim/{self._tag}", b"")
        self._sweep()
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._live, name="node", daemon=True)
        self._thread.start()
        threading.Thread(target=self._hold, name="lease", daemon=True).start()

    def _sweep(self) -> None:
        """Remove what nodes left that were on this machine before, and whose daemons have ended."""
        names = os.listdir(self._base) if os.path.isdir(self._base) else []
        claimed = {key.removeprefix("claim/") for key in self._directory.list("claim/")}
        lost = {key.removeprefix("lost/") for key in self._directory.list("lost/")}
        for name in {*names} - (claimed - lost):
            place = os.path.join(self._base, name)
            if not succession.is_held(place):
                succession.stop(place)
                shutil.rmtree(place, ignore_errors=True)

    @property
    def tag(self) -> str:
        return self._tag

    def stop(self) -> None:
        """End the daemon and all its sandboxes, and be no node any more."""
        self._ended.set()
        self._thread.join(_ANSWER_S)
        with self._lock:
            self._end()

    def release(self) -> bool:
        """End the daemon, which drains, once every gateway knows that it is gone; False: it has a sandbox."""
        with self._lock:
            if not self.is_empty():
                return False
            self._ended.set()
        self._thread.join(_ANSWER_S)
        with self._lock:
            self._directory.put_first(f"lost/{self._tag}", f"{time.time()} released".encode())
            await_gateways(self._directory)
            for kind in ("drain", "list", "claim"):
                self._directory.remove(f"{kind}/{self._tag}")
            self._end()
        return True

    def settle(self) -> list[dict[str, Any]]:
        """Save the sandboxes of a node that drains, as far as that can be; see `Draining.settle`."""
        return self._draining.settle() if self._drains else []

    def _obstacle(self, sandbox: dict[str, Any]) -> str | None:
        """Say why a sandbox cannot go on on another node with its memory; see `draining.choose`."""
        backend, image = sandbox["backend"], sandbox["image"]
        needs = self._facts.get("memory", {}).get(backend)
        if needs is None:
            return None
        lost = {key.removeprefix("lost/") for key in self._directory.list("lost/")}
        forms = [json.loads(each) for each in self._directory.many("node/").values()]
        others = [each for each in forms if each["node"] not in {*lost, self._tag}]
        if any(can_restore(each, backend, needs, image) for each in others):
            return ""
        has = f"{backend} by {needs}" + (f" and image {image}" if image else "")
        return f"no other node that takes sandboxes has {has}"

    def _publish(self, sandbox: dict[str, Any], snapshot: str) -> None:
        """Tell gateways of a sandbox that was evicted, with all that restoring it takes."""
        backend = sandbox["backend"]
        moved = Moved(
            owner=sandbox["owner"],
            snapshot=snapshot,
            name=sandbox["name"],
            timeouts=sandbox["timeouts"],
            metadata=sandbox["metadata"],
            backend=backend,
            needs=self._facts.get("memory", {}).get(backend, ""),
            image=sandbox["image"],
            left=self._tag,
            at=time.time(),
        )
        self._directory.put(f"{MOVED}{sandbox['id']}", moved.written())

    def may_go(self) -> bool:
        """Return whether nothing is lost with this node: no sandbox, and nothing that it alone keeps.

        Its daemon is asked: what it told may be older than the last snapshot.
        """
        return self.is_empty() and not self._keeps()

    def is_empty(self) -> bool:
        """Return whether the daemon drains, has no sandbox and makes none."""
        return self._drains and os.path.exists(os.path.join(self._place, DRAINED))

    # -- its life -------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return os.path.join(self._base, self._tag)

    def _live(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._lock, contextlib.suppress(*_PASSING):
                self._look()

    def _hold(self) -> None:
        """Renew the lease, also while the head of Ray starts again: its store then blocks for seconds."""
        while not self._ended.wait(BEAT_S):
            is_known = time.monotonic() - self._heard_at < _HEAD_S
            if is_known and os.getppid() == self._raylet:
                with contextlib.suppress(OSError):
                    self._renew()

    def _leave(self) -> None:
        """End with the raylet: for the cluster this node is gone, and Ray ends this actor in seconds."""
        self._ended.set()
        with contextlib.suppress(RingfenceError):  # else gateways hear of it from Ray
            self._directory.put_first(f"lost/{self._tag}", repr(time.time()).encode())
        self._end()

    def _look(self) -> None:
        if os.getppid() != self._raylet:
            self._leave()
            return
        if self._directory.get(f"lost/{self._tag}") is not None:
            self._become_another()
        self._heard_at = time.monotonic()
        self._drains = self._directory.get(f"drain/{self._tag}") is not None
        if not self._drains:
            self._draining.moved.clear()
        try:
            make_private(self._above, self._place)
        except OSError as exc:
            self._directory.put(f"trouble/{self._tag}", f"state directory: {exc}".encode())
            return
        try:
            state = self._state()
        except (OSError, http.client.HTTPException):
            if not self._serves():
                self._start()
            return
        self._change()
        self._beat += 1
        state |= {"beat": f"{os.getpid()}-{self._beat}", "sampled_at": time.time()}
        self._directory.put(f"node/{self._tag}", json.dumps(state).encode())

    def _change(self) -> None:
        """Apply what was changed at run time before this daemon came; gateways ask the others."""
        if self._beat - self._started_at > _CHANGES_BEATS:
            return
        for key, body in self._directory.many("changed/").items():
            if self._changed.get(key) != body:
                method, path = key.removeprefix("changed/").split(" ")
                self._ask(method, path, body)
                self._changed[key] = body

    def _become_another(self) -> None:
        """A gateway has called the sandboxes lost: they must be, before others are made here."""
        logger.warning("node %s was given up: it starts anew", self._tag)
        self._end()
        self._tag = os.urandom(4).hex()
        self._directory.put(f"claim/{self._tag}", b"")
        self._directory.put(self._tag_key, self._tag.encode())
        self._listed = []

    def _end(self) -> None:
        place = self._place
        succession.stop(place)
        self._directory.remove(f"node/{self._tag}")
        shutil.rmtree(place, ignore_errors=True)

    def _renew(self) -> None:
        path = os.path.join(self._place, LEASE)
        turn = f"{os.getpid()}-{time.monotonic_ns()}"
        restarter = self._raylet, start_time(self._raylet)
        with open(f"{path}.new", "wb") as file:
            file.write(lease(restarter, turn, drains=self._drains))
        os.rename(f"{path}.new", path)

    def _serves(self) -> bool:
        """Return whether a daemon holds the state directory: it starts, is busy, or ends."""
        return succession.is_held(self._place)

    def _write(self, name: str, content: bytes) -> None:
        """Write a file at once: an actor may be killed at any moment, and the next one reads it."""
        path, flags = os.path.join(self._place, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(f"{path}.new", flags, 0o600), "wb") as file:
            file.write(content)
        os.rename(f"{path}.new", path)

    def _start(self) -> None:
        import ray

        place = self._place
        certificate, key = identity(self._directory)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(place, DRAINED))
        self._write(SECRET, self._directory.secret())
        self._write(_CERTIFICATE, certificate.encode())
        self._write(_KEY, key.encode())
        host = ray.util.get_node_ip_address()
        membership = {"node": self._tag, "lease_s": LEASE_S}
        manager = self._config.get("manager", {})
        if most := manager.get("max_sandboxes"):  # the node's
            manager = {**manager, "max_sandboxes": -(-most // self._count)}
        form = {
            "outlive_s": _OUTLIVE_S,
            **self._config,
            "manager": manager,
            "state_dir": place,
            "listen": f"{f'[{host}]' if ':' in host else host}:0",
            "tls_certificate": os.path.join(place, _CERTIFICATE),
            "tls_key": os.path.join(place, _KEY),
            "membership": membership,
        }
        path = os.path.join(place, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(form, file)
        # It must not be a child of the actor: Ray ends the children of its workers.
        command = [sys.executable, "-P", "-m", "ringfence", "serve", "--detach", "--json"]
        started = subprocess.run(
            [*command, "--config", path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(),
            timeout=_START_S,
            check=False,
            start_new_session=True,
        )
        if started.returncode:
            why = started.stderr.decode(errors="replace").strip()[-_MOST_WHY:]
            self._directory.put(f"trouble/{self._tag}", why.encode())
            return
        self._started_at, self._changed = self._beat, {}
        self._directory.remove(f"trouble/{self._tag}")

    # -- how it is ------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        stats = self._get("/v1/stats")
        if time.monotonic() - self._facts_at > _FACTS_S or not self._facts:
            self._facts, self._facts_at = self._learn(), time.monotonic()
        self._tell_of_sandboxes()
        return {
            **self._facts,
            "node": self._tag,
            "ray_id": self._ray_id,
            "host": socket.gethostname(),
            "machine": machine(),
            "socket": os.path.join(self._place, SOCKET),
            "address": self._address(),
            "free_memory_bytes": _free_memory() // self._count,
            "cpus": len(os.sched_getaffinity(0)) / self._count,
            "load": os.getloadavg()[0] / self._count,
            "active": stats["active_sandboxes"],
            "max_sandboxes": stats["max_sandboxes"],
            "waiting": stats["waiting"],
            "warm": {"default": stats["pool_size"]},
            "is_draining": self._drains,
            "is_empty": self.is_empty(),
        }

    def _address(self) -> str:
        with open(os.path.join(self._place, ADDRESSES), encoding="utf-8") as file:
            found: list[str] = json.load(file)
        return found[-1]

    def _learn(self) -> dict[str, Any]:
        import ray

        info = self._get("/v1/info")
        usable = [each for each in info["backends"] if each["available"]]
        labels = ray.get_runtime_context().get_node_labels()
        return {
            "tiers": sorted({tier for each in usable for tier in each["tiers"]}),
            "backends": [each["backend"] for each in usable],
            "memory": {
                each["backend"]: can["reason"]
                for each in usable
                for can in each["capabilities"]
                if can["name"] == MEMORY_SNAPSHOT and can["available"]
            },
            "images": _images(),
            "keeps": self._keeps(),
            "labels": {
                key: value for key, value in labels.items() if not key.startswith("ray.io/")
            },
        }

    def _keeps(self) -> bool:
        """Return whether snapshots or templates of clients would be lost with this node."""
        if self._config.get("snapshot_store"):
            return False
        kept = ("/v1/templates", "/v1/snapshots?limit=1")
        return any(self._get(each)["items"] for each in kept)

    def _tell_of_sandboxes(self) -> None:
        """Keep in the directory what is said of the sandboxes should the node be lost."""
        page = self._get(f"/v1/sandboxes?limit={min(1000, _MOST_SHOWN)}")
        shown = [
            {name: each[name] for name in _SHOWN} | self._draining.kept(each)
            for each in page["items"]
        ]
        if shown != self._listed:
            self._directory.put(f"list/{self._tag}", json.dumps(shown).encode())
            self._listed = shown

    def _get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        timeout_s = _SAVE_S if method == "POST" else _ANSWER_S
        connection = _UnixConnection(os.path.join(self._place, SOCKET), timeout_s)
        try:
            kind = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, body, kind)
            response = connection.getresponse()
            found: dict[str, Any] = json.loads(response.read() or b"{}")
            if response.status not in (200, 201, 204):
                why = found.get("detail") or f"{path}: {response.status}"
                raise http.client.HTTPException(why)
            return found
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def make_private(above: str, place: str) -> None:
    """Make a directory, and those between it and one above it, for this user alone.

    A gateway of this machine has its own state in the upper one, and refuses one that others may enter.

    Args:
        above: A state directory.
        place: A daemon's, below it.
    """
    parts = os.path.relpath(place, above).split(os.sep)
    for count in range(len(parts) + 1):  # the mode of `makedirs` is that of the last part alone
        os.makedirs(os.path.join(above, *parts[:count]), mode=0o700, exist_ok=True)


def _environment() -> dict[str, str]:
    """The environment without what Ray sets for its workers."""
    left = ("RAY_", "OMP_NUM_THREADS", "LD_PRELOAD")
    return {name: value for name, value in os.environ.items() if not name.startswith(left)}


def _shards() -> int:
    return max(1, min(_MOST_SHARDS, len(os.sched_getaffinity(0)) // _CORES_OF_SHARD))


def _free_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def _images() -> list[str]:
    try:
        return sorted({each.reference for each in ImageStore().images()})
    except RingfenceError:  # no image was ever fetched here
        return []


__all__ = ["Node", "ensure", "find", "make_private"]
