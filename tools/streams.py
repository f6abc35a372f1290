"""Tries the server's streams for as long as you like: quiet ones, and clients that drop.

    python tools/streams.py --quiet-s 1800 --drops 50 --megabytes 64

Starts a daemon of its own, prints what it found as JSON, and exits with 1 when any of it is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import unix_connect

MAKER = """
import hashlib, sys
for i in range(int(sys.argv[1])):
    sys.stdout.buffer.write(hashlib.sha256(b"%d" % i).digest() * 2048)
"""
"""Writes so many pieces of 64 KiB, each of its own."""
PIECE = 65_536


class Server:
    """A daemon, and a sandbox on it."""

    def __init__(self, state: str) -> None:
        command = [sys.executable, "-m", "ringfence", "serve", "--json", "--state-dir", state]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.socket = str(Path(state) / "ringfence.sock")
        with self.client() as client:
            made = client.post("/v1/sandboxes", json={"limits": {"memory_bytes": 1 << 30}}).json()
        self.sandbox: str = made["id"]
        self.execs = f"/v1/sandboxes/{self.sandbox}/execs"

    def client(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=self.socket)
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=None)

    def start(self, **body: Any) -> str:
        with self.client() as client:
            found: str = client.post(self.execs, json=body).json()["id"]
            return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def stays_open(server: Server, seconds: float) -> dict[str, Any]:
    """Events, bytes and a WebSocket of a command that says nothing for so long, and then something."""
    exec_id = server.start(script=f"echo first; sleep {seconds}; echo last")
    at, found = f"{server.execs}/{exec_id}", dict[str, Any]()

    def events() -> None:
        kinds = []
        with server.client() as client, client.stream("GET", f"{at}/output?follow=true") as answer:
            for line in answer.iter_lines():
                kinds.append(json.loads(line)["type"])
        found["events"] = ["output", "output", "end"] == [k for k in kinds if k != "heartbeat"]
        found["heartbeats"] = kinds.count("heartbeat")

    def plain() -> None:
        with server.client() as client:
            url = f"{at}/output?stream=stdout&follow=true"
            found["bytes"] = client.get(url).content == b"first\nlast\n"

    def attached() -> None:
        out, told = b"", []
        uri = f"ws://localhost{at}/attach"
        with unix_connect(server.socket, uri, compression=None) as socket:
            for message in socket:
                if isinstance(message, bytes):
                    out += message[1:]
                else:
                    told.append(json.loads(message)["type"])
        found["attached"] = (b"first\nlast\n", ["attached", "end"]) == (out, told)

    threads = [threading.Thread(target=each) for each in (events, plain, attached)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["seconds"] = round(time.monotonic() - began, 1)
    names = ("events", "bytes", "attached")
    found["ok"] = all(found.get(name) for name in names) and found["seconds"] >= seconds
    return found


def drops(server: Server, count: int, megabytes: int) -> dict[str, Any]:
    """A client that drops at random offsets, beside one that never does, while the command writes."""
    dice, pieces = random.Random(), megabytes * (1 << 20) // PIECE
    exec_id = server.start(
        argv=["python3", "-c", MAKER, str(pieces)], max_output_bytes=2 * pieces * PIECE
    )
    url = f"{server.execs}/{exec_id}/output?stream=stdout&follow=true"
    steady = hashlib.sha256()

    def stay() -> None:
        with server.client() as client, client.stream("GET", url) as answer:
            for piece in answer.iter_raw():
                steady.update(piece)

    thread = threading.Thread(target=stay)
    thread.start()
    dropping, offset, dropped = hashlib.sha256(), 0, 0
    while offset < pieces * PIECE:
        most = dice.randint(1, pieces * PIECE // count) if dropped < count else 1 << 62
        with server.client() as client, client.stream("GET", f"{url}&offset={offset}") as answer:
            for piece in answer.iter_raw():
                dropping.update(piece[:most])
                offset, most = offset + len(piece[:most]), most - len(piece)
                if most <= 0:
                    break
        dropped += 1
    thread.join()
    expected = hashlib.sha256()
    for number in range(pieces):
        expected.update(hashlib.sha256(b"%d" % number).digest() * 2048)
    same = expected.hexdigest() == steady.hexdigest() == dropping.hexdigest()
    return {"drops": dropped - 1, "bytes": offset, "ok": same}


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quiet-s", type=float, default=5.0)
    parser.add_argument("--drops", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        server = Server(state)
        try:
            found = {
                "drops": drops(server, given.drops, given.megabytes),
                "quiet": stays_open(server, given.quiet_s),
            }
        finally:
            with suppress(httpx.HTTPError):
                server.close()
    print(json.dumps(found))
    return 0 if all(each["ok"] for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
