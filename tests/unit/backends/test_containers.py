"""Host-side parts of the container backend: options, cgroups, images and where an engine may be."""

from __future__ import annotations

import io
import os
import resource
import socket
import stat
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.command import limits as launcher_limits
from ringfence.backends.docker import engine, groups, image, options
from ringfence.backends.docker.draft import Draft
from ringfence.backends.docker.groups import Group
from ringfence.backends.docker.options import Options
from ringfence.backends.local.agents.contained import AGENT
from ringfence.backends.local.host.cgroups import for_sockets
from ringfence.backends.local.mounts import runtime, template
from ringfence.errors import BackendUnavailable, ImageRefused, IsolationError
from ringfence.launcher import cgroups as launcher_cgroups
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone


def engine_of(*, podman: bool = False, apparmor: bool = False) -> Any:
    name = "Podman Engine" if podman else "Engine"
    found = ["name=seccomp", *(["name=apparmor"] if apparmor else [])]
    return SimpleNamespace(
        version=lambda: {"Components": [{"Name": name}]}, info=lambda: {"SecurityOptions": found}
    )


def options_of(**changes: Any) -> Options:
    size = SimpleNamespace(memory_bytes=1 << 27, pids=50, open_files=99)
    facts: dict[str, Any] = {"image": "i", "command": ["agent"], "user": 1000, "cpus": 0.5}
    facts |= {"size": size, "tmpfs": {"/tmp": "size=1"}, "volumes": {"/a": {"bind": "/b"}}}
    return Options(**{**facts, **changes})


class TestOptions:
    def host(self, made: Options, where: Any, *, isolated: bool) -> dict[str, Any]:
        pytest.importorskip("docker")
        return made._host(where, isolated)

    def test_a_container_has_no_network_rights_or_more_than_its_limits(self) -> None:
        found = self.host(options_of(), engine_of(), isolated=False)
        assert ("none", "private") == (found["network_mode"], found["ipc_mode"])
        assert (["ALL"], ["no-new-privileges:true"]) == (found["cap_drop"], found["security_opt"])
        assert 1 << 27 == found["mem_limit"] == found["memswap_limit"], "and no swap besides"
        assert (51, 500_000_000) == (found["pids_limit"], found["nano_cpus"]), "with the agent"
        ulimits = {each["Name"]: (each["Soft"], each["Hard"]) for each in found["ulimits"]}
        assert {"nofile": (99, 99), "core": (1, 1)} == ulimits
        assert {"Name": "no"} == found["restart_policy"]
        assert {"max-size": "64k"} == found["log_config"]["Config"]
        assert ({"/tmp": "size=1"}, {"/a": {"bind": "/b"}}) == (found["tmpfs"], found["binds"])
        assert found["storage_opt"] is None
        assert found.get("privileged") is None

    def test_what_is_not_asked_for_is_the_engines(self) -> None:
        made = options_of(cpus=None, disk_bytes=1 << 30)
        found = self.host(made, engine_of(), isolated=False)
        assert found["nano_cpus"] is None
        assert {"size": str(1 << 30)} == found["storage_opt"]

    @pytest.mark.parametrize("podman", [True, False])
    @pytest.mark.parametrize("apparmor", [True, False])
    def test_only_where_the_agent_isolates_are_the_engines_own_filters_off(
        self, podman: bool, apparmor: bool
    ) -> None:
        where = engine_of(podman=podman, apparmor=apparmor)
        found = options._security(where)
        assert found[:2] == ["no-new-privileges:true", "seccomp=unconfined"]
        assert apparmor == ("apparmor=unconfined" in found)
        assert podman == ("unmask=ALL" in found)
        pytest.importorskip("docker")
        ours = options._limits_of_ours(where)
        _soft, most = resource.getrlimit(resource.RLIMIT_NPROC)
        expected = 32768 if most == resource.RLIM_INFINITY else min(most, 32768)
        assert ([expected] if podman else []) == [each["Hard"] for each in ours]

    def test_a_container_is_made_as_its_user_with_its_label(self) -> None:
        pytest.importorskip("docker")
        made: dict[str, Any] = {}
        api = SimpleNamespace(
            create_host_config=lambda **how: {"given": how},
            create_container_config=lambda **how: made.update(how) or made,
            create_container_from_config=lambda _config: {"Id": "c1"},
        )
        where = engine_of()
        where.api, where.containers = api, SimpleNamespace(get=lambda name: name)
        for isolated in (True, False):
            assert "c1" == options_of().create(where, "docker-1", isolated=isolated)
            assert ("1000:1000", {}, {options.LABEL: "docker-1"}) == (
                made["user"],
                made["environment"],
                made["labels"],
            )
            assert isolated == ("MaskedPaths" in made["host_config"])


class TestDrafts:
    def draft(self, **changes: Any) -> Draft:
        return Draft(SandboxSpec(**changes), "docker-1", None)

    @pytest.mark.parametrize("has_namespaces", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_a_container_is_completed_by_who_may_mount_there(
        self, has_namespaces: bool, fails: bool
    ) -> None:
        made: list[str] = []

        def make(what: Any) -> None:
            if fails:
                raise IsolationError("inside")
            made.append(what)

        files = SimpleNamespace(make_dir=make)
        sandbox: Any = SimpleNamespace(files=files, furnish=make, mounts=[])
        sandbox.namespace_fds = (3,) if has_namespaces else ()
        draft = self.draft(mounts=(Mount("/data", "", "rw"),))
        if fails:
            with pytest.raises(IsolationError):
                draft.complete(sandbox)
        else:
            draft.complete(sandbox)
            assert has_namespaces != ("/data" in made)

    def test_what_an_image_has_is_looked_up_inside_it(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "link").symlink_to("/there")
        (tmp_path / "out").symlink_to("/etc/hostname-that-is-not-here")
        draft = self.draft()
        draft.held = SimpleNamespace(root=str(tmp_path))  # type: ignore[assignment]
        before = len(os.listdir("/proc/self/fd"))
        found = {path: draft._has(path) for path in ("/there", "/link", "/out", "/none")}
        assert {"/there": True, "/link": True, "/out": False, "/none": False} == found
        assert before == len(os.listdir("/proc/self/fd"))

    def test_files_that_are_mounted_at_the_top_are_made_empty(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        mounts = (
            Mount("/one", str(tmp_path / "file")),
            Mount("/dir", str(tmp_path)),
            Mount("/srv/deep/file", str(tmp_path / "file")),
        )
        draft = self.draft(mounts=mounts)
        assert ["/one"] == draft.files_at_top()
        assert b"" == draft.written()["/one"]
        assert "/one" not in draft.made_in()
        size: Any = SimpleNamespace(disk_bytes=5, inodes=6)
        room = draft.room(size)
        assert room is not None
        assert (5, 6) == (room["size_bytes"], room["inodes"])
        assert {*image.OWN, "/dev/shm"} <= {*room["places"]}


class TestGroups:
    def group(self, tmp_path: Path, monkeypatch: Any, version: int) -> Group:
        lines = "0::/c1\n" if version == 2 else "5:memory:/c1\n4:cpu,cpuacct:/c1\n3:pids:/c1\n"
        monkeypatch.setattr(groups, "_ROOT", str(tmp_path))
        real = groups._text
        monkeypatch.setattr(
            groups, "_text", lambda path: lines if path.startswith("/proc/") else real(path)
        )
        return Group(1)

    def test_both_versions_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {
            2: {
                "c1/cpu.stat": "user_usec 3\nusage_usec 7\n",
                "c1/memory.current": "11",
                "c1/memory.peak": "12",
                "c1/memory.max": "13",
                "c1/pids.max": "14",
                "c1/memory.events": "oom 5\noom_kill 2\n",
            },
            1: {
                "cpuacct/c1/cpuacct.usage": "7000",
                "memory/c1/memory.usage_in_bytes": "11",
                "memory/c1/memory.max_usage_in_bytes": "12",
                "memory/c1/memory.limit_in_bytes": "13",
                "pids/c1/pids.max": "14",
                "memory/c1/memory.oom_control": "under_oom 0\noom_kill 2\n",
            },
        }
        for version, contents in files.items():
            place = tmp_path / str(version)
            for name, text in contents.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(text)
            group = self.group(place, monkeypatch, version)
            monkeypatch.undo()
            found = (
                group.cpu_ns(),
                group.memory_bytes(),
                group.peak_memory_bytes(),
                group.memory_limit(),
                group.pids_limit(),
                group.oom_kills(),
            )
            assert (7000, 11, 12, 13, 14, 2) == found
            assert (version == 1) == group.counts_sockets_apart

    def test_what_nobody_counts_is_unknown(self, tmp_path: Path, monkeypatch: Any) -> None:
        group = self.group(tmp_path, monkeypatch, 2)
        (tmp_path / "c1").mkdir()
        (tmp_path / "c1/memory.max").write_text("max")
        assert group.memory_limit() is None
        assert (None, None, None) == (group.cpu_ns(), group.oom_kills(), group.sockets_limit())
        group.limit_sockets()
        assert ["memory.max"] == os.listdir(tmp_path / "c1")

    def test_sockets_are_bounded_in_version_1(self, tmp_path: Path, monkeypatch: Any) -> None:
        group = self.group(tmp_path, monkeypatch, 1)
        place = tmp_path / "memory/c1"
        place.mkdir(parents=True)
        (place / "memory.limit_in_bytes").write_text(str(1 << 27))
        (place / groups._SOCKETS).write_text("")
        group.limit_sockets()
        assert for_sockets(1 << 27) == group.sockets_limit()
        (place / groups._SOCKETS).unlink()
        (place / groups._SOCKETS).mkdir()
        group.limit_sockets()
        assert group.sockets_limit() is None, "who may not write it leaves it at that"


class TestEngines:
    @pytest.mark.parametrize("host", ["tcp://10.0.0.1:2375", "ssh://x", "http://x"])
    def test_an_engine_on_another_machine_is_refused(self, host: str, monkeypatch: Any) -> None:
        for given in (host, None):
            monkeypatch.setenv("DOCKER_HOST", host)
            with pytest.raises(BackendUnavailable, match="unix socket"):
                engine.connect(given)

    def test_where_nothing_listens_there_is_none(self, tmp_path: Path) -> None:
        pytest.importorskip("docker")
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(BackendUnavailable, match="no Docker engine answers"):
            engine.connect(f"unix://{tmp_path}/none")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / "s"))
            with pytest.raises(BackendUnavailable, match="no Docker engine answers"):
                engine.connect(f"unix://{tmp_path}/s")
        assert before == len(os.listdir("/proc/self/fd"))

    def test_one_that_is_named_goes_before_the_environments(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("docker")
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/other")
        for given, name in ((f"unix://{tmp_path}/named", "named"), (None, "other")):
            with pytest.raises(BackendUnavailable, match=f"at unix://{tmp_path}/{name}:"):
                engine.connect(given)

    def test_an_engine_that_does_not_answer_is_not_waited_for_forever(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        docker = pytest.importorskip("docker")
        asked: list[dict[str, Any]] = []
        monkeypatch.setattr(docker, "DockerClient", lambda **how: asked.append(how))
        where = f"unix://{tmp_path}/s"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            listening.listen(1)
            engine.connect(where)
        assert [{"base_url": where, "timeout": engine._PATIENCE_S}] == asked

    def test_podman_is_known_by_its_components(self) -> None:
        assert engine.is_podman(engine_of(podman=True))
        assert not engine.is_podman(engine_of())
        assert not engine.is_podman(SimpleNamespace(version=lambda: {"Components": None}))


class TestImages:
    def entries(self, content: bytes) -> dict[str, tarfile.TarInfo]:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            return {each.name.removeprefix("."): each for each in tar.getmembers()}

    def test_the_template_is_the_same_each_time_and_owned_as_it_should(self) -> None:
        first = image.archive(1000, 4000)
        assert first == image.archive(1000, 4000)
        found = self.entries(first)
        assert not any(path.startswith(("/dev", "/proc")) for path in found)
        assert (0, 0o755, True) == (
            found[AGENT].uid,
            found[AGENT].mode,
            found[AGENT].isdir(),
        )
        owners = {path: each.uid for path, each in found.items() if path}
        assert {0, 4000} == {*owners.values()}
        assert 4000 == owners[template.HOME] == owners["/opt"]
        places = {
            path for path, each in found.items() if each.isdir() and path.startswith(image.OWN)
        }
        assert {*image.OWN} < places
        assert {4000} == {owners[path] for path in places}
        assert {0} == {uid for path, uid in owners.items() if path.startswith("/etc")}

    @pytest.mark.parametrize("is_file", [True, False])
    def test_one_entry_of_the_users(self, is_file: bool) -> None:
        [(path, entry)] = self.entries(image.one_of_the_users("/a", 7, is_file=is_file)).items()
        assert ("/a", 7, 7, is_file) == (path, entry.uid, entry.gid, entry.isfile())
        assert (0o644 if is_file else 0o755) == entry.mode

    def test_an_images_files_are_the_users_but_for_ours(self, tmp_path: Path) -> None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/ld.so.preload").write_text("/evil.so")
        (tmp_path / "bin").write_text("x")
        (tmp_path / "bin").chmod(0o4755)
        own = dict(image._own_entries(str(tmp_path), 1000))
        assert (tarfile.REGTYPE, 0o644, b"") == own[runtime.PRELOAD]
        read, write = os.pipe()
        problems: list[Exception] = []
        args = write, str(tmp_path), own, 4000, problems
        thread = threading.Thread(target=image._write, args=args)
        thread.start()
        with open(read, "rb") as stream:
            content = stream.read()
        thread.join()
        assert [] == problems
        found = self.entries(content)
        assert {4000} == {each.uid for path, each in found.items()} | {4000}
        assert {(4000, 4000)} == {(each.uid, each.gid) for each in found.values()}
        assert {""} == {name for each in found.values() for name in (each.uname, each.gname)}
        assert 0 == found[runtime.PRELOAD].size
        assert stat.S_IMODE(found["/bin"].mode) == 0o4755

    def test_of_files_that_an_image_has_only_those_are_ours_that_must_be(
        self, tmp_path: Path
    ) -> None:
        steps = [step for step in template.image_guest_root(1000) if step[0] != "image_dir"]
        must = {path: rest[2] for _verb, path, *rest in steps}
        assert {True, False} == {*must.values()}
        for path in must:
            (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path[1:]).write_text("the image's")
        own = dict(image._own_entries(str(tmp_path), 1000))
        assert must == {path: path in own for path in must}

    def test_an_engine_that_stops_reading_ends_the_stream(self, tmp_path: Path) -> None:
        (tmp_path / "big").write_bytes(bytes(1 << 20))
        read, write = os.pipe()
        os.close(read)
        problems: list[Exception] = []
        image._write(write, str(tmp_path), {}, 1, problems)
        assert [] == problems, "the engine says why"

    def test_a_link_in_the_place_of_a_directory_is_refused(self, tmp_path: Path) -> None:
        [path] = [step[1] for step in template.image_guest_root(1000) if step[0] == "image_dir"][:1]
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).symlink_to("/elsewhere")
        with pytest.raises(ImageRefused, match="not a directory"):
            dict(image._own_entries(str(tmp_path), 1000))


class TestLaunchersGroups:
    def group(self, tmp_path: Path, *names: str) -> Any:
        directories = [str(tmp_path / name) for name in names]
        return SimpleNamespace(directories=directories, values=lambda *_: [{} for _ in directories])

    def test_a_process_is_moved_into_every_hierarchy(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "cgroup.procs").touch()
        launcher_limits.join(self.group(tmp_path, "a", "b"), 77)
        assert ["77", "77"] == [(tmp_path / n / "cgroup.procs").read_text() for n in ("a", "b")]

    @pytest.mark.parametrize(
        ("lines", "has_stayed"),
        [
            (["1:memory:/x/ours", "2:pids:/x/ours/below"], True),
            (["1:memory:/x/ours", "2:pids:/x"], False),
            (["1:memory:/x/ours2", "2:pids:/x/ours"], False),
            ([], False),
        ],
    )
    def test_one_that_left_its_group_is_refused(
        self, lines: list[str], has_stayed: bool, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(launcher_limits, "read_text", lambda _path: "\n".join(lines))
        group = SimpleNamespace(directories=["/cg/memory/x/ours", "/cg/pids/x/ours"])
        made: Any = group
        if has_stayed:
            launcher_limits.check(made, 1)
        else:
            with pytest.raises(IsolationError, match="left the cgroup"):
                launcher_limits.check(made, 1)

    @pytest.mark.parametrize(
        ("version", "cpu", "held"),
        [
            (0, True, ("memory_bytes",)),
            (2, False, ("memory_bytes", "pids")),
            (2, True, ("memory_bytes", "pids", "cpus")),
        ],
    )
    def test_limits_are_those_that_a_cgroup_holds(
        self, version: int, cpu: bool, held: tuple[str, ...]
    ) -> None:
        layout: Any = SimpleNamespace(version=version, has=lambda name: cpu and name == "cpu")
        assert held == launcher_limits.held(layout)

    def test_a_launcher_says_all_where_its_errors_go_and_begins_in_its_group(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        joined: list[int] = []
        monkeypatch.setattr(launcher_limits, "make", lambda _group, _spec: None)
        monkeypatch.setattr(launcher_limits, "join", lambda _group, pid: joined.append(pid))
        nothing: Any = None
        script = 'echo "$$ out"; echo err >&2; read -r line; echo "got $line"'
        read, write = os.pipe()
        os.write(write, b"input\n")
        os.close(write)
        with open(read, "rb") as stdin, (tmp_path / "says").open("wb") as errors:
            process = launcher_limits.start(
                self.group(tmp_path, "a"), nothing, ["sh", "-c", script], stdin=stdin, stderr=errors
            )
        assert 0 == process.wait()
        assert [process.pid] == joined
        said = (tmp_path / "says").read_text()
        assert f"{process.pid} out\nerr\ngot input\n" == said, "it is what was moved"

    def test_a_launcher_that_cannot_join_is_ended_and_its_group_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[Any] = []
        removed: list[Any] = []
        monkeypatch.setattr(launcher_limits, "make", lambda _group, _spec: None)
        monkeypatch.setattr(launcher_cgroups, "remove", removed.append)

        def join(_group: Any, pid: int) -> None:
            started.append(pid)
            raise OSError("no such group")

        monkeypatch.setattr(launcher_limits, "join", join)
        before = len(os.listdir("/proc/self/fd"))
        nothing: Any = None
        with pytest.raises(OSError, match="no such group"):
            launcher_limits.start(self.group(tmp_path, "a"), nothing, ["sleep", "600"])
        assert [[str(tmp_path / "a")]] == removed
        with pytest.raises(ProcessLookupError):
            os.kill(started[0], 0)
        assert before == len(os.listdir("/proc/self/fd"))


def test_only_images_of_this_store_that_it_has_no_more_are_removed_from_an_engine(
    tmp_path: Path,
) -> None:
    """By the filter of the engine: a label is there, or has a value."""
    own, other = tmp_path / "own", tmp_path / "other"
    held = {
        "kept": {image._ID: "sha256:a", image._STORE: str(own)},
        "gone": {image._ID: "sha256:b", image._STORE: str(own)},
        "another store's": {image._ID: "sha256:b", image._STORE: str(other)},
        "nobody's": {},
    }

    def listed(filters: dict[str, str]) -> list[Any]:
        label, is_valued, value = filters["label"].partition("=")
        return [
            SimpleNamespace(id=name, labels=labels)
            for name, labels in held.items()
            if label in labels and (not is_valued or labels[label] == value)
        ]

    engine = SimpleNamespace(images=SimpleNamespace(list=listed, remove=held.pop))
    store = SimpleNamespace(images=lambda: [SimpleNamespace(id="sha256:a")], directory=own)
    image._forget_removed(engine, store)  # type: ignore[arg-type]

    assert ["kept", "another store's", "nobody's"] == list(held)
