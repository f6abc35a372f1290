"""The real kernel under the real program, and beside it the same calls without: the control."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ringfence
from ringfence.policy import filters
from ringfence.policy.filters import load_filter

PROBE = Path(__file__).parent / "probe.py"
SOURCE = Path(ringfence.__file__).parent.parent
KEY = 0x1122334455667788
Outcomes = dict[str, str]

pytestmark = [
    pytest.mark.skipif(
        os.uname().machine not in filters.MACHINES, reason="no filter for this machine"
    ),
    pytest.mark.anyone,
]


@pytest.fixture(scope="module")
def run_probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], Outcomes]]:
    directory = tmp_path_factory.mktemp("sockets")
    kinds = [
        ("stream", socket.SOCK_STREAM),
        ("seqpacket", socket.SOCK_SEQPACKET),
        ("datagram", socket.SOCK_DGRAM),
    ]
    listening = [socket.socket(socket.AF_UNIX, kind) for _, kind in kinds]
    for (name, kind), sock in zip(kinds, listening, strict=True):
        sock.bind(str(directory / f"host.{name}"))
        if kind != socket.SOCK_DGRAM:
            sock.listen()

    def run(program: bytes) -> Outcomes:
        done = subprocess.run(
            [sys.executable, str(PROBE)],
            input=json.dumps({"filter": program.hex(), "key": KEY}),
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PROBE_SOCKET": str(directory / "host")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        outcomes: Outcomes = json.loads(done.stdout)
        return outcomes

    yield run
    for sock in listening:
        sock.close()


@pytest.fixture(scope="module")
def without(run_probes: Callable[[bytes], Outcomes]) -> Outcomes:
    """The control: no filter."""
    return run_probes(b"")


@pytest.fixture(scope="module")
def under(run_probes: Callable[[bytes], Outcomes]) -> Outcomes:
    return run_probes(load_filter(tag_key=KEY))


def expect(outcomes: Outcomes, without: Outcomes, name: str, expected: str) -> None:
    if name not in outcomes:
        pytest.skip(f"{name}: not on this machine")
    assert expected == outcomes[name]
    assert expected != without[name], "the control fails in the same way: this proves nothing"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("keyctl", "EPERM"),
        ("userfaultfd", "EPERM"),
        ("kcmp", "EPERM"),
        ("ptrace", "EPERM"),
        ("read_own_memory_as_another", "EPERM"),
        ("asynchronous_io", "ENOSYS"),
        ("clone3", "ENOSYS"),
        ("io_uring_setup", "ENOSYS"),
        ("openat2", "ENOSYS"),
        ("unshare a user namespace", "EPERM"),
        ("unshare an empty mount namespace", "EPERM"),
        ("clone a user namespace", "EPERM"),
        ("clone a user namespace, dirty", "EPERM"),
        ("setns", "EPERM"),
        ("personality no randomisation", "EPERM"),
        ("subreaper", "EPERM"),
        ("subreaper, dirty", "EPERM"),
        ("affinity of PID 1", "EPERM"),
        ("affinity of PID 1, dirty", "EPERM"),
        ("I/O priority of PID 1", "EPERM"),
        ("priority of a user", "EPERM"),
        ("I/O priority of a user", "EPERM"),
        ("limits of PID 1", "EPERM"),
        ("unix stream", "EAFNOSUPPORT"),
        ("unix datagram", "EAFNOSUPPORT"),
        ("unix flagged", "EAFNOSUPPORT"),
        ("unix, dirty", "EAFNOSUPPORT"),
        ("datagram pair", "EPROTONOSUPPORT"),
        ("raw pair", "EPROTONOSUPPORT"),
        ("datagram_pair_reaches_a_socket_by_path", "EPROTONOSUPPORT"),
        ("uevents", "EPROTONOSUPPORT"),
        ("tag by setrlimit", "EPERM"),
        ("tag by prlimit64", "EPERM"),
        ("tag by prlimit64, dirty", "EPERM"),
        ("tag of oneself by number", "EPERM"),
        ("fchmod 4755", "EPERM"),
        ("fchmod 2755, dirty", "EPERM"),
        ("fchmodat 4755", "EPERM"),
        ("chmod 4755", "EPERM"),
        ("openat new 4755", "EPERM"),
        ("openat unnamed 4755", "EPERM"),
        ("open new 4755", "EPERM"),
        ("creat 4755", "EPERM"),
        ("mkdirat 2755", "EPERM"),
        ("mkdir 2755", "EPERM"),
        ("mknodat fifo 4755", "EPERM"),
        ("mknod 4755", "EPERM"),
        ("mknodat whiteout", "EPERM"),
        ("lease", "EPERM"),
        ("fcntl lock of an open file", "EINVAL"),
        ("filter with a listener", "EINVAL"),
        ("filter with a listener, dirty", "EINVAL"),
        ("udp_encapsulation", "ENOPROTOOPT"),
        ("receive buffer", "ENOBUFS"),
        ("receive buffer, dirty", "ENOBUFS"),
        ("send buffer", "ENOBUFS"),
        ("terminal: line discipline", "ENOTTY"),
        ("terminal: line discipline, dirty", "ENOTTY"),
        ("terminal: exclusive", "ENOTTY"),
        ("x32", "SIGSYS"),
        ("i386", "SIGSYS"),
    ],
)
def test_refused(under: Outcomes, without: Outcomes, name: str, expected: str) -> None:
    expect(under, without, name, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("merge memory", "EINVAL"),  # without CONFIG_KSM the control says the same
        ("statmount", "ENOSYS"),  # Linux 6.8
        ("fchmodat2 4755", "EPERM"),  # Linux 6.6
        ("mptcp", "EPROTONOSUPPORT"),  # CONFIG_MPTCP
        ("receive buffer by force", "ENOBUFS"),  # CAP_NET_ADMIN
        ("send buffer by force", "ENOBUFS"),
        ("rename leaving a whiteout", "EPERM"),  # needs the file system's help
        ("alg stream", "EAFNOSUPPORT"),  # CONFIG_CRYPTO_USER_API
        ("tipc pair", "EAFNOSUPPORT"),
        ("a number no kernel has", "ENOSYS"),
        ("the number -1", "ENOSYS"),
    ],
)
def test_refused_where_not_every_kernel_would_allow_it(
    under: Outcomes, name: str, expected: str
) -> None:
    assert expected == under[name]


@pytest.mark.parametrize(
    "name",
    [
        "getpid", "unshare files", "personality query", "set the name", "advise memory",
        "inet stream", "inet datagram", "inet flagged", "inet6 stream", "inet6 datagram",
        "netlink datagram", "netlink raw", "tcp by number", "stream pair", "seqpacket pair",
        "tag read", "another limit", "fchmod 0755", "flock", "fcntl lock", "fcntl duplicate",
        "openat, mode unused", "openat new 0644", "openat unnamed 0600", "mkdirat 1755",
        "mknodat file", "mknodat fifo", "rename", "terminal: size", "terminal: size, dirty",
        "terminal: drain", "tag_with_the_key",
        "filter without a listener",
    ],
)  # fmt: skip
def test_not_refused(under: Outcomes, without: Outcomes, name: str) -> None:
    if without[name] != "ok":
        pytest.skip(f"{name}: {without[name]} even without a filter")
    assert "ok" == under[name]


def test_what_linux_refuses_itself_has_its_own_answer(
    run_probes: Callable[[bytes], Outcomes], without: Outcomes
) -> None:
    """A program asks for what there is by arguments that cannot be; Chromium aborts at another answer."""
    told = {name: said for name, said in without.items() if name.startswith("invalid: ")}

    assert "EINVAL" == told["invalid: memfd of all flags"]
    assert "ok" not in told.values()
    kinds: tuple[dict[str, Any], ...] = ({}, {"allow_af_unix": True}, {"strict": True})
    for on in kinds:
        found = run_probes(load_filter(**on))
        assert told == {name: found[name] for name in told}, on


@pytest.mark.parametrize("name", ["stream pair goes elsewhere", "seqpacket pair goes elsewhere"])
def test_a_connected_pair_stays_connected(under: Outcomes, without: Outcomes, name: str) -> None:
    """It is the kernel, not the filter, that keeps these from host sockets; so they are allowed."""
    assert "EISCONN" == without[name] == under[name]


def test_another_key_is_no_key(run_probes: Callable[[bytes], Outcomes]) -> None:
    assert "EPERM" == run_probes(load_filter(tag_key=KEY ^ 1))["tag_with_the_key"]
    assert "EPERM" == run_probes(load_filter(tag_key=KEY ^ 1 << 40))["tag_with_the_key"]
    assert "EPERM" == run_probes(load_filter())["tag_with_the_key"]


def test_debug_adds_tracing(run_probes: Callable[[bytes], Outcomes], under: Outcomes) -> None:
    found = run_probes(load_filter(debug=True))

    expect(found, under, "ptrace", "ok")
    expect(found, under, "read_own_memory_as_another", "ok")
    expect(found, under, "personality no randomisation", "ok")
    assert "EPERM" == found["keyctl"]


def test_allow_af_unix_adds_unix_sockets(
    run_probes: Callable[[bytes], Outcomes], under: Outcomes
) -> None:
    found = run_probes(load_filter(allow_af_unix=True))

    expect(found, under, "unix stream", "ok")
    expect(found, under, "unix datagram", "ok")
    expect(found, under, "datagram pair", "ok")
    assert "EPROTONOSUPPORT" == found["uevents"]


def test_strict_takes_locks(run_probes: Callable[[bytes], Outcomes], under: Outcomes) -> None:
    found = run_probes(load_filter(strict=True))

    expect(found, under, "flock", "EPERM")
    expect(found, under, "fcntl lock", "EPERM")
    assert "ok" == found["fcntl duplicate"]


def test_strict_takes_netlink(run_probes: Callable[[bytes], Outcomes], under: Outcomes) -> None:
    found = run_probes(load_filter(strict=True))

    expect(found, under, "netlink raw", "EAFNOSUPPORT")
    assert "ok" == found["inet stream"]


def test_aio_adds_asynchronous_io(run_probes: Callable[[bytes], Outcomes], under: Outcomes) -> None:
    expect(run_probes(load_filter(aio=True)), under, "asynchronous_io", "ok")


@pytest.mark.full
@pytest.mark.parametrize("on", filters.SHIPPED, ids=lambda on: "-".join(sorted(on)) or "none")
def test_the_kernel_accepts_what_is_shipped(
    run_probes: Callable[[bytes], Outcomes], on: frozenset[str]
) -> None:
    path = Path(filters.__file__).parent / "compiled" / filters.file_name(os.uname().machine, on)
    found = run_probes(path.read_bytes())

    assert "ok" == found["getpid"]
    assert "EPERM" == found["keyctl"]
