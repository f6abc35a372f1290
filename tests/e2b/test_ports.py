"""Servers inside, by headers and by host names of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect
from websockets.sync.client import connect

from ringfence.api.streaming.preview import Answer
from ringfence.e2b import ports
from ringfence.e2b.notes import Notes
from tests.api.conftest import Daemon
from tests.e2b.conftest import Box, Client

pytestmark = pytest.mark.anyone

SERVER = """
import http.server, json, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Set-Cookie", "seen=1; Path=/")
        self.send_header("Set-Cookie", "domain=2; DOMAIN = sbx.test ;Secure; domain")
        self.end_headers()
        self.wfile.write(json.dumps({"path": self.path, **dict(self.headers)}).encode())
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Handler)
if sys.argv[1:]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def _serve(box: Box, certificate: str = "") -> None:
    box.call("POST", "/files?path=server.py", content=SERVER.encode())
    box.run(f"setsid -f python3 server.py {certificate} >/dev/null 2>&1")
    headers = {"E2b-Sandbox-Port": "3000"}
    until = time.monotonic() + 20
    while box.call("GET", "/", headers=headers).status_code != 200 and time.monotonic() < until:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def serving(client: Client) -> Iterator[Box]:
    """A sandbox in which a server listens on port 3000."""
    box = client.create(timeout=600)
    _serve(box)
    yield box
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_a_host_name_is_an_origin_of_its_own(client: Client, serving: Box) -> None:
    host = f"3000-{serving.id}.sbx.test"
    headers = {"Host": host, "Cookie": "mine=2", "Origin": f"https://{host}"}
    answer = client.http.get("/a%2Fb?c=d", headers=headers)
    seen = {key.lower(): value for key, value in answer.json().items()}

    assert "/a%2Fb?c=d" == seen["path"]
    assert (host, "mine=2", f"https://{host}") == (seen["host"], seen["cookie"], seen["origin"])
    # Of this origin only: with its domain, a browser would send it to the sandboxes of others.
    assert ["seen=1; Path=/", "domain=2;Secure"] == answer.headers.get_list("set-cookie")
    assert "content-security-policy" not in answer.headers


def test_the_program_inside_learns_no_token(serving: Box) -> None:
    headers = {"E2b-Sandbox-Port": "3000", "E2B-Traffic-Access-Token": "x", "Authorization": "a b"}
    seen = {key.lower() for key in serving.call("GET", "/", headers=headers).json()}

    assert not {"x-access-token", "e2b-traffic-access-token", "e2b-sandbox-id"} & seen
    assert "authorization" in seen, "the client's own, for the program inside"


def test_a_port_on_which_nothing_listens_says_so(client: Client, serving: Box) -> None:
    answer = client.http.get("/", headers={"Host": f"3001-{serving.id}.sbx.test"})

    assert 502 == answer.status_code
    assert "port is not open" in answer.json()["message"]
    gone = client.http.get("/", headers={"Host": "3000-sbx-0.sbx.test"})
    assert (502, "The sandbox was not found") == (gone.status_code, gone.json()["message"])


def test_ports_that_are_not_public_need_a_token(client: Client) -> None:
    box = client.create(network={"allowPublicTraffic": False})
    _serve(box)
    host = {"Host": f"3000-{box.id}.sbx.test"}
    token = {"E2B-Traffic-Access-Token": box.made["trafficAccessToken"]}

    assert 403 == client.http.get("/", headers=host).status_code
    wrong = {"E2B-Traffic-Access-Token": "0" * 64}
    assert 403 == client.http.get("/", headers={**host, **wrong}).status_code
    assert 200 == client.http.get("/", headers={**host, **token}).status_code
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_a_host_can_be_masked(client: Client) -> None:
    box = client.create(network={"maskRequestHost": "${PORT}.example.com:${PORT}"})
    _serve(box)
    seen = client.http.get("/", headers={"Host": f"3000-{box.id}.sbx.test"}).json()
    shown = client.api("GET", f"/sandboxes/{box.id}").json()["network"]

    hosts = {name: value for name, value in seen.items() if name.lower() == "host"}
    assert {"Host": "3000.example.com:3000"} == hosts
    assert "${PORT}.example.com:${PORT}" == shown["maskRequestHost"]
    client.api("DELETE", f"/sandboxes/{box.id}")
    for wrong in ("a b", "a@b", "a\r\nX: y", "a/b", 5):
        asked = {"network": {"maskRequestHost": wrong}}
        assert 400 == client.api("POST", "/v2/sandboxes", json=asked).status_code


def test_a_server_inside_may_speak_https(client: Client) -> None:
    box = client.create(network={"httpsPorts": [3000, 3001]})
    subject = "openssl req -x509 -newkey rsa:2048 -days 1 -nodes -subj /CN=localhost"
    box.run(f"{subject} -keyout key -out certificate; cat key certificate > both")
    _serve(box, "both")
    host = {"Host": f"3000-{box.id}.sbx.test"}

    assert "/a" == client.http.get("/a", headers=host).json()["path"]
    shown = client.api("GET", f"/sandboxes/{box.id}").json()["network"]
    assert [3000, 3001] == shown["httpsPorts"]
    # The control: one that does not speak it.
    box.run("setsid -f python3 -m http.server 3001 >/dev/null 2>&1")
    assert 502 == client.http.get("/", headers={"Host": f"3001-{box.id}.sbx.test"}).status_code
    client.api("DELETE", f"/sandboxes/{box.id}")
    for wrong in ([0], [65536], ["3000"], [True], 3000, [1] * 101):
        asked = {"network": {"httpsPorts": wrong}}
        assert 400 == client.api("POST", "/v2/sandboxes", json=asked).status_code


def test_an_answer_on_its_way_is_use_of_its_sandbox() -> None:
    """Else its idle time would end a sandbox in the middle of a long download."""
    streams: list[Any] = []
    live: Any = SimpleNamespace(
        sandbox_id="sbx-1", use=SimpleNamespace(opened=streams.append), touch=lambda: None
    )
    manager = SimpleNamespace(index=SimpleNamespace(find=lambda _id: live))
    service: Any = SimpleNamespace(manager=manager)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    async def follow() -> list[list[bool]]:
        answer = Answer(200, [], pieces())
        return [
            [each.closed for each in streams] async for _ in ports._watched(service, live, answer)
        ]

    assert [[False], [False]] == asyncio.run(follow())
    assert [True] == [each.closed for each in streams]


@pytest.mark.parametrize("fails", ["", "accept", "carry", "bug"])
def test_a_websocket_is_use_of_its_sandbox_and_is_closed_on_every_way_out(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    told: list[Any] = []
    use = SimpleNamespace(opened=told.append)
    metadata = Notes(https_ports=(3000,)).written({})
    live: Any = SimpleNamespace(
        sandbox_id="sbx-1",
        use=use,
        touch=lambda: None,
        metadata=metadata,
        sandbox=SimpleNamespace(connect=None),
    )

    async def given(*_args: Any, **more: Any) -> Any:
        assert more.get("tls") or "key" in more, "as its notes say"
        return SimpleNamespace(subprotocol="p", close=close)

    async def close() -> None:
        told.append("closed")

    async def carry(*_args: Any) -> None:
        told.append([each.closed for each in told])
        if fails:
            raise WebSocketDisconnect(1006) if fails == "carry" else RuntimeError(fails)

    async def send(message: Any) -> None:
        assert "p" == message["subprotocol"]
        if fails == "accept":
            raise OSError("the client is gone")

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    service: Any = SimpleNamespace(
        manager=SimpleNamespace(index=SimpleNamespace(find=lambda _id: live)),
        thread_pools=SimpleNamespace(call=given),
        share=None,
    )
    monkeypatch.setattr(ports, "open_websocket", given)
    monkeypatch.setattr(ports, "carry_messages", carry)
    scope = {"type": "websocket", "raw_path": b"/", "headers": [], "subprotocols": ["p"]}
    try:
        asyncio.run(ports.carry(service, live, 3000, scope, receive, send))
    except (RuntimeError, WebSocketDisconnect, OSError):
        assert fails in ("accept", "bug"), "of a client that leaves nothing is told"
    stream, *seen, end = told if fails != "accept" else [None, *told]
    assert ("closed", [] if fails == "accept" else [[False]]) == (end, seen)
    assert stream is None or stream.closed


def test_the_api_has_a_host_name_and_others_are_refused(client: Client) -> None:
    assert 200 == client.api("GET", "/v2/sandboxes", headers={"Host": "api.sbx.test"}).status_code
    other = client.api("GET", "/v2/sandboxes", headers={"Host": "api.other.test"})
    assert 403 == other.status_code


def test_the_domain_is_told_with_the_port_of_the_api(client: Client, serving: Box) -> None:
    path = f"/sandboxes/{serving.id}"

    def told(host: str) -> str:
        found: str = client.api("GET", path, headers={"Host": host}).json()["domain"]
        return found

    assert ["sbx.test", "sbx.test:8443"] == [told("api.sbx.test"), told("api.sbx.test:8443")]
    assert "sbx.test" == told(client.http.base_url.netloc.decode()), "by URL variables"
    form = {"timeout": 60}
    opened = client.api("POST", f"{path}/connect", json=form, headers={"Host": "api.sbx.test:8443"})
    assert "sbx.test:8443" == opened.json()["domain"]
    host = {"Host": f"3000-{serving.id}.sbx.test:8443"}
    assert 200 == client.http.get("/", headers=host).status_code


ECHO = """
import asyncio, base64, hashlib
async def main(reader, writer):
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
    key = [l.split(": ")[1] for l in head.split("\\r\\n") if l.lower().startswith("sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest())
    said = head.encode()
    writer.write(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                 b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n\\x81\\x7e" + len(said).to_bytes(2, "big"))
    writer.write(said)
    await writer.drain(); await reader.read(100)
async def serve():
    async with await asyncio.start_server(main, "127.0.0.1", 3002) as server:
        await server.serve_forever()
asyncio.run(serve())
"""


def test_a_websocket_is_carried_with_its_header_fields(serving: Box, daemon: Daemon) -> None:
    serving.call("POST", "/files?path=echo.py", content=ECHO.encode())
    serving.run("setsid -f python3 echo.py >/dev/null 2>&1")
    headers = {
        "E2b-Sandbox-Id": serving.id,
        "E2b-Sandbox-Port": "3002",
        "Cookie": "mine=2",
        "Origin": "https://a.test",
        "E2B-Traffic-Access-Token": "x",
    }
    address = daemon.tcp.replace("http:", "ws:")
    until = time.monotonic() + 20
    while True:
        try:
            with connect(address, additional_headers=headers) as socket:
                head = str(socket.recv(10)).lower().splitlines()
            break
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    host = daemon.tcp.removeprefix("http://")
    assert {f"host: {host}", "cookie: mine=2", "origin: https://a.test"} <= {*head}
    names = [each.partition(":")[0] for each in head]
    assert 1 == names.count("host") == names.count("sec-websocket-key")
    assert not {"e2b-traffic-access-token", "e2b-sandbox-id"} & {*names}
