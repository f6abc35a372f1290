"""Lives of a sandbox by E2B's rules: created with a deadline, paused, woken, ended."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import replace

from ..backends.optional import BootIdentity, Clearable
from ..errors import ExecError, LifecycleError, RingfenceError, Unsupported
from ..model.acquire import AcquireOptions
from ..model.client_session import SUSPEND, TERMINATE, SessionState, SessionTimeouts
from ..model.spec import LIGHT, STRONG, SandboxSpec
from ..sessions import snapshots
from ..sessions.catalogue.records import map_text
from ..sessions.forks import save
from .call import ApiError
from .codec import field
from .notes import Notes, client_metadata, notes_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from ..api.access.caller import Caller
    from ..api.service import Service
    from ..execs.execs import Execs
    from ..sessions.forks import Carry
    from ..sessions.live import Live
    from ..sessions.manager import SessionManager
    from .call import Call

WOKEN_S = 300.0  # for what a request wakes
_PAUSED_S = 365 * 86_400.0  # that a sandbox which is to end in time may stay paused
_SHORTEST_S = 1.0
_KNOWN_S, _LOOK_S = 10.0, 0.01  # until the ends of killed commands are known
# Without a timeout E2B documents five minutes; its newest SDKs leave it to the server.
_DEFAULT_S, _MOST_S = 300, 366 * 86_400
_OF_TEMPLATES = ("profile", "python_env", "allow_degraded", "mounts", "memory_dir")


def timeout_of(call: Call, form: dict[str, Any], default: int | None = _DEFAULT_S) -> int:
    """Return for how many seconds a client wants a sandbox.

    Args:
        default: Where it says nothing; None: it must.

    Raises:
        ApiError: It is no such number, or more than the caller gets.
    """
    found: int | None = field(form, "timeout", int, default)
    if found is None or not 0 <= found <= _MOST_S:
        what = "missing" if found is None else f"{found} seconds"
        raise ApiError(400, f"timeout: {what}; give 0 to {_MOST_S} seconds, which is a year")
    try:
        call.service.permissions.check_life(call.caller, found)
    except RingfenceError as exc:
        raise ApiError(403, str(exc).replace("ttl_s", "timeout")) from exc
    return found


def create(
    service: Service,
    caller: Caller,
    spec: SandboxSpec,
    notes: Notes,
    metadata: Mapping[str, str],
    *,
    timeout_s: float,
    auto_pause: bool,
    snapshot_id: str | None = None,
    key: str = "",
    client_id: str = "",
) -> Live:
    """Create a sandbox that ends, or is paused, `timeout_s` from now, used or not.

    Args:
        client_id: Whose it is; the caller's own by default.
    """
    spec = tiered(service, replace(spec, id=None, ttl_s=max(_SHORTEST_S, timeout_s)))
    judge, most = service.permissions.judge, service.permissions.most.limits.idle_timeout_s
    unused_s = None if caller.is_admin else most
    timeouts = SessionTimeouts(
        idle_s=unused_s,
        detach_s=unused_s,
        suspend_s=unused_s,
        on_idle=SUSPEND if auto_pause else TERMINATE,
        on_expiry=SUSPEND if auto_pause else TERMINATE,
    )
    options = AcquireOptions(
        timeouts=timeouts, metadata=notes.written(metadata), snapshot_id=snapshot_id, key=key
    )
    lease = service.manager.acquire(
        judged(service, caller, spec),
        judge(caller, options),
        client_id=client_id or caller.client,
        most=caller.max_sandboxes,
    )
    live = service.manager.index.find(lease.id)
    if live is None:
        raise LifecycleError("the sandbox ended as soon as it was created")
    return live


def forks(
    manager: SessionManager, live: Live, count: int, carry: Carry, create: Callable[[str], Live]
) -> Iterator[Live | RingfenceError]:
    """Make forks one after the other, each with what of the sandbox can be copied; or why there is none.

    Args:
        create: Makes a sandbox from a snapshot.
    """
    spec = replace(live.spec, network=live.inner.spec.network)
    saved = save(manager, live, spec, "auto", carry)
    try:
        carry.release()
        carry.load()
        for _ in range(count):
            try:
                yield _with_all(manager, carry, lambda: create(saved.id))
            except RingfenceError as exc:
                yield exc
    finally:
        carry.close()
        snapshots.delete(manager, saved.id, None)


def _with_all(manager: SessionManager, carry: Carry, create: Callable[[], Live]) -> Live:
    made = create()
    try:
        carry.put_into(made)
    except Unsupported as exc:
        manager.end(made, "it could not be copied")
        if carry.is_whole:
            raise
        carry.leave_out(exc.message)
        return create()
    except BaseException:
        manager.end(made, "it could not be copied")
        raise
    return made


def tiered(service: Service, spec: SandboxSpec) -> SandboxSpec:
    """The spec with the server's tier: clients of E2B name none, the server's backend decides."""
    tiers = [tier for each in service.manager.maker.backends.values() for tier in each.tiers]
    if spec.tier == LIGHT and LIGHT not in tiers and STRONG in tiers:
        return replace(spec, tier=STRONG)
    return spec


def judged(service: Service, caller: Caller, spec: SandboxSpec) -> SandboxSpec:
    """Check what the client asks for; what its template has is the operator's word."""
    own = SandboxSpec()
    plain = {name: getattr(own, name) for name in _OF_TEMPLATES}
    judged = service.permissions.judge(caller, replace(spec, **plain))
    return replace(judged, **{name: getattr(spec, name) for name in _OF_TEMPLATES})


def restored(service: Service, caller: Caller, snapshot_id: str) -> SandboxSpec:
    return snapshots.spec_of(snapshots.need(service.manager, snapshot_id, caller.sees))


def pause(manager: SessionManager, execs: Execs, live: Live, *, keeps_memory: bool = True) -> bool:
    """Freeze a sandbox; False if it is already. Its deadline waits until it is woken.

    Args:
        keeps_memory: Whether processes go on when it is woken; else only files are left of it.

    Raises:
        RingfenceError: Its processes could not be ended; it is not paused.
    """
    with live.lock:
        if live.state == SessionState.SUSPENDED:
            return False
        if not keeps_memory:
            _start_anew(manager, execs, live)
        with _deadline_put_back(manager, live):
            if live.timeouts.on_expiry != SUSPEND:
                manager.extend(live.id, _PAUSED_S)
            manager.suspend(live.id)
    return True


def wake(
    manager: SessionManager,
    execs: Execs,
    live: Live,
    timeout_s: float | None = None,
    *,
    keeps_memory: bool = True,
) -> bool:
    """Resume a paused sandbox, once however many ask; whether it was paused.

    Args:
        timeout_s: From now to its next deadline; one that runs keeps a later one.
        keeps_memory: Whether its processes go on; else only files are left of a paused one.

    Raises:
        RingfenceError: Its processes could not be ended; it is paused again.
    """
    with live.lock:
        was_paused = live.state == SessionState.SUSPENDED
        left_s = live.left_s(manager.clock.now()) or 0.0
        if was_paused:
            with _deadline_put_back(manager, live):
                # The deadline first: past it, the reaper would pause it again.
                manager.extend(live.id, timeout_s or WOKEN_S)
                manager.resume(live.id)
                # At this time its own deadline has paused it.
                if not keeps_memory or (left_s <= 0 and not notes_of(live.metadata).keeps_memory):
                    try:
                        _start_anew(manager, execs, live)
                    except RingfenceError:
                        manager.suspend(live.id)
                        raise
        elif timeout_s is not None and timeout_s > left_s:
            manager.extend(live.id, timeout_s)
    return was_paused


@contextmanager
def _deadline_put_back(manager: SessionManager, live: Live) -> Iterator[None]:
    """Give a sandbox its deadline again where the block fails: it stays as it was, paused or not."""
    before = live.expires
    try:
        yield
    except BaseException:
        live.expires = before
        kept = None if before is None else int(before * 1e9)
        with suppress(RingfenceError):  # the disk is full: a restart finds the other one
            manager.store.change_sandbox(live.sandbox_id, expires_ns=kept)
        manager.reaper.expect(live)
        raise


def _start_anew(manager: SessionManager, execs: Execs, live: Live) -> None:
    """Leave nothing of a sandbox but its files, as if it had been booted from them.

    Raises:
        RingfenceError: Its processes could not be ended.
    """
    if not isinstance(live.inner, Clearable):
        raise Unsupported(
            "this backend cannot end all processes of a sandbox that lives on",
            backend=live.backend,
            operation="pause without memory",
            hint="pause with memory, or kill the sandbox",
        )
    live.inner.end_processes()
    _await_ends(execs, live.sandbox_id)
    if isinstance(live.inner, BootIdentity):
        live.inner.renew_boot_id()
        return
    notes = notes_of(live.metadata)
    live.metadata = replace(notes, boots=notes.boots + 1).written(client_metadata(live.metadata))
    manager.store.change_session(live.id, metadata=map_text(live.metadata))


def _await_ends(execs: Execs, sandbox_id: str) -> None:
    """Wait until each command that was killed is known to have ended, so that none is listed any more."""
    until = time.monotonic() + _KNOWN_S
    while execs.running_of(sandbox_id):
        if time.monotonic() >= until:
            raise ExecError("the end of the sandbox's commands was not reported", retryable=True)
        time.sleep(_LOOK_S)
