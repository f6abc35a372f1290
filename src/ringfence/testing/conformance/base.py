"""Fixtures of the suite, and the rule for what a backend cannot do."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ...backends import protocol
from ...backends.plugins import lacks
from ...errors import NetworkPolicyError, Unsupported
from ...model.execs.exec import ExecRequest
from ...model.spec import SandboxSpec
from ..lab import Lab
from ..shared import SharedLab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...backends.protocol import Backend

    MakeSandbox = Callable[..., Lab]
    Test = Callable[..., None]

PROGRAMS = ("cat", "env", "id", "ln", "printf", "pwd", "setsid", "sh", "sleep", "true")
"""Programs the suite runs; besides them only what a POSIX `sh` builds in."""


def needs(*capabilities: str) -> Callable[[Test], Test]:
    """The test is of these capabilities: where one is missing, it must be refused clearly.

    Refused clearly means: the report says why, and the call raises `Unsupported` naming the
    backend and the operation (or `NetworkPolicyError`). Each refusal is counted.
    """

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        wants_backend = "backend" in signature.parameters

        @wraps(test)
        def run(self: ConformanceBase, backend: Backend, **fixtures: Any) -> None:
            if wants_backend:
                fixtures["backend"] = backend
            lacking = _lacking(backend, capabilities)
            if not lacking:
                test(self, **fixtures)
                return
            with pytest.raises((Unsupported, NetworkPolicyError)) as refusal:
                test(self, **fixtures)
            if isinstance(refusal.value, Unsupported):
                assert refusal.value.operation
                assert backend.name == refusal.value.backend
            self.refusals.update(lacking)

        if not wants_backend:
            # pytest gives a test the fixtures its signature names: ask for one more.
            own = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY)
            parameters = [*signature.parameters.values(), own]
            run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _lacking(backend: Backend, capabilities: tuple[str, ...]) -> list[str]:
    """Return the capabilities that the backend lacks here; the report must give a reason for each."""
    report = backend.report()
    reasons = {each.name: each.reason for each in report.capabilities}
    lacking = [name for name in capabilities if not report.can(name)]
    for name in lacking:
        assert reasons.get(name), f"the report must say why there is no {name}"
    return lacking


class ConformanceBase:
    """Shared base of the suite's parts.

    Attributes:
        patience_s: Timeout of any single operation; raise it for a slow backend.
        soon_s: Timeout of commands that must have begun when it passes.
        big_bytes: Size of data that has to be streamed rather than held in memory.
        refusals: How often each missing capability was refused clearly.
        one_sandbox: The part's tests share one `sandbox`, tidied between tests. Subclasses of the part
            do not share it.
    """

    patience_s: ClassVar[float] = 60.0
    soon_s: ClassVar[float] = 0.5
    big_bytes: ClassVar[int] = 4_000_003
    refusals: ClassVar[Counter[str]]
    one_sandbox: ClassVar[bool] = False
    _common: ClassVar[SharedLab | None] = None
    _shared: ClassVar[Backend | None] = None
    _is_telling: ClassVar[bool] = False
    _broken: ClassVar[str] = ""

    def make_backend(self) -> Backend:
        """A backend of its own, closed by the caller: to be overridden."""
        raise NotImplementedError(f"{type(self).__name__} must override make_backend()")

    def make_spec(self, **changes: Any) -> SandboxSpec:
        """The spec of every sandbox; override to add what the backend cannot do without."""
        return SandboxSpec(**changes)

    def connect_argv(self, host: str, port: int) -> tuple[str, ...] | None:
        """A command that exits 0 when it could connect; None: the sandbox has no such program."""
        del host, port
        return None

    def serve_argv(self, port: int) -> tuple[str, ...] | None:
        """A server on loopback: it says `up`, and sends back what comes; None: there is none."""
        del port
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.refusals = Counter()
        cls._shared, cls._common, cls._is_telling, cls._broken = None, None, False, ""

    def test_every_member_of_the_contract_is_there(self, request: pytest.FixtureRequest) -> None:
        """Fails once with every lack; the other tests of the class are then skipped for it."""
        cls = type(self)
        try:
            lacking = list(self._lacks(request.getfixturevalue("backend")))
        except Exception as exc:
            cls._broken = f"{type(exc).__name__}: {exc}"
            raise
        cls._broken = "; ".join(lacking)
        assert not lacking

    def _lacks(self, backend: Backend) -> Iterator[str]:
        """Name the members that the backend, or what it makes, lacks."""
        yield from _named(backend, protocol.Backend)
        assert (report := backend.report()).available, report.reason
        sandbox = backend.provision(self.make_spec())
        try:
            yield from _named(sandbox, protocol.BackendSandbox)
            yield from _named(sandbox.files, protocol.BackendFiles)
            process = sandbox.start(ExecRequest(("true",)))
            yield from _named(process, protocol.BackendExec)
            process.close()
        finally:
            sandbox.terminate()

    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        """The backend under test, one for the whole class."""
        cls = type(self)
        if cls._shared is None:
            cls._shared = self.make_backend()
            _class_node(request).addfinalizer(cls._close_shared)
        return cls._shared

    @pytest.fixture
    def make_sandbox(self, backend: Backend) -> Iterator[MakeSandbox]:
        """`make_sandbox(**spec)`: sandboxes that are gone when the test is over."""
        made: list[Lab] = []

        def make(**changes: Any) -> Lab:
            made.append(Lab(backend.provision(self.make_spec(**changes)), self.patience_s))
            return made[-1]

        yield make
        for lab in reversed(made):
            lab.close()

    @pytest.fixture
    def sandbox(self, request: pytest.FixtureRequest, make_sandbox: MakeSandbox) -> Iterator[Lab]:
        """A sandbox with no wishes: new, or as new where the test's part has `one_sandbox`."""
        if not vars(_part_of(request)).get("one_sandbox"):
            yield make_sandbox()
            return
        cls = type(self)
        if cls._common is None:
            cls._common = self._make_common(request)
        yield cls._common.lab
        if not cls._common.tidy():
            cls._end_common()

    def _make_common(self, request: pytest.FixtureRequest) -> SharedLab:
        _class_node(request).addfinalizer(type(self)._end_common)
        sandbox = request.getfixturevalue("backend").provision(self.make_spec())
        return SharedLab(Lab(sandbox, self.patience_s))

    @pytest.fixture(autouse=True)
    def _tell_refusals(self, request: pytest.FixtureRequest) -> None:
        """List at the end of the class what was refused, once."""
        cls = type(self)
        if cls._broken:
            pytest.skip(f"the contract is not kept: {cls._broken}")
        if not cls._is_telling:
            cls._is_telling = True
            _class_node(request).addfinalizer(lambda: cls._tell(request.config))

    @classmethod
    def _tell(cls, config: pytest.Config) -> None:
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        if cls.refusals and terminal is not None:
            said = ", ".join(f"{name} ({times})" for name, times in sorted(cls.refusals.items()))
            # During a test's teardown the terminal's own output is captured like any other.
            with capture.global_and_fixture_disabled() if capture else nullcontext():
                terminal.write_line(f"\n{cls.__name__}: refused clearly: {said}")

    @classmethod
    def _end_common(cls) -> None:
        common, cls._common = cls._common, None
        if common is not None:
            common.lab.close()

    @classmethod
    def _close_shared(cls) -> None:
        shared, cls._shared = cls._shared, None
        if shared is not None:
            shared.close()


def _named(made: object, contract: type) -> Iterator[str]:
    return (f"{type(made).__name__} has no {name}" for name in lacks(made, contract))


def _part_of(request: pytest.FixtureRequest) -> type[ConformanceBase]:
    """The class that has written the test, as opposed to those that inherit it."""
    name = request.function.__name__
    part: type[ConformanceBase] = next(cls for cls in request.cls.__mro__ if name in vars(cls))
    return part


def _class_node(request: pytest.FixtureRequest) -> pytest.Class:
    """The class in pytest's tree; what it finalizes outlives the single test.

    A class-scoped fixture would do, if pytest still let one be an ordinary method.
    """
    node = request.node.getparent(pytest.Class)
    assert isinstance(node, pytest.Class)
    return node
