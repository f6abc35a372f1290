"""What is read of a container: its limits, its quotas, what its backend can do; and its draft in an image."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native.outside import same_descriptors

from ringfence.backends.docker import groups, image
from ringfence.backends.docker import report as module
from ringfence.backends.docker import sandbox as sandboxes
from ringfence.backends.docker.draft import Draft
from ringfence.backends.docker.report import DockerReader
from ringfence.backends.docker.sandbox import QUOTAS, DockerSandbox
from ringfence.backends.local.agents.contained import NO_NAMESPACE_FDS
from ringfence.backends.local.mounts import template
from ringfence.errors import IoError, Unsupported
from ringfence.launcher import wire
from ringfence.model import capabilities as can
from ringfence.model.capabilities import DEGRADED, ENFORCED, MISSING
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.policy.trust import DIRECTORY

pytestmark = pytest.mark.anyone
SIZE: Any = SimpleNamespace(disk_bytes=5, inodes=6)


class Group:
    """Cgroups that were read."""

    def __init__(self, _pid: int = 0, **found: Any) -> None:
        self.counts_sockets_apart = False
        self.found = {"memory_limit": 1 << 27, "pids_limit": 51, "sockets_limit": None, **found}
        self.is_limited = False

    def __getattr__(self, name: str) -> Any:
        return lambda: self.found[name]

    def limit_sockets(self) -> None:
        self.is_limited = True


def reader(*, has_room: bool = True, lacking: tuple[str, ...] = QUOTAS, **group: Any) -> Any:
    sandbox: Any = SimpleNamespace(
        namespaces=lambda: {"pid": 7}, group=Group(**group), has_room=has_room,
        lacking=lambda: lacking, ask=lambda _what: ("11 12 4194304 99", []),
        spec=SandboxSpec(limits=Limits(disk_bytes=3 << 20)), network="its network",
    )  # fmt: skip
    return DockerReader(sandbox)


class TestReading:
    def test_its_namespaces_are_the_agents(self) -> None:
        assert {"pid": 7} == reader()._inodes

    @pytest.mark.parametrize(
        ("found", "status"),
        [(None, MISSING), ((1 << 60) + 1, MISSING), (1 << 60, ENFORCED), (1 << 27, ENFORCED)],
    )
    def test_memory_is_bounded_by_what_the_cgroup_says(
        self, found: int | None, status: str
    ) -> None:
        assert status == reader(memory_limit=found).memory_limit()[0]

    @pytest.mark.parametrize("apart", [True, False])
    def test_sockets_are_told_of_only_where_they_are_counted_apart(
        self, apart: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "sockets_said", lambda found, most: f"sockets {found} {most}")
        made = reader(sockets_limit=33)
        made.sandbox.group.counts_sockets_apart = apart
        why = made.memory_limit()[1]
        assert why.startswith("128 MiB by cgroup")
        assert apart == (f"sockets 33 {1 << 27}" in why)

    def test_processes_are_bounded_by_what_the_cgroup_says(self) -> None:
        assert (MISSING, "the container's cgroup has none") == reader(pids_limit=None).pids_limit()[
            :2
        ]
        assert (ENFORCED, "51 by cgroup") == reader().pids_limit()

    def test_quotas_are_those_of_its_memory_or_the_engines(self) -> None:
        assert "4 MiB, the size of a tmpfs" == reader().disk_quota()[1]
        assert "99 files and directories in a tmpfs" == reader().inode_quota()[1]
        bare = reader(has_room=False)
        assert (DEGRADED, DEGRADED) == (bare.disk_quota()[0], bare.inode_quota()[0])
        bounded = reader(has_room=False, lacking=("inodes",))
        assert (ENFORCED, "3 MiB, by the engine's storage driver") == bounded.disk_quota()
        assert DEGRADED == bounded.inode_quota()[0]
        whole = reader(has_room=False, lacking=())
        assert ENFORCED == whole.disk_quota()[0]
        assert whole.inode_quota() is None, "nobody has told of one"

    def test_its_network_is_judged_by_its_policy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DockerReader, "of_policy", lambda _self, network: ("judged", network))
        assert ("judged", "its network") == reader().network()


@pytest.mark.parametrize("fds", [[3, 4, 5], []])
def test_a_report_says_what_the_agent_could_and_could_not_make(fds: list[int]) -> None:
    asked: list[SandboxSpec] = []
    ended: list[int] = []

    def apply(_policy: Any) -> None:
        if not fds:
            raise Unsupported(NO_NAMESPACE_FDS, backend="docker", operation="network")

    sandbox: Any = SimpleNamespace(
        namespace_fds=fds, protections=lambda: (), apply_network_policy=apply,
        terminate=lambda: ended.append(1),
    )  # fmt: skip

    def provision(spec: SandboxSpec) -> Any:
        asked.append(spec)
        return sandbox

    backend: Any = SimpleNamespace(name="docker", profile_names=("p",), provision=provision)
    report = module.backend_report(backend)
    found = {each.name: each for each in report.capabilities}
    assert len(found) == len(report.capabilities), "each once"
    for name in (can.PTY, can.SUSPEND, can.MEMORY_LIMIT, can.CPU_LIMIT, can.IMAGE):
        assert found[name].available
    for name in (can.MOUNT, can.SNAPSHOT, can.DISK_QUOTA, can.INODE_QUOTA, can.NETWORK_HOSTS):
        assert bool(fds) == found[name].available
        assert fds or NO_NAMESPACE_FDS in found[name].reason
    for name in (can.FORK, can.MEMORY_SNAPSHOT, can.NETWORK_UNRESTRICTED, can.GPU, can.IO_LIMIT):
        assert not found[name].available
        assert found[name].reason
    assert [1] == ended
    assert 1.0 == asked[0].limits.cpus, "a limit that is not asked for is not tried"


class TestSandboxes:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        monkeypatch.setattr(groups, "Group", Group)
        with subprocess.Popen(["sleep", "1000"]) as process:
            opened: list[Any] = []

            def make(*, isolated: bool = True, held: Any = None, **how: Any) -> Any:
                spec = SandboxSpec(**how)
                draft = Draft(spec, "docker-1", held)
                draft.trusted = "its authority"  # type: ignore[assignment]
                ours, theirs = wire.socketpair()
                theirs.close()
                backend: Any = SimpleNamespace(name="docker")
                backend.degraded = lambda _spec, lacking=(): tuple(sorted(lacking))
                opened.append(
                    DockerSandbox(
                        backend, spec, "docker-1", 1000, [], ours, [], process.pid, None, "", 0,
                        SIZE, draft, 5000, ("/tmp-of-the-engine", "/dev/shm"), isolated=isolated,
                    )
                )  # fmt: skip
                return opened[-1]

            yield make
            process.kill()
            for each in opened:
                each.control.close()
                os.close(each.pidfd)

    def test_what_it_lacks_is_what_nothing_bounds(self, made: Any) -> None:
        assert () == made().lacking()
        assert QUOTAS == made(isolated=False).lacking()
        limited = Limits(disk_bytes=1 << 20)
        assert QUOTAS == made(isolated=False, limits=limited).lacking()
        held: Any = SimpleNamespace(root="/")
        assert QUOTAS == made(held=held).lacking()
        assert ("inodes",) == made(held=held, limits=limited).lacking()
        assert ["/tmp-of-the-engine"] == made(held=held).places, "of /dev nothing is saved"
        assert {*image.OWN} <= {*made().places}
        assert "/dev/shm" not in made().places

    def test_what_it_uses_is_told_as_far_as_it_is_its_own(self, made: Any) -> None:
        for isolated in (True, False):
            sandbox = made(isolated=isolated)
            assert sandbox.group.is_limited, "before anything of the user's runs"
            assert "its authority" == sandbox.network._trusted
            sandbox.group.found |= {"cpu_ns": 1, "memory_bytes": 2, "peak_memory_bytes": 3}
            sandbox.group.found |= {"oom_kills": 4}
            asked: list[str] = []

            def ask(what: str, asked: list[str] = asked) -> Any:
                asked.append(what)
                return "5 6 7 8", []

            sandbox.ask = ask
            for state in (State.PROVISIONED, State.RUNNING):
                found = sandbox._read_stats(state)
                assert (1, 2, 3, 5) == (
                    found.cpu_ns, found.memory_bytes, found.peak_memory_bytes, found.pids,
                )  # fmt: skip
                own = (found.disk_bytes, found.inodes)
                assert own == ((7, 8) if isolated else (None, None))
                assert found.degraded == (() if isolated else tuple(sorted(QUOTAS)))
            for state in (State.SUSPENDED, State.TERMINATED):
                assert sandbox._read_stats(state).pids is None
            assert ["usage"] * 2 == asked, "nobody answers in one that stands still"
            assert 4 == sandbox.oom_kills()

    def test_a_place_that_the_engine_makes_is_the_users_and_of_the_mounts_kind(
        self, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sandbox = made()
        (tmp_path / "file").touch()
        asked: list[Any] = []

        def one(top: str, uid: int, *, is_file: bool) -> bytes:
            asked.append((top, uid, is_file))
            return b""

        monkeypatch.setattr(sandboxes, "one_of_the_users", one)
        sandbox.container = SimpleNamespace(put_archive=lambda *_: True)
        source = str(tmp_path / "file")
        for mount in (
            Mount("/a", source),
            Mount("/a/deep", source),
            Mount("/a", str(tmp_path)),
            Mount("/a"),
        ):
            sandbox._make_top("/a", mount)
        assert [("/a", 5000, True), *[("/a", 5000, False)] * 3] == asked


class TestDrafts:
    def held(self, tmp_path: Path, *paths: str) -> Any:
        for path in paths:
            (tmp_path / path).mkdir(parents=True)
        return SimpleNamespace(root=str(tmp_path))

    def test_directories_of_the_root_are_made_for_all_that_has_its_place_there(self) -> None:
        before = SandboxSpec(workdir="/before/x", mounts=(Mount("/old/x"),))
        spec = SandboxSpec(
            workdir="/now", mounts=(Mount("/data/x"), Mount("/data/y"), Mount("/home/z"))
        )
        assert ["/now", "/data"] == Draft(spec, "d", None).made_in()
        draft = Draft(spec, "d", None, before)
        assert (["/now", "/data", "/before", "/old"], True) == (draft.made_in(), draft.restores)
        room = draft.room(SIZE)
        assert room is not None
        assert [*image.OWN, "/now", "/data", "/before", "/old", "/dev/shm"] == room["places"]
        assert [] == Draft(SandboxSpec(workdir="/"), "d", None).made_in()
        assert not Draft(spec, "d", None).restores
        assert [] == Draft(SandboxSpec(mounts=(Mount("/usr/mine"),)), "d", None).made_in()

    def test_in_an_image_only_what_it_does_not_have(self, tmp_path: Path) -> None:
        held = self.held(tmp_path, "there", "usr")
        mounts = (Mount("/there/x"), Mount("/usr/x"), Mount("/new/x"))
        draft = Draft(SandboxSpec(mounts=mounts), "d", held)
        assert ["/new"] == [each for each in draft.made_in() if each != "/home"]
        assert draft.room(SIZE) is None
        [ours] = [step[1] for step in template.image_guest_root(1000) if step[0] == "image_dir"][:1]
        assert not (tmp_path / ours[1:]).exists()
        assert draft._has(ours), "the agent's container has it"

    def test_a_file_at_the_top_that_an_image_has_is_not_covered(self, tmp_path: Path) -> None:
        held = self.held(tmp_path, "one", "usr")
        os.mkfifo(tmp_path / "fifo")
        source = str(tmp_path / "fifo")
        draft = Draft(SandboxSpec(mounts=(Mount("/one", source), Mount("/two", source))), "d", held)
        assert ["/two"] == draft.files_at_top(), "what is no directory is shown over a file"

    def test_certificates_are_shown_as_one_directory_and_other_files_alone(self) -> None:
        draft = Draft(SandboxSpec(), "d", None)
        usual = {*draft.shown()}
        draft.trusted = SimpleNamespace(  # type: ignore[assignment]
            steps=[
                ("file", f"{DIRECTORY}/a", b"A"), ("file", f"{DIRECTORY}/b", b"B"),
                ("file", f"{DIRECTORY}-like", b"C"), ("bind_inside", "/x", "/y"),
            ]
        )  # fmt: skip
        assert b"A" == draft.written()[f"{DIRECTORY}/a"]
        shown = draft.shown()
        assert sorted(shown) == sorted({DIRECTORY, f"{DIRECTORY}-like", *usual})

    @pytest.mark.parametrize("has_authority", [True, False])
    def test_binds_of_an_authority_come_in_with_the_mounts(
        self, has_authority: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[Any] = []
        draft = Draft(SandboxSpec(workdir="/home"), "d", None)
        bind = ("bind_inside", "/x", "/y")
        if has_authority:
            draft.trusted = SimpleNamespace(steps=[("file", "/z", b""), bind])  # type: ignore[assignment]
        monkeypatch.setattr(
            "ringfence.backends.docker.draft.Mounting", lambda spec, binds: (spec, binds)
        )
        sandbox: Any = SimpleNamespace(namespace_fds=[3], furnish=given.append, mounts=[])
        sandbox.files = SimpleNamespace(make_dir=given.append)
        draft.complete(sandbox)
        assert [(draft.spec, [bind] if has_authority else [])] == given[:1]

    def test_a_working_directory_is_made_where_it_must_be(self) -> None:
        made: list[str] = []
        sandbox: Any = SimpleNamespace(namespace_fds=[3], furnish=lambda _: None, mounts=[])
        sandbox.files = SimpleNamespace(make_dir=made.append)
        Draft(SandboxSpec(workdir="/home/deep"), "d", None).complete(sandbox)
        assert ["/home/deep"] == made
        sandbox.namespace_fds.clear()
        mounts = (Mount("/data"), Mount("/data/more"))
        Draft(SandboxSpec(workdir="/home/deep", mounts=mounts), "d", None).complete(sandbox)
        assert ["/data", "/data/more", "/home/deep"] == made[1:]
        held: Any = SimpleNamespace()
        for workdir, is_made in (("/usr/mine", True), ("/", False)):
            made.clear()
            Draft(SandboxSpec(workdir=workdir), "d", held).complete(sandbox)
            assert ([workdir] if is_made else []) == made, "of an image all is the user's"


class TestImages:
    def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        errors = pytest.importorskip("docker.errors")
        self.names: list[str] = []
        self.imported: list[Any] = []
        self.removed: list[str] = []
        self.found: list[Any] = []

        def get(name: str) -> str:
            if name not in self.names:
                raise errors.ImageNotFound(name)
            return name

        def import_data(content: bytes, repository: str) -> None:
            self.names.append(repository)
            self.imported.append((repository, content))

        def import_stream(pieces: Any, repository: str, changes: list[str]) -> None:
            with tarfile.open(fileobj=io.BytesIO(b"".join(pieces)), mode="r|") as tar:
                owners = {each.name.removeprefix("."): each.uid for each in tar}
            self.names.append(repository)
            self.imported.append((repository, owners, changes))

        def remove(name: str) -> None:
            if name == "in use":
                raise errors.APIError("a container has it")
            self.removed.append(name)

        store = SimpleNamespace(
            directory=str(tmp_path / "a store"), images=lambda: [SimpleNamespace(id="sha256:kept")]
        )
        monkeypatch.setattr(image, "ImageStore", lambda: store)
        return SimpleNamespace(
            images=SimpleNamespace(get=get, list=lambda filters: self.found, remove=remove),
            api=SimpleNamespace(
                import_image_from_data=import_data, import_image_from_stream=import_stream
            ),
        )

    def test_the_template_is_imported_once_for_each_content(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = self.engine(tmp_path, monkeypatch)
        first = image.image_of(engine, 1000, 4000)
        assert first == image.image_of(engine, 1000, 4000)
        other = image.image_of(engine, 1000, 5000)
        assert [
            (first, image.archive(1000, 4000)),
            (other, image.archive(1000, 5000)),
        ] == self.imported
        assert first.startswith(f"{image.REPOSITORY}:")

    def test_an_image_is_imported_once_for_each_user_and_those_removed_go(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = self.engine(tmp_path, monkeypatch)
        (tmp_path / "root").mkdir()
        (tmp_path / "root/file").touch()
        held: Any = SimpleNamespace(
            root=str(tmp_path / "root"), image=SimpleNamespace(id="sha256:" + "a" * 64)
        )
        self.found = [
            SimpleNamespace(id=name, labels={image._ID: of})
            for name, of in (
                ("in use", "sha256:gone"),
                ("old", "sha256:gone"),
                ("new", "sha256:kept"),
            )
        ]
        name = image.image_from(engine, held, 4000)
        assert ["old"] == self.removed, "one that is in use keeps no other"
        assert name == image.image_from(engine, held, 4000)
        [(repository, owners, changes)] = self.imported
        assert (name, 4000) == (repository, owners["/file"])
        assert name != image.image_from(engine, held, 5000), "its files are another user's"
        place = tmp_path / "a store"
        assert [
            f"LABEL {image._ID}=sha256:{'a' * 64}",
            f'LABEL {image._STORE}="{place}"',
        ] == changes

    def test_an_image_of_which_a_file_cannot_be_read_ends_no_stream_as_if_it_were_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tar alone does not tell: it ends where a file would begin."""
        engine, root = self.engine(tmp_path, monkeypatch), tmp_path / "root"
        root.mkdir()
        (root / "a").write_text("a")
        (root / "b").write_text("b")
        held: Any = SimpleNamespace(root=str(root), image=SimpleNamespace(id="sha256:" + "a" * 64))

        def unreadable(path: Any, *args: Any) -> Any:
            if str(path) == str(root / "b"):
                raise OSError(errno.EIO, "Input/output error")
            return open(path, *args)

        with same_descriptors():
            with monkeypatch.context() as patch:
                patch.setattr("tarfile.bltn_open", unreadable)
                with pytest.raises(IoError, match="Input/output error"):
                    image.image_from(engine, held, 4000)
            assert [] == self.imported
            name = image.image_from(engine, held, 4000)
        [(kept, owners, _changes)] = self.imported
        assert kept == name
        assert {"/a", "/b"} <= owners.keys()
