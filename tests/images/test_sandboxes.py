"""Sandboxes that start from an image: what it says is so, and nothing of it changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.errors import ImageNotFound, InvalidRequest
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.sessions import BashConfig, SandboxBash
from tests.features import require
from tests.images.conftest import small
from tests.images.making import Made, layer, program


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


def test_user_and_directory_of_the_configuration(tmp_path: Path, store: ImageStore) -> None:
    made = small(User="app", WorkingDir="/srv/app", Entrypoint=["cat"], Cmd=["new"])
    image = load(made.as_layout(tmp_path / "made"), "made", store=store)

    with Sandbox.create(image="made") as sandbox:
        told = sandbox.shell("id -u; pwd; echo $HOME; cat new; echo > mine; ls mine")
        run = sandbox.exec(image.argv)
    with Sandbox.create(image="made", user="root", workdir="/tmp", env={"HOME": "/x"}) as sandbox:
        asked = sandbox.shell("id -u; pwd; echo $HOME")

    assert "1234\n/srv/app\n/srv/app\nnewmine\n" == told.stdout_text
    assert b"new" == run.stdout
    assert "0\n/tmp\n/x\n" == asked.stdout_text


def test_an_image_with_nothing_but_one_program(tmp_path: Path, store: ImageStore) -> None:
    require("gcc")
    source = tmp_path / "answer.c"
    source.write_text('#include <unistd.h>\nint main() { write(1, "answer\\n", 7); return 42; }\n')
    subprocess.run(["gcc", "-static", "-o", str(tmp_path / "answer"), str(source)], check=True)
    only = Made([layer(program("answer", str(tmp_path / "answer")))])
    load(only.as_layout(tmp_path / "layout"), "only", store=store)

    with Sandbox.create(image="only") as sandbox:
        ran = sandbox.exec(["/answer"])
        shell = sandbox.shell("true")
        sandbox.files.write("/root/there", b"content")
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "file").write_text("x")
        sandbox.files.upload(str(tmp_path / "tree"), "/root/tree")
        sandbox.files.download("/root", str(tmp_path / "back"))

    assert (42, b"answer\n") == (ran.exit_code, ran.stdout)
    assert 127 == shell.exit_code
    assert b"content" == (tmp_path / "back" / "there").read_bytes()
    assert "x" == (tmp_path / "back" / "tree" / "file").read_text()


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


def test_what_is_in_use_is_not_collected(image: str, store: ImageStore) -> None:
    with Sandbox.create(image=image) as sandbox:
        found = store.remove(image)
        assert [found.id] == store.collect()[1]
        assert b"ID=small\n" == sandbox.exec(["cat", "/etc/os-release"]).stdout
    freed, in_use = store.collect()

    assert (True, []) == (freed > 0, in_use)
    with pytest.raises(ImageNotFound):
        Sandbox.create(image=image)


def test_the_bash_tool_on_an_image_without_bash(
    image: str, store: ImageStore, tmp_path: Path
) -> None:
    del store
    (tmp_path / "work").mkdir()
    config = BashConfig(image=image, allow_degraded=("*",))
    with SandboxBash(str(tmp_path / "work"), config) as tool:
        said = tool.exec_command("cat /etc/os-release; pwd; echo mine > file; nothing-such")
    with SandboxBash(
        config=BashConfig(image=image, persistent=True, allow_degraded=("*",))
    ) as tool:
        tool.exec_command("cd /srv; KEPT=yes")
        kept = tool.exec_command("pwd; echo $KEPT")

    assert ("ID=small\n/workspace\n", 127) == (said.stdout, said.exit_code)
    assert "mine\n" == (tmp_path / "work" / "file").read_text()
    assert "/srv\nyes\n" == kept.stdout


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
