"""Templates: steps on an image, done once, kept as layers, shared on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox, Template
from ringfence.errors import ExecError, FileNotFound, ImageNotFound, InvalidRequest
from ringfence.images.store import ImageStore

pytestmark = pytest.mark.anyone


def _said(sandbox_image: str, script: str) -> str:
    with Sandbox.create(image=sandbox_image) as sandbox:
        return sandbox.shell(script).stdout_text


def test_steps_make_an_image(image: str, store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main").write_text("content")
    heard: list[bytes] = []
    template = (
        Template.from_image(image)
        .env({"ONE": "1"})
        .run("echo $ONE > /srv/one; rm /bin/touch; mkdir -p /srv/d/e; echo said")
        .copy(str(tmp_path / "app"), "/srv/copied")
        .copy(str(tmp_path / "app" / "main"), "/srv/within/")
        .workdir("/srv/copied")
        .user("app")
        .env({"TWO": "2"})
        .command("cat", "main")
    )

    made = template.build("made:1", on_output=heard.append)

    script = "cat /srv/one main; ls /bin/touch; pwd; id -u; echo $ONE$TWO$GREETING; ls /srv/d"
    assert "1\ncontent/srv/copied\n1234\n12hello\ne\n" == _said("made:1", script)
    assert "content" == _said("made:1", "cat /srv/within/main")
    assert (("cat", "main"), 1234) == (made.command, made.uid)
    assert [b"said\n"] == heard
    assert "/bin/touch\n" == _said(image, "ls /bin/touch"), "what it started from is as it was"
    busybox = [os.stat(f"{store.root(store.find(one))}/bin/busybox") for one in (image, "made:1")]
    assert busybox[0].st_ino == busybox[1].st_ino, "no copy"


@pytest.mark.full
def test_a_step_that_is_known_is_not_done_again(
    image: str, store: ImageStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("one")
    heard: list[bytes] = []

    def build(*, first: str = "first") -> str:
        heard.clear()
        template = Template.from_image(image).run(f"echo {first}; > /srv/a")
        template = template.copy(str(tmp_path / "file"), "/srv/file").run("echo last; > /srv/b")
        return template.build("made", on_output=heard.append).id

    one = build()
    assert [b"first\n", b"last\n"] == heard
    assert one == build()
    assert [] == heard, "nothing was done"
    (tmp_path / "file").write_text("two")
    assert one != build()
    assert [b"last\n"] == heard, "from the change on"
    assert "two" == _said("made", "cat /srv/file")
    (tmp_path / "file").write_text("one")
    assert one == build()
    assert [] == heard
    build(first="other")
    assert [b"other\n", b"last\n"] == heard
    store.remove("made")
    store.collect()
    build()
    assert [b"first\n", b"last\n"] == heard, "the cache was emptied"


def test_a_step_with_other_options_is_done_again(
    image: str, store: ImageStore, tmp_path: Path
) -> None:
    heard: list[bytes] = []

    def build(**options: Any) -> None:
        heard.clear()
        step = Template.from_image(image).run("echo step; > /srv/a", **options)
        step.build("made", on_output=heard.append)

    build()
    build(limits={"pids": 50}, secrets={})
    assert [] == heard, "the control: it sees nothing else"
    for options in (
        {"env": {"A": "b"}},
        {"mounts": [f"{tmp_path}:/srv/shown"]},
        {"network": ["example.com"]},
        {"user": "1000"},
    ):
        build(**options)
        assert [b"step\n"] == heard, options
        build(**options)
        assert [] == heard, options


def test_a_step_that_fails_keeps_what_came_before(image: str, store: ImageStore) -> None:
    heard: list[bytes] = []
    template = Template.from_image(image).run("echo first")

    failing = template.run("echo why; exit 3")
    with pytest.raises(ExecError, match=r"ended with exit code 3 \(") as told:
        failing.build("made", on_output=heard.append)
    assert b"why\n" == heard.pop()
    assert "why;" in str(told.value)
    with pytest.raises(ExecError, match="ended with exit code 3: why"):
        failing.build("made")
    with pytest.raises(ExecError, match="took too long"):
        template.run("while :; do :; done", timeout_s=0.2).build("made")
    with pytest.raises(ImageNotFound):
        store.find("made")
    heard.clear()
    template.build("made", on_output=heard.append)
    assert [] == heard


def test_steps_have_no_network_and_no_rights(image: str, store: ImageStore) -> None:
    del store
    heard: list[bytes] = []

    Template.from_image(image).run("cat /proc/net/dev /proc/self/status", network="none").build(
        "made", on_output=heard.append
    )

    text = b"".join(heard).decode()
    assert "eth0" not in text
    assert "CapEff:\t0000000000000000" in text


def test_what_is_refused(image: str, store: ImageStore) -> None:
    template = Template.from_image(image)
    for wrong in (
        lambda: template.workdir("relative"),
        lambda: template.copy("x", "relative"),
        lambda: template.env({"a b": "c"}),
        lambda: template.build("UPPER"),
    ):
        with pytest.raises(InvalidRequest):
            wrong()
    with pytest.raises(FileNotFound):
        template.copy("/nowhere/at/all", "/srv/x").build("made")
    with pytest.raises(ImageNotFound):
        Template.from_image("none:1").build("made")
    assert [image] == [one.reference.rpartition("/")[2] for one in store.images()]
