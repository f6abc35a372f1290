"""From the options of `run` to a spec and a request: checked before anything starts."""

from __future__ import annotations

import os

from ..errors import InvalidRequest
from ..model.base.checks import parse_duration, parse_size
from ..model.execs.exec import ExecRequest
from ..model.limits import Limits
from ..model.mount import READ_WRITE, Mount
from ..model.spec import SandboxSpec
from .scripts import scripts_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_SIZES = {"memory": "memory_bytes", "disk": "disk_bytes", "output-bytes": "output_bytes"}
_COUNTS = {"pids": "pids", "inodes": "inodes", "open-files": "open_files"}
_SAME = {
    "user": "user",
    "workdir": "workdir",
    "profile": "profile",
    "tier": "tier",
    "image": "image",
    "template": "template",
    "python-env": "python_env",
    "disk-root": "disk_root",
}
_HOME = "/home/sandbox"
_WORK = "/work"  # where --here shows the current directory


def make_spec(given: dict[str, Any], argv: Sequence[str]) -> SandboxSpec:
    """The sandbox that the options ask for.

    Raises:
        InvalidRequest: A value is malformed; `field` names it.
    """
    parts: dict[str, Any] = {_SAME[name]: given[name] for name in _SAME if name in given}
    if "here" in given:
        parts.setdefault("workdir", _WORK)
    if "backend" in given and "tier" not in given:
        from ..backends.registry import tier_of

        parts["tier"] = tier_of(given["backend"])
    if any(name.startswith(("net", "secret")) for name in given):
        from .network import network_of

        parts.update(network_of(given))
    if "memory-dir" in given:
        parts["memory_dir"] = _absolute(given["memory-dir"], "memory_dir")
    for name in ("protect", "unprotect", "deny"):
        if name in given:
            parts[name] = tuple(given[name])
    parts["allow_degraded"] = tuple(given.get("allow-degraded", ()))
    return SandboxSpec(
        env=environment(given.get("env", ())),
        limits=limits(given),
        mounts=mounts(given, argv),
        **parts,
    )


def check_protected(spec: SandboxSpec) -> None:
    """Refuse to protect what lies in no writable mount: it would not be kept, and nobody told.

    Precondition: nothing is mounted later.

    Raises:
        InvalidRequest: naming the path.
    """
    targets = [each.target for each in spec.mounts if each.access == READ_WRITE]
    if spec.unprotect and not targets:
        what, hint = (
            "has no effect without a writable mount",
            "add --mount SRC:DST:rw, or remove it",
        )
        raise InvalidRequest(what, field="unprotect", hint=hint)
    for path in spec.protect or ():
        around = [target for target in targets if path.startswith(f"{target}/")]
        if not (around if path.startswith("/") else targets):
            hint = (
                "only a --mount with :rw can be written to; mount without :rw to protect all files"
            )
            raise InvalidRequest(f"{path!r} is in no writable mount", field="protect", hint=hint)


def make_request(given: dict[str, Any], argv: Sequence[str], **streams: Any) -> ExecRequest:
    """The command itself.

    Raises:
        InvalidRequest: There is none, or the kernel could not be given it.
    """
    if not argv:
        hint = "ringfence run [OPTIONS] -- CMD ARG..."
        raise InvalidRequest("no command given", field="argv", hint=hint)
    timeout_s = parse_duration(given["timeout"], "timeout_s") if "timeout" in given else None
    return ExecRequest(argv=tuple(argv), timeout_s=timeout_s, **streams)


def environment(pairs: Sequence[str]) -> dict[str, str]:
    """`K=V` as the command line has it."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            hint = f'as {pair}=value; this shell\'s own: --env {pair}="${pair}"'
            raise InvalidRequest(f"{pair!r} is not K=V", field="env", hint=hint)
        if found.setdefault(key, value) != value:
            what = f"{key!r} is given twice, with {found[key]!r} and {value!r}"
            raise InvalidRequest(what, field="env", hint="give each name once")
    return found


def limits(given: dict[str, Any]) -> Limits:
    values: dict[str, Any] = {}
    for name, field in _SIZES.items():
        if name in given:
            values[field] = parse_size(given[name], f"limits.{field}")
    for name, field in _COUNTS.items():
        if name in given:
            values[field] = whole_number(given[name], f"limits.{field}")
    if "cpus" in given:
        values["cpus"] = _decimal(given["cpus"], "limits.cpus")
    return Limits(**values)


def mounts(given: dict[str, Any], argv: Sequence[str]) -> tuple[Mount, ...]:
    """The mounts that are given; without any, the script to run."""
    if "mount" in given or "here" in given:
        found = [_mount(text) for text in given.get("mount", ())]
        if "here" in given:
            access = "ro" if given["here"] is True else given["here"]
            found.append(Mount(_WORK, _here("here"), access))
        return tuple(found)
    scripts = scripts_of(argv, given.get("workdir", _HOME)) if argv else []
    try:
        return tuple(Mount(target, source) for source, target in scripts)
    except InvalidRequest:
        return ()  # a working directory that is no place for a mount is refused by its own name


def _mount(text: str) -> Mount:
    """A mount as it is written; an empty variable of the shell, or a `~` behind `=`, is a mistake."""
    if text.startswith(":/"):
        hint = "write the host path first, as .:/work; is a variable of the shell empty?"
        raise InvalidRequest(f"{text!r} has no source", field="mounts", hint=hint)
    if text.startswith("~/"):
        hint = f'only the shell reads ~: "$HOME/{text[2:]}"'
        raise InvalidRequest(f"{text!r} starts with ~", field="mounts", hint=hint)
    return Mount.parse(text, relative_to=_here("mounts"))


def whole_number(text: str, field: str) -> int:
    digits = text.strip().removeprefix("+").removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 20:
        hint = "use a number such as 64, or remove the option for the default limit"
        raise InvalidRequest(f"{text!r} is not a whole number", field=field, hint=hint)
    return int(text)


def _decimal(text: str, field: str) -> float:
    try:
        if "_" in text:
            raise ValueError  # Python's own way of writing numbers, and nobody else's
        return float(text)
    except ValueError:
        hint = "use a number of cores such as 0.5 or 2"
        raise InvalidRequest(f"{text!r} is not a number", field=field, hint=hint) from None


def _absolute(path: str, field: str) -> str:
    if not path:
        raise InvalidRequest("must not be empty", field=field, hint="as ./directory")
    return path if path.startswith("/") else f"{_here(field)}/{path}"


def _here(field: str) -> str:
    try:
        return os.getcwd()
    except OSError:
        raise InvalidRequest(
            "the current directory is gone", field=field, hint="give an absolute path"
        ) from None
