"""Real programs, each as the command that fetches one thing from one host, run inside a sandbox."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence import Mount
from tests.egress.world import World, places, sites
from tests.features import has, program, require

JAVA_DIR, TRUST_STORE = "/srv/java", "/srv/java/trusted.p12"
PATIENCE_S = 15.0
"""How long a program may take when it is allowed; programs are slow to start on a busy machine."""

_FETCH_IN_PYTHON = {
    "urllib": "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read())",
    "requests": "import sys, requests; print(requests.get(sys.argv[1], timeout=10).text)",
    "httpx": "import sys, httpx; print(httpx.get(sys.argv[1], timeout=10).text)",
    "aiohttp": """
import asyncio, ssl, sys, aiohttp
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get(sys.argv[1]) as answer:
            print(await answer.text())
asyncio.run(main())
""",
}
_NODE = {
    "node-fetch": "fetch(process.argv[1]).then(r => r.text()).then(console.log)",
    "node-https": """
const url = process.argv[1];
require(url.split(':')[0]).get(url, answer => answer.pipe(process.stdout));
""",
}
_JAVA_FETCH = """
import java.io.*;
import java.net.*;
import java.net.http.*;
import java.time.Duration;

public class Fetch {
    public static void main(String[] words) throws Exception {
        if (words[0].equals("URLConnection")) {
            URLConnection connection = new URL(words[1]).openConnection();
            connection.setConnectTimeout(10000);
            try (InputStream in = connection.getInputStream()) { in.transferTo(System.out); }
        } else {
            HttpClient client = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(10)).build();
            HttpRequest request = HttpRequest.newBuilder(URI.create(words[1])).build();
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).body());
        }
        System.out.flush();
    }
}
"""
_NPM = """
rm -rf /tmp/npm && mkdir /tmp/npm && cd /tmp/npm &&
npm install --no-audit --no-fund --fetch-retries=0 --registry {url} {package} &&
node -p 'require("{package}")'
"""
_BANNER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as connection:
    stream = connection.makefile("rb")
    print(stream.readline())
    connection.sendall(b"hello\\n")
    print(stream.readline())
"""


@dataclass(frozen=True)
class Client:
    """One way to fetch.

    Attributes:
        command: From a scheme and a host to the command line.
        needs: Programs and features of `tests.features`.
        says: Part of what it prints when it got through.
        port: Where it goes.
        schemes: What its command can be asked for.
    """

    name: str
    command: Callable[[str, str], list[str]]
    needs: tuple[str, ...] = ()
    says: str = '"server": "internet"'
    port: int = 443
    schemes: tuple[str, ...] = ("https",)


def _url(*words: str) -> Callable[[str, str], list[str]]:
    return lambda scheme, host: [*words, f"{scheme}://{host}/fetched"]


def _python(code: str) -> tuple[str, ...]:
    return ("python3", "-W", "ignore", "-c", code)


_BOTH = ("http", "https")
_JAVA = (
    "java",
    "-Xshare:auto",
    "-XX:TieredStopAtLevel=1",
    f"-Djavax.net.ssl.trustStore={TRUST_STORE}",
)
WEB_CLIENTS = [
    Client("curl", _url("curl", "-sS", "-f"), ("curl",), schemes=_BOTH),
    Client("wget", _url("wget", "-q", "-O-", "-t", "1"), ("wget",), schemes=_BOTH),
    *(
        Client(name, _url(*_python(code)), (), schemes=_BOTH)
        for name, code in _FETCH_IN_PYTHON.items()
    ),
    *(
        Client(name, _url("node", "-e", code), ("node",), schemes=_BOTH)
        for name, code in _NODE.items()
    ),
    *(
        Client(
            f"java-{way}",
            _url(
                *_JAVA, "-Djavax.net.ssl.trustStorePassword=changeit", "-cp", JAVA_DIR, "Fetch", way
            ),
            ("javac", "keytool"),
            schemes=_BOTH,
        )
        for way in ("URLConnection", "HttpClient")
    ),
]
"""Programs that fetch any URL."""

OWN_CLIENTS = [
    Client(
        "pip",
        lambda _, host: [
            *("python3", "-m", "pip", "download", "-q", "--no-cache-dir", "--retries", "0"),
            *("--timeout", "5", "--no-deps", "--isolated", "--disable-pip-version-check"),
            *("--index-url", f"https://{host}/simple/", "-d", "/tmp/wheels", "lab-wheel", "-v"),
        ],
        ("pip",),
        sites.WHEEL,
    ),
    Client(
        "npm",
        lambda _, host: [
            *("sh", "-c"),
            _NPM.format(url=f"https://{host}/", package=sites.PACKAGE),
        ],
        ("npm", "node"),
        "from the registry",
    ),
    Client(
        "git",
        lambda _, host: _git(f"https://{host}/{sites.REPOSITORY}"),
        ("git",),
        "from the repository",
    ),
    Client(
        "git-push",
        lambda _, host: _git(
            f"https://{host}/{sites.REPOSITORY}",
            " && git -c user.name=x -c user.email=x@a.test commit -q --allow-empty -m two"
            " && git push -q origin HEAD:refs/heads/pushed-$$",
        ),
        ("git",),
        "from the repository",
    ),
    Client(
        "git-daemon",
        lambda _, host: _git(f"git://{host}/{sites.REPOSITORY}"),
        ("git",),
        "from the repository",
        9418,
    ),
    Client(
        "psql",
        lambda _, host: [
            *("psql", "-w", "-X", "-A", "-t", "-h", host, "-U", "world", "-d", "postgres"),
            *("-c", "select 'from the ' || 'database'"),
        ],
        ("psql", "initdb"),
        "from the database",
        5432,
    ),
    Client(
        "banner",
        lambda _, host: [*_python(_BANNER), host, "22"],
        (),
        "you said hello",
        22,
    ),
    Client(
        "smtp",
        lambda _, host: [*_python(_BANNER), host, "25"],
        (),
        "you said hello",
        25,
    ),
    Client(
        "ssh-keyscan",
        lambda _, host: ["ssh-keyscan", "-T", "5", "-p", "2222", host],
        ("sshd",),
        "ssh-ed25519",
        2222,
    ),
]
"""Programs with a protocol or a kind of server of their own, and the host in the world that has it."""

HOME_OF = {
    **dict.fromkeys(("git", "git-push", "git-daemon"), "git.test"),
    **dict.fromkeys(("banner", "smtp", "ssh-keyscan"), "ssh.test"),
    "pip": "pypi.test",
    "npm": "npm.test",
    "psql": "db.test",
}


def _git(url: str, more: str = "") -> list[str]:
    where = "/tmp/cloned"
    return [
        "sh",
        "-c",
        f"rm -rf {where}; git clone -q {url} {where} && cd {where} && cat README{more}",
    ]


def ids(clients: Iterable[Client]) -> list[str]:
    return [client.name for client in clients]


def without_proxy(argv: list[str]) -> list[str]:
    """The same command, with no idea of a proxy."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    return ["env", *(word for name in names for word in ("-u", name)), *argv]


def require_all(client: Client) -> None:
    for need in client.needs:
        if need == "pip":
            if importlib.util.find_spec("pip") is None:
                require("pip")
        else:
            require(need)


# -- what sandboxes must show for these programs to run -------------------------------------------


def sandbox_options(world: World, java: Path | None = None) -> dict[str, Any]:
    """Options of `Sandbox.create`: Python with the locked packages, Java's classes, certificates."""
    mounts = []
    site = _site_packages()
    environment = {
        **world.program_environment(),
        "PGCONNECT_TIMEOUT": "10",
        "npm_config_update_notifier": "false",
        "GIT_TERMINAL_PROMPT": "0",
    }
    if not site.is_relative_to(sys.prefix):
        mounts.append(Mount("/srv/site", str(site), "read_only"))
        environment["PYTHONPATH"] = "/srv/site"
    if java is not None:
        mounts.append(Mount(JAVA_DIR, str(java), "read_only"))
    return {"python_env": True, "mounts": mounts, "env": environment}


@functools.cache
def _site_packages() -> Path:
    found = importlib.util.find_spec("requests")
    assert found is not None, "requests is not installed: see requirements-dev.lock"
    assert found.origin is not None
    return Path(found.origin).parents[1]


def compile_java(where: Path, world: World) -> Path | None:
    """`Fetch.class` and a trust store; None where there is no Java."""
    if not (has("javac") and has("keytool")):
        return None
    (where / "Fetch.java").write_text(_JAVA_FETCH)
    subprocess.run(["javac", "-nowarn", "-d", str(where), str(where / "Fetch.java")], check=True)
    store = ["-keystore", str(where / Path(TRUST_STORE).name), "-storetype", "PKCS12"]
    subprocess.run(
        [
            *("keytool", "-importcert", "-noprompt", "-alias", "world", "-file", str(world.ca)),
            *(*store, "-storepass", "changeit"),
        ],
        check=True,
        capture_output=True,
    )
    where.chmod(0o755)
    return where


# -- servers that are programs themselves ---------------------------------------------------------


def git_daemon(world: World) -> list[str]:
    root = str(world.directory / "repositories")
    options = ["--reuseaddr", "--export-all", f"--base-path={root}", "--port=9418"]
    safe = ["-c", "safe.directory=*"]
    return ["git", *safe, "daemon", *options, root]


def postgres(where: Path, world: World) -> list[str]:
    """A fresh cluster with TLS on; who may not be root here is somebody else."""
    data = where / "data"
    become = _become_somebody(where)
    initdb = program("initdb") or "initdb"
    bare = [initdb, "-D", str(data), "-U", "world", "-A", "trust", "-E", "UTF8", "--no-sync"]
    done = subprocess.run([*become, *bare], capture_output=True, text=True, check=False, cwd=where)
    assert 0 == done.returncode, done.stderr
    key = data / "server.pem"
    shutil.copyfile(world.directory / "server.pem", key)
    os.chown(key, data.stat().st_uid, data.stat().st_gid)
    key.chmod(0o600)
    for family in ("0.0.0.0/0", "::/0"):
        with (data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {family} trust\n")
    settings = {
        "listen_addresses": "*",
        "unix_socket_directories": str(where),
        "fsync": "off",
        "ssl": "on",
        "ssl_cert_file": str(key),
        "ssl_key_file": str(key),
    }
    binary = Path(os.path.realpath(initdb)).with_name("postgres")
    chosen = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return [*become, str(binary), "-D", str(data), *chosen]


def _become_somebody(where: Path) -> list[str]:
    """PostgreSQL refuses to be root; nobody of this number owns anything else."""
    if os.geteuid():
        return []
    os.chown(where, places.SERVER_UID, places.SERVER_UID)
    return [
        "setpriv",
        f"--reuid={places.SERVER_UID}",
        f"--regid={places.SERVER_UID}",
        "--clear-groups",
    ]


def sshd(where: Path) -> list[str]:
    become, key = _become_somebody(where), where / "key"
    generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run([*become, *generate], check=True)
    options = ("Port=2222", f"HostKey={key}", f"PidFile={where}/pid", "UsePAM=no")
    chosen = [word for option in options for word in ("-o", option)]
    return [*become, program("sshd") or "sshd", "-D", "-e", "-f", "/dev/null", *chosen]
