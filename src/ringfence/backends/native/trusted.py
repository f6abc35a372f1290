"""The authority that a sandbox's programs trust, where rules read requests inside TLS."""

from __future__ import annotations

from ...egress.roots import read_bundle
from ...errors import IoError
from ...policy.trust import DIRECTORY, JAVA_STORES, SYSTEM_BUNDLES, plan_trust
from ..local.template import READ_ONLY, shows_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...egress.client import Egress
    from ...model.network import NetworkPolicy


class Trusted:
    """An authority, and what of it is inside.

    Attributes:
        authority: `cert` and `key`, both PEM; the key is never inside.
        steps: Of the plan: they make the files that programs look for roots in.
        env: Variables that lead programs to these.
    """

    def __init__(self, authority: dict[str, str], hosts: frozenset[str]) -> None:
        self.authority, self._hosts = authority, hosts
        try:
            roots = read_bundle()
        except OSError as exc:
            raise IoError(f"the roots that this host trusts cannot be read: {exc}") from exc
        present = [path for path in (*SYSTEM_BUNDLES, *JAVA_STORES) if shows_file(path)]
        trust = plan_trust(authority["cert"], roots, present)
        self.env = trust.env
        self.steps: list[tuple[Any, ...]] = [("dir", DIRECTORY, 0o755, False)]
        self.steps += [("file", path, content, 0o444) for path, content in trust.files.items()]
        self.steps += [
            ("bind_inside", source, path, READ_ONLY) for path, source in trust.over.items()
        ]

    def speaks_for(self, host: str) -> bool:
        """Whether a certificate for `host`, a name or `*.name`, would be believed inside."""
        return any(
            host == ours or (ours.startswith("*.") and host.endswith(ours[1:]))
            for ours in self._hosts
        )


def trusted_for(policy: NetworkPolicy, egress: Egress) -> Trusted:
    """A new authority for the hosts whose requests `policy` reads, as a new sandbox gets it.

    Raises:
        NetworkPolicyError: There is nobody who could sign.
    """
    hosts = {rule.host for rule in policy.rules if rule.needs_tls_termination}
    return Trusted(egress.make_authority(policy), frozenset(hosts))
