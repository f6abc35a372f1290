"""Remote and local have one surface: switching is one argument, and nothing drifts apart."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import make_sync_client

from ringfence import AsyncSandbox, Sandbox, SessionManager
from ringfence.client import AsyncClient, AsyncRemoteSandbox, Client, RemoteSandbox
from ringfence.client._async.files import AsyncRemoteFiles
from ringfence.client._async.process import AsyncRemoteProcess, AsyncRemoteStdin
from ringfence.client._async.sessions import AsyncRemoteSessions
from ringfence.client._async.stream import AsyncRemoteStream
from ringfence.client._sync.files import RemoteFiles
from ringfence.client._sync.process import RemoteProcess, RemoteStdin
from ringfence.client._sync.sessions import RemoteSessions
from ringfence.client._sync.stream import RemoteStream
from ringfence.sandbox.aio_process import AsyncProcess, AsyncStdin, AsyncStream
from ringfence.sandbox.files import Files
from ringfence.sandbox.process import Process, StdinWriter
from ringfence.sandbox.stream import Stream

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).parent.parent.parent
PAIRS = [
    (Sandbox, RemoteSandbox),
    (AsyncSandbox, AsyncRemoteSandbox),
    (Files, RemoteFiles),
    (Files, AsyncRemoteFiles),
    (Process, RemoteProcess),
    (AsyncProcess, AsyncRemoteProcess),
    (StdinWriter, RemoteStdin),
    (AsyncStdin, AsyncRemoteStdin),
    (Stream, RemoteStream),
    (AsyncStream, AsyncRemoteStream),
    (Client, AsyncClient),
    (RemoteSessions, AsyncRemoteSessions),
]
# What makes a sandbox is the client's; the rest is about descriptors and pipes of this process.
OWN = {"create", "restore", "snapshots", "delete_snapshot"} | {
    "write_some", "duplicate", "feed", "close_feed", "readable", "begin_watch",
}  # fmt: skip
OWN_OF = {Stream: {"close"}}
# What only a server has: others' processes, and a sandbox that goes on when nobody waits for it.
THEIRS = {
    "contexts",
    "execs",
    "process",
    "extend",
    "update",
    "view",
    "events",
    "call_back",
    "run_through",
    "end",
}
# What there is only because somebody else may have begun it, or keeps it.
THEIRS_OF = {
    RemoteSandbox: {"contexts", "execs", "process", "extend", "update", "view"},
    RemoteProcess: {"events", "view"},
    RemoteStream: {"dropped_bytes"},
}


def surface(cls: type[Any]) -> dict[str, Any]:
    """The public methods and properties by name."""
    members = inspect.getmembers_static(cls)
    kinds = (property, staticmethod, classmethod)
    return {
        name: value
        for name, value in members
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    }


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("local", "remote"), PAIRS)
def test_what_a_local_one_has_a_remote_one_has(local: type[Any], remote: type[Any]) -> None:
    here, there = surface(local), surface(remote)
    wanted = set(here) - OWN - OWN_OF.get(local, set())

    assert wanted <= set(there)
    assert set(there) - set(here) <= THEIRS
    for name in wanted:
        if isinstance(here[name], property) or isinstance(there[name], property):
            continue
        there_wants = parameters(there[name])
        if remote is AsyncRemoteSandbox and name == "start":
            continue  # the local one passes its options on to Sandbox.start
        assert parameters(here[name]) == there_wants, name


def test_the_verbs_of_a_manager_are_those_of_a_server_s() -> None:
    """But for what the client itself has, and what only a server's administrator does."""
    elsewhere = {
        *(
            "change",
            "snapshot",
            "changes",
            "checkpoint",
            "fork",
            "merge",
        ),  # of a sandbox, where `change` is `update`
        *("snapshots", "delete_snapshot"),  # of the client
        *("stats", "stats_of", "health", "uptime_s", "change_pool", "close"),
        *("cleanup_expired", "fill_pool", "check_open", "activate", "end", "verbs"),
    }
    here, there = surface(SessionManager), surface(RemoteSessions)

    assert set(there) == set(here) - elsewhere
    for name, method in there.items():
        mine = [*inspect.signature(here[name]).parameters]
        hers = [*inspect.signature(method).parameters]
        # Whose they are, the key says.
        assert [each for each in mine if each not in ("client_id", "most")] == [
            each for each in hers if each != "client_id"
        ]


@pytest.mark.parametrize("kind", [Sandbox, AsyncSandbox])
def test_switching_is_one_argument(kind: type[Any]) -> None:
    for name in ("create", "restore", "snapshots", "delete_snapshot"):
        assert "server" in inspect.signature(getattr(kind, name)).parameters


_MADE = [
    path.name
    for path in sorted((ROOT / "src/ringfence/client/_async").glob("*.py"))
    if path.name not in make_sync_client.WRITTEN_BY_HAND
]


@pytest.mark.parametrize("name", _MADE)
def test_both_halves_do_the_same_in_the_same_order(name: str) -> None:
    """Whatever is put right in one of them, and only there, is wrong in the other."""
    client = ROOT / "src/ringfence/client"
    made = make_sync_client.without_waiting((client / "_async" / name).read_text("utf-8"))
    there = (client / "_sync" / name).read_text("utf-8")

    assert [*_statements(made)] == [*_statements(there)]


def _statements(text: str) -> Iterator[str]:
    """Top-level statements of a module but its imports, in a form of their own, line breaks forgotten."""
    for each in ast.parse(text).body:
        if not isinstance(each, ast.Import | ast.ImportFrom | ast.If):
            yield ast.dump(each)


@pytest.mark.full
def test_the_synchronous_half_is_what_would_be_made() -> None:
    command = [sys.executable, "tools/make_sync_client.py", "--check"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert 0 == made.returncode, made.stdout + made.stderr


def test_importing_ringfence_does_not_import_the_client() -> None:
    code = (
        "import sys, ringfence; ringfence.Sandbox;"
        "print(any(name.partition('.')[0] in ('httpx2', 'anyio') for name in sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "False" == told.stdout.strip()
