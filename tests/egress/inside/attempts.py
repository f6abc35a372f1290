"""What code inside a sandbox tries, as a script. It reads a JSON list a line, a function and its arguments.

Each is called in a process of its own, forked from this one, and what came of it is printed as a line of JSON:
to start Python and load its TLS takes seconds in a machine whose processor is imitated.

Every function gives up after `PATIENCE_S` by itself: "timeout" is what no refusal may look like.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import struct
import sys
import time
from typing import Any

PATIENCE_S = 20.0
AT_ONCE_S = PATIENCE_S / 2  # whatever waits for somebody who is silent takes longer
PROXY = ("198.18.0.1", 3128)
RESOLVER = "127.0.0.53"
Found = dict[str, Any]


def _failure(exc: OSError) -> Found:
    if isinstance(exc, socket.gaierror):
        names = {socket.EAI_NONAME: "NONAME", socket.EAI_AGAIN: "AGAIN"}
        return {"error": names.get(exc.errno or 0, str(exc))}
    if isinstance(exc, ssl.SSLError):
        return {"error": f"TLS: {exc.reason}"}
    if isinstance(exc, TimeoutError):
        return {"error": "timeout"}
    return {"error": errno.errorcode.get(exc.errno or 0, str(exc))}


def _read(sock: socket.socket, until: str = "", most: int = 1 << 20) -> bytes:
    """Up to the end of the stream, or until `until` has come."""
    seen = b""
    while len(seen) < most and not (until and until.encode("latin-1") in seen):
        piece = sock.recv(1 << 16)
        if not piece:
            break
        seen += piece
    return seen


def _converse(sock: socket.socket, say: list[str], pause_s: float = 0.0, until: str = "") -> Found:
    """Say each piece, then read to the end, or until `until` has come; what ended it is told, too."""
    found: Found = {"connected": True, "error": None, "heard": ""}
    heard = b""
    try:
        for number, piece in enumerate(say):
            if number and pause_s:
                time.sleep(pause_s)
            sock.sendall(piece.encode("latin-1"))
        while piece_in := sock.recv(1 << 16):
            heard += piece_in
            if len(heard) > 1 << 20 or (until and until.encode("latin-1") in heard):
                break
    except OSError as exc:
        found |= _failure(exc)
    return {**found, "heard": heard.decode("latin-1")}


def tcp(
    host: str,
    port: int,
    say: list[str] | None = None,
    pause_s: float = 0.0,
    patience_s: float = PATIENCE_S,
    until: str = "",
) -> Found:
    """Connect, by name or by address as it is spelled; say something; hear everything, or `until`."""
    started = time.monotonic()
    try:
        with socket.create_connection((host, port), PATIENCE_S) as sock:
            sock.settimeout(patience_s)
            found = _converse(sock, say or [], pause_s, until)
    except OSError as exc:
        found = {"connected": False, "heard": "", **_failure(exc)}
    return {**found, "seconds": time.monotonic() - started}


def resolve(name: str) -> Found:
    try:
        found = socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)
    except OSError as exc:
        return {"addresses": [], **_failure(exc)}
    except UnicodeError as exc:
        return {"addresses": [], "error": f"{exc}"}
    return {"addresses": sorted({str(each[4][0]) for each in found}), "error": None}


def udp(host: str, port: int, say: str = "ping", patience_s: float = 0.5) -> Found:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(patience_s)
        try:
            sock.connect((host, port))
            sock.send(say.encode("latin-1"))
            return {"error": None, "heard": sock.recv(4096).decode("latin-1")}
        except OSError as exc:
            return {"heard": "", **_failure(exc)}


def dns(
    name: str,
    type: int = 1,
    server: str = RESOLVER,
    over: str = "udp",
    raw: str = "",
    patience_s: float = PATIENCE_S,
) -> Found:
    """One query as a program would send it, or `raw` instead (latin-1)."""
    query = raw.encode("latin-1") or _query(name, type)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    kind = socket.SOCK_DGRAM if over == "udp" else socket.SOCK_STREAM
    with socket.socket(family, kind) as sock:
        sock.settimeout(patience_s)
        try:
            sock.connect((server, 53))
            if over == "udp":
                sock.send(query)
                answer = sock.recv(4096)
            else:
                sock.sendall(struct.pack("!H", len(query)) + query)
                answer = _read(sock, most=2)[2:] or _read(sock, most=13)
        except OSError as exc:
            return {"rcode": None, "answers": 0, **_failure(exc)}
    if len(answer) < 12:
        return {"rcode": None, "answers": 0, "error": "short", "heard": answer.decode("latin-1")}
    _, flags, _, answers = struct.unpack_from("!HHHH", answer)
    return {
        "rcode": flags & 15,
        "answers": answers,
        "error": None,
        "heard": answer.decode("latin-1"),
    }


def _query(name: str, type: int) -> bytes:
    labels = b"".join(
        bytes([len(part)]) + part.encode("latin-1") for part in name.rstrip(".").split(".") if part
    )
    return (
        struct.pack("!HHHHHH", 0x1234, 0x0100, 1, 0, 0, 0)
        + labels
        + b"\0"
        + struct.pack("!HH", type, 1)
    )


def tls(
    host: str,
    port: int = 443,
    sni: str | None = None,
    http_host: str = "",
    path: str = "/",
    connect: str = "",
) -> Found:
    """A request over TLS with any name in the handshake; through CONNECT when `connect` says where."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    target = PROXY if connect else (host, port)
    started = time.monotonic()
    try:
        with socket.create_connection(target, PATIENCE_S) as plain:
            if connect:
                plain.sendall(f"CONNECT {connect} HTTP/1.1\r\nHost: {connect}\r\n\r\n".encode())
                said = _read(plain, until="\r\n\r\n").decode("latin-1")
                if " 200 " not in said.partition("\r\n")[0] + " ":
                    return {"connected": True, "error": "proxy", "heard": said, "seconds": 0.0}
            with context.wrap_socket(plain, server_hostname=sni) as sock:
                request = (
                    f"GET {path} HTTP/1.1\r\nHost: {http_host or host}\r\nConnection: close\r\n\r\n"
                )
                found = _converse(sock, [request])
    except OSError as exc:
        found = {"connected": False, "heard": "", **_failure(exc)}
    return {**found, "seconds": time.monotonic() - started}


def hello(
    host: str, port: int, sni: str | None, change: str = "", pieces: int = 1, records: int = 1
) -> Found:
    """Send a ClientHello of our own making, and see whether a ServerHello comes back."""
    message = _client_hello(sni, change)
    size = -(-len(message) // records)
    parts = [message[i : i + size] for i in range(0, len(message), size)]
    stream = b"".join(b"\x16\x03\x01" + struct.pack("!H", len(part)) + part for part in parts)
    cut = -(-len(stream) // pieces)
    say = [stream[i : i + cut].decode("latin-1") for i in range(0, len(stream), cut)]
    started = time.monotonic()
    found: Found = {"connected": False, "error": None, "heard": ""}
    try:
        with socket.create_connection((host, port), PATIENCE_S) as sock:
            found["connected"] = True
            for number, piece in enumerate(say):
                if number:
                    time.sleep(0.02)
                sock.sendall(piece.encode("latin-1"))
            found["heard"] = sock.recv(5).decode("latin-1")
    except OSError as exc:
        found |= _failure(exc)
    # A handshake record: the server took it. An alert would be 0x15.
    return {
        **found,
        "answered": found["heard"].startswith("\x16"),
        "seconds": time.monotonic() - started,
    }


def _client_hello(sni: str | None, change: str) -> bytes:
    """What OpenSSL would send, with an extension added or changed."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    plain_name = sni.replace("\0", "x") if sni else None
    handshake = context.wrap_bio(incoming, outgoing, server_hostname=plain_name)
    try:
        handshake.do_handshake()
    except ssl.SSLWantReadError:
        pass
    body = outgoing.read()[5:]
    if sni and "\0" in sni:
        body = body.replace(sni.replace("\0", "x").encode(), sni.encode())
    if not change:
        return body
    extra = {
        "ech": struct.pack("!HH", 0xFE0D, 8) + bytes(8),
        "second-sni": _sni_extension("evil.test"),
    }[change]
    # handshake header 4, version 2, random 32, session id, cipher suites, compression, extensions
    at = 4 + 2 + 32
    at += 1 + body[at]
    at += 2 + struct.unpack_from("!H", body, at)[0]
    at += 1 + body[at]
    length = struct.unpack_from("!H", body, at)[0]
    body = body[:at] + struct.pack("!H", length + len(extra)) + body[at + 2 :] + extra
    return body[:1] + (len(body) - 4).to_bytes(3, "big") + body[4:]


def _sni_extension(name: str) -> bytes:
    entry = b"\0" + struct.pack("!H", len(name)) + name.encode()
    entries = struct.pack("!H", len(entry)) + entry
    return struct.pack("!HH", 0, len(entries)) + entries


def socks(
    address: str, port: int, kind: int = 3, command: int = 1, say: str = "", until: str = ""
) -> Found:
    """SOCKS5; `kind` is the address type: 1 IPv4, 3 name, 4 IPv6."""
    try:
        with socket.create_connection(PROXY, PATIENCE_S) as sock:
            sock.sendall(b"\x05\x01\x00")
            method = sock.recv(2)
            if kind == 1:
                target = socket.inet_aton(address)
            elif kind == 4:
                target = socket.inet_pton(socket.AF_INET6, address)
            else:
                target = bytes([len(address)]) + address.encode("latin-1")
            sock.sendall(bytes([5, command, 0, kind]) + target + struct.pack("!H", port))
            reply = sock.recv(10)
            found: Found = {
                "error": None,
                "method": list(method),
                "reply": list(reply),
                "heard": "",
            }
            if len(reply) > 1 and reply[1] == 0:
                found |= _converse(sock, [say] if say else [], until=until)
            return found
    except OSError as exc:
        return {"reply": [], "heard": "", **_failure(exc)}


def sockets(kinds: list[list[int]]) -> Found:
    """Which of these (family, type, protocol) can be opened."""
    opened = []
    for family, kind, protocol in kinds:
        try:
            socket.socket(family, kind, protocol).close()
        except OSError:
            continue
        opened.append([family, kind, protocol])
    return {"opened": opened}


def bind(family: int, kind: int, host: str, port: int, options: list[list[int]]) -> Found:
    """Whether an address can be taken over."""
    with socket.socket(family, kind) as sock:
        try:
            for level, name, value in options:
                sock.setsockopt(level, name, value)
            sock.bind((host, port))
            if kind == socket.SOCK_STREAM:
                sock.listen(1)
        except OSError as exc:
            return _failure(exc)
    return {"error": None}


def unix(path: str) -> Found:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(path)
            return {"error": None, "heard": sock.recv(100).decode()}
    except OSError as exc:
        return {"heard": "", **_failure(exc)}


def netlink(messages: list[str]) -> Found:
    """Requests to the kernel's routing tables (hex), each with the errno that it answered."""
    errors = []
    for message in messages:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
            sock.settimeout(PATIENCE_S)
            try:
                sock.send(bytes.fromhex(message))
                answer = sock.recv(65536)
                (code,) = struct.unpack_from("=i", answer, 16)
                errors.append(errno.errorcode.get(-code, str(code)))
            except OSError as exc:
                errors.append(_failure(exc)["error"])
    return {"errors": errors}


def interfaces() -> Found:
    with open("/proc/net/dev", encoding="ascii") as file:
        names = [line.partition(":")[0].strip() for line in file if ":" in line]
    return {"names": names, "listed": sorted(name for _, name in socket.if_nameindex())}


def main() -> None:
    for line in sys.stdin:
        function, arguments = json.loads(line)
        pid = os.fork()
        if 0 == pid:
            _answer(globals()[function](**arguments))
            os._exit(0)  # what is buffered here is the parent's
        _, status = os.waitpid(pid, 0)
        if status:
            _answer(None)  # why, it has said on standard error


def _answer(found: Found | None) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
