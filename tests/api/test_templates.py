"""Templates that clients build over HTTP: whose they are, what bounds them, and what a kill leaves."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.images.test_host_templates import wheel

pytestmark = pytest.mark.anyone

MakeClient = Callable[[str], httpx.Client]
_BOUNDS = {
    "templates": 6,
    "builds_of_client": 1,
    "waiting_of_client": 3,
    "output_bytes": 20_000,
    "upload_bytes": 100_000,
}


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    config = tmp_path_factory.mktemp("config") / "config.json"
    pool = {"profiles": {"made": {"template": "pooled"}}, "min_warm": 0, "max_warm": 4}
    config.write_text(json.dumps({"manager": {"templates": _BOUNDS, "pool": pool}}))
    return start_daemon("--listen", "127.0.0.1:0", "--config", str(config))


@pytest.fixture(scope="module")
def make(daemon: Daemon) -> Iterator[MakeClient]:
    """A client of an owner."""
    clients: list[httpx.Client] = []

    def made(owner: str) -> httpx.Client:
        with daemon.client() as admin:
            key = admin.post("/v1/keys", json={"owner": owner}).json()["key"]
        clients.append(httpx.Client(base_url=daemon.tcp, headers={"x-api-key": key}, timeout=60))
        return clients[-1]

    yield made
    for each in clients:
        each.close()


@pytest.fixture(scope="module")
def ann(make: MakeClient) -> httpx.Client:
    return make("ann")


@pytest.fixture(scope="module")
def bob(make: MakeClient) -> httpx.Client:
    return make("bob")


def build(client: httpx.Client, name: str, *steps: Any, **more: Any) -> dict[str, Any]:
    """Ask for a build, and wait for its end."""
    asked = client.post("/v1/templates", json={"name": name, "steps": steps, **more})
    assert 201 == asked.status_code, asked.text
    return ended(client, name)


def log_of(client: httpx.Client, name: str, offset: int = 0) -> list[dict[str, Any]]:
    """The lines of the newest build, until it ends."""
    path = f"/v1/templates/{name}/logs?follow=true&offset={offset}"
    with client.stream("GET", path) as answer:
        return [json.loads(line) for line in answer.iter_lines()]


def ended(client: httpx.Client, name: str) -> dict[str, Any]:
    """The template, once its newest build has ended."""
    assert "end" == log_of(client, name)[-1]["type"]
    found: dict[str, Any] = client.get(f"/v1/templates/{name}").json()
    return found


def said(client: httpx.Client, name: str) -> list[str]:
    return [each["message"] for each in log_of(client, name) if each["type"] == "log"]


def run(client: httpx.Client, template: str, script: str) -> str:
    """The output of a script in a new sandbox of a template."""
    made = client.post("/v1/sandboxes", json={"template": template})
    assert 201 == made.status_code, made.text
    place = f"/v1/sandboxes/{made.json()['id']}"
    argv = {"argv": ["sh", "-c", script], "wait": True}
    result = client.post(f"{place}/execs", json=argv).json()["result"]
    client.delete(place)
    return str(result["stdout"] + result["stderr"])


def archive(*members: tuple[str, bytes | str]) -> bytes:
    """A tar stream of files, and of symlinks where the content is text."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def upload(client: httpx.Client, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    assert 201 == client.put(f"/v1/uploads/{digest}", content=data).status_code
    return digest


def test_steps_are_layers_and_sandboxes_have_what_they_made(ann: httpx.Client) -> None:
    steps = [
        {"env": {"WORD": "one"}},
        {"run": "echo $WORD > ~/file; echo seen"},
        {"workdir": "/app"},
        {"run": ["sh", "-c", "pwd > where"]},
    ]
    made = build(ann, "whole", *steps)
    assert ("ready", True, 4, "") == tuple(made[k] for k in ("status", "is_ready", "step", "error"))
    assert "seen" in said(ann, "whole")
    assert "one\n/app\none\n" == run(ann, "whole", "cat ~/file where; echo $WORD")
    # A sandbox changes nothing of it.
    assert "" == run(ann, "whole", "rm -r ~/file where")
    assert "one\n" == run(ann, made["id"], "cat ~/file")

    build(ann, "again", *steps)
    assert 2 == said(ann, "again").count("cached")
    build(ann, "over", {"run": "cat ~/file where > both"}, base={"template": "whole"})
    assert "one\n/app\n" == run(ann, "over", "cat /app/both")
    for name in ("again", "over", "whole"):
        assert 204 == ann.delete(f"/v1/templates/{name}").status_code


def test_logs_are_resumed_where_they_were_left(ann: httpx.Client) -> None:
    build(ann, "log", {"run": "seq 5"})
    lines = log_of(ann, "log")
    assert [str(i) for i in range(1, 6)] == [
        e["message"] for e in lines if e.get("level") == "debug"
    ]
    rest = log_of(ann, "log", lines[2]["cursor"])
    assert lines[3:] == rest
    refused = ann.get("/v1/templates/log/logs?offset=3")
    assert (422, "offset") == (refused.status_code, refused.json()["field"])
    assert ["end"] == [each["type"] for each in log_of(ann, "log", 1 << 62)]
    ann.delete("/v1/templates/log")


def test_a_failed_build_tells_why_and_leaves_the_one_before(ann: httpx.Client) -> None:
    build(ann, "kept", {"run": "echo first > ~/file"})
    failed = build(ann, "kept", {"run": "echo why >&2; exit 3"})
    assert "failed" == failed["status"]
    assert "exit code 3: why" in failed["error"]
    assert "first\n" == run(ann, "kept", "cat ~/file")
    ann.delete("/v1/templates/kept")


def test_another_owner_sees_and_changes_nothing(ann: httpx.Client, bob: httpx.Client) -> None:
    made = build(ann, "own", {"run": "echo ann > ~/file"})
    for name in ("own", made["id"]):
        place = f"/v1/templates/{name}"
        answers = [
            bob.get(place),
            bob.get(f"{place}/logs"),
            bob.delete(place),
            bob.patch(place, json={"public": False}),
        ]
        assert [404] * 4 == [each.status_code for each in answers]
        assert 422 == bob.post("/v1/sandboxes", json={"template": name}).status_code
    assert 422 == bob.post("/v1/sandboxes", json={"template": made["build_id"]}).status_code
    assert [] == bob.get("/v1/templates").json()["items"]
    assert (
        [] == ann.get("/v1/snapshots").json()["items"] == bob.get("/v1/snapshots").json()["items"]
    )
    # The same name and the same steps are another template, and another cache.
    build(bob, "own", {"run": "echo ann > ~/file"}, {"run": "echo bob > ~/file"})
    assert "cached" not in said(bob, "own")
    assert ("ann\n", "bob\n") == (run(ann, "own", "cat ~/file"), run(bob, "own", "cat ~/file"))
    secret = archive(("secret", b"ann's"))
    digest = upload(ann, secret)
    assert not bob.get(f"/v1/uploads/{digest}").json()["present"]
    wanted = {"accept": "application/x-tar"}
    mine, his = (who.get(f"/v1/uploads/{digest}", headers=wanted) for who in (ann, bob))
    assert (200, secret) == (mine.status_code, mine.content)
    assert (404, "file_not_found") == (his.status_code, his.json()["code"])
    stolen = bob.post(
        "/v1/templates", json={"name": "stolen", "steps": [{"copy": digest, "to": "/tmp/x"}]}
    )
    assert (422, "steps[0].copy") == (stolen.status_code, stolen.json()["field"])
    for client in (ann, bob):
        assert 204 == client.delete("/v1/templates/own").status_code


def test_a_key_is_for_one_build_of_its_own_client(ann: httpx.Client, bob: httpx.Client) -> None:
    asked: dict[str, Any] = {"headers": {"idempotency-key": "k"}, "json": {"name": "keyed"}}
    first, again, other = (who.post("/v1/templates", **asked) for who in (ann, ann, bob))

    assert [201] * 3 == [each.status_code for each in (first, again, other)]
    assert ["ann", "bob"] == [each.json()["owner"] for each in (again, other)]
    assert first.json()["build_id"] == again.json()["build_id"] != other.json()["build_id"]
    for client in (ann, bob):
        assert "ready" == ended(client, "keyed")["status"]
        client.delete("/v1/templates/keyed")


def test_an_admin_makes_a_template_public(
    daemon: Daemon, ann: httpx.Client, bob: httpx.Client
) -> None:
    refused = bob.post("/v1/templates", json={"name": "all", "public": True})
    assert (403, "public") == (refused.status_code, refused.json()["field"])
    with daemon.client() as admin:
        build(admin, "all", {"run": "echo all > ~/file"}, public=True)
        assert "all\n" == run(bob, "all", "cat ~/file")
        assert 404 == bob.delete("/v1/templates/all").status_code
        assert 404 == bob.get("/v1/templates/all/logs").status_code
        build(bob, "mine", {"run": "cat ~/file > ~/mine"}, base={"template": "all"})
        assert 204 == admin.delete("/v1/templates/all").status_code
    assert 422 == bob.post("/v1/sandboxes", json={"template": "all"}).status_code
    assert "all\n" == run(bob, "mine", "cat ~/mine")
    bob.delete("/v1/templates/mine")


def test_a_name_that_two_clients_use_is_none_for_an_admin(
    daemon: Daemon, ann: httpx.Client, bob: httpx.Client
) -> None:
    """What an admin removes by name must not be another's."""
    anns, bobs = (build(each, "same", {"run": "true"})["id"] for each in (ann, bob))
    with daemon.client() as admin:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/logs")):
            refused = admin.request(method, f"/v1/templates/same{path}")
            assert (422, "template") == (refused.status_code, refused.json()["field"])
            assert anns in refused.json()["hint"]
            assert bobs in refused.json()["hint"]
        assert anns == ann.get("/v1/templates/same").json()["id"]
        assert 204 == admin.delete(f"/v1/templates/{anns}").status_code
        assert bobs == admin.get("/v1/templates/same").json()["id"]
        assert 204 == admin.delete("/v1/templates/same").status_code
    assert [] == bob.get("/v1/templates").json()["items"]


def test_what_one_owner_writes_over_a_public_template_no_other_sees(
    daemon: Daemon, ann: httpx.Client, bob: httpx.Client
) -> None:
    """Neither from a sandbox nor by a build on top of it, and no sandbox reaches the files below."""
    write = "echo bob > ~/file; chmod 600 ~/file; echo new > ~/new; cat ~/file; ls ~"
    with daemon.client() as admin:
        build(admin, "common", {"run": "echo built > ~/file"}, public=True)
        made = bob.post("/v1/sandboxes", json={"template": "common"}).json()["id"]
        argv = {"argv": ["sh", "-c", write], "wait": True}
        written = bob.post(f"/v1/sandboxes/{made}/execs", json=argv).json()["result"]
        assert "bob\nfile\nnew\n" == written["stdout"]
        assert "ready" == build(bob, "over", {"run": write}, base={"template": "common"})["status"]
        for client in (ann, bob, admin):
            assert "built\nfile\n" == run(client, "common", "cat ~/file; ls ~")
        assert "bob\nfile\nnew\n" == run(bob, "over", "cat ~/file; ls ~")
        bob.delete(f"/v1/sandboxes/{made}")
        bob.delete("/v1/templates/over")
        admin.delete("/v1/templates/common")


def test_files_of_a_removed_template_stay_for_the_sandboxes_that_use_them(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    state = tmp_path / "state"

    def streams() -> list[Path]:
        return [*state.rglob("content.tar")]

    with start_daemon(state_dir=state).client() as client:
        script = "head -c 8000000 /dev/urandom > ~/file"  # large enough to be mounted
        build(client, "first", {"run": script})
        build(client, "second", {"run": script + "; :"})
        assert 2 == len(streams())
        made = client.post("/v1/sandboxes", json={"template": "first"}).json()["id"]
        assert 204 == client.delete("/v1/templates/first").status_code
        assert 422 == client.post("/v1/sandboxes", json={"template": "first"}).status_code
        argv = {"argv": ["sh", "-c", "wc -c < ~/file"], "wait": True}
        found = client.post(f"/v1/sandboxes/{made}/execs", json=argv).json()["result"]
        assert "8000000\n" == found["stdout"]
        client.delete(f"/v1/sandboxes/{made}")
        client.delete("/v1/templates/second")
        assert [] == client.get("/v1/snapshots").json()["items"]
        assert [] == streams()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"base": {"profile": "unrestricted"}}, "base.profile"),
        ({"base": {"network": {"mode": "unrestricted"}}}, "base.network.mode"),
        ({"base": {"network": {"mode": "limited", "allowed_hosts": ["10.0.0.1"]}}}, "network"),
        ({"base": {"mounts": [{"target": "/x", "source": "/etc"}]}}, "base.mounts[0].source"),
        ({"steps": [{"pip_install": ["x"], "index_url": "http://127.0.0.1/simple"}]}, "index_url"),
        (
            {"steps": [{"run": "true", "network": {"mode": "unrestricted"}}]},
            "steps[0].network.mode",
        ),
    ],
)
def test_a_build_may_no_more_than_its_owner(
    ann: httpx.Client, body: dict[str, Any], field: str
) -> None:
    refused = ann.post("/v1/templates", json={"name": "no", **body})
    assert 403 == refused.status_code, refused.text
    assert field in refused.json()["field"]


@pytest.mark.parametrize(
    "step",
    [
        {"copy": "0" * 64, "to": "/x/../../etc/passwd"},
        {"copy": "0" * 64, "to": "/x", "source": "../../etc"},
        {"copy": "0" * 64, "to": "/x", "source": "/etc"},
        {"copy": "../../etc/passwd", "to": "/x"},
        {"pip_install": ["--index-url=http://evil"]},
        {"run": "true", "env": {"A": "b"}},
        {},
    ],
)
def test_malformed_steps_are_refused(ann: httpx.Client, step: dict[str, Any]) -> None:
    refused = ann.post("/v1/templates", json={"name": "no", "steps": [step]})
    assert (422, "steps[0]") == (refused.status_code, refused.json()["field"].partition(".")[0])


def test_copies_and_their_bounds(ann: httpx.Client, daemon: Daemon) -> None:
    data = archive(("src/a.txt", b"a"), ("src/sub/b.txt", b"b"), ("c.txt", b"c"))
    digest = upload(ann, data)
    build(
        ann,
        "copied",
        {"copy": digest, "source": "src", "to": "/srv/data"},
        {"copy": digest, "source": "c.txt", "to": "/srv/data/"},
        {"copy": digest, "source": "src/*.txt", "to": "/srv/text", "mode": "600"},
        {"workdir": "/srv/work"},
        {"copy": digest, "source": "c.txt", "to": "."},
        {"copy": digest, "source": "src", "to": "more/src"},
    )
    found = run(ann, "copied", "cd /srv; find . -type f -printf '%P %m\\n' | sort")
    wanted = "data/a.txt 644\ndata/c.txt 644\ndata/sub/b.txt 644\ntext/a.txt 600\n"
    wanted += "work/c.txt 644\nwork/more/src/a.txt 644\nwork/more/src/sub/b.txt 644\n"
    assert wanted == found
    assert 422 == ann.put(f"/v1/uploads/{'0' * 64}", content=data).status_code
    large = b"x" * 200_000
    assert (
        413
        == ann.put(f"/v1/uploads/{hashlib.sha256(large).hexdigest()}", content=large).status_code
    )
    left = [*(daemon.state_dir / "templates" / "uploads").rglob(".partial*")]
    assert not left
    ann.delete("/v1/templates/copied")


def test_an_upload_stays_for_the_build_that_names_it(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """What is freed for a build that would not fit is what that one does not need."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"manager": {"templates": {"bytes": 100_000}}}))
    with start_daemon("--config", str(config)).client() as client:
        digest = upload(client, archive(("kept", os.urandom(40_000))))
        other = upload(client, archive(("other", os.urandom(10_000))))
        build(client, "large", {"run": "head -c 200000 /dev/urandom > ~/file"})
        steps = [{"copy": digest, "to": "/srv/data"}]
        refused = client.post("/v1/templates", json={"name": "copied", "steps": steps})
        assert (429, "bytes") == (refused.status_code, refused.json()["field"])
        client.delete("/v1/templates/large")
        assert "ready" == build(client, "copied", *steps)["status"]
        steps = [{"copy": other, "to": "/srv/data"}]
        gone = client.post("/v1/templates", json={"name": "second", "steps": steps})
        assert (422, "steps[0].copy") == (gone.status_code, gone.json()["field"])


def test_a_hostile_archive_reaches_nothing_but_its_sandbox(
    ann: httpx.Client, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    members: list[tuple[str, bytes | str]] = [
        ("up", "/"),
        ("../../climbed", b"x"),
        (f"up{mark}", b"x"),
        ("fine", b"fine"),
    ]
    for number in range(3):
        digest = upload(ann, archive(members[number], members[3]))
        view = build(ann, "hostile", {"copy": digest, "to": "/srv/data"})
        if view["status"] == "ready":
            assert "fine" == run(ann, "hostile", "cat /srv/data/fine; ls /climbed 2>/dev/null")
    assert not mark.exists()
    ann.delete("/v1/templates/hostile")


def test_what_a_build_may_use_is_bounded(ann: httpx.Client, bob: httpx.Client) -> None:
    printed = build(ann, "much", {"run": "yes"})
    assert "printed more than 20000 bytes" in printed["error"]
    slow = build(ann, "much", {"run": "sleep 600", "timeout_s": 0.5})
    assert "took longer than 0.5 s" in slow["error"]
    both = build(ann, "much", {"run": "trap '' TERM INT; sleep 600"}, timeout_s=0.5)
    assert "took longer" in both["error"]
    limits = {"limits": {"disk_bytes": 16 << 20}}
    full = build(ann, "much", {"run": "head -c 100000000 /dev/zero > ~/file"}, base=limits)
    assert "No space left" in full["error"]
    ann.delete("/v1/templates/much")
    for number in range(_BOUNDS["templates"]):
        assert 201 == bob.post("/v1/templates", json={"name": f"t{number}"}).status_code
        ended(bob, f"t{number}")
    more = bob.post("/v1/templates", json={"name": "more"})
    assert (429, "quota_exceeded") == (more.status_code, more.json()["code"])
    for number in range(_BOUNDS["templates"]):
        bob.delete(f"/v1/templates/t{number}")


def test_many_builds_wait_their_turn_or_are_refused(bob: httpx.Client) -> None:
    def ask(_number: int) -> int:
        body = {"name": "turns", "steps": [{"run": "sleep 600"}]}
        return bob.post("/v1/templates", json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(40)))
    assert 1 + _BOUNDS["waiting_of_client"] == answers.count(201)
    assert {201, 429} == set(answers)
    assert 204 == bob.delete("/v1/templates/turns").status_code
    assert 404 == bob.get("/v1/templates/turns").status_code
    assert [] == bob.get("/v1/sandboxes").json()["items"]


@pytest.mark.full
def test_a_start_command_runs_in_each_sandbox(ann: httpx.Client) -> None:
    script = "echo up > /tmp/up; exec sleep 600"
    build(ann, "started", {"run": "true"}, start=script, ready="test -f /tmp/up")
    assert "up\nsleep 600\n" == run(
        ann, "started", "cat /tmp/up; tr '\\0' ' ' < /proc/$(pgrep sleep)/cmdline | xargs echo"
    )
    never = build(ann, "started", {"run": "true"}, start="true", ready="false", timeout_s=2)
    assert "was not ready" in never["error"]
    # One that has ended well may have left behind what gets ready.
    assert "ready" == build(ann, "started", {"run": "true"}, start="true", ready="true")["status"]
    for ready in ("false", "sleep 0.5"):
        failed = build(ann, "started", {"run": "true"}, start="echo why; exit 3", ready=ready)
        said = "the start command ended with exit code 3 before it was ready; it printed: why"
        assert said in failed["error"], failed
    ann.delete("/v1/templates/started")


def test_pools_start_from_templates(daemon: Daemon, ann: httpx.Client) -> None:
    with daemon.client() as admin:
        build(admin, "pooled", {"run": "echo warm > ~/file"}, public=True)
        config = admin.get("/v1/pools").json()["config"]
        config |= {"warm_profiles": ["made"], "min_warm": 1}
        assert 200 == admin.put("/v1/pools", json=config).status_code
        until = time.monotonic() + 60
        while not admin.get("/v1/pools").json()["warm"]:
            assert time.monotonic() < until, admin.get("/v1/pools").text
            time.sleep(0.05)
        before = admin.get("/v1/stats").json()["pool_hits"]
        assert "warm\n" == run(ann, "pooled", "cat ~/file")
        assert before + 1 == admin.get("/v1/stats").json()["pool_hits"]
        admin.put("/v1/pools", json={**config, "warm_profiles": [], "min_warm": 0})
        admin.delete("/v1/templates/pooled")


@pytest.mark.full
def test_a_build_goes_on_after_the_daemon_was_killed(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    first = start_daemon(state_dir=tmp_path / "state")
    steps = [
        {"run": "echo one > ~/file"},
        {"run": "echo try >> /tmp/try; sleep 3; echo two >> ~/file"},
    ]
    with first.client() as client:
        client.post("/v1/templates", json={"name": "cut", "steps": steps})
        while client.get("/v1/templates/cut").json()["step"] < 2:
            time.sleep(0.05)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = start_daemon(state_dir=tmp_path / "state")
    with second.client() as client:
        assert "ready" == ended(client, "cut")["status"]
        assert 1 == said(client, "cut").count("cached")
        assert "one\ntwo\ntry\n" == run(client, "cut", "cat ~/file /tmp/try")
        assert [] == client.get("/v1/sandboxes").json()["items"]
        assert 2 == len(client.get("/v1/snapshots").json()["items"])
        client.delete("/v1/templates/cut")
        assert [] == client.get("/v1/snapshots").json()["items"]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A package index: its URL, the directory of its wheels, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_args: object) -> None:
            pass

    (tmp_path / "simple" / "one").mkdir(parents=True)
    handler = partial(Handler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/simple", tmp_path / "simple" / "one", asked
        server.shutdown()


@pytest.mark.full
def test_packages_of_one_owner_are_not_those_of_another(
    daemon: Daemon, index: tuple[str, Path, list[str]]
) -> None:
    url, place, asked = index
    step = {"pip_install": ["one"], "index_url": url}
    with daemon.client() as admin:
        wheel(place, "one", "1", "value = 'first'\ndef main(): print('script', value)\n")
        look = {"run": "ls -A /mnt/pip-cache; touch /mnt/pip-cache/x"}
        made = build(admin, "first", step, look)
        assert "failed" == made["status"]
        assert "/mnt/pip-cache" in made["error"]
        build(admin, "first", step)
        run_it = "python3 -c 'import one; print(one.value)'; one"
        assert "first\nscript first\n" == run(admin, "first", run_it)
        cell = admin.post("/v1/sandboxes", json={"template": "first"}).json()["id"]
        context = admin.post(f"/v1/sandboxes/{cell}/contexts", json={}).json()["id"]
        code = {"code": "import one; print(one.value)"}
        found = admin.post(f"/v1/sandboxes/{cell}/contexts/{context}/cells", json=code)
        assert "first" in found.text
        admin.delete(f"/v1/sandboxes/{cell}")

        # Another wheel of the same name: what was built stays, whatever is built anew has it.
        wheel(place, "one", "1", "value = 'second'\ndef main(): print('script', value)\n")
        before = len(asked)
        build(admin, "again", step)
        assert before == len(asked)
        assert "first\n" == run(admin, "again", "python3 -c 'import one; print(one.value)'")
        key = admin.post("/v1/keys", json={"owner": "eve", "scope": "admin"}).json()["key"]
        with httpx.Client(base_url=daemon.tcp, headers={"x-api-key": key}, timeout=60) as eve:
            build(eve, "eves", step)
            assert "second\n" == run(eve, "eves", "python3 -c 'import one; print(one.value)'")
            eve.delete("/v1/templates/eves")
        caches = [*(daemon.state_dir / "templates" / "pip").iterdir()]
        assert 2 == len(caches)
        assert not [each for each in caches[0].rglob("*") if each.is_symlink()]
        for name in ("first", "again"):
            admin.delete(f"/v1/templates/{name}")


def test_a_second_sandbox_takes_no_room_for_the_files(ann: httpx.Client) -> None:
    build(ann, "large", {"run": "head -c 8000000 /dev/urandom > ~/file"})
    used = "stat -c %s ~/file; df --output=used -k ~ | tail -1"
    for _ in range(2):
        size, kib = run(ann, "large", used).split()
        assert "8000000" == size
        assert int(kib) < 2000
    copied = run(ann, "large", f"cp ~/file ~/copy; {used}").split()
    assert int(copied[1]) > 7000  # the control
    ann.delete("/v1/templates/large")


_MATPLOTLIB = r"""
place=$(python3 -m site --user-site)/matplotlib; mkdir -p "$place"; : >"$place/__init__.py"
cat >"$place/font_manager.py" <<'END'
import os
place = os.path.expanduser("~/.cache/matplotlib")
if is_made := not os.path.exists(place):
    os.makedirs(place)
END
"""
_IS_MADE = "python3 -c 'from matplotlib import font_manager as f; print(f.is_made)'"


@pytest.mark.full
def test_matplotlibs_fonts_are_listed_once(ann: httpx.Client) -> None:
    """By the last step of a build, whatever installed it; a package that fails there fails no build."""
    assert "ready" == build(ann, "plots", {"run": _MATPLOTLIB})["status"]
    assert "False\n" == run(ann, "plots", _IS_MADE)
    assert "ready" == build(ann, "plots", {"run": _MATPLOTLIB})["status"]
    assert ["cached"] == [each for each in said(ann, "plots") if each == "cached"]
    assert "False\n" == run(ann, "plots", _IS_MADE), "also where every step was known"
    broken = _MATPLOTLIB.replace("import os\n", "import nothing\n")
    assert "ready" == build(ann, "plots", {"run": broken})["status"]
    assert any("no list of fonts" in each for each in said(ann, "plots"))
    assert "No module named 'nothing'" in run(ann, "plots", _IS_MADE)
    ann.delete("/v1/templates/plots")


@pytest.mark.full
def test_a_layer_made_anew_leaves_earlier_builds_what_they_have(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Also after a restart, which removes layers that nothing needs."""
    state = tmp_path / "state"
    daemon = start_daemon(state_dir=state)
    first, more = {"run": "date +%N > ~/one"}, {"run": "date +%N > ~/two"}

    def times(client: httpx.Client, name: str) -> list[str]:
        return run(client, name, "cat ~/one ~/two").split()

    with daemon.client() as client:
        assert "ready" == build(client, "old", first, more)["status"]
        before = times(client, "old")
        assert "ready" == build(client, "new", first, {**more, "fresh": True})["status"]
        anew = times(client, "new")
        assert (before[0], False) == (anew[0], before[1] == anew[1])
        assert "ready" == build(client, "new", first, more, fresh=True)["status"]
        assert "ready" == build(client, "same", first, more)["status"]
        assert times(client, "new") == times(client, "same") != anew
    daemon.stop()
    with start_daemon(state_dir=state).client() as client:
        assert before == times(client, "old")
        left = client.get("/v1/snapshots").json()["items"]
        assert 4 == len(left), "two layers of `old`, two of `new`; those in between are gone"
