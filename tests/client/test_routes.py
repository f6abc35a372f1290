"""Each route of the server is called by a method of the SDK, or stands here with the reason why none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ringfence.api.access.permissions import ROUTES, find
from ringfence.api.routes import health, keys, pools
from ringfence.client import Client, RemoteSandbox
from ringfence.client._sync.contexts import RemoteContext
from ringfence.client._sync.process import RemoteProcess
from ringfence.client._sync.transport import Transport
from ringfence.client.forms import Info, Key, MadeKey, Pools
from ringfence.model.client_session import SessionState
from ringfence.model.execs.exec_view import ExecState, ExecView
from ringfence.model.sandbox import SandboxView
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone

_BOX = "/v1/sandboxes/{sandbox_id}"
WITHOUT = {
    "GET /v1/openapi.json": "for programs that generate clients",
    "GET /metrics": "for Prometheus",
    f"POST {_BOX}/tokens": "for a program that hands a sandbox to another; it asks over HTTP",
    f"POST {_BOX}/ports/{{port}}": "tells a browser's URL; `connect` and `expose` open the port",
    f"ANY {_BOX}/ports/{{port}}/http": "for browsers",
    f"ANY {_BOX}/ports/{{port}}/http/{{path:path}}": "for browsers",
    f"WS {_BOX}/ports/{{port}}/ws/{{path:path}}": "for browsers",
    f"WS {_BOX}/execs/{{exec_id}}/attach": "for browsers; the SDK has `events` and `stdin`",
    f"POST {_BOX}/evict": "for `ringfence nodes drain`, which asks a node",
    f"GET {_BOX}/mounts": "part of `view`",
    f"GET {_BOX}/network": "part of `view`",
    "GET /v1/snapshots/{snapshot_id}": "`snapshots` has the same of each",
    "POST /v1/sessions/{session_id}/terminate": "`release` is the SDK's; `terminate` ends the sandbox",
}
"""Routes that no method calls, and why."""
TRIED_ELSEWHERE = {
    "PUT /v1/uploads/{digest}": "`templates.upload` asks whether it is there before",
    "PUT /v1/pools": "`change_pool` reads it before",
    f"GET {_BOX}/files/tree": "`files.download` asks what it is before",
    f"GET {_BOX}/files/watch": "`files.watch` asks from a thread of its own",
    f"WS {_BOX}/ports/{{port}}/tcp": "`connect` is a WebSocket",
    f"POST {_BOX}/contexts/{{context_id}}/input": "asked for by an event of a cell",
    f"GET {_BOX}/contexts/{{context_id}}/cells/{{cell_id}}": "asked for where a cell's stream breaks off",
}
"""Routes that methods call later than in their first request; tests of the client over a server call them."""


class AskedError(Exception):
    """The first request of a method, which is not sent."""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    def ask(
        _self: Transport,
        _client: object,
        _repeat: bool,
        method: str,
        url: str,
        *_: Any,
        **_more: Any,
    ) -> NoReturn:
        raise AskedError(method, url.partition("?")[0])

    monkeypatch.setattr(Transport, "_ask", ask)
    with Client("unix:/nobody.sock") as made:
        yield made


def _calls(client: Client, directory: Path) -> dict[str, Callable[[], object]]:
    """Every method of the SDK that asks the server, called with the least that it takes."""
    at = (0.0, 0.0)
    view = SandboxView("b", "s", "me", State.RUNNING, SessionState.ACTIVE, "native", *at)
    box = RemoteSandbox(client._transport, view, SandboxSpec())
    run = ExecView("e", "b", ExecState.RUNNING, ("cat",), 0.0, stream_stdin=True)
    process = RemoteProcess(client._transport, "/v1/sandboxes/b", run)
    assert process.stdin is not None
    form = {"id": "c", "language": "python", "running": True}
    context = RemoteContext(client._transport, "/v1/sandboxes/b", form=form)
    stdin, files, sessions = process.stdin, box.files, client.sessions
    return {
        "create": client.create,
        "get": lambda: client.get("b"),
        "list": client.list,
        "snapshots": client.snapshots,
        "delete_snapshot": lambda: client.delete_snapshot("x"),
        "execute": lambda: client.execute("true"),
        "execution": lambda: client.execution("x"),
        "kill_execution": lambda: client.kill_execution("x"),
        "execution_info": client.execution_info,
        "configure_executions": client.configure_executions,
        "health": client.health,
        "stats": client.stats,
        "info": client.info,
        "events": client.events,
        "make_key": lambda: client.make_key("x"),
        "keys": client.keys,
        "rotate_key": lambda: client.rotate_key("x"),
        "delete_key": lambda: client.delete_key("x"),
        "pool": client.pool,
        "build": lambda: client.templates.begin({"name": "x"}),
        "templates": client.templates.list,
        "template": lambda: client.templates.get("x"),
        "publish": lambda: client.templates.publish("x"),
        "delete a template": lambda: client.templates.delete("x"),
        "follow": lambda: next(client.templates.follow("x")),
        "has": lambda: client.templates.has("0" * 64),
        "acquire": sessions.acquire,
        "attach": lambda: sessions.attach({"sandbox_id": "b", "client_id": "c"}),
        "release": lambda: sessions.release("s"),
        "detach": lambda: sessions.detach("s"),
        "suspend a session": lambda: sessions.suspend("s"),
        "resume a session": lambda: sessions.resume("s"),
        "touch": lambda: sessions.touch("s"),
        "session": lambda: sessions.get("s"),
        "sessions": sessions.list,
        "default_sandbox": sessions.default_sandbox,
        "set_default_sandbox": lambda: sessions.set_default_sandbox("b"),
        "exec": lambda: box.exec(["true"]),
        "execs": box.execs,
        "context": box.context,
        "context by id": lambda: box.context(id="c"),
        "contexts": box.contexts,
        "cell": lambda: context.run("1"),
        "variables": context.variables,
        "interrupt": context.interrupt,
        "restart": context.restart,
        "close": context.close,
        "process": lambda: box.process("e"),
        "mount": lambda: box.mount("/a:/b"),
        "apply_network_policy": lambda: box.apply_network_policy("none"),
        "network_log": box.network_log,
        "learned_policy": box.learned_policy,
        "suspend": box.suspend,
        "resume": box.resume,
        "extend": lambda: box.extend(1.0),
        "update": lambda: box.update(name="x"),
        "snapshot": box.snapshot,
        "fork": box.fork,
        "merge": lambda: box.merge(box, base="x"),
        "checkpoint": box.checkpoint,
        "changes": box.changes,
        "box stats": box.stats,
        "capabilities": box.capabilities,
        "protections": box.protections,
        "terminate": box.terminate,
        "wait": lambda: process.wait(1.0),
        "signal": lambda: process.send_signal(15),
        "kill": process.kill,
        "resize": lambda: process.resize(1, 1),
        "output": lambda: next(process.events()),
        "stdin": lambda: stdin.write(b"x"),
        "read": lambda: files.read("a"),
        "write": lambda: files.write("a", b""),
        "list files": files.list,
        "stat": lambda: files.stat("a"),
        "make_dir": lambda: files.make_dir("a"),
        "remove": lambda: files.remove("a"),
        "move": lambda: files.move("a", "b"),
        "upload": lambda: files.upload(str(directory), "a"),
        "glob": lambda: files.glob("*"),
        "search": lambda: files.search("a"),
        "replace": lambda: files.replace(["a"], "b", "c"),
    }


def test_every_route_has_a_method_or_a_reason(client: Client, tmp_path: Path) -> None:
    called = set()
    for name, call in _calls(client, tmp_path).items():
        with pytest.raises(AskedError) as asked:
            call()
        method, path = asked.value.args
        found = find(method, path)
        assert found is not None, name
        called.add(f"{method} {found.path}")

    routes = {f"{method} {path}" for method, path in ROUTES}
    assert routes == called | {*WITHOUT, *TRIED_ELSEWHERE}
    assert set() == called & {*WITHOUT, *TRIED_ELSEWHERE}


@pytest.mark.parametrize("form", [Key, MadeKey, Info, Pools])
def test_a_typed_answer_has_the_fields_of_the_document(form: type) -> None:
    """The types are the SDK's own: the document is made by the server."""
    document: Any = {
        each.__name__: each for each in (keys.Key, keys.MadeKey, health.Info, pools.Pools)
    }
    assert form.__annotations__.keys() == document[form.__name__].model_fields.keys()
