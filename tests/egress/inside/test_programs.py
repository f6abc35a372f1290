"""Programs as they are: allowed hosts work with and without proxy variables, all others fail at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringfence import ExecResult, Sandbox
from tests.egress.inside import clients
from tests.egress.inside.clients import HOME_OF, OWN_CLIENTS, WEB_CLIENTS, Client
from tests.egress.world import World
from tests.features import has

pytestmark = [pytest.mark.in_world, pytest.mark.anyone, pytest.mark.full]

ALLOWED = ("v4.test", "v6.test", "a.test", "*.wild.test", *sorted(set(HOME_OF.values())))
WAYS = ("proxy variables", "no proxy variables")
FAST_S = 8.0
"""How long a program may take to learn of a refusal: less than the ten seconds it would wait itself."""
# Each scheme, version of IP and way with each other, in half of the combinations.
ROUTES = [
    ("http", "v4.test", WAYS[1]),
    ("http", "v6.test", WAYS[0]),
    ("https", "v4.test", WAYS[0]),
    ("https", "v6.test", WAYS[1]),
]


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path | None:
    return clients.compile_java(tmp_path_factory.mktemp("java"), world)


def _place(world: World, name: str) -> Path:
    """Where servers that refuse to be root get at: pytest's own directories are closed to others."""
    made = world.directory / name
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def servers(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Those that are programs themselves, each where it is installed."""
    logs = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        if has("git"):
            stack.enter_context(world.internet.spawn(clients.git_daemon(world), logs / "git"))
            world.await_server("git.test", 9418)
        if has("initdb"):
            argv = clients.postgres(_place(world, "postgres"), world)
            stack.enter_context(world.internet.spawn(argv, logs / "postgres"))
            world.await_server("db.test", 5432)
        if has("sshd"):
            argv = clients.sshd(_place(world, "sshd"))
            stack.enter_context(world.internet.spawn(argv, logs / "sshd"))
            world.await_server("ssh.test", 2222)
        yield


@pytest.fixture(scope="module")
def limited(world: World, java: Path | None, servers: None) -> Iterator[Sandbox]:
    options = clients.sandbox_options(world, java)
    with Sandbox.create(network=ALLOWED, **options) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def unrestricted(world: World, java: Path | None, servers: None) -> Iterator[Sandbox]:
    options = clients.sandbox_options(world, java)
    with Sandbox.create(network="unrestricted", **options) as sandbox:
        yield sandbox


def run(
    sandbox: Sandbox, argv: list[str], way: str = WAYS[0], timeout_s: float = clients.PATIENCE_S
) -> ExecResult:
    command = argv if WAYS[0] == way else clients.without_proxy(argv)
    return sandbox.exec(command, timeout_s=timeout_s)


def said(result: ExecResult) -> str:
    return result.stdout_text + result.stderr_text


@pytest.mark.parametrize(("scheme", "host", "way"), ROUTES)
@pytest.mark.parametrize("client", WEB_CLIENTS, ids=clients.ids(WEB_CLIENTS))
def test_an_allowed_host_is_reached(
    limited: Sandbox, world: World, client: Client, scheme: str, host: str, way: str
) -> None:
    clients.require_all(client)
    mark = world.internet.mark()

    result = run(limited, client.command(scheme, host), way)

    assert result.ok, said(result)
    assert client.says in said(result)
    (seen,) = world.internet.seen(mark, kind="request")
    assert (host, "/fetched") == (seen["host"], seen["target"])
    assert (":" in seen["address"]) == ("v6.test" == host)
    assert ("https" == scheme) == seen["tls"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("client", OWN_CLIENTS, ids=clients.ids(OWN_CLIENTS))
def test_an_allowed_server_is_used(limited: Sandbox, client: Client, way: str) -> None:
    clients.require_all(client)

    result = run(limited, client.command("https", HOME_OF[client.name]), way)

    assert result.ok, said(result)
    assert client.says in said(result)


EVERY = [*WEB_CLIENTS, *OWN_CLIENTS]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("client", EVERY, ids=clients.ids(EVERY))
def test_another_host_is_refused_at_once(
    limited: Sandbox, world: World, client: Client, way: str
) -> None:
    clients.require_all(client)
    mark = world.internet.mark()

    result = run(limited, client.command("https", "evil.test"), way, FAST_S)

    assert not result.timed_out, said(result)
    assert not result.ok or client.says not in said(result)
    assert [] == world.internet.seen(mark)


@pytest.mark.parametrize("client", EVERY, ids=clients.ids(EVERY))
def test_the_control_reaches_any_host(unrestricted: Sandbox, world: World, client: Client) -> None:
    """Without a policy the same command reaches the host that was refused above."""
    clients.require_all(client)
    mark = world.internet.mark()

    run(unrestricted, client.command("https", "evil.test"))

    assert world.internet.seen(mark, kind="dns", name="evil.test")
    if client.port in (443, 22, 25):
        assert world.internet.seen(mark, kind="connection", port=client.port)
