"""The guest's root: an image or the template, a Python for the agent, and the mounts."""

from __future__ import annotations

import os

from ...linux import mounts
from ...model.mount import ALWAYS_THERE, MEMORY_DIR, READ_WRITE, Mount
from ...model.session import ResolvedMount
from ..local.agents import agent_code
from ..local.mounts import template
from ..local.session import all_mounts, is_below, must_make, session_root
from . import places, statx

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..local.host.facts import Host
    from ..local.mounts.images import Held
    from .draft import Draft


def furnish(draft: Draft, host: Host, *, needs_statx: bool) -> int:
    """All of it but the agent; the index of the image's tree, -1 without one."""
    below = _show_image(draft, draft.image, host) if draft.image else -1
    _show_later_mounts(draft)
    _show_python(draft)
    if draft.trusted is not None:
        draft.guest += draft.trusted.steps
    _add_mounts(draft)
    _make_workdir(draft)
    _preload(draft, needs_statx)
    _deny(draft)
    return below


def _show_image(draft: Draft, image: Held, host: Host) -> int:
    """The index of its tree: all its files are the guest user's, who is 0 in the jail."""
    image.appear_as(draft.first_host_id, host.trusted_root)
    draft.fds.append(os.open(image.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    image.tree["fd"] = len(draft.fds) - 1 if host.trusted_root else -1
    draft.trees.append(image.tree)
    return len(draft.trees) - 1


def _show_python(draft: Draft) -> None:
    wanted = list(agent_code.interpreter()[1])
    if draft.image:
        wanted = agent_code.foreign_trees()
    elif draft.spec.python_env:
        wanted += [each for each in template.python_environment() if each not in wanted]
    for source, target, attributes in wanted:
        draft.guest.append(("bind", target, len(draft.trees)))
        draft.trees.append(template.tree(source, attributes))


def _preload(draft: Draft, needs_statx: bool) -> None:
    """Replace the preload list of the C library: an image's own would be loaded into the agent too."""
    verb, *replace = ("image_file", True) if draft.image else ("file",)
    if needs_statx:
        draft.guest.append((verb, statx.LIBRARY, statx.library(), 0o644, *replace))
    if needs_statx or draft.image:
        content = statx.LIBRARY.encode() + b"\n" if needs_statx else b""
        draft.guest.append((verb, statx.PRELOAD, content, 0o644, *replace))


def _add_mounts(draft: Draft) -> None:
    spec = draft.spec
    for target in ALWAYS_THERE.values():
        if target != MEMORY_DIR or not spec.memory_dir:
            draft.mounts.append(ResolvedMount(target, READ_WRITE))
    wanted = all_mounts(spec)
    for i, mount in enumerate(wanted):
        hidden = any(is_below(mount.target, later.target) for later in wanted[i + 1 :])
        if mount.is_host_path:
            # Served by a connection of its own, which looks again at every use.
            place = draft.add_of_host(mount)
            is_nested = any(is_below(mount.target, each.target) for each in wanted[:i])
            if not (hidden or is_nested or draft.image):
                # gVisor would make it itself, but not where the root is read-only by then, as
                # /etc is without root, and /usr.
                draft.guest.append(("mount_point", mount.target, os.path.isdir(mount.source)))
            if not hidden:
                _show(draft, mount, place)
        else:
            _add_session_mount(draft, mount, hidden)


def _show(draft: Draft, mount: Mount, source: str) -> None:
    draft.shown.append(_bind(mount.target, source, "rw" if mount.is_writable else "ro"))


def _bind(target: str, source: str, access: str) -> dict[str, Any]:
    return {
        "destination": target,
        "type": "bind",
        "source": source,
        "options": ["rbind", access, "nosuid", "nodev"],
    }


def _show_later_mounts(draft: Draft) -> None:
    """gVisor takes no mount once it runs, but its file server sees what is mounted in what it serves."""
    draft.after += [
        ("bind_inside", places.POINTS, places.MOUNTS, mounts.MOUNT_ATTR_RDONLY),
        ("share", places.MOUNTS),
    ]
    verb = "image_dir" if draft.image else "dir"
    # gVisor would make /sys itself, by three questions to its file server; but not for what is restored.
    draft.guest += [(verb, each, 0o755, False) for each in (places.IN_GUEST, "/sys")]
    # Each mount in the jail decides whether it is writable.
    draft.shown.append(_bind(places.IN_GUEST, places.MOUNTS, "rw"))


def _add_session_mount(draft: Draft, mount: Mount, hidden: bool) -> None:
    draft.mounts.append(ResolvedMount(mount.target, mount.access))
    if hidden:
        return
    if not mount.source:
        draft.guest.append(("session_dir", mount.target))
        if not mount.is_writable:
            draft.guest.append(("protect", mount.target))
        return
    source = f"{session_root(draft.spec)}/{mount.source}"
    draft.guest.append(("session_dir", source))
    if not mount.is_writable:
        _show(draft, mount, places.ROOTFS + source)
        return
    # A second way to the same files would be cached apart by gVisor: one would lag behind.
    parent = os.path.dirname(mount.target)
    if parent != "/" and not any(step[:2] == ("dir", parent) for step in draft.guest):
        draft.guest.append(("session_dir", parent))
    draft.guest.append(("symlink", mount.target, source))


def _make_workdir(draft: Draft) -> None:
    workdir = session_root(draft.spec)
    if must_make(workdir, draft.mounts, of_image=draft.image is not None):
        draft.guest.append(("session_dir", workdir))


def _deny(draft: Draft) -> None:
    """Hidden before gVisor starts, in mounts that it has no right to undo: see decision 0111."""
    if draft.spec.deny:
        draft.after += [
            (verb, f"{places.ROOTFS}{path}", make) for verb, path, make in draft.deny_of_host()
        ]
