"""Each layer of the lock-down alone: what stands before it is taken away, and it still refuses.

A layer behind another is otherwise never asked, and nobody would notice that it is gone.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ringfence
from ringfence import Mount, Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.profiles import Profile
from ringfence.linux.landlock import abi_version
from ringfence.linux.privileges import SECUREBITS_LOCKED
from ringfence.model.mount import READ_WRITE
from ringfence.policy import landlock
from tests.features import require
from tests.native.conftest import MakeSandbox
from tests.native.outside import init_pid, new_length, open_fds, pids_with, until

_LISTENER = "anon_inode:seccomp notify"
# Everything off but one; "bare" is the control of each.
NOTHING = {
    "seccomp": False,
    "landlock": False,
    "no_new_privs": False,
    "drop_capabilities": False,
    "forbid_user_namespaces": False,
    "unix_sockets": True,
}
LAYERS = ("seccomp", "landlock", "no_new_privs", "drop_capabilities", "forbid_user_namespaces")
PROFILES = {
    "bare": Profile("bare", **NOTHING),  # type: ignore[arg-type]
    **{name: Profile(name, **{**NOTHING, name: True}) for name in LAYERS},  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackend]:
    """A backend whose profiles are one layer each: profiles are objects, and have no names elsewhere."""
    backend = NativeBackend(
        profiles=PROFILES, state_dir=str(tmp_path_factory.mktemp("snapshots-of-layers"))
    )
    yield backend
    backend.close()


def under(make: MakeSandbox, alone: NativeBackend, name: str, **options: Any) -> Sandbox:
    return make(backend=alone, profile=name, allow_degraded=("*",), **options)


def python(sandbox: Sandbox, code: str, *words: str) -> str:
    """What a script prints, or the number of the error that it ends with."""
    script = (
        "import ctypes, os, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(*words):\n"
        "    if libc.syscall(*words) < 0:\n"
        "        raise OSError(ctypes.get_errno(), '')\n"
        f"try:\n    {code}\nexcept OSError as exc:\n    print(exc.errno)\n"
    )
    result = sandbox.exec(["python3", "-c", script, *words], timeout_s=60.0)
    assert result.ok, result.stderr_text
    return result.stdout_text.strip()


# -- Landlock ----------------------------------------------------------------------------------


@contextmanager
def host_process_inside(sandbox: Sandbox) -> Iterator[int]:
    """A process in the namespaces of a sandbox and with its ids, but under none of its layers."""
    inner: Any = sandbox._inner
    code = (
        "import os, signal, sys\n"
        "from ringfence.linux import namespaces\n"
        "pid, uid = map(int, sys.argv[1:])\n"
        "user, pids = (os.open(f'/proc/{pid}/ns/{name}', os.O_RDONLY) for name in ('user', 'pid'))\n"
        "namespaces.setns(user, namespaces.CLONE_NEWUSER)\n"
        "namespaces.setns(pids, namespaces.CLONE_NEWPID)\n"
        "os.setresgid(uid, uid, uid)\n"
        "os.setresuid(uid, uid, uid)\n"
        "reading, writing = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(reading)\n"
        "    os.write(writing, b'%d' % os.getpid())\n"
        "    signal.pause()\n"
        "os.close(writing)\n"
        "print(os.read(reading, 20).decode(), flush=True)\n"
        "sys.stdin.read()\n"
        "os.kill(child, signal.SIGKILL)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    length = new_length()
    sleeping = sandbox.start(["sleep", length])  # PID 1 lets nobody look at its namespaces
    assert until(lambda: pids_with(length))
    (first,) = pids_with(length)
    source = str(Path(ringfence.__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(first), str(inner.uid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield int(process.stdout.readline())
        process.stdin.close()
    sleeping.kill()


@pytest.fixture
def needs_scopes() -> None:
    require("landlock")
    if abi_version() < 6:
        pytest.skip("this kernel's Landlock has no scopes")


def test_landlock_alone_refuses_what_mounts_would_allow(
    make: MakeSandbox, alone: NativeBackend, private_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was not told that a mount may be written, that is as writable as ever, and refused."""
    require("landlock")
    (private_dir / "file").write_text("kept")
    plan = landlock.plan_landlock

    def told_of_nothing(abi: int, **_: Any) -> landlock.LandlockPlan:
        return plan(abi, writable=["/tmp"])

    monkeypatch.setattr(landlock, "plan_landlock", told_of_nothing)
    actions = {
        "write": "open('/data/file', 'r+').close()",
        "make": "open('/data/new', 'x').close()",
        "directory": "os.mkdir('/data/directory')",
        "link": "os.symlink('x', '/data/link')",
        "socket": "socket.socket(socket.AF_UNIX).bind('/data/socket')",
        "fifo": "os.mkfifo('/data/fifo')",
        "move out": "os.rename('/data/file', '/tmp/file')",
        "remove": "os.remove('/data/file')",
    }
    mounts = [Mount("/data", str(private_dir), READ_WRITE)]
    sandbox = under(make, alone, "landlock", mounts=mounts, unprotect=["all"])
    for action in actions.values():
        assert python(sandbox, action) in ("13", "18"), action
    assert "" == python(sandbox, "open('/tmp/new', 'x').close()")
    assert ["file"] == os.listdir(private_dir)

    control = under(make, alone, "bare", mounts=mounts, unprotect=["all"])
    for name in ("write", "make", "directory", "link", "socket", "fifo", "remove"):
        assert "" == python(control, actions[name]), name


def test_landlock_alone_keeps_abstract_sockets_of_the_host_away(
    make: MakeSandbox, alone: NativeBackend, needs_scopes: None
) -> None:
    """In the host's network, where no namespace does."""
    name = f"ringfence-test-{os.getpid()}"
    connect = "socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        under_it = under(make, alone, "landlock", network="unrestricted")
        assert "1" == python(under_it, connect, name)
        control = under(make, alone, "bare", network="unrestricted")
        assert "" == python(control, connect, name)


def test_landlock_alone_keeps_signals_from_who_is_not_under_it(
    make: MakeSandbox, alone: NativeBackend, needs_scopes: None
) -> None:
    """A helper of the host's that is seen inside: with the same ids, in the same PID namespace."""
    send = f"os.kill(int(sys.argv[1]), {int(signal.SIGCONT)})"
    for name, answer in (("landlock", "1"), ("bare", "")):
        sandbox = under(make, alone, name)
        with host_process_inside(sandbox) as pid:
            assert answer == python(sandbox, send, str(pid)), name


# -- the others ----------------------------------------------------------------------------------


def test_the_filter_alone_refuses_what_an_ordinary_user_may(
    make: MakeSandbox, alone: NativeBackend
) -> None:
    unshare = "call(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)"  # CLONE_NEWUSER
    assert "1" == python(under(make, alone, "seccomp"), unshare)
    assert "" == python(under(make, alone, "bare"), unshare)


def test_the_sysctl_alone_forbids_user_namespaces(make: MakeSandbox, alone: NativeBackend) -> None:
    unshare = "call(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)"
    assert "28" == python(under(make, alone, "forbid_user_namespaces"), unshare)
    assert "" == python(under(make, alone, "bare"), unshare)


STATUS = (
    "print(*sorted({line.split()[1] for line in open('/proc/self/status') if line[:3] == 'Cap'}))"
)


def test_capabilities_are_dropped_alone_and_cannot_come_back(
    make: MakeSandbox, alone: NativeBackend
) -> None:
    """All five sets, and the securebits by which uid 0 would be given them again."""
    bits = "print(libc.prctl(27, 0, 0, 0, 0))"  # PR_GET_SECUREBITS
    kept = under(make, alone, "bare")
    dropped = under(make, alone, "drop_capabilities")
    assert "0" * 16 == python(dropped, STATUS)
    assert str(SECUREBITS_LOCKED) == python(dropped, bits)
    assert "0" * 16 != python(kept, STATUS)
    assert str(SECUREBITS_LOCKED) != python(kept, bits)


def test_no_new_privs_is_set_alone(make: MakeSandbox, alone: NativeBackend) -> None:
    ask = "print(libc.prctl(39, 0, 0, 0, 0))"  # PR_GET_NO_NEW_PRIVS
    assert "1" == python(under(make, alone, "no_new_privs"), ask)
    own = Path("/proc/self/status").read_text().partition("NoNewPrivs:")[2].split()[0]
    assert own == python(under(make, alone, "bare"), ask)


def test_a_hardened_sandbox_has_every_layer(sandbox: Sandbox) -> None:
    """Seen from inside: where one is left out, what stands before it does not hide that."""
    assert "0" * 16 == python(sandbox, STATUS)
    assert "1" == python(sandbox, "print(libc.prctl(39, 0, 0, 0, 0))")
    assert str(SECUREBITS_LOCKED) == python(sandbox, "print(libc.prctl(27, 0, 0, 0, 0))")
    assert "2" == python(sandbox, "print(libc.prctl(21, 0, 0, 0, 0))")  # PR_GET_SECCOMP
    assert "0o22" == python(sandbox, "print(oct(os.umask(0)))")


@pytest.mark.parametrize("link", ["/etc/hostname", "../etc/hostname", "deep/../../etc/hostname"])
def test_a_single_file_is_not_mounted_through_a_link(
    make: MakeSandbox, private_dir: Path, tmp_path: Path, link: str
) -> None:
    """A link in a writable mount leads out of it (CVE-2021-30465); at the start, and into one that runs."""
    (private_dir / "deep").mkdir()
    (private_dir / "planted").symlink_to(link)
    (private_dir / "control").touch()
    (tmp_path / "evil").write_text("evil")
    outer = Mount("/data", str(private_dir), READ_WRITE)

    with pytest.raises(Exception, match="link") as refused:
        make(mounts=[outer, Mount("/data/planted", str(tmp_path / "evil"))])
    assert "invalid_request" == getattr(refused.value, "code", "")

    sandbox = make(mounts=[outer])
    before = sandbox.files.read("/etc/hostname")
    sandbox.shell(f"ln -s {link} /data/late")
    for target in ("/data/planted", "/data/late"):
        with pytest.raises(Exception, match="link") as refused:
            sandbox.mount(Mount(target, str(tmp_path / "evil")))
        assert "invalid_request" == getattr(refused.value, "code", "")
    assert before == sandbox.files.read("/etc/hostname")
    sandbox.mount(Mount("/data/control", str(tmp_path / "evil")))
    assert b"evil" == sandbox.files.read("/data/control")


@pytest.mark.root
def test_pid_1_keeps_nothing_open_of_what_it_was_made_with(
    make: MakeSandbox, private_dir: Path
) -> None:
    """No directory, no setting of the kernel's: one is a way out for whoever gets hold of PID 1."""
    mounts = [Mount("/data", str(private_dir), READ_WRITE), Mount("/more", str(private_dir))]
    for options in ({}, {"mounts": mounts, "deny": ["/data/denied"], "network": ["example.com"]}):
        sandbox = make(**options)
        # It says that it is ready, and closes the rest then.
        assert until(partial(_keeps_only_its_own, sandbox)), _open_names(sandbox)


_TASKS = re.compile(r"/sys/fs/cgroup/(memory|cpu)(/.*)?/tasks")


def _keeps_only_its_own(sandbox: Sandbox) -> bool:
    return _open_names(sandbox) == [
        "/N/oom_score_adj",
        "/dev/null",
        "/dev/null",
        "/dev/null",
        "/memfd:ringfence-hibernation (deleted)",
        "/proc/N/io",
        "anon_inode:[signalfd]",
        "socket:[N]",
    ]


def _open_names(sandbox: Sandbox) -> list[str]:
    """What PID 1 has open, but for its listener and for the cgroups that it moves programs between."""
    found = [name for name in open_fds(init_pid(sandbox)).values() if not _TASKS.fullmatch(name)]
    names = [re.sub(r"[0-9]+", "N", name) for name in found]
    if _LISTENER in names:
        names.remove(_LISTENER)
    return sorted(names)
