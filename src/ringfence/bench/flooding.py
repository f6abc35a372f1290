"""Attacks on a server's interfaces by a client and the code in its sandbox, as a separate program.

`python -m ringfence.bench.flooding SOCKET SANDBOX DOOR` attacks until it is killed, and prints a line
once the attack is under way.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tarfile
import threading
import time
from contextlib import closing

from .attacker import PATIENCE_S, PIECE, Attacker, Door, Wire, frame, quietly, read_beside
from .e2b_doors import E2B_DOORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_MUCH = 64 << 20  # bytes of a file, and of output
_MANY = 20_000  # entries of a directory or of a tar stream, records of execs
_MILLION = 1_000_000
SANDBOX = {"limits": {"inodes": 4 * _MILLION}}
"""What an attacker's sandbox is created from: by default it would hold a quarter of a million files."""
_MOST_AT_ONCE = 500  # entries of a tar stream in one chunk

# Serves on the sandbox's loopback. What a path or a port answers never ends.
_SERVER = r"""
import base64, hashlib, re, socket, threading, time
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunks": (CHUNKED, b"1\r\nx\r\n"),
    "extensions": (CHUNKED, b"1;" + b"e" * 9000 + b"\r\nx\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "headers": (OK, b"a: b\r\n"),
    "body": (OK + b"\r\n", b"x" * 65536),
    "messages": (b"", b"\x82\x01x"),
    "pings": (b"", b"\x89\x00"),
    "fragments": (b"\x02\x01x", b"\x00\x00"),
    "large": (b"", b"\x82\x7f" + (1 << 20).to_bytes(8, "big") + b"x" * (1 << 20)),
}

def serve(sock):
    with sock:
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(65536) or exit()
        name = head.split()[1].decode().rpartition("/")[2]
        if key := re.search(rb"(?i)sec-websocket-key: *(\S+)", head):
            told = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            sock.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                         b"Sec-WebSocket-Accept: " + base64.b64encode(told) + b"\r\n\r\n")
        if name == "sink":
            while sock.recv(1 << 16): pass
        if name == "stuck":
            time.sleep(10_000)
        first, again = FLOODS[name]
        sock.sendall(first)
        again *= max(1, (1 << 20) // len(again))
        while True:
            sock.sendall(again)

def send_bytes(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock:
        while True:
            sock.send(b"x")

def send_much(sock):
    with sock:
        while True:
            sock.sendall(bytes(1 << 20))

def do_nothing(sock):
    time.sleep(10_000)

def listen(port, serve):
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    def accept():
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()

for port, what in ((8080, serve), (8081, send_bytes), (8082, send_much), (8083, do_nothing)):
    listen(port, what)
print("ready", flush=True)
time.sleep(10_000)
"""
# Small writes to both streams in turns, so that each is an event of its own.
_CHATTER = """
import os
print("ready", flush=True)
while True:
    os.write(1, b"o")
    os.write(2, b"e")
"""
_GUSH = "echo ready; exec cat /dev/zero"
_CREATE = f"""
import os
os.makedirs("many", exist_ok=True)
for number in range({_MANY}):
    os.close(os.open(f"many/{{number:07d}}" + "n" * 200, os.O_CREAT | os.O_WRONLY))
print("ready", flush=True)
"""
_CREATE_MILLION = f"""
import os
for number in range({_MILLION}):
    name = f"million/{{number // 1000:04d}}"
    if not number % 1000:
        os.makedirs(name)
    os.close(os.open(f"{{name}}/{{number}}", os.O_CREAT | os.O_WRONLY))
print("ready", flush=True)
"""
_TOUCH = """
import os
os.makedirs("watched", exist_ok=True)
print("ready", flush=True)
number = 0
while True:
    number += 1
    name = f"watched/{number:07d}" + "n" * 100
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
    os.unlink(name)
"""
_SLEEPERS = """
import subprocess, time
taken = [subprocess.Popen(["sleep", "1000"]) for _ in range(400)]
print("ready", flush=True)
time.sleep(1000)
"""


def _serve(attacker: Attacker) -> str:
    return attacker.python(_SERVER)


def _preview(what: str) -> Door:
    def attack(attacker: Attacker, _: str) -> None:
        wire = attacker.wire()
        wire.ask("GET", f"{attacker.at}/ports/8080/http/{what}")
        wire.read_on()

    return Door(attack, _serve)


def _unread_preview(attacker: Attacker, _: str) -> None:
    wire = attacker.wire()
    wire.ask("GET", f"{attacker.at}/ports/8080/http/body")
    wire.sock.recv(1)
    time.sleep(PATIENCE_S)


def _preview_upload(attacker: Attacker, _: str) -> None:
    wire = attacker.wire()
    wire.ask("POST", f"{attacker.at}/ports/8080/http/sink", "Transfer-Encoding: chunked")
    while True:
        wire.sock.sendall(b"1\r\nx\r\n" * 10_000)


def _tunnel(target: str) -> Door:
    """Attack by reading data that the sandbox sends."""

    def attack(attacker: Attacker, _: str) -> None:
        wire = attacker.wire()
        wire.upgrade(f"{attacker.at}/ports/{target}")
        wire.read_on()

    return Door(attack, _serve)


def _unread_tunnel(attacker: Attacker, _: str) -> None:
    wire = attacker.wire()
    wire.upgrade(f"{attacker.at}/ports/8082/tcp")
    time.sleep(PATIENCE_S)


def _into_tunnel(target: str, sent: bytes) -> Door:
    """Attack by sending data from the client, repeatedly."""

    def attack(attacker: Attacker, _: str) -> None:
        wire = attacker.wire()
        wire.upgrade(f"{attacker.at}/ports/{target}")
        wire.sock.settimeout(PATIENCE_S)
        while True:
            wire.sock.sendall(sent)

    return Door(attack, _serve)


def _into_attached(sent: bytes, prepare: Callable[[Attacker], str], *, reads: bool) -> Door:
    def attack(attacker: Attacker, at: str) -> None:
        wire = attacker.wire()
        wire.upgrade(f"{at}/attach")
        wire.sock.settimeout(PATIENCE_S)
        if reads:
            read_beside(wire)
        while True:
            wire.sock.sendall(sent)

    return Door(attack, prepare)


def _attached(*, reads: bool) -> Callable[[Attacker, str], None]:
    def attack(attacker: Attacker, at: str) -> None:
        wire = attacker.wire()
        wire.upgrade(f"{at}/attach")
        if not reads:
            time.sleep(PATIENCE_S)
        wire.read_on()

    return attack


def _stream(query: str, *, reads: bool = True) -> Callable[[Attacker, str], None]:
    def attack(attacker: Attacker, at: str) -> None:
        wire = attacker.wire()
        wire.ask("GET", f"{at}/output?{query}", "Connection: close")
        if not reads:
            wire.sock.recv(1)
            time.sleep(PATIENCE_S)
        wire.read_on()

    return attack


def _get(target: str, method: str = "GET") -> Callable[[Attacker, str], None]:
    def attack(attacker: Attacker, _: str) -> None:
        attacker.call(
            method, attacker.at + target if target.startswith(("/files", "/")) else target
        )

    return attack


def _post(target: str, form: Any, method: str = "POST") -> Callable[[Attacker, str], None]:
    body = json.dumps(form).encode()
    return _post_text(target, body, method)


def _post_text(target: str, body: bytes, method: str = "POST") -> Callable[[Attacker, str], None]:
    def attack(attacker: Attacker, _: str) -> None:
        wire = attacker.wire()
        where = target.replace("{at}", attacker.at)
        wire.ask(method, where, "Content-Type: application/json", "Connection: close", body=body)
        wire.read_on()

    return attack


def _upload(piece: bytes) -> Callable[[Attacker, str], None]:
    def attack(attacker: Attacker, _: str) -> None:
        wire = attacker.wire()
        name = f"u{threading.get_native_id()}"
        chunked = "Transfer-Encoding: chunked"
        wire.ask("PUT", f"{attacker.at}/files/content?path={name}", chunked)
        for _piece in range(200):
            wire.sock.sendall(piece)

    return attack


def _tar() -> Iterator[bytes]:
    for number in range(_MANY):
        name = f"d{number % 7}/{number:07d}" + "n" * 60
        yield tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)
    yield bytes(1024)


def _upload_tree(attacker: Attacker, _: str) -> None:
    wire = attacker.wire()
    where = f"{attacker.at}/files/tree?path=t{threading.get_native_id()}"
    wire.ask("PUT", where, "Connection: close", body=b"".join(_tar()))
    wire.read_on()


def _upload_million(attacker: Attacker, _: str) -> None:
    """A stream of its own length, made while it is sent."""
    wire = attacker.wire()
    where = f"{attacker.at}/files/tree?path=t{threading.get_native_id()}"
    wire.ask("PUT", where, "Transfer-Encoding: chunked", "Connection: close")
    for start in range(0, _MILLION, _MOST_AT_ONCE):
        numbers = range(start, start + _MOST_AT_ONCE)
        piece = b"".join(tarfile.TarInfo(f"{n // 1000}/{n}").tobuf() for n in numbers)
        wire.sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
    end = bytes(1024)
    wire.sock.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))
    wire.read_on()


def _watch(attacker: Attacker, _: str) -> None:
    wire = attacker.wire()
    wire.ask("GET", f"{attacker.at}/files/watch?path=watched", "Connection: close")
    wire.read_on()


def _create(attacker: Attacker) -> str:
    return attacker.python(_CREATE)


def _create_million(attacker: Attacker) -> str:
    return attacker.python(_CREATE_MILLION)


def _many_execs(attacker: Attacker) -> str:
    """As many records as a server keeps: copies of one, since to run them all takes minutes."""
    at = attacker.start("true")
    attacker.call("GET", f"{at}/wait")
    known = at.rpartition("/")[2]
    copied = """
        WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < ?)
        INSERT INTO execs (id, sandbox, state, view, created_at, ended_at)
        SELECT id || '-' || n, sandbox, state, json_set(view, '$.id', id || '-' || n), created_at, ended_at
        FROM execs, n WHERE id = ?
    """
    path = os.path.join(os.path.dirname(attacker.path), "state.sqlite3")
    with closing(sqlite3.connect(path, timeout=PATIENCE_S)) as database, database:
        database.execute(copied, (_MANY, known))
    return ""


def _many_snapshots(attacker: Attacker) -> str:
    for _ in range(50):
        attacker.call("POST", f"{attacker.at}/snapshots", {})
    return ""


def _stuck(attacker: Attacker) -> str:
    return attacker.start("sleep", "1000", stream_stdin=True)


def _terminal(attacker: Attacker) -> str:
    return attacker.start("sleep", "1000", pty=[24, 80])


def _context(attacker: Attacker, language: str = "python") -> str:
    status, text = attacker.call("POST", f"{attacker.at}/contexts", {"language": language})
    if status != 201:
        raise OSError(f"no context: {status} {text[:300]!r}")
    return f"{attacker.at}/contexts/{json.loads(text)['id']}"


def _start_context(attacker: Attacker, _: str) -> None:
    """Start interpreters until that is refused, and then start anew."""
    status, _text = attacker.call("POST", f"{attacker.at}/contexts", {})
    if status != 201:
        for each in json.loads(attacker.call("GET", f"{attacker.at}/contexts")[1])["items"]:
            attacker.call("DELETE", f"{attacker.at}/contexts/{each['id']}")


def _cell(code: str, *, reads: bool = True) -> Door:
    """Attack by what a cell sends, in a context for each connection."""
    body = json.dumps({"code": code}).encode()

    def attack(attacker: Attacker, _: str) -> None:
        at, wire = _context(attacker), attacker.wire()
        wire.ask("POST", f"{at}/cells", "Content-Type: application/json", body=body)
        if reads:
            wire.read_on()
        wire.sock.recv(1)
        time.sleep(PATIENCE_S)

    return Door(attack)


def _with_variables(attacker: Attacker) -> str:
    at = _context(attacker)
    code = "globals().update({f'v{n}': 'x' * 10_000 for n in range(20_000)})"
    attacker.call("POST", f"{at}/cells", {"code": code})
    return at


def _fork(attacker: Attacker, _: str) -> None:
    status, text = attacker.call("POST", f"{attacker.at}/fork", {"n": 4})
    if status == 201:
        for each in json.loads(text)["items"]:
            attacker.call("DELETE", f"/v1/sandboxes/{each['id']}")


def _branch(attacker: Attacker) -> str:
    """A fork, and the snapshot that it began from: what a merge needs."""
    attacker.python(_CREATE)
    base = json.loads(attacker.call("POST", f"{attacker.at}/snapshots", {})[1])["id"]
    fork = json.loads(attacker.call("POST", f"{attacker.at}/fork", {"processes": "none"})[1])
    return f"{fork['items'][0]['id']} {base}"


def _merge(attacker: Attacker, branch: str) -> None:
    into, base = branch.split()
    attacker.call("POST", f"{attacker.at}/merge", {"into": into, "base": base, "dry_run": True})


def _slowly(
    sent: bytes,
    prepare: Callable[[Attacker], str] = lambda _: "",
    begin: Callable[[Attacker, str, Wire], None] = lambda *_: None,
) -> Door:
    """Attack by sending byte after byte on a hundred connections each."""

    def attack(attacker: Attacker, at: str) -> None:
        wires = [attacker.wire() for _ in range(100)]
        for wire in wires:
            begin(attacker, at, wire)
        for number in range(len(sent)):
            for wire in wires:
                wire.sock.sendall(sent[number : number + 1])

    return Door(attack, prepare)


def _begin_upload(attacker: Attacker, _: str, wire: Wire) -> None:
    where = f"{attacker.at}/files/content?path=u{wire.sock.fileno()}"
    wire.ask("PUT", where, f"Content-Length: {PIECE}")


def _connect(attacker: Attacker, _: str) -> None:
    for _number in range(1000):
        attacker.wire().sock.close()


def _shake_hands(attacker: Attacker, at: str) -> None:
    wire = attacker.wire()
    wire.upgrade(f"{at}/attach")
    wire.sock.close()


def _write_much(attacker: Attacker) -> str:
    return attacker.ready("sh", "-c", f"echo ready; head -c {_MUCH} /dev/zero | tee much")


def _pipelined(attacker: Attacker, _: str) -> None:
    wire = attacker.wire()
    read_beside(wire)
    while True:
        wire.sock.sendall(b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)


_RESIZE = frame(1, b'{"type":"resize","rows":10,"cols":10}') * 500
_LABELS = {"labels": {f"label{number}": "v" * 40 for number in range(200_000)}}
_DEEP = b'{"labels":' + b"[" * 500_000 + b"]" * 500_000 + b"}"
_ENTRIES = "limit=10000&path=many"

DOORS: dict[str, Door] = {
    "preview-interim": _preview("interim"),
    "preview-chunks": _preview("chunks"),
    "preview-extensions": _preview("extensions"),
    "preview-trailers": _preview("trailers"),
    "preview-headers": _preview("headers"),
    "preview-body": _preview("body"),
    "preview-unread": Door(_unread_preview, _serve, 16),
    "preview-upload": Door(_preview_upload, _serve),
    "ws-messages": _tunnel("8080/ws/messages"),
    "ws-pings": _tunnel("8080/ws/pings"),
    "ws-fragments": _tunnel("8080/ws/fragments"),
    "ws-large": _tunnel("8080/ws/large"),
    "ws-sent": _into_tunnel("8080/ws/sink", frame(2, b"x") * 10_000),
    "ws-sent-unread": _into_tunnel("8080/ws/stuck", frame(2, bytes(200_000))),
    "tcp-bytes": _tunnel("8081/tcp"),
    "tcp-much": _tunnel("8082/tcp"),
    "tcp-unread": Door(_unread_tunnel, _serve, 16),
    "tcp-sent": _into_tunnel("8083/tcp", frame(2, b"x") * 10_000),
    "tcp-sent-unread": _into_tunnel("8083/tcp", frame(2, bytes(200_000))),
    "attach-input": _into_attached(frame(2, bytes(200_000)), _stuck, reads=False),
    "attach-bytes": _into_attached(frame(2, b"\0x") * 10_000, _stuck, reads=True),
    "attach-resize": _into_attached(_RESIZE, _terminal, reads=True),
    "attach-resize-unread": _into_attached(_RESIZE, _terminal, reads=False),
    "attach-pings": _into_attached(frame(9, b"x" * 100) * 1000, _stuck, reads=False),
    "attach-errors": _into_attached(frame(1, b"[") * 1000, _stuck, reads=False),
    "attach-output": Door(_attached(reads=True), lambda a: a.python(_CHATTER)),
    "attach-unread": Door(_attached(reads=False), lambda a: a.ready("sh", "-c", _GUSH), 16),
    "stream-events": Door(_stream("follow=true"), lambda a: a.python(_CHATTER)),
    "stream-bytes": Door(_stream("follow=true&stream=stdout"), lambda a: a.python(_CHATTER)),
    "stream-much": Door(_stream("follow=true"), lambda a: a.ready("sh", "-c", _GUSH)),
    "stream-unread": Door(
        _stream("follow=true", reads=False), lambda a: a.ready("sh", "-c", _GUSH), 16
    ),
    "upload-bytes": Door(_upload(b"1\r\nx\r\n" * 10_000)),
    "upload-much": Door(_upload(b"10000\r\n" + bytes(65_536) + b"\r\n")),
    "tree-in": Door(_upload_tree),
    "tree-out": Door(_get("/files/tree?path=many"), _create),
    "tree-in-million": Door(_upload_million, at_once=2),
    "tree-out-million": Door(_get("/files/tree?path=million"), _create_million, 2),
    "glob-million": Door(_get("/files/glob?pattern=**&limit=10000&path=million"), _create_million),
    "list": Door(_get(f"/files/list?{_ENTRIES}"), _create),
    "glob": Door(_get(f"/files/glob?pattern=**&{_ENTRIES}"), _create),
    "search": Door(_get(f"/files/search?pattern=x&{_ENTRIES}"), _create),
    "snapshot": Door(_post("{at}/snapshots", {}), _create, 2),
    "snapshots-list": Door(lambda a, _: a.call("GET", "/v1/snapshots") and None, _many_snapshots),
    "watch": Door(_watch, lambda a: a.python(_TOUCH)),
    "execs-list": Door(_get("/execs?limit=1000"), _many_execs),
    "execs-start": Door(_post("{at}/execs", {"argv": ["true"], "wait": True})),
    "stats": Door(_get("/stats"), lambda a: a.python(_SLEEPERS)),
    "metrics": Door(lambda a, _: a.call("GET", "/metrics") and None),
    "events": Door(lambda a, _: a.call("GET", "/v1/events") and None),
    "network-log": Door(_get("/network/log")),
    "labels": Door(_post("/v1/sandboxes", _LABELS)),
    "body-deep": Door(_post_text("/v1/sandboxes", _DEEP)),
    "body-exec": Door(_post("{at}/execs", {"argv": ["true"] * 500_000})),
    "body-replace": Door(_post("{at}/files/replace", {"paths": ["x"] * 500_000})),
    "contexts-start": Door(_start_context),
    "cells-output": _cell("while True: print('x' * 100)"),
    "cells-lines": _cell("import sys\nwhile True: print(1); print(2, file=sys.stderr)"),
    "cells-unread": _cell("while True: print('x' * 10000)", reads=False),
    "cells-values": _cell("for _ in range(10**6): display('x' * 100_000)"),
    "cells-variables": Door(
        lambda a, at: a.call("GET", f"{at}/variables") and None, _with_variables
    ),
    "fork": Door(_fork, at_once=2),
    "merge": Door(_merge, _branch, 2),
    "heads-slow": _slowly(b"GET /v1/info HTTP/1.1\r\n" + b"a: b\r\n" * 1000),
    "bodies-slow": _slowly(bytes(PIECE), begin=_begin_upload),
    "frames-slow": _slowly(
        frame(2, bytes(PIECE)), _stuck, lambda _, at, wire: wire.upgrade(f"{at}/attach")
    ),
    "connects": Door(_connect),
    "handshakes": Door(_shake_hands, _stuck),
    "output": Door(lambda a, at: a.call("GET", f"{at}/output") and None, _write_much),
    "file": Door(_get("/files/content?path=much"), _write_much),
    "openapi": Door(lambda a, _: a.call("GET", "/v1/openapi.json") and None),
    "pipelined": Door(_pipelined),
    **E2B_DOORS,
}


def main(path: str, sandbox: str, name: str) -> None:
    """Attack until killed."""
    attacker, door = Attacker(path, sandbox), DOORS[name]
    at = door.prepare(attacker)

    def again() -> None:
        while True:
            quietly(lambda: door.attack(attacker, at))
            time.sleep(0.01)  # refused: no attack on this machine's processors

    for _ in range(door.at_once):
        threading.Thread(target=again, daemon=True).start()
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
