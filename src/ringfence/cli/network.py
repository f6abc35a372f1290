"""The network options of `run`: what may be reached, with which secrets, and the record of it."""

from __future__ import annotations

import os

from ..errors import InvalidRequest, RingfenceError
from ..model.base.jsonform import within
from ..model.net.network import NetworkPolicy
from .terminal import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ..backends.protocol import BackendSandbox
    from ..model.net.netlog import NetworkEvent
    from ..model.net.rules import NetworkRule

OPTIONS = ("net", "net-policy", "secret", "net-log", "net-learn")
_HTTPS = "443"
_NAME_IT = "name a variable, not the secret: export API_TOKEN=..., then HOST=API_TOKEN"
_MOST_BYTES = 16 * 2**20  # of a policy file: more than any policy may have rules


def network_of(given: dict[str, Any]) -> dict[str, Any]:
    """The parts of a spec that the network options ask for: `network` and `secrets`.

    Raises:
        InvalidRequest: A value is malformed, or two of them contradict each other.
    """
    policy = _policy(given)
    pairs = [_secret(text) for text in given.get("secret", ())]
    learn = "net-learn" in given
    if policy.is_unrestricted:
        for option in ("secret", "net-learn", "net-log"):
            if option in given:
                raise InvalidRequest(
                    "cannot be combined with an unrestricted network",
                    field=option,
                    hint="name hosts with --net HOST,...",
                )
    if pairs or (learn and not policy.learn):
        policy = NetworkPolicy(
            allowed_hosts=policy.allowed_hosts,
            rules=(*policy.rules, *(rule for rule, _value in pairs)),
            learn=learn or policy.learn,
            limits=policy.limits,
        )
    secrets = {rule.credential.secret: value for rule, value in pairs if rule.credential}
    return {"network": policy, "secrets": secrets}


def _policy(given: dict[str, Any]) -> NetworkPolicy:
    if "net-policy" not in given:
        # Denies alone are a mistake in a policy, but not in one that learns.
        learn = "net-learn" in given and given.get("net") != "unrestricted"
        if "net" not in given:
            return NetworkPolicy()
        policy = NetworkPolicy.parse(given["net"], learn=learn)
        return within("network", NetworkPolicy.check_no_localhost, policy)  # type: ignore[no-any-return]
    if "net" in given:
        hint = "add the hosts of --net to the policy file"
        raise InvalidRequest("cannot be given with --net", field="net-policy", hint=hint)
    return _from_file(given["net-policy"])


def _from_file(path: str) -> NetworkPolicy:
    from ..model.base.jsonform import loads

    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        hint = "give the path of a JSON policy file; docs/how-to/network.md has an example"
        raise InvalidRequest(f"{path!r}: {why}", field="net-policy", hint=hint) from exc
    if len(data) > _MOST_BYTES:
        hint = "a policy may have 10,000 rules"
        raise InvalidRequest(f"{path!r} is larger than 16 MiB", field="net-policy", hint=hint)
    try:
        return NetworkPolicy.from_json(loads(data, unique=True))
    except RingfenceError as exc:
        where = f"{exc.field}: " if exc.field else ""
        message = f"{path!r}: {where}{exc.message}"
        raise InvalidRequest(message, field="net-policy", hint=exc.hint) from exc


def _secret(text: str) -> tuple[NetworkRule, str]:
    """The rule of `HOST=ENVVAR[:header]`, and the secret's value."""
    from ..model.net import hosts
    from ..model.net.rules import Credential, NetworkRule

    where, equals, source = text.partition("=")
    name, colon, header = source.partition(":")
    if not equals or not name or (colon and not header):
        raise InvalidRequest(
            f"{text!r} is not HOST=ENVVAR[:header]", field="secret", hint="as api.test=API_TOKEN"
        )
    denies, host, ports = hosts.read_rule(where, "secret")
    if denies:
        hint = f"as {where.removeprefix('!')}={name}"
        raise InvalidRequest(
            f"{text!r}: a deny rule cannot have a secret", field="secret", hint=hint
        )
    try:
        # A header of one's own holds the bare secret; `Authorization` names its scheme.
        credential = Credential(name, header, "") if header else Credential(name)
        rule = NetworkRule(host, ports or _HTTPS, credential=credential)
    except InvalidRequest as exc:
        if exc.field.startswith("secret"):
            what = f"'{where}=...': what follows is no name of a variable"
            raise InvalidRequest(what, field="secret", hint=_NAME_IT) from None
        raise InvalidRequest(f"{text!r}: {exc.message}", field="secret", hint=exc.hint) from exc
    value = os.environ.get(name)
    if not value:
        hint = f"export {name}=..., so that the value is not on a command line"
        what = f"{text!r}: {name} is {'not set' if value is None else 'empty'}"
        if value is None and not name.isupper():
            # It may be the secret, and what is printed may be kept.
            what = f"'{where}=...': there is no variable of that name"
            hint = _NAME_IT
        raise InvalidRequest(what, field="secret", hint=hint)
    return rule, value


class Record:
    """Network events recorded for `--net-log` and `--net-learn`.

    Args:
        given: The file of `net-log` is created at once, so that an unwritable path is refused before
            the sandbox starts.

    Raises:
        InvalidRequest: The file cannot be written.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._learn = "net-learn" in given
        self._path = given.get("net-log")
        self._fd = -1
        if self._path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            try:
                # Mode 0600: paths and queries may contain secrets.
                self._fd = os.open(self._path, flags, 0o600)
            except (OSError, ValueError) as exc:
                why = getattr(exc, "strerror", None) or str(exc)
                hint = "choose a path in a directory that you can write to"
                raise InvalidRequest(f"{self._path!r}: {why}", field="net-log", hint=hint) from exc

    def close(self, sandbox: BackendSandbox) -> None:
        """Write the file, and say what was learned."""
        events = sandbox.network_log()
        if self._fd >= 0:
            self._write(events)
        if self._learn:
            say(f"learned: --net {_as_argument(learned(events))}")

    def _write(self, events: Sequence[NetworkEvent]) -> None:
        import json

        try:
            with open(self._fd, "wb", closefd=True) as file:
                for event in events:
                    file.write(json.dumps(event.to_json()).encode() + b"\n")
        except OSError as exc:
            say(f"--net-log: {self._path}: {exc.strerror}; the log is incomplete")


def learned(events: Sequence[NetworkEvent]) -> NetworkPolicy:
    """The smallest policy that allows what was reached."""
    from ..policy.learn import learned_policy

    return learned_policy(events)


def _as_argument(policy: NetworkPolicy) -> str:
    """Format the policy as a value for `--net`, quoted for a shell where needed."""
    import shlex

    return shlex.quote(",".join(policy.allowed_hosts) or "none")


def for_json(sandbox: BackendSandbox) -> dict[str, Any]:
    """The `network` of `--json`: the policy, what was asked, and what it was to learn."""
    policy, events = sandbox.spec.network, sandbox.network_log()
    form = {"policy": policy.to_json(), "events": [event.to_json() for event in events]}
    if policy.learn:
        form["learned"] = learned(events).to_json()
    return form
