"""The authority that a sandbox's programs trust, where rules read requests inside TLS."""

from __future__ import annotations

from ....egress.tls import roots
from ....errors import IoError
from ....policy.trust import DIRECTORY, ended_hosts, not_covered
from . import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ....egress.host.client import Egress
    from ....model.net.network import NetworkPolicy


class Trusted:
    """An authority, and what of it is inside.

    Attributes:
        authority: `cert` and `key`, both PEM; the key is never inside.
        steps: Of the plan: they make the files that programs look for roots in.
        env: Variables that lead programs to these.

    Raises:
        IoError: The roots that this host trusts cannot be read.
    """

    def __init__(self, authority: dict[str, str], policy: NetworkPolicy) -> None:
        self.authority, self._hosts = authority, ended_hosts(policy)
        try:
            trust = roots.trust(authority["cert"], template.shown_etc())
        except OSError as exc:
            raise IoError(f"the roots that this host trusts: {exc}") from exc
        self.env = trust.env
        self.steps: list[tuple[Any, ...]] = [("dir", DIRECTORY, 0o755, False)]
        self.steps += [("file", path, content, 0o444) for path, content in trust.files.items()]
        self.steps += [
            ("bind_inside", source, path, template.READ_ONLY) for path, source in trust.over.items()
        ]

    @classmethod
    def known(
        cls, authority: dict[str, str], hosts: tuple[str, ...], env: dict[str, str]
    ) -> Trusted:
        """Restore an authority that is already installed inside, from `parts`."""
        self = cls.__new__(cls)
        self.authority, self._hosts, self.env, self.steps = authority, hosts, env, []
        return self

    @property
    def parts(self) -> tuple[dict[str, str], tuple[str, ...], dict[str, str]]:
        """Data to restore it in another process."""
        return self.authority, self._hosts, self.env

    def strange(self, policy: NetworkPolicy) -> tuple[str, ...]:
        """The hosts whose requests `policy` reads, and for whom nobody inside would believe us."""
        return not_covered(ended_hosts(policy), self._hosts)


def trusted_for(policy: NetworkPolicy, egress: Egress) -> Trusted:
    """A new authority for the hosts whose requests `policy` reads, as a new sandbox gets it.

    Raises:
        NetworkPolicyError: There is nobody who could sign.
    """
    return Trusted(egress.make_authority(policy), policy)
