"""Sandboxes of drained nodes, made again under their own ids.

What was saved with its files is made by who resumes it, once the node is gone; what was evicted with its
memory, by any request for it.

The binding of a client's id to a node (`bindings`) is the forwarding record: it is forgotten a day after
the sandbox has ended, as every other.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace

from ..api.access.caller import USER, Caller
from ..errors import BackendUnavailable, SandboxNotFound, error_from_json
from ..model.base.ids import node_of
from .placement import Need
from .placing import Placing, id_name, key_name
from .proxy import Inbound
from .upstream import NotSent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from starlette.types import Message, Scope

    from ..errors import RingfenceError
    from .nodes import Known, Nodes
    from .placing import Placer, Whole

_CREATE = b"/v1/sandboxes"


async def revive(sandbox_id: str, caller: Caller, nodes: Nodes, placer: Placer) -> None:
    """Make a lost sandbox again from what the drain of its node has saved, if there is all of it.

    Args:
        caller: Who resumes it: its owner or an admin.

    Raises:
        RingfenceError: No node can.
    """
    bound = await placer.bound(id_name(sandbox_id))
    saved = None
    if nodes.find(bound) is None:
        saved = nodes.saved(sandbox_id, node_of(sandbox_id)) or nodes.saved(sandbox_id, bound)
    if saved is None or caller.sees not in (None, saved["owner"]):
        return
    names = [id_name(sandbox_id)]
    answer = await _restore(sandbox_id, Saved(**{f: saved[f] for f in _FIELDS}), placer, names)
    if answer is not None and answer[0] >= 400:
        raise error_from_json(json.loads(answer[2]))


async def bring_back(sandbox_id: str, caller: Caller, nodes: Nodes, placer: Placer) -> Known | None:
    """Find the node that has an evicted sandbox now; the first who asks has it restored there.

    Preconditions: no other request of this gateway does the same.

    Raises:
        SandboxNotFound: It is another client's.
        BackendUnavailable: No node can restore it.
        SandboxLost: The node that had it since is gone.
    """
    moved = await placer.moved(sandbox_id)
    if moved is None:
        return None
    if moved.node:
        since = nodes.find(moved.node) or nodes.find(await placer.bound(id_name(sandbox_id)))
        if since is None:
            nodes.check_lost(sandbox_id, moved.node, caller.sees)
        return since
    if caller.sees not in (None, moved.owner):
        raise SandboxNotFound(f"no session or sandbox {sandbox_id!r}")
    saved = Saved(moved.owner, moved.snapshot, moved.name, moved.timeouts, moved.metadata)
    await placer.free(id_name(sandbox_id), moved.left)
    error: RingfenceError | None = None
    for node in nodes.restoring(moved):
        # The key last: where two gateways ask at once, it decides for both.
        names = [id_name(sandbox_id), key_name(moved.owner, "sandbox", _key(sandbox_id, saved))]
        try:
            answer = await _restore(sandbox_id, saved, placer, names[:1], node.tag)
        except NotSent as exc:
            error = exc
            await placer.unbind(names, node)
            continue
        if answer is not None and answer[0] < 400:
            tag = await placer.bound(names[1])
            await placer.note_moved(sandbox_id, replace(moved, node=tag))
            return nodes.find(tag)
        error = error_from_json(json.loads(answer[2])) if answer else None
        await placer.unbind(names, node)
    raise error or BackendUnavailable(
        f"sandbox {sandbox_id} was saved with its memory by node {moved.left}, and no node that takes"
        f" sandboxes restores it: that takes {moved.backend} by {moved.needs}",
        hint=f"add such a node, or `ringfence nodes undrain {moved.left}`",
        retryable=True,
    )


@dataclass(frozen=True)
class Saved:
    """Snapshot of a sandbox, and the facts with which it is made again."""

    owner: str
    snapshot: str
    name: str
    timeouts: dict[str, Any]
    metadata: dict[str, str]


_FIELDS = ("owner", "snapshot", "name", "timeouts", "metadata")


def _key(sandbox_id: str, saved: Saved) -> str:
    """Key under which two gateways at once have it made once."""
    return f"revived {sandbox_id} {saved.snapshot}"


async def _restore(
    sandbox_id: str, saved: Saved, placer: Placer, names: list[str], node: str = ""
) -> Whole | None:
    owner = Caller(saved.owner, USER)
    form = {
        "id": sandbox_id,
        "snapshot_id": saved.snapshot,
        "name": saved.name,
        "timeouts": saved.timeouts,
        "metadata": saved.metadata,
    }
    key = _key(sandbox_id, saved)
    body = json.dumps(form).encode()
    inbound = Inbound(_scope(owner, key), _stay, _ignore, body)
    names = [*names, key_name(owner.client, "sandbox", key)]
    return await placer.place(Placing(inbound, Need(), names, node=node))


def _scope(owner: Caller, key: str) -> Scope:
    fields = [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())]
    state: dict[str, Any] = {"caller": owner, "request_id": "revive"}
    scope = {"type": "http", "method": "POST", "path": _CREATE.decode(), "raw_path": _CREATE}
    return {**scope, "query_string": b"", "headers": fields, "state": state}


async def _stay() -> Message:
    """Be a client that does not leave."""
    await asyncio.Event().wait()
    raise AssertionError


async def _ignore(_message: Message) -> None:
    pass


__all__ = ["bring_back", "revive"]
