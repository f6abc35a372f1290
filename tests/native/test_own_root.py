"""A root with rights over the sandbox's own users and files, and over nothing else; users by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.local.host import accounts
from ringfence.errors import InvalidRequest, Unsupported
from tests.native.conftest import MakeSandbox

ADD_BOB = "echo bob:x:1500:1500::/home/bob:/bin/sh >> /etc/passwd && mkdir /home/bob && chown 1500 /home/bob"
SETS = "grep -h ^Cap /proc/self/status | cut -f2 | sort -u"


def _as(sandbox: Sandbox, user: str | None, script: str) -> str:
    result = sandbox.exec(["sh", "-c", script], user=user)
    return result.stdout_text + (result.stderr_text if not result.ok else "")


@pytest.mark.root
def test_it_rules_the_sandboxs_own_users(make: MakeSandbox) -> None:
    sandbox, usual = make(profile="own_root"), make()

    assert "" == _as(sandbox, "root", ADD_BOB)
    assert "bob 1500 /home/bob bob\n" == _as(
        sandbox, "bob", "echo $(whoami) $(id -u) $HOME $USER; touch /home/bob/mine"
    )
    assert "1500\n" == _as(sandbox, "root", "stat -c %u /home/bob/mine")
    assert "Permission denied" in _as(usual, "root", ADD_BOB)
    with pytest.raises(InvalidRequest, match="bob"):
        usual.exec(["true"], user="bob")


@pytest.mark.root
def test_only_root_has_rights_and_few(make: MakeSandbox) -> None:
    """CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID; who is not root has none and gets none."""
    sandbox = make(profile="own_root")

    assert ["0" * 16, f"{0xCB:016x}"] == _as(sandbox, "root", SETS).split()
    for user in (None, "nobody", "1500"):
        assert ["0" * 16] == _as(sandbox, user, SETS).split()
    become = "setpriv --reuid=1500 --regid=1500 --clear-groups"
    # It became somebody else: what it may be given again by exec is still bounded, and is nothing.
    assert (
        f"{0:016x}"
        == _as(sandbox, "root", f"{become} sed -n 's/^CapEff:.//p' /proc/self/status")[:16]
    )
    assert ["0" * 16] == _as(make(), "root", SETS).split()


@pytest.mark.root
def test_the_default_user_may_be_that_root(make: MakeSandbox) -> None:
    sandbox = make(profile="own_root", user="root")

    assert ["0" * 16, f"{0xCB:016x}"] == _as(sandbox, None, SETS).split()
    assert "" == _as(sandbox, None, ADD_BOB)
    assert ["0" * 16] == _as(sandbox, "bob", SETS).split()


@pytest.mark.root
@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs none /mnt",
        "mknod /tmp/null c 1 3",
        "chown 0 /usr/bin/env",
        "touch /usr/bin/mine",
        "hostname other",
        "ip link set lo down",
        "unshare --user true",
        "chroot / true",
        "echo 1 > /proc/sys/vm/drop_caches",
        "cp /bin/sh /tmp/sh && chmod u+s /tmp/sh && setpriv --reuid=1500 /tmp/sh -p -c 'exit $(id -u)'",
    ],
)
def test_it_has_none_over_the_kernel(make: MakeSandbox, attempt: str) -> None:
    sandbox = make(profile="own_root")

    assert not sandbox.exec(["sh", "-c", attempt], user="root").ok
    assert sandbox.exec(["sh", "-c", "chown 7 /tmp"], user="root").ok  # the control


@pytest.mark.root
def test_files_of_the_host_stay_their_owners(make: MakeSandbox, private_dir: Path) -> None:
    (private_dir / "file").write_text("x")
    before = (private_dir / "file").stat()
    sandbox = make(profile="own_root", mounts=[f"{private_dir}:/work:rw"])

    assert not sandbox.exec(["chown", "1500", "/work/file"], user="root").ok
    after = (private_dir / "file").stat()
    assert (before.st_uid, before.st_gid) == (after.st_uid, after.st_gid)


@pytest.mark.root
def test_it_is_reported(make: MakeSandbox) -> None:
    (found,) = [p for p in make(profile="own_root").protections() if p.name == "capabilities"]
    (usual,) = [p for p in make().protections() if p.name == "capabilities"]

    assert ("degraded", "enforced") == (found.status, usual.status)
    assert "own_root" in found.fix


@pytest.mark.rootless
def test_with_one_user_there_is_nothing_to_rule(make: MakeSandbox) -> None:
    with pytest.raises(Unsupported) as refused:
        make(profile="own_root")

    assert "profile" == refused.value.field


@pytest.mark.parametrize(
    "line",
    [
        "bob:x:70000:1::/:/bin/sh",
        "bob:x:-1:1::/:/bin/sh",
        "bob:x:\u0663:1::/:/bin/sh",
        "bob:x:1500",
        "bob:x::1::/:/bin/sh",
        "bob:x:1500:1::/:/bin/sh:more",
        " bob:x:1500:1::/:/bin/sh",
        "#bob:x:1500:1::/:/bin/sh",
    ],
)
def test_lines_that_make_no_sense_are_nobody(line: str) -> None:
    assert accounts._named(f"{line}\n", "bob") is None
    whole = accounts._named(f"{line}\nbob:x:1500:1::/h:/bin/sh\n", "bob")
    assert whole is not None
    assert (1500, "/h") == (whole.uid, whole.env["HOME"])
