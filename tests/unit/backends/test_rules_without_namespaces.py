"""What a sandbox without namespaces may be shown: each refusal, and the same request where it is fine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native.outside import same_descriptors
from tests.strangers import let_others_in

from ringfence import Mount, SandboxSpec
from ringfence.backends.command import place as places
from ringfence.backends.landlock import rules
from ringfence.backends.landlock.network import Loopback, _turns
from ringfence.backends.landlock.place import Place
from ringfence.backends.local.host.facts import host
from ringfence.backends.local.mounts import template
from ringfence.errors import InvalidRequest, ResourceExhausted, Unsupported
from ringfence.model.mount import MEMORY_DIR, OUTPUTS_DIR, READ_WRITE
from ringfence.policy import landlock
from ringfence.policy.redirects import Redirect
from ringfence.policy.trust import DIRECTORY

pytestmark = pytest.mark.anyone


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    host()
    with same_descriptors():
        yield


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sandboxes' own directories are, beside what is shown."""
    path = tmp_path / "sandboxes"
    path.mkdir()
    monkeypatch.setattr(places, "base", lambda: str(path))
    return path


@pytest.fixture
def shown(tmp_path: Path, base: Path) -> Path:
    path = tmp_path / "shown"
    (path / "below").mkdir(parents=True)
    (path / "file").touch()
    let_others_in(path / "below")
    return path


def check(*mounts: Mount, is_owner: bool = True, **options: Any) -> str:
    """The field that a refusal names; empty: there is none."""
    try:
        rules.check_mounts(SandboxSpec(mounts=mounts, **options), "landlock", is_owner=is_owner)
    except (InvalidRequest, Unsupported) as exc:
        return f"{type(exc).__name__} {exc.field}"
    return ""


def at(path: Path | str, target: str = "", access: str = "read_only", **options: Any) -> Mount:
    return Mount(target or str(path), str(path), access, **options)


def free(path: Path | str, target: str = "") -> Mount:
    """Writable, and unprotected: else the protection is refused first."""
    return at(path, target, READ_WRITE, protect=())


def test_nothing_that_has_the_sandboxes_directories_or_lies_in_them_is_shown(
    base: Path, shown: Path
) -> None:
    """Around them, in them and themselves, by whatever name; what only begins alike is another."""
    (base / "own").mkdir()
    link = shown.parent / "link"
    link.symlink_to(base)
    beside = base.parent / f"{base.name}-beside"
    beside.mkdir()
    refused = "InvalidRequest mounts.source"

    assert refused == check(at(base.parent, "/work"))
    assert refused == check(at(base, "/work"))
    assert refused == check(at(base / "own", "/work"))
    assert refused == check(at(link, "/work"))
    assert refused == check(free(base.parent))
    assert refused == check(memory_dir=str(base / "own"))
    assert not check(at(beside, "/work"))
    assert not check(at(shown, "/work"))


@pytest.mark.parametrize(
    ("target", "refused"),
    [
        *((path, True) for path in ("/usr/x", "/bin/x", "/sbin/x", "/lib/x", "/lib64/x", "/etc/x")),
        *((path, True) for path in ("/home", "/home/sandbox", "/tmp", OUTPUTS_DIR)),
        *((path, True) for path in (MEMORY_DIR, "/mnt/session/outputs")),
        *((path, False) for path in ("/work", "/usrx", "/devx", "/etcetera/x", "/home/sandbox/x", "/tmp/x")),
    ],
)  # fmt: skip
def test_each_place_that_nothing_can_cover(shown: Path, target: str, refused: bool) -> None:
    assert refused is bool(check(at(shown, target))), check(at(shown, target))


def test_a_mount_in_another_is_there_already_or_refused(shown: Path) -> None:
    outer = at(shown, "/work")
    assert not check(outer, at(shown / "below", "/work/below"))
    assert "Unsupported mounts.target" == check(outer, at(shown / "below", "/work/other"))
    assert "Unsupported mounts.target" == check(outer, at(shown / "file", "/work/below"))
    assert not check(outer, at(shown / "below", "/workshop"))


def test_what_the_source_must_be(shown: Path) -> None:
    link = shown.parent / "link"
    link.symlink_to(shown)
    assert "InvalidRequest mounts.source" == check(at(shown / "missing", "/work"))
    assert not check(at(link, "/work"))
    assert "InvalidRequest mounts.source" == check(at(link, "/work", nofollow=True))
    assert not check(at(shown, "/work", nofollow=True))
    assert "InvalidRequest memory_dir" == check(memory_dir=str(shown / "file")).replace(
        "mounts.source", "memory_dir"
    )
    assert not check(memory_dir=str(shown))


def test_a_directory_of_its_own_is_writable() -> None:
    assert "Unsupported mounts.access" == check(Mount("/own"))
    assert not check(Mount("/own", access=READ_WRITE))


def test_a_writable_mount_has_nothing_that_landlock_would_have_to_protect(shown: Path) -> None:
    (shown / ".git").mkdir()
    assert "Unsupported mounts.protect" == check(at(shown, "/work", READ_WRITE))
    assert "Unsupported mounts.protect" == check(at(shown, access=READ_WRITE, protect=("x",)))
    assert not check(free(shown))
    assert "Unsupported mounts.access" == check(free(shown), at(shown / "below"))
    assert not check(at(shown), free(shown / "below"))
    assert not check(free(shown / "below"), at(shown))


def test_another_user_writes_nowhere_and_reads_what_everybody_may(shown: Path) -> None:
    """As root's sandbox has: each directory above must let it pass."""
    assert "Unsupported mounts.access" == check(free(shown), is_owner=False)
    assert not check(at(shown / "below", "/work"), is_owner=False)
    for path, mode in ((shown, 0o700), (shown / "below", 0o754), (shown / "file", 0o641)):
        before = path.stat().st_mode & 0o777
        source = shown / "below" if path == shown else path
        path.chmod(mode)
        assert "Unsupported mounts.source" == check(at(source, "/work"), is_owner=False), path
        assert not check(at(source, "/work")), path
        path.chmod(before | 0o555)
        assert not check(at(source, "/work"), is_owner=False), path


def test_each_kind_of_mount_gets_just_its_rights(shown: Path) -> None:
    reads = landlock.READ_FILE | landlock.EXECUTE
    whole = reads | landlock.READ_DIR
    writes = whole | landlock.WRITE_FILE | landlock.TRUNCATE | landlock.REFER
    writes |= landlock.REMOVE_DIR | landlock.REMOVE_FILE
    writes |= landlock.MAKE_DIR | landlock.MAKE_REG | landlock.MAKE_FIFO | landlock.MAKE_SYM
    mounts = [at(shown), free(shown), at(shown / "file"), free(shown / "file")]
    opened = rules.open_mounts(mounts)
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd, _ in opened]
    for fd, _ in opened:
        os.close(fd)

    assert [each.source for each in mounts] == names
    assert [
        whole,
        writes,
        reads,
        reads | landlock.WRITE_FILE | landlock.TRUNCATE,
    ] == [access for _, access in opened]
    assert (str(shown), writes) == rules.own_rule(str(shown), sockets=False)
    assert (str(shown), writes | landlock.MAKE_SOCK) == rules.own_rule(str(shown), sockets=True)


@pytest.mark.parametrize("where", ["itself", "above"])
def test_a_link_that_came_since_the_check_is_not_followed(shown: Path, where: str) -> None:
    """Also where others were opened before it: they are closed again."""
    control = at(shown / "file")
    moved = shown / "below" if where == "itself" else shown
    path = at(shown / "below")
    moved.rename(moved.parent / "moved")
    moved.symlink_to(moved.parent / "moved")
    with pytest.raises(InvalidRequest, match="has a symlink in it now"):
        rules.open_mounts(
            [at("/usr/share"), control, path] if where == "itself" else [at("/usr/share"), path]
        )


def test_a_source_that_has_gone_leaves_nothing_open(shown: Path) -> None:
    with pytest.raises(FileNotFoundError):
        rules.open_mounts([at("/usr/share"), at(shown / "missing")])


def test_what_of_the_system_may_be_written_and_executed() -> None:
    """Nothing but devices may be written, and processes and processors are only read."""
    writes = landlock.WRITE_FILE | landlock.TRUNCATE | landlock.MAKE_REG | landlock.REMOVE_FILE
    found = rules.system_rules(landlock.IOCTL_DEV)
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    others = {path for path in ("/proc", "/sys/devices/system/cpu") if os.path.isdir(path)}

    assert devices == {path for path, access in found if access & writes}
    assert devices | others == {path for path, access in found if not access & landlock.EXECUTE}
    assert {"/dev/tty"} == {path for path, access in found if access & landlock.IOCTL_DEV}
    assert not [path for path, _ in rules.system_rules(0) if path.startswith(("/root", "/home"))]
    paths = {path for path, _ in found}
    assert not paths & {
        "/etc",
        "/etc/shadow",
        "/",
        "/dev",
        "/dev/pts",
        "/dev/shm",
        "/run",
        "/var",
        "/tmp",
    }
    for path, access in found:
        assert os.path.isdir(path) or not access & landlock.READ_DIR, path


@pytest.mark.parametrize(
    ("text", "tells_of_none"),
    [
        (
            "127.0.0.1 localhost\n::1 localhost ip6-localhost\nff02::1 ip6-allnodes\n# 10.0.0.1 x\n\n",
            True,
        ),
        ("10.0.0.1 {own}\n", True),
        ("10.0.0.1 other\n", False),
        ("127.0.0.1 localhost\n10.0.0.1 other # {own}\n", False),
        ("::2 other\n", False),
        ("128.0.0.1 localhost\n", False),
        ("10.0.0.1 \N{SNOWMAN}\n", False),
    ],
)
def test_a_file_of_hosts_that_tells_of_others_is_not_shown(
    tmp_path: Path, text: str, tells_of_none: bool
) -> None:
    path = tmp_path / "hosts"
    path.write_text(text.format(own=os.uname().nodename))

    assert tells_of_none is rules._names_this_host_only(str(path))
    assert not rules._names_this_host_only(str(tmp_path / "absent"))


def test_a_python_in_a_closed_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "closed" / "python"
    python.mkdir(parents=True)
    let_others_in(python)
    spec = SandboxSpec(python_env=True)
    monkeypatch.setattr(template, "python_environment", lambda: [(str(python), "/python", False)])
    rules.check_python(spec, "landlock")
    python.parent.chmod(0o750)

    with pytest.raises(Unsupported, match=f"below {python.parent},") as refusal:
        rules.check_python(spec, "landlock")
    assert refusal.value.field == "python_env"
    rules.check_python(SandboxSpec(), "landlock")


# -- its own directories ---------------------------------------------------------------------------


def own_place(
    mounts: dict[str, str] | None = None, memory: str | None = None, workdir: str | None = None
) -> Place:
    return Place(host().uid, workdir, mounts or {}, memory, None)


def test_each_directory_of_its_own_is_made_mapped_and_removed(base: Path) -> None:
    made = own_place({"/own": "", "/other": ""}, workdir="/srv")
    wanted = {
        "/home/sandbox",
        "/tmp",
        "/mnt/session",
        MEMORY_DIR,
        "/dev/shm",
        "/srv",
        "/own",
        "/other",
    }
    mapped = {each: made.mapped(each) for each in wanted}

    assert len(wanted) == len({*mapped.values()})
    assert {*mapped.values()} == {*made.writable}
    assert all(os.path.isdir(each) for each in mapped.values())
    assert os.path.isdir(made.mapped(OUTPUTS_DIR))
    assert mapped["/own"] + "/x" == made.mapped("/own/x")
    assert "/owner" == made.mapped("/owner")
    assert "/usr/bin" == made.mapped("/usr/bin")
    assert wanted == {name for _, name in made.saved()}
    names = [name for _, name in made.saved()]
    assert sorted(names, key=len, reverse=True) == names
    assert 0o700 == os.stat(made.path).st_mode & 0o777
    made.remove()
    assert [] == os.listdir(base)


def test_a_mount_is_found_by_a_link_in_a_directory_of_its_own(base: Path, shown: Path) -> None:
    home = "/home/sandbox"
    made = own_place(
        {f"{home}/a/data": str(shown), "/tmp/x": str(shown / "file"), "/work": str(shown)}
    )
    link = Path(made.mapped(home)) / "a/data"

    assert (str(shown), True) == (os.readlink(link), link.parent.is_dir())
    assert [str(link), f"{made.mapped('/tmp')}/x"] == sorted(made.links)
    assert str(shown) == made.mapped(f"{home}/a/data")
    assert f"{shown}/below" == made.mapped("/work/below")
    assert str(shown / "file") == made.mapped(str(shown / "file")), (
        "what is mapped is not mapped again"
    )
    made.remove()
    assert ["below", "file"] == sorted(os.listdir(shown))


def test_one_that_cannot_be_made_leaves_neither_directory_nor_lock(base: Path, shown: Path) -> None:
    (shown / "file").touch()
    inner = {"/tmp/x": str(shown), "/tmp/x/file/y": "/usr"}
    with pytest.raises((InvalidRequest, OSError)):
        own_place(inner)
    with pytest.raises(InvalidRequest, match="File name too long") as refusal:
        own_place({f"/tmp/{'x' * 256}": "/usr"})

    assert "mounts.target" == refusal.value.field
    assert [] == os.listdir(base)


def test_the_memory_of_another_directory_is_not_removed(base: Path, shown: Path) -> None:
    made = own_place(memory=str(shown))
    assert str(shown) == made.mapped(MEMORY_DIR)
    assert str(shown) not in made.writable
    made.remove()
    assert ["below", "file"] == sorted(os.listdir(shown))


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_the_authority_is_shown_in_a_directory_that_everybody_may_read_and_no_snapshot_has(
    base: Path, umask: int
) -> None:
    """Of its files only those that variables lead to: the others are at places of the host's."""
    steps = [
        ("dir", DIRECTORY, 0o755, False), ("file", f"{DIRECTORY}/bytes", b"B", 0o444),
        ("file", f"{DIRECTORY}/text", "T", 0o444), ("file", "/etc/other", b"O", 0o444),
        ("bind_inside", f"{DIRECTORY}/bytes", "/etc/ssl/cert.pem", 0),
    ]  # fmt: skip
    authority: Any = SimpleNamespace(steps=steps)
    before = os.umask(umask)
    try:
        made = Place(host().uid, None, {}, None, authority)
    finally:
        os.umask(before)
    trust = Path(made.mapped(DIRECTORY))
    assert [str(trust)] == made.readable
    assert {"bytes": "B", "text": "T"} == {each.name: each.read_text() for each in trust.iterdir()}
    assert {0o444} == {each.stat().st_mode & 0o777 for each in trust.iterdir()}
    assert 0o755 == trust.stat().st_mode & 0o777
    assert str(trust) not in [*made.writable, *(path for path, _name in made.saved())]
    made.remove()


# -- its addresses --------------------------------------------------------------------------------


def test_no_two_sandboxes_have_an_address_and_one_that_ended_frees_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two blocks that there are, both are taken; then there is none."""
    draws = iter([0, 0, 1, *[0, 1] * 32, 0])
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: next(draws).to_bytes(size, "big"))
    monkeypatch.setattr("ringfence.backends.landlock.network._BLOCKS", 4096 + os.getpid() % 100)
    monkeypatch.setattr("ringfence.backends.landlock.network._FIRST", 127 << 24 | 65 << 16)
    try:
        one, two = Loopback(), Loopback()
        with pytest.raises(ResourceExhausted):
            Loopback()
    finally:
        monkeypatch.setattr(os, "urandom", real)
    own = [one.v4, one.v6, one.way, two.v4, two.v6, two.way]
    assert 6 == len({*own})
    assert {127} == {address[0] for address in own}
    network = one.network(["/own"], is_scoped=True)
    assert (one.v4, one.v6, ["/own"], True, None) == tuple(
        network[key] for key in ("v4", "v6", "unix", "is_scoped", "way")
    )
    one.close()
    monkeypatch.setattr(os, "urandom", bytes)
    again = Loopback()
    assert one.v4 == again.v4
    for each in (two, again):
        each.close()


def test_destinations_are_told_with_both_of_their_bounds() -> None:
    found = _turns([Redirect("10.0.0.0/8", 1, 2), Redirect("2001:db8::/32", 3, 4)])

    v6 = socket.inet_pton(socket.AF_INET6, "2001:db8::")
    assert [(bytes([10, 0, 0, 0]), 8, 1, 2), (v6, 32, 3, 4)] == found


def test_what_lies_in_something_writable_is_not_read_only(shown: Path) -> None:
    """By the real paths of the sources: where they are shown says nothing of what a rule covers."""
    refused = "Unsupported mounts.access"

    assert refused == check(free(shown), at(shown / "below"))
    assert refused == check(free(shown, "/work"), at(shown / "below", "/other"))
    assert refused == check(at(shown / "below", "/other"), memory_dir=str(shown))
    assert not check(at(shown), free(shown / "below"))
    assert not check(at(shown / "below", "/other"))
