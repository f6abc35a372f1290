"""`snapshot`, `keys`, `pool`: what a server keeps."""

from __future__ import annotations

import json
import sys

from ...errors import InvalidRequest
from ...model.base.checks import parse_duration
from .. import tables
from ..options import verb_of
from ..request import whole_number
from ..terminal import size
from . import remote
from .commands import KEYS, POOL, SNAPSHOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...client import Client

_SNAPSHOTS = ("SNAPSHOT", "OF", "AGE", "SIZE", "NOTES")
_KEYS = ("KEY", "OWNER", "SCOPE", "NAME", "AGE", "USED", "ENDS IN", "SANDBOX")


def snapshot(argv: Sequence[str]) -> int:
    given, words, after = remote.read(SNAPSHOT, argv)
    words += after
    verb = verb_of(SNAPSHOT, words)
    with remote.client_of(given) as client:
        if verb == "create":
            remote.no_more(words, 2)
            sandbox = remote.sandbox_of(client, remote.word(words[1:], "SANDBOX", SNAPSHOT))
            made = sandbox.snapshot(remote.key_values(given.get("meta", ()), "meta"))
            _print(given, made.to_json(), made.id)
        elif verb == "rm":
            remote.word(words[1:], "ID", SNAPSHOT)
            for each in words[1:]:
                client.delete_snapshot(each)
        else:
            remote.no_more(words, 1)
            found = client.snapshots()
            rows = [
                (
                    each.id,
                    each.session_id,
                    tables.ago(each.created_at),
                    size(each.size_bytes),
                    tables.pairs(each.metadata),
                )
                for each in found
            ]
            _table(given, [each.to_json() for each in found], _SNAPSHOTS, rows)
    return 0


def keys(argv: Sequence[str]) -> int:
    """Make, list, rotate, remove."""
    given, words, after = remote.read(KEYS, argv)
    words += after
    verb = verb_of(KEYS, words)
    with remote.client_of(given) as client:
        if verb == "create":
            remote.no_more(words, 2)
            owner = remote.word(words[1:], "OWNER", KEYS)
            scope, name = given.get("scope", "user"), given.get("name", "")
            made = _spelt(given, client.make_key(owner, scope=scope, name=name, **_bounds(given)))
            _print(given, made, made["key"])
        elif verb == "rotate":
            remote.no_more(words, 2)
            overlap_s = parse_duration(given.get("overlap", "0s"), "overlap")
            key_id = remote.word(words[1:], "ID", KEYS)
            made = _spelt(given, client.rotate_key(key_id, overlap_s=overlap_s))
            _print(given, made, made["key"])
        elif verb == "rm":
            remote.word(words[1:], "ID", KEYS)
            for each in words[1:]:
                client.delete_key(each, this_key="this-key" in given)
        else:
            remote.no_more(words, 1)
            _list_keys(client, given)
    return 0


def _spelt(given: dict[str, Any], made: Any) -> Any:
    """The key as the options ask for it."""
    if "e2b" not in given:
        return made
    from ...api.access.keys import e2b_form

    return {**made, "key": e2b_form(made["key"])}


def _bounds(given: dict[str, Any]) -> dict[str, Any]:
    """The end and the bounds of a new key, as far as they were given."""
    bounds: dict[str, Any] = {}
    if "expires" in given:
        if given["expires"].strip()[-1:].isdigit():
            what = f"{given['expires']!r} has no unit"  # seconds are hardly ever meant
            raise InvalidRequest(what, field="expires", hint="as 30d, 12h or 3600s")
        bounds["expires_in_s"] = parse_duration(given["expires"], "expires")
    for name in ("max-sandboxes", "max-requests"):
        if name in given:
            bounds[name.replace("-", "_")] = whole_number(given[name], name)
    return bounds


def _list_keys(client: Client, given: dict[str, Any]) -> None:
    found = client.keys()
    rows = [
        (
            each["id"],
            each["owner"],
            each["scope"],
            each["name"],
            tables.ago(each["created_at"]),
            tables.ago(each["last_used_at"]),
            tables.left(each["expires_at"]),
            each["sandbox_id"] or "",
        )
        for each in found
    ]
    _table(given, found, _KEYS, rows)


def pool(argv: Sequence[str]) -> int:
    """Show or change what is kept warm."""
    given, words, after = remote.read(POOL, argv)
    words += after
    with remote.client_of(given) as client:
        if words:
            verb_of(POOL, words)
            changes = remote.key_values(words[1:], "NAME=VALUE")
            if not changes:
                raise InvalidRequest("is missing", field="NAME=VALUE", hint="as min_warm=4")
            found = client.change_pool(**{name: _value(text) for name, text in changes.items()})
        else:
            found = client.pool()
    if "json" in given:
        remote.print_json(found)
        return 0
    told: dict[str, Any] = {**found}
    config = {key: value for key, value in told.pop("config").items() if key != "profiles"}
    rows = [(name, _shown(value)) for name, value in {**config, **told}.items()]
    tables.show(("NAME", "VALUE"), rows)
    return 0


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _print(given: dict[str, Any], form: Any, text: str) -> None:
    if "json" in given:
        remote.print_json(form)
    else:
        sys.stdout.write(f"{text}\n")


def _table(
    given: dict[str, Any], forms: Any, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    if "json" in given:
        remote.print_json(forms)
    else:
        tables.show(heads, rows)
