"""Extended attributes of files, for backends whose files the host cannot open: read, or set anew."""

from __future__ import annotations

import json
import os
import stat


def attributes(stream: int, path: str, options: str) -> None:
    """Answer with the attributes of files below `path`, one JSON line each.

    Options are `names`, `prefix`, which the attributes have and the answer leaves out, and `set`: what they
    are to be from now on. Mode bits are set to what they are then, so that whoever watches is told.
    """
    asked = json.loads(options)
    prefix, wanted = asked["prefix"], asked["set"]
    for name in asked["names"]:
        target = os.path.join(path, name)
        if wanted is not None:
            _put(target, prefix, wanted)
        _say(stream, {"path": target, "attributes": _get(target, prefix)})
    _say(stream, {"done": True})


def _put(target: str, prefix: str, wanted: dict[str, str]) -> None:
    os.chmod(target, stat.S_IMODE(os.stat(target).st_mode))
    for name in _get(target, prefix):
        if name not in wanted:
            os.removexattr(target, prefix + name)
    for name, value in wanted.items():
        os.setxattr(target, prefix + name, value.encode())


def _get(target: str, prefix: str) -> dict[str, str]:
    try:
        return {
            name[len(prefix) :]: os.getxattr(target, name).decode("ascii", "replace")
            for name in os.listxattr(target)
            if name.startswith(prefix)
        }
    except OSError:
        return {}  # it went away, is not ours to see, or its file system has none


def _say(stream: int, facts: dict[str, object]) -> None:
    view = memoryview(json.dumps(facts).encode() + b"\n")
    while view:
        view = view[os.write(stream, view) :]
