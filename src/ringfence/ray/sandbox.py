"""`Sandbox`: the library inside a task or actor, with handles that other tasks can use.

A sandbox is made by the library in the process that asks, so an exec costs no request, no serialization
and no hop, and the sandbox ends with that process even if it is killed. Pickled, it becomes a `Handle`.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

import ray
from ray.exceptions import RayActorError

from ..errors import RingfenceError, SandboxLost, SandboxNotFound, Unsupported
from ..sandbox import Sandbox as LocalSandbox
from . import calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Unpack

    from ..backends.protocol import Backend
    from ..client import Client
    from ..model.parts import SandboxParts
    from ..model.spec import SandboxSpec

    class CreateParts(SandboxParts, total=False):
        """Keywords of `ringfence.Sandbox.create`."""

        backend: Backend | str | None
        server: str | Client | None


NAMESPACE = "ringfence"
_PREFIX = "sandboxes-of-"
_CALLS_AT_ONCE = 1000

_sandboxes: weakref.WeakValueDictionary[str, Sandbox] = weakref.WeakValueDictionary()
_door: calls.Door | None = None
_lock = threading.Lock()


class Sandbox(LocalSandbox):
    """A sandbox of this task or actor, which it ends with.

    As the library's `Sandbox`, with all its methods. It may be passed to other tasks and returned;
    there it is a `Handle`.
    """

    _task = ""

    @classmethod
    def create(
        cls,
        spec: SandboxSpec | None = None,
        *,
        detached: bool = False,
        **options: Unpack[CreateParts],
    ) -> Any:
        """Make a sandbox on this node, locked down and ready.

        Args:
            spec: As for `ringfence.Sandbox.create`.
            detached: Let it live until it is terminated or its `ttl_s` is over, whatever becomes of this
                task: an actor of this node owns it. Returns a `Handle`.
            options: As for `ringfence.Sandbox.create`.

        Raises:
            InvalidRequest: Something in the request is malformed; nothing was started.
            IsolationError: A protection could not be put in place; nothing runs.
        """
        if detached:
            owner = _owner(_node_id())
            made: str = calls.result_of(ray.get(owner.create.remote(spec, options)))
            return Handle(Ticket(made, _node_id()), owner)
        _end_those_of_earlier_tasks()
        sandbox = super().create(spec, **options)
        if isinstance(sandbox, cls):  # with `server=` it is a RemoteSandbox
            sandbox._task = _task_id()
            _sandboxes[sandbox.id] = sandbox
        return sandbox

    def __reduce__(self) -> tuple[Any, ...]:
        if self._maker != os.getpid():
            raise Unsupported("a forked process does not own the sandboxes of its parent")
        door = _open_door()
        ticket = Ticket(self.id, _node_id(), door.name, door.key)
        return _arrive, (ticket,)


@dataclass(frozen=True)
class Ticket:
    """The pickled form of a sandbox.

    Attributes:
        sandbox_id: Its id.
        node_id: Ray's id of its node.
        door: The socket of the process that owns it; empty where an actor does.
        key: What that process asks for.
    """

    sandbox_id: str
    node_id: str
    door: str = ""
    key: bytes = b""


class Handle:
    """A sandbox in another process. It has the methods that need no stream, callback or descriptor.

    A detached one is reached from every node. One that a task or actor owns is reached on its node.

    Args:
        ticket: Where it is.
        owner: The actor that owns it, if one does.
    """

    def __init__(self, ticket: Ticket, owner: Any = None) -> None:
        self._ticket, self._owner = ticket, owner
        self.files = _Files(self)

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self._ticket.sandbox_id

    @property
    def node_id(self) -> str:
        """Ray's id of its node, for `NodeAffinitySchedulingStrategy`."""
        return self._ticket.node_id

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not hasattr(LocalSandbox, name):  # `hasattr` and completion ask for any name
            raise AttributeError(f"a sandbox has no attribute {name!r}", name=name, obj=self)
        if name in calls.VALUES:
            return self._call(name, (), {})
        calls.check(name)
        return lambda *parts, **options: self._call(name, parts, options)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._ticket,)

    def __repr__(self) -> str:
        return f"<Handle of sandbox {self.id} on node {self.node_id}>"

    def _call(self, method: str, parts: tuple[Any, ...], options: dict[str, Any]) -> Any:
        ticket = self._ticket
        if not ticket.door:
            if self._owner is None:
                self._owner = _owner_of(ticket)
            try:
                answer = ray.get(self._owner.call.remote(ticket.sandbox_id, method, parts, options))
            except RayActorError as exc:
                raise _lost(ticket) from exc
            return calls.result_of(answer)
        if ticket.node_id != (here := _node_id()):
            raise Unsupported(
                f"sandbox {ticket.sandbox_id} belongs to a process of node {ticket.node_id},"
                f" and this is node {here}",
                operation=method,
                hint="create it with detached=True, or run this task on its node:"
                " scheduling_strategy=NodeAffinitySchedulingStrategy(handle.node_id, soft=False)",
            )
        call = (ticket.sandbox_id, method, parts, options)
        return calls.result_of(calls.by_socket(ticket.door, ticket.key, call))


class _Files:
    """The files of a `Handle`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = f"files.{name}"
        calls.check(method)
        return lambda *parts, **options: self._handle._call(method, parts, options)


class _Owner:
    """The actor of a node that owns its detached sandboxes."""

    def __init__(self) -> None:
        self._sandboxes: dict[str, LocalSandbox] = {}

    def create(self, spec: Any, options: dict[str, Any]) -> Any:
        try:
            sandbox = LocalSandbox.create(spec, **options)
        except RingfenceError as exc:
            return False, exc.to_json()
        for gone in [name for name, each in [*self._sandboxes.items()] if _has_ended(each)]:
            self._sandboxes.pop(gone, None)
        self._sandboxes[sandbox.id] = sandbox
        return True, sandbox.id

    def call(self, sandbox_id: str, method: str, parts: Any, options: Any) -> Any:
        return calls.perform(self._sandboxes.get(sandbox_id), method, parts, options)

    def ids(self) -> list[str]:
        return [name for name, each in [*self._sandboxes.items()] if not _has_ended(each)]


def detached() -> list[Handle]:
    """List the detached sandboxes of all nodes."""
    handles = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = str(entry["name"])
        if entry["namespace"] == NAMESPACE and name.startswith(_PREFIX):
            node_id = name.removeprefix(_PREFIX)
            try:
                owner = ray.get_actor(name, namespace=NAMESPACE)
                handles += [
                    Handle(Ticket(each, node_id), owner) for each in ray.get(owner.ids.remote())
                ]
            except (RayActorError, ValueError):
                continue  # its node has just been lost
    return handles


def _owner(node_id: str) -> Any:
    """Start the actor of a node, or find it. It takes no processor: what it does, sandboxes do."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    return (
        ray.remote(_Owner)
        .options(
            name=f"{_PREFIX}{node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy=strategy,
        )
        .remote()
    )


def _owner_of(ticket: Ticket) -> Any:
    try:
        return ray.get_actor(f"{_PREFIX}{ticket.node_id}", namespace=NAMESPACE)
    except ValueError as exc:
        raise _lost(ticket) from exc


def _lost(ticket: Ticket) -> SandboxLost:
    return SandboxLost(
        f"sandbox {ticket.sandbox_id} is lost: node {ticket.node_id}, or the actor there, has ended",
        hint="create another one; what it had written is gone, unless a snapshot has it",
        retryable=True,
    )


def _arrive(ticket: Ticket) -> Any:
    """Unpickle: in the process that owns it, the sandbox itself."""
    return _sandboxes.get(ticket.sandbox_id) or Handle(ticket)


def _open_door() -> calls.Door:
    global _door
    with _lock:
        if _door is None or not _door.name.startswith(f"ringfence-ray-{os.getpid()}-"):
            _door = calls.Door(_sandboxes.get)
        return _door


def _node_id() -> str:
    if not ray.is_initialized():
        raise SandboxNotFound(
            "this process is in no Ray cluster", hint="call ray.init() before it uses sandboxes"
        )
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def _task_id() -> str:
    """The task that runs here; empty in actors and drivers, whose sandboxes last as long as they do."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return ""
    return "" if context.get_actor_id() else context.get_task_id() or ""


def _end_those_of_earlier_tasks() -> None:
    """Ray uses a worker process again: a task ends without its process, and so must its sandboxes.

    Most ended when the task's last reference to them did. This is for those in a global or a cycle.
    """
    task = _task_id()
    for sandbox in [*_sandboxes.values()]:
        if task and sandbox._task and sandbox._task != task:
            sandbox.terminate()


def _has_ended(sandbox: LocalSandbox) -> bool:
    return sandbox.state.value == "terminated"
