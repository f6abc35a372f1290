"""Who may come in: keys, tokens, hosts, origins. Every refusal has a control."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.native.outside import until


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is users' to mount from, with a way out of it."""
    found = tmp_path_factory.mktemp("roots")
    (found / "shared").mkdir()
    (found / "out").symlink_to("/etc")
    return found


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, roots: Path) -> Daemon:
    """Also on TCP."""
    config = roots / "config.json"
    config.write_text(json.dumps({"host_roots": [str(roots)]}))
    return start_daemon(
        "--listen", "127.0.0.1:0", "--allow-origin", "https://app.example", "--config", str(config)
    )


def _key(client: httpx.Client, owner: str, scope: str = "user") -> str:
    text: str = _made(client, "/v1/keys", {"owner": owner, "scope": scope})["key"]
    return text


def _made(client: httpx.Client, path: str, body: dict[str, str]) -> dict[str, Any]:
    """What is made there; on a busy machine we may be those who are cut for sending slowly."""
    for _ in range(50):
        made = client.post(path, json=body)
        if made.status_code != 408:
            break
    assert 201 == made.status_code, made.text
    found: dict[str, Any] = made.json()
    return found


@pytest.fixture
def alice(daemon: Daemon, client: httpx.Client) -> Iterator[httpx.Client]:
    """A user with a key, on TCP."""
    headers = {"authorization": f"Bearer {_key(client, 'alice')}"}
    with httpx.Client(base_url=daemon.tcp, headers=headers, timeout=60) as found:
        yield found


@pytest.fixture
def bob(daemon: Daemon, client: httpx.Client) -> Iterator[httpx.Client]:
    headers = {"x-api-key": _key(client, "bob")}
    with httpx.Client(base_url=daemon.tcp, headers=headers, timeout=60) as found:
        yield found


@pytest.mark.full
def test_tcp_needs_a_key_that_the_server_has(daemon: Daemon, alice: httpx.Client) -> None:
    key = alice.headers["authorization"].removeprefix("Bearer ")
    head, _, secret = key.partition(".")
    wrong = [None, "nonsense", "rf_", f"{head}.", f"{head}.{secret[:-1]}", f"{head}x.{secret}"]
    for text in wrong:
        headers = {} if text is None else {"authorization": f"Bearer {text}"}
        refused = httpx.get(f"{daemon.tcp}/v1/info", headers=headers)
        assert (401, "unauthenticated") == (refused.status_code, refused.json()["code"]), text
        assert "application/problem+json" == refused.headers["content-type"]

    assert "alice" == alice.get("/v1/info").json()["client"]


def test_a_removed_key_opens_nothing(client: httpx.Client, daemon: Daemon) -> None:
    made = client.post("/v1/keys", json={"owner": "carol"}).json()
    headers = {"authorization": f"Bearer {made['key']}"}
    before = httpx.get(f"{daemon.tcp}/v1/info", headers=headers).status_code
    removed = client.delete(f"/v1/keys/{made['id']}").status_code
    after = httpx.get(f"{daemon.tcp}/v1/info", headers=headers).status_code

    assert (200, 204, 401) == (before, removed, after)
    assert made["key"] not in client.get("/v1/keys").text
    assert 404 == client.delete(f"/v1/keys/{made['id']}").status_code


def test_keys_are_kept_as_digests(client: httpx.Client, daemon: Daemon) -> None:
    key = _key(client, "dora")

    kept = b"".join(path.read_bytes() for path in daemon.state_dir.glob("state.sqlite3*"))
    assert b"dora" in kept
    assert key.rpartition(".")[2].encode() not in kept


def test_another_clients_sandbox_is_not_there(alice: httpx.Client, bob: httpx.Client) -> None:
    sandbox_id = alice.post("/v1/sandboxes", json={"name": "mine"}).json()["id"]
    base = f"/v1/sandboxes/{sandbox_id}"
    exec_body = {"argv": ["true"], "wait": True}
    run = alice.post(f"{base}/execs", json=exec_body).json()["id"]
    body = {"command": "true"}
    execution = alice.post("/api/v1/sandbox/execute", json=body).json()["id"]
    snapshot = alice.post(f"{base}/snapshots").json()["id"]
    reads = ["execs", f"execs/{run}", f"execs/{run}/output", f"execs/{run}/wait"]
    reads += [f"files/{what}?path=." for what in ("content", "tree", "list", "stat", "watch")]
    reads += ["files/search?pattern=a", "files/glob?pattern=a", "ports/80/http/"]
    reads += ["network/log", "network/learned", "capabilities", "protections"]
    asked: list[tuple[str, str, Any]] = [("GET", f"{base}/{rest}", None) for rest in reads]
    asked += [
        ("PUT", f"{base}/files/content?path=a", None),
        ("PUT", f"{base}/files/tree?path=a", None),
        ("DELETE", f"{base}/files?path=a", None),
        ("POST", f"{base}/files/dirs", {"path": "a"}),
        ("POST", f"{base}/files/move", {"source": "a", "target": "b"}),
        ("POST", f"{base}/files/replace", {"paths": [], "pattern": "a", "replacement": "b"}),
        ("POST", f"{base}/execs/{run}/kill", None),
        ("POST", f"{base}/execs/{run}/signal", {"signal": 9}),
        ("POST", f"{base}/execs/{run}/stdin", None),
        ("POST", f"{base}/ports/80", None),
        ("POST", f"{base}/mounts", {"target": "/a"}),
        ("POST", f"{base}/extend", {"ttl_s": 1}),
        ("POST", f"{base}/resume", None),
        ("GET", base, None),
        ("DELETE", base, None),
        ("POST", f"{base}/execs", exec_body),
        ("POST", f"{base}/suspend", None),
        ("GET", f"{base}/stats", None),
        ("GET", f"{base}/network", None),
        ("PUT", f"{base}/network", {"mode": "limited", "allowed_hosts": ["a.com"]}),
        ("POST", f"{base}/snapshots", None),
        ("POST", f"{base}/tokens", None),
        ("GET", f"{base}/mounts", None),
        ("GET", f"/v1/sessions/{sandbox_id}", None),
        ("POST", f"/v1/sessions/{sandbox_id}/terminate", None),
    ]
    for method, path, body in asked:
        answer = bob.request(method, path, json=body)
        assert (404, "sandbox_not_found") == (answer.status_code, answer.json()["code"]), path

    for path in (f"/v1/snapshots/{snapshot}", f"/api/v1/sandbox/status/{execution}"):
        assert (404, 200) == (bob.get(path).status_code, alice.get(path).status_code)
    assert 404 == bob.post(f"/api/v1/sandbox/kill/{execution}").status_code
    assert 404 == bob.post("/v1/sandboxes", json={"snapshot_id": snapshot}).status_code
    assert 204 == alice.delete(f"/v1/snapshots/{snapshot}").status_code
    assert [] == bob.get("/v1/snapshots").json()["items"]
    assert [] == [e for e in bob.get("/v1/events").json()["items"] if "alice" == e["client_id"]]
    assert [] == bob.get("/v1/sandboxes").json()["items"]
    assert [sandbox_id] == [each["id"] for each in alice.get("/v1/sandboxes").json()["items"]]
    assert 0 == alice.post(f"{base}/execs", json=exec_body).json()["result"]["exit_code"]
    assert 200 == alice.delete(base).status_code


def test_a_token_opens_one_sandbox(daemon: Daemon, alice: httpx.Client) -> None:
    mine, other = (alice.post("/v1/sandboxes", json={}).json()["id"] for _ in range(2))
    token = alice.post(f"/v1/sandboxes/{mine}/tokens").json()["key"]
    headers = {"authorization": f"Bearer {token}"}
    with httpx.Client(base_url=daemon.tcp, headers=headers, timeout=60) as inside:
        body = {"argv": ["true"], "wait": True}
        assert (
            0 == inside.post(f"/v1/sandboxes/{mine}/execs", json=body).json()["result"]["exit_code"]
        )
        refused = ["/v1/sandboxes", f"/v1/sandboxes/{other}", "/v1/info", "/v1/keys", "/v1/events"]
        for path in [*refused, "/v1/sessions", "/metrics", f"/v1/sandboxes/{mine}x"]:
            assert 403 == inside.get(path).status_code, path
        assert 403 == inside.post("/v1/sandboxes", json={}).status_code
    for each in (mine, other):
        alice.delete(f"/v1/sandboxes/{each}")


def test_users_may_not_do_what_admins_may(
    alice: httpx.Client, client: httpx.Client, roots: Path
) -> None:
    shared = {"target": "/work", "source": str(roots / "shared")}
    refused = [
        {"profile": "unrestricted"},
        {"python_env": True},
        {"allow_degraded": ["*"]},
        {"network": {"mode": "unrestricted"}},
        {"memory_dir": "/tmp"},
        {"mounts": [{"target": "/work", "source": "/etc"}]},
        {"mounts": [{"target": "/work", "source": str(roots / "out")}]},
        {"mounts": [{"target": "/work", "source": f"{roots}/shared/../../x"}]},
        {"mounts": [{"target": "/work", "source": f"{roots}x"}]},
    ]
    for body in refused:
        answer = alice.post("/v1/sandboxes", json=body)
        assert (403, "forbidden") == (answer.status_code, answer.json()["code"]), body
    for path in ("/v1/keys", "/metrics"):
        assert 403 == alice.get(path).status_code
        assert 200 == client.get(path).status_code
    assert 403 == alice.put("/v1/pools", json={"enabled": False}).status_code

    for who, body in ((alice, {"mounts": [shared]}), (client, {"profile": "unrestricted"})):
        made = who.post("/v1/sandboxes", json=body)
        assert 201 == made.status_code, made.text
        if who is alice:
            assert all("host_path" not in each for each in made.json()["mounts"])
        who.delete(f"/v1/sandboxes/{made.json()['id']}")


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": ""},
        {"host": "10.0.0.1"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "https://app.example.evil.example"},
        {"sec-fetch-site": "cross-site"},
    ],
    ids=lambda headers: "-".join(f"{key}={value}" for key, value in headers.items()),
)
def test_other_hosts_and_pages_are_refused(alice: httpx.Client, headers: dict[str, str]) -> None:
    refused = alice.get("/v1/info", headers=headers)

    assert (403, "forbidden") == (refused.status_code, refused.json()["code"])


def test_known_hosts_and_pages_are_not(alice: httpx.Client) -> None:
    for headers in ({"host": "localhost:1"}, {"host": "[::1]"}, {"origin": "https://app.example"}):
        answer = alice.get("/v1/info", headers=headers)
        assert 200 == answer.status_code, headers
    assert "https://app.example" == answer.headers["access-control-allow-origin"]


def test_a_page_that_is_ours_may_ask_first(daemon: Daemon) -> None:
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    url = f"{daemon.tcp}/v1/sandboxes"
    ours = httpx.options(url, headers={**ask, "origin": "https://app.example"})
    other = httpx.options(url, headers={**ask, "origin": "https://evil.example"})
    none = httpx.options(url, headers=ask)

    assert (204, "authorization") == (
        ours.status_code,
        ours.headers["access-control-allow-headers"],
    )
    assert "https://app.example" == ours.headers["access-control-allow-origin"]
    assert [403, 401] == [other.status_code, none.status_code]
    assert "access-control-allow-origin" not in other.headers


def test_a_page_is_refused_on_the_unix_socket_too(client: httpx.Client) -> None:
    assert 403 == client.get("/v1/info", headers={"origin": "http://evil"}).status_code
    assert 200 == client.get("/v1/info").status_code


def test_what_was_done_and_refused_is_written_down(daemon: Daemon, client: httpx.Client) -> None:
    sandbox_id = client.post("/v1/sandboxes", json={}).json()["id"]
    client.delete(f"/v1/sandboxes/{sandbox_id}")
    forged = 'x"\n{"status":200}'
    for path in (sandbox_id.replace("0", "1"), "%2e%2e", f"{sandbox_id}/files/stat?path=none"):
        client.get(f"/v1/sandboxes/{path}")
    httpx.get(f"{daemon.tcp}/v1/info", headers={"x-request-id": forged.replace("\n", " ")})

    def lines(name: str) -> list[Any]:
        return [json.loads(line) for line in (daemon.state_dir / name).read_text().splitlines()]

    done = lines("audit.log")
    assert sandbox_id in [each.get("made") for each in done]
    assert ("DELETE", f"/v1/sandboxes/{sandbox_id}") in [(e["method"], e["path"]) for e in done]
    refused = [
        each["status"] for each in lines("refused.log") if each.get("client") and "status" in each
    ]
    assert [404, 422] == refused[-2:]

    def is_escaped() -> bool:
        """Of an address without a key one line is written in a second; the others are counted."""
        httpx.get(f"{daemon.tcp}/v1/{'%0a%22'}", headers={"authorization": "Bearer no"})
        return '/v1/\n"' in [each.get("path") for each in lines("refused.log")]

    assert until(is_escaped, 30)
    assert 0o600 == (daemon.state_dir / "audit.log").stat().st_mode & 0o777


@pytest.mark.full
def test_what_happens_is_said_in_json_lines(
    start_daemon: StartDaemon, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the ids of what it is about; what a client chose is escaped."""
    daemon = start_daemon("--log-level", "debug")
    with daemon.client() as client:
        sandbox_id = client.post("/v1/sandboxes", json={"metadata": {"a": "b\nc"}}).json()["id"]
        client.get(f"/v1/sandboxes/{sandbox_id}/files/list")
        client.get("/v1/info", headers={"origin": 'http://e"vil'})
        client.delete(f"/v1/sandboxes/{sandbox_id}")
    daemon.stop()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]

    said = [(each["level"], each["message"], each.get("sandbox")) for each in lines]
    assert ("info", "sandbox created", sandbox_id) in said
    assert ("info", "sandbox ended", sandbox_id) in said
    listed = ("debug", "GET /v1/sandboxes/{sandbox_id}/files/list", sandbox_id)
    assert listed in said
    assert [403] == [each["status"] for each in lines if "warning" == each["level"]]


def test_the_unix_socket_is_this_users_alone(daemon: Daemon) -> None:
    assert 0o600 == Path(daemon.socket).stat().st_mode & 0o777


@pytest.mark.root
def test_another_user_is_refused_by_the_kernels_word(daemon: Daemon) -> None:
    """Even where the file's mode and directory would let them."""
    path = Path(daemon.socket)
    ask = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "print(s.sendall(b'GET /v1/info HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n'), s.recv(100))"
    )
    parents = [path.parent, *path.parent.parents]
    modes = {each: each.stat().st_mode & 0o7777 for each in parents if "pytest" in str(each)}
    try:
        for each, mode in modes.items():
            each.chmod(mode | 0o055)
        path.chmod(0o666)
        command = ["/usr/bin/python3", "-c", ask, str(path)]
        other = ["setpriv", "--reuid=23457", "--regid=23457", "--clear-groups", *command]
        refused = subprocess.run(other, capture_output=True, text=True, check=False)
        allowed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        path.chmod(0o600)
        for each, mode in modes.items():
            each.chmod(mode)

    # The answer may be lost: the server does not wait for the request.
    told = refused.stdout + refused.stderr
    assert any(each in told for each in ("HTTP/1.1 403", "ConnectionReset", "BrokenPipe")), told
    assert "HTTP/1.1 200" in allowed


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_a_public_address_needs_tls_or_leave(start_daemon: StartDaemon, address: str) -> None:
    with pytest.raises(AssertionError, match="ended with 125"):
        start_daemon("--listen", address)


@pytest.mark.full
def test_a_public_address_with_leave(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--listen", "0.0.0.0:0", "--allow-public")

    assert daemon.tcp.startswith("http://0.0.0.0:")
    daemon.stop()


def _raw(daemon: Daemon, *pieces: bytes) -> bytes:
    """What the server says to these pieces, until it closes or has answered."""
    port = int(daemon.tcp.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        for piece in pieces:
            sock.sendall(piece)
        return sock.recv(4096)


HEAD = b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(("lines", "status"), [(30, b"401"), (200, b"431")])
def test_a_head_that_is_too_large_is_cut(daemon: Daemon, lines: int, status: bytes) -> None:
    """The control is a large one that is not too large."""
    more = [b"x-pad: " + b"a" * 1000 + b"\r\n"] * lines
    try:
        said = _raw(daemon, HEAD, *more, b"\r\n")
    except OSError:  # the answer is lost where we were still writing
        said = b"HTTP/1.1 431" if status == b"431" else b""

    assert said.startswith(b"HTTP/1.1 " + status)


@pytest.mark.full
def test_tls(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A public address is served under TLS; who does not speak it learns nothing."""
    where = tmp_path_factory.mktemp("tls")
    key, certificate = str(where / "key.pem"), str(where / "cert.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    make += ["-pkeyopt", "ec_paramgen_curve:P-256"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [*make, *name, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    options = ("--tls-certificate", certificate, "--tls-key", key)
    daemon = start_daemon("--listen", "0.0.0.0:0", *options)
    with daemon.client() as admin:
        headers = {"x-api-key": _key(admin, "ann")}
    url = daemon.tcp.replace("0.0.0.0", "localhost")
    trusted = ssl.create_default_context(cafile=certificate)
    with httpx.Client(verify=trusted, headers=headers) as client:
        assert "ann" == client.get(f"{url}/v1/info").json()["client"]
        with pytest.raises(httpx.HTTPError):
            client.get(f"{url}/v1/info".replace("https", "http"))
    assert url.startswith("https://")
    daemon.stop()


@pytest.mark.full
def test_who_sends_slowly_is_cut(
    start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A head, a body and a streamed body that do not come; whoever is quicker is served meanwhile."""
    config = tmp_path_factory.mktemp("slow") / "config.json"
    # Patience enough for clients that send a head, and have to wait for a processor before the body.
    config.write_text(json.dumps({"bounds": {"head_s": 3.0, "body_s": 3.0, "chunk_s": 3.0}}))
    daemon = start_daemon("--listen", "127.0.0.1:0", "--config", str(config))
    with daemon.client() as client:
        key = _key(client, "ann").encode()
        mine = b"authorization: Bearer " + key + b"\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        sandbox_id = _made(client, "/v1/sandboxes", {})["id"].encode()
        admin = _key(client, "local", "admin").encode()
        upload = b"PUT /v1/sandboxes/" + sandbox_id + b"/files/content?path=x HTTP/1.1\r\n"

        slow = {
            "half a head": HEAD,
            "nothing": b"",
            "half a body": b"POST /v1/sandboxes HTTP/1.1\r\n" + mine + b"{",
            "half a stream": upload + mine.replace(key, admin) + b"half",
        }
        with ThreadPoolExecutor(len(slow)) as clients:
            said = list(clients.map(lambda text: _raw(daemon, text)[:12], slow.values()))
        assert dict.fromkeys(slow, b"HTTP/1.1 408") == dict(zip(slow, said, strict=True))
        whole = _raw(daemon, upload + mine.replace(key, admin) + b"it is all")
        assert whole.startswith(b"HTTP/1.1 200")
    daemon.stop()


@pytest.mark.full
def test_one_client_has_its_share(
    start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With all of its requests under way it gets 429, and another client is served."""
    config = tmp_path_factory.mktemp("share") / "config.json"
    config.write_text(json.dumps({"bounds": {"requests_of_client": 2, "requests": 3}}))
    daemon = start_daemon("--listen", "127.0.0.1:0", "--config", str(config))
    with daemon.client() as client:
        keys = [_key(client, owner) for owner in ("ann", "ben", "cy")]
    ann, ben, cy = (
        httpx.Client(base_url=daemon.tcp, headers={"x-api-key": key}, timeout=60) for key in keys
    )
    follow = {"follow": True}
    with (
        ann.stream("GET", "/v1/events", params=follow),
        ann.stream("GET", "/v1/events", params=follow),
    ):
        refused = ann.get("/v1/info")
        served = ben.get("/v1/info")
        with ben.stream("GET", "/v1/events", params=follow):
            full = cy.get("/v1/info")

    assert (429, "too_many_requests") == (refused.status_code, refused.json()["code"])
    assert (503, "resource_exhausted") == (full.status_code, full.json()["code"])
    assert {"1"} == {refused.headers["retry-after"], full.headers["retry-after"]}
    assert 200 == served.status_code
    for each in (ann, ben, cy):
        each.close()
    daemon.stop()
