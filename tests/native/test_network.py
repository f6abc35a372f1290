"""What the kernel of a sandbox lets through to its two sockets, and what it refuses at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringfence
from ringfence import NetworkPolicy, Sandbox
from ringfence.backends.local import routes
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import ConnectError, InvalidRequest, LifecycleError, NetworkPolicyError
from ringfence.linux import nftables
from ringfence.policy.redirects import LISTEN_PORT
from tests.native.listening import PATIENCE_S, Listening, original
from tests.native.outside import open_fds, until

PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")
NAME, NAME6 = "198.18.7.9", "2001:2::79"  # stand for a name inside

# Says what became of one connection: the errno's name, or what came back over it.
CONNECT = """
import errno, socket, sys
host, port = sys.argv[1], int(sys.argv[2])
sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
sock.settimeout(10)
try:
    sock.connect((host, port))
except OSError as exc:
    print(errno.errorcode.get(exc.errno, exc))
else:
    sock.sendall(b"ping")
    print(sock.recv(99).decode(), sock.getsockname()[0])
"""


@pytest.fixture
def egress() -> Iterator[Listening]:
    made = Listening()
    yield made
    made.close()


@pytest.fixture
def backend(egress: Listening, tmp_path: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(
        state_dir=str(tmp_path / "snapshots"), egress=lambda: egress, prebuilt_s=0
    )  # what is built ahead has a descriptor here too
    yield made
    made.close()


@pytest.fixture
def make(backend: NativeBackend) -> Iterator[Any]:
    made: list[Sandbox] = []

    def create(network: Any, **options: Any) -> Sandbox:
        made.append(Sandbox.create(network=network, backend=backend, **options))
        return made[-1]

    yield create
    for sandbox in made:
        sandbox.terminate()


def says(sandbox: Sandbox, host: str, port: int) -> str:
    result = sandbox.exec([*PYTHON, CONNECT, host, str(port)], timeout_s=PATIENCE_S)
    assert result.ok, result.stderr
    return result.text.strip()


def accepted(sandbox: Sandbox, egress: Listening, host: str, port: int) -> tuple[str, Any]:
    """Connect inside, accept here: what the client said, and where it had meant to go."""
    client = sandbox.start([*PYTHON, CONNECT, host, str(port)], timeout_s=PATIENCE_S)
    conn, _ = egress.sockets[sandbox.id][0].accept()
    with conn:
        where = original(conn)
        assert b"ping" == conn.recv(99)
        conn.sendall(b"pong")
        return client.wait().text.strip(), where


# -- what is turned to the listener ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "own"), [(NAME, "198.18.0.1"), (NAME6, "2001:2::1")], ids=["v4", "v6"]
)
def test_a_name_s_address_at_a_port_of_its_rule(
    make: Any, egress: Listening, address: str, own: str
) -> None:
    sandbox = make("a.test:443")

    said, where = accepted(sandbox, egress, address, 443)

    assert f"pong {own}" == said
    assert (address, 443) == where


def test_a_mapped_address_is_the_address(make: Any, egress: Listening) -> None:
    sandbox = make("a.test:443")

    assert (NAME, 443) == accepted(sandbox, egress, f"::ffff:{NAME}", 443)[1]


@pytest.mark.parametrize("address", ["10.1.2.3", "2001:db8::5"])
def test_a_network_of_a_rule(make: Any, egress: Listening, address: str) -> None:
    sandbox = make("10.0.0.0/8:5000-6000,[2001:db8::/32]:5000-6000")

    assert (address, 5432) == accepted(sandbox, egress, address, 5432)[1]
    assert "ECONNREFUSED" == says(sandbox, address, 4999)


def test_every_port_where_a_rule_names_none(make: Any, egress: Listening) -> None:
    sandbox = make("a.test")

    for port in (1, 22, 65535):
        assert (NAME, port) == accepted(sandbox, egress, NAME, port)[1]


def test_the_proxy_s_address(make: Any, egress: Listening) -> None:
    sandbox = make("a.test:443")

    assert ("198.18.0.1", 3128) == accepted(sandbox, egress, "198.18.0.1", 3128)[1]


def test_one_port_of_the_host_s_loopback_by_name(make: Any, egress: Listening) -> None:
    sandbox = make("127.0.0.1:5432,[::1]:5432")

    for address in ("127.0.0.1", "::1"):
        assert (address, 5432) == accepted(sandbox, egress, address, 5432)[1]
        assert "ECONNREFUSED" == says(sandbox, address, 5433)


def test_the_listener_itself_is_seen_as_such(make: Any, egress: Listening) -> None:
    sandbox = make("a.test")

    assert accepted(sandbox, egress, "127.0.0.1", LISTEN_PORT)[1] in (
        None,
        ("127.0.0.1", LISTEN_PORT),
    )


def test_everything_while_learning(make: Any, egress: Listening) -> None:
    sandbox = make(NetworkPolicy(learn=True))

    for address in ("93.184.216.34", "2606:2800::1"):
        assert (address, 4242) == accepted(sandbox, egress, address, 4242)[1]
    assert "ECONNREFUSED" == says(sandbox, "127.0.0.1", 4242)


def test_very_many_rules(make: Any, egress: Listening) -> None:
    rules = [f"10.{i // 250}.{i % 250}.0/24:{1000 + i}" for i in range(3000)]
    sandbox = make(rules)

    assert ("10.11.249.7", 3999) == accepted(sandbox, egress, "10.11.249.7", 3999)[1]
    assert "ENETUNREACH" == says(sandbox, "10.12.0.1", 1000)


@pytest.mark.parametrize("over", ["udp", "tcp"])
def test_dns(make: Any, egress: Listening, over: str) -> None:
    sandbox = make("a.test")
    if over == "tcp":
        assert ("127.0.0.53", 53) == accepted(sandbox, egress, "127.0.0.53", 53)[1]
        return
    code = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(10);"
        "s.connect(('127.0.0.53', 53)); s.send(b'who'); print(s.recv(99).decode())"
    )
    client = sandbox.start([*PYTHON, code])
    resolver = egress.sockets[sandbox.id][1]

    query, peer = resolver.recvfrom(99)
    resolver.sendto(b"is " + query, peer)

    assert "is who\n" == client.wait().text


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "10.0.0.1", "169.254.169.254", "192.168.1.1", "2606:2800::1", "fd00::1"],
)
def test_any_other_address_is_unreachable_at_once(make: Any, address: str) -> None:
    assert "ENETUNREACH" == says(make("a.test"), address, 443)


@pytest.mark.parametrize("address", [NAME, NAME6])
def test_a_port_that_no_rule_names_is_refused_at_once(make: Any, address: str) -> None:
    assert "ECONNREFUSED" == says(make("a.test:443"), address, 80)


def test_datagrams_to_a_name_are_refused_at_once(make: Any) -> None:
    code = (
        "import errno, socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(10)\n"
        f"s.connect(('{NAME}', 443)); s.send(b'x')\n"
        "try: s.recv(9)\nexcept OSError as exc: print(errno.errorcode[exc.errno])"
    )

    assert "ECONNREFUSED\n" == make("a.test:443").exec([*PYTHON, code]).text


def test_no_program_can_take_the_listener_s_port(make: Any) -> None:
    code = (
        "import errno, socket\n"
        f"for address in ('127.0.0.1', '{NAME}'):\n"
        "    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        f"    try: s.bind((address, {LISTEN_PORT}))\n"
        "    except OSError as exc: print(errno.errorcode[exc.errno])"
    )

    assert {"EACCES"} == set(make("a.test").exec([*PYTHON, code]).text.split())


def test_nobody_inside_changes_the_routes(make: Any) -> None:
    """A route of one's own, and a way around the redirection: a fresh namespace would allow both."""
    code = (
        "import errno, socket, struct\n"
        "for protocol in (0, 12):\n"
        "    try:\n"
        "        s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)\n"
        "        s.send(struct.pack('=IHHII8BI', 28, 24, 5 | 0x400, 1, 0, 2, 0, 0, 0, 254, 3, 0, 1, 0))\n"
        "        print(errno.errorcode[-struct.unpack_from('=i', s.recv(99), 16)[0]])\n"
        "    except OSError as exc: print(errno.errorcode[exc.errno])"
    )

    assert {"EPERM", "EPROTONOSUPPORT"} == set(make("a.test").exec([*PYTHON, code]).text.split())


# -- what stays inside ----------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.9.9.9"])
def test_servers_inside_are_reached_inside(make: Any, egress: Listening, address: str) -> None:
    code = (
        "import socket, sys\n"
        "kind = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET\n"
        "server = socket.socket(kind); server.bind((sys.argv[1], 8443))\n"
        "server.listen(); client = socket.socket(kind); client.connect((sys.argv[1], 8443))\n"
        "conn, _ = server.accept(); client.send(b'within'); print(conn.recv(9).decode())"
    )
    sandbox = make(NetworkPolicy(learn=True))

    assert "within\n" == sandbox.exec([*PYTHON, code, address]).text
    egress.sockets[sandbox.id][0].setblocking(False)
    with pytest.raises(BlockingIOError):
        egress.sockets[sandbox.id][0].accept()


def test_connections_inside_leave_no_trace_in_the_kernel(make: Any) -> None:
    """Else a program could fill the connection table, whose memory no cgroup counts."""
    code = (
        "import socket\n"
        "server = socket.socket(); server.bind(('127.0.0.1', 0)); server.listen()\n"
        "for _ in range(50):\n"
        "    client = socket.create_connection(server.getsockname()); server.accept()[0].close()\n"
        "sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"for port in range(1000, 1050): sender.sendto(b'x', ('{NAME}', port))\n"
        "print(open('/proc/sys/net/netfilter/nf_conntrack_count').read())"
    )

    result = make("a.test:443").exec([*PYTHON, code])

    assert result.ok, result.stderr
    assert int(result.text) < 10


# -- the sockets ----------------------------------------------------------------------------------


@pytest.mark.root  # who made it as an ordinary user may not look
def test_none_of_them_is_left_in_pid_1(make: Any, backend: NativeBackend) -> None:
    with_policy, without = make("a.test"), make("none")

    def kinds(sandbox: Sandbox) -> list[str]:
        pid = sandbox._inner.pid  # type: ignore[attr-defined]
        found = [text.partition("[")[0] for _fd, text in sorted(open_fds(pid).items())]
        # Its own cgroups, whose paths have each sandbox's name in them.
        return ["tasks" if text.endswith("/tasks") else text for text in found]

    # PID 1 says that it is ready, and closes them then.
    assert until(lambda: kinds(without) == kinds(with_policy)), kinds(with_policy)
    assert 1 == kinds(with_policy).count("socket:")


def test_the_host_holds_two_descriptors_more(make: Any, egress: Listening) -> None:
    make("none")
    before = len(os.listdir("/proc/self/fd"))
    make("none")
    between = len(os.listdir("/proc/self/fd"))
    sandbox = make("a.test")
    after = len(os.listdir("/proc/self/fd"))

    assert between - before + 2 == after - between

    sandbox.terminate()
    assert between == len(os.listdir("/proc/self/fd"))
    assert ("drop", sandbox.id) == egress.said[-1]


def test_a_sandbox_without_network_has_nothing_of_it(make: Any, egress: Listening) -> None:
    sandbox = make("none")
    shown = sandbox.shell(
        "cat /proc/net/route /proc/net/ipv6_route /proc/net/tcp /proc/net/tcp6 /proc/net/udp | "
        "grep -v -e Iface -e local_address; cat /proc/net/fib_trie; env"
    ).text

    assert [] == egress.said
    assert "198.18" not in shown
    assert "PROXY" not in shown.upper()
    assert f":{LISTEN_PORT:04X}" not in shown
    assert f":{53:04X}" not in shown


def test_no_sandbox_where_nobody_can_serve_it(
    make: Any, egress: Listening, backend: NativeBackend
) -> None:
    make("none").terminate()
    egress.fails.add("serve")
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="no serve today"):
        make("a.test")

    assert {} == backend._live
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.mark.root  # an ordinary user's sandboxes have the one uid that there is
@pytest.mark.parametrize("is_claimed", [False, True], ids=["made", "claimed"])
def test_the_host_ids_of_a_failed_create_are_given_back_once(
    egress: Listening, backend: NativeBackend, is_claimed: bool
) -> None:
    """Else two sandboxes would have the same."""
    from ringfence import SandboxSpec

    spec = SandboxSpec(network=NetworkPolicy.parse("a.test:443"))
    egress.fails.add("serve")
    with pytest.raises(OSError, match="no serve today"):
        backend.prewarm(spec).claim(spec) if is_claimed else backend.provision(spec)

    free = backend.host_ids()._free
    assert sorted({*free}) == sorted(free)


def test_a_claimed_sandbox_too(backend: NativeBackend, egress: Listening) -> None:
    from ringfence import SandboxSpec

    spec = SandboxSpec(network=NetworkPolicy.parse("a.test:443"))
    warm = backend.prewarm(SandboxSpec())
    assert warm.fits(spec)

    with Sandbox(warm.claim(spec), spec) as sandbox:
        assert (NAME, 443) == accepted(sandbox, egress, NAME, 443)[1]
        assert "ECONNREFUSED" == says(sandbox, NAME, 80)


@pytest.mark.root
@pytest.mark.parametrize("user", ["root", "nobody"])
def test_another_user_has_the_same_network(make: Any, egress: Listening, user: str) -> None:
    sandbox = make("a.test:443")
    argv = [*PYTHON, CONNECT]

    client = sandbox.start([*argv, NAME, "443"], user=user)
    conn, _ = egress.sockets[sandbox.id][0].accept()
    with conn:
        conn.sendall(b"pong")
    assert client.wait().text.startswith("pong")
    assert "ENETUNREACH\n" == sandbox.exec([*argv, "10.0.0.1", "443"], user=user).text
    assert "ECONNREFUSED\n" == sandbox.exec([*argv, NAME, "80"], user=user).text


# -- changes --------------------------------------------------------------------------------------


def test_from_nothing_to_something_and_back(make: Any, egress: Listening) -> None:
    sandbox = make("none")
    before = sandbox.shell("cat /proc/net/fib_trie /proc/net/if_inet6").text
    assert "ENETUNREACH" == says(sandbox, NAME, 443)

    sandbox.apply_network_policy("a.test:443")
    assert (NAME, 443) == accepted(sandbox, egress, NAME, 443)[1]
    assert (NAME6, 443) == accepted(sandbox, egress, NAME6, 443)[1]

    sandbox.apply_network_policy("none")
    assert "ENETUNREACH" == says(sandbox, NAME, 443)
    assert "ECONNREFUSED" == says(sandbox, "127.0.0.1", LISTEN_PORT)
    assert before == sandbox.shell("cat /proc/net/fib_trie /proc/net/if_inet6").text
    assert ["serve", "drop"] == [verb for verb, _ in egress.said]


def test_from_one_list_to_another(make: Any, egress: Listening) -> None:
    sandbox = make("a.test:443,10.0.0.0/8:22")

    sandbox.apply_network_policy("a.test:80,192.168.0.0/16")

    assert (NAME, 80) == accepted(sandbox, egress, NAME, 80)[1]
    assert ("192.168.4.4", 9) == accepted(sandbox, egress, "192.168.4.4", 9)[1]
    assert "ECONNREFUSED" == says(sandbox, NAME, 443)
    assert "ENETUNREACH" == says(sandbox, "10.0.0.1", 22)
    assert ["serve", "change"] == [verb for verb, _ in egress.said]
    assert NetworkPolicy.parse("a.test:80,192.168.0.0/16") == egress.served[sandbox.id][0]


def test_an_unlike_policy_of_the_same_ways_is_told_too(make: Any, egress: Listening) -> None:
    sandbox = make("a.test:443")

    sandbox.apply_network_policy("b.test:443")

    assert NetworkPolicy.parse("b.test:443") == egress.served[sandbox.id][0]


def test_while_it_is_suspended(make: Any, egress: Listening) -> None:
    sandbox = make("none")
    sandbox.exec(["true"])
    sandbox.suspend()

    sandbox.apply_network_policy("a.test:443")

    assert "suspended" == sandbox.state
    sandbox.resume()
    assert (NAME, 443) == accepted(sandbox, egress, NAME, 443)[1]


def test_a_change_that_fails_leaves_the_old_policy(make: Any, egress: Listening) -> None:
    sandbox = make("a.test:443")
    egress.fails.add("change")

    with pytest.raises(OSError, match="no change today"):
        sandbox.apply_network_policy("a.test:80")

    assert (NAME, 443) == accepted(sandbox, egress, NAME, 443)[1]
    assert "ECONNREFUSED" == says(sandbox, NAME, 80)


def test_a_first_policy_that_fails_leaves_none(make: Any, egress: Listening) -> None:
    sandbox = make("none")
    egress.fails.add("serve")
    sandbox.exec(["true"])  # the first opens what tells of OOM kills
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="no serve today"):
        sandbox.apply_network_policy("a.test:80")

    assert "ENETUNREACH" == says(sandbox, NAME, 80)
    assert before == len(os.listdir("/proc/self/fd"))
    egress.fails.clear()
    sandbox.apply_network_policy("a.test:80")
    assert (NAME, 80) == accepted(sandbox, egress, NAME, 80)[1]


@pytest.mark.parametrize(("was", "wanted"), [("none", "unrestricted"), ("unrestricted", "none")])
def test_the_host_s_network_neither_comes_nor_goes(make: Any, was: str, wanted: str) -> None:
    with pytest.raises(NetworkPolicyError):
        make(was).apply_network_policy(wanted)


def test_not_after_the_end(make: Any) -> None:
    sandbox = make("a.test")
    sandbox.terminate()

    with pytest.raises(LifecycleError):
        sandbox.apply_network_policy("none")


# -- coming in ------------------------------------------------------------------------------------

SERVER = (
    "import socket, sys\n"
    "address = sys.argv[1]\n"
    "kind = socket.AF_INET6 if ':' in address else socket.AF_INET\n"
    "server = socket.create_server((address, 8080), family=kind)\n"
    "print('up', flush=True)\n"
    "while True:\n"
    "    conn, _ = server.accept(); conn.sendall(b'hello ' + conn.recv(99)); conn.close()"
)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
@pytest.mark.parametrize("network", ["none", "a.test"])
def test_a_server_inside_is_reached(make: Any, network: str, address: str) -> None:
    sandbox = make(network)
    process = sandbox.start([*PYTHON, SERVER, address])
    assert b"up\n" == next(iter(process.stdout))

    for _ in range(2):
        with sandbox._inner.connect(8080) as sock:
            sock.settimeout(PATIENCE_S)
            sock.sendall(b"you")
            assert b"hello you" == sock.recv(99, socket.MSG_WAITALL)


def test_a_port_where_nobody_listens(make: Any) -> None:
    with pytest.raises(ConnectError):
        make("none")._inner.connect(8080)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port(make: Any, port: int) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make("none")._inner.connect(port)
    assert "port" == refusal.value.field


def test_a_server_that_never_accepts_holds_nobody_up(make: Any) -> None:
    """Its queue is full, so a connection stays on its way; PID 1 must not wait for it."""
    code = (
        "import socket, time\n"
        "server = socket.socket(); server.bind(('127.0.0.1', 8080)); server.listen(0)\n"
        "held = []\n"
        "for _ in range(4):\n"
        "    sock = socket.socket(); sock.setblocking(False); held.append(sock)\n"
        "    sock.connect_ex(('127.0.0.1', 8080))\n"
        "print('full', flush=True); time.sleep(600)"
    )
    sandbox = make("none")
    assert b"full\n" == next(iter(sandbox.start([*PYTHON, code]).stdout))
    inner = sandbox._inner

    _body, [fd] = inner.ask("dial", 4, 8080)
    result = sandbox.exec(["true"], timeout_s=5)

    os.close(fd)
    assert result.ok


# -- what is said of it ---------------------------------------------------------------------------


def network_protection(sandbox: Sandbox) -> Any:
    (found,) = [each for each in sandbox.protections() if "network" == each.name]
    return found


@pytest.mark.parametrize(
    ("network", "status", "word"),
    [
        ("none", "enforced", "nothing but lo"),
        ("a.test", "enforced", "1 rule"),
        ("a.test,10.0.0.0/8,[2001:db8::/32]:443,!x.a.test", "enforced", "4 rules"),
        (NetworkPolicy(learn=True), "degraded", "learning"),
        ("unrestricted", "missing", "by name"),
    ],
    ids=str,
)
def test_what_protects_it(make: Any, network: Any, status: str, word: str) -> None:
    found = network_protection(make(network))

    assert status == found.status, found
    assert word in found.why


def test_after_a_change_it_is_the_new_policy_s(make: Any) -> None:
    sandbox = make("none")

    sandbox.apply_network_policy("10.0.0.0/8")
    assert "1 rule" in network_protection(sandbox).why

    sandbox.apply_network_policy("none")
    assert "enforced" == network_protection(sandbox).status


def test_more_than_the_rules_allow_would_be_seen(make: Any) -> None:
    """The control: the kernel says something else than the policy."""
    sandbox = make("10.0.0.0/8")

    sandbox._inner.spec = make("a.test").spec
    assert "missing" == network_protection(sandbox).status
    assert "10.0.0.0/8" in network_protection(sandbox).why

    sandbox._inner.spec = make("none").spec
    assert "missing" == network_protection(sandbox).status


def test_somebody_else_s_listener_would_be_seen(make: Any) -> None:
    sandbox, other = make("a.test"), make("a.test")

    sandbox._inner.network.inodes = other._inner.network.inodes

    assert "missing" == network_protection(sandbox).status


def test_what_the_egress_process_still_has_would_be_seen(make: Any, egress: Listening) -> None:
    egress.missing = ["Landlock: not in this kernel"]

    found = network_protection(make("a.test"))

    assert "degraded" == found.status
    assert "Landlock: not in this kernel" in found.why


# -- other kernels --------------------------------------------------------------------------------


@pytest.fixture
def without_nf_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel without it answers: the messages are for a part of netfilter that nobody has."""
    monkeypatch.setattr(routes, "_plans", {})
    monkeypatch.setattr(nftables, "_NFTABLES", 99)


@pytest.mark.usefixtures("without_nf_tables")
def test_without_nf_tables_there_is_no_sandbox_with_rules(
    make: Any, egress: Listening, backend: NativeBackend
) -> None:
    with pytest.raises(NetworkPolicyError) as refusal:
        make("a.test")

    assert "nft_redir" in refusal.value.hint
    assert {} == backend._live
    assert [] == egress.said
    assert make("none").exec(["true"]).ok


@pytest.mark.usefixtures("without_nf_tables")
def test_nor_does_a_live_one_get_rules(make: Any, egress: Listening) -> None:
    sandbox = make("none")

    with pytest.raises(NetworkPolicyError, match="cannot be enforced"):
        sandbox.apply_network_policy("a.test")

    assert NetworkPolicy.none() == sandbox._inner.spec.network
    assert "ENETUNREACH" == says(sandbox, NAME, 443)
    assert [] == egress.said


@pytest.mark.usefixtures("without_nf_tables")
def test_the_report_says_so(backend: NativeBackend) -> None:
    report = backend.report()
    reasons = {each.name: each.reason for each in report.capabilities}

    assert report.available
    assert "nft_redir" in reasons["network_hosts"]
    assert not report.can("network_change")


def test_the_report_elsewhere(backend: NativeBackend) -> None:
    """The control of the one above."""
    assert backend.report().can("network_hosts")


WITHOUT_IPV6 = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from ringfence.backends.local.routes import plan_for
from ringfence.launcher import build, network
from ringfence.linux import namespaces
from ringfence.model.net.network import NetworkPolicy
namespaces.unshare(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNET)
build.leave_host_network(namespaces.CLONE_NEWNET)
with open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w") as switch:
    switch.write("1")
plan = plan_for(NetworkPolicy.parse("a.test:443,[2001:db8::/32]"))
listener, resolver = (socket.socket(fileno=fd) for fd in network.set_up(plan))
listener.settimeout(10)
client = socket.create_connection(("198.18.7.9", 443))
print(listener.accept()[1][0])
try:
    socket.create_connection(("2001:2::79", 443))
except OSError as exc:
    print(exc.errno)
"""


def test_without_ipv6_there_is_still_ipv4() -> None:
    source = str(Path(ringfence.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_IPV6, source],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert 0 == result.returncode, result.stderr
    client, unreachable = result.stdout.decode().split()
    assert client.endswith("198.18.0.1")
    assert unreachable in ("99", "101")  # EADDRNOTAVAIL, ENETUNREACH
