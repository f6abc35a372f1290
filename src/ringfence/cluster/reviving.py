"""Sandboxes of a node that was drained and is gone, made again under their own ids by who resumes them.

The binding of a client's id to a node (`bindings`) is the forwarding record: it is forgotten a day after
the sandbox has ended, as every other.
"""

from __future__ import annotations

import asyncio
import json

from ..api.access.caller import USER, Caller
from ..errors import error_from_json
from ..model.base.ids import node_of
from .placement import Need
from .placing import Placing, id_name, key_name
from .proxy import Inbound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from starlette.types import Message, Scope

    from .nodes import Nodes
    from .placing import Placer

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
    owner = Caller(saved["owner"], USER)
    form = {
        "id": sandbox_id,
        "snapshot_id": saved["snapshot"],
        "name": saved["name"],
        "timeouts": saved["timeouts"],
        "metadata": saved["metadata"],
    }
    # Two gateways at once ask the same node, which makes it once for the same key.
    key = f"revived {sandbox_id} {saved['snapshot']}"
    body = json.dumps(form).encode()
    inbound = Inbound(_scope(owner, key), _stay, _ignore, body)
    names = [id_name(sandbox_id), key_name(owner.client, "sandbox", key)]
    answer = await placer.place(Placing(inbound, Need(), names))
    if answer is not None and answer[0] >= 400:
        raise error_from_json(json.loads(answer[2]))


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


__all__ = ["revive"]
