"""Check of a sandbox's network namespace against its policy, read back from the kernel."""

from __future__ import annotations

import _socket

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import Capability
from .protections import degraded, enforced, missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...model.net.network import NetworkPolicy
    from .network import SandboxNetwork
    from .protections import Verdict

_LOOPBACK = ("127.", "::1/")
_TCP_LISTEN, _UDP_STATES = 10, (1, 7)  # include/net/tcp_states.h; of UDP, connected or not
_RTF_LOCAL = 0x80000000  # include/uapi/linux/ipv6_route.h


class NetworkTables:
    """Readings of /proc/net.

    Args:
        read: Gives the text of one of its files, by name.
    """

    def __init__(self, read: Callable[[str], str]) -> None:
        self._read = read

    @property
    def interfaces(self) -> list[str]:
        lines = self._read("dev").splitlines()[2:]
        return [line.partition(":")[0].strip() for line in lines]

    @property
    def local_networks(self) -> set[str]:
        """Every network whose addresses are its own: `address/bits`, of both versions."""
        found, address = set(), ""
        for words in map(str.split, self._read("fib_trie").splitlines()):
            if words[:1] == ["|--"]:
                address = words[1]
            elif words[-1:] == ["LOCAL"]:
                found.add(f"{address}{words[0]}")
        for words in map(str.split, self._read_or_nothing("ipv6_route")):
            if int(words[8], 16) & _RTF_LOCAL:
                network = _socket.inet_ntop(_socket.AF_INET6, bytes.fromhex(words[0]))
                found.add(f"{network}/{int(words[1], 16)}")
        return found

    def socket_inodes(self, protocol: str, address: str, port: int, *states: int) -> set[int]:
        """Sockets bound there, or to every address, by inode. `protocol` is `tcp` or `udp`."""
        found = set()
        text = self._read_or_nothing(protocol)
        text += self._read_or_nothing(f"{protocol}6")
        here = int.from_bytes(_socket.inet_aton(address), "little")
        for words in map(str.split, text):
            where, _, its_port = words[1].partition(":")
            is_there = not where.strip("0") or int(where, 16) == here
            if is_there and int(its_port, 16) == port and int(words[3], 16) in states:
                found.add(int(words[9]))
        return found

    def _read_or_nothing(self, name: str) -> list[str]:
        """The lines of a table; those with a heading lose it. None where there is no IPv6."""
        try:
            lines = self._read(name).splitlines()
        except OSError:
            return []
        return [line for line in lines if "local_address" not in line]


def of_rules(names: Sequence[str], apply: Callable[[NetworkPolicy], None]) -> list[Capability]:
    """Test rules on a sandbox, since both the kernel and the egress process take part; the last
    capability is about secrets.
    """
    from ...model.net.network import NetworkPolicy

    reason = ""
    try:
        apply(NetworkPolicy(allowed_hosts=("host.invalid:1",)))
    except (RingfenceError, OSError) as exc:
        reason = str(exc)
    found = [Capability(name, not reason, reason) for name in names]
    if not reason:
        from ...egress.host.client import (
            cannot_end_tls,  # not read by a run that reports on its sandbox
        )

        if reason := cannot_end_tls():
            reason += ": pip install 'ringfence[egress]'"
    return [*found, Capability(can.SECRETS, not reason, reason)]


def of_network(seen: NetworkTables, network: SandboxNetwork, policy: NetworkPolicy) -> Verdict:
    """Check that only destinations of the policy, which is not `unrestricted`, can be reached."""
    if seen.interfaces != ["lo"]:
        return missing(f"interfaces: {', '.join(seen.interfaces)}")
    others = {each for each in seen.local_networks if not each.startswith(_LOOPBACK)}
    if not policy.is_none:
        return _of_rules(seen, network, policy, others)
    if others:
        return missing(f"leads somewhere: {', '.join(sorted(others))}")
    return enforced("a namespace with nothing but lo")


def _of_rules(
    seen: NetworkTables, network: SandboxNetwork, policy: NetworkPolicy, ways: set[str]
) -> Verdict:
    """Rules are held twice: by the routes and sockets that the kernel has, and by who serves these."""
    from ...model.net.hosts import PUBLIC
    from ...policy.redirects import LISTEN_PORT, RESOLVER
    from .routes import ways_of

    if beyond := ways - ways_of(policy):
        return missing(f"leads where no rule does: {', '.join(sorted(beyond))}")
    listeners = seen.socket_inodes("tcp", "127.0.0.1", LISTEN_PORT, _TCP_LISTEN)
    resolvers = seen.socket_inodes("udp", *RESOLVER, *_UDP_STATES)
    if (listeners, resolvers) != ({network.inodes[0]}, {network.inodes[1]}):
        return missing("the listeners in the sandbox are not Ringfence's")
    if kept := network.check_served():
        why = f"the process that holds the rules could not get: {'; '.join(kept)}"
        return degraded(why, "a kernel and a container that allow it")
    if policy.learn:
        why, fix = (
            "learning: everything that no rule denies is allowed",
            "use the policy it learned",
        )
        return degraded(why, fix)
    count = len(policy.all_rules)
    rules = "1 rule allows" if count == 1 else f"{count} rules allow"
    if any(rule.host == PUBLIC and not rule.denies for rule in policy.all_rules):
        rules += ", among it every public host"
    return enforced(f"nothing but lo, and through it what {rules}")
