"""Templates of a server by the library, the clients and the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ringfence import Sandbox, Template
from ringfence.cli.template import main
from ringfence.client import AsyncClient, Client
from ringfence.errors import ExecError, InvalidRequest, NotFound
from tests.api.conftest import Daemon, daemon, start_daemon

__all__ = ["daemon", "start_daemon"]

pytestmark = pytest.mark.anyone


@pytest.mark.full
def test_the_same_steps_are_built_by_a_server(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "sub" / "file").write_text("copied\n")
    server, printed = f"unix:{daemon.socket}", bytearray()
    template = (
        Template.from_host()
        .copy(str(tmp_path / "data"), "/srv/data")
        .copy(str(tmp_path / "data" / "sub" / "file"), "/srv/one/renamed")
        .env({"WORD": "env"})
        .run("echo $WORD > ~/file; echo printed")
    )
    view = template.build("made", server=server, on_output=printed.extend)
    assert ("made", "ready") == (view.name, view.status)
    assert b"printed" in printed
    with Sandbox.create(template="made", server=server) as sandbox:
        found = sandbox.shell("cat /srv/data/sub/file /srv/one/renamed ~/file; echo $WORD")
        assert "copied\ncopied\nenv\nenv\n" == found.stdout_text
    with pytest.raises(ExecError, match="exit code 3"):
        Template.from_host().run("exit 3").build("failing", server=server)
    with Client(server) as client:
        assert ["made", "failing"] == [each.name for each in client.templates.list()]
        client.templates.delete("failing")
        with pytest.raises(NotFound):
            client.templates.get("failing")
    with pytest.raises(InvalidRequest, match="not for steps on a server"):
        Template.from_host().run("true", mounts=["/etc:/etc"]).build("no", server=server)
    links = Template.from_host().pip_install("x", find_links=str(tmp_path))
    with pytest.raises(InvalidRequest, match="find_links"):
        links.build("no", server=server)


def test_asynchronously(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("async\n")

    async def use() -> None:
        async with AsyncClient(f"unix:{daemon.socket}") as client:
            digest = await client.templates.upload(str(tmp_path / "file"))
            assert await client.templates.has(digest)
            step = {"copy": digest, "to": "/srv/place/"}
            view = await client.templates.build({"name": "other", "steps": [step]})
            lines = [each async for each in client.templates.follow("other", view.build_id)]
            assert "end" == lines[-1]["type"]
            assert (await client.templates.publish("other")).public
            box = await client.create(template="other")
            async with box:
                assert b"async\n" == await box.files.read("/srv/place/file")
            await client.templates.delete("other")

    asyncio.run(use())


def test_by_the_command_line(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("cli\n")
    server = ["--server", f"unix:{daemon.socket}"]
    copy = f"{tmp_path}/file:/srv/place/"
    steps = ["--copy", copy, "--run", "cat /srv/place/file"]
    assert 0 == main(["build", "cli", *steps, *server])
    out, err = capsys.readouterr()
    assert ("built cli\n", True) == (out, "\ncli\n" in err)
    assert 0 == main(["list", "--json", *server])
    assert "cli" in [each["name"] for each in json.loads(capsys.readouterr().out)]
    assert 0 == main(["list", *server])
    assert "ready" in capsys.readouterr().out
    assert 0 == main(["remove", "cli", *server])
    with pytest.raises(NotFound, match="no template 'cli'"):
        main(["remove", "cli", *server])
    for words in (["prune"], ["build", "nothing"], ["build", "no", "--copy", "nowhere"]):
        with pytest.raises(InvalidRequest):
            main([*words, *server])
