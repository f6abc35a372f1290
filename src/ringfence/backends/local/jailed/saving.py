"""Transfer of a snapshot stream from inside to the catalogue, whole or not at all."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

from ....errors import InvalidRequest, IoError, LifecycleError, SandboxLost
from ....model.base.ids import new_id
from ..answers import Refused, answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Protocol

    from ....model.session import Snapshot
    from ....model.spec import SandboxSpec
    from ....snapshots.catalogue import Catalogue
    from ..agents.guest import GuestSandbox
    from ..sizes import Sizes

    class Saved(Protocol):
        id: str
        spec: SandboxSpec
        sizes: Sizes


_KEPT_OUTSIDE = (
    *("cpus", "io_bytes_per_s", "network_bytes"),
    *("wall_time_s", "output_bytes", "idle_timeout_s"),
)
"""Limits that the host keeps, whatever the guest knows."""
_OVERHEAD_BYTES = 64 << 20  # headers of very many small files
_PATIENCE_S = 30.0
GO_ON = (
    "close files and connections; start programs that must survive with their streams in files: "
    "sh -c 'program >log 2>&1 </dev/null &'"
)


def keep(
    sandbox: Saved,
    catalogue: Catalogue,
    metadata: Mapping[str, str],
    pack: Callable[[int], None],
    *,
    memory: str = "",
) -> Snapshot:
    """Store the output of `pack` as a snapshot; on failure, store nothing."""
    read, write = os.pipe2(os.O_CLOEXEC)
    problems: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(pack, write, problems))
    thread.start()
    failure: BaseException | None = None
    try:
        snapshot = catalogue.save(
            read,
            new_id("snap"),
            sandbox.spec,
            sandbox.sizes.disk_bytes + sandbox.sizes.disk_bytes // 8 + _OVERHEAD_BYTES,
            session_id=sandbox.id,
            created_at=time.time(),
            metadata=dict(metadata),
            memory=memory,
        )
    except IoError as exc:
        failure = exc
    finally:
        os.close(read)
        thread.join()
    if problems and failure is None:
        catalogue.delete(snapshot.id)
    if problems or failure is not None:
        cause = problems[0] if problems else failure
        raise IoError(f"the snapshot was not saved: {cause}") from cause
    return snapshot


def _run(pack: Callable[[int], None], write: int, problems: list[BaseException]) -> None:
    try:
        try:
            pack(write)
        finally:
            os.close(write)
    except BaseException as exc:  # noqa: BLE001  the other thread must hear of it
        problems.append(exc)


def settle(sandbox: GuestSandbox, going_on: Sequence[int] = ()) -> None:
    """See that nothing inside holds what is the host's: that could not be continued.

    Args:
        going_on: Execs that let go of it, and are joined later.

    Raises:
        LifecycleError: Something does, and what.
    """
    reply = sandbox.request("settle", tuple(going_on))
    try:
        answer(reply, _PATIENCE_S)
        answer(reply, _PATIENCE_S)  # until the agent has let go of its end
    except Refused as exc:
        raise LifecycleError(
            f"descriptors of the host cannot be saved, and are open in: {exc.strerror}", hint=GO_ON
        ) from exc
    except SandboxLost:
        sandbox.require_awake()
    finally:
        reply.close()


def check_goes_on(
    spec: SandboxSpec | None, taken_under: SandboxSpec, *, network: bool = False
) -> None:
    """Refuse to have what goes on with its memory be something else; only what the host keeps may differ.

    Args:
        network: Whether the host keeps the network policy, too.

    Raises:
        InvalidRequest: It is asked for under another spec.
    """
    if spec is None:
        return
    field = kept_inside(spec, taken_under, network=network)
    same = replace(
        spec,
        id=taken_under.id,
        labels=taken_under.labels,
        network=taken_under.network,
        limits=taken_under.limits,
    )
    if field or same != taken_under:
        raise InvalidRequest(
            f"a memory snapshot is restored under its own spec only: {field or 'spec'} differs",
            field=field or "spec",
            hint="restore it without a spec, or change labels, limits.cpus or limits.network_bytes only",
        )


def tell_limits(sandbox: GuestSandbox, taken_under: SandboxSpec) -> None:
    """Tell the agent of one that was restored with its memory what differs from before."""
    if sandbox.spec.limits.cpus is not None and taken_under.limits.cpus is None:
        sandbox.ask("throttled")


def kept_inside(spec: SandboxSpec, taken_under: SandboxSpec, *, network: bool) -> str:
    """Return which of network policy, limits and secrets differs and is kept by what was saved; empty: none."""
    wanted, had = spec.limits.to_json(), taken_under.limits.to_json()
    for name in sorted(wanted.keys() | had.keys()):
        if name not in _KEPT_OUTSIDE and wanted.get(name) != had.get(name):
            return f"limits.{name}"
    policy = spec.network
    # Programs read the roots that they believe when they start, and secrets are in their memory.
    if policy != taken_under.network and not (
        network and not policy.needs_tls_termination and not policy.secrets
    ):
        return "network"
    return "secrets" if spec.secrets != taken_under.secrets else ""
