"""Every part of the service on a host that refuses namespaces: `python service_there.py DIRECTORY [mcp]`.

Prints a JSON object: for each part what it gave, or the error.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence import Client
from ringfence.errors import LifecycleError, RingfenceError, Unsupported

PYTHON = "/usr/bin/python3"
found: dict[str, Any] = {}
EVERYTHING = {
    "backend": "landlock",
    "exec": 3,
    "contexts": ["42", "/ 7", True, "41"],
    "streams": ["a", "b"],
    "terminal": [True, True],
    "files": ["first\nsecond\n", "up", [2], ["d"]],
    "network": ["200", "HTTP/1.0 200"],
    "suspended": ["suspended", "awake"],
    "snapshots": ["first", "first"],
    "sessions": ["leased", "landlock"],
    "pool": [True, "pooled"],
    "restarted": ["terminated", "LifecycleError", "again"],
    "left": [],
    "stopped": 0,
}
"""What it prints where all works."""


class Service:
    """A server with a state directory of its own."""

    def __init__(self, place: Path) -> None:
        self.state = place / "state"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        argv = [
            sys.executable,
            "-m",
            "ringfence",
            "serve",
            "--json",
            "--backend",
            "native",
            "--backend",
            "landlock",
        ]
        argv += ["--state-dir", str(self.state)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["listening"]

    def client(self) -> Client:
        return Client(f"unix:{self.state}/ringfence.sock")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def part(name: str, do: Callable[[], Any]) -> None:
    try:
        found[name] = do()
    except Unsupported as exc:
        found[name] = f"unsupported: {exc}"
    except Exception as exc:  # noqa: BLE001  each part is told by itself
        found[name] = f"{type(exc).__name__}: {exc}"


def contexts(sandbox: Any) -> list[Any]:
    sandbox.run_code("x = 41")
    with sandbox.context("bash") as bash:
        bash.run("cd /; y=7")
        told = bash.run('echo "$PWD $y"').stdout.strip()
    late = sandbox.run_code("while True: pass", timeout_s=0.5)
    return [sandbox.run_code("x + 1").text, told, late.timed_out, sandbox.run_code("x").text]


def streams(sandbox: Any) -> list[str]:
    script = "for i in 1 2; do read line; echo $line; done"
    process = sandbox.start(["sh", "-c", script], stream_stdin=True)
    process.stdin.write(b"a\nb\n")
    process.stdin.close()
    return [line.strip() for line in process.stdout.lines()]


def terminal(sandbox: Any) -> list[Any]:
    script = "stty size; test -t 1 && read line && echo got $line"
    process = sandbox.start(["sh", "-c", script], pty=(30, 90), stream_stdin=True)
    process.stdin.write(b"word\n")
    result = process.wait(30)
    return ["30 90" in result.stdout_text, "got word" in result.stdout_text]


def files(sandbox: Any, place: Path) -> list[Any]:
    made = sandbox.files
    made.make_dir("d")
    made.write("d/note", b"first\n")
    made.write("d/note", b"second\n", append=True)
    source, back = place / "source", place / "back"
    (source / "in").mkdir(parents=True)
    (source / "in/file").write_text("up")
    made.upload(str(source), "tree")
    made.download("tree", str(back))
    hits = [each.line for each in made.search("second", "d").items]
    made.move("d/note", "d/moved")
    made.remove("tree", recursive=True)
    return [made.read("d/moved").decode(), (back / "in/file").read_text(), hits,
            sorted(each.name for each in made.list(".") if not each.name.startswith("."))]  # fmt: skip


def snapshots(client: Any, sandbox: Any) -> list[str]:
    sandbox.files.write("saved", b"first")
    snapshot = sandbox.snapshot()
    sandbox.files.write("saved", b"changed")
    with client.restore(snapshot.id) as restored:
        told = [restored.files.read("saved").decode(), restored.exec(["cat", "saved"]).stdout_text]
    client.delete_snapshot(snapshot.id)
    return told


def suspended(sandbox: Any) -> list[Any]:
    process = sandbox.start(["sh", "-c", "read line; echo $line"], stream_stdin=True)
    sandbox.suspend()
    state = sandbox.state.value
    sandbox.resume()
    process.stdin.write(b"awake\n")
    return [state, process.wait(30).stdout_text.strip()]


def sessions(client: Any) -> list[Any]:
    with client.sessions.acquire() as lease:
        ran = lease.sandbox.exec(["echo", "leased"])
        return [ran.stdout_text.strip(), lease.sandbox.session.backend]


def pool(client: Any) -> list[Any]:
    client.change_pool(min_warm=1, max_warm=1)
    return [client.health().ok, client.create().exec(["echo", "pooled"]).stdout_text.strip()]


def network(sandbox: Any) -> list[Any]:
    server = sandbox.start([PYTHON, "-um", "http.server", "--bind", "127.0.0.1", "8000"])
    next(iter(server.stdout))  # it listens
    asks = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').status)"
    inside = sandbox.exec([PYTHON, "-c", asks]).stdout_text.strip()
    with sandbox.connect(8000) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        outside = sock.recv(12).decode()
    server.kill()
    return [inside, outside]


def restarted(service: Service) -> list[Any]:
    """A killed server: its sandboxes of this backend end, the next server works."""
    with service.client() as client:
        kept = client.create()
        running = kept.start(["sleep", "7531"])
        assert running.running
    service.kill()
    service.start()
    with service.client() as client:
        state = client.get(kept.id).state.value
        try:
            client.get(kept.id).exec(["true"])
            refused = ""
        except (LifecycleError, RingfenceError) as exc:
            refused = type(exc).__name__
        with client.create() as sandbox:
            return [state, refused, sandbox.exec(["echo", "again"]).stdout_text.strip()]


def left() -> list[str]:
    """Processes that only the sandboxes of this test had."""
    lines = []
    for name in os.listdir("/proc"):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
        except OSError:
            continue
        if b"sleep\0007531" in line:
            lines.append(name)
    return lines


def by_mcp() -> list[str]:
    """Call tools of the MCP server over its standard streams."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def talk() -> list[str]:
        argv = ["-m", "ringfence", "mcp", "--allow-degraded", "namespaces"]
        server = StdioServerParameters(command=sys.executable, args=argv, env=dict(os.environ))
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            told = []
            for name, arguments in (
                ("run_command", {"command": "echo by mcp"}),
                ("run_code", {"code": "6 * 7"}),
            ):
                answer = await session.call_tool(name, arguments)
                told.append(answer.content[0].text.strip())
            return told

    return asyncio.run(talk())


def main() -> None:
    place = Path(sys.argv[1])
    service = Service(place)
    service.start()
    with service.client() as client:
        found["backend"] = client.create().session.backend
        with client.create() as sandbox:
            part("exec", lambda: sandbox.exec(["sh", "-c", "echo hi; exit 3"]).exit_code)
            part("contexts", lambda: contexts(sandbox))
            part("streams", lambda: streams(sandbox))
            part("terminal", lambda: terminal(sandbox))
            part("files", lambda: files(sandbox, place))
            part("network", lambda: network(sandbox))
            part("suspended", lambda: suspended(sandbox))
            part("snapshots", lambda: snapshots(client, sandbox))
        part("sessions", lambda: sessions(client))
        part("pool", lambda: pool(client))
    part("restarted", lambda: restarted(service))
    found["left"] = left()
    found["stopped"] = service.stop()
    if "mcp" in sys.argv[2:]:
        part("mcp", by_mcp)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
