"""From the keyword arguments of `Sandbox.create` and `exec` to a spec and a request."""

from __future__ import annotations

import os

from ..errors import InvalidRequest
from . import checks
from .exec import ExecRequest
from .jsonform import within
from .limits import Limits
from .mount import Mount
from .network import NetworkPolicy
from .spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from .rules import NetworkRule

    StrPath = str | os.PathLike[str]
    Network = NetworkPolicy | str | Sequence[str | NetworkRule] | Mapping[str, Any]
    Mounts = Sequence[Mount | str] | Mount | str

_OTHERS = tuple(
    name for name in SandboxSpec.__match_args__ if name not in ("mounts", "network", "limits")
)


def others_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the further fields of a spec from the local names of a `create`, as far as they are set.

    Raises:
        InvalidRequest: `create` was given a name that it does not have.
    """
    refuse_unknown("create", values["unknown"])
    return {name: values[name] for name in _OTHERS if values[name] is not None}


def refuse_unknown(function: str, unknown: Iterable[str]) -> None:
    """Refuse keywords that `function` does not have, with what is meant by the first."""
    for name in unknown:
        from .mistakes import keyword_hint

        raise InvalidRequest(
            f"{function}() has no parameter {name!r}",
            field=name,
            hint=keyword_hint(function, name),
        )


def make_spec(
    spec: SandboxSpec | None,
    mounts: Mounts,
    network: Network,
    limits: Limits | Mapping[str, Any] | None,
    others: Mapping[str, Any],
) -> SandboxSpec:
    """The spec of one call; a given `spec` is taken as it is.

    Raises:
        InvalidRequest: Both a spec and parts of one were given, or a part is malformed.
    """
    if spec is not None:
        if mounts or limits or others or network != "none":
            raise InvalidRequest("give a spec or its parts, not both", field="spec")
        return spec
    given = {key: value for key, value in others.items() if value is not None}
    if not (mounts or given) and limits is None and network == "none":
        return _default()
    if isinstance(given.get("user"), int) and not isinstance(given.get("user"), bool):
        given["user"] = str(given["user"])
    refuse_unknown("create", [name for name in given if name not in _OTHERS])
    return SandboxSpec(
        mounts=_mounts(mounts),
        network=parse_network(network),
        limits=parse_limits(limits),
        **given,
    )


def _default() -> SandboxSpec:
    """What most sandboxes are: checked once, and frozen down to its mappings."""
    if not _defaults:
        _defaults.append(SandboxSpec())
    return _defaults[0]


_defaults: list[SandboxSpec] = []


def _mounts(mounts: Mounts) -> tuple[Mount, ...]:
    """Several mounts, or one that stands alone."""
    if isinstance(mounts, str | Mount):
        return (parse_mount(mounts, "mounts"),)
    given = enumerate(checks.items(mounts, "mounts"))
    return tuple(parse_mount(mount, f"mounts[{i}]") for i, mount in given)


def parse_mount(mount: Mount | str, field: str = "mount") -> Mount:
    """A mount; in a string a relative source starts from the current directory."""
    if isinstance(mount, Mount):
        return mount
    if not isinstance(mount, str):
        checks.refuse(field, f"must be a Mount or SRC:DST[:ro|rw], not {type(mount).__name__}")
    return Mount.parse(mount, relative_to="" if mount.startswith("/") else _here(field))


def _here(field: str) -> str:
    try:
        return os.getcwd()
    except OSError:
        checks.refuse(field, "the current directory is gone", "give an absolute path")


def parse_network(network: Network) -> NetworkPolicy:
    """`"none"`, `"unrestricted"`, `"a.com,b.com"`, a list of rules, a policy or its JSON form.

    Raises:
        InvalidRequest: It is none of these, or malformed.
    """
    if isinstance(network, NetworkPolicy):
        return network
    if isinstance(network, str):
        text: NetworkPolicy = within(
            "network", NetworkPolicy.check_meant, NetworkPolicy.parse(network)
        )
        return text
    if not isinstance(network, list | tuple) and not hasattr(network, "keys"):
        what = f"must be a text, a list of rules or a NetworkPolicy, not {network!r}"
        checks.refuse("network", what, "as 'none', 'unrestricted' or 'example.com,*.example.org'")
    read = NetworkPolicy.from_json if hasattr(network, "keys") else _policy_of
    policy: NetworkPolicy = within("network", read, network)
    return policy


def _policy_of(rules: object) -> NetworkPolicy:
    """Of a list, whose items are texts or `NetworkRule`s."""
    given = checks.items(rules, "")
    texts = tuple(each for each in given if isinstance(each, str))
    rules = tuple(each for each in given if not isinstance(each, str))
    return NetworkPolicy(allowed_hosts=texts, rules=rules).check_meant(takes_localhost=True)


def parse_limits(limits: Limits | Mapping[str, Any] | None) -> Limits:
    """Limits, or a mapping of its fields."""
    if limits is None:
        return Limits()
    if not isinstance(limits, Limits) and not hasattr(limits, "keys"):
        raise InvalidRequest("must be Limits or a mapping of its fields", field="limits")
    if isinstance(limits, Limits):
        return limits
    known = Limits.__match_args__
    for name in limits:
        if name not in known:
            from .mistakes import limit_hint

            raise InvalidRequest("unknown limit", field=name, hint=limit_hint(name, known))
    return Limits(**limits)


def make_request(argv: Sequence[StrPath], **options: Any) -> ExecRequest:
    """An exec request from the library's keyword arguments."""
    given = {key: value for key, value in options.items() if value is not None}
    if given:
        if isinstance(given.get("stdin"), str):
            given["stdin"] = given["stdin"].encode()
        if isinstance(given.get("user"), int) and not isinstance(given.get("user"), bool):
            given["user"] = str(given["user"])
    if isinstance(argv, str | bytes):
        what, hint = f"must be a list, not {type(argv).__name__}", "for a shell: shell(SCRIPT)"
        checks.refuse("argv", what, f'as ["ls", "-l"]; {hint}')
    # The model refuses what is no sequence.
    whole = not hasattr(argv, "__iter__")
    return ExecRequest(argv=argv if whole else tuple(argv), **given)  # type: ignore[arg-type]


def shell_argv(script: str) -> tuple[str, ...]:
    """The command that runs a script."""
    if not isinstance(script, str):
        hint = "for a list of arguments: exec([...])"
        checks.refuse("script", f"must be a string, not {type(script).__name__}", hint)
    return ("sh", "-c", script)


def check_callbacks(on_stdout: object, on_stderr: object) -> None:
    """Refuse what cannot be called before anything starts: its first output would be too late."""
    for name, given in (("on_stdout", on_stdout), ("on_stderr", on_stderr)):
        if given is not None and not callable(given):
            checks.refuse(name, f"must be callable, not {type(given).__name__}")
