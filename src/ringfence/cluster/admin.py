"""Starting, showing, draining and ending a cluster: what `ringfence cluster` and `ringfence nodes` do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

from ..errors import BackendUnavailable, InvalidRequest, NotFound, ServerUnreachable
from . import node, scaler
from .directory import Directory
from .nodes import ANSWERS, REFUSED, probe
from .scaling import BY_OPERATOR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_STOP_S = 60.0
_SAVE_S = 600.0  # all sandboxes of a node
_LOOK_S = 1.0
_HEARD_S = 60.0  # in which a node that lives says that it drains
_RAY_S = 120.0


def up(join: str = "") -> str:
    """Start Ray on this machine, as a head or as a node of one; what Ray prints.

    Args:
        join: HOST:PORT of the head; empty starts one here.

    Raises:
        BackendUnavailable: Ray is not installed, or does not start.
        InvalidRequest: `join` is no address.
        ServerUnreachable: No head listens there.
    """
    if join:
        check_head(join)
    beside = os.path.join(os.path.dirname(sys.executable), "ray")
    program = beside if os.path.exists(beside) else shutil.which("ray")
    if program is None:
        raise BackendUnavailable("Ray is not installed", hint='pip install "ringfence[ray]"')
    where = [f"--address={join}"] if join else ["--head", "--include-dashboard=false"]
    try:
        done = subprocess.run(
            [program, "start", *where, "--disable-usage-stats"],
            capture_output=True,
            text=True,
            timeout=_RAY_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise BackendUnavailable(f"`ray start` took more than {_RAY_S:g} s") from exc
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        why = lines[-1] if lines else f"it ended with {done.returncode}"
        hint = "`ringfence cluster up --address auto` uses a Ray that runs here; `ray stop` ends it"
        raise BackendUnavailable(f"`ray start` failed: {why}", hint=hint)
    return done.stdout


def check_head(address: str) -> None:
    """Check that something listens at an address: `ray start` tries one where nothing does for minutes.

    Raises:
        InvalidRequest: It is not HOST:PORT.
        ServerUnreachable: Nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise InvalidRequest("is not HOST:PORT of a head, such as 10.0.0.5:6379", field="join")
    if (found := probe(host.strip("[]"), int(port))) != ANSWERS:
        why = "refuses connections" if found == REFUSED else "does not answer"
        hint = "`ringfence cluster up` on the head prints its address; look at the firewall between both"
        raise ServerUnreachable(f"{address} {why}: no Ray head is there", hint=hint)


def start(directory: Directory) -> list[dict[str, Any]]:
    """Start the daemon of every node, and wait until each has told how it is."""
    alive = directory.ray_nodes()
    for ray_id in alive:
        node.ensure(directory.name, ray_id)
    until = time.monotonic() + _STOP_S
    while True:
        found = nodes(directory)
        there = {each["ray_id"] for each in found}
        if there >= {*alive} or time.monotonic() > until:
            return found
        time.sleep(0.2)


def nodes(directory: Directory) -> list[dict[str, Any]]:
    """Every node that has told how it is, and whether its Ray node lives."""
    alive = directory.ray_nodes()
    lost = {key.removeprefix("lost/") for key in directory.list("lost/")}
    found = []
    for text in directory.many("node/").values():
        form = json.loads(text)
        is_there = form["ray_id"] in alive and form["node"] not in lost
        status = "draining" if form["is_draining"] else "ready"
        found.append({**form, "status": status if is_there else "lost"})
    return sorted(found, key=lambda each: each["node"])


def troubles(directory: Directory) -> dict[str, str]:
    """Reasons for which daemons of nodes do not start, by node."""
    return {
        key.removeprefix("trouble/"): value.decode(errors="replace")
        for key, value in directory.many("trouble/").items()
    }


def drain(directory: Directory, tag: str, *, draining: bool = True) -> None:
    """Have a node take no new sandboxes, or take them again.

    Raises:
        NotFound: There is none of this name.
    """
    _form(directory, tag)
    key = f"drain/{tag}"
    directory.put(key, BY_OPERATOR.encode()) if draining else directory.remove(key)


def settle(directory: Directory, tag: str) -> list[dict[str, Any]]:
    """Have a draining node save its sandboxes; for each what became of it. See `Draining.settle`.

    Raises:
        NotFound: There is no node of this name.
        ServerUnreachable: Its actor does not answer.
    """
    import ray

    form = _form(directory, tag)
    try:
        actor = node.find(directory.name, form["ray_id"])
        found: list[dict[str, Any]] = ray.get(actor.settle.remote(tag), timeout=_SAVE_S)
    except (ValueError, ray.exceptions.RayError) as exc:
        hint = "`ringfence nodes` shows whether it is lost"
        raise ServerUnreachable(f"node {tag} does not answer: {exc}", hint=hint) from exc
    return found


def wait_drained(
    directory: Directory, tag: str, most_s: float, told: Callable[[list[dict[str, Any]]], None]
) -> bool:
    """Wait until a draining node is empty; False: sandboxes are left after that time.

    Args:
        told: Called with what is left, whenever that has changed.

    Raises:
        NotFound: There is no node of this name.
        ServerUnreachable: It does not say that it drains, in a minute or that time.
    """
    began = time.monotonic()
    until, before = began + most_s, None
    while True:
        if _form(directory, tag)["is_empty"]:
            return True
        left = settle(directory, tag) if _form(directory, tag)["is_draining"] else before
        if left is not None and left != before:
            told(left)
            before = left
        if (now := time.monotonic()) > until and before is not None:
            return False
        if before is None and now > max(until, began + _HEARD_S):
            hint = "`ringfence nodes` shows whether it is lost"
            raise ServerUnreachable(f"node {tag} does not say that it drains", hint=hint)
        time.sleep(_LOOK_S)


def _form(directory: Directory, tag: str) -> dict[str, Any]:
    """The last report of a node.

    Raises:
        NotFound: There is none of this name.
    """
    value = directory.get(f"node/{tag}")
    if value is None:
        raise NotFound(f"no node {tag!r}", hint="`ringfence nodes` lists them")
    form: dict[str, Any] = json.loads(value)
    return form


def down(directory: Directory) -> int:
    """End every node's daemon with its sandboxes, and forget the cluster; how many nodes there were.

    Raises:
        ServerUnreachable: One does not end.
    """
    import ray

    scaler.end(directory.name)
    actors = []
    for ray_id in directory.ray_nodes():
        try:
            actors.append(node.find(directory.name, ray_id))
        except ValueError:  # it has none
            continue
    for each in [each.stop.remote() for each in actors]:
        try:
            ray.get(each, timeout=_STOP_S)
        except ray.exceptions.GetTimeoutError as exc:
            raise ServerUnreachable("a node does not end", hint="look at its serve.log") from exc
        except ray.exceptions.RayError:
            continue  # its machine is gone: what runs there still ends without its lease
    for each in actors:
        ray.kill(each)
    directory.remove("", prefix=True)
    return len(actors)


__all__ = [
    "check_head",
    "down",
    "drain",
    "nodes",
    "settle",
    "start",
    "troubles",
    "up",
    "wait_drained",
]
