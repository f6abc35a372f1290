"""`session`: sandboxes of a server, leased, left and come back to."""

from __future__ import annotations

import sys

from ...errors import InvalidRequest
from .. import tables
from ..options import verb_of
from . import remote
from .commands import SESSION
from .sandboxes import spec_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...client import Client
    from ...model.client_session import ClientSession

_HEADS = ("SESSION", "SANDBOX", "CLIENT", "STATE", "BACKEND", "AGE", "ENDS IN", "METADATA")
_ONLY_FOR = {
    "id": "acquire",
    "fresh": "acquire",
    "meta": "acquire",
    "no-pool": "acquire",
    "create": "attach",
    "keep-alive": "release",
    "state": "list",
    "client": "acquire attach",
}
_ANYWHERE = ("server", "key-file", "json")


def session(argv: Sequence[str]) -> int:
    """Acquire, attach, list, or one of the verbs."""
    given, words, after = remote.read(SESSION, argv)
    words += after
    verb = verb_of(SESSION, words)
    _check_options(given, verb)
    with remote.client_of(given) as client:
        if verb == "list":
            remote.no_more(words, 1)
            labels = remote.key_values(given.get("label", ()), "label")
            _show(given, client.sessions.list(states=given.get("state", ()), labels=labels))
        elif verb in ("acquire", "attach"):
            remote.no_more(words, 1 if verb == "acquire" else 2)
            found = _lease(client, given, verb, words[1:])
            _print(given, found)
        elif verb == "default":
            remote.no_more(words, 2)
            _default(client, given, words[1:])
        else:
            _verbs(client, given, verb, words[1:])
    return 0


def _check_options(given: dict[str, Any], verb: str) -> None:
    """Refuse an option that means nothing for this verb: whoever wrote it meant something."""
    for name in given:
        of_a_spec = verb == "acquire" or (verb == "attach" and "create" in given)
        wanted = _ONLY_FOR.get(name, "" if of_a_spec or name in _ANYWHERE else "acquire")
        if name == "label" and verb == "list":
            continue
        if wanted and verb not in wanted.split():
            hint = f"use it with `session {wanted.split()[0]}`"
            raise InvalidRequest(f"is not an option of `session {verb}`", field=name, hint=hint)


def _lease(client: Client, given: dict[str, Any], verb: str, words: list[str]) -> ClientSession:
    spec = spec_of({**given})
    if verb == "attach":
        asked: dict[str, Any] = {"sandbox_id": remote.word(words, "ID", SESSION)}
        if "create" in given:
            asked |= {"create_if_missing": True, "create_spec": spec}
        return client.sessions.attach({**asked, "client_id": given.get("client", "")}).session
    options = {
        "preferred_id": given.get("id"),
        "require_fresh": "fresh" in given,
        "preferred_backend": given.get("backend", ""),
        "use_pool": "no-pool" not in given,
        "metadata": remote.key_values(given.get("meta", ()), "meta"),
    }
    return client.sessions.acquire(spec, options, client_id=given.get("client")).session


def _default(client: Client, given: dict[str, Any], words: list[str]) -> None:
    sessions = client.sessions
    if words:
        found = sessions.set_default_sandbox(None if words == ["none"] else words[0])
    else:
        found = sessions.default_sandbox()
    if found is not None:
        _print(given, found)
    elif "json" in given:
        remote.print_json(None)


def _verbs(client: Client, given: dict[str, Any], verb: str, ids: list[str]) -> None:
    remote.word(ids, "ID", SESSION)
    more = {"keep_alive": True} if "keep-alive" in given else {}
    call = getattr(client.sessions, "get" if verb == "show" else verb)
    _show(given, [call(each, **more) for each in ids])


def _print(given: dict[str, Any], found: ClientSession) -> None:
    if "json" in given:
        remote.print_json(found.to_json())
    else:
        sys.stdout.write(f"{found.session_id}\n")


def _show(given: dict[str, Any], found: Sequence[ClientSession]) -> None:
    if "json" in given:
        remote.print_json([each.to_json() for each in found])
        return
    rows = [
        (
            each.session_id,
            each.sandbox_id,
            each.client_id,
            str(each.state),
            each.backend,
            tables.ago(each.created_at),
            tables.span(each.time_remaining_s),
            tables.pairs(each.metadata),
        )
        for each in found
    ]
    tables.show(_HEADS, rows)
