"""Sandboxes that start from an image: what it says is so, and nothing of it changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ringfence import Limits, Mount, Sandbox, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import ImageNotFound, InvalidRequest
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from tests.images.conftest import small

pytestmark = pytest.mark.full


def _sha_of(root: str) -> str:
    script = "find . -printf '%p %y %m %s %l\\n' | sort | sha256sum; find . -type f | sort | xargs sha256sum"
    done = subprocess.run(
        ["sh", "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_image_is_the_root_and_stays_as_it_was(image: str, store: ImageStore) -> None:
    before = _sha_of(store.root(store.find(image)))

    with Sandbox.create(image=image) as one, Sandbox.create(image=image) as two:
        wrote = one.shell(
            "id -u; pwd; echo $GREETING $HOME; cat /etc/os-release;"
            "echo mine > /etc/os-release; rm /bin/touch; rm -r /srv; mkdir /srv; ls /srv; > /srv/x"
        )
        other = two.shell("cat /etc/os-release; ls /bin/touch /srv/app; ls -a /proc/1/root")
        one.files.write("/srv/app", b"new")
        assert ["app", "x"] == sorted(entry.name for entry in one.files.list("/srv"))

    assert "0\n/\nhello /root\nID=small\n" == wrote.stdout_text, wrote
    assert "ID=small\n/bin/touch\n\n/srv/app:\nnew\n" == other.stdout_text
    assert "ermission" in other.stderr_text
    assert before == _sha_of(store.root(store.find(image)))


def test_nothing_of_the_host_is_there(image: str, store: ImageStore) -> None:
    del store
    with Sandbox.create(image=image) as sandbox:
        seen = sandbox.shell("ls /; ls /usr /lib; cat /etc/resolv.conf /etc/passwd").stdout_text
        status = sandbox.shell("cat /proc/self/status").stdout_text

    names = ["bin", "dev", "etc", "home", "mnt", "proc", "root", "run", "srv", "tmp", "var"]
    assert names == seen.split("\n")[: len(names)]
    assert "127.0.0.53" in seen, "the link out of /etc was replaced, not followed"
    assert "app:x:1234" in seen
    for line in (
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ):
        assert line in status


def test_limits_hold_over_an_image(image: str, store: ImageStore) -> None:
    del store
    with Sandbox.create(image=image, limits={"disk_bytes": 8 << 20}) as sandbox:
        full = sandbox.shell("cat /dev/zero > /srv/fill")
        shm = sandbox.shell("cat /dev/zero > /dev/shm/fill")
    assert "No space left" in full.stderr_text
    assert "No space left" in shm.stderr_text, "one size bounds both"


def test_mounts_and_network_over_an_image(image: str, store: ImageStore, tmp_path: Path) -> None:
    del store
    (tmp_path / "work").mkdir()
    with Sandbox.create(
        image=image, mounts=[f"{tmp_path}/work:/work:rw"], workdir="/work"
    ) as sandbox:
        sandbox.shell("echo mine > file")
    assert "mine\n" == (tmp_path / "work" / "file").read_text()


def test_names_of_the_host_s_network_over_an_image(image: str, store: ImageStore) -> None:
    del store
    said = Path("/etc/resolv.conf").read_text().splitlines()
    servers = [line.strip() for line in said if line.startswith("nameserver")]
    for network, expected in (("unrestricted", servers), ("none", ["nameserver 127.0.0.53"])):
        with Sandbox.create(image=image, network=network) as sandbox:
            shown = sandbox.exec(["cat", "/etc/resolv.conf"]).stdout_text.splitlines()
        assert expected == [line for line in shown if line.startswith("nameserver")]


def test_what_is_refused(image: str, store: ImageStore) -> None:
    for options, field in (
        ({"image": "none:1"}, "image"),
        ({"image": "UPPER"}, "image"),
        ({"image": image, "user": "nobody-here"}, "user"),
        ({"image": image, "python_env": True}, "python_env"),
    ):
        with pytest.raises((InvalidRequest, ImageNotFound)) as refused:
            Sandbox.create(**options)
        assert field == refused.value.field
    assert store.images()


@pytest.mark.parametrize("user", ["stranger", "100000"])
def test_an_image_whose_user_is_not_in_it(user: str, store: ImageStore, tmp_path: Path) -> None:
    load(small(User=user).as_layout(tmp_path / "layout"), "strange:1", store=store)

    with pytest.raises(InvalidRequest, match=user) as refused:
        Sandbox.create(image="strange:1")
    assert "user" == refused.value.field
    with Sandbox.create(image="strange:1", user="77") as sandbox:
        assert "77" == sandbox.exec(["id", "-u"]).stdout_text.strip()


def test_an_image_is_let_go_of_where_its_workdir_cannot_be_had(
    image: str, store: ImageStore
) -> None:
    with pytest.raises(NotADirectoryError):
        Sandbox.create(image=image, workdir="/etc/os-release/below")

    store.remove(image)
    assert [] == store.collect()[1]


def test_what_is_in_use_is_not_collected(image: str, store: ImageStore) -> None:
    with Sandbox.create(image=image) as sandbox:
        found = store.remove(image)
        assert [found.id] == store.collect()[1]
        assert b"ID=small\n" == sandbox.exec(["cat", "/etc/os-release"]).stdout
    freed, in_use = store.collect()

    assert (True, []) == (freed > 0, in_use)
    with pytest.raises(ImageNotFound):
        Sandbox.create(image=image)


def test_a_snapshot_is_what_was_changed(image: str, store: ImageStore) -> None:
    size = store.find(image).size_bytes
    with Sandbox.create(image=image) as sandbox:
        sandbox.shell(
            "echo mine > /etc/os-release; rm /bin/touch; rm -r /srv/app; echo file > /srv/app;"
            "rm /bin/head; mkdir /bin/head; mkdir -p /root/deep; echo x > /root/deep/x; ln -s x /root/deep/l"
        )
        taken = sandbox.snapshot()
        sandbox.shell("echo later > /etc/os-release")
    try:
        with Sandbox.restore(taken.id) as again:
            said = again.shell(
                "cat /etc/os-release /srv/app /root/deep/l; ls -d /bin/touch /bin/head; ls -l /bin/ls; id -u"
            )
    finally:
        Sandbox.delete_snapshot(taken.id)

    assert taken.size_bytes < size / 10, "the image is not in it"
    assert said.stdout_text.startswith("mine\nfile\nx\n/bin/head\n")
    assert "/bin/touch" in said.stderr_text


def test_the_control_of_snapshots(image: str, store: ImageStore) -> None:
    """Nothing changed: nothing but directories is saved, and all is there again."""
    del store
    with Sandbox.create(image=image) as sandbox:
        before = sandbox.shell("ls -R /bin /etc /srv").stdout
        taken = sandbox.snapshot()
    try:
        with Sandbox.restore(taken.id) as again:
            assert before == again.shell("ls -R /bin /etc /srv").stdout
    finally:
        Sandbox.delete_snapshot(taken.id)
    assert taken.size_bytes < 64 << 10


def test_a_warm_sandbox_of_an_image_gets_size_and_mounts(image: str, tmp_path: Path) -> None:
    backend = NativeBackend()
    (tmp_path / "work").mkdir()
    mount = Mount("/work", str(tmp_path / "work"), "read_write")
    spec = SandboxSpec(image=image, limits=Limits(disk_bytes=8 << 20), mounts=(mount,))
    try:
        warm = backend.prewarm(SandboxSpec(image=image))
        with Sandbox(warm.claim(spec), spec) as sandbox:
            assert 0 == sandbox.shell("echo x > /work/x").exit_code
            full = sandbox.shell("cat /dev/zero > /srv/fill")
            assert warm.id == sandbox.session.id
    finally:
        backend.close()
    assert "No space left" in full.stderr_text, "the size is the claim's"
    assert "x\n" == (tmp_path / "work" / "x").read_text()
