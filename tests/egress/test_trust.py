"""Which programs come to trust an authority by which variable: tried with those that are here."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.egress.tls.ca import Authority
from ringfence.model import NetworkPolicy
from ringfence.model.net.rules import NetworkRule
from ringfence.policy import trust
from ringfence.policy.trust import (
    Trust,
    certificates,
    ended_hosts,
    java_store,
    not_covered,
    plan_trust,
)
from tests.egress.test_roots import THIS_HOSTS
from tests.features import require

pytestmark = pytest.mark.anyone

AUTHORITY = Authority.create(["localhost"])
OTHER = Authority.create(["localhost"])
JAVA = """
public class Get {
  public static void main(String[] url) throws Exception {
    new java.net.URL(url[0]).openConnection().getInputStream().readAllBytes();
  }
}
"""
NOT_FOUND = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_PYTHON = [sys.executable, "-W", "ignore", "-c"]
S_CLIENT = (
    "printf 'GET / HTTP/1.0\\r\\n\\r\\n' |"
    " openssl s_client -quiet -verify_return_error -connect localhost:{port}"
)
_AIOHTTP = """
import aiohttp, asyncio
async def get():
    async with aiohttp.ClientSession() as session:
        await session.get("{url}")
asyncio.run(get())
"""

# What it is, what must be there, its command, and the variable that is enough for it.
PROGRAMS: dict[str, tuple[str, list[str], str]] = {
    "curl": ("curl", ["curl", "{url}"], "CURL_CA_BUNDLE"),
    "curl of OpenSSL": ("curl", ["curl", "{url}"], "SSL_CERT_FILE"),
    "git": ("git", ["git", "ls-remote", "{url}"], "GIT_SSL_CAINFO"),
    "openssl": ("openssl", ["sh", "-c", S_CLIENT], "SSL_CERT_FILE"),
    "python": ("linux", [*_PYTHON, "import urllib.request as r; r.urlopen('{url}')"], "SSL_CERT_FILE"),
    "requests": ("linux", [*_PYTHON, "import requests; requests.get('{url}')"], "REQUESTS_CA_BUNDLE"),
    "requests as curl": ("linux", [*_PYTHON, "import requests; requests.get('{url}')"], "CURL_CA_BUNDLE"),
    "httpx": ("linux", [*_PYTHON, "import httpx; httpx.get('{url}')"], "SSL_CERT_FILE"),
    "aiohttp": ("linux", [*_PYTHON, _AIOHTTP], "SSL_CERT_FILE"),
    "pip": ("pip3", ["pip3", "download", "--retries=0", "--index-url={url}", "x"], "PIP_CERT"),
    "node": ("node", ["node", "-e", "fetch('{url}')"], "NODE_EXTRA_CA_CERTS"),
    "node's https": ("node", ["node", "-e", "require('https').get('{url}')"], "NODE_EXTRA_CA_CERTS"),
    "npm": ("npm", ["npm", "--fetch-retries=0", "--registry={url}", "view", "x"], "NPM_CONFIG_CAFILE"),
}  # fmt: skip


class Server:
    """HTTPS on localhost; `requests` counts what came through TLS."""

    def __init__(self, authority: Authority) -> None:
        self._context = authority.context("localhost")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._stopped:
                connection.close()
                return
            with connection:
                connection.settimeout(20)
                try:
                    self._answer(connection)
                except OSError:
                    pass  # it does not trust us, or went away

    def _answer(self, connection: socket.socket) -> None:
        with self._context.wrap_socket(connection, server_side=True) as secured:
            if secured.recv(65536):
                self.requests += 1
                secured.sendall(NOT_FOUND)

    def close(self) -> None:
        self._stopped = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join()
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(AUTHORITY)
    yield made
    made.close()


def placed(planned: Trust, directory: Path) -> dict[str, str]:
    """Write its files below `directory`; its variables, pointing there."""
    for path, content in planned.files.items():
        file = directory / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return {name: str(directory / path.lstrip("/")) for name, path in planned.env.items()}


def run(command: list[str], server: Server, home: Path, env: dict[str, str]) -> str:
    """Run to its end; what it said. Nothing of our own environment reaches it."""
    url = f"https://localhost:{server.port}/"
    argv = [part.replace("{url}", url).replace("{port}", str(server.port)) for part in command]
    plain = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PIP_CONFIG_FILE": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "LANG": "C.UTF-8",
    }
    done = subprocess.run(
        argv,
        env={**plain, **env},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_program_and_its_variable(
    program: tuple[str, list[str], str], server: Server, tmp_path: Path
) -> None:
    needed, command, variable = program
    require(needed)
    env = placed(plan_trust(AUTHORITY.certificate, THIS_HOSTS), tmp_path)

    without = run(command, server, tmp_path, {})
    assert 0 == server.requests, "it verified nothing, or the variable is not what it takes"

    with_it = run(command, server, tmp_path, {variable: env[variable]})
    assert server.requests, (without, with_it)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["curl", "git", "python", "requests", "httpx", "pip", "node", "npm"]
)
def test_all_variables_together(name: str, server: Server, tmp_path: Path) -> None:
    """None is in another's way; and another sandbox's do not do."""
    needed, command, _ = PROGRAMS[name]
    require(needed)

    other = placed(plan_trust(OTHER.certificate, THIS_HOSTS), tmp_path / "other")
    run(command, server, tmp_path, other)
    assert 0 == server.requests

    mine = placed(plan_trust(AUTHORITY.certificate, THIS_HOSTS), tmp_path / "mine")
    said = run(command, server, tmp_path, mine)
    assert server.requests, said


@pytest.mark.full
def test_java(server: Server, tmp_path: Path) -> None:
    require("java")
    planned = plan_trust(AUTHORITY.certificate, THIS_HOSTS, trust.JAVA_STORES[:1])
    placed(planned, tmp_path)
    (tmp_path / "Get.java").write_text(JAVA)
    store = tmp_path / trust.JAVA_STORE.lstrip("/")
    command = ["java", f"-Djavax.net.ssl.trustStore={store}", str(tmp_path / "Get.java"), "{url}"]

    run([part for part in command if "trustStore" not in part], server, tmp_path, {})
    assert 0 == server.requests
    said = run(command, server, tmp_path, {})
    assert server.requests, said


def test_a_java_store_is_one(tmp_path: Path) -> None:
    """Read with the usual password, too: then its checksum is checked."""
    keytool = shutil.which("keytool")
    require("keytool")
    assert keytool
    roots = [AUTHORITY.certificate, OTHER.certificate]
    (tmp_path / "store").write_bytes(java_store(roots))

    said = subprocess.run(
        [keytool, "-list", "-keystore", str(tmp_path / "store"), "-storepass", "changeit"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert 0 == said.returncode, said.stdout
    assert 2 == said.stdout.count("trustedCertEntry")


class TestThePlan:
    def test_the_host_s_roots_stay(self) -> None:
        planned = plan_trust(AUTHORITY.certificate, f"# old roots\n{OTHER.certificate}# end\n")

        assert (OTHER.certificate + AUTHORITY.certificate).encode() == planned.files[trust.BUNDLE]
        assert AUTHORITY.certificate.encode() == planned.files[trust.AUTHORITY]
        assert trust.JAVA_STORE not in planned.files
        assert {} == planned.over

    def test_every_variable_names_a_file_that_is_there(self) -> None:
        planned = plan_trust(AUTHORITY.certificate, "", (*trust.SYSTEM_BUNDLES, *trust.JAVA_STORES))

        assert set(planned.env.values()) | set(planned.over.values()) == set(planned.files)

    def test_every_program_has_its_variable(self) -> None:
        """Those that add to roots of their own get the authority alone, the others all roots."""
        planned = plan_trust(AUTHORITY.certificate, "")
        whole = {
            *(
                "SSL_CERT_FILE",
                "CURL_CA_BUNDLE",
                "REQUESTS_CA_BUNDLE",
                "PIP_CERT",
                "GIT_SSL_CAINFO",
            ),
            *("NPM_CONFIG_CAFILE", "CARGO_HTTP_CAINFO", "YARN_HTTPS_CA_FILE_PATH", "AWS_CA_BUNDLE"),
            *("CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE", "HEX_CACERTS_PATH", "JULIA_SSL_CA_ROOTS_PATH"),
            *("NIX_SSL_CERT_FILE", "PERL_LWP_SSL_CA_FILE"),
        }
        added = {"NODE_EXTRA_CA_CERTS", "DENO_CERT"}

        assert {
            **dict.fromkeys(whole, trust.BUNDLE),
            **dict.fromkeys(added, trust.AUTHORITY),
        } == planned.env

    def test_every_place_of_a_bundle_is_covered(self) -> None:
        bundles = {
            "/etc/ssl/certs/ca-certificates.crt",
            "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
            "/etc/pki/tls/certs/ca-bundle.crt",
            "/etc/ssl/ca-bundle.pem",
            "/etc/ssl/cert.pem",
        }
        stores = {"/etc/ssl/certs/java/cacerts", "/etc/pki/ca-trust/extracted/java/cacerts"}
        planned = plan_trust(AUTHORITY.certificate, OTHER.certificate, (*bundles, *stores))

        assert {
            **dict.fromkeys(bundles, trust.BUNDLE),
            **dict.fromkeys(stores, trust.JAVA_STORE),
        } == planned.over
        both = [OTHER.certificate, AUTHORITY.certificate]
        assert java_store(both) == planned.files[trust.JAVA_STORE], "the host's roots are in it too"

    def test_a_certificate_without_an_end_is_none(self) -> None:
        cut = OTHER.certificate.partition("-----END")[0]

        assert [] == certificates(cut)
        assert [AUTHORITY.certificate] == certificates(AUTHORITY.certificate + cut)

    def test_only_what_is_there_is_covered(self) -> None:
        planned = plan_trust(AUTHORITY.certificate, "", [trust.SYSTEM_BUNDLES[0], "/etc/passwd"])

        assert {trust.SYSTEM_BUNDLES[0]: trust.BUNDLE} == planned.over

    def test_a_bundle_with_anything_in_it(self) -> None:
        text = f"ä\n-----BEGIN CERTIFICATE-----\nhalf\n{OTHER.certificate}\n-----BEGIN CERTIFICATE-----"

        assert OTHER.certificate in certificates(text)[-1]

    def test_the_same_again_is_the_same(self) -> None:
        stores = [java_store([AUTHORITY.certificate]) for _ in range(2)]

        assert stores[0] == stores[1]


class TestWhomItSpeaksFor:
    def test_hosts_whose_requests_are_judged(self) -> None:
        policy = NetworkPolicy(
            allowed_hosts=("plain.test", "10.0.0.0/8"),
            rules=(
                NetworkRule("a.test", methods=("GET",)),
                NetworkRule("*.b.test", inspect=True),
                NetworkRule("c.test", ports="443"),
                NetworkRule("plain.test", action="deny", paths=("/no",)),
            ),
        )

        assert ("*.b.test", "a.test", "plain.test") == ended_hosts(policy)
        assert () == ended_hosts(NetworkPolicy.none())

    @pytest.mark.parametrize("host", ["a.test", "x.a.test", "*.a.test", "b.test", "x.b.test"])
    def test_it_is_as_the_authority_has_it(self, host: str) -> None:
        made_for = ("a.test", "*.b.test")

        assert () == not_covered([host], made_for)
        assert Authority.create(made_for).leaf(host.removeprefix("*."))

    @pytest.mark.parametrize("host", ["c.test", "nota.test", "test", "*.test"])
    def test_nor_for_others(self, host: str) -> None:
        assert (host,) == not_covered([host], ("a.test", "*.b.test"))
        assert (host,) == not_covered([host], ())
