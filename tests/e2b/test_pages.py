"""Web pages: E2B's SDK in a browser, signed URLs for everybody, and what people see of ports."""

from __future__ import annotations

from urllib.parse import urlencode

import httpx
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Box, Client

pytestmark = pytest.mark.anyone

OURS, OTHER = "https://app.example", "https://elsewhere.example"
ALLOWS = "access-control-allow-origin"


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon) -> Daemon:
    """A daemon that accepts the pages of one origin."""
    options = ("--domain", "sbx.test", "--listen", "127.0.0.1:0", "--allow-origin", OURS)
    return start_daemon("--e2b", *options)


def _preflight(client: Client, path: str, origin: str, host: str = "") -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,x-api-key",
        **({"Host": host} if host else {}),
    }
    return client.http.request("OPTIONS", path, headers=headers)


@pytest.mark.parametrize(
    ("path", "of_port"),
    [
        ("/v2/sandboxes", 0),
        ("/process.Process/Start", 49983),
        ("/files?path=a", 49983),
        ("/execute", 49999),
    ],
)
def test_an_accepted_page_may_send_what_the_sdk_sends(
    client: Client, box: Box, path: str, of_port: int
) -> None:
    host = f"{of_port}-{box.id}.sbx.test" if of_port else "api.sbx.test"
    ours, other = (_preflight(client, path, each, host) for each in (OURS, OTHER))

    assert (204, OURS) == (ours.status_code, ours.headers[ALLOWS])
    assert "POST" in ours.headers["access-control-allow-methods"]
    assert "content-type,x-api-key" == ours.headers["access-control-allow-headers"]
    assert 403 == other.status_code
    assert ALLOWS not in other.headers


def test_an_accepted_page_reads_the_answers(client: Client, box: Box) -> None:
    page = {"Origin": OURS}
    listed = client.api("GET", "/v2/sandboxes", headers=page)
    wrong = client.http.get("/v2/sandboxes", headers={**page, "X-API-Key": "e2b_0"})
    stat = {"path": "/home/user"}
    inside = box.call("POST", "/filesystem.Filesystem/Stat", json=stat, headers=page)
    other = client.api("GET", "/v2/sandboxes", headers={"Origin": OTHER})

    assert [200, 401, 200] == [each.status_code for each in (listed, wrong, inside)]
    for each in (listed, wrong, inside):
        assert OURS == each.headers[ALLOWS]
        assert "origin" in each.headers["vary"]
    assert "x-next-token" in listed.headers["access-control-expose-headers"]
    assert 403 == other.status_code
    assert ALLOWS not in other.headers
    assert ALLOWS not in client.api("GET", "/v2/sandboxes").headers


def test_a_signed_url_is_for_every_page(client: Client, box: Box) -> None:
    """The SDK signs URLs so that pages which know nothing else can use them."""
    upload, download = (
        f"/files?{urlencode(box.signed('up.txt', operation))}" for operation in ("write", "read")
    )
    preflight = _preflight(client, upload, OTHER)
    file = {"file": ("name", b"from a page")}
    written = client.http.post(upload, files=file, headers={"Origin": OTHER})
    read = client.http.get(download, headers={"Origin": OTHER})
    followed = client.http.get(download, headers={"Sec-Fetch-Site": "cross-site"})
    forged = client.http.get(download + "x", headers={"Origin": OTHER})

    assert (204, OTHER) == (preflight.status_code, preflight.headers[ALLOWS])
    assert (200, OTHER) == (written.status_code, written.headers[ALLOWS])
    assert (200, "from a page", OTHER) == (read.status_code, read.text, read.headers[ALLOWS])
    assert (200, "from a page") == (followed.status_code, followed.text)
    assert 401 == forged.status_code
    # The control: without a signature, the page is refused before the token is looked at.
    query = {"path": "up.txt"}
    assert 200 == box.call("GET", "/files", params=query).status_code
    assert 403 == box.call("GET", "/files", params=query, headers={"Origin": OTHER}).status_code
    host = {"Host": "rebound.example", "Origin": OTHER}
    assert 403 == client.http.get(download, headers=host).status_code


def test_a_browser_gets_a_page_for_a_port_that_is_closed(client: Client, box: Box) -> None:
    browser = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0"}
    host = {"Host": f"3001-{box.id}.sbx.test"}
    closed = client.http.get("/", headers={**host, **browser})
    gone = client.http.get("/", headers={"Host": "3000-gone.sbx.test", **browser})
    odd = {"E2b-Sandbox-Id": "<b>gone</b>", "E2b-Sandbox-Port": "3000", **browser}

    assert 502 == closed.status_code
    assert closed.headers["content-type"].startswith("text/html")
    assert "<title>Closed Port Error</title>" in closed.text
    assert "refused on port 3001" in closed.text
    assert 502 == gone.status_code
    assert "The sandbox was not found: gone" in gone.text
    assert "&lt;b&gt;gone" in client.http.get("/", headers=odd).text
    assert 3001 == client.http.get("/", headers=host).json()["port"], "for programs, JSON"
    envd = {"Host": "49983-gone.sbx.test", **browser}
    assert 502 == client.http.get("/health", headers=envd).json()["code"], "the SDK in a browser"
