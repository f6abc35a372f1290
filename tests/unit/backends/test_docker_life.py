"""Containers made by a scripted engine: what it is asked, and what is left of one that fails or has ended."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import signal
import socket
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.docker import backend as module
from ringfence.backends.docker import engine as engines
from ringfence.backends.docker import image
from ringfence.backends.docker.backend import DockerBackend
from ringfence.backends.docker.draft import Draft
from ringfence.backends.docker.groups import Group
from ringfence.backends.docker.sandbox import QUOTAS, DockerSandbox
from ringfence.backends.local.agents import agent_code
from ringfence.backends.local.agents.agents import settings
from ringfence.backends.local.agents.contained import AGENT
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.mounts import runtime, template
from ringfence.errors import ExecError, InvalidRequest, IoError, IsolationError, Unsupported
from ringfence.guest.isolation import NAMESPACES, STEP
from ringfence.launcher import wire
from ringfence.model import NetworkPolicy, NetworkRule
from ringfence.model.limits import Limits
from ringfence.model.mount import ALWAYS_THERE, Mount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.policy.seccomp import SeccompPolicy
from ringfence.policy.trust import DIRECTORY

pytestmark = pytest.mark.anyone
errors = pytest.importorskip("docker.errors")


class Container:
    """One whose PID 1 is a process that waits, and whose agent is a thread that answers."""

    def __init__(self, engine: Engine, config: dict[str, Any]) -> None:
        self.engine, self.config, self.done = engine, config, list[str]()
        [self.place] = [a for a, b in config["host_config"]["binds"].items() if b["bind"] == AGENT]
        self.files = {
            path: (Path(self.place) / path).stat().st_mode & 0o777
            for path in os.listdir(self.place)
        }
        self.place_mode = os.stat(self.place).st_mode & 0o777
        self.told, self.owners = dict[str, Any](), set[int]()
        self.agent: threading.Thread | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.attrs: dict[str, Any] = {}

    def _do(self, what: str) -> None:
        if what == self.engine.fails:
            raise errors.APIError(f"cannot {what}")
        self.done.append(what)

    def put_archive(self, path: str, content: bytes) -> bool:
        self._do(f"put {path}")
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            self.owners |= {each.uid for each in tar}
        return self.engine.takes

    def start(self) -> None:
        self._do("start")
        self.process = subprocess.Popen(["sleep", "1000"])
        self.agent = threading.Thread(target=self._be_agent)
        self.agent.start()

    def _be_agent(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            made.connect(f"{self.place}/control")
            control = wire.adopt(made.detach())
        self.told, _ = wire.receive(control)
        answers = self.engine.answers
        word = answers.pop(0) if answers else b"O"
        if word and word != b"O":
            wire.send_raw(control, word)
        elif word:
            spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
            kept = spaces if self.told["covered"] else []
            wire.send_raw(control, word, kept)
            for fd in spaces:
                os.close(fd)
            while (got := wire.receive_raw(control))[0]:
                for fd in got[1]:
                    reply = wire.adopt(fd)
                    wire.send_raw(reply, b"O")
                    reply.close()
        control.close()

    def reload(self) -> None:
        assert self.process is not None
        self.attrs = {"State": {"Pid": self.process.pid}}
        self._do("reload")

    def logs(self, tail: int) -> bytes:
        return b"its last\nwords\n" if tail == 3 else b""

    def diff(self) -> Any:
        self._do("diff")
        return self.engine.changed

    def pause(self) -> None:
        self._do("pause")

    def unpause(self) -> None:
        self._do("unpause")

    def remove(self, force: bool) -> None:
        assert force
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._do("remove")


class Engine:
    """An engine that starts processes."""

    def __init__(self) -> None:
        self.made: list[Container] = []
        self.answers: list[bytes] = []
        self.fails = ""
        self.security = ["name=seccomp", "name=rootless"]
        self.takes, self.changed = True, list[Any]()
        self.is_closed, self.name = False, "Engine"
        self.api = SimpleNamespace(
            create_host_config=lambda **how: how,
            create_container_config=lambda **how: how,
            create_container_from_config=self._create,
        )
        self.images = SimpleNamespace(get=lambda name: name)
        self.containers = SimpleNamespace(get=lambda number: self.made[number])

    def _create(self, config: dict[str, Any]) -> dict[str, int]:
        if self.fails.startswith("create"):
            raise errors.APIError(self.fails)
        self.made.append(Container(self, config))
        return {"Id": len(self.made) - 1}

    def info(self) -> dict[str, Any]:
        return {"SecurityOptions": self.security}

    def version(self) -> dict[str, Any]:
        return {"Components": [{"Name": self.name}]}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerBackend]:
    """One whose places are in a directory of the test's, which is empty afterwards."""
    real = tempfile.mkdtemp
    places = real(prefix="places-")  # a socket's path has 107 bytes at most: unix(7)

    def mkdtemp(prefix: str, dir: str) -> str:
        assert dir == "/var/tmp", "for who counts, memory is none of it"
        return str(real(prefix=prefix, dir=places))

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    before = len(os.listdir("/proc/self/fd"))
    made = DockerBackend("unix:///nowhere")
    made._engine = engine
    yield made
    made.close()
    assert engine.is_closed
    os.rmdir(places)
    assert all("remove" in each.done for each in engine.made)
    for agent in [each.agent for each in engine.made if each.agent is not None]:
        agent.join(2.0)
        assert not agent.is_alive(), "its connection is still open"
    assert before == len(os.listdir("/proc/self/fd"))


def failing(backend: DockerBackend, spec: SandboxSpec | None = None) -> str:
    with pytest.raises(IsolationError) as refusal:
        backend.provision(spec or SandboxSpec(id="mine"))
    assert {} == backend._live
    assert set() == backend._making
    return str(refusal.value)


class TestMaking:
    def test_its_agent_isolates_and_hides_what_the_engine_mounts(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        sandbox = backend.provision(SandboxSpec(id="mine", limits=Limits(pids=20)))
        [made] = engine.made
        assert {"mine": sandbox} == backend._live
        assert {*ALWAYS_THERE.values()} == {each.target for each in sandbox.mounts}
        assert 0o666 == made.files["control"], "who connects is another user"
        assert {AGENT, *module._ENGINES, *template.masked()} <= {*made.told["covered"]}
        assert resource.RLIMIT_NPROC not in [which for which, *_ in made.told["rlimits"]], (
            "others have processes of these ids, too"
        )
        assert made.told["seccomp"]
        assert not made.told["anew"]
        assert {*image.OWN, "/dev/shm"} <= {*made.told["room"]["places"]}
        binds = made.config["host_config"]["binds"]
        assert {"ro"} == {each["mode"] for each in binds.values()}
        assert {"/etc/hostname", AGENT} <= {each["bind"] for each in binds.values()}
        assert [] == made.config["host_config"]["MaskedPaths"]
        assert 3 <= len(sandbox.namespace_fds)
        with pytest.raises(InvalidRequest, match="already exists"):
            backend.provision(SandboxSpec(id="mine"))
        sandbox.terminate()
        assert {} == backend._live
        assert not Path(made.place).exists()
        backend.provision(SandboxSpec(id="mine"))

    def test_its_user_may_read_what_is_shown_whatever_our_own_files_are(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority: Any = SimpleNamespace(steps=[("file", f"{DIRECTORY}/ca.pem", b"x")], env={})
        monkeypatch.setattr(module, "trusted_for", lambda *_: authority)
        backend._egress = lambda: None  # type: ignore[assignment]
        monkeypatch.setattr(DockerSandbox, "join_network", lambda *_: None)
        monkeypatch.setattr(Draft, "complete", lambda *_: None)
        policy = NetworkPolicy(rules=(NetworkRule("a.test", "443", methods=("GET",)),))
        before = os.umask(0o077)
        try:
            backend.provision(SandboxSpec(network=policy))
        finally:
            os.umask(before)
        [made] = engine.made
        assert (0o755, 0o644) == (made.place_mode, made.files[agent_code.NAME])
        binds = made.config["host_config"]["binds"]
        shown = {each["bind"]: source for source, each in binds.items()}
        assert f"{DIRECTORY}/ca.pem" not in shown, "it is shown with its directory"
        modes = {
            path: os.stat(shown[path]).st_mode & 0o777 for path in ("/etc/hostname", DIRECTORY)
        }
        assert {"/etc/hostname": 0o644, DIRECTORY: 0o755} == modes
        assert 0o644 == os.stat(f"{shown[DIRECTORY]}/ca.pem").st_mode & 0o777

    def test_a_host_that_refuses_isolation_has_the_engines_and_refuses_what_that_lacks(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        engine.answers = [b"E1 " + STEP.encode() + b": unshare"]
        sandbox = backend.provision(SandboxSpec())
        first, second = engine.made
        assert ["start", "remove"] == first.done
        assert ([], None) == (second.told["covered"], second.told["room"])
        host = second.config["host_config"]
        assert ["no-new-privileges:true"] == host["security_opt"]
        assert "MaskedPaths" not in host
        assert ([], False) == (sandbox.namespace_fds, sandbox.has_room)
        assert {*ALWAYS_THERE.values()} == {each.target for each in sandbox.mounts}
        assert {"inodes", "disk_bytes"} == {*sandbox.lacking()}
        backend.provision(SandboxSpec())
        assert 3 == len(engine.made), "and is not asked again"
        for changes in (
            {"limits": Limits(disk_bytes=1 << 30)}, {"limits": Limits(inodes=1000)},
            {"deny": ("/usr/bin/env",)}, {"secrets": {"A": "x"}},
        ):  # fmt: skip
            with pytest.raises((Unsupported, InvalidRequest)):
                backend.provision(SandboxSpec(**changes))
        assert 3 == len(engine.made)

    def test_another_refusal_of_the_agents_is_no_lack_of_isolation(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        engine.answers = [b"E12 elsewhere: no memory"]
        assert "the agent did not start: its last / words" in failing(backend)
        assert backend._isolates
        engine.answers = [b""]
        assert "the agent did not start: its last / words" in failing(backend)

    def test_a_profile_without_our_filter_is_isolated_by_the_engine(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        backend.provision(SandboxSpec(profile="unrestricted"))
        [made] = engine.made
        assert (b"", 0) == (made.told["seccomp"], made.told["tag_key"])
        assert [] == made.told["covered"]

    def test_podman_has_no_memory_of_a_users_so_places_are_made_before_it_starts(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        engine.name = "Podman Engine"
        sandbox = backend.provision(SandboxSpec(workdir="/work/deep"))
        [made] = engine.made
        assert {} == made.config["host_config"]["tmpfs"]
        assert ["put /", "start", "reload"] == made.done
        assert "/work" in sandbox.places
        engine.name = "Engine"
        backend.provision(SandboxSpec(workdir="/work/deep"))
        assert ["/work"] == [*engine.made[1].config["host_config"]["tmpfs"]]
        assert ["start", "reload"] == engine.made[1].done

    def test_the_agent_is_told_the_profile_and_whether_sockets_may_be_the_hosts(
        self,
        backend: DockerBackend,
        engine: Engine,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        limited: list[Any] = []
        monkeypatch.setattr(Group, "limit_sockets", lambda group: limited.extend([group]))
        monkeypatch.setattr(Draft, "complete", lambda *_: None)
        told: list[dict[str, Any]] = []

        def tell(*given: Any, **how: Any) -> Any:
            told.append(how)
            return settings(*given, **how)

        monkeypatch.setattr(module, "settings", tell)
        policy = SeccompPolicy.default()
        backend.define_profile("mine", policy)
        for spec in (
            SandboxSpec(profile="mine"), SandboxSpec(mounts=(Mount("/data", str(tmp_path)),)),
        ):  # fmt: skip
            assert backend.provision(spec).control.gettimeout() is None
        assert [policy, None] == [each["policy"] for each in told]
        assert [True, False] == [each["unix_sockets"] for each in told]
        assert 2 == len(limited)
        for made in engine.made:
            others = made.config["host_config"]["binds"].values()
            assert {"ro"} == {each["mode"] for each in others}

    def test_an_authority_is_made_only_for_who_reads_inside_tls(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []

        def trusted_for(policy: Any, egress: Any) -> Any:
            asked.append((policy, egress))
            raise IsolationError("nobody signs")

        monkeypatch.setattr(module, "trusted_for", trusted_for)
        backend._egress = lambda: "egress"  # type: ignore[assignment]
        policy = NetworkPolicy(rules=(NetworkRule("a.test", "443", methods=("GET",)),))
        assert "nobody signs" in failing(backend, SandboxSpec(id="mine", network=policy))
        assert [(policy, "egress")] == asked
        assert [] == engine.made

    def test_a_closed_backend_has_no_engine_any_more(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend.close()
        assert engine.is_closed
        other = Engine()
        monkeypatch.setattr(engines, "connect", lambda _host: other)
        assert backend.client() is other
        backend.close()
        assert other.is_closed

    def test_one_beside_it_has_the_same_engine_and_another_place(
        self, backend: DockerBackend, tmp_path: Path
    ) -> None:
        other = backend.beside(str(tmp_path / "other"))
        assert ("unix:///nowhere", str(tmp_path / "other")) == (
            other._engine_host, other._state_dir,
        )  # fmt: skip

    @pytest.mark.parametrize("step", ["create it", "start", "reload"])
    def test_nothing_is_left_of_one_that_fails(
        self, backend: DockerBackend, engine: Engine, step: str
    ) -> None:
        engine.fails = step
        assert "the engine did not" in failing(backend)
        engine.fails = ""
        backend.provision(SandboxSpec(id="mine"))

    def test_an_agent_that_never_connects_is_given_up(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_READY_S", 0.01)
        monkeypatch.setattr(Container, "start", lambda made: made.done.append("start"))
        assert "the agent did not start: its last / words" in failing(backend)
        assert ["start", "remove"] == engine.made[0].done

    def test_one_that_cannot_be_joined_to_its_network_has_ended(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_network: Any) -> None:
            raise IsolationError("no egress")

        monkeypatch.setattr(
            "ringfence.backends.local.agents.contained.ContainedNetwork.serve", refuse
        )
        assert "no egress" in failing(backend)
        assert "remove" in engine.made[0].done

    def test_an_engine_that_is_gone_hinders_no_end(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        sandbox = backend.provision(SandboxSpec())
        engine.fails = "remove"
        sandbox.terminate()
        assert State.TERMINATED is sandbox.state
        assert not Path(engine.made[0].place).exists()
        engine.made[0].done.append("remove")

    def test_a_snapshot_that_cannot_be_put_back_ends_the_sandbox(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[int] = []

        def load(sandbox: Any, content: int) -> None:
            loaded.append(content)
            assert sandbox.id in backend._live

        monkeypatch.setattr(DockerSandbox, "load", load)
        before = SandboxSpec(workdir="/work/deep")
        sandbox = backend.provision_with(SandboxSpec(), before, 77)
        assert [77] == loaded
        assert "/work" in sandbox.places, "where its files were, there is a place for them"
        backend._isolates = False
        with pytest.raises(Unsupported, match="restore"):
            backend.provision_with(SandboxSpec(), before, 77)


class TestOwners:
    @pytest.mark.parametrize(
        ("security", "is_nobody"),
        [
            (["name=userns"], True),
            (["name=rootless"], True),
            (["name=seccomp"], False),
            (None, False),
        ],
    )
    def test_root_is_nobody_only_where_the_engine_maps_ids(
        self, backend: DockerBackend, engine: Engine, security: Any, is_nobody: bool
    ) -> None:
        engine.security = security
        assert is_nobody == backend.root_is_nobody()
        assert ("" if is_nobody else f"no user root: {backend.not_root}") == backend.refuses(
            SandboxSpec(user="root")
        )
        if not is_nobody:
            with pytest.raises(Unsupported, match="root"):
                backend.provision(SandboxSpec(user="root"))
        assert "" == backend.refuses(SandboxSpec())

    def test_whose_the_container_is(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draft = Draft(SandboxSpec(user="1234"), "docker-1", None)
        given: list[int] = []
        ids: Any = SimpleNamespace(take=lambda: 500_000, give_back=given.append)
        monkeypatch.setattr(backend, "_ids", lambda: ids)

        def owner(isolated: bool = True) -> tuple[int, int]:
            return backend._owner(draft, isolated=isolated)

        assert (0, 1234) == owner()
        engine.security = []
        assert (0, 1234) == owner(isolated=False)
        for trusted, expected in (
            (False, (0, os.stat("/proc/self").st_uid)),
            (True, (500_000, 501_234)),
        ):
            here: Any = SimpleNamespace(trusted_root=trusted)
            monkeypatch.setattr(module, "host", lambda here=here: here)
            found = owner()
            assert expected[0] == found[0]
            assert expected[1] == found[1] or trusted
        held: Any = SimpleNamespace()
        draft.held = held
        assert (0, 1234) == owner()

    @pytest.mark.parametrize("fails", [True, False])
    def test_ids_of_its_own_are_given_back(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: bool
    ) -> None:
        given: list[int] = []

        def full(**_how: Any) -> str:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        ids: Any = SimpleNamespace(give_back=given.append, close=lambda: None)
        monkeypatch.setattr(backend, "_ids", lambda: ids)
        monkeypatch.setattr(backend, "_owner", lambda _draft, isolated: (70_000, 71_000))
        if fails:
            engine.fails = "start"
            failing(backend)
            monkeypatch.setattr(tempfile, "mkdtemp", full)
            with pytest.raises(OSError, match="No space"):
                backend.provision(SandboxSpec())
            assert 70_000 == given.pop()
        else:
            sandbox = backend.provision(SandboxSpec(limits=Limits(pids=20)))
            made = engine.made[0]
            limits = {which: (soft, hard) for which, soft, hard in made.told["rlimits"]}
            assert (21, 21) == limits[resource.RLIMIT_NPROC], "as nobody else has these ids"
            assert "71000:71000" == made.config["user"]
            own = made.config["host_config"]["tmpfs"]
            assert all(each.startswith("uid=71000,gid=71000,mode=0755") for each in own.values())
            assert made.told["uid"] == sandbox.uid != 71000, (
                "inside it has the id that it is to have"
            )
            engine.name = "Podman Engine"
            other = backend.provision(SandboxSpec(workdir="/work/deep"))
            assert {71000} == engine.made[1].owners
            other.terminate()
            assert [70_000] == given
            given.clear()
            sandbox.terminate()
        assert [70_000] == given


class TestImages:
    def held(self, tmp_path: Path) -> Any:
        (tmp_path / "root").mkdir()
        closed: list[int] = []
        return SimpleNamespace(
            root=str(tmp_path / "root"), image=SimpleNamespace(id="sha256:abc"),
            closed=closed, close=lambda: closed.append(1),
        )  # fmt: skip

    @pytest.mark.parametrize("fails", [True, False])
    def test_an_image_is_held_until_the_engine_has_it(
        self, backend: DockerBackend, engine: Engine, tmp_path: Path, fails: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        held = self.held(tmp_path)
        monkeypatch.setattr(
            "ringfence.backends.local.mounts.images.hold", lambda spec: (spec, held)
        )
        spec = SandboxSpec(id="mine", image="debian", limits=Limits(disk_bytes=1 << 30))
        engine.fails = "create storage" if fails else ""
        monkeypatch.setattr(backend, "_owner", lambda _draft, isolated: (0, 7777))
        if fails:
            with pytest.raises(Unsupported, match="storage") as refusal:
                backend.provision(spec)
            assert "limits.disk_bytes" == refusal.value.field
            engine.fails = "create: no such thing"
            assert "the engine did not make the container" in failing(backend, spec)
            with pytest.raises(Unsupported, match="inode"):
                backend.provision(spec.altered(limits=Limits(inodes=1000)))
            assert [1, 1, 1] == held.closed
        else:
            sandbox = backend.provision(spec)
            [made] = engine.made
            assert [1] == held.closed
            assert made.told["room"] is None
            assert ("inodes",) == sandbox.lacking()
            host = made.config["host_config"]
            assert {"size": str(1 << 30)} == host["storage_opt"]
            assert all(text.endswith(f",size={1 << 30}") for text in host["tmpfs"].values())
            assert ("7777:7777", "ringfence/image:abc-7777") == (
                made.config["user"], made.config["image"],
            )  # fmt: skip
            assert {"ro"} == {each["mode"] for each in host["binds"].values()}
            shown = {place: each["bind"] for place, each in host["binds"].items()}
            brought = {source: target for source, target, _ in agent_code.foreign_trees()}
            assert brought == {source: shown[source] for source in brought}
            assert not ({*image.shown(7777)} - {*brought}) & {*shown}, (
                "programs are the image's own"
            )
            foreign, own = (agent_code.argv(AGENT, foreign=each)[:-1] for each in (True, False))
            assert foreign == made.config["command"][:-1] != own
            before = len(made.done)
            monkeypatch.setattr(
                sandbox, "ask", lambda *_: pytest.fail("of an image all is its own")
            )
            sandbox.make_place(Mount("/work"))
            assert before == len(made.done)
            engine.fails = ""
            assert QUOTAS == backend.provision(SandboxSpec(image="debian")).lacking()
            monkeypatch.setattr(DockerSandbox, "load", lambda *_: None)
            before_it = SandboxSpec(workdir="/before/it")
            backend.provision_with(SandboxSpec(image="debian"), before_it, 77)
            assert "/before" in engine.made[-1].config["host_config"]["tmpfs"]
        assert "" == backend.no_disk(spec)
        assert "tmpfs" in backend.no_disk(SandboxSpec())

    def test_nothing_of_an_images_is_where_the_agent_comes_in(self, tmp_path: Path) -> None:
        for place in (AGENT, runtime.PLACE):
            (tmp_path / place[1:]).mkdir()
            (tmp_path / place[1:] / "theirs").write_text("x")
        (tmp_path / f"{AGENT[1:]}-like").write_text("x")
        own = dict(image._own_entries(str(tmp_path), 1000))
        read, write = os.pipe()
        args = write, str(tmp_path), own, 4000, list[Exception]()
        thread = threading.Thread(target=image._write, args=args)
        thread.start()
        with open(read, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            found = [each.name.removeprefix(".") for each in tar]
        thread.join()
        assert f"{AGENT}-like" in found
        assert [] == [path for path in found if path.endswith("/theirs")]
        assert 1 == found.count(AGENT)


class TestLiving:
    def test_it_is_paused_by_the_engine_and_what_that_refuses_is_told(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        sandbox = backend.provision(SandboxSpec())
        sandbox.suspend()
        assert "pause" == engine.made[0].done[-1]
        engine.fails = "unpause"
        with pytest.raises(ExecError, match="unpause: cannot unpause"):
            sandbox.resume()
        assert State.SUSPENDED is sandbox.state
        engine.fails = ""
        sandbox.resume()
        assert State.SUSPENDED is not sandbox.state
        engine.fails = "pause"
        with pytest.raises(ExecError, match="pause: cannot pause"):
            sandbox.suspend()
        engine.fails = ""
        sandbox.suspend()
        sandbox.terminate()
        assert ["unpause", "remove"] == engine.made[0].done[-2:], (
            "older kernels kill nothing paused"
        )

    def test_one_that_ended_by_itself_is_noticed(
        self, backend: DockerBackend, engine: Engine
    ) -> None:
        sandbox = backend.provision(SandboxSpec())
        made = engine.made[0]
        assert made.process is not None
        made.process.send_signal(signal.SIGKILL)
        made.process.wait()
        assert State.TERMINATED is sandbox.state
        assert {} == backend._live

    @pytest.mark.parametrize("has_room", [True, False])
    def test_what_was_changed_is_the_engines_to_tell(
        self, backend: DockerBackend, engine: Engine, has_room: bool
    ) -> None:
        sandbox = backend.provision(SandboxSpec())
        sandbox.has_room = has_room
        engine.changed = [
            {"Kind": kind, "Path": path} for kind, path in ((0, "/m"), (1, "/a"), (2, "/d"))
        ]
        found = sandbox.changes()
        assert sandbox.places == found.own
        assert not any(path.startswith("/dev/") for path in found.own)
        if has_room:
            assert ([], []) == (found.changed, found.gone)
            return
        assert (["/m", "/a"], ["/d"]) == (found.changed, found.gone)
        engine.changed = None  # type: ignore[assignment]
        assert ([], []) == (sandbox.changes().changed, sandbox.changes().gone)
        engine.fails = "diff"
        with pytest.raises(IoError, match="did not list"):
            sandbox.changes()

    def test_a_place_at_the_top_is_made_by_the_engine_and_only_where_it_must(
        self, backend: DockerBackend, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sandbox = backend.provision(SandboxSpec())
        made, problem = engine.made[0], list[int]()

        def ask(_what: str, _path: str) -> None:
            if problem:
                raise Refused(problem[0], "no")

        monkeypatch.setattr(sandbox, "ask", ask)
        before = len(made.done)
        for target in ("/home/x", "/work", "/tmp/y"):
            sandbox.make_place(Mount(target))
        assert before == len(made.done)
        problem.append(13)
        with pytest.raises(Refused):
            sandbox.make_place(Mount("/work"))
        problem[:] = [2]
        sandbox.make_place(Mount("/home/x"))
        assert before == len(made.done)
        sandbox.make_place(Mount("/work/deep"))
        assert ["put /"] == made.done[before:]
        engine.takes = False
        with pytest.raises(IoError, match="gave no reason"):
            sandbox.make_place(Mount("/work"))
        engine.fails = "put /"
        with pytest.raises(IoError, match="cannot put"):
            sandbox.make_place(Mount("/work"))

    @pytest.mark.parametrize("number", [0, 13, 2])
    def test_a_place_is_looked_for_while_it_is_awake_and_it_is_suspended_again(
        self,
        backend: DockerBackend,
        engine: Engine,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
    ) -> None:
        sandbox = backend.provision(SandboxSpec())
        done = engine.made[0].done

        def ask(_what: str, _path: str) -> None:
            done.append("asked")
            if number:
                raise Refused(number, "no")

        monkeypatch.setattr(sandbox, "ask", ask)
        sandbox.suspend()
        before = len(done)
        with pytest.raises(Refused) if number == 13 else contextlib.nullcontext():
            sandbox.make_place(Mount("/work"))

        made = ["put /"] if number == 2 else []
        assert ["unpause", "asked", *made, "pause"] == done[before:]
        assert State.SUSPENDED is sandbox.state
