"""Items of native sandboxes and execs in the fd store, and their restoration in a later process.

A note has all that this process knows and the kernel does not; with it go the descriptors. Secrets
are in it, so that they are in the fd store's memory, as they are in ours; never on a disk.
"""

from __future__ import annotations

import json
from functools import lru_cache

from ....launcher import wire
from ....launcher.fd_store import MOST_FDS
from ....model.image import Image
from ....model.session import ResolvedMount
from ....model.spec import SandboxSpec
from ....snapshots.catalogue import Catalogue
from ...local.agents.execs import LocalExec
from ...local.fd_store import Item
from ...local.host.cgroups import Group
from ...local.mounts.images import Held
from ...local.mounts.layered import Layered
from ...local.mounts.protect import Protected
from ...local.mounts.trusted import Trusted
from .. import planner
from ..profiles import profile_named
from ..request import Request
from ..sandbox import NativeSandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..live import LiveSandbox
    from ..request import Base
    from ..runtime import Runtime
    from ..zygote import Zygote

SANDBOX, NETWORK, COUNT, PAUSED, LOCKS = "sandbox", "network", "count", "paused", "locks"
EXEC, AGENT, BASE = "exec ", "agent ", "base"
_as_json = json.JSONEncoder().encode


# -- giving ------------------------------------------------------------------------------------


def everything(sandbox: LiveSandbox, sockets: list[int]) -> list[Item]:
    """All of a sandbox. `sockets`: of its network."""
    items = [whole(sandbox), Item(sandbox.id, COUNT, sandbox.count, []), *locks(sandbox)]
    if sandbox.base is not None:
        # The lock is the open file's: whoever has a copy keeps the files from being removed.
        items.append(Item(sandbox.id, BASE, _note_of(sandbox.base), sandbox.base.locks))
    if sockets:
        items.append(Item(sandbox.id, NETWORK, None, sockets))
    if sandbox.paused:
        items.append(Item(sandbox.id, PAUSED, None, []))
    items += [agent(sandbox, uid) for uid in list(sandbox.agents)]
    return items + [exec_item(run) for run in list(sandbox.runs.values())]


def whole(sandbox: LiveSandbox) -> Item:
    """Make the item that a sandbox needs to survive this process."""
    trusted, group = sandbox.network.trusted, sandbox.group
    spec, text = sandbox.spec_text or (None, "")
    if spec is not sandbox.spec:  # another policy has come since
        text = text_of(sandbox.spec)
    note = {
        "spec": text,
        "secrets": dict(sandbox.spec.secrets),
        "uid": sandbox.uid,
        "first_host_id": sandbox.first_host_id,
        "mounts": [(each.target, each.access, each.host_path) for each in sandbox.mounts],
        "writable": sandbox.landlock_writable,
        "host_directory": sandbox.host_directory,
        "unix_sockets": sandbox.unix_sockets,
        "protected": [list(part.placeholders) for part in sandbox.protected],
        "note": sandbox.note,
        "profile": sandbox.profile.name,
        "group": (group.version, group.paths, group.quota),
        "lockdown": sandbox.lockdown,
        "pid": sandbox.pid,
        "created": sandbox.created,
        "trusted": trusted and trusted.parts,
        "placeholders": sandbox.network.placeholders,
    }
    fds = [sandbox.control.fileno(), sandbox.pidfd, *sandbox.namespace_fds]
    return Item(sandbox.id, SANDBOX, note, fds)


def locks(sandbox: LiveSandbox) -> list[Item]:
    """Make items of the locks that keep others from removing this sandbox's placeholders."""
    fds = [fd for part in sandbox.protected for fd in part.locks]
    starts = range(0, len(fds), MOST_FDS)
    return [
        Item(sandbox.id, f"{LOCKS} {start}", None, fds[start : start + MOST_FDS])
        for start in starts
    ]


def agent(sandbox: LiveSandbox, uid: int) -> Item:
    """Make the item of the process that starts programs of another user inside."""
    return Item(sandbox.id, f"{AGENT}{uid}", uid, [sandbox.agents[uid].fileno()])


def exec_item(run: LocalExec) -> Item:
    """A running exec, its result to come and its streams."""
    streams = [run.stdin, run.stdout, run.stderr]
    fds = list(dict.fromkeys(fd for fd in streams if fd is not None))
    places = [fds.index(fd) if fd is not None else -1 for fd in streams]
    note = (run.number, run.uid, run.label, places, run.is_terminal, *run.facts)
    return Item(
        run.home_id, f"{EXEC}{run.number}", note, [run.done, *fds, *(run.splice_pipe or ())]
    )


# -- taking back ---------------------------------------------------------------------------------


def take_back(
    backend: Runtime, zygote: Zygote, sandbox_id: str, items: dict[str, Item]
) -> NativeSandbox:
    """A sandbox of an earlier process, with the execs that nobody has closed.

    Raises:
        KeyError: Not all of it was kept.
        RingfenceError: This process knows nothing of its profile.
    """
    item = items[SANDBOX]
    note = item.note
    spec = _spec(note)
    profile = profile_named(note["profile"], backend.profiles)
    request = Request(spec, profile, note["uid"], _base(items.get(BASE)))
    draft = planner.Draft(request, sandbox_id, note["first_host_id"])
    draft.group = Group.known(*note["group"])
    draft.mounts = [ResolvedMount(*each) for each in note["mounts"]]
    draft.writable, draft.note = note["writable"], note["note"]
    draft.host_directory, draft.unix_sockets = note["host_directory"], note["unix_sockets"]
    draft.protected = _protected(note["protected"], items)
    draft.trusted = Trusted.known(*note["trusted"]) if note["trusted"] else None
    if request.sizes.on_disk:
        from ...local.mounts import disks

        draft.disk = disks.again(sandbox_id, zygote.label)
    control, pidfd, *namespaces = item.fds
    network = items.get(NETWORK)
    sandbox = NativeSandbox(backend, draft, wire.adopt(control), note["lockdown"], zygote)
    sandbox.begun(note["pid"], pidfd, namespaces, network.fds if network else [])
    sandbox.remember(note["created"], items[COUNT].note, note["placeholders"])
    sandbox.was_paused = PAUSED in items
    for name, each in items.items():
        if name.startswith(AGENT):
            sandbox.agents[each.note] = wire.adopt(each.fds[0])
    for name, each in items.items():
        if name.startswith(EXEC):
            run = _exec_from(sandbox, each)
            sandbox.runs[run.number] = run
    return sandbox


def text_of(spec: SandboxSpec) -> str:
    """Without the id, which everybody knows: what was asked for in the same words is the same text."""
    return _as_json({**spec.to_json(), "id": None})


def _spec(note: dict[str, Any]) -> SandboxSpec:
    from dataclasses import replace

    spec = _read(note["spec"])
    return replace(spec, secrets=note["secrets"]) if note["secrets"] else spec


@lru_cache(256)
def _read(text: str) -> SandboxSpec:
    return SandboxSpec.from_json(json.loads(text))


def _protected(made: list[list[Any]], items: dict[str, Item]) -> list[Protected]:
    parts = [Protected() for _ in made]
    for part, placeholders in zip(parts, made, strict=True):
        part.placeholders = [tuple(each) for each in placeholders]
    held = [fd for name, item in items.items() if name.startswith(LOCKS) for fd in item.fds]
    if parts:
        parts[-1].locks = held  # all are let go of together, when the sandbox has ended
    return parts


def _note_of(base: Base) -> dict[str, Any]:
    image = base.image if isinstance(base, Layered) else base
    return {
        "ids": base.ids,
        "directory": base.catalogue.directory if isinstance(base, Layered) else "",
        "image": image and (image.image.to_json(), image.root),
    }


def _base(item: Item | None) -> Base | None:
    if item is None:
        return None
    note, fds = item.note, item.fds
    image = None
    if note["image"] is not None:
        told, root = note["image"]
        image = Held(Image.from_json(told), root, fds[-1])
    if not note["ids"]:
        return image
    return Layered(tuple(note["ids"]), Catalogue(note["directory"], "native"), fds[0], image)


def _exec_from(sandbox: LiveSandbox, item: Item) -> LocalExec:
    number, uid, label, places, is_terminal, command, cwd, oom_kills, started = item.note
    reply, *fds = item.fds
    stdin, stdout, stderr = (fds[place] if place >= 0 else None for place in places)
    control = sandbox.control if uid is None else sandbox.agents.get(uid, sandbox.control)
    run = LocalExec(
        sandbox,
        number,
        control,
        wire.adopt(reply),
        (stdin, stdout, stderr),
        oom_kills,
        command,
        cwd,
    )
    run.uid, run.label, run.is_terminal, run.started = uid, label, is_terminal, started
    match fds[max(places) + 1 :]:
        case [reading, writing]:
            run.splice_pipe = reading, writing
    if is_terminal and stdout is None and not run.never_began():
        run.take_terminal()
    return run
