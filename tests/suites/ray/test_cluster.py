"""Three Ray nodes on this machine, each with a daemon of its own, behind gateways."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import ray

from ringfence.client import Client
from ringfence.cluster import admin
from ringfence.cluster.bindings import KEEP_S, Binding, prune
from ringfence.cluster.directory import Directory
from ringfence.cluster.nodes import Nodes
from ringfence.cluster.placement import rendezvous
from ringfence.cluster.proxy import Proxy
from ringfence.cluster.scatter import Scatter
from ringfence.cluster.tls import client_context, identity
from ringfence.cluster.upstream import Pool
from ringfence.errors import (
    InvalidRequest,
    LifecycleError,
    QuotaExceeded,
    SandboxLost,
    SandboxNotFound,
    ServerUnreachable,
    SnapshotNotFound,
    Unauthenticated,
)
from ringfence.model.base.ids import node_of
from ringfence.model.spec import SandboxSpec

from .conftest import node_options

if TYPE_CHECKING:
    from ringfence.api.service import Service

NAME = ("--cluster-name", "of-a-test")
PATIENCE_S = 300.0  # beside other tests a node of Ray takes minutes to start


_MAIN = "from ringfence.cli.main import main; import sys; sys.exit(main())"
_AHEAD = "import time; clock = time.time; time.time = lambda: clock() + 60.0\n"
_CUT_OFF = """
from ringfence.cluster import upstream
connect = upstream._connect
async def connect_unless_cut_off(address, pool):
    if address in open({path!r}).read().split():
        raise upstream.NotSent("the node does not answer: the network is cut")
    return await connect(address, pool)
upstream._connect = connect_unless_cut_off
"""


class Gateway:
    """A running `ringfence serve --cluster`."""

    def __init__(
        self,
        address: str,
        state_dir: Path,
        *more: str,
        name: tuple[str, ...] = NAME,
        program: str = "",
    ) -> None:
        python = [sys.executable, *(("-c", program + _MAIN) if program else ("-m", "ringfence"))]
        command = [*python, "serve", "--json", "--cluster", address]
        options = ["--state-dir", str(state_dir), "--listen", "127.0.0.1:0", *name, *more]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        self.unix, self.tcp = json.loads(line)["listening"]

    def end(self, signum: int = signal.SIGTERM) -> None:
        self.process.send_signal(signum)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_node_has_a_daemon_for_each_shard(
    cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each is a node of its own to gateways, and together they have the room of one node."""
    name = ("--cluster-name", "sharded")
    place = tmp_path_factory.mktemp("s")  # `tmp_path` has the test's name: too long for a socket
    config = place / "config.json"
    config.write_text(json.dumps({"shards": 2, "manager": {"max_sandboxes": 8}}))
    gateway = Gateway(cluster.address, place, "--config", str(config), name=name)
    try:
        directory = Directory("sharded")
        _until(lambda: 2 == len(admin.nodes(directory)))
        shards = admin.nodes(directory)
        assert 1 == len({each["ray_id"] for each in shards})
        assert [4, 4] == [each["max_sandboxes"] for each in shards]
        daemons = [_daemon_of(each) for each in shards]
        with Client(gateway.unix) as client:
            made = _create_on_each(client, 2)
            assert {each["node"] for each in shards} == made.keys()
            # Draining one: its sandboxes stay, and new ones go to the other.
            drained, other = made
            admin.drain(directory, drained)
            _until(lambda: any("draining" == each["status"] for each in admin.nodes(directory)))
            _until(lambda: {other} == {_place_of_new(client) for _ in range(5)})
            assert b"on\n" == made[drained].exec(["echo", "on"]).stdout
            admin.drain(directory, drained, draining=False)
            _until(lambda: drained == _place_of_new(client))
        command = [sys.executable, "-m", "ringfence", "cluster", "down"]
        subprocess.run([*command, "--address", cluster.address, *name], check=True)
        assert not any(_runs(each) for each in daemons)
    finally:
        gateway.end()


def test_a_build_goes_where_its_base_is(
    cluster: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """With what it copies, which its owner has uploaded to another node; there is no shared store."""
    name = ("--cluster-name", "builds")
    place = tmp_path_factory.mktemp("b")
    config = place / "config.json"
    config.write_text(json.dumps({"shards": 2}))
    (tmp_path / "large").write_bytes(os.urandom(3 << 20))
    gateway = Gateway(cluster.address, place, "--config", str(config), name=name)
    try:
        _until(lambda: 2 == len(admin.nodes(Directory("builds"))))
        tags = [each["node"] for each in admin.nodes(Directory("builds"))]
        with Client(gateway.unix) as client:
            for each in _create_on_each(client, 2).values():  # until the gateway knows both
                each.terminate()
            base = {"name": "base", "steps": [{"run": ["sh", "-c", "echo 1 > ~/base"]}]}
            made = client.templates.begin({**base, "public": True})
            assert "ready" == [*client.templates.follow("base", made.build_id)][-1]["status"]
            (home,) = {*tags} - {node_of(made.id)}
            away = next(n for n in map("o-{}".format, range(99)) if rendezvous(n, tags)[0] == home)
            with Client(gateway.tcp, key=client.make_key(away)["key"]) as other:
                digest = other.templates.upload(str(tmp_path / "large"))
                steps = [{"copy": digest, "to": "/home/sandbox"}]
                asked = {"name": "over", "steps": steps, "base": {"template": "base"}}
                begun = other.templates.begin(asked)
                told = [*other.templates.follow("over", begun.build_id)][-1]
                assert "ready" == told["status"], told
                assert node_of(made.id) == node_of(begun.id)
                with other.create(template="over") as sandbox:
                    found = sandbox.exec(["sh", "-c", "cat ~/base; sha256sum < ~/large"])
                whole = hashlib.sha256((tmp_path / "large").read_bytes()).hexdigest()
                assert f"1\n{whole}  -\n".encode() == found.stdout
                missing = {**asked, "steps": [{"copy": "0" * 64, "to": "/tmp"}]}
                with pytest.raises(InvalidRequest, match="upload"):
                    other.templates.begin(missing)
                other.templates.delete("over")
                alone = other.templates.begin({"name": "alone", "steps": steps})
                assert home == node_of(alone.id)
                other.templates.delete("alone")
            client.templates.delete("base")
    finally:
        gateway.end()
        command = [sys.executable, "-m", "ringfence", "cluster", "down"]
        subprocess.run([*command, "--address", cluster.address, *name], check=True)


def _place_of_new(client: Client) -> str:
    with client.create() as made:
        return node_of(made.id)


@pytest.fixture(scope="module")
def three(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two more Ray nodes; at the end no daemon is left."""
    added = [cluster.add_node(**node_options()) for _ in range(2)]
    yield added
    command = [sys.executable, "-m", "ringfence", "cluster", "down", "--address", cluster.address]
    subprocess.run([*command, *NAME], check=True)
    for each in added:
        cluster.remove_node(each, allow_graceful=False)
    # Until Ray has noticed, it places actors of later tests on them.
    _until(lambda: 1 == sum(each["Alive"] for each in ray.nodes()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("g")


@pytest.fixture(scope="module")
def config(place: Path) -> Path:
    """The configuration of the nodes: the first gateway's, whichever test starts it."""
    path = place / "config.json"
    path.write_text(json.dumps({"snapshot_store": str(place / "shared")}))
    return path


@pytest.fixture(scope="module")
def gateway(cluster: Any, three: list[Any], place: Path, config: Path) -> Iterator[Gateway]:
    found = Gateway(cluster.address, place, "--config", str(config))
    with Client(found.unix) as client:
        _until(lambda: 3 == len(_nodes(cluster)))
        client.stats()
        yield found
    if found.process.poll() is None:
        found.end()


def _nodes(cluster: Any) -> list[dict[str, Any]]:
    return [each for each in admin.nodes(Directory(NAME[1])) if each["status"] != "lost"]


def _until(holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < patience_s, "it never held"
        time.sleep(0.05)
    return time.monotonic() - began


def _daemon_of(node: dict[str, Any]) -> int:
    with open(Path(node["socket"]).with_name("lock")) as file:
        return int(file.read().split()[0])


def _runs(pid: int) -> bool:
    """Return whether a process has not ended; one that its parent has yet to wait for has."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _create_on_each(client: Client, count: int) -> dict[str, Any]:
    """Sandboxes, one for each node."""
    found: dict[str, Any] = {}
    for _ in range(100):
        made = client.create()
        if node_of(made.id) in found:
            made.terminate()
        else:
            found[node_of(made.id)] = made
        if len(found) == count:
            return found
    raise AssertionError(f"100 sandboxes fell on {len(found)} nodes")


def test_three_nodes_are_one_server(cluster: Any, gateway: Gateway, place: Path) -> None:
    """Ids name nodes; pages cover all; names and keys hold through another gateway."""
    other = Gateway(cluster.address, place / "other")
    try:
        with Client(gateway.unix) as client, Client(other.unix) as beside:
            made = _create_on_each(client, 3)
            assert {each["node"] for each in _nodes(cluster)} == made.keys()
            ids = {each.id for each in made.values()}
            assert ids == {each.id for each in beside.list()}
            for each in made.values():
                assert b"here\n" == beside.get(each.id).exec(["echo", "here"]).stdout
            first, again = (each.create(idempotency_key="once").id for each in (client, beside))
            assert first == again
            key = client.make_key("ann")
            with Client(other.tcp, key=key["key"]) as ann:
                mine = ann.create()
                assert [mine.id] == [each.id for each in ann.list()]
                client.delete_key(key["id"])
                assert _is_refused(ann)
            for any_id in (*ids, first, mine.id):
                client.get(any_id).terminate()
            assert [] == client.list()
    finally:
        other.end()


def test_a_bound_holds_exactly_at_two_gateways(cluster: Any, gateway: Gateway, place: Path) -> None:
    """Without turns, both find room for the last one; a gateway that died within one is passed over."""
    other = Gateway(cluster.address, place / "bound")
    try:
        with Client(gateway.unix) as admin, ThreadPoolExecutor(8) as threads:
            key = admin.make_key("bob", max_sandboxes=3)["key"]
            clients = [Client(each.tcp, key=key) for each in (gateway, other) for _ in range(4)]
            stale = Directory(NAME[1])
            turn = f"turn/{hashlib.sha256(b'bob').hexdigest()[:32]}/"
            stale.put(f"{turn}000000000007", b"of-the-dead 1")
            made = [each for each in threads.map(_created, clients) if each]
            assert 3 == len(made) == len(admin.list())
            assert 1 == len(stale.list(turn))
            for each in made:
                admin.get(each).terminate()
            for client in clients:
                client.close()
    finally:
        other.end()


def _created(client: Client) -> str:
    try:
        return client.create().id
    except QuotaExceeded:
        return ""


def test_an_id_of_ones_choice_that_names_a_node_is_made_there(
    cluster: Any, gateway: Gateway
) -> None:
    """Placed elsewhere, its owner would not find it: requests go to the node in the id."""
    with Client(gateway.unix) as client:
        tags = [each["node"] for each in _nodes(cluster)]
        for tag in tags:
            ids = [f"mine-00000000-0000-7000-8000-{tag}000{i}" for i in range(4)]
            made = [client.create(id=each) for each in ids]
            assert ids == [client.get(each.id).id for each in made]
            saved = made[0].snapshot().id
            other = next(each for each in tags if each != tag)
            elsewhere = SandboxSpec(id=f"mine-00000000-0000-7000-8000-{other}0000")
            with pytest.raises(InvalidRequest, match="names another node"):
                client.restore(saved, elsewhere)
            client.delete_snapshot(saved)
            for each in made:
                each.terminate()


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/sandboxes?limit=%C2%B2", None),
        (f"/v1/sandboxes?limit={'9' * 5000}", None),
        ("/v1/snapshots?limit=%D9%A3", None),
        ("/v1/events?since=%C2%B2", None),
        (f"/v1/events?since={'9' * 5000}", None),
        ("/v1/sessions", {"client_id": 5, "options": {"key": "once"}}),
        ("/v1/sessions", {"client_id": ["ann"], "options": {"key": "once"}}),
    ],
)
def test_what_no_gateway_can_read_is_refused_in_words(
    gateway: Gateway, path: str, form: dict[str, Any] | None
) -> None:
    with Client(gateway.unix) as client:
        key = client.make_key("ann")
        fields = {"authorization": f"Bearer {key['key']}", "content-type": "application/json"}
        body = None if form is None else json.dumps(form).encode()
        request = urllib.request.Request(f"{gateway.tcp}{path}", body, fields)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        refused.value.close()
        client.delete_key(key["id"])
    assert 422 == refused.value.code


def test_changes_reach_a_node_that_comes_later(cluster: Any, gateway: Gateway) -> None:
    with Client(gateway.unix) as client:
        before = len(_nodes(cluster))
        pools = client.pool()["config"]
        client.change_pool(min_warm=pools["min_warm"] + 1)
        added = cluster.add_node(**node_options())
        _until(lambda: len(_nodes(cluster)) > before)
        (late,) = (each for each in _nodes(cluster) if each["ray_id"] == added.node_id)
        with Client(f"unix:{late['socket']}") as there:
            assert pools["min_warm"] + 1 == there.pool()["config"]["min_warm"]
        cluster.remove_node(added, allow_graceful=False)
        _until(lambda: len(_nodes(cluster)) == before)
        client.change_pool(**pools)


async def test_names_of_what_is_over_are_forgotten(cluster: Any, gateway: Gateway) -> None:
    directory = Directory(NAME[1])
    with Client(gateway.unix) as client:
        lives, over = (client.create(idempotency_key=each) for each in ("lives", "over"))
        over.terminate()
        nodes = Nodes(directory, lambda _: None)
        nodes.look()
        proxy = Proxy(Pool(client_context(identity(directory)[0])), directory.secret())
        scatter = Scatter(directory, nodes, proxy, cast("Service", SimpleNamespace()))
        later = time.time() + KEEP_S + 1
        names = {each.made: name for name, each in _bindings(directory).items()}
        assert {lives.id, over.id} <= names.keys()
        assert 1 <= await prune(directory, nodes, scatter, later)
        left = _bindings(directory)
        assert names[lives.id] in left
        assert names[over.id] not in left
        assert lives.id == client.create(idempotency_key="lives").id
        lives.terminate()
        proxy.pool.close()


def _bindings(directory: Directory) -> dict[str, Binding]:
    return {name: Binding.read(each) for name, each in directory.many("bind/").items()}


async def test_nodes_elsewhere_are_reached_by_tls_and_trust_the_seal_alone(
    cluster: Any, gateway: Gateway
) -> None:
    from ringfence.api.access import gateways
    from ringfence.api.access.caller import ADMIN, Caller
    from ringfence.cluster.directory import Directory
    from ringfence.cluster.tls import client_context, identity
    from ringfence.cluster.upstream import NotSent, Pool

    directory = Directory(NAME[1])
    trusted = Pool(client_context(identity(directory)[0]))
    target, admin = b"/v1/info", Caller("ann", ADMIN)

    async def ask(secret: bytes, method: str = "GET", pool: Pool = trusted) -> int:
        seal = gateways.seal(secret, admin, method, target)
        headers = [(b"host", b"localhost"), (gateways.HEADER.encode(), seal)]
        address = _nodes(cluster)[0]["address"]
        answer = await pool.exchange(address, b"GET", target, headers, b"")
        await answer.whole()
        return answer.status

    secret = directory.secret()
    assert [200, 401, 401] == [
        await ask(secret),
        await ask(b"another" * 5),
        await ask(secret, "POST"),
    ]
    with pytest.raises(NotSent, match="certificate"):
        await ask(secret, pool=Pool(ssl.create_default_context()))
    trusted.close()


def _is_refused(client: Client) -> bool:
    try:
        client.list()
    except Unauthenticated:
        return True
    return False


def test_a_gateway_whose_clock_is_a_minute_ahead_serves_as_the_others(
    cluster: Any, gateway: Gateway, place: Path
) -> None:
    ahead = Gateway(cluster.address, place / "ahead", program=_AHEAD)
    try:
        with Client(gateway.unix) as client, Client(ahead.unix) as other:
            made = [client.create(), other.create()]
            key = other.make_key("eve", max_sandboxes=1)["key"]
            for each in (client, other):
                assert {one.id for one in made} == {one.id for one in each.list()}
                assert all(b"x\n" == each.get(o.id).exec(["echo", "x"]).stdout for o in made)
            with Client(gateway.tcp, key=key) as eve:
                mine = eve.create()
            with Client(ahead.tcp, key=key) as eve, pytest.raises(QuotaExceeded):
                eve.create()
            for any_id in (mine.id, *(each.id for each in made)):
                client.get(any_id).terminate()
    finally:
        ahead.end()


def test_a_gateway_that_is_cut_off_from_a_node_says_so_and_loses_nothing(
    cluster: Any, gateway: Gateway, place: Path
) -> None:
    """The node lives: no other gateway calls it lost, and here new sandboxes go elsewhere."""
    cut = place / "cut"
    at = _nodes(cluster)[0]
    cut.write_text(f"unix:{at['socket']} {at['address']}")
    other = Gateway(cluster.address, place / "o", program=_CUT_OFF.format(path=str(cut)))
    try:
        with Client(gateway.unix) as client, Client(other.unix, retries=0) as beside:
            there = _created_on(client, at["node"])
            with pytest.raises(ServerUnreachable, match="cut"):
                beside.get(there.id)
            with pytest.raises(ServerUnreachable, match=f"node {at['node']} does not answer"):
                beside.list()
            made = [beside.create() for _ in range(5)]
            assert at["node"] not in {node_of(each.id) for each in made}
            assert b"x\n" == there.exec(["echo", "x"]).stdout
            assert {there.id, *(each.id for each in made)} == {each.id for each in client.list()}
            cut.write_text("")
            assert b"x\n" == beside.get(there.id).exec(["echo", "x"]).stdout
            for each in (there, *made):
                client.get(each.id).terminate()
    finally:
        other.end()


def test_two_clusters_on_one_machine_know_nothing_of_each_other(
    cluster: Any, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = ("--cluster-name", "beside")
    second = Gateway(cluster.address, tmp_path_factory.mktemp("b"), name=name)
    try:
        with Client(gateway.unix) as client, Client(second.unix) as beside:
            ours, theirs = client.create(), beside.create()
            assert [ours.id] == [each.id for each in client.list()]
            assert [theirs.id] == [each.id for each in beside.list()]
            with pytest.raises(SandboxNotFound):
                beside.get(ours.id)
            key = client.make_key("ann")["key"]
            with Client(second.tcp, key=key) as ann:
                assert _is_refused(ann)
            command = [sys.executable, "-m", "ringfence", "cluster", "down"]
            subprocess.run([*command, "--address", cluster.address, *name], check=True)
            assert b"x\n" == ours.exec(["echo", "x"]).stdout
            ours.terminate()
    finally:
        second.end()


def test_a_client_survives_daemon_actor_and_gateway(
    cluster: Any, gateway: Gateway, place: Path
) -> None:
    """The last one that uses the common gateway, which it kills."""
    import ray

    from ringfence.cluster import node

    other = Gateway(cluster.address, place / "second")
    try:
        with Client(gateway.unix) as client, Client(other.unix) as beside:
            sandbox = client.create()
            sandbox.files.write("/tmp/kept", b"kept")
            (at,) = (each for each in _nodes(cluster) if each["node"] == node_of(sandbox.id))
            os.kill(_daemon_of(at), signal.SIGKILL)
            assert b"kept" == sandbox.exec(["cat", "/tmp/kept"]).stdout
            before = _daemon_of(at)
            ray.kill(node.find(NAME[1], at["ray_id"]), no_restart=False)
            _until(lambda: _beat(cluster, at["node"]) != _beat_of(at))
            assert before == _daemon_of(at)
            gateway.end(signal.SIGKILL)
            assert b"kept" == beside.get(sandbox.id).exec(["cat", "/tmp/kept"]).stdout
            assert [sandbox.id] == [each.id for each in beside.list()]
            beside.get(sandbox.id).terminate()
    finally:
        other.end()


def _beat_of(node: dict[str, Any]) -> str:
    return str(node["beat"]).partition("-")[0]


def _beat(cluster: Any, tag: str) -> str:
    return next((_beat_of(each) for each in _nodes(cluster) if each["node"] == tag), "")


def test_a_lost_node_takes_its_sandboxes_alone(
    cluster: Any, three: list[Any], place: Path, config: Path
) -> None:
    gateway = Gateway(cluster.address, place / "third", "--config", str(config))
    try:
        with Client(gateway.unix) as client:
            made = _create_on_each(client, 3)
            ray_id = three[0].node_id
            (gone,) = (each for each in _nodes(cluster) if each["ray_id"] == ray_id)
            daemon = _daemon_of(gone)
            made[gone["node"]].files.write("/tmp/kept", b"kept")
            saved = made[gone["node"]].snapshot()
            below = client.restore(saved.id)
            below.files.write("/tmp/more", b"more")
            above = below.snapshot()
            bob = client.make_key("bob")["key"]
            owner = next(
                each
                for each in map("owner-{}".format, range(100))
                if rendezvous(each, made) == [gone["node"]]
            )
            ann = Client(gateway.tcp, key=client.make_key(owner)["key"])
            built, cut = (
                ann.templates.begin({"name": name, "steps": [{"run": ("sh", "-c", script)}]})
                for name, script in (("built", "echo built > ~/file"), ("cut", "sleep 1000"))
            )
            assert "ready" == [*ann.templates.follow("built", built.build_id)][-1]["status"]
            assert {gone["node"]} == {node_of(each.id) for each in (built, cut)}
            os.kill(three[0].all_processes["raylet"][0].process.pid, signal.SIGKILL)
            lost = made.pop(gone["node"])
            noticed = _until(lambda: _is_lost(client, lost.id))
            print(f"noticed after {noticed:.1f} s")
            assert noticed < 10.0  # a bound that is promised, of which it takes a third
            with pytest.raises(SandboxLost, match="went with its node") as told:
                lost.exec(["true"])
            assert told.value.retryable
            assert {each.id for each in made.values()} == {each.id for each in client.list()}
            for each in made.values():
                assert 0 == each.exec(["true"]).exit_code
                each.terminate()
            for each in (above, saved):  # saved in the store before they were answered
                restored = client.restore(each.id)
                assert b"kept" == restored.files.read("/tmp/kept")
                restored.terminate()
            assert {saved.id, above.id} == {each.id for each in client.snapshots()}
            for any_name in (cut.id, "cut"):
                with pytest.raises(SandboxLost, match="went with the node that built it"):
                    ann.templates.get(any_name)
            with ann.create(template="built") as restored:
                assert b"built\n" == restored.exec(["sh", "-c", "cat ~/file"]).stdout
            assert [built.id] == [each.id for each in ann.templates.list()]
            ann.templates.delete("built")
            assert [] == ann.templates.list()
            ann.close()
            with Client(gateway.tcp, key=bob) as other, pytest.raises(SnapshotNotFound):
                other.restore(saved.id)
            for each in (saved, above):
                client.delete_snapshot(each.id)
            assert [] == _own(client)
            assert [] == [*(place / "shared").glob("snap-*")]
            # Nobody renews the lease of a daemon whose raylet is gone: it ends, and all that it had.
            _until(lambda: not _runs(daemon))
            assert node_of(client.create().id) in made
    finally:
        gateway.end()


def test_a_draining_node_saves_what_is_idle_and_says_what_stays(
    cluster: Any, three: list[Any], place: Path, config: Path
) -> None:
    """Its owner restores the saved one elsewhere, by the snapshot that the error of the loss names."""
    gateway = Gateway(cluster.address, place / "drains", "--config", str(config))
    added = cluster.add_node(**node_options())
    try:
        with Client(gateway.unix) as client:
            _until(lambda: added.node_id in {each["ray_id"] for each in _nodes(cluster)})
            (at,) = (each for each in _nodes(cluster) if each["ray_id"] == added.node_id)
            idle, busy = (_created_on(client, at["node"]) for _ in range(2))
            idle.files.write("/tmp/kept", b"kept")
            busy.start(["sleep", "1000"])
            _until(lambda: _drained(cluster, at["node"], "1s")[busy.id]["outcome"] == "stays")
            left = _drained(cluster, at["node"], "1s")
            assert "it runs 1 commands" == left[busy.id]["why"]
            saved = left[idle.id]["snapshot"]
            assert "saved" == left[idle.id]["outcome"]
            assert [saved] == _own(client)
            _until(lambda: saved in (Directory(NAME[1]).get(f"list/{at['node']}") or b"").decode())
            cluster.remove_node(added, allow_graceful=False)
            _until(lambda: _is_lost(client, idle.id))
            with pytest.raises(SandboxLost, match=saved):
                idle.exec(["true"])
            restored = client.restore(saved)
            assert b"kept" == restored.files.read("/tmp/kept")
            restored.terminate()
            bob = client.make_key("bob")["key"]
            with Client(gateway.tcp, key=bob) as other, pytest.raises(SandboxNotFound):
                other._transport.json("POST", f"/v1/sandboxes/{idle.id}/resume")
            with Client(gateway.tcp, key=bob) as other:
                attach = {"sandbox_id": idle.id, "client_id": "bob", "create_if_missing": True}
                for kind, form in (("sandboxes", {"id": idle.id}), ("sessions/attach", attach)):
                    with pytest.raises(InvalidRequest, match="already used"):
                        other._transport.json("POST", f"/v1/{kind}", body=form)
            idle.resume()  # by its own id, on another node
            assert b"kept" == idle.exec(["cat", "/tmp/kept"]).stdout
            other_one = Gateway(cluster.address, place / "beside")
            with Client(other_one.unix) as beside:
                assert b"kept" == beside.get(idle.id).files.read("/tmp/kept")
                assert 1 == [each.id for each in beside.list()].count(idle.id)
            other_one.end()
            with pytest.raises(SandboxLost, match=busy.id):
                busy.resume()
            idle.terminate()
            with pytest.raises(LifecycleError, match="ended"):
                idle.exec(["true"])
            client.delete_snapshot(saved)
    finally:
        gateway.end()


def _own(client: Client) -> list[str]:
    """Ids of snapshots, without copies of a template's layers, which nodes that used them keep for a while."""
    return [e.id for e in client.snapshots() if "ringfence.template" not in e.metadata]


def _created_on(client: Client, tag: str) -> Any:
    for _ in range(100):
        made = client.create()
        if node_of(made.id) == tag:
            return made
        made.terminate()
    raise AssertionError(f"none of 100 sandboxes fell on node {tag}")


def _drained(cluster: Any, tag: str, wait: str) -> dict[str, dict[str, Any]]:
    """Drain a node by the command line: what is left, by sandbox."""
    command = [sys.executable, "-m", "ringfence", "nodes", "drain", tag, "--json", "--wait", wait]
    done = subprocess.run(
        [*command, "--address", cluster.address, *NAME],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert 1 == done.returncode, "some is left"
    return {each["id"]: each for each in json.loads(done.stdout.splitlines()[-1])}


def _is_lost(client: Client, any_id: str) -> bool:
    """Only look: while its node still answers, a command would be a use, which a drain has not saved."""
    try:
        client.get(any_id)
    except SandboxLost:
        return True
    return False
