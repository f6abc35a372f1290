"""`ringfence image`, and the image of `ringfence run`."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from ..errors import ImageNotFound, InvalidRequest
from ..images.store import ImageStore
from .commands import IMAGE
from .options import parse, verb_of
from .tables import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..model.image import Image
    from .options import Command

_PULL = ("missing", "always", "never")
_REDRAW_S = 0.1
_WIDTH = 30


def main(argv: Sequence[str]) -> int:
    """Do one verb; options may stand before it or after."""
    given, rest = parse_all(IMAGE, argv)
    if "help" in given or not rest:
        from .help import help_of

        sys.stdout.write(help_of(IMAGE))
        return 0 if "help" in given else 125
    verb, arguments = verb_of(IMAGE, rest), rest[1:]
    count, act = _VERBS[verb]
    if len(arguments) != count:
        hint = f"ringfence image {IMAGE.arguments}"
        what = f"{verb} takes {count} {'word' if count == 1 else 'words'}, not {len(arguments)}"
        raise InvalidRequest(what, field="VERB", hint=hint)
    return act(given, arguments)


def parse_all(command: Command, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options and words of a command whose options may stand before or after its verb."""
    given: dict[str, Any] = {}
    words: list[str] = []
    rest = list(argv)
    while rest:
        _, rest = parse(command, rest, given)
        words += rest[:1]
        rest = rest[1:]
    return given, words


def command_of(given: dict[str, Any], command: list[str]) -> list[str]:
    """Fetch the image of `run` if need be; the command, or what the image runs."""
    image = needed(given)
    if not command and not image.argv:
        hint = "ringfence run --image NAME -- CMD ARG..."
        raise InvalidRequest("the image names no command", field="argv", hint=hint)
    return command or image.argv


def needed(given: dict[str, Any]) -> Image:
    """The image of --image, fetched as --pull says."""
    policy = given.get("pull", "missing")
    if policy not in _PULL:
        from ..model.mistakes import meant

        hint = meant(policy, _PULL)
        raise InvalidRequest(
            f"{policy!r} does not say when to fetch the image", field="--pull", hint=hint
        )
    if "image" not in given:
        hint = "--image NAME --pull missing"
        raise InvalidRequest("needs --image", field="--pull", hint=hint)
    store, name = ImageStore(), given["image"]
    image = None
    if policy != "always":
        try:
            image = store.find(name)
        except ImageNotFound:
            if policy == "never":
                raise
    return image or _fetch(name, store, None, plain_http=False)


# -- verbs ---------------------------------------------------------------------------------------


def _pull(given: dict[str, Any], arguments: Sequence[str]) -> int:
    image = _fetch(
        arguments[0], ImageStore(), _credentials(given), plain_http="plain-http" in given
    )
    _say_one(given, image)
    return 0


def _load(given: dict[str, Any], arguments: Sequence[str]) -> int:
    from ..images.archive import load

    _say_one(given, load(arguments[0], arguments[1]))
    return 0


def _list(given: dict[str, Any], _arguments: Sequence[str]) -> int:
    images = ImageStore().images()
    if "json" in given:
        print(json.dumps([image.to_json() for image in images]))
        return 0
    rows = [("NAME", "ID", "SIZE", "AGE")]
    for image in images:
        age = text_of_age(time.time() - image.created_at)
        rows.append((image.reference, image.id[7:19], text_of_size(image.size_bytes), age))
    print_table(rows)
    return 0


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns as wide as their longest cell; nothing in them steers a terminal."""
    rows = [tuple(map(plain, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


def _remove(given: dict[str, Any], arguments: Sequence[str]) -> int:
    image = ImageStore().remove(arguments[0])
    if "json" in given:
        print(json.dumps({"removed": image.reference}))
    else:
        print(f"removed {image.reference}; `ringfence image prune` frees its files")
    return 0


def _prune(given: dict[str, Any], _arguments: Sequence[str]) -> int:
    freed, in_use = ImageStore().collect()
    if "json" in given:
        print(json.dumps({"freed_bytes": freed, "in_use": in_use}))
        return 0
    print(f"freed {text_of_size(freed)}")
    for image_id in in_use:
        print(f"{image_id[7:19]} is in use and was not deleted")
    return 0


_VERBS: dict[str, tuple[int, Callable[[dict[str, Any], Sequence[str]], int]]] = {
    "pull": (1, _pull),
    "load": (2, _load),
    "list": (0, _list),
    "remove": (1, _remove),
    "prune": (0, _prune),
}


def _fetch(
    name: str, store: ImageStore, credentials: tuple[str, str] | None, *, plain_http: bool
) -> Image:
    from ..images.registry import pull

    progress = _Bar() if sys.stderr.isatty() else None
    try:
        return pull(
            name, store=store, credentials=credentials, plain_http=plain_http, progress=progress
        )
    finally:
        if progress:
            progress.clear()


def _credentials(given: dict[str, Any]) -> tuple[str, str] | None:
    if "user" not in given:
        if "password-stdin" in given:
            raise InvalidRequest("needs --user NAME", field="--password-stdin")
        return None
    name, colon, password = given["user"].partition(":")
    if "password-stdin" in given:
        if colon:
            raise InvalidRequest("--user already contains a password", field="--password-stdin")
        # A Windows program may have piped it: remove CR LF.
        password = sys.stdin.readline().removesuffix("\n").removesuffix("\r")
        if not password:
            hint = "pipe the password in as the first line"
            raise InvalidRequest("standard input is empty", field="--password-stdin", hint=hint)
        return name, password
    if not colon:
        hint = "or --user NAME --password-stdin"
        raise InvalidRequest("must be NAME:PASSWORD", field="--user", hint=hint)
    return name, password


class _Bar:
    """Progress on a terminal: one line for the blob under way."""

    def __init__(self) -> None:
        self._drawn_s = 0.0

    def __call__(self, what: str, done: int, size: int) -> None:
        now = time.monotonic()
        if now - self._drawn_s < _REDRAW_S and done < size:
            return
        self._drawn_s = now
        filled = _WIDTH * done // max(size, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        sys.stderr.write(f"\r\x1b[K{what} [{bar}] {text_of_size(done)} of {text_of_size(size)}")
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _say_one(given: dict[str, Any], image: Image) -> None:
    if "json" in given:
        print(json.dumps(image.to_json()))
    else:
        print(f"{image.reference}  {image.id[7:19]}  {text_of_size(image.size_bytes)}")


def text_of_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def text_of_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
