"""Table of nf_tables that redirects connections to our own listener, as netlink messages.

The messages say what `nft -f` would be told with::

    table inet ringfence {
        chain turn {
            type nat hook output priority -100
            meta l4proto != tcp accept
            ip daddr 127.0.0.53 tcp dport 53 redirect to :1021  # and others of the loopback
            ip daddr 127.0.0.0/8 accept
            ip6 daddr ::1 accept
            ip daddr 198.18.0.0/15 tcp dport 443 redirect to :1021  # and others
        }
        chain track {
            type filter hook output priority -300
            meta l4proto != tcp notrack accept
            tcp sport 1021 accept
            tcp dport 1021 accept
            ip daddr 127.0.0.53 tcp dport 53 accept  # and others of the loopback
            ip daddr 127.0.0.0/8 notrack
            ip6 daddr ::1 notrack
        }
    }

The second chain keeps what stays inside out of the connection table, whose memory no cgroup counts:
otherwise any program could fill it with connections to itself.
"""

from __future__ import annotations

import _socket as socket
import _struct as struct

from . import netlink

# include/uapi/linux/netfilter/nfnetlink.h
_BATCH_BEGIN, _BATCH_END, _NFTABLES = 16, 17, 10
_NFGENMSG = struct.Struct(">BBH")  # family, version, resource
# include/uapi/linux/netfilter/nf_tables.h
_NEWTABLE, _DELTABLE, _NEWCHAIN, _NEWRULE = 0, 2, 3, 6
_TABLE_NAME, _CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_TYPE = 1, 1, 3, 4, 7
_HOOK_NUMBER, _HOOK_PRIORITY = 1, 2
_RULE_TABLE, _RULE_CHAIN, _RULE_EXPRESSIONS = 1, 2, 4
_LIST_ELEMENT, _EXPRESSION_NAME, _EXPRESSION_DATA = 1, 1, 2
_DATA_VALUE, _DATA_VERDICT, _VERDICT_CODE = 1, 2, 1
_META_NFPROTO, _META_L4PROTO = 15, 16
_EQUAL, _NOT_EQUAL = 0, 1
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_SOURCE, _DESTINATION = 0, 2  # offsets of the ports
_EVERY_PORT = (1, 0xFFFF)
_VERDICT_REGISTER, _REGISTER = 0, 1
_ACCEPT = 1  # NF_ACCEPT, include/uapi/linux/netfilter.h
_INET, _OUTPUT = 1, 3  # NFPROTO_INET, NF_INET_LOCAL_OUT
_BEFORE_TRACKING, _BEFORE_ROUTING = -300, -100  # NF_IP_PRI_RAW, NF_IP_PRI_NAT_DST

TABLE = b"ringfence"
_TURN, _TRACK = b"turn", b"track"
_LOOPBACK = ((b"\x7f\0\0\0", 8), (bytes(15) + b"\x01", 128))

TYPE_CHECKING = False
if TYPE_CHECKING:
    Turn = tuple[bytes, int, int, int]
    """Network (4 or 16 bytes), its bits, first and last port."""


def batch(messages: list[tuple[int, bytes]]) -> tuple[bytes, int]:
    """A transaction: all of it or nothing. Returns the bytes, and the number that is acknowledged."""
    parts = [_control(_BATCH_BEGIN)]
    last = len(messages)
    for number, (kind, body) in enumerate(messages, 1):
        flags = netlink.NLM_F_CREATE | netlink.NLM_F_APPEND if kind & 0xFF != _DELTABLE else 0
        parts.append(
            netlink.message(kind, flags | netlink.NLM_F_ACK * (number == last), number, body)
        )
    return b"".join([*parts, _control(_BATCH_END)]), last


def _control(kind: int) -> bytes:
    return netlink.message(kind, 0, 0, _NFGENMSG.pack(socket.AF_UNSPEC, 0, _NFTABLES))


def remove_table() -> list[tuple[int, bytes]]:
    """Take the table away, with all that is in it."""
    return [_message(_DELTABLE, netlink.attribute(_TABLE_NAME, _text(TABLE)))]


def turn_to_listener(
    loopback: list[Turn], others: list[Turn], port: int
) -> list[tuple[int, bytes]]:
    """The whole table: TCP to any of `loopback` and `others` goes to the listener on `port`.

    Nothing else of the loopback addresses is turned, whatever networks are in `others`.
    """
    not_tcp = _protocol_is(socket.IPPROTO_TCP, _NOT_EQUAL)
    return [
        _message(_NEWTABLE, netlink.attribute(_TABLE_NAME, _text(TABLE))),
        _chain(_TURN, b"nat", _BEFORE_ROUTING),
        _chain(_TRACK, b"filter", _BEFORE_TRACKING),
        _rule(_TURN, *not_tcp, _accept()),
        *(_rule(_TURN, *_goes_to(*turn), *_redirect(port)) for turn in loopback),
        *(_rule(_TURN, *_address(*network), _accept()) for network in _LOOPBACK),
        *(_rule(_TURN, *_goes_to(*turn), *_redirect(port)) for turn in others),
        _rule(_TRACK, *not_tcp, _expression(b"notrack"), _accept()),
        _rule(_TRACK, *_port_at(_SOURCE, port, port), _accept()),
        _rule(_TRACK, *_port_at(_DESTINATION, port, port), _accept()),
        *(_rule(_TRACK, *_goes_to(*turn), _accept()) for turn in loopback),
        *(_rule(_TRACK, *_address(*network), _expression(b"notrack")) for network in _LOOPBACK),
    ]


def _chain(name: bytes, kind: bytes, priority: int) -> tuple[int, bytes]:
    return _message(
        _NEWCHAIN,
        netlink.attribute(_CHAIN_TABLE, _text(TABLE)),
        netlink.attribute(_CHAIN_NAME, _text(name)),
        netlink.nested(
            _CHAIN_HOOK,
            netlink.attribute(_HOOK_NUMBER, _number(_OUTPUT)),
            netlink.attribute(_HOOK_PRIORITY, _number(priority)),
        ),
        netlink.attribute(_CHAIN_TYPE, _text(kind)),
    )


def _rule(chain: bytes, *expressions: bytes) -> tuple[int, bytes]:
    return _message(
        _NEWRULE,
        netlink.attribute(_RULE_TABLE, _text(TABLE)),
        netlink.attribute(_RULE_CHAIN, _text(chain)),
        netlink.nested(_RULE_EXPRESSIONS, *expressions),
    )


# -- expressions ------------------------------------------------------------------------------


def _goes_to(network: bytes, bits: int, first: int, last: int) -> list[bytes]:
    ports = [] if (first, last) == _EVERY_PORT else _port_at(_DESTINATION, first, last)
    return [*_address(network, bits), *ports]


def _address(network: bytes, bits: int) -> list[bytes]:
    size = len(network)
    family, offset = (2, 16) if size == 4 else (10, 24)  # NFPROTO_*; of daddr in the header
    found = [_meta(_META_NFPROTO), _compare(_EQUAL, bytes([family]))]
    if not bits:
        return found
    found.append(_load(_NETWORK_HEADER, offset, size))
    if bits < 8 * size:
        mask = ((1 << bits) - 1 << 8 * size - bits).to_bytes(size, "big")
        found.append(_mask(mask))
    return [*found, _compare(_EQUAL, network)]


def _port_at(offset: int, first: int, last: int) -> list[bytes]:
    """The source or destination port of a TCP packet is one of these."""
    load = _load(_TRANSPORT_HEADER, offset, 2)
    low, high = first.to_bytes(2, "big"), last.to_bytes(2, "big")
    if first == last:
        return [load, _compare(_EQUAL, low)]
    within = _expression(
        b"range", _attr(1, _REGISTER), _attr(2, _EQUAL), _value(3, low), _value(4, high)
    )
    return [load, within]


def _protocol_is(protocol: int, how: int) -> list[bytes]:
    return [_meta(_META_L4PROTO), _compare(how, bytes([protocol]))]


def _redirect(port: int) -> list[bytes]:
    to = port.to_bytes(2, "big")
    load = _expression(b"immediate", _attr(1, _REGISTER), _value(2, to))
    return [load, _expression(b"redir", _attr(1, _REGISTER))]


def _accept() -> bytes:
    verdict = netlink.nested(_DATA_VERDICT, netlink.attribute(_VERDICT_CODE, _number(_ACCEPT)))
    return _expression(b"immediate", _attr(1, _VERDICT_REGISTER), netlink.nested(2, verdict))


def _meta(key: int) -> bytes:
    return _expression(b"meta", _attr(1, _REGISTER), _attr(2, key))


def _load(base: int, offset: int, size: int) -> bytes:
    return _expression(
        b"payload", _attr(1, _REGISTER), _attr(2, base), _attr(3, offset), _attr(4, size)
    )


def _mask(mask: bytes) -> bytes:
    return _expression(
        b"bitwise",
        _attr(1, _REGISTER),
        _attr(2, _REGISTER),
        _attr(3, len(mask)),
        _value(4, mask),
        _value(5, bytes(len(mask))),
    )


def _compare(how: int, value: bytes) -> bytes:
    return _expression(b"cmp", _attr(1, _REGISTER), _attr(2, how), _value(3, value))


# Attributes of an expression are numbered from 1 in the order of their declaration, each in a list of
# its own (NFTA_META_*, NFTA_CMP_*, NFTA_PAYLOAD_*, ...). Numbers are in network byte order.


def _expression(name: bytes, *attributes: bytes) -> bytes:
    return netlink.nested(
        _LIST_ELEMENT,
        netlink.attribute(_EXPRESSION_NAME, _text(name)),
        netlink.nested(_EXPRESSION_DATA, *attributes),
    )


def _attr(kind: int, number: int) -> bytes:
    return netlink.attribute(kind, _number(number))


def _value(kind: int, value: bytes) -> bytes:
    return netlink.nested(kind, netlink.attribute(_DATA_VALUE, value))


def _number(value: int) -> bytes:
    return (value & 0xFFFFFFFF).to_bytes(4, "big")


def _text(name: bytes) -> bytes:
    return name + b"\0"


def _message(kind: int, *attributes: bytes) -> tuple[int, bytes]:
    head = _NFGENMSG.pack(_INET, 0, 0)
    return _NFTABLES << 8 | kind, head + b"".join(attributes)
