"""From the keyword arguments of `Sandbox.create` and `exec` to a spec and a request."""

from __future__ import annotations

import os

from ..errors import InvalidRequest
from .base import checks
from .base.jsonform import within
from .execs.exec import ExecRequest
from .limits import Limits
from .mount import Mount
from .net.network import NetworkPolicy
from .spec import SandboxSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .net.rules import NetworkRule

    StrPath = str | os.PathLike[str]
    Network = NetworkPolicy | str | Sequence[str | NetworkRule] | Mapping[str, Any]
    Mounts = Sequence[Mount | str] | Mount | str

_OTHERS = tuple(
    name for name in SandboxSpec.__match_args__ if name not in ("mounts", "network", "limits")
)
_OPTIONS = tuple(name for name in ExecRequest.__match_args__ if name != "argv")


def others_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the further fields of a spec from the local names of a `create`, as far as they are set."""
    if hasattr(values["secrets"], "keys"):
        used = parse_network(values["network"]).secrets
        for name in sorted(map(str, values["secrets"].keys() - set(used))):
            import warnings

            how = f"NetworkRule(HOST, credential=Credential({name!r})) does; env= is for programs"
            warnings.warn(f"no rule of network= sends the secret {name!r}: {how}", stacklevel=4)
    return {name: values[name] for name in _OTHERS if values[name] is not None}


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
        if not isinstance(spec, SandboxSpec):
            what = f"must be a SandboxSpec, not {spec!r}"
            checks.refuse("spec", what, 'pass the value by keyword, as image="python:3.12"')
        if mounts or limits or others or network != "none":
            checks.refuse(
                "spec",
                "give a spec or its parts, not both",
                "spec.altered(...) returns a changed copy",
            )
        return spec
    given = {key: value for key, value in others.items() if value is not None}
    if not (mounts or given) and limits is None and network == "none":
        return _default()
    if isinstance(given.get("user"), int) and not isinstance(given.get("user"), bool):
        given["user"] = str(given["user"])
    if unknown := given.keys() - {*_OTHERS}:
        from .mistakes import refuse_names
        from .parts import SandboxParts

        refuse_names("create", unknown, SandboxParts.__annotations__)
    return SandboxSpec(
        mounts=_mounts(mounts), network=parse_network(network), limits=parse_limits(limits), **given
    )


def _default() -> SandboxSpec:
    """Return the shared default spec, checked once."""
    if not _defaults:
        _defaults.append(SandboxSpec())
    return _defaults[0]


_defaults: list[SandboxSpec] = []


def _mounts(mounts: Mounts) -> tuple[Mount, ...]:
    """Several mounts, or one that stands alone."""
    if isinstance(mounts, str | Mount):
        return (parse_mount(mounts, "mounts"),)
    if not isinstance(mounts, list | tuple):
        what = f"must be a text or a list, not {type(mounts).__name__}"
        checks.refuse("mounts", what, 'as ".:/work:rw" or [".:/work:rw"]')
    given = enumerate(mounts)
    return tuple(parse_mount(mount, f"mounts[{i}]") for i, mount in given)


def parse_mount(mount: Mount | str, field: str = "mount") -> Mount:
    """A mount; in a string a relative source starts from the current directory."""
    if isinstance(mount, Mount):
        return mount
    if not isinstance(mount, str):
        what = f"must be a Mount or SRC:DST[:ro|rw], not {type(mount).__name__}"
        checks.refuse(field, what, 'as ".:/work:rw"')
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
        policy = NetworkPolicy.parse(network)
        return within("network", NetworkPolicy.check_no_localhost, policy)  # type: ignore[no-any-return]
    if not isinstance(network, list | tuple) and not hasattr(network, "keys"):
        what = f"must be a text, a list of rules or a NetworkPolicy, not {network!r}"
        checks.refuse("network", what, "as 'none', 'unrestricted' or 'example.com,*.example.org'")
    read = NetworkPolicy.from_json if hasattr(network, "keys") else _policy_of
    return within("network", read, network)  # type: ignore[no-any-return]


def _policy_of(rules: object) -> NetworkPolicy:
    """Of a list, whose items are texts or `NetworkRule`s."""
    given = checks.items(rules, "")
    texts = tuple(each for each in given if isinstance(each, str))
    rules = tuple(each for each in given if not isinstance(each, str))
    return NetworkPolicy(allowed_hosts=texts, rules=rules)


def parse_limits(limits: Limits | Mapping[str, Any] | None) -> Limits:
    """Limits, or a mapping of its fields."""
    if limits is None:
        return Limits()
    if not isinstance(limits, Limits) and not hasattr(limits, "keys"):
        what = f"must be Limits or a mapping of its fields, not {limits!r}"
        checks.refuse("limits", what, 'as {"memory_bytes": "256m", "cpus": 0.5}')
    if isinstance(limits, Limits):
        return limits
    known = Limits.__match_args__
    for name in limits:
        if name not in known:
            from .mistakes import meant

            hint = meant(name, known, of="Limits")
            raise InvalidRequest("unknown limit", field=f"limits.{name}", hint=hint)
    made: Limits = within("limits", lambda each: Limits(**each), limits)
    return made


def make_request(argv: Sequence[StrPath], *more: object, **options: Any) -> ExecRequest:
    """An exec request from the library's keyword arguments."""
    given = {key: value for key, value in options.items() if value is not None}
    if given:
        if isinstance(given.get("stdin"), str):
            given["stdin"] = given["stdin"].encode()
        if isinstance(given.get("user"), int) and not isinstance(given.get("user"), bool):
            given["user"] = str(given["user"])
    # A mapping would be its names alone, a set has no order.
    is_other = isinstance(argv, str | bytes | dict | set | frozenset)
    if more or is_other or not hasattr(argv, "__iter__"):
        is_what = "several arguments" if more else type(argv).__name__
        what, hint = f"must be a list, not {is_what}", "for a shell: shell(SCRIPT)"
        checks.refuse("argv", what, f'as ["ls", "-l"]; {hint}')
    return ExecRequest(argv=tuple(argv), **given)  # type: ignore[arg-type]


def options_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options of an exec from the local names of an `exec` or a `start`."""
    return {name: values[name] for name in _OPTIONS if name in values}


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
            what = f"must be callable, not {type(given).__name__}"
            checks.refuse(name, what, "a function of one argument, the bytes of a chunk")


def check_assignment(owner: object, name: str) -> None:
    """Refuse `sandbox.network = ...`, which would change nothing.

    Raises:
        AttributeError: `name` is a parameter of `create`.
    """
    if name not in SandboxSpec.__match_args__ or hasattr(type(owner), name):
        return
    how = f"give {name}= to create()"
    if name == "network":
        how += ", or call apply_network_policy(policy)"
    elif name == "mounts":
        how += ", or call mount(...)"
    message = f"{name!r} of a {type(owner).__name__} cannot be assigned ({how})"
    raise AttributeError(message, name=name, obj=None)
