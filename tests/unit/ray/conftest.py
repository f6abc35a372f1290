"""A stand-in for Ray, over which `ringfence.ray` is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Any) -> None:
        super().__init__("a task failed")
        self.cause = cause


class RayActorError(RayError):
    pass


class Ref:
    """What will be there once it is asked for."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run


class Actor:
    """An object in another process."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.is_dead = inner, False

    def __getattr__(self, name: str) -> Any:
        def remote(*parts: Any) -> Ref:
            def run() -> Any:
                if self.is_dead:
                    raise RayActorError("it is dead")
                return getattr(self.inner, name)(*parts)

            return Ref(run)

        return SimpleNamespace(remote=remote)


class Ray(ModuleType):
    """As much of Ray as is used; a task runs when its result is asked for."""

    __version__ = "2.60.1"
    owner_of = Actor
    WORKER_MODE = 1

    def __init__(self) -> None:
        super().__init__("ray")
        self.__path__: list[str] = []
        self.node, self.task, self.actor, self.mode = "node-a", "task-1", "", 1
        self.joined = True
        self.sizes, self.cpus = [4.0], 4.0
        self.cancelled: list[Any] = []
        self.waited: list[int] = []
        self.actors: dict[str, Actor] = {}
        self.asked: list[Any] = []
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: (
                [{"namespace": "ringfence", "name": name} for name in self.actors]
                + [{"namespace": "other", "name": "sandboxes-of-node-a"}]
            ),
            scheduling_strategies=SimpleNamespace(
                NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft)
            ),
        )

    def is_initialized(self) -> bool:
        return self.joined

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            get_node_id=lambda: self.node, get_task_id=lambda: self.task,
            get_actor_id=lambda: self.actor, worker=SimpleNamespace(mode=self.mode),
        )  # fmt: skip

    def put(self, value: Any) -> Ref:
        return Ref(lambda: value)

    def get(self, ref: Any) -> Any:
        return [each.run() for each in ref] if isinstance(ref, list) else ref.run()

    def wait(self, refs: list[Ref], num_returns: int) -> tuple[list[Ref], list[Ref]]:
        assert 1 == num_returns
        self.waited.append(len(refs))
        return refs[-1:], refs[:-1]  # the newest is done first

    def cancel(self, ref: Ref, force: bool) -> None:
        self.cancelled.append((ref, force))

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": size}} for size in self.sizes] + [
            {"Alive": False, "Resources": {"CPU": 64.0}}
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def get_actor(self, name: str, namespace: str) -> Actor:
        assert "ringfence" == namespace
        try:
            return self.actors[name]
        except KeyError:
            raise ValueError("no such actor") from None

    def remote(self, *given: Any, **options: Any) -> Any:
        if given:
            return self._actor_of(*given)

        def of(fn: Any) -> Any:
            self.asked.append(options)

            def start(*parts: Any) -> Ref:
                def run() -> Any:
                    plain = [each.run() if isinstance(each, Ref) else each for each in parts]
                    try:
                        return fn(*plain)
                    except RayError:
                        raise
                    except Exception as exc:
                        raise RayTaskError(exc) from exc

                return Ref(run)

            return SimpleNamespace(remote=start)

        return of

    def _actor_of(self, cls: Any) -> Any:
        def options(**how: Any) -> Any:
            def start() -> Actor:
                self.asked.append(how)
                return self.actors.setdefault(how["name"], Actor(cls()))

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)


class OfRayError(Exception):
    pass


class BaseSandboxBackend:
    def __init__(self, image_manager: Any) -> None:
        self.image_manager = image_manager


def _modules(ray: Ray) -> dict[str, ModuleType]:
    place = "ray.experimental.sandbox"
    contents: dict[str, dict[str, Any]] = {
        "ray.exceptions": {"RayError": RayError, "RayTaskError": RayTaskError, "RayActorError": RayActorError},
        "ray.data": {"from_items": lambda rows: ("dataset", rows)},
        "ray.experimental": {}, place: {}, f"{place}.backend": {}, f"{place}.runtime": {},
        f"{place}.backend.base": {
            "BaseSandboxBackend": BaseSandboxBackend,
            "ExecResult": lambda *given: given,
            "SandboxStatus": SimpleNamespace(RUNNING="running", TERMINATED="terminated"),
        },
        f"{place}.config": {"SandboxConfig": object, "parse_memory_bytes": lambda text: text and int(text)},
        f"{place}.exceptions": {
            name: type(name, (OfRayError,), {})
            for name in (
                *("SandboxCreationError", "SandboxError", "SandboxExecError"),
                *("SandboxNotFoundError", "SandboxTimeoutError"),
            )
        },
    }  # fmt: skip
    found: dict[str, ModuleType] = {"ray": ray}
    for name, content in contents.items():
        found[name] = ModuleType(name)
        found[name].__path__ = []
        vars(found[name]).update(content)
        above, _, last = name.rpartition(".")
        setattr(found[above], last, found[name])
    return found


@pytest.fixture(name="ray")
def fixture_ray() -> Iterator[Ray]:
    made = Ray()
    before = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "ray"}
    stand_ins = _modules(made)
    sys.modules.update(stand_ins)
    try:
        yield made
    finally:
        for name in [*sys.modules]:
            if name in stand_ins or name.startswith("ringfence.ray"):
                del sys.modules[name]
        sys.modules.update(before)
