"""Each answer of the agent of a sandbox without namespaces, from a real filter to a real caller.

A process takes the agent's place: it puts itself under the filter, forks a caller and answers its calls. After
each answer it looks at what it must have given back: descriptors, its timer, its umask, its directory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ringfence

HARNESS = r"""
import contextlib, ctypes, errno, fcntl, json, os, select, signal, socket, stat, struct, sys
from ringfence.backends.landlock import filters
from ringfence.guest.without_namespaces import asking, inet_diag, metadata, shared_memory, sockets
from ringfence.guest.without_namespaces.forks import Forks
from ringfence.launcher.pid1 import notifications
from ringfence.linux import libc, on_behalf, privileges, seccomp

KEY = 0x0123456789ABCDEF
order = json.loads(sys.argv[1])
V4, V6, WAY = (socket.inet_aton(each) for each in order["own"])
libc_ = ctypes.CDLL(None, use_errno=True)
libc_.syscall.restype = ctypes.c_long
place = order["place"]
os.chdir("/")
os.umask(0o022)
host = socket.create_server(("127.0.0.1", 0))
egress = socket.create_server((order["own"][2], 0))
egress.setblocking(False)
unix = {}
for name in ("place/server", "place-beside/server", "host/server", "\0" + order["abstract"]):
    unix[name] = socket.socket(socket.AF_UNIX)
    unix[name].bind(name if name[0] == "\0" else f"{place}/../{name}")
    unix[name].listen()
for name in ("place", "place-beside", "host"):
    with open(f"{place}/../{name}/file", "w"): pass
    os.utime(f"{place}/../{name}/file", (1000, 1000))
os.symlink("../host/server", place + "/out")
os.symlink("../host/file", place + "/link")

def turned(text, first, last):
    address, _, bits = text.partition("/")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.inet_pton(family, address), int(bits), first, last

network = {
    "calls": filters.socket_calls(), "v4": V4, "v6": V6, "unix": [place],
    "is_scoped": order.get("is_scoped", False), "way": None,
}
if "way" in order:
    network["way"] = {
        "at": egress.getsockname(), "token": b"t" * 16,
        **{kind: [turned(*each) for each in order["way"][kind]] for kind in ("loopback", "others")},
    }
listeners = inet_diag.find(V4) if order.get("asks_kernel", True) else None
privileges.set_no_new_privs()
if order.get("refuses_pidfd_getfd"):
    seccomp.install_filter(notifications.program(
        [([(0, libc.number("pidfd_getfd"))], seccomp.RET_ERRNO | errno.EPERM)]))
judged = {"calls": filters.judged_calls(owns_files_outside=True), "roots": [place]}
shared = {"calls": filters.shared_calls(), "place": place}
listener_fd = asking.guard(judged["calls"], network["calls"], shared["calls"], filters.segment_calls(),
    filters.scheduling_calls(), filters.fork_calls(), KEY)
assert listener_fd >= 0
agent = sockets.Sockets(listener_fd, network, KEY, listeners)
held = {"processes": order.get("held", 0)}
forks = Forks(listener_fd, filters.fork_calls(), KEY, order.get("most", 100), lambda: held["processes"])
members = set()
segments = shared_memory.Segments(listener_fd, filters.segment_calls(), KEY)
questions = asking.Questions(listener_fd, metadata.Metadata(listener_fd, judged, KEY), agent,
    shared_memory.SharedMemory(listener_fd, shared), segments, filters.scheduling_calls(),
    members.__contains__, forks)
host_port = host.getsockname()[1]
exec(order.get("before", ""))

def number(call, *arguments):
    try:
        found = call(*arguments)
    except OSError as exc:
        return exc.errno
    return ctypes.get_errno() if isinstance(found, int) and found < 0 else 0

def word(value):
    return ctypes.c_long(value) if isinstance(value, int) else value

def raw(name, *arguments):
    ctypes.set_errno(0)
    found = libc_.syscall(ctypes.c_long(order["numbers"][name]), *map(word, arguments))
    return -ctypes.get_errno() if found < 0 else found

kept = []
def fd(family):
    kept.append(socket.socket(family, 1))
    return kept[-1].fileno()

def inet(host, port):
    return struct.pack("=H", 2) + struct.pack("!H4s8x", port, socket.inet_aton(host))

def inet6(host, port):
    return struct.pack("=H", 10) + struct.pack("!H4x16s4x", port, socket.inet_pton(10, host))

def told():
    "What the egress process is told of each connection that has arrived."
    found = []
    while True:
        try:
            sock, _ = egress.accept()
        except BlockingIOError:
            return found
        with sock:
            select.select([sock], [], [], 20)
            data = sock.recv(99)
            address, port = struct.unpack("!16sH", data[16:34])
            found.append([data[:16].decode(), socket.inet_ntop(10, address), port, len(data)])

def mine():
    return [len(os.listdir("/proc/self/fd")), signal.getitimer(signal.ITIMER_REAL), os.getcwd(),
            str(signal.getsignal(signal.SIGALRM))]

def run(attempts):
    before = mine()
    says, say = os.pipe()
    pid = forks.fork()
    if pid == 0:
        results = {}
        for name, code in attempts:
            try:
                results[name] = eval(code) if not code.startswith("do ") else exec(code[3:], globals())
            except OSError as exc:
                results[name] = exc.errno
        os.write(say, json.dumps(results).encode())
        os._exit(0)
    members.add(pid)
    os.close(say)
    poll = select.poll()
    poll.register(says, select.POLLIN)
    poll.register(listener_fd, select.POLLIN)
    data, strange = b"", []
    while True:
        wait_s = agent.wait_s()
        ready = dict(poll.poll(None if wait_s is None else wait_s * 1000 + 1))
        agent.look()
        if ready.get(listener_fd, 0) & select.POLLIN:
            questions.serve_one()
            umask = os.umask(0o022)
            if umask != 0o022 or signal.getitimer(signal.ITIMER_REAL)[0]:
                strange.append([umask, signal.getitimer(signal.ITIMER_REAL)])
        elif says in ready:
            more = os.read(says, 1 << 16)
            if not more:
                break
            data += more
    os.waitpid(pid, 0)
    os.close(says)
    assert (before, []) == (mine(), strange), (before, mine(), strange)
    return json.loads(data) if data else None
"""

ABSTRACT = "ringfence-test-answers"


def answers(
    tmp_path: Path, attempts: dict[str, str], after: str = "", **order: Any
) -> dict[str, Any]:
    """Run the attempts, in turn, in one caller; `after` are statements of the agent that add to the results."""
    from tests.unit.policy.reading import TABLES

    for name in ("place", "place-beside", "host"):
        (tmp_path / name).mkdir()
    last = os.getpid() % 250 + 1
    given = {
        "own": [f"127.66.{last}.{each}" for each in (4, 5, 6)],
        "place": str(tmp_path / "place"),
        "abstract": f"{ABSTRACT}-{os.getpid()}",
        "numbers": TABLES[os.uname().machine],
        **order,
    }
    body = f"results = run({list(attempts.items())!r})\n{after}\nprint(json.dumps(results))\n"
    done = subprocess.run(
        [sys.executable, "-c", HARNESS + body, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": str(Path(ringfence.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {
        name: value for name, value in found.items() if not attempts.get(name, "").startswith("do ")
    }


def expect(wanted: dict[str, tuple[str, Any]], tmp_path: Path, **order: Any) -> None:
    """Each attempt is its code, and what comes of it; of a statement (`do ...`) nothing comes."""
    found = answers(tmp_path, {name: code for name, (code, _) in wanted.items()}, **order)

    assert {
        name: value for name, (code, value) in wanted.items() if not code.startswith("do ")
    } == found


BOTH_WAYS = pytest.mark.parametrize(
    "refuses_pidfd_getfd", [False, True], ids=["takes the socket", "makes another"]
)
STREAM, CLOEXEC, NONBLOCK = 1, 0o2000000, 0o4000
SOCKETS = {
    "an address of its own": ("socket.socket(2, 1).getsockname()[0] == socket.inet_ntoa(V4)", True),
    "likewise of IPv6": (
        "socket.socket(10, 1).getsockname()[0] == '::ffff:' + socket.inet_ntoa(V6)",
        True,
    ),
    "a datagram": ("-raw('socket', 2, 2, 0)", errno.ESOCKTNOSUPPORT),
    "UDP over a stream": ("-raw('socket', 2, 1, 17)", errno.ESOCKTNOSUPPORT),
    "SCTP": ("-raw('socket', 10, 1, 132)", errno.ESOCKTNOSUPPORT),
    "TCP by its number": ("raw('socket', 2, 1, 6) > 2", True),
    "flags: none": ("(lambda fd: (os.get_inheritable(fd), os.get_blocking(fd)))(raw('socket', 2, 1, 0))",
                    [True, True]),
    "flags: close": (
        f"(lambda fd: (os.get_inheritable(fd), os.get_blocking(fd)))(raw('socket', 2, {1 | CLOEXEC}, 0))",
        [False, True],
    ),
    "flags: do not wait": (
        f"(lambda fd: (os.get_inheritable(fd), os.get_blocking(fd)))(raw('socket', 10, {1 | NONBLOCK}, 0))",
        [True, False],
    ),
    "a Unix socket": ("socket.socket(1, 1).family == 1", True),
}  # fmt: skip


@pytest.mark.anyone
def test_sockets_of_the_internet_are_made_by_the_agent(tmp_path: Path) -> None:
    expect(SOCKETS, tmp_path)


BINDS = {
    "helpers": ("do def bound(family, at):\n s = socket.socket(family, 1)\n s.bind(at)\n return s", 0),
    **{
        f"own {address}": (f"bound(2, ({address!r}, 0)).getsockname()[0] == socket.inet_ntoa(V4)", True)
        for address in ("127.0.0.1", "0.0.0.0", "127.0.0.53", "127.255.255.255")
    },
    **{
        f"own {address}": (
            f"bound(10, ({address!r}, 0)).getsockname()[0] == '::ffff:' + socket.inet_ntoa(V6)",
            True,
        )
        for address in ("::", "::1", "::ffff:127.0.0.1")
    },
    **{
        f"other {address}": (f"number(bound, 2, ({address!r}, 0))", errno.EADDRNOTAVAIL)
        for address in ("128.0.0.1", "126.255.255.255", "10.0.0.1", "255.255.255.255")
    },
    **{
        f"other {address}": (f"number(bound, 10, ({address!r}, 0))", errno.EADDRNOTAVAIL)
        for address in ("::2", "fe80::1", "2001:db8::1", "::ffff:10.0.0.1")
    },
    "the resolver": ("number(bound, 2, ('127.0.0.53', 53))", errno.EADDRINUSE),
    "the resolver of IPv6": ("number(bound, 10, ('::ffff:127.0.0.53', 53))", errno.EADDRINUSE),
    "its address, another port": ("number(bound, 2, ('127.0.0.53', 54))", 0),
    "its port, another address": ("number(bound, 2, ('127.0.0.1', 53))", 0),
    "a port of the root's": ("number(bound, 2, ('127.0.0.1', 80))", 0),
    "the one of IPv6 for IPv4": ("-raw('bind', fd(2), inet6('::1', 0), 24)", errno.EAFNOSUPPORT),
    "short of IPv4": ("-raw('bind', fd(2), inet('127.0.0.1', 0), 15)", errno.EINVAL),
    "enough of IPv4": ("raw('bind', fd(2), inet('127.0.0.1', 0), 16)", 0),
    "short of IPv6": ("-raw('bind', fd(10), inet6('::1', 0), 23)", errno.EINVAL),
    "enough of IPv6": ("raw('bind', fd(10), inet6('::1', 0), 24)", 0),
    "no address": ("-raw('bind', fd(2), inet('127.0.0.1', 0), 0)", errno.EINVAL),
    "half a family": ("-raw('bind', fd(2), inet('127.0.0.1', 0), 1)", errno.EINVAL),
    "a long address": (
        "-raw('bind', fd(2), inet('127.0.0.1', 0) + bytes(200), 129)",
        errno.EINVAL,
    ),
    "the longest address": (
        "raw('bind', fd(2), inet('127.0.0.1', 0) + bytes(200), 128)",
        0,
    ),
    "a negative length": ("-raw('bind', fd(2), inet('127.0.0.1', 0), -1)", errno.EINVAL),
    "no memory": ("-raw('bind', fd(2), 8, 16)", errno.EFAULT),
    "a file": ("-raw('bind', os.open('/dev/null', 0), inet('127.0.0.1', 0), 16)", errno.ENOTSOCK),
    "twice": ("(lambda s: (s.bind(('', 0)), number(s.bind, ('', 0)))[1])(socket.socket(2, 1))", errno.EINVAL),
    "reused": (
        "do one = bound(2, ('', 8000)); one.listen(); two = bound(2, ('', 8001)); two.listen()", 0,
    ),
    "reused: other ports": ("one.getsockname()[1] != two.getsockname()[1]", True),
    "reused: taken": ("number(bound, 2, ('', 8000))", errno.EADDRINUSE),
    "there": (f"do os.chdir(place); os.umask(0o{0o027:o})", 0),
    "a path": ("(bound(1, 'own').getsockname(), oct(os.stat('own').st_mode))", ["own", "0o140750"]),
    "it stays closed on exec": ("bound(2, ('', 0)).get_inheritable()", False),
    "it stays open on exec": (
        "(lambda s: (s.set_inheritable(True), s.bind(('', 0)), s.get_inheritable())[2])(socket.socket(2, 1))",
        True,
    ),
    "a path, again": ("number(bound, 1, 'own')", errno.EADDRINUSE),
    "no name": ("bound(1, '').getsockname() != ''", True),
    "an abstract name": ("number(bound, 1, chr(0) + 'ringfence-test')", errno.EACCES),
    "a newline": ("number(bound, 1, 'x' + chr(10) + 'y')", errno.EACCES),
}  # fmt: skip


@pytest.mark.anyone
@BOTH_WAYS
def test_what_is_bound_and_what_is_not(tmp_path: Path, refuses_pidfd_getfd: bool) -> None:
    """The agent looks at the address alone, and serves by addresses of the sandbox's own."""
    wanted = dict(BINDS)
    if refuses_pidfd_getfd:
        del wanted["twice"]  # it is another socket each time
        wanted["the one of IPv6 for IPv4"] = (wanted["the one of IPv6 for IPv4"][0], 0)  # likewise
    expect(wanted, tmp_path, refuses_pidfd_getfd=refuses_pidfd_getfd)


@pytest.mark.anyone
def test_a_socket_of_another_kind_than_its_address_is_refused(tmp_path: Path) -> None:
    attempts = {
        "bind: IPv4 at a path": ("-raw('bind', fd(2), b'\\1\\0x\\0', 4)", errno.EAFNOSUPPORT),
        "bind: Unix at a port": ("-raw('bind', fd(1), inet('127.0.0.1', 0), 16)", errno.EINVAL),
        "bind: IPv6 at IPv4": ("-raw('bind', fd(10), inet('127.0.0.1', 0), 16)", errno.EAFNOSUPPORT),
        "connect: IPv4 to a path": (
            "-raw('connect', fd(2), b'\\1\\0x\\0', 4)", errno.EAFNOSUPPORT),
        "connect: Unix to a port": (
            "-raw('connect', fd(1), inet('127.0.0.1', 1), 16)", errno.EINVAL),
        "connect: to no family": ("-raw('connect', fd(2), bytes(16), 16)", errno.EAFNOSUPPORT),
        "connect: no descriptor": ("-raw('connect', 999, inet('127.0.0.1', 1), 16)", errno.EBADF),
        "connect: short": ("-raw('connect', fd(2), inet('127.0.0.1', 1), 15)", errno.EINVAL),
    }  # fmt: skip
    expect(attempts, tmp_path)


SERVES = (
    "do def served(family, address):\n s = socket.socket(family, 1)\n s.bind(address)\n s.listen()\n return s\n"
    "def to(family, *address):\n s = socket.socket(family, 1)\n s.connect(address)\n return s\n"
    "def heard(server, client):\n"
    " with server.accept()[0] as other: other.sendall(b'hello')\n return client.recv(9).decode()"
)


@pytest.mark.anyone
@BOTH_WAYS
@pytest.mark.parametrize("asks_kernel", [True, False], ids=["by sock_diag", "by /proc/net"])
def test_a_server_inside_is_reached_at_the_port_that_it_chose(
    tmp_path: Path, refuses_pidfd_getfd: bool, asks_kernel: bool
) -> None:
    """By each loopback address; one of IPv6 by IPv4 as well, but not the other way round."""
    attempts = {
        "helpers": (SERVES, 0),
        "v4": ("do four = served(2, ('', 8004)); six = served(10, ('::', 8006))", 0),
        "by 127.0.0.1": ("heard(four, to(2, '127.0.0.1', 8004))", "hello"),
        "by 127.9.9.9": ("heard(four, to(2, '127.9.9.9', 8004))", "hello"),
        "by 0.0.0.0": ("heard(four, to(2, '0.0.0.0', 8004))", "hello"),
        "by its real port": ("heard(four, to(2, '127.0.0.1', four.getsockname()[1]))", "hello"),
        "by a mapped address": ("heard(four, to(10, '::ffff:127.0.0.1', 8004))", "hello"),
        "by ::1": ("number(to, 10, '::1', 8004)", errno.ECONNREFUSED),
        "six by ::1": ("heard(six, to(10, '::1', 8006))", "hello"),
        "six by ::": ("heard(six, to(10, '::', 8006))", "hello"),
        "six by IPv4": ("heard(six, to(2, '127.0.0.1', 8006))", "hello"),
        "no port": ("(served(2, ('', 0)), number(to, 2, '127.0.0.1', 0))[1]", errno.ECONNREFUSED),
        "one that does not listen": (
            "(lambda s: (s.bind(('', 8009)), number(to, 2, '127.0.0.1', 8009))[1])(socket.socket(2, 1))",
            errno.ECONNREFUSED,
        ),
        "a server of the host": ("number(to, 2, '127.0.0.1', host_port)", errno.ECONNREFUSED),
        "elsewhere": ("number(to, 2, '10.0.0.1', 80)", errno.ENETUNREACH),
        "elsewhere by IPv6": ("number(to, 10, '2001:db8::1', 80)", errno.ENETUNREACH),
        "the resolver": ("number(to, 2, '127.0.0.53', 53)", errno.ECONNREFUSED),
        "it waits as before": ("to(2, '127.0.0.1', 8004).gettimeout() is None", True),
        "blocking": (
            "(lambda s: (s.connect(('127.0.0.1', 8004)), os.get_blocking(s.fileno()))[1])(socket.socket(2, 1))",
            True,
        ),
        "not blocking": (
            ("(lambda s: (s.setblocking(False), s.connect(('', 8004)), os.get_blocking(s.fileno()))[2])"
            "(socket.socket(2, 1))"),
            False,
        ),
        "ended": ("do four.close()", 0),
        "one that has ended": ("number(to, 2, '127.0.0.1', 8004)", errno.ECONNREFUSED),
        "its socket": (
            "(lambda s: (number(s.connect, ('127.0.0.1', 8004)), number(s.getpeername)))(socket.socket(2, 1))",
            [errno.ECONNREFUSED, errno.ENOTCONN],
        ),
    }  # fmt: skip
    expect(attempts, tmp_path, refuses_pidfd_getfd=refuses_pidfd_getfd, asks_kernel=asks_kernel)


@pytest.mark.anyone
def test_a_server_that_ends_meanwhile_is_not_taken_for_the_one_that_takes_its_port(
    tmp_path: Path,
) -> None:
    """It listened when the agent looked, and somebody of the host may have been connected to."""
    attempts = {
        "helpers": SERVES,
        "server": "do four = served(2, ('', 8004)); s = socket.socket(2, 1)",
        "connected": "[number(s.connect, ('127.0.0.1', 8004)), number(s.getpeername)]",
    }
    before = (
        "listens = [True, False]\n"
        "agent._listens = lambda family, real: real != 8004 and listens.pop(0)\n"
    )
    found = answers(tmp_path, attempts, before=before)

    assert {"connected": [errno.ECONNREFUSED, errno.ENOTCONN]} == found


@pytest.mark.anyone
@pytest.mark.parametrize(
    "first", [[errno.EINTR], [errno.EINPROGRESS, errno.EINPROGRESS], [errno.EALREADY, errno.EINTR]]
)
def test_a_connection_that_is_not_decided_at_once_is_waited_for(
    tmp_path: Path, first: list[int]
) -> None:
    """The agent's own timer interrupts it, not a signal to the caller."""
    attempts = {
        "helpers": SERVES,
        "server": "do four = served(2, ('', 8004))",
        "heard": "heard(four, to(2, '127.0.0.1', 8004))",
    }
    before = (
        "connect, first = on_behalf.connect, order['first']\n"
        "on_behalf.connect = lambda *given: first.pop(0) if first else connect(*given)\n"
    )

    assert {"heard": "hello"} == answers(tmp_path, attempts, before=before, first=first)


@pytest.mark.anyone
def test_a_port_of_a_socket_made_anew_can_be_taken_again(tmp_path: Path) -> None:
    attempts = {
        "reused": "(lambda s: (s.bind(('', 0)), s.getsockopt(1, 2))[1])(socket.socket(2, 1))"
    }

    assert {"reused": 1} == answers(tmp_path, attempts, refuses_pidfd_getfd=True)


TURNS = {
    "loopback": [["127.0.0.1/32", 80, 90], ["127.0.0.53/32", 53, 53]],
    "others": [["10.0.0.0/8", 443, 443], ["192.168.0.0/23", 1, 65535], ["2001:db8::/33", 443, 443]],
}
LEADS = {
    ("127.0.0.1", 79): errno.ECONNREFUSED,
    ("127.0.0.1", 80): 0,
    ("127.0.0.1", 90): 0,
    ("127.0.0.1", 91): errno.ECONNREFUSED,
    ("127.0.0.2", 80): errno.ECONNREFUSED,
    ("10.0.0.0", 443): 0,
    ("10.255.255.255", 443): 0,
    ("10.0.0.1", 442): errno.ENETUNREACH,
    ("10.0.0.1", 444): errno.ENETUNREACH,
    ("11.0.0.0", 443): errno.ENETUNREACH,
    ("9.255.255.255", 443): errno.ENETUNREACH,
    ("192.168.1.255", 65535): 0,
    ("192.168.2.0", 1): errno.ENETUNREACH,
    ("198.51.100.1", 53): errno.ENETUNREACH,
    ("2001:db8:7fff::1", 443): 0,
    ("2001:db8:8000::1", 443): errno.ENETUNREACH,
    ("2001:db8::1", 80): errno.ENETUNREACH,
    ("::ffff:10.0.0.1", 443): 0,
    ("::1", 80): errno.ECONNREFUSED,
}


@pytest.mark.anyone
@BOTH_WAYS
def test_what_may_be_allowed_goes_to_the_egress_process_with_its_name(
    tmp_path: Path, refuses_pidfd_getfd: bool
) -> None:
    """Both sides of each bound. A name server at another loopback address is the sandbox's resolver."""
    to = "number(lambda: socket.socket({}, 1).connect(({!r}, {})))"
    attempts = {
        f"{host} {port}": to.format(10 if ":" in host else 2, host, port) for host, port in LEADS
    }
    for host in ("127.0.0.53", "127.0.0.1", "127.0.0.11"):
        attempts[f"{host} 53"] = to.format(2, host, 53)
    found = answers(
        *(tmp_path, attempts, "results['told'] = told()"),
        way=TURNS,
        refuses_pidfd_getfd=refuses_pidfd_getfd,
    )
    told = found.pop("told")

    wanted = {f"{host} {port}": number for (host, port), number in LEADS.items()}
    wanted |= dict.fromkeys(("127.0.0.53 53", "127.0.0.1 53", "127.0.0.11 53"), 0)
    assert wanted == found
    reached = [
        (host if ":" in host else f"::ffff:{host}", port)
        for (host, port), number in LEADS.items()
        if not number
    ]
    reached += [("::ffff:127.0.0.53", 53)] * 3
    assert [["t" * 16, host, port, 34] for host, port in reached] == told


@pytest.mark.anyone
def test_a_connection_that_cannot_say_whom_it_is_for_is_refused(tmp_path: Path) -> None:
    attempts = {"it": "number(lambda: socket.socket(2, 1).connect(('10.0.0.1', 443)))"}
    before = (
        "reach = agent._reach\n"
        "def reach_and_end(sock, target):\n"
        " number = reach(sock, target); sock.shutdown(1); return number\n"
        "agent._reach = reach_and_end\n"
    )
    found = answers(tmp_path, attempts, before=before, way=TURNS)

    assert {"it": errno.ECONNREFUSED} == found


@pytest.mark.anyone
@pytest.mark.parametrize("is_scoped", [True, False])
@BOTH_WAYS
def test_unix_sockets_are_reached_below_the_sandboxs_directories_alone(
    tmp_path: Path, is_scoped: bool, refuses_pidfd_getfd: bool
) -> None:
    """Whatever name leads there. Abstract names are Landlock's where it can keep the agent from them."""
    at = "number(lambda: socket.socket(1, 1).connect({}))"
    attempts = {
        "there": ("do os.chdir(place)", 0),
        "its own": (at.format("place + '/server'"), 0),
        "by a short name": (at.format("'server'"), 0),
        "by its directory": (at.format("f'/proc/self/cwd/server'"), 0),
        "of the host": (at.format("place + '/../host/server'"), errno.EACCES),
        "by a link": (at.format("'out'"), errno.EACCES),
        "beside, of a name that begins alike": (at.format("'../place-beside/server'"), errno.EACCES),
        "absent": (at.format("'absent'"), errno.ENOENT),
        "a file": (at.format("'file'"), errno.ECONNREFUSED),
        "abstract": (at.format("chr(0) + order['abstract']"), 0 if is_scoped else errno.ECONNREFUSED),
        "no name": ("-raw('connect', fd(1), b'\\1\\0', 2)",
                    errno.EINVAL if is_scoped else errno.ECONNREFUSED),
    }  # fmt: skip
    expect(attempts, tmp_path, is_scoped=is_scoped, refuses_pidfd_getfd=refuses_pidfd_getfd)


@pytest.mark.anyone
def test_the_agent_dials_servers_inside_and_none_of_the_host(tmp_path: Path) -> None:
    """What cannot be dialled leaves no descriptor."""
    after = (
        "four = on_behalf.socket(2, 1, KEY); assert not on_behalf.bind(four, agent._own(2, 0), KEY)\n"
        "four = socket.socket(fileno=four); four.listen()\n"
        "six = socket.socket(fileno=on_behalf.socket(10, 1, KEY))\n"
        "six.setsockopt(41, 26, 0)\n"
        "assert not on_behalf.bind(six.fileno(), agent._own(10, 0), KEY); six.listen()\n"
        "agent._ports.update({(2, 8004): four.getsockname()[1], (10, 8006): six.getsockname()[1]})\n"
        "before = os.listdir('/proc/self/fd')\n"
        "def dialled(version, port, server):\n"
        " fd = agent.dial(version, port)\n"
        " server.accept()[0].close(); os.close(fd); return 0\n"
        "results['4'] = [number(dialled, version, 8004, four) for version in (4,)]\n"
        "results['6'] = [number(dialled, version, 8006, six) for version in (4, 6)]\n"
        "results['none'] = [number(agent.dial, *each) for each in\n"
        " ((4, 8009), (6, 8004), (4, host_port), (6, 8009))]\n"
        "results['left'] = before == os.listdir('/proc/self/fd')\n"
    )
    found = answers(tmp_path, {"nothing": "0"}, after)

    refused = errno.ECONNREFUSED
    assert {"nothing": 0, "4": [0], "6": [0, 0], "none": [refused] * 4, "left": True} == found


@pytest.mark.anyone
@pytest.mark.parametrize("asks_kernel", [True, False], ids=["by sock_diag", "by /proc/net"])
@pytest.mark.parametrize("family", [2, 10])
def test_a_connection_of_a_server_that_has_ended_is_no_server(
    tmp_path: Path, family: int, asks_kernel: bool
) -> None:
    """One of the host's, at every address, would be connected to in its place."""
    after = (
        f"family, made = {family}, lambda: socket.socket(fileno=on_behalf.socket({family}, 1, KEY))\n"
        "server, client = made(), made()\n"
        "if family == 10: [each.setsockopt(41, 26, 0) for each in (server, client)]\n"
        "assert not on_behalf.bind(server.fileno(), agent._own(family, 0), KEY)\n"
        "port = server.getsockname()[1]; found = [agent._listens(family, port)]\n"
        "server.listen(); found.append(agent._listens(family, port))\n"
        "assert not on_behalf.connect(client.fileno(), agent._own(family, port), KEY)\n"
        "other, _ = server.accept(); server.close()\n"
        "results['found'] = [*found, agent._listens(family, port)]\n"
    )
    found = answers(tmp_path, {"nothing": "0"}, after, asks_kernel=asks_kernel)

    assert {"nothing": 0, "found": [False, True, False]} == found


CHANGES = {
    "there": ("do os.chdir(place); secret = place + '/../host/file'", 0),
    **{
        f"{name}, own": (code.format("'file'"), 0)
        for name, code in (
            ("mode", "number(os.chmod, {}, 0o640)"),
            ("owner", "number(os.chown, {}, -1, -1)"),
            ("owner of a link", "number(os.lchown, {}, -1, -1)"),
            ("times", "number(os.utime, {}, (5, 5))"),
            ("times, now", "number(os.utime, {})"),
            ("by a descriptor", "number(os.fchmod, os.open({}, 0), 0o640)"),
            ("owner by a descriptor", "number(os.fchown, os.open({}, 0), -1, -1)"),
            ("times by a descriptor", "number(os.utime, os.open({}, 0), (5, 5))"),
            ("by a link of /proc", "number(lambda: os.chmod('/proc/self/fd/%d' % os.open({}, 0), 0o640))"),
            ("beside a directory", "number(lambda: os.chmod({}, 0o640, dir_fd=os.open('.', 0)))"),
        )
    },
    **{
        f"{name}, {at}": (code.format(where), errno.EPERM)
        for at, where in (("outside", "secret"), ("beside", "'../place-beside/file'"), ("by a link", "'link'"))
        for name, code in (
            ("mode", "number(os.chmod, {}, 0o777)"),
            ("owner", "number(os.chown, {}, -1, -1)"),
            ("times", "number(os.utime, {}, (5, 5))"),
            ("times, now", "number(os.utime, {})"),
            ("by a descriptor", "number(os.fchmod, os.open({}, 0), 0o777)"),
            ("owner by a descriptor", "number(os.fchown, os.open({}, 0), -1, -1)"),
            ("times by a descriptor", "number(os.utime, os.open({}, 0), (5, 5))"),
            ("by a link of /proc", "number(lambda: os.chmod('/proc/self/fd/%d' % os.open({}, 0), 0o777))"),
        )
    },
    "the link itself": ("number(lambda: os.chown('link', -1, -1, follow_symlinks=False))", 0),
    "the link itself, by its name": ("number(os.lchown, 'link', -1, -1)", 0),
    "times of the link itself": ("number(lambda: os.utime('link', (5, 5), follow_symlinks=False))", 0),
    "a strange flag": ("-raw('fchownat', -100, b'file', -1, -1, 0x800)", errno.EINVAL),
    "no name": ("-raw('fchownat', -100, b'', -1, -1, 0)", errno.ENOENT),
    "no name, of the directory": ("raw('fchownat', os.open('.', 0), b'', -1, -1, 0x1000)", 0),
    "no descriptor": ("-raw('fchmod', 999, 0o600)", errno.EBADF),
    "no memory": ("-raw('fchownat', -100, 8, -1, -1, 0)", errno.EFAULT),
    "no such": ("-raw('fchownat', -100, b'absent', -1, -1, 0)", errno.ENOENT),
    "a long name": ("-raw('fchownat', -100, b'a' * 5000, -1, -1, 0)", errno.ENAMETOOLONG),
    **{
        f"own descriptor by {where}": (f"number(lambda: os.chmod('{where}/%d' % os.open('file', 0), 0o640))", 0)
        for where in ("/proc/thread-self/fd", "/dev/fd")
    },
    "the link of a descriptor, not its file": (
        ("(number(lambda: os.utime('/proc/self/fd/%d' % os.open('file', 0), (7, 7), follow_symlinks=False)), "
         "os.stat('file').st_mtime)"),
        [errno.EPERM, 5.0],
    ),
    "a descriptor of none": ("number(os.chmod, '/proc/self/fd/' + '9' * 9, 0o600)", errno.EBADF),
    "a number of no descriptor": ("number(os.chmod, '/proc/self/fd/' + '9' * 10, 0o600)", errno.ENOENT),
    "its root": ("number(os.chmod, place, 0o755)", 0),
    "mode now": ("os.stat('file').st_mode & 0o777", 0o640),
}  # fmt: skip


@pytest.mark.anyone
def test_metadata_changes_below_the_sandboxs_directories_alone(tmp_path: Path) -> None:
    expect(CHANGES, tmp_path)

    for name in ("host", "place-beside"):
        info = (tmp_path / name / "file").stat()
        assert (0o644, 1000) == (stat.S_IMODE(info.st_mode), info.st_mtime)


@pytest.mark.root
def test_a_file_is_given_to_the_user_and_the_group_that_are_named(tmp_path: Path) -> None:
    found = "[os.lstat({0!r}).st_uid, os.lstat({0!r}).st_gid]"
    given = {
        "chown": ("os.chown('file', 5, 6)", "file", [5, 6]),
        "fchown": ("os.fchown(os.open('file', 0), 7, -1)", "file", [7, 6]),
        "lchown": ("os.lchown('link', 8, 9)", "link", [8, 9]),
        "fchownat": ("os.chown('file', -1, 4, dir_fd=os.open('.', 0))", "file", [7, 4]),
    }
    attempts: dict[str, tuple[str, Any]] = {"there": ("do os.chdir(place)", 0)}
    for name, (code, path, wanted) in given.items():
        attempts[name] = (f"({code}, {found.format(path)})[1]", wanted)
    expect(attempts, tmp_path)


@pytest.mark.rootless
def test_what_the_agent_may_not_look_at_is_not_permitted(tmp_path: Path) -> None:
    """EPERM is what these calls are known to say, and EACCES of a path means another thing."""
    (tmp_path / "closed").mkdir(mode=0)
    attempts = {"closed": ("number(os.chmod, place + '/../closed/file', 0o600)", errno.EPERM)}
    expect(attempts, tmp_path)


MEMORY = {
    "helpers": (
        ("do CREATE, EXCL, NOFOLLOW = os.O_CREAT, os.O_EXCL, os.O_NOFOLLOW\n"
        "NEW = CREATE | EXCL | NOFOLLOW | os.O_RDWR\n"
        "def made(name, flags, mode=0o666): return os.open('/dev/shm/' + name, flags, mode)\n"
        "os.umask(0o027); os.chdir(place)"),
        0,
    ),
    "made": (("(lambda fd: (os.write(fd, b'x'), oct(os.stat(fd).st_mode), os.get_blocking(fd), "
             "os.readlink('/proc/self/fd/%d' % fd) == place + '/own'))(made('own', NEW))"),
             [1, "0o100640", True, True]),
    "again": ("number(made, 'own', CREATE | EXCL | os.O_RDWR)", errno.EEXIST),
    "found": ("os.read(made('own', NOFOLLOW | os.O_RDONLY), 9).decode()", "x"),
    "closed on exec": (("[os.get_inheritable(raw('openat', -100, b'/dev/shm/own', NOFOLLOW | flag, 0)) "
                       "for flag in (0, os.O_CLOEXEC)]"), [True, False]),
    "absent": ("number(made, 'absent', NOFOLLOW | os.O_RDWR)", errno.ENOENT),
    "a link": ("number(made, 'link', NOFOLLOW | os.O_RDWR)", errno.ELOOP),
    "a directory": ("(os.mkdir('d'), number(made, 'd', NOFOLLOW))[1]", errno.EINVAL),
    "a pipe": ("(os.mkfifo('p'), number(made, 'p', NOFOLLOW))[1]", errno.EINVAL),
    "setuid is dropped": ("oct(os.stat(made('s', CREATE | EXCL | os.O_RDWR, 0o6777)).st_mode)", "0o100750"),
    **{
        f"not a name: {name}": (f"number(made, {name!r}, NOFOLLOW | os.O_RDONLY)", number)
        for name, number in (("../host/file", errno.ENOENT), ("ringfence/absent", errno.ENOENT))
    },
    "linked": ("(os.link('/dev/shm/own', '/dev/shm/two'), os.path.exists('two'))[1]", True),
    "linked out": ("number(os.link, '/dev/shm/own', place + '/three')", errno.EXDEV),
    "unlinked": ("(os.unlink('/dev/shm/two'), os.path.exists('two'))[1]", False),
    "unlinked again": ("number(os.unlink, '/dev/shm/two')", errno.ENOENT),
    "other names": ("(os.link('own', 'four'), os.unlink('four'))[1]", None),
}  # fmt: skip


@pytest.mark.anyone
def test_shared_memory_by_name_is_in_a_directory_of_the_sandboxs(tmp_path: Path) -> None:
    before = os.listdir("/dev/shm")
    expect(MEMORY, tmp_path)

    assert sorted(before) == sorted(os.listdir("/dev/shm"))


MIB = 1 << 20
SEGMENTS = {
    "get": ("do def get(key, size, flags=0o1600): return raw('shmget', key, size, flags)", 0),
    "made": ("do one = get(77, 4096); buffer = ctypes.create_string_buffer(200)", 0),
    "found": ("(one >= 0, get(77, 0, 0) == one, get(77, 4096, 0) == one)", [True, True, True]),
    "larger": ("-get(77, 4097, 0)", errno.EINVAL),
    "exclusive": ("-get(77, 1, 0o3600)", errno.EEXIST),
    "exclusive alone is no creation": ("get(77, 1, 0o2600) == one", True),
    "absent": ("-get(78, 1, 0)", errno.ENOENT),
    "private": ("get(0, 4096, 0) not in (one, get(0, 4096, 0))", True),
    "empty": ("-get(0, 0)", errno.EINVAL),
    "status": ("raw('shmctl', one, 2, buffer)", 0),
    "attached": ("raw('shmat', one, 0, 0) > 0", True),
    "set": ("-raw('shmctl', one, 1, buffer)", errno.EPERM),
    "locked": ("-raw('shmctl', one, 11, 0)", errno.EPERM),
    "any": ("[-raw('shmctl', 0, order, buffer) for order in (3, 13, 14, 15)]", [errno.EINVAL] * 4),
    "of another": (
        "[-raw('shmat', one + 1000, 0, 0), -raw('shmctl', one + 1000, 2, buffer)]",
        [errno.EINVAL] * 2,
    ),
    "removed": ("raw('shmctl', one, 0, 0)", 0),
    "removed again": ("-raw('shmctl', one, 0, 0)", errno.EINVAL),
    "its key": ("-get(77, 0, 0)", errno.ENOENT),
    "too large": (f"-get(0, {64 * MIB - 2 * 4096 + 1})", errno.ENOSPC),
    "just large enough": (f"get(0, {64 * MIB - 2 * 4096}) >= 0", True),
    "full": ("-get(0, 1)", errno.ENOSPC),
}


@pytest.mark.anyone
def test_segments_of_system_v_are_those_of_the_sandbox(tmp_path: Path) -> None:
    expect(SEGMENTS, tmp_path)


@pytest.mark.anyone
def test_segments_are_sixty_four_at_most(tmp_path: Path) -> None:
    attempts = {
        "ids": "do ids = [raw('shmget', 0, 1, 0o1600) for _ in range(66)]",
        "made": "sum(each >= 0 for each in ids)",
        "refused": "[-each for each in ids[63:]][1:]",
        "removed": "raw('shmctl', ids[0], 0, 0)",
        "again": "raw('shmget', 0, 1, 0o1600) >= 0",
    }
    after = "results['held'] = sum('/SYSV' in each for each in open('/proc/self/maps'))"
    found = answers(tmp_path, attempts, after)

    assert 64 == found.pop("held"), "the agent stays attached to each until it is removed"
    assert {"made": 64, "refused": [errno.ENOSPC] * 2, "removed": 0, "again": True} == found


@pytest.mark.anyone
def test_only_threads_of_the_sandbox_can_be_looked_at(tmp_path: Path) -> None:
    attempts = {
        "its own": ("number(os.sched_getaffinity, os.getpid())", 0),
        "itself": ("number(os.sched_getaffinity, 0)", 0),
        "its own, in the lower half": (
            "raw('sched_getscheduler', os.getpid() | 7 << 32) >= 0",
            True,
        ),
        "the agent": ("number(os.sched_getaffinity, os.getppid())", errno.EPERM),
        "the first": ("number(os.sched_getscheduler, 1)", errno.EPERM),
        "its interval": ("number(os.sched_rr_get_interval, os.getppid())", errno.EPERM),
        "its parameters": ("number(os.sched_getparam, os.getppid())", errno.EPERM),
    }
    expect(attempts, tmp_path)


FORK = "do def forked():\n pid = os.fork()\n if pid == 0: os._exit(0)\n os.waitpid(pid, 0)"


@pytest.mark.anyone
@pytest.mark.parametrize(("most", "held", "room"), [(6, 3, 3), (4, 3, 1), (3, 3, 0), (2, 3, 0)])
def test_as_many_forks_as_there_is_room_for(
    tmp_path: Path, most: int, held: int, room: int
) -> None:
    """Counted anew only when there is none left: processes that end meanwhile make no room before."""
    attempts = {
        "helpers": FORK,
        "numbers": "[number(forked) for _ in range(5)]",
    }
    body = (
        "asked = []\n"
        "forks._count = lambda: asked.append(1) or (order['held'] if len(asked) < 2 else 1000)\n"
    )
    found = answers(tmp_path, attempts, most=most, held=held, before=body)

    assert {"numbers": [0] * room + [errno.EAGAIN] * (5 - room)} == found


@pytest.mark.anyone
def test_processes_that_have_ended_make_room_once_there_is_none_left(tmp_path: Path) -> None:
    attempts = {"helpers": FORK, "numbers": "[number(forked) for _ in range(5)]"}
    body = (
        "counts = [3, 3, 4, 5, 2]\nforks._count = lambda: counts.pop(0) if counts else 1000\n"
        "forks._room = 1\n"
    )
    found = answers(tmp_path, attempts, most=4, before=body)

    no = errno.EAGAIN
    assert {"numbers": [0, 0, no, no, 0]} == found, "the caller has taken the room that there was"


@pytest.mark.anyone
def test_a_question_that_is_gone_is_answered_by_nobody(tmp_path: Path) -> None:
    """Its caller has ended, or was interrupted: the agent goes on with the next."""
    after = "questions.fd = os.pipe()[0]; results['gone'] = questions.serve_one()"

    assert {"nothing": 0, "gone": None} == answers(tmp_path, {"nothing": "0"}, after)


@pytest.mark.anyone
def test_forks_of_the_agent_itself_take_room(tmp_path: Path) -> None:
    attempts = {"helpers": FORK, "numbers": "[number(forked) for _ in range(4)]"}
    body = "forks._room, forks._count = 3, lambda: 1000\n"
    found = answers(tmp_path, attempts, most=100, before=body)

    assert {"numbers": [0, 0, errno.EAGAIN, errno.EAGAIN]} == found, "one of three is the caller"


@pytest.mark.anyone
def test_nothing_is_changed_for_a_caller_that_waits_no_longer(tmp_path: Path) -> None:
    """Its number may be another thread's by then, whose memory or descriptors were looked at."""
    gone = {
        "mode": "-raw('fchmodat', -100, b'file', 0o600)",
        "owner": "-raw('fchownat', -100, b'file', -1, -1, 0)",
        "times": "-raw('utimensat', -100, b'file', 0, 0)",
        "made": f"-raw('openat', -100, b'/dev/shm/new', {os.O_CREAT | os.O_EXCL | os.O_RDWR}, 0o600)",
        "linked": "number(os.link, '/dev/shm/file', '/dev/shm/new')",
        "unlinked": "number(os.unlink, '/dev/shm/file')",
        "connected": "-raw('connect', fd(1), b'\\1\\0server\\0', 9)",
    }
    attempts = {"there": "do os.chdir(place); os.umask(0o022)", **gone}
    found = answers(tmp_path, attempts, before="seccomp.is_waiting = lambda *_: False\n")

    assert dict.fromkeys(gone, errno.EINTR) == found
    info = (tmp_path / "place/file").stat()
    assert (0o644, 1000) == (stat.S_IMODE(info.st_mode), info.st_mtime)
    assert ["file", "link", "out", "server"] == sorted(os.listdir(tmp_path / "place"))
