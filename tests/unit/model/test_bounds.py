"""Where the range of each field ends: the last value that is taken, and the first that is not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from ringfence.errors import InvalidRequest
from ringfence.model.acquire import (
    AcquireOptions,
    AttachRequest,
    RequiredCapabilities,
    check_client,
)
from ringfence.model.base import checks, ids
from ringfence.model.client_session import SessionTimeouts
from ringfence.model.create import CreateRequest
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.execs.exec_start import StartRequest
from ringfence.model.execution.config import ExecutionConfig
from ringfence.model.execution.execution import ExecutionRequest
from ringfence.model.limits import Limits, bounds
from ringfence.model.mount import Mount
from ringfence.model.net.netlimits import NetworkLimits
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.net.rules import NetworkRule
from ringfence.model.spec import SandboxSpec
from ringfence.model.template import TemplateRequest, TemplateStep

pytestmark = pytest.mark.anyone

_YEAR_S = 366 * 86_400
_TEN_YEARS_S = 10 * _YEAR_S
_MIB, _TIB = 1 << 20, 1 << 40
_A, _NOTES, _DIGEST = "a", 256 << 10, "0123456789abcdef" * 4


def kept(made: Callable[..., Any], name: str, value: Any) -> Any:
    return getattr(made(**{name: value}), name)


def request(**fields: Any) -> ExecRequest:
    return ExecRequest(**{"argv": ("true",), **fields})


def execution(**fields: Any) -> ExecutionRequest:
    return ExecutionRequest(**{"command": "true", **fields})


def execution_config(**fields: Any) -> ExecutionConfig:
    wide = {"max_timeout_secs": _YEAR_S, "max_memory_mb": 2**26, "max_cpus": 8192}
    return ExecutionConfig(
        **{
            **wide,
            "default_timeout_secs": 0.001,
            "default_memory_mb": 1,
            "default_cpus": 0.001,
            **fields,
        }
    )


def start(**fields: Any) -> StartRequest:
    return StartRequest(request(), **fields)


def template(**fields: Any) -> TemplateRequest:
    return TemplateRequest(**{"name": "x", **fields})


def step(**fields: Any) -> TemplateStep:
    return TemplateStep(**{"run": ("true",), **fields})


NUMBERS: list[tuple[Callable[..., Any], str, float, float]] = [
    (Limits, "wall_time_s", 0.001, _YEAR_S), (Limits, "idle_timeout_s", 0.001, _YEAR_S),
    (Limits, "cpus", 0.001, 8192), (Limits, "memory_bytes", _MIB, 64 * _TIB),
    (Limits, "pids", 1, 4_194_304), (Limits, "disk_bytes", 64 << 10, 64 * _TIB),
    (Limits, "inodes", 16, 2**32), (Limits, "open_files", 8, 1_048_576),
    (Limits, "output_bytes", 0, _TIB), (Limits, "io_bytes_per_s", 1, _TIB),
    (Limits, "network_bytes", 0, 1024 * _TIB),
    (NetworkLimits, "connections", 1, 65_536), (NetworkLimits, "header_bytes", 256, 2**20),
    (NetworkLimits, "bytes_per_s", 1, 2**50), (NetworkLimits, "connections_per_s", 0.001, 86_400),
    (NetworkLimits, "header_s", 0.001, 86_400), (NetworkLimits, "connect_s", 0.001, 86_400),
    (NetworkLimits, "idle_s", 0.001, 86_400),
    (SandboxSpec, "ttl_s", 0.001, _YEAR_S),
    (SessionTimeouts, "idle_s", 0.001, _TEN_YEARS_S), (SessionTimeouts, "detach_s", 0.001, _TEN_YEARS_S),
    (SessionTimeouts, "suspend_s", 0.001, _TEN_YEARS_S),
    (RequiredCapabilities, "minimum_memory_bytes", 1, 2**46),
    (request, "timeout_s", 0.001, _YEAR_S), (request, "max_output_bytes", 0, 2**40),
    (start, "wait_s", 0, 86_400), (step, "timeout_s", 0.001, 86_400),
    (template, "timeout_s", 0.001, 86_400),
    (execution, "timeout_secs", 0.001, _YEAR_S), (execution, "cpus", 0.001, 8192),
    (execution, "memory_mb", 1, 2**26),
    (execution_config, "default_timeout_secs", 0.001, _YEAR_S),
    (execution_config, "max_timeout_secs", 0.001, _YEAR_S),
    (execution_config, "default_cpus", 0.001, 8192), (execution_config, "max_cpus", 0.001, 8192),
    (execution_config, "default_memory_mb", 1, 2**26), (execution_config, "max_memory_mb", 1, 2**26),
    (execution_config, "max_processes", 1, 4_194_304),
    (execution_config, "max_concurrent", 1, 10_000), (execution_config, "max_pending", 0, 1_000_000),
    (execution_config, "max_output_bytes", 0, 2**30),
    (execution_config, "keep_results_secs", 0, _YEAR_S),
]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "name", "low", "high"), NUMBERS, ids=[f"{m.__name__}.{n}" for m, n, *_ in NUMBERS]
)
def test_numbers(made: Callable[..., Any], name: str, low: float, high: float) -> None:
    for taken in (low, high):
        assert taken == kept(made, name, taken)
    step = 0.0005 if isinstance(low, float) else 1
    refused: tuple[Any, ...] = (low - step, high + step, True, "x", [1], float("nan"))
    for value in refused:
        with pytest.raises(InvalidRequest) as told:
            made(**{name: value})
        assert name == told.value.field


def test_the_bounds_of_a_limit_can_be_asked_for() -> None:
    assert (0.001, 8192) == bounds("cpus")
    assert (_MIB, 64 * _TIB) == bounds("memory_bytes")
    with pytest.raises(InvalidRequest) as told:
        Limits(memory_bytes=512)
    assert "did you mean 512m?" == told.value.hint


# Made of the value, the field that is told, the last text that is taken, and texts that are not.
TEXTS: list[tuple[Callable[[Any], Any], str, str, tuple[str, ...]]] = [
    (lambda v: SandboxSpec(id=v), "id", _A * 63, (_A * 64, "-a", "a-", "A", "a_b", "a/b", "")),
    (lambda v: SandboxSpec(profile=v), "profile", _A * 63, (_A * 64, "-a", ".a", "A", "a/b", "")),
    (lambda v: SandboxSpec(template=v), "template", _A * 63, (_A * 64, "..", "a/b", "")),
    (lambda v: SandboxSpec(template=v), "template", "sha256:" + _DIGEST,
     (f"sha256:{_DIGEST[1:]}", f"sha256:{_DIGEST}0")),
    (lambda v: SandboxSpec(image=v), "image", _A * 1000, (_A * 1001, "", "a\0b")),
    (lambda v: SandboxSpec(user=v), "user", _A * 32, (_A * 33, "-a", "1a", "a b", "")),
    (lambda v: SandboxSpec(user=v), "user", str(2**32 - 2), (str(2**32 - 1), str(2**40))),
    (lambda v: SandboxSpec(workdir=v), "workdir", "/" + "/".join([_A * 255] * 15),
     ("/" + _A * 256, "a", "/a/../b", "~", "")),
    (lambda v: SandboxSpec(memory_dir=v), "memory_dir", "/a", ("a", "./a", "~/a", "", "/" + _A * 256)),
    (lambda v: SandboxSpec(deny=(v,)), "deny[0]", "/a/b",
     ("/", "/proc", "/proc/x", "/dev/x", "/etc", "/lib64", "a", "/mnt")),
    (lambda v: SandboxSpec(protect=(v,)), "protect[0]", "/a/b", ("a/../b", "@nothing", "")),
    (lambda v: SandboxSpec(allow_degraded=(v,)), "allow_degraded[0]", "namespaces", ("seccomp", "", "**")),
    (lambda v: request(cwd=v), "cwd", "a/../b", ("", "a\0b", _A * 256)),
    (lambda v: request(argv=(v,)), "argv[0]", _A, ("", "  ", "a\0")),
    (lambda v: CreateRequest(name=v), "name", "é" * 255, (_A * 256, "a\n", "a\x7f")),
    (lambda v: CreateRequest(backend=v), "backend", _A * 63, (_A * 64, "A")),
    (lambda v: CreateRequest(snapshot_id=v), "snapshot_id", _A * 63, (_A * 64, "../a", "")),
    (lambda v: AcquireOptions(key=v), "key", "é" * 255, (_A * 256, "a\n")),
    (lambda v: AcquireOptions(preferred_id=v), "preferred_id", _A * 63, (_A * 64, "../a", "")),
    (lambda v: AcquireOptions(snapshot_id=v), "snapshot_id", _A * 63, (_A * 64, "../a", "")),
    (lambda v: AcquireOptions(preferred_backend=v), "preferred_backend", _A * 63, (_A * 64, "A")),
    (AttachRequest, "sandbox_id", _A * 63, (_A * 64, "../a", "")),
    (lambda v: AttachRequest("a", v), "client_id", "é" * 255, (_A * 256, "a\n")),
    (check_client, "client_id", _A * 255, (_A * 256, "", "a\x1b")),
    (lambda v: RequiredCapabilities(readable_paths=(v,)), "readable_paths[0]", "/a", ("a", "/..", "")),
    (lambda v: RequiredCapabilities(writable_paths=("/b", v)), "writable_paths[1]", "/a", ("a", "/..", "")),
    (TemplateRequest, "name", _A * 63, (_A * 64, "default", "A", "../a", "")),
    (lambda v: template(backend=v), "backend", _A * 63, (_A * 64, "A")),
    (lambda v: TemplateStep(copy=v, to="/a"), "copy", _DIGEST,
     (_DIGEST[1:], _DIGEST + "0", _DIGEST.upper(), "g" * 64)),
    (lambda v: TemplateStep(copy=_DIGEST, to=v), "to", "/a/..b", ("", "/a/..", "../a")),
    (lambda v: TemplateStep(copy=_DIGEST, to="/a", source=v), "source", "a/b..", ("/a", "a/../b", "..")),
    (lambda v: TemplateStep(copy=_DIGEST, to="/a", mode=v), "mode", "0755", ("07555", "8", "rwx")),
    (lambda v: TemplateStep(workdir=v), "workdir", "/a", ("a", "/..")),
    (lambda v: TemplateStep(pip_install=("b", v)), "pip_install[1]", "a>=2", ("", " ", "-r", " --index-url=x")),
    (Mount, "target", "/usr/x",
     ("/", "/usr", "/etc", "/bin", "/lib", "/lib64", "/proc", "/sys/x", "/dev", "/mnt", "/mnt/session", "a")),
    (lambda v: Mount("/a", v), "source", "/a/../b", ("/", "//", "/./", ".", "./", "a/../b", "..")),
    (lambda v: Mount("/a", access=v), "access", "rw", ("r", "RW", "")),
    (lambda v: Mount("/a", protect=(v,)), "protect[0]", "a/b", ("/a", ".", "", "a/..", "@nothing")),
    (lambda v: execution_config(work_dir=v), "work_dir", "/a", ("a", "/..", "")),
    (lambda v: execution_config(denied_paths=(v,)), "denied_paths[0]", "/home/sandboxed",
     ("/home", "/home/sandbox", "/", "a")),
    (lambda v: execution_config(strong_runtime={"memory_mb": v}), "strong_runtime.memory_mb", "67108864",
     ("67108865", "0", "1.5", "x")),
    (lambda v: execution_config(strong_runtime={"cpus": v}), "strong_runtime.cpus", "8192", ("8193", "0", "x")),
    (lambda v: execution_config(strong_runtime={"vm_kernel": v}), "strong_runtime.vm_kernel", "/a", ("a", "")),
    (lambda v: execution(command=v), "command", _A, ("", " ", "a\0")),
    (lambda v: execution(tier=v), "tier", "strong", ("weak", "")),
    (lambda v: SandboxSpec(tier=v), "tier", "strong", ("weak", "")),
    (lambda v: SessionTimeouts(on_idle=v), "on_idle", "detach", ("end", "")),
    (lambda v: SessionTimeouts(on_expiry=v), "on_expiry", "suspend", ("detach", "")),
]  # fmt: skip


@pytest.mark.parametrize(("made", "field", "last", "others"), TEXTS, ids=range(len(TEXTS)))
def test_texts(made: Callable[[Any], Any], field: str, last: str, others: tuple[str, ...]) -> None:
    made(last)
    for other in others:
        with pytest.raises(InvalidRequest) as told:
            made(other)
        assert field == told.value.field, other


def _steps(count: int) -> TemplateRequest:
    return template(steps=(step(),) * count)


def _mounts(count: int) -> SandboxSpec:
    return SandboxSpec(mounts=tuple(Mount(f"/m{n}") for n in range(count)))


def _labels(count: int) -> SandboxSpec:
    return SandboxSpec(labels={f"{n}": "" for n in range(count)})


def _label_bytes(count: int) -> SandboxSpec:
    return SandboxSpec(labels={"ä": "x" * (count - 2)})


def _env_bytes(count: int) -> SandboxSpec:
    return SandboxSpec(env={"A": "x" * 1000}, secrets={"B": "x" * (count - 1002)})


def _notes(count: int) -> CreateRequest:
    spec = SandboxSpec(labels={"l": "1"}, env={"A": "1"}, secrets={"B": "1"})
    return CreateRequest(spec, metadata={"m": "x" * (count - 7)})


def _session_notes(count: int) -> AcquireOptions:
    return AcquireOptions(metadata={"m": "x" * (count - 1)})


def _command(count: int) -> ExecRequest:
    # A pointer and a NUL for each of the three; two arguments, and a variable with its value.
    return request(argv=("true", "x" * (count - 3 * 9 - 4 - 3)), env={"A": "bc"})


def _arguments(count: int) -> ExecutionRequest:
    return execution(args=("x" * (count - 3 * 9 - 4 - 3),), env={"A": "bc"})


def _paths(name: str) -> Callable[[int], Any]:
    def made(count: int) -> Any:
        fields: dict[str, Any] = {name: tuple(f"/a/{n}" for n in range(count))}
        return SandboxSpec(**fields)

    return made


def _required(name: str) -> Callable[[int], Any]:
    def made(count: int) -> Any:
        fields: dict[str, Any] = {name: ("/a",) * count}
        return RequiredCapabilities(**fields)

    return made


def _protected(count: int) -> Mount:
    return Mount("/a", protect=tuple(map(str, range(count))))


def _rule(name: str) -> Callable[[int], NetworkRule]:
    def made(count: int) -> NetworkRule:
        letters = [chr(65 + n // 26) + chr(65 + n % 26) for n in range(min(count, 676))]
        values = letters if name == "methods" else [f"/{n}" for n in range(count)]
        return NetworkRule("a.com", **{name: tuple(values)})  # type: ignore[arg-type]

    return made


def _ranges(count: int) -> NetworkRule:
    return NetworkRule("a.com", ",".join(str(2 * n + 1) for n in range(count)))


def _rules(count: int) -> NetworkPolicy:
    return NetworkPolicy(allowed_hosts=("a.com",) * (count - 1), rules=(NetworkRule("b.com"),))


@pytest.mark.parametrize(
    ("made", "most", "field"),
    [
        (_steps, 200, "steps"), (_mounts, 200, "mounts"), (_labels, 64, "labels"),
        (_label_bytes, 16 << 10, "labels"), (_env_bytes, _NOTES, "env"), (_notes, _NOTES, "metadata"),
        (_session_notes, _NOTES, "metadata"), (_command, 6 << 20, "argv"), (_arguments, 6 << 20, "args"),
        (_paths("protect"), 1000, "protect"), (_paths("unprotect"), 1000, "unprotect"),
        (_paths("deny"), 1000, "deny"), (_required("readable_paths"), 1000, "readable_paths"),
        (_required("writable_paths"), 1000, "writable_paths"), (_protected, 1000, "protect"),
        (_rule("methods"), 64, "methods"), (_rule("paths"), 1000, "paths"),
        (_ranges, 256, "ports"), (_rules, 10_000, "rules"),
    ],
)  # fmt: skip
def test_counts(made: Callable[[int], Any], most: int, field: str) -> None:
    made(most)
    with pytest.raises(InvalidRequest) as told:
        made(most + 1)
    assert field == told.value.field


# Fields that exclude each other, or need another.
@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: AttachRequest("a", create_spec=SandboxSpec()), "create_spec"),
        (lambda: request(pty=(24, 80), session_leader=False), "session_leader"),
        (lambda: request(stdin=b"", stream_stdin=True), "stdin"),
        (lambda: Mount("/a", nofollow=True), "nofollow"),
        (lambda: Mount("/a", "b", nofollow=True), "nofollow"),
        (TemplateStep, ""),
        (lambda: TemplateStep(env={"A": "b"}, user="c"), ""),
        (lambda: TemplateStep(run=("a",), workdir="/b"), "workdir"),
        (lambda: TemplateStep(run=("a",), pip_install=("b",)), "pip_install"),
        (lambda: TemplateStep(run=("a",), env={"A": "b"}, user="c"), ""),
        (lambda: template(base=SandboxSpec(id="a")), "base.id"),
        (lambda: template(base=SandboxSpec(secrets={"A": "b"})), "base.secrets"),
        (lambda: template(base=SandboxSpec(memory_dir="/a")), "base.memory_dir"),
        (lambda: template(base=SandboxSpec(python_env=True)), "base.python_env"),
        (lambda: template(base=SandboxSpec(ttl_s=5)), "base.ttl_s"),
        (lambda: execution_config(default_cpus=2, max_cpus=1), "default_cpus"),
        (lambda: execution_config(default_memory_mb=2, max_memory_mb=1), "default_memory_mb"),
        (lambda: execution_config(default_timeout_secs=2, max_timeout_secs=1), "default_timeout_secs"),
        (lambda: execution_config(network_policy=NetworkPolicy()), "network_policy"),
        (lambda: execution_config(allowed_paths=("/srv/x:rw",), denied_paths=("/srv",)), "allowed_paths[0]"),
        (lambda: execution_config(max_memory_mb=5, strong_runtime={"memory_mb": "6"}),
         "strong_runtime.memory_mb"),
        (lambda: StartRequest.from_json({"argv": ["a"], "script": "b"}), "script"),
        (lambda: StartRequest.from_json({"script": "b", "rows": 0}), "rows"),
        (lambda: NetworkRule("a.com", action="deny", inspect=True), "inspect"),
        (lambda: NetworkPolicy("unrestricted", learn=True), "learn"),
        (lambda: NetworkPolicy("unrestricted", limits=NetworkLimits(connections=1)), "limits"),
        (lambda: SandboxSpec(mounts=(Mount("/a"), Mount("/a/"))), "mounts[1].target"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(made: Callable[[], Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        made()
    assert field == told.value.field


def test_what_goes_together() -> None:
    """The controls of what does not."""
    assert AttachRequest("a", create_if_missing=True, create_spec=SandboxSpec()).create_spec
    assert (24, 80) == request(pty=[24, 80]).pty
    assert Mount("/a", "/b", nofollow=True).nofollow
    assert [True, True, False] == [
        Mount.parse(f"/b:/a{options}").nofollow for options in (":nofollow", ":rw,nofollow", ":rw")
    ]
    for others in ({"run": ("a",)}, {"pip_install": ("a",)}, {"copy": _DIGEST, "to": "/a"}):
        assert "b" == TemplateStep(user="b", **others).user
    assert "user" == TemplateStep(user="b").kind
    assert execution_config(allowed_paths=("/srvx",), denied_paths=("/srv",)).mounts
    assert (24, 80) == StartRequest.from_json({"script": "b", "tty": True}).request.pty
    assert (5, 80) == StartRequest.from_json({"script": "b", "tty": True, "rows": 5}).request.pty
    assert StartRequest.from_json({"script": "b", "rows": 5}).request.pty is None


FLAGS: list[tuple[Callable[..., Any], str]] = [
    (SandboxSpec, "python_env"), (SandboxSpec, "disk_root"), (request, "stream_stdin"),
    (request, "session_leader"), (start, "wait"), (step, "fresh"), (template, "keep_env"),
    (template, "public"), (template, "fresh"), (execution_config, "network_enabled"),
    (execution_config, "plain_results"), (CreateRequest, "use_pool"), (AcquireOptions, "use_pool"),
    (AcquireOptions, "require_fresh"), (RequiredCapabilities, "network"),
    (RequiredCapabilities, "write_access"), (NetworkPolicy, "learn"),
    (lambda **f: NetworkRule("a.com", **f), "inspect"), (lambda **f: Mount("/a", "/b", **f), "nofollow"),
    (lambda **f: AttachRequest("a", **f), "create_if_missing"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "name"), FLAGS, ids=range(len(FLAGS)))
def test_flags(made: Callable[..., Any], name: str) -> None:
    """A text would be true whatever it says."""
    for value in (True, False):
        assert kept(made, name, value) is value
    others: tuple[object, ...] = (1, 0, "false", "", [])
    for other in others:
        with pytest.raises(InvalidRequest) as told:
            made(**{name: other})
        assert name == told.value.field


def test_single_checks() -> None:
    taken: list[Callable[[], object]] = [
        lambda: checks.permissions(0o777), lambda: checks.permissions(0),
        lambda: checks.signal_number(signal.SIGTERM), lambda: checks.waiting_time(None),
        lambda: checks.waiting_time(0), lambda: checks.waiting_time(_YEAR_S),
        lambda: checks.part_of_file(0, None), lambda: checks.part_of_file(2**63 - 1, 0),
        lambda: checks.part_of_file(0, 2**63 - 1), lambda: ids.new_id(_A * 26),
    ]  # fmt: skip
    for each in taken:
        each()
    refused: list[tuple[str, Callable[[], object]]] = [
        ("mode", lambda: checks.permissions(0o1000)), ("mode", lambda: checks.permissions(-1)),
        ("mode", lambda: checks.permissions(True)), ("mode", lambda: checks.permissions("644")),
        ("signum", lambda: checks.signal_number(True)), ("signum", lambda: checks.signal_number("TERM")),
        ("timeout_s", lambda: checks.waiting_time(-1)), ("timeout_s", lambda: checks.waiting_time(_YEAR_S + 1)),
        ("offset", lambda: checks.part_of_file(-1, None)), ("offset", lambda: checks.part_of_file(2**63, None)),
        ("max_bytes", lambda: checks.part_of_file(0, -1)), ("max_bytes", lambda: checks.part_of_file(0, 2**63)),
        ("prefix", lambda: ids.new_id(_A * 27)), ("node", lambda: ids.set_node("0123456")),
        ("node", lambda: ids.set_node("0123456g")),
    ]  # fmt: skip
    for field, check in refused:
        with pytest.raises(InvalidRequest) as told:
            check()
        assert field == told.value.field


@pytest.mark.parametrize("key", ["A", "_", "a1", "_9"])
def test_names_of_variables(key: str) -> None:
    assert {key: ""} == SandboxSpec(env={key: ""}).env
    for other in (f"1{key}", f"{key}-", f"{key} ", f"{key}é", f"{key}=b"):
        for field in ("env", "secrets"):
            with pytest.raises(InvalidRequest) as told:
                SandboxSpec(**{field: {other: ""}})  # type: ignore[arg-type]
            assert f"{field}.{other}" == told.value.field
