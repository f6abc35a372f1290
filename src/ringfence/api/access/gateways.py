"""Callers that a cluster's gateway vouches for: it checks the key, the node takes its word."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time

from .caller import SCOPES, Caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEADER = "x-ringfence-caller"
MADE = "x-ringfence-made"
"""A node's answer to a gateway: the id of what was made, for the gateway's audit log."""
SECRET_BYTES = 32
_SIGNATURE_BYTES = 32
_MOST_APART_S = 300.0
"""Between the clocks of a gateway and a node: longer, and what was overheard could be sent again."""


def seal(secret: bytes, caller: Caller, method: str, target: bytes) -> bytes:
    """Write the header that lets a node serve this request for this caller.

    Args:
        secret: Of the cluster.
        target: Path and query, as they are sent.
    """
    whose = [caller.client, caller.scope, caller.sandbox, caller.max_sandboxes]
    form = [*whose, caller.key_id, time.time()]
    text = json.dumps(form, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(_sign(secret, text, method, target) + text)


def unseal(secret: bytes, header: str, method: str, target: bytes) -> Caller | None:
    """Read the caller in a header of `seal`; None where it is not one for this request, or is old."""
    try:
        whole = base64.b64decode(header.encode("latin-1"), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    signature, text = whole[:_SIGNATURE_BYTES], whole[_SIGNATURE_BYTES:]
    # An empty secret would be everybody's.
    if not secret or not hmac.compare_digest(signature, _sign(secret, text, method, target)):
        return None
    form: list[Any] = json.loads(text)
    client, scope, sandbox, most, key, sealed_at = form
    if scope not in SCOPES or abs(time.time() - sealed_at) > _MOST_APART_S:
        return None
    return Caller(client, scope, sandbox=sandbox, max_sandboxes=most, gateway_key=key)


def _sign(secret: bytes, text: bytes, method: str, target: bytes) -> bytes:
    signed = b"\n".join((method.encode(), target, text))
    return hmac.digest(secret, signed, hashlib.sha256)
