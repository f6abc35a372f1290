"""Backends of `backends.toml` and of installed packages: what is read, what is refused, and who stands in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends import plugins, registry
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.command.launchers import Launcher
from ringfence.backends.command.stream import StreamBackend
from ringfence.backends.plugins import UnusableBackend
from ringfence.backends.protocol import Backend
from ringfence.backends.settings import WHOLE, Settings
from ringfence.errors import BackendUnavailable, InvalidRequest, RingfenceError, SnapshotNotFound
from ringfence.model.spec import TIERS, SandboxSpec

TABLES = """
[codex]
binary = "/opt/codex"
[lxc]
executable = "/opt/lxc"
[launchers.jail]
argv = ["jail", "{root}", "{shown}", "--"]
show = ["{source}:{target}"]
env = {HOME = "{own}"}
[streams.box]
argv = ["docker", "exec", "-i", "BOX"]
launcher = ["confine"]
[ssh.far]
host = "far.test"
port = 2222
user = "me"
identity = "/key"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "backends.toml"
    path.write_text(TABLES)
    path.chmod(0o644)
    return path


@pytest.fixture
def own(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file is this process's, and shared backends are none."""
    monkeypatch.setattr(registry, "_settings", None)
    monkeypatch.setattr(registry, "_shared", {})
    monkeypatch.setattr(plugins, "found", dict)
    registry.use_settings(str(file))
    yield file
    registry.close_all()


class TestFiles:
    @pytest.mark.parametrize(
        ("mode", "is_read"), [(0o600, True), (0o644, True), (0o664, False), (0o646, False)]
    )
    def test_one_that_others_may_write_is_not_obeyed(
        self, file: Path, mode: int, is_read: bool
    ) -> None:
        file.chmod(mode)
        found = Settings(str(file)).found
        assert is_read == (WHOLE not in found)
        assert is_read == ("jail" in found)
        if not is_read:
            assert "other users can write" in str(found[WHOLE])

    def test_one_of_another_user_is_not_obeyed(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, owners = os.fstat, [0, os.geteuid(), 77_777]

        def fstat(fd: int) -> os.stat_result:
            facts = list(real(fd)[:10])
            facts[4] = owners[0]
            return os.stat_result(facts)

        monkeypatch.setattr(os, "fstat", fstat)
        for is_read in (True, True, False):
            assert is_read == (WHOLE not in Settings(str(file)).found)
            owners.pop(0)
        monkeypatch.undo()

    def test_a_file_is_there_where_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nowhere = str(tmp_path / "none")
        monkeypatch.setattr("ringfence.backends.settings.backends_file", lambda: nowhere)
        assert {} == Settings().found
        for made in (Settings(required=True), Settings(nowhere), Settings(str(tmp_path))):
            assert "backends_file" == getattr(made.found[WHOLE], "field", None)
            with pytest.raises(InvalidRequest):
                made.of("codex")
        (tmp_path / "bad").write_text("[x")
        (tmp_path / "bad").chmod(0o600)
        assert "not TOML" in str(Settings(str(tmp_path / "bad")).found[WHOLE])

    def test_ours_are_the_defaults_where_nothing_is_said(self, file: Path, tmp_path: Path) -> None:
        made = Settings(str(file))
        assert ("/opt/codex", "/opt/lxc") == (made.of("codex").binary, made.of("lxc").executable)
        file.write_text("")
        made = Settings(str(file))
        assert ("", "lxc-start", 20.0) == (
            made.of("codex").binary, made.of("lxc").executable, made.of("codex").probe_timeout_s,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "name", "why"),
        [
            ("[launchers.jail]\nargv = []", "jail", "argv: is empty"),
            ('[launchers.jail]\nargv = ["{else}"]', "jail", "unknown placeholder"),
            ('[launchers.jail]\nargv = ["x"]\nwithin = ["{else}"]', "jail", "unknown placeholder"),
            ('[launchers.jail]\nargv = ["x"]\nenv = {A = "{else}"}', "jail", "unknown placeholder"),
            ('[launchers.jail]\nargv = ["x"]\nshow = ["{root}"]', "jail", "unknown placeholder"),
            ('[launchers.jail]\nargv = ["x"]\nfiltered = 1', "jail", "filtered"),
            ('[launchers."a/b"]\nargv = ["x"]', "a/b", "the name"),
            ("[streams.box]\nargv = []", "box", "is empty"),
            ('[streams.box]\nargv = ["x"]\nquoted = "yes"', "box", "quoted"),
            ('[streams.box]\nargv = ["x"]\npython = ""', "box", "python"),
            ('[ssh.far]\nhost = ""', "far", "host"),
            ('[ssh.far]\nhost = "x"\nport = 65536', "far", "port"),
            ('[ssh.far]\nhost = "x"\nother = 1', "far", "other"),
            ("[codex]\nprobe_timeout_s = 0", "codex", "probe_timeout_s"),
            ("[codex]\nprobe_timeout_s = 601", "codex", "probe_timeout_s"),
            ('[codex]\nsubcommand = ""', "codex", "subcommand"),
            ('[lxc]\nexecutable = ""', "lxc", "executable"),
            ("[other]\nx = 1", WHOLE, "unknown table"),
            ("ssh = 1", WHOLE, "unknown table"),
        ],
    )
    def test_a_bad_table_is_told_and_stops_no_other(
        self, file: Path, text: str, name: str, why: str
    ) -> None:
        kept = '\n[launchers.kept]\nargv = ["x", "{masked}", "{uid}"]\n'
        file.write_text(text + kept)
        found = Settings(str(file)).found
        assert isinstance(found[name], RingfenceError)
        assert why in str(found[name])
        assert not isinstance(found["kept"], RingfenceError)


class TestNamed:
    def test_each_is_made_as_it_is_described(self, own: Path) -> None:
        assert {"jail", "box", "far", "codex", "lxc"} <= {*registry.names()}
        assert len(registry.names()) == len({*registry.names()})
        jail: Any = registry.new_backend("jail", state_dir="/state", other=1)
        assert isinstance(jail, CommandBackend)
        assert ("jail", "/state", True) == (jail.name, jail._state_dir, jail.launcher.filtered)
        box: Any = registry.new_backend("box")
        assert isinstance(box, StreamBackend)
        assert (("confine",), False) == (box.launcher.there, box.launcher.quoted)
        far: Any = registry.new_backend("far")
        assert far.launcher.quoted
        words = far.launcher.argv
        assert ("2222", "/key", "me@far.test") == (
            words[words.index("-p") + 1], words[words.index("-i") + 1], words[-1],
        )  # fmt: skip
        assert words[-2] == "--"
        lxc: Any = registry.new_backend("lxc")
        assert "/opt/lxc" in lxc.launcher.argv
        assert {"light"} == {registry.tier_of(each) for each in ("jail", "box", "nobody")}
        assert ("strong", "light") == (registry.tier_of("gvisor"), registry.tier_of("native"))

    def test_one_that_is_wrong_stands_in_and_says_why(self, own: Path) -> None:
        own.write_text("[launchers.jail]\nargv = []\n")
        registry.use_settings(str(own))
        registry.check_settings()
        made: Any = registry.new_backend("jail")
        assert isinstance(made, UnusableBackend)
        for act in (made.provision, made.prewarm, made.restore):
            with pytest.raises(BackendUnavailable, match="is empty"):
                act(SandboxSpec())
        assert not made.report().available
        assert [] == made.snapshots()
        assert TIERS == made.tiers
        with pytest.raises(SnapshotNotFound, match="jail has no snapshot"):
            made.delete_snapshot("snap")
        made.close()

    def test_a_name_that_is_nobodys_is_refused(self, own: Path) -> None:
        registry.check_names(["native", "jail", "far"])
        for name in ("nobody", ""):
            with pytest.raises(InvalidRequest, match="unknown backend") as refusal:
                registry.check_names(["native", name])
            assert "backend" == refusal.value.field
            with pytest.raises(InvalidRequest, match="unknown backend"):
                registry.backend_named(name)
        assert ("mine", "native", None) == (
            registry.name_of(SimpleNamespace(name="mine")),
            registry.name_of("native"), registry.name_of(None),
        )  # fmt: skip
        for wrong in (7, SimpleNamespace(), SimpleNamespace(name=7)):
            with pytest.raises(InvalidRequest, match="must be a backend or its name"):
                registry.name_of(wrong)  # type: ignore[arg-type]

    def test_a_file_that_is_wrong_as_a_whole_is_told_to_who_asks_for_its_backends(
        self, own: Path
    ) -> None:
        own.write_text("[x")
        registry.use_settings(str(own))
        with pytest.raises(InvalidRequest, match="not TOML"):
            registry.check_settings()
        with pytest.raises(InvalidRequest, match="not TOML"):
            registry.new_backend("jail")
        assert "native" == registry.new_backend("native").name

    def test_a_backend_is_shared_by_one_process_and_user(
        self, own: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = registry.backend_named("jail")
        assert registry.backend_named("jail") is first
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: 77_777)
            assert registry.backend_named("jail") is not first
        closed: list[int] = []
        monkeypatch.setattr(first, "close", lambda: closed.append(1))
        registry._close_all(1)
        assert [] == closed, "a child does not end its parent's"
        registry._close_all(os.getpid())
        assert [1] == closed
        assert registry.backend_named("jail") is not first


class Whole:
    """A backend of a package's, with all that one has."""

    name = "packaged"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class TestPackages:
    def point(self, there: Any, name: str = "packaged") -> Any:
        def load() -> Any:
            if isinstance(there, BaseException):
                raise there
            return there

        return SimpleNamespace(
            name=name, value="module:thing", dist=SimpleNamespace(name="dist"), load=load
        )

    def why(self, made: Any) -> str:
        assert isinstance(made, UnusableBackend)
        return str(made.why)

    def test_a_backend_is_made_of_what_a_package_names(self) -> None:
        made = plugins.make(self.point(Whole), {}, lambda made: made)
        assert isinstance(made, Whole)
        ready = Whole()
        assert (
            plugins.make(self.point(lambda **how: ready if how else None), {"a": 1}, lambda m: m)
            is ready
        )
        assert plugins.loaded(self.point(Whole)) is Whole

    @pytest.mark.parametrize(
        "problem", [ImportError("no module"), SystemExit(3), ValueError("bad")]
    )
    def test_one_that_cannot_be_made_stands_in(self, problem: BaseException) -> None:
        assert type(problem).__name__ in self.why(
            plugins.make(self.point(problem), {}, lambda m: m)
        )
        assert plugins.loaded(self.point(problem)) is None

        def fail() -> None:
            raise problem

        assert "of package dist failed" in self.why(plugins.make(self.point(fail), {}, lambda m: m))

    def test_what_is_no_backend_or_has_another_name_stands_in(self) -> None:
        lacking = self.why(
            plugins.make(self.point(SimpleNamespace(name="packaged")), {}, lambda m: m)
        )
        assert "provision" in lacking
        assert "has the name 'packaged'" in self.why(
            plugins.make(self.point(Whole, "other"), {}, lambda m: m)
        )
        assert ["provision"] == [
            each for each in plugins.lacks(object(), Backend) if each == "provision"
        ]

    def test_the_first_of_a_name_wins_and_a_launcher_is_a_backend(
        self, own: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = Launcher("packaged", ("x",))
        points = [self.point(launcher), self.point(Whole)]
        monkeypatch.undo()
        monkeypatch.setattr(metadata, "entry_points", lambda group: points if group else [])
        assert {"packaged": points[0]} == plugins.found()
        monkeypatch.setattr(registry, "_settings", Settings(str(own)))
        made: Any = registry.new_backend("packaged", state_dir="/state")
        assert isinstance(made, CommandBackend)
        assert (launcher, "/state") == (made.launcher, made._state_dir)
