"""Every bad input is a typed error that names the field, and nothing has been started by then."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import (
    FileNotFound,
    InvalidRequest,
    RingfenceError,
    SnapshotNotFound,
    Unsupported,
)
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec
from tests.native.callers import Caller
from tests.native.outside import children_of

pytestmark = pytest.mark.anyone

Options = dict[str, Any]

BAD_CREATES: list[tuple[str, Options, type[RingfenceError], str]] = [
    ("unknown backend", {"backend": "no-such"}, InvalidRequest, "backend"),
    ("unknown profile", {"profile": "no_such"}, InvalidRequest, "profile"),
    ("profile not a name", {"profile": "../os_hardened"}, InvalidRequest, "profile"),
    ("unknown template", {"template": "debian"}, InvalidRequest, "template"),
    ("unknown user", {"user": "nobody-knows"}, InvalidRequest, "user"),
    ("user out of range", {"user": "70000"}, InvalidRequest, "user"),
    ("negative user", {"user": -1}, InvalidRequest, "user"),
    ("user a bool", {"user": True}, InvalidRequest, "user"),
    ("unknown tier", {"tier": "medium"}, InvalidRequest, "tier"),
    ("tier of no backend", {"tier": "strong"}, Unsupported, "tier"),
    ("unknown option", {"memroy": "1g"}, InvalidRequest, "memroy"),
    ("id not a name", {"id": "../up"}, InvalidRequest, "id"),
    ("id too long", {"id": "x" * 64}, InvalidRequest, "id"),
    ("relative workdir", {"workdir": "work"}, InvalidRequest, "workdir"),
    ("workdir that climbs", {"workdir": "/a/../b"}, InvalidRequest, "workdir"),
    ("env key with a dash", {"env": {"A-B": "x"}}, InvalidRequest, "env.A-B"),
    ("env key with =", {"env": {"A=B": "x"}}, InvalidRequest, "env.A=B"),
    ("env key that is empty", {"env": {"": "x"}}, InvalidRequest, "env"),
    ("env key that starts with a digit", {"env": {"1A": "x"}}, InvalidRequest, "env.1A"),
    ("env value with NUL", {"env": {"A": "x\0"}}, InvalidRequest, "env.A"),
    ("env value not a string", {"env": {"A": 1}}, InvalidRequest, "env.A"),
    ("env not a mapping", {"env": ["A=1"]}, InvalidRequest, "env"),
    ("ttl of nothing", {"ttl_s": 0}, InvalidRequest, "ttl_s"),
    ("python_env a string", {"python_env": "yes"}, InvalidRequest, "python_env"),
    ("unprotect nothing known", {"unprotect": ["typo"]}, InvalidRequest, "unprotect"),
    ("protect that climbs", {"protect": ["../x"]}, InvalidRequest, "protect[0]"),
    ("relative memory_dir", {"memory_dir": "memory"}, InvalidRequest, "memory_dir"),
    ("missing memory_dir", {"memory_dir": "/no/such"}, InvalidRequest, "memory_dir"),
    ("mounts a string without target", {"mounts": "/tmp"}, InvalidRequest, "mount"),
    ("mounts a number", {"mounts": 5}, InvalidRequest, "mounts"),
    ("mounts of tuples", {"mounts": [("/tmp", "/work")]}, InvalidRequest, "mounts[0]"),
    ("mount with an access unknown", {"mounts": ["/tmp:/work:rx"]}, InvalidRequest, "mount.target"),
    (
        "nothing that may be weaker",
        {"allow_degraded": ["seccomp"]},
        InvalidRequest,
        "allow_degraded[0]",
    ),
    ("backend a number", {"backend": 5}, InvalidRequest, "backend"),
    ("spec and network", {"spec": SandboxSpec(), "network": ["a.test"]}, InvalidRequest, "spec"),
    ("mount without target", {"mounts": ["/tmp"]}, InvalidRequest, "mount"),
    ("mount with an empty target", {"mounts": ["/tmp:"]}, InvalidRequest, "mount"),
    ("missing source", {"mounts": ["/no/such:/work"]}, InvalidRequest, "mounts.source"),
    ("source with NUL", {"mounts": ["/t\0mp:/work"]}, InvalidRequest, "mount"),
    ("spec and parts", {"spec": SandboxSpec(), "user": "root"}, InvalidRequest, "spec"),
    ("limits a number", {"limits": 5}, InvalidRequest, "limits"),
    ("unknown limit", {"limits": {"memory": 1}}, InvalidRequest, "limits.memory"),
    (
        "limit too small for PID 1",
        {"limits": {"open_files": 9}},
        InvalidRequest,
        "limits.open_files",
    ),
    (
        "memory for nobody",
        {"limits": {"memory_bytes": 1 << 20}},
        InvalidRequest,
        "limits.memory_bytes",
    ),
    ("too few inodes", {"limits": {"inodes": 20}}, InvalidRequest, "limits.inodes"),
    ("limit not held", {"limits": {"io_bytes_per_s": 1}}, Unsupported, "limits.io_bytes_per_s"),
]
BAD_TARGETS = [
    "relative", "./x", "", "/", "//", "/a/../b", "/..", "/a\0b", "/proc", "/proc/self", "/sys",
    "/sys/fs/cgroup", "/dev", "/dev/shm", "/usr", "/usr/", "/bin", "/sbin", "/etc", "/lib", "/lib64",
    "/mnt", "/mnt/session", "/" + "x" * 300, "/x" * 3000,
]  # fmt: skip
BAD_LIMITS: list[tuple[str, Any]] = [
    *((name, value) for name in ("wall_time_s", "idle_timeout_s", "cpus")
      for value in (0, -1, -0.5, math.nan, math.inf, -math.inf, True, "soon", 1e30)),
    *((name, value) for name in ("memory_bytes", "pids", "disk_bytes", "inodes", "open_files")
      for value in (0, -1, 1.5, True, "64", math.nan, 2**80)),
    ("output_bytes", -1),
    ("io_bytes_per_s", 0),
    ("network_bytes", -1),
]  # fmt: skip


@pytest.fixture
def started_nothing(tmp_path: Path) -> Iterator[NativeBackend]:
    """A backend that has no child, no cgroup and no sandbox when the test is over."""
    before = children_of(os.getpid())
    backend = NativeBackend(state_dir=str(tmp_path / "state"))

    yield backend

    assert before == children_of(os.getpid()), "a zygote was started"
    assert backend._zygote is None
    assert not (tmp_path / "state").exists()
    backend.close()


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [pytest.param(*rest, id=what) for what, *rest in BAD_CREATES],
)
def test_a_bad_create(
    started_nothing: NativeBackend, options: Options, error: type[RingfenceError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        Sandbox.create(**{"backend": started_nothing, **options})

    assert field == refusal.value.field
    assert str(refusal.value).strip()


@pytest.mark.parametrize("target", BAD_TARGETS)
def test_a_bad_mount_target(started_nothing: NativeBackend, private_dir: Path, target: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Sandbox.create(mounts=[Mount(target, str(private_dir))], backend=started_nothing)
    with pytest.raises(InvalidRequest):
        Sandbox.create(mounts=[f"{private_dir}:{target}:rw"], backend=started_nothing)

    assert "target" == refusal.value.field
    assert [] == os.listdir(private_dir), "a placeholder was made"


@pytest.mark.parametrize(("name", "value"), BAD_LIMITS)
def test_a_bad_limit(started_nothing: NativeBackend, name: str, value: Any) -> None:
    for limits, field in (
        (lambda: Limits(**{name: value}), name),
        (lambda: {name: value}, f"limits.{name}"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            Sandbox.create(limits=limits(), backend=started_nothing)

        assert field == refusal.value.field


def test_a_missing_second_source_leaves_no_placeholder_in_the_first(
    started_nothing: NativeBackend, private_dir: Path
) -> None:
    mounts = [f"{private_dir}:/work:rw", f"{private_dir}/missing:/more:ro"]

    with pytest.raises(InvalidRequest):
        Sandbox.create(mounts=mounts, backend=started_nothing)

    assert [] == os.listdir(private_dir)


def test_a_symlink_in_the_way_of_a_protected_path(private_dir: Path) -> None:
    """It could be pointed elsewhere at any time: naming it protects nothing."""
    (private_dir / "real").mkdir()
    (private_dir / "link").symlink_to("real")

    for path in ("link", "link/settings"):
        with pytest.raises(InvalidRequest) as refusal:
            Sandbox.create(mounts=[f"{private_dir}:/work:rw"], protect=[path])

        assert "protect" == refusal.value.field
    assert {"real", "link"} == set(os.listdir(private_dir))


def test_an_id_that_lives_already(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Sandbox.create(id=sandbox.id)

    assert "id" == refusal.value.field
    assert sandbox.exec(["true"]).ok


# -- in a running sandbox -------------------------------------------------------------------------

BAD_EXECS: list[tuple[str, Any, Options, str]] = [
    ("empty command", [], {}, "argv"),
    ("no command", None, {}, "argv"),
    ("nothing to call", ["true"], {"on_stderr": 5}, "on_stderr"),
    ("a string", "true", {}, "argv"),
    ("an empty name", [""], {}, "argv[0]"),
    ("a blank name", [" "], {}, "argv[0]"),
    ("NUL in argv", ["echo", "a\0b"], {}, "argv[1]"),
    ("a lone surrogate", ["echo", "\ud800"], {}, "argv[1]"),
    ("a number", ["sleep", 1], {}, "argv[1]"),
    ("bad env key", ["true"], {"env": {"A B": ""}}, "env.A B"),
    ("NUL in env", ["true"], {"env": {"A": "\0"}}, "env.A"),
    ("empty cwd", ["true"], {"cwd": ""}, "cwd"),
    ("NUL in cwd", ["true"], {"cwd": "/\0"}, "cwd"),
    ("missing cwd", ["true"], {"cwd": "/no/such"}, "cwd"),
    ("cwd not a directory", ["true"], {"cwd": "/etc/passwd"}, "cwd"),
    ("unknown user", ["true"], {"user": "nobody-knows"}, "user"),
    ("a user that is a path", ["true"], {"user": "../root"}, "user"),
    ("user out of range", ["true"], {"user": 70000}, "user"),
    ("negative timeout", ["true"], {"timeout_s": -1}, "timeout_s"),
    ("no timeout", ["true"], {"timeout_s": 0}, "timeout_s"),
    ("NaN timeout", ["true"], {"timeout_s": math.nan}, "timeout_s"),
    ("endless timeout", ["true"], {"timeout_s": math.inf}, "timeout_s"),
    ("negative output", ["true"], {"max_output_bytes": -1}, "max_output_bytes"),
    ("half an output", ["true"], {"max_output_bytes": 0.5}, "max_output_bytes"),
    ("stdin a list", ["true"], {"stdin": [1]}, "stdin"),
    ("argv longer than the kernel takes", ["echo", "x" * 3_000_000], {}, "argv"),
    ("env longer than the kernel takes", ["true"], {"env": {"A": "x" * 3_000_000}}, "argv"),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    with Sandbox.create() as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("argv", "options", "field"), [pytest.param(*rest, id=what) for what, *rest in BAD_EXECS]
)
def test_a_bad_exec(shared: Sandbox, argv: Any, options: Options, field: str) -> None:
    for run in (shared.exec, lambda *a, **o: shared.start(*a, **o).wait(20)):
        with pytest.raises(InvalidRequest) as refusal:
            run(argv, **options)

        assert field == refusal.value.field
    assert 0 == shared.stats().pids
    assert shared.exec(["true"]).ok


CALLS: list[tuple[str, Callable[[Sandbox], object], type[RingfenceError], str]] = [
    ("terminal of no size", lambda s: s.start(["true"], pty=(0, 80)), InvalidRequest, "pty"),
    ("terminal of one number", lambda s: s.start(["true"], pty=(80,)), InvalidRequest, "pty"),  # type: ignore[arg-type]
    ("empty path", lambda s: s.files.read(""), InvalidRequest, "path"),
    ("path with NUL", lambda s: s.files.write("a\0b", b""), InvalidRequest, "path"),
    ("a number to write", lambda s: s.files.write("x", 5), InvalidRequest, "data"),  # type: ignore[arg-type]
    ("long name", lambda s: s.files.make_dir("x" * 256), InvalidRequest, "path"),
    ("long path", lambda s: s.files.stat("/x" * 2100), InvalidRequest, "path"),
    ("missing local file", lambda s: s.files.upload("/no/such", "x"), FileNotFound, ""),
    ("live mount over /proc", lambda s: s.mount("/tmp:/proc"), InvalidRequest, "mount.target"),
    ("live mount of nothing", lambda s: s.mount("/no/such:/x"), InvalidRequest, "mounts.source"),
    ("policy of hosts", lambda s: s.apply_network_policy(["a b"]), InvalidRequest, ""),
    ("snapshot that is a path", lambda s: Sandbox.restore("../x"), InvalidRequest, "snapshot_id"),
    ("unknown snapshot", lambda s: Sandbox.restore("snap-none"), SnapshotNotFound, ""),
    ("metadata of numbers", lambda s: s.snapshot({"a": 1}), InvalidRequest, "metadata.a"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(
    ("call", "error", "field"), [pytest.param(*rest, id=what) for what, *rest in CALLS]
)
def test_a_bad_call(
    shared: Sandbox,
    call: Callable[[Sandbox], object],
    error: type[RingfenceError],
    field: str,
) -> None:
    with pytest.raises(error) as refusal:
        call(shared)

    assert refusal.value.field.startswith(field) if not field else field == refusal.value.field
    assert shared.exec(["true"]).ok


def test_what_cannot_be_written_leaves_the_file_as_it_was(shared: Sandbox) -> None:
    shared.files.write("kept", b"content")

    with pytest.raises(InvalidRequest):
        shared.files.write("kept", 7)  # type: ignore[arg-type]

    assert b"content" == shared.files.read("kept")


@pytest.mark.parametrize("signum", [0, -1, 65, 1000, -9])
def test_a_bad_signal(shared: Sandbox, signum: int) -> None:
    process = shared.start(["sleep", "600"])

    with pytest.raises(InvalidRequest) as refusal:
        process.send_signal(signum)

    assert "signum" == refusal.value.field
    assert process.running
    process.kill()
    process.wait(20)


NOT_STARTED: list[tuple[list[str], int]] = [
    (["no-such-program"], 127),
    (["/no/such/program"], 127),
    (["/etc/passwd/x"], 127),
    (["/etc/passwd"], 126),
    (["/"], 126),
    (["/proc/1/exe"], 126),
    (["/" + "x" * 300], 126),
]


@pytest.mark.parametrize(("argv", "code"), NOT_STARTED)
def test_a_program_that_cannot_be_run_is_a_result(
    shared: Sandbox, argv: list[str], code: int
) -> None:
    """As a shell says it, alone and beside another process: that is another way of starting."""
    alone = shared.exec(argv)
    other = shared.start(["sleep", "600"])
    beside = shared.exec(argv)
    other.kill()
    other.wait(20)

    for result in (alone, beside):
        assert (code, b"") == (result.exit_code, result.stdout)
        assert argv[0].encode() in result.stderr


@pytest.mark.parametrize("first_line", ["#!/no/such/interpreter", "#!/bin/sh\r"])
def test_a_program_whose_interpreter_is_missing_is_not_called_missing(
    shared: Sandbox, first_line: str
) -> None:
    shared.files.write("script", f"{first_line}\n", mode=0o755)
    alone = shared.exec(["./script"])
    other = shared.start(["sleep", "600"])
    beside = shared.exec(["./script"])
    other.kill()
    other.wait(20)

    for result in (alone, beside):
        assert 126 == result.exit_code
        assert b"./script: the interpreter in its first line" in result.stderr


_FEW_FILES = """
import resource
from ringfence.errors import InvalidRequest

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
try:
    Sandbox.create(limits={"open_files": 301})
except InvalidRequest as exc:
    say([exc.field, exc.message, exc.hint])
with Sandbox.create(limits={"open_files": 300}) as sandbox:
    say(sandbox.shell("ulimit -Hn").text)
with Sandbox.create() as sandbox:  # by default as many as there can be
    say(sandbox.shell("ulimit -Hn").text)
"""


def test_more_open_files_than_the_caller_may_have_are_refused_and_not_made_fewer() -> None:
    with Caller(_FEW_FILES) as caller:
        field, message, hint = caller.hear()
        assert "limits.open_files" == field
        assert "301" in message
        assert "300" in message
        assert "ulimit -Hn" in hint
        assert "300\n" == caller.hear()
        assert "300\n" == caller.hear()
