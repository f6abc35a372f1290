"""Plan of a jail around gVisor for a spec. Decides everything that the launcher will do; starts nothing."""

from __future__ import annotations

import os
import resource

from ...guest.users import MAPPER
from ...launcher.machine_code import process_image_elf
from ...model.spec import OWN_ROOT, SandboxSpec
from ..local.agents import agent_code
from ..local.host import identity
from ..local.jailed.bare_jail import bare_jail, filter_of_jail
from ..local.mounts import template
from . import bundle, places, root, statx
from .runsc import DESCRIPTORS, NO_REGISTERING, host_pids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...guest.settings import Settings
    from ...launcher.jail.jail import JailPlan
    from ...launcher.plan import NetworkPlan
    from ..local.host.facts import Host
    from ..local.sizes import Sizes
    from .draft import Draft
    from .runsc import Runsc
    from .views import Views

_MAPS = ["/proc/1/uid_map", "/proc/1/gid_map"]
_ALL_IDS = 65536


def make_plan(
    draft: Draft,
    host: Host,
    runsc: Runsc,
    size: Sizes,
    *,
    has_content: bool,
    memory: str = "",
    process_image_bytes: int = 0,
    views: Views | None = None,
    tenant: str = "",
) -> JailPlan:
    """Fill `draft` and return the plan; `draft.fds` are to be sent along and closed after.

    Args:
        memory: A file with what a guest had in memory, to be continued.
        still_bytes: How large the agent is that has started already; 0: there is none.
        views: Who serves what the host shows; None: the guest has the host's own pages.
        tenant: Whose view it is.
    """
    starts_process_image = (
        # It lies in the guest's root until it runs, and finds its files where the host has them: not on
        # an image, whose files are a stranger's, nor where the root is small or filled already.
        0 < process_image_bytes * 2 <= size.disk_bytes and not (has_content or draft.image)
    )
    below = root.furnish(draft, host, needs_statx=statx.is_needed(runsc.released))
    _bring_agent(draft, host, starts_process_image=starts_process_image)
    if draft.spec.profile == OWN_ROOT and not draft.image:
        draft.guest += template.for_accounts()
    if not host.trusted_root and not draft.image:
        # Without root all there belongs to the one id that there is: so it is read-only besides.
        draft.after.append(("protect", f"{places.ROOTFS}/etc"))
    view = None
    if views is not None:
        shown = [i for i, tree in enumerate(draft.trees) if not tree["inode"]]
        view = views.plan(draft, tenant, shown, below)
    bundle.furnish(draft, runsc, starts_process_image=starts_process_image)
    if memory:
        _show_memory(draft, memory)
    disk = -1
    if draft.disk is not None:
        disk = len(draft.trees)
        # Any inode: the jailer, which alone gets descriptors, is to have it.
        draft.trees.append({**draft.disk.tree, "inode": 1, "fd": len(draft.fds)})
        draft.fds.append(os.dup(draft.disk.fd))
    ids = identity.slot_map(draft.first_host_id, draft.uid)
    bare = bare_jail(draft.id, host, ids, filter_of_jail(NO_REGISTERING))
    return {
        **bare,
        "trees": draft.trees,
        "steps": draft.jail,
        "network": _network(draft.spec),
        "guest": {
            "path": places.ROOTFS,
            "image": below,
            "disk": disk,
            "size_bytes": size.disk_bytes,
            "inodes": size.inodes,
            # The host's ids inside the guest's root: see `id_map`. What is not the guest's is its root's.
            "owner": draft.uid if host.trusted_root else 0,
            "steps": draft.guest,
            "has_content": has_content,
            "process_image": places.PROCESS_IMAGE if starts_process_image else "",
            "process_image_bytes": process_image_bytes if starts_process_image else 0,
        },
        "after": draft.after,
        "rlimits": [*bare["rlimits"], _bound_on_processes(size)],
        "descriptors": DESCRIPTORS,
        "view": view,
        "keep_capabilities": True,
        "argv": [
            places.RUNSC,
            f"--root={places.STATE}",
            *runsc.flags(rootless=not host.trusted_root, network=not draft.spec.network.is_none),
            *runsc.words,
            *(("restore", f"--image-path={places.SAVED}") if memory else ("run",)),
            "--bundle=/bundle",
            draft.id,
        ],
        "env": {"PATH": "/bin"},
        "placeholders": [made for part in draft.protected for made in part.placeholders],
    }


def _bring_agent(draft: Draft, host: Host, *, starts_process_image: bool) -> None:
    """Its code, unless it has started already, and the program that writes down its ids."""
    draft.guest.append(("dir", places.AGENT, 0o700, False))
    if os.uname().machine == "x86_64":
        told = id_map(draft.uid, several=host.trusted_root).encode()
        content, mode = told.ljust(process_image_elf.TASK_BYTES), 0o600
        if not starts_process_image:
            content, mode = process_image_elf.writing(dict.fromkeys(_MAPS, told)), 0o700
        draft.guest.append(("file", f"{places.AGENT}/{MAPPER}", content, mode))
    if not starts_process_image:
        draft.guest.append(("file", places.PROCESS_IMAGE, agent_code.packed(), 0o600))


def _show_memory(draft: Draft, memory: str) -> None:
    draft.jail.append(("dir", places.SAVED, 0o755, False))
    draft.jail.append(("show", f"{places.SAVED}/{places.MEMORY}", len(draft.trees), False))
    draft.trees.append(template.tree(memory, template.READ_ONLY))


def process_image() -> dict[str, Any]:
    """Build the jailer's request for a process image; it includes the agent's code."""
    return {
        "argv": agent_code.argv_of_process_image(),
        "env": bundle.ENVIRONMENT,
        "place": places.PROCESS_IMAGE,
        "copy_task": (f"{places.AGENT}/{MAPPER}", _MAPS),
        "waits": True,
    }


def _network(spec: SandboxSpec) -> NetworkPlan | None:
    if spec.network.is_none:
        return None
    from ..local.routes import plan_for

    return plan_for(spec.network)


def _bound_on_processes(size: Sizes) -> tuple[int, int, int]:
    """Of gVisor's own; all count for this sandbox's user namespace alone (Linux 5.14)."""
    most = host_pids(size.pids)
    return resource.RLIMIT_NPROC, most, most


def settings(draft: Draft, host: Host, size: Sizes) -> Settings:
    """Build the agent's settings, its first message."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: size.open_files,
        resource.RLIMIT_DATA: size.memory_bytes,
        resource.RLIMIT_NPROC: size.pids,
    }
    if draft.spec.limits.disk_bytes:
        limits[resource.RLIMIT_FSIZE] = size.disk_bytes
    return {
        "own_kernel": True,
        "uid": draft.uid,
        "id_map": id_map(draft.uid, several=host.trusted_root),
        "pids": size.pids,
        "memory_bytes": size.memory_bytes,
        "counts_cpu": draft.spec.limits.cpus is None,
        "rlimits": [(which, value, value) for which, value in limits.items()],
        "seccomp": b"",
        "tag_key": 0,
        "covered": [],
        "room": None,
        "shm_bytes": 0,
        "anew": False,
        "place": places.AGENT,
    }


def id_map(uid: int, *, several: bool) -> str:
    """The ids that a guest sees, for those by which gVisor serves it files: there its user is 0.

    That is who gVisor's file server is in the jail, so that what the guest makes is made by its
    owner, also where no other id exists. The guest's root is, in exchange, the user's number.
    """
    if uid == 0:
        return f"0 0 {_ALL_IDS if several else 1}"
    if not several:
        return f"{uid} 0 1\n0 1 1"
    extents = [f"0 {uid} 1", f"{uid} 0 1"]
    if uid > 1:
        extents.append(f"1 1 {uid - 1}")
    if uid + 1 < _ALL_IDS:
        extents.append(f"{uid + 1} {uid + 1} {_ALL_IDS - uid - 1}")
    return "\n".join(extents)
