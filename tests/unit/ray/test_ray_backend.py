"""Sandboxes below Ray's own API, over a stand-in for Ray: what is made, and what is refused."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.errors import (
    ImageNotFound,
    InvalidRequest,
    RingfenceError,
    SandboxLost,
)
from ringfence.model.execs.exec import ExecResult

pytestmark = pytest.mark.anyone


Ray = Any


class Local:
    """A sandbox of this process, as calls see it."""

    def __init__(self, id: str = "sbx-1") -> None:
        self.id, self.ended = id, 0
        self.state = SimpleNamespace(value="running")
        self.session = "a session"
        self.files = SimpleNamespace(
            read=lambda path: f"content of {path}", open_read=lambda path: 1
        )

    def exec(self, argv: Any, **how: Any) -> Any:
        if argv == ["fail"]:
            raise InvalidRequest("no such", field="argv")
        return argv, how

    def start(self, argv: Any) -> None:
        raise AssertionError("nobody may call it from elsewhere")

    def terminate(self) -> None:
        self.ended += 1
        self.state.value = "terminated"


@pytest.fixture
def module(ray: Ray) -> Any:
    return importlib.import_module("ringfence.ray.backend")


def config(**changes: Any) -> Any:
    facts = {
        "image": "debian", "cpu": 0.5, "memory": "1024", "env": {"A": "b"}, "network": "none", "dns": None,
        "workdir": "/w", "shell": "bash",
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


def test_a_sandbox_is_made_as_the_job_and_the_request_say(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    asked: list[Any] = []

    def create(**parts: Any) -> Any:
        asked.append(parts)
        sandbox: Any = Local()
        sandbox.files = SimpleNamespace(make_dir=made.append)
        return sandbox

    monkeypatch.setattr(module.Sandbox, "create", create)
    options = module.Options(tier="strong", allow_degraded=["cpu_limit"], public=["a.test"])
    backend = module.Backend(options=options)
    name = backend.create_sandbox(config())
    assert {
        "image": "debian", "network": "none", "limits": {"cpus": 0.5, "memory_bytes": 1024},
        "env": {"A": "b"}, "tier": "strong", "allow_degraded": ["cpu_limit"],
    } == asked[-1]  # fmt: skip
    assert ["/w"] == made
    backend.create_sandbox(
        config(image=module.HOST, cpu=None, memory=None, env={}, network="public", workdir="")
    )
    assert {"network": ["a.test"], "tier": "strong", "allow_degraded": ["cpu_limit"]} == asked[-1]
    assert 1 == len(made)
    module.Backend(options=module.Options(backend="landlock")).create_sandbox(config())
    assert ("landlock", None) == (asked[-1]["backend"], asked[-1].get("tier"))
    for network, dns, said in (
        ("public", ["1.1.1.1"], "leave dns out"),
        ("host", None, "named hosts alone"),
    ):
        with pytest.raises(module.SandboxCreationError, match=said):
            backend.create_sandbox(config(network=network, dns=dns))
    with pytest.raises(module.SandboxCreationError, match="named hosts alone"):
        module.Backend(options=module.Options()).create_sandbox(config(network="public"))
    assert {"config"} == {*backend._sandbox_metadata[name]}
    sandbox = backend._sandboxes[name]
    assert "running" == backend.get_status(name)
    backend.delete_sandbox(name)
    backend.delete_sandbox(name)
    assert (1, "terminated", {}) == (
        sandbox.ended,
        backend.get_status(name),
        backend._sandbox_metadata,
    )
    with pytest.raises(module.SandboxNotFoundError):
        backend.read_file(name, "x")


def test_a_sandbox_whose_directory_cannot_be_made_is_ended(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has its id."""
    sandbox: Any = Local()

    def fail(_path: str) -> None:
        raise InvalidRequest("no such place", field="path")

    sandbox.files = SimpleNamespace(make_dir=fail)
    monkeypatch.setattr(module.Sandbox, "create", lambda **_: sandbox)
    backend = module.Backend(options=module.Options())
    with pytest.raises(module.SandboxCreationError, match="no such place"):
        backend.create_sandbox(config())
    assert (1, {}, {}) == (sandbox.ended, backend._sandboxes, backend._sandbox_metadata)


def test_a_command_has_what_rays_caller_asks_for(module: Any) -> None:
    asked: list[Any] = []
    answers: list[Any] = []

    def run(argv: Any, **how: Any) -> Any:
        asked.append((argv, how))
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers.pop(0)

    backend = module.Backend(options=module.Options())
    sandbox: Any = SimpleNamespace(exec=run, state=SimpleNamespace(value="terminated"))
    backend._sandboxes["s"] = sandbox
    backend._sandbox_metadata["s"] = {"config": config()}
    answers[:] = [
        ExecResult(exit_code=3, stdout=b"o", stderr=b"e", duration_s=1.5),
        ExecResult(signal=9),
    ]
    assert (3, "o", "e", 1.5) == backend.exec_command(
        "s", "echo", timeout=2.0, env={"A": "1"}, user="7"
    )
    assert 137 == backend.exec_command("s", ["a", "b"], cwd="/x", shell="zsh", user="name")[0]
    first, second = asked
    assert (["bash", "-c", "echo"], "/w", 2.0, {"A": "1"}, 7) == (
        first[0], first[1]["cwd"], first[1]["timeout_s"], first[1]["env"], first[1]["user"],
    )  # fmt: skip
    assert (["a", "b"], "/x", "name") == (second[0], second[1]["cwd"], second[1]["user"])
    answers[:] = [ExecResult(signal=9, timed_out=True), SandboxLost("x"), ExecResult(exit_code=0)]
    with pytest.raises(module.SandboxTimeoutError, match=r"2\.0 seconds"):
        backend.exec_command("s", "x", timeout=2.0)
    with pytest.raises(module.SandboxExecError):
        backend.exec_command("s", "x")
    assert 0 == backend.exec_command("s", "x", shell="zsh")[0]
    assert ["zsh", "-c", "x"] == asked[-1][0]
    with pytest.raises(module.SandboxExecError, match="a group cannot be chosen"):
        backend.exec_command("s", "x", user="0:0")
    assert "terminated" == backend.get_status("s")


def test_files_that_cannot_be_had_are_told_in_rays_words(module: Any) -> None:
    asked: list[Any] = []

    def fail(*_: Any, **how: Any) -> Any:
        asked.append(how)
        raise SandboxLost("x")

    backend = module.Backend(options=module.Options())
    backend._sandboxes["s"] = SimpleNamespace(files=SimpleNamespace(read=fail, write=fail))
    with pytest.raises(module.SandboxError):
        backend.read_file("s", "x")
    with pytest.raises(module.SandboxError):
        backend.write_file("s", "x", "y", append=True)
    assert [{}, {"append": True, "parents": True}] == asked


def test_an_image_that_is_lacking_is_fetched_where_that_is_allowed(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringfence.images import registry

    fetched: list[str] = []
    found: dict[str, Any] = {
        "here": "image",
        "odd": InvalidRequest("odd"),
        "none": ImageNotFound("none"),
    }

    def find(_store: Any, name: str) -> Any:
        if isinstance(found[name], Exception):
            raise found[name]
        return found[name]

    def pull(name: str) -> None:
        fetched.append(name)
        if len(fetched) > 1:
            raise RingfenceError("no network")

    monkeypatch.setattr(module.ImageStore, "__init__", lambda _store: None)
    monkeypatch.setattr(module.ImageStore, "find", find)
    monkeypatch.setattr(registry, "pull", pull)
    images = module.Images(module.Options())
    for name in (module.HOST, "here", "none"):
        assert name == images.pull_image(name)
    assert ["none"] == fetched
    strict = module.Images(module.Options(pull=False))
    for each, name in ((images, "none"), (images, "odd"), (strict, "none")):
        with pytest.raises(module.SandboxCreationError):
            each.pull_image(name)
    assert ["none"] * 2 == fetched


def test_a_jobs_options_reach_its_workers(
    module: Any, ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = module.runtime_env(tier="strong", public=["a.test"])
    hook, _, function = environment["worker_process_setup_hook"].rpartition(".")
    monkeypatch.setenv(module.SETTING, environment["env_vars"][module.SETTING])
    assert module.Options(tier="strong", public=["a.test"]) == module.Options.of_environment()
    assert "strong" == module.Backend()._options.tier
    install: Any = getattr(sys.modules[hook], function)
    install()
    runtime: Any = sys.modules["ray.experimental.sandbox.runtime"]
    assert (module.Backend, module.Images) == (runtime.GVisorSandboxBackend, runtime.ImageManager)
    with pytest.raises(TypeError, match="colour"):
        module.runtime_env(colour="blue")
    monkeypatch.delenv(module.SETTING)
    assert module.Options() == module.Options.of_environment()
