"""Users that a client names where the sandbox has a root of its own: homes, relative paths, rights."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Box, Client, MakeClient

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a sandbox a root of its own"
)
_WHERE = "echo $HOME $USER $LOGNAME ~; pwd"
_SERVICE = "/filesystem.Filesystem"
_MKDIR = "mkdir -m 700 /var/private && echo -n secret > /var/private/file"


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    templates = {
        "rooted": {"profile": "own_root"},
        "placed": {"profile": "own_root", "workdir": "/tmp"},
        "small": {"profile": "own_root", "limits": {"pids": 40}},
    }
    config = tmp_path_factory.mktemp("config") / "config.json"
    config.write_text(json.dumps({"e2b": {"templates": templates}}))
    return start_daemon("--e2b", "--listen", "127.0.0.1:0", "--config", str(config))


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> Client:
    return make_client()


@pytest.fixture(scope="module")
def box(client: Client) -> Iterator[Box]:
    made = client.create(templateID="rooted", timeout=300)
    done(made, f"useradd -m alice; {_MKDIR}", "root")
    yield made
    client.api("DELETE", f"/sandboxes/{made.id}")


def named(user: str) -> dict[str, str]:
    """The header that names the user of a request; none for the sandbox's own."""
    text = base64.b64encode(f"{user}:".encode()).decode()
    return {"authorization": f"Basic {text}"} if user else {}


def done(box: Box, script: str, user: str = "", **process: Any) -> str:
    """What a command wrote, or the error of its request."""
    process = {"cmd": "/bin/bash", "args": ["-l", "-c", script], **process}
    form = {"process": process, "stdin": False}
    *messages, last = box.stream("/process.Process/Start", form, named(user))
    if "error" in last:
        return str(last["error"]["message"])
    pieces = [each["event"].get("data", {}).values() for each in messages]
    return b"".join(base64.b64decode(text) for piece in pieces for text in piece).decode()


def listed(box: Box, path: str, user: str, depth: int = 1) -> list[str]:
    found = box.rpc(f"{_SERVICE}/ListDir", {"path": path, "depth": depth}, headers=named(user))
    assert 200 == found.status_code, found.text
    return [each["path"] for each in found.json()["entries"]]


def test_each_user_begins_at_home(box: Box) -> None:
    assert "/root root root /root\n/root\n" == done(box, _WHERE, "root")
    assert "/home/alice alice alice /home/alice\n/home/alice\n" == done(box, _WHERE, "alice")
    control = "/home/user user user /home/user\n/home/user\n"
    assert control == done(box, _WHERE) == done(box, _WHERE, "user")
    done(box, "mkdir -p sub", "root")
    for cwd, where in (("sub", "/root/sub"), ("~/sub", "/root/sub"), ("/tmp", "/tmp")):
        assert f"{where}\n" == done(box, "pwd", "root", cwd=cwd)
    assert "cwd 'sub' does not exist" == done(box, "pwd", cwd="sub")


def test_a_directory_that_only_the_named_user_may_enter(box: Box) -> None:
    done(box, "mkdir -p /var/private/below", "root")
    assert "/var/private/below\n" == done(box, "pwd", "root", cwd="/var/private/below")
    assert "ermission denied" in done(box, "pwd", cwd="/var/private/below")


def test_variables_that_a_client_sets_win(client: Client, box: Box) -> None:
    assert "/tmp root\n" == done(box, "echo $HOME $USER", "root", envs={"HOME": "/tmp"})
    other = client.create(templateID="rooted", envVars={"HOME": "/var"})
    assert "/var root\n" == done(other, "echo $HOME $USER", "root")
    placed = client.create(templateID="placed")
    assert "/tmp\n" == done(placed, "pwd", "root"), "a template's own directory comes before homes"
    for each in (other, placed):
        client.api("DELETE", f"/sandboxes/{each.id}")


@pytest.mark.parametrize(("user", "home"), [("root", "/root"), ("alice", "/home/alice")])
def test_relative_paths_of_files(box: Box, user: str, home: str) -> None:
    file = {"path": "new/file", "username": user}
    assert (
        home + "/new/file"
        == box.call("POST", "/files", content=b"1", params=file).json()[0]["path"]
    )
    assert b"1" == box.call("GET", "/files", params=file).content
    assert f"{user} 1\n" == done(box, f"stat -c '%U %s' {home}/new/file", user)
    parts = {"path": "~/part", "username": user}
    sent = box.call("POST", "/files", files={"file": b"22"}, params=parts)
    assert home + "/part" == sent.json()[0]["path"]
    for name, form in (
        ("MakeDir", {"path": "made/below"}),
        ("Move", {"source": "made", "destination": "moved"}),
        ("Stat", {"path": "~/moved/below"}),
    ):
        answer = box.rpc(f"{_SERVICE}/{name}", form, headers=named(user))
        assert 200 == answer.status_code, (name, answer.text)
        assert answer.json()["entry"]["path"].startswith(f"{home}/m")
    assert {f"{home}/{name}" for name in ("moved", "new", "part")} <= {*listed(box, ".", user)}
    assert f"{home}/moved/below" in listed(box, "", user, 2)
    assert 200 == box.rpc(f"{_SERVICE}/Remove", {"path": "new"}, headers=named(user)).status_code
    assert f"{home}/new" not in listed(box, home, user)
    assert 404 == box.call("GET", "/files", params=file).status_code
    assert 404 == box.call("GET", "/files?path=new/file").status_code, "of the sandbox's own user"


def test_only_root_sees_what_is_roots(box: Box) -> None:
    script = "cd /var/private && ln -sf file link && mkdir -p $'odd\\nname'"
    done(box, script, "root")
    names = [f"/var/private/{name}" for name in ("file", "link", "odd\nname")]
    assert names == [each for each in listed(box, "/var/private", "root") if "below" not in each]
    entry = box.rpc(
        f"{_SERVICE}/Stat", {"path": "/var/private/file"}, headers=named("root")
    ).json()["entry"]
    assert ("file", "FILE_TYPE_FILE", "6", 0o644) == tuple(
        entry[key] for key in ("name", "type", "size", "mode")
    )
    missing = {"path": "/var/private/nothing"}
    assert 404 == box.rpc(f"{_SERVICE}/Stat", missing, headers=named("root")).status_code
    is_file = box.rpc(f"{_SERVICE}/ListDir", {"path": "/var/private/file"}, headers=named("root"))
    assert (400, True) == (is_file.status_code, "not a directory" in is_file.text)
    for user in ("", "alice"):
        for name in ("Stat", "ListDir", "MakeDir"):
            form = {"path": "/var/private/file"}
            refused = box.rpc(f"{_SERVICE}/{name}", form, headers=named(user))
            assert 403 == refused.status_code, (user, name, refused.text)
        query = {"path": "/var/private/file", **({"username": user} if user else {})}
        assert box.call("GET", "/files", params=query).status_code in (400, 403)
    done(box, "mkdir -m 711 /var/passage && touch /var/passage/a", "root")
    through = box.rpc(f"{_SERVICE}/ListDir", {"path": "/var/passage"}, headers=named("alice"))
    assert 403 == through.status_code, through.text
    assert ["/var/passage/a"] == listed(box, "/var/passage", "root")
    assert "0\n" == done(box, "ls -A /tmp | grep -c e2b-; true"), "no copy is left"


@pytest.mark.full
def test_a_long_list_of_roots_is_refused(box: Box) -> None:
    done(box, "mkdir -p -m 700 /var/many && cd /var/many && seq 20000 | xargs touch", "root")
    assert 20_000 == len(listed(box, "/var/many", "root"))
    done(box, "touch /var/many/more", "root")
    form = {"path": "/var/many"}
    refused = box.rpc(f"{_SERVICE}/ListDir", form, headers=named("root"))
    assert "resource_exhausted" == refused.json()["code"]


def test_an_unknown_user_is_told_so(box: Box) -> None:
    told = "invalid username: 'bob'"
    assert told == done(box, "true", "bob")
    assert told == box.call("GET", "/files?path=a&username=bob").json()["message"]
    assert (
        told
        == box.rpc(f"{_SERVICE}/ListDir", {"path": "."}, headers=named("bob")).json()["message"]
    )


def test_without_a_root_of_its_own_none_is_there(client: Client) -> None:
    box = client.create()
    assert "invalid username: 'root'" == done(box, "true", "root")
    assert 401 == box.call("GET", "/files?path=a&username=root").status_code
    client.api("DELETE", f"/sandboxes/{box.id}")


_FILL = "i=0; while [ $i -lt 60 ]; do sleep 1000 & i=$((i+1)); done; wait"
_LEAVE = "setsid sleep 1000 >/dev/null 2>&1 &"


def _running(box: Box) -> list[dict[str, Any]]:
    processes: list[dict[str, Any]] = (
        box.rpc("/process.Process/List", {}).json().get("processes", [])
    )
    return processes


@pytest.mark.parametrize("by", ["pause", "connect"])
def test_without_memory_no_users_process_goes_on(client: Client, by: str) -> None:
    """Nor where there are as many processes as there may be, and nothing can be started to end them."""
    box = client.create(templateID="small")
    for user in ("", "root"):
        done(box, _LEAVE, user)
    done(box, f"setpriv --reuid=1501 --clear-groups sh -c '{_LEAVE}'", "root")
    begun = [("sleep 1000", "root"), ("sleep 1000", ""), (_FILL, "root")]
    threads = [threading.Thread(target=done, args=(box, *each)) for each in begun]
    for each in threads:
        each.start()
    until = time.monotonic() + 20
    while len(_running(box)) < len(begun) or "processes limit" not in done(box, "true"):
        assert time.monotonic() < until

    memory = {"memory": by == "connect"}
    assert 204 == client.api("POST", f"/sandboxes/{box.id}/pause", json=memory).status_code
    form = {"timeout": 60, "memory": by == "pause"}
    assert 201 == client.api("POST", f"/sandboxes/{box.id}/connect", json=form).status_code

    assert [] == _running(box), "none is listed that has ended"
    assert "" == done(box, "pgrep sleep", "root")
    for each in threads:
        each.join(20)
    client.api("DELETE", f"/sandboxes/{box.id}")
