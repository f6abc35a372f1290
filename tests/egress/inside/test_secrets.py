"""Secrets that never enter the sandbox: all of it, as a program inside and as the host sees it."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from ringfence import (
    Credential,
    ManagerConfig,
    NetworkPolicy,
    NetworkRule,
    PoolConfig,
    Sandbox,
    SandboxSpec,
    SessionManager,
)
from ringfence.egress.host import client
from ringfence.errors import RingfenceError
from tests.egress.inside.conftest import MakeSandbox
from tests.egress.world import World
from tests.features import require
from tests.native.outside import init_pid
from tests.posture.reading import processes_in

pytestmark = pytest.mark.in_world

SECRET = "sk-live-7f3a9c/b2+e1=d4"
NAME = "API_TOKEN"
RULE = NetworkRule("a.test", "443", credential=Credential(NAME))
CURL = ["curl", "-sS", "--max-time", "20"]


# Looks for two halves next to each other: each of them alone is on its own command line.
OWN_MEMORY = """
import sys, urllib.request
answer = urllib.request.urlopen("https://a.test/").read()
assert b"authorization" in answer.lower()
canary = b"".join([b"canary-", b"in-memory"])

def holds(first, second):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as mem:
        for line in maps.read().splitlines():
            span, modes = line.split()[:2]
            if modes[0] != "r" or "[v" in line:
                continue
            start, end = (int(word, 16) for word in span.split("-"))
            try:
                mem.seek(start)
                data = mem.read(end - start)
            except OSError:
                continue
            at = data.find(first)
            while at >= 0:
                if data[at + len(first) : at + len(first) + len(second)] == second:
                    return True
                at = data.find(first, at + 1)
    return False

assert holds(b"canary-", b"in-memory")
found = holds(sys.argv[1].encode(), sys.argv[2].encode())
print("canary found, secret", "too" if found else "not")
"""


@pytest.fixture
def make() -> Iterator[MakeSandbox]:
    """As the other one, but without the variables that make programs trust the world: ours do."""
    with ExitStack() as stack:

        def create(**options: object) -> Sandbox:
            return stack.enter_context(Sandbox.create(**options))  # type: ignore[arg-type]

        yield create


@pytest.fixture
def sandbox(make: MakeSandbox) -> Sandbox:
    return make(network=NetworkPolicy(rules=(RULE,)), secrets={NAME: SECRET})


def spellings() -> list[bytes]:
    raw = SECRET.encode()
    return [raw, base64.b64encode(raw), quote(SECRET, safe="").encode(), raw.hex().encode()]


def shows(data: bytes) -> bool:
    return any(form in data for form in spellings())


def requests(world: World, mark: int) -> list[dict[str, object]]:
    seen: list[dict[str, object]] = world.internet.seen(mark, kind="request")
    return seen


def headers(request: dict[str, object], name: str) -> list[str]:
    return [value for key, value in request["headers"] if key.lower() == name]  # type: ignore[attr-defined]


class TestTheServerGetsIt:
    def test_in_the_right_header(self, world: World, sandbox: Sandbox) -> None:
        mark = world.internet.mark()
        result = sandbox.exec(
            [*CURL, "https://a.test/hello?x", "-H", "X-Other: kept"], timeout_s=30
        )

        assert result.ok, result.stderr_text
        (request,) = requests(world, mark)
        assert [f"Bearer {SECRET}"] == headers(request, "authorization")
        assert ["kept"] == headers(request, "x-other")
        assert ("a.test", "/hello?x") == (request["sni"], request["target"])
        assert not shows(result.stdout), "the server's answer shows its request, credential and all"
        assert b"Bearer ****" in result.stdout

    def test_instead_of_the_placeholder(self, world: World, sandbox: Sandbox) -> None:
        """What a program that wants a token in its environment does with it."""
        mark = world.internet.mark()
        line = f'curl -sS https://a.test/ -H "Authorization: Bearer ${NAME}"'
        result = sandbox.exec(["sh", "-c", line], timeout_s=30)

        assert result.ok, result.stderr_text
        (request,) = requests(world, mark)
        assert [f"Bearer {SECRET}"] == headers(request, "authorization")

    @pytest.mark.parametrize(
        ("header", "scheme", "value"),
        [("X-Api-Key", "", SECRET), ("Authorization", "Token", f"Token {SECRET}")],
    )
    def test_in_any_header(
        self, world: World, make: MakeSandbox, header: str, scheme: str, value: str
    ) -> None:
        rule = NetworkRule("a.test", credential=Credential(NAME, header, scheme))
        sandbox = make(network=NetworkPolicy(rules=(rule,)), secrets={NAME: SECRET})
        mark = world.internet.mark()

        assert sandbox.exec([*CURL, "https://a.test/"], timeout_s=30).ok
        (request,) = requests(world, mark)
        assert [value] == headers(request, header.lower())

    def test_through_the_proxy_variables_and_without(self, world: World, sandbox: Sandbox) -> None:
        for words in (["--noproxy", "*"], ["-x", "http://198.18.0.1:3128"]):
            mark = world.internet.mark()
            result = sandbox.exec([*CURL, *words, "https://a.test/"], timeout_s=30)

            assert result.ok, result.stderr_text
            (request,) = requests(world, mark)
            assert [f"Bearer {SECRET}"] == headers(request, "authorization")

    def test_not_over_plain_http_and_not_elsewhere(self, world: World, make: MakeSandbox) -> None:
        policy = NetworkPolicy(allowed_hosts=("b.test", "a.test"), rules=(RULE,))
        sandbox = make(network=policy, secrets={NAME: SECRET})
        mark = world.internet.mark()

        for url in ("http://a.test/", "https://b.test/", "https://a.test:8443/"):
            sandbox.exec([*CURL, url], timeout_s=30)

        assert requests(world, mark)
        assert all(not headers(each, "authorization") for each in requests(world, mark))

    def test_only_for_what_its_rule_is_about(self, world: World, make: MakeSandbox) -> None:
        rule = NetworkRule(
            "a.test", "443", methods=("GET",), paths=("/api/*",), credential=Credential(NAME)
        )
        sandbox = make(network=NetworkPolicy(rules=(rule,)), secrets={NAME: SECRET})
        mark = world.internet.mark()

        assert sandbox.exec([*CURL, "-f", "https://a.test/api/x"], timeout_s=30).ok
        for words in (["https://a.test/"], ["-X", "POST", "https://a.test/api/x"]):
            refused = sandbox.exec([*CURL, *words], timeout_s=30)
            assert refused.stdout.startswith(b"ringfence: ")

        (request,) = requests(world, mark)
        assert "/api/x" == request["target"]


S_CLIENT = (
    "printf 'GET / HTTP/1.1\\r\\nHost: a.test\\r\\n\\r\\n'"
    " | openssl s_client -quiet -verify_return_error -connect a.test:443 | grep '200 Said'"
)
PROGRAMS = {
    "curl": ("curl", "curl -sSf https://a.test/"),
    "git": ("git", "git clone -q https://git.test/lab.git x && cat x/README"),
    "python": (
        "python3",
        "python3 -c 'import urllib.request as r; r.urlopen(\"https://a.test/\")'",
    ),
    "pip": ("pip3", "pip3 download -q --no-deps -i https://pypi.test/simple lab-wheel"),
    "node": ("node", "node -e 'fetch(\"https://a.test/\").then(r => process.exit(r.ok ? 0 : 1))'"),
    "npm": ("npm", "npm --registry=https://npm.test/ --fetch-retries=0 pack lab-package"),
    "wget": ("wget", "wget -q -O- https://a.test/"),
    "openssl": (
        "openssl",
        S_CLIENT,
    ),
    "java": ("java", "java Get.java https://a.test/"),
}
JAVA = """
public class Get {
  public static void main(String[] url) throws Exception {
    new java.net.URL(url[0]).openConnection().getInputStream().readAllBytes();
  }
}
"""


@pytest.mark.anyone
class TestPrograms:
    """Unmodified, over TLS that is ended on the way."""

    @pytest.fixture
    def everything(self, make: MakeSandbox) -> Sandbox:
        hosts = ("a.test", "git.test", "pypi.test", "npm.test")
        rules = tuple(NetworkRule(host, credential=Credential(NAME)) for host in hosts)
        return make(network=NetworkPolicy(rules=rules), secrets={NAME: SECRET})

    @pytest.mark.full
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_it_works(self, world: World, everything: Sandbox, name: str) -> None:
        needed, line = PROGRAMS[name]
        require(needed)
        everything.files.write("Get.java", JAVA)
        mark = world.internet.mark()

        result = everything.exec(["sh", "-c", line], timeout_s=90)

        assert result.ok, result.stderr_text
        assert requests(world, mark)
        for request in requests(world, mark):
            assert [f"Bearer {SECRET}"] == headers(request, "authorization")

    @pytest.mark.parametrize(
        "line",
        [
            "curl -sSf --http2 -w '%{http_version}' https://a.test/ | grep 1.1$",
            "git -c http.version=HTTP/2 ls-remote https://git.test/lab.git",
        ],
        ids=["curl", "git"],
    )
    def test_http_2_is_asked_for_and_http_1_is_spoken(
        self, world: World, everything: Sandbox, line: str
    ) -> None:
        require(line.split()[0])
        mark = world.internet.mark()

        result = everything.exec(["sh", "-c", line], timeout_s=30)

        assert result.ok, result.stderr_text
        assert requests(world, mark)

    def test_who_speaks_nothing_but_http_2_is_told_so(self, everything: Sandbox) -> None:
        """gRPC, above all: refused in the handshake, not left waiting."""
        program = (
            "import socket, ssl\n"
            "context = ssl.create_default_context()\n"
            "context.set_alpn_protocols(['h2'])\n"
            "with socket.create_connection(('a.test', 443), 10) as sock:\n"
            "    context.wrap_socket(sock, server_hostname='a.test')\n"
        )
        result = everything.exec(["python3", "-c", program], timeout_s=30)

        assert "no application protocol" in result.stderr_text
        assert any("speaks only 'h2'" in event.reason for event in everything.network_log())

    @pytest.mark.parametrize("name", ["curl", "git", "wget", "java"])
    def test_without_any_variable(self, everything: Sandbox, name: str) -> None:
        """Those that look where the system keeps its roots find the sandbox's there."""
        needed, line = PROGRAMS[name]
        require(needed)
        everything.files.write("Get.java", JAVA)

        bare = f"env -i PATH=$PATH HOME=$HOME sh -c {shlex.quote(line)}"
        result = everything.exec(["sh", "-c", bare], timeout_s=90)

        assert result.ok, result.stderr_text

    def test_what_is_not_ended_is_verified_as_on_the_host(
        self, world: World, make: MakeSandbox
    ) -> None:
        """The bundle inside also has the host's roots; a certificate that the host refuses is refused."""
        policy = NetworkPolicy(allowed_hosts=("b.test", "untrusted.test"), rules=(RULE,))
        sandbox = make(network=policy, secrets={NAME: SECRET})

        assert sandbox.exec([*CURL, "https://b.test/"], timeout_s=30).ok
        assert 60 == sandbox.exec([*CURL, "https://untrusted.test/"], timeout_s=30).exit_code


class TestItIsNowhereInside:
    @pytest.mark.full
    @pytest.mark.root  # nobody else may look into them: that is what is tried elsewhere
    def test_not_in_any_memory(self, sandbox: Sandbox) -> None:
        """Read from the host, of every process inside, while one that used it is still there."""
        program = (
            "import urllib.request as r, time\n"
            "answer = r.urlopen('https://a.test/').read()\n"
            "canary = b'canary-' + b'in-memory'\n"
            "print('done', flush=True)\n"
            "time.sleep(60)\n"
        )
        process = sandbox.start(["python3", "-c", program])
        try:
            assert b"done" in _first_line(process)
            found = {each.pid: _memory_of(each.pid) for each in processes_in(init_pid(sandbox))}
        finally:
            process.kill()

        assert all(found.values()), "every process could be looked into, PID 1 too"
        assert any(b"canary-in-memory" in data for data in found.values()), "it looks where data is"
        assert any(f"ringfence-secret-{NAME}".encode() in data for data in found.values())
        assert not [pid for pid, data in found.items() if shows(data)]

    def test_not_in_the_memory_of_who_used_it(self, sandbox: Sandbox) -> None:
        """A program looks through its own memory: as anybody's sandbox, not only root's."""
        half = len(SECRET) // 2
        result = sandbox.exec(
            ["python3", "-c", OWN_MEMORY, SECRET[:half], SECRET[half:]], timeout_s=60
        )

        assert result.ok, result.stderr_text
        # The control is a secret of its own, put together at run time.
        assert "canary found, secret not" == result.stdout_text.strip()

    @pytest.mark.full
    def test_not_in_any_environment_or_file(self, sandbox: Sandbox) -> None:
        sandbox.exec([*CURL, "-o", "answer", "-D", "head", "-v", "https://a.test/"], timeout_s=30)
        form = base64.b64encode(SECRET.encode()).decode()
        # The secret itself is not on the command line that looks for it.
        search = (
            "import base64, os, sys\n"
            f"secret = base64.b64decode('{form[::-1]}'[::-1])\n"
            "for root, _, names in os.walk('/'):\n"
            "    if root.startswith(('/usr', '/sys')): continue\n"
            "    for name in names:\n"
            "        path = os.path.join(root, name)\n"
            "        try:\n"
            "            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)\n"
            "        except OSError: continue\n"
            "        try:\n"
            "            data = b''\n"
            "            while len(data) < 1 << 24 and (piece := os.read(fd, 1 << 20)): data += piece\n"
            "        except OSError: pass\n"
            "        os.close(fd)\n"
            "        if secret in data: print('SECRET', path)\n"
            "        if b'canary-in-a-file' in data: print('CANARY', path)\n"
        )
        sandbox.files.write("planted", "canary-in-a-file")
        result = sandbox.exec(["python3", "-c", search], timeout_s=100)

        assert "CANARY" in result.stdout_text, result.stderr_text
        assert "planted" in result.stdout_text
        assert "SECRET" not in result.stdout_text

    def test_only_a_placeholder_is(self, sandbox: Sandbox) -> None:
        inside = sandbox.exec(["sh", "-c", f"echo ${NAME}"]).stdout_text.strip()

        assert inside.startswith(f"ringfence-secret-{NAME}-")

    def test_not_in_a_snapshot(self, sandbox: Sandbox, tmp_path: Path) -> None:
        sandbox.exec([*CURL, "-o", "answer", "https://a.test/"], timeout_s=30)
        snapshot = sandbox.snapshot()
        try:
            tree = tmp_path / "tree.tar"
            assert not shows(json.dumps(snapshot.to_json()).encode())
            assert not [path for path in _files_of(snapshot.id) if shows(path.read_bytes())]
            assert _files_of(snapshot.id), "the snapshot is somewhere"
            assert not tree.exists() or tarfile.is_tarfile(tree)
        finally:
            Sandbox.delete_snapshot(snapshot.id)

    def test_not_in_what_is_told(self, world: World, sandbox: Sandbox) -> None:
        sandbox.exec([*CURL, "https://a.test/", "-H", "Host: b.test"], timeout_s=30)
        sandbox.exec([*CURL, "https://a.test/"], timeout_s=30)
        told = [
            json.dumps([event.to_json() for event in sandbox.network_log()]),
            repr(sandbox.network_log()),
            repr(sandbox),
            repr(sandbox.session),
            json.dumps(sandbox.session.to_json()),
            repr(sandbox.spec),
            json.dumps(sandbox.spec.to_json()),
        ]
        with pytest.raises(RingfenceError) as error:
            sandbox.apply_network_policy(
                NetworkPolicy(rules=(NetworkRule("b.test", credential=Credential("OTHER")),))
            )
        told += [str(error.value), repr(error.value), json.dumps(error.value.to_json())]

        assert "a.test" in told[0]
        assert not [text for text in told if shows(text.encode())]


class TestAuthorities:
    def test_two_sandboxes_do_not_trust_each_other_s(self, make: MakeSandbox) -> None:
        both = [
            make(network=NetworkPolicy(rules=(RULE,)), secrets={NAME: SECRET}) for _ in range(2)
        ]
        mine, other = (each.files.read("/etc/ringfence/ca.pem") for each in both)

        assert mine != other
        assert other not in both[0].files.read("/etc/ringfence/ca-bundle.pem")
        for sandbox, authority, trusted in ((both[0], mine, True), (both[0], other, False)):
            sandbox.files.write("authority.pem", authority)
            words = ["--cacert", "authority.pem", "https://a.test/"]
            assert trusted == sandbox.exec([*CURL, *words], timeout_s=30).ok

    def test_it_outlives_the_process_that_uses_it(self, world: World, sandbox: Sandbox) -> None:
        """What is inside stays as it was: a new process must go on with the same authority."""
        before = client.shared().processes
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        mark = world.internet.mark()

        result = sandbox.exec(
            [*CURL, "--retry", "5", "--retry-all-errors", "https://a.test/"], timeout_s=60
        )

        assert result.ok, result.stderr_text
        assert not set(before) & set(client.shared().processes)
        assert [f"Bearer {SECRET}"] == headers(requests(world, mark)[-1], "authorization")

    def test_a_host_it_cannot_speak_for_is_refused_at_once(self, sandbox: Sandbox) -> None:
        other = NetworkPolicy(rules=(NetworkRule("b.test", inspect=True),))

        with pytest.raises(RingfenceError, match=r"b\.test.*create a sandbox"):
            sandbox.apply_network_policy(other)
        assert sandbox.exec([*CURL, "https://a.test/"], timeout_s=30).ok  # the old policy holds

    def test_it_cannot_be_changed_inside(self, sandbox: Sandbox) -> None:
        for path in ("/etc/ringfence/ca.pem", "/etc/ringfence/ca-bundle.pem"):
            result = sandbox.exec(["sh", "-c", f"echo >> {path} || rm -f {path} || mv {path} x"])
            assert not result.ok

    def test_a_program_that_pins_is_told_of(self, world: World, sandbox: Sandbox) -> None:
        mark = world.internet.mark()
        result = sandbox.exec([*CURL, "--cacert", str(world.ca), "https://a.test/"], timeout_s=30)

        assert 60 == result.exit_code
        assert [] == requests(world, mark)
        refusals = [event for event in sandbox.network_log() if not event.allowed]
        assert any("does not accept the certificate" in event.reason for event in refusals)

    @pytest.mark.parametrize("name", ["untrusted.test", "wrongname.test"])
    def test_a_server_that_the_host_does_not_trust_gets_nothing(
        self, world: World, make: MakeSandbox, name: str
    ) -> None:
        rule = NetworkRule(name, credential=Credential(NAME))
        sandbox = make(network=NetworkPolicy(rules=(rule,)), secrets={NAME: SECRET})
        mark = world.internet.mark()

        result = sandbox.exec([*CURL, f"https://{name}/"], timeout_s=30)

        assert "this host does not trust the certificate" in result.stdout_text
        assert [] == requests(world, mark)

    def test_a_name_in_front_of_another(self, world: World, sandbox: Sandbox) -> None:
        """Domain fronting: the name in the handshake is allowed, the one in the request is not."""
        mark = world.internet.mark()
        result = sandbox.exec([*CURL, "https://a.test/", "-H", "Host: evil.test"], timeout_s=30)

        assert "the connection for a.test:443" in result.stdout_text
        assert [] == requests(world, mark)


def _first_line(process: object) -> bytes:
    for piece in process.stdout:  # type: ignore[attr-defined]
        if b"\n" in piece:
            return bytes(piece)
    return b""


def _memory_of(pid: int) -> bytes:
    """Everything that is mapped; empty where it may not be read."""
    data = b""
    try:
        with (
            open(f"/proc/{pid}/maps", encoding="utf-8") as maps,
            open(f"/proc/{pid}/mem", "rb") as mem,
        ):
            for line in maps:
                span, modes, *_ = line.split()
                if not modes.startswith("r") or "[vvar" in line or "[vsyscall" in line:
                    continue
                start, end = (int(word, 16) for word in span.split("-"))
                try:
                    mem.seek(start)
                    data += mem.read(end - start)
                except OSError:
                    continue
    except OSError:
        pass
    return data


def _files_of(snapshot_id: str) -> list[Path]:
    from ringfence.snapshots.catalogue import default_directory

    root = Path(default_directory()) / snapshot_id
    return [path for path in root.rglob("*") if path.is_file()]


class TestAWarmSandbox:
    def test_has_each_clients_own_secret(self, world: World) -> None:
        """Bound at the claim: what one client's program sends is not what the next one's does."""
        pool = PoolConfig(min_warm=2, max_warm=2)
        spec = SandboxSpec(network=NetworkPolicy(rules=(RULE,)))
        with SessionManager(ManagerConfig(pool=pool)) as manager:
            for client_id in ("ann", "ben"):
                manager.fill_pool()
                given = replace(spec, secrets={NAME: f"{SECRET}-of-{client_id}"})
                lease = manager.acquire(given, client_id=client_id)
                mark = world.internet.mark()
                result = lease.sandbox.exec([*CURL, "https://a.test/"], timeout_s=60)

                assert result.ok, result.stderr_text
                (request,) = requests(world, mark)
                assert [f"Bearer {SECRET}-of-{client_id}"] == headers(request, "authorization")
                assert not shows(result.stdout + lease.sandbox.shell("env").stdout)
            assert (2, 0) == (manager.stats().pool_hits, manager.stats().pool_misses)
