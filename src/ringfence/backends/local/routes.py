"""Translation of a network policy to netlink messages for a sandbox's kernel. Pure."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from ...linux import netlink, nftables, rtnetlink
from ...policy.redirects import LISTEN_PORT, PROXY, redirects_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...launcher.plan import NetworkPlan
    from ...model.net.network import NetworkPolicy
    from ...policy.redirects import Redirect, Redirects

    Batch = tuple[str, int, bytes, int, int]
    Message = tuple[int, bytes]

# Source addresses of the sandbox's programs. Without an address beyond loopback, getaddrinfo(3)
# with AI_ADDRCONFIG finds no address of any name.
_OWN = {4: ip_address(PROXY[0]).packed, 6: ip_address("2001:2::1").packed}
_MOST = 768  # messages in a batch: well below the bytes that a socket may send at once
_MOST_PLANS = 64

_plans: dict[NetworkPolicy, NetworkPlan] = {}


def plan_for(policy: NetworkPolicy) -> NetworkPlan | None:
    """Plan the setup of a new namespace for `policy`; None where nothing can be reached."""
    if policy.is_none or policy.is_unrestricted:
        return None
    plan = _plans.get(policy)
    if plan is None:
        needs = redirects_of(policy)
        batches = [*_ways(needs.routes, with_addresses=True), _table(needs)]
        plan = {"batches": batches, "port": LISTEN_PORT}
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[policy] = plan
    return plan


def plan_to_change(old: NetworkPolicy, new: NetworkPolicy) -> NetworkPlan | None:
    """Plan the change of a namespace from `old` to `new`; None where nothing changes.

    The redirections change at once; routes that only one of the two has are added before, and
    removed after.
    """
    if old.is_none:
        return plan_for(new)
    before = redirects_of(old)
    if new.is_none:
        ways = _ways(before.routes, with_addresses=True, remove=True)
        return {"batches": [_filter(nftables.remove_table()), *ways], "port": 0}
    after = redirects_of(new)
    if after == before:
        return None
    come = [network for network in after.routes if network not in before.routes]
    go = [network for network in before.routes if network not in after.routes]
    table = _table(after, replace=True)
    return {"batches": [*_ways(come), table, *_ways(go, remove=True)], "port": 0}


def ways_of(policy: NetworkPolicy) -> set[str]:
    """Every network that leads somewhere under `policy`, as `address/bits`."""
    own = {f"{ip_address(packed)}/{8 * len(packed)}" for packed in _OWN.values()}
    return own | {str(ip_network(each)) for each in redirects_of(policy).routes}


def _ways(
    routes: Sequence[str], *, with_addresses: bool = False, remove: bool = False
) -> list[Batch]:
    """The routes, and the addresses that connections come from; those of IPv6 last."""
    route, address = rtnetlink.RTM_NEWROUTE, rtnetlink.RTM_NEWADDR
    if remove:
        route, address = rtnetlink.RTM_DELROUTE, rtnetlink.RTM_DELADDR
    messages: dict[int, list[Message]] = {4: [], 6: []}
    for each in map(ip_network, routes):
        packed, own = each.network_address.packed, _OWN[each.version]
        message = rtnetlink.local_route(route, packed, each.prefixlen, own)
        messages[each.version].append(message)
    for version, own in _OWN.items() if with_addresses else ():
        # A route names the address that it is used from, which must be there as long.
        place = len(messages[version]) if remove else 0
        messages[version].insert(place, rtnetlink.address(address, own))
    every, first_ipv6 = messages[4] + messages[6], len(messages[4]) + 1
    return [
        ("routes", netlink.NETLINK_ROUTE, *rtnetlink.batch(every[i : i + _MOST]), first_ipv6 - i)
        for i in range(0, len(every), _MOST)
    ]


def _table(needs: Redirects, *, replace: bool = False) -> Batch:
    messages = nftables.turn_to_listener(_turns(needs.loopback), _turns(needs.others), LISTEN_PORT)
    return _filter([*nftables.remove_table(), *messages] if replace else messages)


def _filter(messages: list[Message]) -> Batch:
    data, last = nftables.batch(messages)
    return "filter", netlink.NETLINK_NETFILTER, data, last, last + 1


def _turns(redirects: Sequence[Redirect]) -> list[nftables.Turn]:
    found = []
    for each in redirects:
        network = ip_network(each.network)
        found.append((network.network_address.packed, network.prefixlen, each.first, each.last))
    return found
