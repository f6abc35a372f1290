"""A newcomer's mistakes with a server.

Each row is a mistake, the name or value at fault, and a part of the remedy. Both stand in the answer,
which is a few lines without a traceback.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import ringfence
from ringfence.cli.main import main
from tests.features import require
from tests.first_use.answers import OWN_FAILURE, answers, command, refusal

pytestmark = pytest.mark.anyone

R: Any = ringfence  # a checker refuses most of what is tried here

_EXEC, _SANDBOXES = "/v1/sandboxes/{id}/execs", "/v1/sandboxes"
_POLICY = '"allowed_hosts": ["example.com"]'
BODIES: list[tuple[str, object, str, str]] = [
    (_SANDBOXES, {"imgae": "x"}, "imgae", "did you mean image?"),
    (_SANDBOXES, {"network": "all"}, "network", _POLICY),
    (_SANDBOXES, {"network": ["pypi.org"]}, "network", _POLICY),
    (_SANDBOXES, {"network": {"mode": "limited", "allowed_hosts": "all"}}, "str", '["all"]'),
    (_SANDBOXES, {"network": {"mode": "limited", "allowed_hosts": ["all"]}}, "'all'", "unrestr"),
    (_SANDBOXES, {"network": {"mode": "open"}}, "'open'", "limited or unrestricted"),
    (_SANDBOXES, {"mounts": ".:/work"}, "mounts", "[{"),
    (_SANDBOXES, {"mounts": ["src:/work"]}, "mounts[0]", "target, source"),
    (_SANDBOXES, {"mounts": [{"src": "/tmp", "target": "/w"}]}, "mounts[0].src", "source"),
    (_SANDBOXES, {"limits": {"memory": "256m"}}, "limits.memory", "memory_bytes"),
    (_SANDBOXES, {"limits": {"memory_bytes": "256m"}}, "'256m'", "268435456"),
    (_SANDBOXES, {"limits": {"cpus": -1}}, "-1", "between 0.001 and"),
    (_SANDBOXES, {"env": ["A=b"]}, "env", '{"NAME": "value"}'),
    (_SANDBOXES, {"protect": "all"}, "protect", '["all"]'),
    (_SANDBOXES, {"unprotect": "all"}, "unprotect", '["all"]'),
    (_SANDBOXES, {"allow_degraded": "all"}, "allow_degraded", '["all"]'),
    (_SANDBOXES, {"allow_degraded": ["all"]}, "'all'", "memory_limit"),
    (_SANDBOXES, {"backend": "dokcer"}, "'dokcer'", "native"),
    (_SANDBOXES, {"tier": "hard"}, "'hard'", "light or strong"),
    (_SANDBOXES, {"ttl_s": "1h"}, "'1h'", "as 3600"),
    (_SANDBOXES, [], "list", '{"name"'),
    ("/v1/sandbox", {}, "/v1/sandbox", "openapi.json"),
    (_EXEC, {"argv": "ls"}, "argv", '["ls", "-l"]'),
    (_EXEC, {"command": "ls"}, "command", "argv"),
    (_EXEC, {"argv": ["ls"], "timeout": 3}, "timeout", "timeout_s"),
    (_EXEC, {"argv": []}, "argv", '["ls", "-l"]'),
    ("/v1/sandboxes/nope/execs", {"argv": ["ls"]}, "'nope'", "ringfence list"),
]


ON_SERVER: list[tuple[str, str, str]] = [
    ("code", "SANDBOX", "ringfence code"),
    ("code nope x", "'nope'", "ringfence list"),
    ("code {id} --language ruby x", "'ruby'", "python, bash, node"),
    ("code {id} --context nope x", "no context 'nope'", "--list"),
    ("code {id} --interrupt", "--context", "--list"),
    ("code {id} --close", "--context", "--list"),
    ("code {id} --timeout 5min x", "--timeout", "5s"),
    ("code {id} --timeout 0 x", "--timeout", "between 0.001 and"),
    ("code {id} --list x=1", "CODE", "--list"),
    ("code {id} --new --context c x", "--new", "--context"),
    ("code {id} --language bash --context c x", "--language", "--context"),
    ("code {id} x = 41", "'='", "quote"),
    ("fork", "SANDBOX", "ringfence fork"),
    ("fork nope", "'nope'", "ringfence list"),
    ("fork {snapshot}", "{snapshot}", "create --snapshot"),
    ("fork {id} --n 0", "--n", "between 1 and 1000"),
    ("fork {id} --n two", "'two'", "--n 3"),
    ("fork {id} -n two", "'two'", "--n 3"),
    ("fork {id} --processes maybe", "'maybe'", "auto, none or required"),
    ("fork {id} --label team", "'team'", "NAME=value"),
    ("merge {fork}", "--base", "ringfence snapshot list"),
    ("merge {fork} --base {snapshot}", "--into", "--to DIR"),
    ("merge {fork} --base {snapshot} --to src --into {id}", "--into", "--to DIR"),
    ("merge {fork} --base nope --into {id}", "'nope'", "ringfence snapshot list"),
    ("merge {fork} --base {snapshot} --into nope", "'nope'", "ringfence list"),
    ("merge {fork} --base {snapshot} --into {fork}", "itself", "name the sandbox"),
    ("merge {fork} --base {snapshot} --to nope", "/nope", "on this host"),
    ("merge {fork} --base {snapshot} --to src --prefer mine", "'mine'", "ours or theirs"),
    ("merge {fork} --base {snapshot} --to src --path nope", "nope", "no such directory"),
    ("merge {fork} --base {snapshot} --into {id} --path nope", "nope", "no such directory"),
    ("merge {fork} --base {snapshot} --to src --dryrun", "--dryrun", "--dry-run"),
    ("tree nope", "'nope'", "remove the argument"),
    ("template", "VERB", "build, list, remove, prune"),
    ("template build", "NAME", "template build NAME"),
    ("template build ds", "no step", "--pip PACKAGE"),
    ("template build ds pandas", "'pandas'", "--pip pandas"),
    ("template build Tools --pip six", "'Tools'", "a-z 0-9"),
    ("template build ds --pip -r", "'-r'", "pandas>=2"),
    ("template build ds --pip six --find-links nope", "/nope", "on this host"),
    ("template build ds --pip six --index-url pypi.org", "'pypi.org'", "https://"),
    ("template remove nope", "'nope'", "ringfence template list"),
    ("template rm nope", "'rm'", "did you mean remove?"),
    ("template list ds", "'ds'", "remove"),
    ("snapshot", "VERB", "create, list, rm"),
    ("snapshot create", "SANDBOX", "snapshot create"),
    ("snapshot create nope", "'nope'", "ringfence list"),
    ("snapshot create {id} --meta step", "'step'", "NAME=value"),
    ("snapshot delete {snapshot}", "'delete'", "did you mean rm?"),
    ("snapshot restore {snapshot}", "'restore'", "create --snapshot"),
    ("create --snapshot {id}", "{id}", "ringfence snapshot list"),
    ("create --name=", "must not be empty", "remove the option"),
    ("create --label a=1 --label a=2", "'a' is given twice", "each name once"),
    ("pool set min_warm=1 min_warm=2", "'min_warm' is given twice", "each name once"),
    ("exec BUILD -- ls", "no sandbox is called 'BUILD'", "ringfence list"),
    ("rm *", "no sandbox is called '*'", "ringfence list"),
    ("serve --domain box.example.com", "--domain", "--e2b"),
    ("serve --internet public", "--internet", "--e2b"),
    ("serve --e2b --internet yes", "--internet", "public"),
    ("serve --e2b --internet localhost:80", "--internet", "127.0.0.1"),
    ("serve --e2b --domain https://box.example.com", "--domain", "sandboxes.example.com"),
    ("serve --e2b=yes", "'yes'", "--e2b"),
    ("keys create", "OWNER", "keys create OWNER"),
    ("keys create me --scope root", "'root'", "read_only"),
    ("keys create me --expires 30", "'30'", "30d"),
    ("keys create me --expires tomorrow", "'tomorrow'", "5s"),
    ("keys create me --max-sandboxes -1", "-1", "at least 0"),
    ("keys rotate nope", "'nope'", "ringfence keys list"),
    ("keys rm me", "'me'", "ringfence keys list"),
    ("doctor --repair", "--repair", "doctor --help"),
    ("doctor --attack --backend nope", "'nope'", "native"),
]
"""Commands that a server is asked for, and those that stand beside them in the help."""


class Server:
    """A daemon on a unix socket and a TCP port, started and stopped by the command line."""

    def __init__(self, state: Path) -> None:
        self.options = ["--state-dir", str(state)]
        line = ["serve", "--detach", "--json", "--listen", "127.0.0.1:0", *self.options]
        started = command(line, state.parent)
        assert 0 == started.returncode, started.stderr
        self.tcp = json.loads(started.stdout)["listening"][1]
        self.unix = f"unix:{state / 'ringfence.sock'}"
        transport = httpx.HTTPTransport(uds=str(state / "ringfence.sock"), verify=False)
        self.http = httpx.Client(transport=transport, base_url="http://localhost", timeout=60)

    def stop(self) -> None:
        self.http.close()
        assert "stopped\n" == command(["serve", "--stop", *self.options], Path("/")).stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require("user namespaces")
    directory = tmp_path_factory.mktemp("mistakes")
    os.chmod(directory, 0o700)
    made = Server(directory / "s")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ids(server: Server, sandbox_id: str) -> dict[str, str]:
    """A sandbox, a fork of it, and a snapshot from before the fork."""
    at = f"{_SANDBOXES}/{sandbox_id}"
    snapshot = server.http.post(f"{at}/snapshots", json={}).json()["id"]
    fork = server.http.post(f"{at}/fork", json={}).json()["items"][0]["id"]
    return {"id": sandbox_id, "fork": fork, "snapshot": snapshot}


@pytest.mark.parametrize(("line", "fault", "remedy"), ON_SERVER, ids=lambda value: value[:50])
def test_commands_of_a_server(
    line: str,
    fault: str,
    remedy: str,
    place: Path,
    server: Server,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = line.format(**ids).split()
    state = place / "serving"
    if "serve" == words[0]:
        words += ["--state-dir", str(state)]
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_DATA_HOME", str(place))  # templates
    monkeypatch.setenv("RINGFENCE_SERVER", server.unix)
    monkeypatch.setattr(sys, "argv", ["ringfence", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    code = main()

    output = capfd.readouterr()
    assert (OWN_FAILURE, "") == (code, output.out)
    told = output.err.strip().splitlines()[-1]  # behind what pip prints
    answers(told, fault.format(**ids), remedy)
    assert not (state / "ringfence.sock").exists()


def test_a_path_in_place_of_code_is_taken_for_the_file(
    place: Path, server: Server, ids: dict[str, str]
) -> None:
    line = ["code", "--server", server.unix, ids["id"], "hello.py"]

    result = command(line, place)

    assert 1 == result.returncode
    assert f"ringfence code {ids['id']} < hello.py" in result.stderr


@pytest.fixture(scope="module")
def sandbox_id(server: Server) -> str:
    found: str = server.http.post("/v1/sandboxes", json={}).json()["id"]
    return found


@pytest.mark.parametrize(
    ("path", "body", "fault", "remedy"), BODIES, ids=lambda value: str(value)[:50]
)
def test_bodies(
    path: str, body: object, fault: str, remedy: str, server: Server, sandbox_id: str
) -> None:
    answer = server.http.post(path.format(id=sandbox_id), json=body)
    told = answer.json()

    assert answer.status_code in (404, 422)
    answers(f"{told['field']}: {told['message']} ({told['hint']})", fault, remedy)


def test_a_body_that_is_no_json(server: Server) -> None:
    form = server.http.post(_SANDBOXES, data={"image": "x"}).json()
    broken = server.http.post(
        _SANDBOXES, content="{image: x}", headers={"Content-Type": "application/json"}
    ).json()

    assert "Content-Type: application/json" in form["hint"]
    assert "double quotes" in broken["hint"]


def test_keys_of_a_server(server: Server) -> None:
    """No key, and a wrong one: over TCP a caller is known by its key alone."""
    for key in ("", "wrong"):
        with R.Client(server.tcp, key=key) as client:
            answers(refusal(client.list), "key", "ringfence keys create")
