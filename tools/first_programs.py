"""Run what the page of an extra shows first, in an environment with this extra alone.

    python tools/first_programs.py EXTRA ENVIRONMENT HOME [COMMAND...]

It runs by way of COMMAND, such as setpriv, in a directory of HOME. Prints why and exits with 1 if it
fails, and with 77 if this machine lacks what the page asks for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).parent.parent
sys.path.insert(0, str(TREE))
LACKING = 77
TIMEOUT_S = 300
# An example is what its page shows, with a scripted model.
EXAMPLES = {
    "adk": "adk_agent",
    "autogen": "autogen_agent",
    "inspect": "inspect_task",
    "langchain": "langchain_agent",
    "mcp": "mcp_client",
    "openai-agents": "openai_agent",
    "pydantic-ai": "pydantic_ai_agent",
    "ray": "ray_rollout",
    "smolagents": "smolagents_agent",
}
TESTING = """
from ringfence.backends.native.backend import NativeBackend
from ringfence.testing.conformance import BackendConformance


class TestMine(BackendConformance):
    def make_backend(self):
        return NativeBackend()
"""
EXAMPLE = 'python -W ignore "$1"'
HARBOR = """
harbor run -p task -a oracle -e ringfence.integrations.harbor:RingfenceEnvironment --ek image=default -o jobs
grep -h 1 jobs/*/*/verifier/reward.txt
"""
SERVER = """
ringfence serve --state-dir state > serve.log &
until [ -S state/ringfence.sock ]; do sleep 0.1; done
ask() { curl -sS --fail --unix-socket state/ringfence.sock "http://localhost/v1$@"; }
box=$(ask /sandboxes --json '{}' | python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')
ask /sandboxes/$box/execs --json '{"argv": ["echo", "served"], "wait": true}' | grep served
kill %1; wait %1
"""
CLIENT = """
box=$(ringfence create --name build --label team=a)
ringfence list | grep build
ringfence exec $box -- echo from a client
ringfence rm $box
python -c '
from ringfence import Sandbox

with Sandbox.create(server="'$RINGFENCE_SERVER'") as sandbox:
    print(sandbox.exec(["id", "-un"]).stdout_text)
'
"""
COMMANDS = {
    "client": CLIENT,
    "docker": "ringfence run --backend docker -- echo in a container",
    "egress": "API_TOKEN=t ringfence run --net api.example.com:443 --secret api.example.com=API_TOKEN"
    " -- sh -c 'echo $API_TOKEN' | grep ringfence-secret-API_TOKEN",
    "harbor": HARBOR,
    "images": "ringfence image pull $REGISTRY/alpine:3.20"
    " && ringfence run --image $REGISTRY/alpine:3.20 -- /bin/echo hello",
    "server": SERVER,
    "testing": "pytest -q test_mine.py -k test_failure_is_a_result",
}


def main(extra: str, environment: Path, home: Path, become: list[str]) -> int:
    """Run it in an empty directory, by way of the command `become`."""
    desk = home / "page"
    desk.mkdir()
    shutil.copytree(TREE / "examples", desk / "examples")
    env = {
        "HOME": str(home),
        "TMPDIR": str(desk),
        "XDG_RUNTIME_DIR": str(home),
        "LANG": "C.UTF-8",
        "PATH": f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "RINGFENCE_IMAGES": f"{desk}/images",
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", COMMANDS.get(extra, EXAMPLE)]
    try:
        with beside(extra, desk) as more:
            give(desk, home)
            env |= more
            prefix = [] if extra == "docker" else become  # an engine is root's
            ran = subprocess.run(
                [*prefix, *command, extra, f"examples/{EXAMPLES.get(extra)}.py"],
                cwd=desk,
                env=env,
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
            )
            return int(ran.returncode != 0)
    except LackingError as exc:
        print(f"not here: {exc}")
        return LACKING
    finally:
        shutil.rmtree(desk)


def give(desk: Path, home: Path) -> None:
    """All of it to the owner of that home."""
    owner = home.stat()
    for path in (desk, *desk.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)


class LackingError(Exception):
    """What this machine has not."""


@contextlib.contextmanager
def beside(extra: str, desk: Path) -> Iterator[dict[str, str]]:
    """What the page asks for beside the extra, by the variables that name it."""
    if extra == "client":
        yield from served()
    elif extra == "docker":
        from tests.engine import running_engine

        if os.getuid() != 0 or not shutil.which("dockerd"):
            raise LackingError("no Docker engine can be started")
        with running_engine() as address:
            yield {"DOCKER_HOST": address}
    elif extra == "images":
        from tests.images.conftest import small
        from tests.images.registry import push, serving

        if not (shutil.which("docker-registry") and shutil.which("busybox")):
            raise LackingError("no docker-registry or busybox")
        with serving(desk) as host:
            push(small(), host, "alpine", "3.20")
            yield {"REGISTRY": host}
    else:
        if extra == "testing":
            (desk / "test_mine.py").write_text(TESTING)
        if extra == "harbor":
            shutil.copytree(
                TREE / "tests" / "suites" / "harbor" / "tasks" / "fix-program", desk / "task"
            )
        yield {}


def served() -> Iterator[dict[str, str]]:
    """A server's address and a key, as another user has them."""
    from ringfence.client import Client

    with tempfile.TemporaryDirectory(prefix="rf-page-") as place:
        serve = ["serve", "--json", "--state-dir", f"{place}/s", "--listen", "127.0.0.1:0"]
        with subprocess.Popen(
            [sys.executable, "-m", "ringfence", *serve], stdout=subprocess.PIPE, text=True
        ) as daemon:
            assert daemon.stdout is not None
            try:
                tcp, unix = sorted(json.loads(daemon.stdout.readline())["listening"])
                with Client(unix) as client:
                    key = client.make_key("reader")["key"]
                yield {"RINGFENCE_SERVER": tcp, "RINGFENCE_API_KEY": key}
            finally:
                daemon.terminate()
                daemon.wait(60)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
