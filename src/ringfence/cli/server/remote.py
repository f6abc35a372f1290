"""Shared parts of the commands that call a server: options, the client, key=value pairs."""

from __future__ import annotations

import json
import sys

from ...errors import InvalidRequest, SandboxNotFound
from ..options import Command, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...client import Client, RemoteSandbox
    from ...model.sandbox import SandboxView


def read(command: Command, argv: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Options, wherever they stand, the words between them, and what follows `--`.

    Raises:
        InvalidRequest: As `options.parse`.
    """
    before = list(argv)
    after: list[str] = []
    if "--" in before:
        at = before.index("--")
        before, after = before[:at], before[at + 1 :]
    given: dict[str, Any] = {}
    words: list[str] = []
    while before:
        _, before = parse(command, before, given)
        words += before[:1]
        before = before[1:]
    if "help" in given:
        from ..help import help_of

        sys.stdout.write(help_of(command))
        raise SystemExit(0)
    return given, words, after


def client_of(given: dict[str, Any]) -> Client:
    from ...client import Client

    return Client(given.get("server"), key=_key(given))


def sandbox_of(client: Client, word: str) -> RemoteSandbox:
    """The sandbox that is meant: by its id, or by the name of one that lives.

    Raises:
        SandboxNotFound: There is none of either.
        InvalidRequest: Several have that name.
    """
    try:
        return client.get(word)
    except (SandboxNotFound, InvalidRequest) as exc:
        named = client.list(name=word) if word else []
        if not named and word.startswith("snap-"):
            hint = f"`ringfence create --snapshot {word}` makes a sandbox from it"
            raise InvalidRequest(f"{word} is a snapshot", field="SANDBOX", hint=hint) from None
        if not named and isinstance(exc, InvalidRequest):
            hint = "`ringfence list` shows ids and names"
            what = f"no sandbox is called {word!r}, and it is not an id"
            raise InvalidRequest(what, field="SANDBOX", hint=hint) from None
        if not named:
            raise exc from None
    if len(named) > 1:
        ids = ", ".join(view.id for view in named)
        raise InvalidRequest(
            f"{len(named)} sandboxes are called {word!r}",
            field="SANDBOX",
            hint=f"name one of {ids}",
        )
    return client.get(named[0].id)


def _key(given: dict[str, Any]) -> str | None:
    if "key-file" not in given:
        return None
    try:
        with open(given["key-file"], encoding="utf-8") as file:
            key = file.read().strip()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "is not text"
        hint = "give the path of a file with an API key, or set $RINGFENCE_API_KEY"
        raise InvalidRequest(f"{given['key-file']!r}: {why}", field="key-file", hint=hint) from exc
    if not key:
        hint = "write the line that `ringfence keys create NAME` printed into it"
        raise InvalidRequest(f"{given['key-file']!r} is empty", field="key-file", hint=hint)
    return key


def key_values(texts: Sequence[str], field: str) -> dict[str, str]:
    """`K=V` each.

    Raises:
        InvalidRequest: One of them is something else.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"{text!r} is not K=V", field=field, hint="as NAME=value")
        if found.setdefault(key, value) != value:
            what = f"{key!r} is given twice, with {found[key]!r} and {value!r}"
            raise InvalidRequest(what, field=field, hint="give each name once")
    return found


def print_json(form: Any) -> None:
    """Print one JSON object, for programs."""
    json.dump(form, sys.stdout, indent=2)
    sys.stdout.write("\n")


def full(view: SandboxView) -> dict[str, Any]:
    return view.to_json(admin=True)


def word(words: Sequence[str], what: str, command: Command) -> str:
    """The first of the words.

    Raises:
        InvalidRequest: There is none.
    """
    if not words:
        hint = f"ringfence {command.name} {command.arguments}"
        raise InvalidRequest("is missing", field=what, hint=hint)
    return words[0]


def no_more(words: Sequence[str], most: int) -> None:
    """Refuse words beyond `most`: they were meant for something."""
    if len(words) > most:
        hint = "remove the argument, or quote it together with the one before"
        raise InvalidRequest(f"unexpected argument {words[most]!r}", field="ARGUMENT", hint=hint)
