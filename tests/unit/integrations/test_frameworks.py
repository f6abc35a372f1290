"""What adapters of single frameworks ask of a sandbox, and what they make of its answers."""

from __future__ import annotations

import asyncio
import base64
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.frameworks import adapter

from ringfence.errors import (
    FileNotFound,
    InvalidRequest,
    IsADirectory,
    PermissionDenied,
    SandboxLost,
    Unsupported,
)
from ringfence.integrations.outcome import NOT_EXECUTABLE
from ringfence.model.execs.exec import KILLED_BY_TERMINATE, ExecResult
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone


class Kept:
    """A content of a framework's, which keeps what it is made of."""

    def __init__(self, *given: Any, **content: Any) -> None:
        self.given = given
        self.__dict__ |= content


def kept(*names: str) -> dict[str, Any]:
    return {name: type(name, (Kept,), {}) for name in names}


class Files:
    def __init__(self, contents: dict[str, Any] | None = None) -> None:
        self.contents, self.done = contents or {}, list[Any]()

    async def write(self, path: str, data: Any, **how: Any) -> None:
        self.done.append(("write", path, data, how))

    async def read(self, path: str, max_bytes: int) -> Any:
        found = self.contents[path]
        if isinstance(found, Exception):
            raise found
        return found[:max_bytes]

    async def make_dir(self, path: str) -> None:
        self.done.append(("dir", path))

    async def upload(self, source: str, target: str) -> None:
        self.done.append(("upload", Path(source).name, target))

    async def download(self, source: str, target: str, overwrite: bool) -> None:
        self.done.append(("download", source, target, overwrite))


@pytest.fixture(scope="module")
def harbor() -> Iterator[Any]:
    modes = SimpleNamespace(PUBLIC="public", NO_NETWORK="none", ALLOW="allow")
    frameworks: dict[str, dict[str, Any]] = {
        "harbor": {},
        "harbor.environments": {},
        "harbor.environments.base": kept("ExecResult", "BaseEnvironment"),
        "harbor.environments.capabilities": kept(
            "EnvironmentCapabilities", "EnvironmentResourceCapabilities"
        ),
        "harbor.environments.definition": {
            "effective_exec_cwd": lambda cwd, task, image: cwd or task or image,
            "parse_dockerfile_workdir": lambda _path: None,
        },
        "harbor.models": {},
        "harbor.models.task": {},
        "harbor.models.task.config": {"NetworkMode": modes, "NetworkPolicy": Kept},
    }
    with adapter("harbor", frameworks) as found:
        yield found


class TestHarbor:
    @pytest.fixture
    def module(self, harbor: Any) -> Any:
        return harbor

    def made(self, module: Any, place: Path, **facts: Any) -> Any:
        made = module.RingfenceEnvironment.__new__(module.RingfenceEnvironment)
        usual: dict[str, Any] = {
            "_image": "", "_options": {}, "_server": None, "_sandbox": None, "_workdir": None,
            "environment_dir": place, "_effective_memory_mb": 64, "_effective_cpus": 2,
            "task_env_config": SimpleNamespace(docker_image=None, workdir=None),
            "network_policy": SimpleNamespace(network_mode="none", allowed_hosts=["x"]),
            "_merge_env": lambda env: env, "_resolve_user": lambda user: user,
        }  # fmt: skip
        for name, value in {**usual, **facts}.items():
            setattr(made, name, value)
        return made

    def test_only_what_needs_no_building_is_taken(self, module: Any, tmp_path: Path) -> None:
        made = self.made(module, tmp_path)
        with pytest.raises(FileNotFoundError):
            made._validate_definition()
        file = tmp_path / "Dockerfile"
        file.write_text("# comment\n\nFrom debian:12\nWORKDIR /w\nENV A=1\n")
        made._validate_definition()
        assert "debian:12" == made._image_of_task()
        file.write_text("FROM debian\nRUN make\n")
        with pytest.raises(InvalidRequest, match="RUN") as refusal:
            made._validate_definition()
        assert "image" == refusal.value.field
        made._image = "mine"
        made._validate_definition()
        assert "mine" == made._image_of_task()

    def test_a_trial_has_its_limits_network_and_places(self, module: Any, tmp_path: Path) -> None:
        made = self.made(module, tmp_path, _image="debian", _options={"tier": "strong"})
        found = made._arguments()
        assert {"memory_bytes": 64 << 20, "cpus": 2.0} == found["limits"]
        assert ("debian", "strong", "/app", "none") == (
            found["image"], found["tier"], found["workdir"], found["network"],
        )  # fmt: skip
        assert "user" not in found
        targets = [each.target for each in found["mounts"]]
        assert ["/logs", "/tests", "/solution", "/installed-agent", "/app"] == targets
        assert all(each.is_writable for each in found["mounts"])
        host = self.made(
            module, tmp_path, _image="default", _effective_cpus=None, _workdir="/tests"
        )
        found = host._arguments()
        assert ("root", "/tests") == (found["user"], found["workdir"])
        assert "image" not in found
        assert {"memory_bytes": 64 << 20} == found["limits"]
        assert 4 == len(found["mounts"]), "each once"
        policies = [("public", "public"), ("none", "none"), ("allow", ["x"])]
        for mode, expected in policies:
            policy = SimpleNamespace(network_mode=mode, allowed_hosts=("x",))
            assert expected == module._network(policy)

    def test_a_trial_is_made_where_and_as_its_task_says(
        self, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[Any] = []

        async def exec_(_argv: Any, **how: Any) -> ExecResult:
            done.append(how["env"])
            return ExecResult(exit_code=0)

        async def change(network: Any) -> None:
            done.append(network)

        async def make() -> Any:
            return SimpleNamespace(exec=exec_, apply_network_policy=change)

        def origin(arguments: Any, server: Any = None) -> Any:
            done.append((arguments["user"], arguments["network"], server))
            return SimpleNamespace(async_sandbox=make)

        async def nothing(*_: Any) -> None:
            pass

        monkeypatch.setattr(module, "Origin", origin)
        made = self.made(
            module, tmp_path, _image="default", _options={"user": "7"}, _server="http://x",
            network_policy=SimpleNamespace(network_mode="allow", allowed_hosts=["a.test"]),
            _merge_env=lambda env: {"TASK": "1", **(env or {})}, ensure_dirs=nothing,
            _mount_targets=lambda writable_only: [], _upload_environment_dir_after_start=nothing,
        )  # fmt: skip
        asyncio.run(made.start(False))
        assert [("7", ["a.test"], "http://x")] == done, "an option wins over the usual user"
        asyncio.run(made.exec("x"))
        assert {"TASK": "1"} == done[-1]
        policy = SimpleNamespace(network_mode="public", allowed_hosts=[])
        asyncio.run(made._apply_network_policy(policy))
        assert "public" == done[-1]

    def test_commands_and_files_go_to_the_sandbox_until_it_has_ended(
        self, module: Any, tmp_path: Path
    ) -> None:
        asked: list[Any] = []
        files = Files()

        async def exec_(argv: Any, **how: Any) -> ExecResult:
            asked.append((argv, how))
            return ExecResult(stderr=b"err", signal=9, timed_out=True, duration_s=1.0)

        async def terminate() -> None:
            asked.append("ended")

        sandbox = SimpleNamespace(exec=exec_, terminate=terminate, files=files)
        made = self.made(module, tmp_path, _sandbox=sandbox, _workdir="/w")
        done = asyncio.run(made.exec("cmd", env={"A": "1"}, timeout_sec=3, user="u"))
        assert (124, True) == (done.return_code, done.stderr.startswith("err\ntimed out"))
        [(argv, how)] = asked
        assert "cmd" == argv[-1]
        made._resolve_user = lambda user: user or "the task's"
        for user, found in ((None, "the task's"), ("u", "u")):
            asyncio.run(made.exec("cmd", user=user))
            assert found == asked.pop()[1]["user"]
        assert ("/w", {"A": "1"}, 3, "u") == (
            how["cwd"], how["env"], how["timeout_s"], how["user"],
        )  # fmt: skip
        (tmp_path / "d/in").mkdir(parents=True)
        (tmp_path / "d/in/x").touch()
        (tmp_path / "d/link").symlink_to("in")
        asyncio.run(made.upload_dir(tmp_path / "d", "/t/"))
        asyncio.run(made.upload_file(tmp_path / "d/in/x", "/deep/x"))
        asyncio.run(made.download_dir("/logs", tmp_path))
        assert [
            ("dir", "/t/"), ("dir", "/t/in"), ("upload", "x", "/t/in/x"), ("upload", "link", "/t/link"),
            ("dir", "/deep"), ("upload", "x", "/deep/x"), ("download", "/logs", str(tmp_path), True),
        ] == files.done  # fmt: skip
        asyncio.run(made.stop(True))
        asyncio.run(made.stop(True))
        assert "ended" == asked[-1]
        assert 2 == len(asked), "once"
        with pytest.raises(RuntimeError, match="not started"):
            _ = made.sandbox


@pytest.fixture(scope="module")
def inspect() -> Iterator[Any]:
    class UnavailableError(Exception):
        pass

    class UserError(Exception):
        pass

    class TooMuchError(Exception):
        pass

    limits = SimpleNamespace(
        MAX_EXEC_OUTPUT_SIZE=100, MAX_EXEC_OUTPUT_SIZE_STR="100 bytes",
        MAX_READ_FILE_SIZE=4, MAX_READ_FILE_SIZE_STR="4 bytes",
    )  # fmt: skip
    util = {
        "ExecResult": Kept, "OutputLimitExceededError": TooMuchError, "SandboxEnvironment": object,
        "SandboxEnvironmentLimits": limits, "SandboxUserUnsupportedError": UserError,
        "sandboxenv": lambda name: lambda cls: cls,
    }  # fmt: skip
    Kept.__class_getitem__ = classmethod(lambda cls, _of: cls)  # type: ignore[attr-defined]
    frameworks: dict[str, dict[str, Any]] = {
        "inspect_ai": {},
        "inspect_ai.util": util,
        "inspect_ai.util._sandbox": {},
        "inspect_ai.util._sandbox.environment": {"SandboxUnavailableError": UnavailableError},
    }
    with adapter("inspect_ai", frameworks) as found:
        yield found


class TestInspect:
    @pytest.fixture
    def module(self, inspect: Any) -> Any:
        return inspect

    def test_how_a_command_ended_is_told_in_inspects_words(self, module: Any) -> None:
        def checked(**result: Any) -> Any:
            return module._checked(["cmd"], ExecResult(**result))

        assert (True, 0, "o", "e") == checked(exit_code=0, stdout=b"o", stderr=b"e").given
        assert (False, 3) == checked(exit_code=3).given[:2]
        with pytest.raises(TimeoutError, match=r"cmd timed out after 2\.0 s"):
            checked(signal=9, timed_out=True, duration_s=2.0)
        with pytest.raises(module.SandboxUnavailableError):
            checked(signal=9, timed_out=True, killed_by=KILLED_BY_TERMINATE)
        with pytest.raises(module.OutputLimitExceededError) as too_much:
            checked(exit_code=0, stdout=b"o", stderr=b"e", truncated=True)
        assert ("100 bytes", "oe") == too_much.value.args
        with pytest.raises(PermissionError, match=r"^cmd: no"):
            checked(exit_code=NOT_EXECUTABLE, stderr=b"ringfence: cmd: no\n")
        assert NOT_EXECUTABLE == checked(exit_code=NOT_EXECUTABLE, stderr=b"cmd: no").given[1]

    def test_a_command_has_what_it_is_given(self, module: Any) -> None:
        asked: list[Any] = []

        async def run(argv: Any, **how: Any) -> ExecResult:
            asked.append((argv, how))
            return ExecResult(exit_code=0)

        made = module.RingfenceEnvironment(SimpleNamespace(exec=run))
        given: dict[str, Any] = {"cwd": "/w", "env": {"A": "b"}, "user": "u"}
        asyncio.run(made.exec(["x"], input=b"in", timeout=7, **given))
        most = module.SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        expected = {**given, "stdin": b"in", "timeout_s": 7, "max_output_bytes": most}
        assert [(["x"], expected)] == asked

    def test_every_sandbox_of_a_sample_ends(self, module: Any) -> None:
        ended: list[str] = []

        def environment(name: str) -> Any:
            async def terminate() -> None:
                ended.append(name)

            made = module.RingfenceEnvironment(SimpleNamespace(terminate=terminate))
            made.as_type = lambda kind: made
            return made

        kind = module.RingfenceEnvironment
        there = {name: environment(name) for name in ("default", "other")}
        asyncio.run(kind.sample_cleanup("task", None, there, interrupted=True))
        assert ["default", "other"] == ended

    def test_files_are_read_up_to_a_size(self, module: Any) -> None:
        contents = {"/four": b"four", "/five": b"fiver", "/none": FileNotFound("x")}
        sandbox = SimpleNamespace(files=Files({**contents, "/gone": SandboxLost("x")}))
        made = module.RingfenceEnvironment(sandbox)
        assert "four" == asyncio.run(made.read_file("/four"))
        assert b"four" == asyncio.run(made.read_file("/four", text=False))
        for path, error in (
            ("/five", module.OutputLimitExceededError), ("/none", FileNotFoundError),
            ("/gone", module.SandboxUnavailableError),
        ):  # fmt: skip
            with pytest.raises(error):
                asyncio.run(made.read_file(path))
        asyncio.run(made.write_file("/deep/x", "y"))
        assert [("write", "/deep/x", "y", {"parents": True})] == sandbox.files.done

    @pytest.mark.parametrize("user", [None, "u"])
    def test_a_user_that_cannot_be_is_told_only_where_one_was_asked_for(
        self, module: Any, user: str | None
    ) -> None:
        for error in (InvalidRequest("x", field="user"), Unsupported("x", field="user")):
            expected = module.SandboxUserUnsupportedError if user else type(error)
            with pytest.raises(expected), module._available(user):
                raise error
            with pytest.raises(InvalidRequest), module._available(user):
                raise InvalidRequest("x", field="cwd")

    def test_a_configuration_comes_from_a_file_or_a_log(self, module: Any, tmp_path: Path) -> None:
        (tmp_path / "a.toml").write_text('server = "http://x"\ntier = "strong"\n')
        (tmp_path / "a.json").write_text('{"server": "http://x", "tier": "strong"}')
        for name in ("a.toml", "a.json"):
            origin = module.RingfenceConfig.read(str(tmp_path / name)).origin()
            assert ("http://x", {"tier": "strong"}) == (origin.server, dict(origin.options))
        again = module.RingfenceEnvironment.config_deserialize({"server": None, "tier": "light"})
        assert {"tier": "light"} == dict(again.origin().options)
        with pytest.raises(TypeError, match="RingfenceConfig"):
            asyncio.run(module.RingfenceEnvironment.sample_init("t", Kept(), {}))


@pytest.fixture(scope="module")
def deepagents() -> Iterator[Any]:
    frameworks: dict[str, dict[str, Any]] = {
        "deepagents": {},
        "deepagents.backends": {},
        "deepagents.backends.sandbox": kept("BaseSandbox"),
        "deepagents.backends.protocol": kept(
            "ExecuteResponse", "FileDownloadResponse", "FileUploadResponse"
        ),
    }
    with adapter("langchain", frameworks) as found:
        yield found


class TestDeepagents:
    @pytest.fixture
    def module(self, deepagents: Any) -> Any:
        return deepagents

    def test_errors_of_files_have_its_words_and_others_their_own(self, module: Any) -> None:
        for error, code in (
            (FileNotFound("x"), "file_not_found"), (PermissionDenied("x"), "permission_denied"),
            (IsADirectory("x"), "is_directory"), (InvalidRequest("x"), "invalid_path"),
            (SandboxLost("a sentence"), "a sentence"),
        ):  # fmt: skip
            assert code == module._code(error)
        assert "/x" == module._absolute("/x")
        with pytest.raises(InvalidRequest, match="not absolute"):
            module._absolute("x")

    def test_what_it_offloads_has_places_beside_the_callers(self, module: Any) -> None:
        first, second = module.OFFLOADED
        mine = Mount(first, "/srv")
        for options in (
            {"mounts": [mine], "tier": "light"}, {"spec": SandboxSpec(mounts=(mine,)), "tier": "light"}
        ):  # fmt: skip
            found = module._with_places(options)
            mounts = found["spec"].mounts if "spec" in options else found["mounts"]
            assert [(first, "/srv"), (second, "")] == [
                (each.target, each.source) for each in mounts
            ]
            assert "light" == found["tier"]

    def test_names_are_given_as_places_and_come_back_as_names(self, module: Any) -> None:
        made = module.RingfenceBackend.__new__(module.RingfenceBackend)
        made._places = [("/tmp", "/real/tmp"), ("/home/sandbox", "/real/home")]
        for path, place in (
            ("/tmp", "/real/tmp"), ("/tmp/x", "/real/tmp/x"), ("/tmpx", "/tmpx"), ("/usr", "/usr"),
        ):  # fmt: skip
            assert place == made._at(path)
        result = Kept(entries=[{"path": "/real/tmp/x"}], path="/real/home/y", error="no /real/tmp")
        found = made._named(result)
        assert ([{"path": "/tmp/x"}], "/home/sandbox/y", "no /tmp") == (
            found.entries, found.path, found.error,
        )  # fmt: skip
        matched = made._named(Kept(matches=[{"path": "/real/tmp/x"}]))
        assert [{"path": "/tmp/x"}] == matched.matches
        assert not made.enable_capture_offload

    def test_places_are_those_that_the_sandbox_tells_of_its_own_and_of_mounts(
        self, module: Any
    ) -> None:
        asked: list[Any] = []

        def run(argv: Any) -> Any:
            asked.append(argv)
            places = {"/tmp": "/real/tmp", "/mnt/mine": "/srv/mine"}
            told = [places.get(name, name) for name in argv[2:]]
            return SimpleNamespace(text="\n".join(told) + "\n")

        made = module.RingfenceBackend.__new__(module.RingfenceBackend)
        mounts = (Mount("/mnt/mine", "/srv"), Mount("/large_tool_results", "/srv/large"))
        made.sandbox = SimpleNamespace(spec=SandboxSpec(mounts=mounts), exec=run)
        assert [("/tmp", "/real/tmp"), ("/mnt/mine", "/srv/mine")] == made._places
        assert made._places is made._places, "asked once"
        [argv] = asked
        assert len(argv) == len({*argv}), "each name once"
        plain = module.RingfenceBackend.__new__(module.RingfenceBackend)
        same = lambda argv: SimpleNamespace(text="\n".join(argv[2:]))  # noqa: E731
        plain.sandbox = SimpleNamespace(spec=SandboxSpec(), exec=same)
        assert plain.enable_capture_offload

    @pytest.mark.parametrize("is_awaited", [False, True])
    def test_every_tool_gets_places_and_gives_names(
        self, module: Any, monkeypatch: pytest.MonkeyPatch, is_awaited: bool
    ) -> None:
        made = module.RingfenceBackend.__new__(module.RingfenceBackend)
        made._places = [("/tmp", "/real/tmp")]
        base = module.RingfenceBackend.__mro__[2]
        asked: list[Any] = []

        def note(name: str) -> Any:
            def tool(_self: Any, *given: Any) -> Any:
                asked.append((name, *given))
                return Kept(path="/real/tmp/found")

            async def atool(_self: Any, *given: Any) -> Any:
                return tool(_self, *given)

            return atool if is_awaited else tool

        prefix = "a" if is_awaited else ""
        for name, given, taken in (
            ("ls", ("/tmp/d",), ("/real/tmp/d",)),
            ("read", ("/tmp/f", 3, 4), ("/real/tmp/f", 3, 4)),
            ("write", ("/tmp/f", "text"), ("/real/tmp/f", "text")),
            ("edit", ("/tmp/f", "/tmp/old", "new", True), ("/real/tmp/f", "/tmp/old", "new", True)),
            ("grep", ("/tmp/x", "/tmp/d", "*.py"), ("/tmp/x", "/real/tmp/d", "*.py")),
            ("grep", ("x", None, None), ("x", None, None)),
            ("glob", ("/tmp/*", "/tmp/d"), ("/real/tmp/*", "/real/tmp/d")),
            ("glob", ("*", None), ("*", None)),
        ):
            monkeypatch.setattr(base, prefix + name, note(name), raising=False)
            found = getattr(made, prefix + name)(*given)
            found = asyncio.run(found) if is_awaited else found
            assert ((name, *taken), "/tmp/found") == (asked[-1], found.path)

    def test_files_are_named_by_absolute_paths_and_each_has_its_answer(self, module: Any) -> None:
        written: list[Any] = []
        files = SimpleNamespace(
            write=lambda *given, **how: written.append((*given, how)), read=lambda path: b"content"
        )
        made = module.RingfenceBackend.__new__(module.RingfenceBackend)
        made.sandbox = SimpleNamespace(files=files)
        sent = made.upload_files([("relative", b"x"), ("/w/deep", b"y")])
        assert ["invalid_path", None] == [each.error for each in sent]
        assert [("/w/deep", b"y", {"parents": True})] == written
        got = made.download_files(["relative", "/w/deep"])
        assert [("invalid_path", None), (None, b"content")] == [
            (each.error, each.content) for each in got
        ]

    def test_a_server_is_asked_again_with_the_key_of_the_sandbox(
        self, module: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []

        class Client:
            def __init__(self, *given: Any, **how: Any) -> None:
                asked.append((given, how))

            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *_exc: object) -> None:
                asked.append("closed")

            async def get(self, name: str) -> Any:
                async def run(**how: Any) -> ExecResult:
                    asked.append((name, how["timeout_s"]))
                    return ExecResult(exit_code=0, stdout=b"out")

                return SimpleNamespace(exec=run)

        monkeypatch.setattr("ringfence.client.AsyncClient", Client)
        made = module.RingfenceBackend.__new__(module.RingfenceBackend)
        made._timeout_s = 7.0
        transport = SimpleNamespace(arguments=("http://x", "rf_key", 5.0, 2))
        made.sandbox = SimpleNamespace(id="sbx", _transport=transport)
        assert "out" == asyncio.run(made.aexecute("x")).output
        how = {"key": "rf_key", "timeout_s": 5.0, "retries": 2}
        assert [(("http://x",), how), ("sbx", 7.0), "closed"] == asked

    def test_a_command_has_its_own_timeout_or_the_backends(self, module: Any) -> None:
        made = module.RingfenceBackend.__new__(module.RingfenceBackend)
        made._timeout_s = 7.0
        assert [7.0, 3.0, None] == [
            made._request("x", timeout)["timeout_s"] for timeout in (None, 3.0, 0)
        ]
        response = module._response(ExecResult(stdout=b"o", stderr=b"e", signal=9, oom_killed=True))
        assert (137, True) == (response.exit_code, response.output.startswith("oe\nkilled"))
        ended: list[int] = []
        made.sandbox = SimpleNamespace(terminate=lambda: ended.append(1))
        for owned, count in ((False, 0), (True, 1)):
            made._owned = owned
            with made:
                pass
            assert count == len(ended), "another's is not ours to end"


class TestDeepagentsCode:
    def test_a_sandbox_is_made_found_and_ended_where_it_is_asked_for(
        self, deepagents: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = importlib.import_module("ringfence.integrations.deepagents_code")
        done: list[Any] = []

        class Origin:
            def __init__(self, options: Any = None, server: Any = None) -> None:
                self.how = (options or {}, server)

            def lasting(self) -> Any:
                return SimpleNamespace(id="new", how=self.how)

            def find(self, name: str) -> Any:
                ended = lambda: done.append((name, self.how))  # noqa: E731
                return SimpleNamespace(id=name, how=self.how, terminate=ended)

        monkeypatch.setattr(code, "Origin", Origin)
        monkeypatch.setattr(code, "RingfenceBackend", lambda made, server: (made, server))
        provider = code.RingfenceProvider()
        given: dict[str, Any] = {"server": "http://x", "tier": "light"}
        for is_awaited in (False, True):
            for name, expected in ((None, "new"), ("old", "old")):
                call = provider.aget_or_create if is_awaited else provider.get_or_create
                found: Any = call(sandbox_id=name, **given)
                made, server = asyncio.run(found) if is_awaited else found
                assert (expected, ({"tier": "light"}, "http://x"), "http://x") == (
                    made.id, made.how, server,
                )  # fmt: skip
        provider.delete(sandbox_id="old", **given)
        asyncio.run(provider.adelete(sandbox_id="older", server="http://y"))
        assert [("old", ({}, "http://x")), ("older", ({}, "http://y"))] == done


@pytest.fixture(scope="module")
def autogen() -> Iterator[Any]:
    Kept.__class_getitem__ = classmethod(lambda cls, _of: cls)  # type: ignore[attr-defined]
    frameworks: dict[str, dict[str, Any]] = {
        "autogen_core": {"Component": type("Component", (Kept,), {})},
        "autogen_core.code_executor": {
            **kept("CodeBlock"), "CodeExecutor": type("CodeExecutor", (), {}),
            "CodeResult": type("CodeResult", (), {}),
        },
    }  # fmt: skip
    with adapter("autogen", frameworks) as found:
        yield found


class TestAutogen:
    @pytest.fixture
    def module(self, autogen: Any) -> Any:
        return autogen

    def test_a_block_may_name_its_file_but_only_in_the_working_directory(self, module: Any) -> None:
        name = module._file_name
        assert "a/b.py" == name("# filename: a/b.py\nx", "py")
        assert "b.py" == name("# filename: a/../b.py\nx", "py")
        assert "..b.py" == name("# filename: ..b.py\nx", "py")
        for bad in ("/etc/x", "../x", "a/../../x", "..", ".", "", "-rf"):
            assert name(f"# filename: {bad}\nx", "py") is None
        usual = name("x = 1", "sh")
        assert usual.endswith(".sh")
        assert usual == name("x = 1", "sh") != name("x = 2", "sh")


@pytest.fixture(scope="module")
def adk() -> Iterator[Any]:
    base = type("BaseCodeExecutor", (), {"model_fields": {}})
    frameworks: dict[str, dict[str, Any]] = {
        "google": {},
        "google.adk": {},
        "google.adk.code_executors": {},
        "google.adk.code_executors.base_code_executor": {"BaseCodeExecutor": base},
        "google.adk.code_executors.code_execution_utils": kept("CodeExecutionResult", "File"),
    }
    with adapter("adk", frameworks) as found:
        yield found


class TestAdk:
    @pytest.fixture
    def module(self, adk: Any) -> Any:
        return adk

    def test_a_failure_says_something_and_a_success_is_none(self, module: Any) -> None:
        def streams(**result: Any) -> Any:
            return module._streams(ExecResult(**result))

        assert ("out\nwarning", "") == streams(exit_code=0, stdout=b"out", stderr=b"warning")
        assert ("out", "") == streams(exit_code=0, stdout=b"out")
        assert ("out", "ended with exit code 3") == streams(exit_code=3, stdout=b"out")
        assert ("", "why") == streams(exit_code=3, stderr=b"why")

    def test_outputs_come_once_as_far_as_they_fit(
        self, module: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "FILES_BYTES", 10)
        contents = {"a.txt": b"123456", "b.bin": b"12345", "c": b"1234"}
        removed: list[str] = []

        def info(name: str, kind: str = "file") -> Any:
            size = len(contents.get(name, b""))
            return SimpleNamespace(name=name, path=f"/o/{name}", kind=kind, size_bytes=size)

        files = SimpleNamespace(
            list=lambda _path: [info("d", "directory"), *map(info, contents)],
            read=lambda path, max_bytes: contents[path[3:]][:max_bytes], remove=removed.append,
        )  # fmt: skip
        found = module._outputs(SimpleNamespace(files=files))
        assert [("a.txt", b"123456", "text/plain"), ("c", b"1234", "application/octet-stream")] == [
            (each.name, each.content, each.mime_type) for each in found
        ]
        assert ["/o/a.txt", "/o/c"] == removed, "what did not fit is still there"

    def test_inputs_are_bytes_text_or_base64(self, module: Any) -> None:
        encoded = base64.b64encode(b"x").decode()
        for content, kind, expected in (
            (b"raw", "image/png", b"raw"), ("text", "text/plain", b"text"), (encoded, "image/png", b"x"),
        ):  # fmt: skip
            file = SimpleNamespace(content=content, mime_type=kind)
            assert expected == module._bytes_of(file)
