"""FUSE server of read-only host files for this process's gVisor sandboxes: see decision 0090.

Each tenant has a file system of its own, so tenants share no pages of the page cache.
"""

from __future__ import annotations

import errno
import os
import select
from _thread import allocate_lock

from ...errors import SandboxLost
from ...launcher import wire
from ...launcher.fuse import view
from ...policy import filters
from ..local.agents import agent_code
from ..local.answers import Refused, answer
from ..local.host import identity
from ..local.host.facts import host
from ..local.jailed.bare_jail import bare_jail
from ..local.jailed.jails import kill
from ..local.launched import last_words, room_for_words
from ..local.mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ...launcher.fuse.views import ViewPlan
    from ...launcher.jail.jail import JailPlan
    from ...launcher.plan import Tree
    from ..local.jailed.jails import Jails
    from ..local.launched import Launched
    from ..local.mounts.images import Held
    from .draft import Draft

    Steps = list[tuple[Any, ...]]

_SWITCH = "RINGFENCE_OWN_PAGES"
_OFF = ("0", "no", "off", "false")
_READY_S = 60.0
_NO_IDS = "this kernel cannot map user ids in a FUSE mount, which images need"
_KERNEL = "use Linux 6.12 or newer, or run as an ordinary user"
_ROOT_BYTES, _ROOT_INODES = 1 << 20, 4096  # of the directory where all is shown
_DEVICE = "/dev/fuse"
_OPEN = (
    f"let this user read and write {_DEVICE}: `modprobe fuse`; in a container `--device {_DEVICE}`"
)


def is_on() -> bool:
    """Unless the environment says RINGFENCE_OWN_PAGES=off."""
    return os.environ.get(_SWITCH, "").lower() not in _OFF


def fix_of(why: str) -> str:
    """Choose the fix for pages that are shared for that reason."""
    if _SWITCH in why:
        return f"unset {_SWITCH}, and make the backend with own_pages"
    return _KERNEL if why == _NO_IDS else _OPEN


class Views:
    """The server of one jailer's jails, or why there is none.

    Attributes:
        why: Why pages are shared; empty: they are not.
        why_images: The same of images' files.
    """

    def __init__(self, backend: Jails, jailer: Launched, *, wanted: bool) -> None:
        self.jailer, self._backend = jailer, backend
        self._pid, self._pidfd, self._errors, self.first_host_id = 0, -1, -1, 0
        self.why = self.why_images = ""
        self._lock = allocate_lock()
        self._control: wire.Socket | None = None  # until the jailer has it
        if wanted:
            self._shown = _shown()
            self._stamp = _stamp(self._shown)
            self._try(self._begin)
        else:
            self.why = f"it was turned off ({_SWITCH})"

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step; if the jailer refuses it, go on without and record why. Other errors are raised."""
        try:
            step()
        except BaseException as exc:
            said = last_words(self._errors) if self._errors >= 0 else ""
            told = (exc.strerror if isinstance(exc, Refused) else "") or str(exc)
            self.why = f"{told.removeprefix('mount_space: ')}{': ' if said else ''}{said}"
            self.close()
            if not isinstance(exc, Refused):
                raise

    def _begin(self) -> None:
        """Start it; until it is there, its jailer may do something else."""
        here = host()
        owner = None if here.trusted_root else (here.uid, here.gid)
        self.jailer.ask("mount_space", {"scratch": here.scratch, "owner": owner, "device": _DEVICE})
        if here.trusted_root:
            self.first_host_id = self._backend.host_ids().take()
        self._errors = room_for_words("view-says")
        self._control, theirs = wire.socketpair()
        try:
            plan = _plan(self._shown, self.first_host_id)
            body, [self._pidfd] = self.jailer.ask("create", plan, [theirs.fileno(), self._errors])
            self._pid = int(body)
        finally:
            theirs.close()

    def _ready(self) -> None:
        """Wait until it serves, or it is known why it does not."""
        with self._lock:
            if self._control is not None and not self.why:
                self._try(self._finish)

    def _finish(self) -> None:
        assert self._control is not None
        try:
            answer(self._control, _READY_S)
        except SandboxLost as exc:
            raise Refused(errno.EPIPE, "the file server exited during startup") from exc
        probe, is_root = template.tree("/", template.READ_ONLY), host().trusted_root
        if is_root:
            probe = _mapped(probe, (0, 0), self.first_host_id)
        wanted = {"server": self._pid, "probe": probe}
        maps, _ = self.jailer.ask("views", wanted, [self._control.fileno()])
        self._control.close()  # the jailer's, from here on
        self._control = None
        if is_root and maps != b"1":
            self.why_images = _NO_IDS

    @property
    def is_closed(self) -> bool:
        return self._pidfd < 0

    @property
    def alive(self) -> bool:
        """True while its server process lives; without one, while the jailer does."""
        if self._pidfd < 0:
            return self.jailer.alive
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    @property
    def is_current(self) -> bool:
        """True unless host files were replaced, mounted over or added since it started."""
        if self._pidfd < 0:
            return True
        shown = _shown()
        return shown == self._shown and _stamp(shown) == self._stamp

    def why_not(self, image: Held | None) -> str:
        """Why a sandbox shares pages with others; empty: it does not. Waits until it is known."""
        self._ready()
        return self.why or (self.why_images if image is not None else "")

    def plan(self, draft: Draft, tenant: str, shown: list[int], below: int) -> ViewPlan:
        """Plan the files that a guest sees through its tenant's mount.

        Args:
            shown: Indices of the template's trees in its root.
            below: Index of the image's tree; -1: there is none.
        """
        image_source = None
        if below >= 0 and draft.image is not None:
            tree = draft.trees[below]
            image_source = tree
            if host().trusted_root:
                # The server sees the image as its own; it reports owner 0, which the guest maps to
                # its own ids.
                image_source = _mapped(tree, draft.image.owner, self.first_host_id)
                draft.trees[below] = _mapped(tree, (0, 0), draft.first_host_id)
        return {
            "server": self._pid,
            "tenant": tenant,
            "once": tenant == draft.id,
            "trees": shown,
            "image": below,
            "image_source": image_source,
        }

    def close(self) -> None:
        """End it, and with it every sandbox that sees files through it."""
        pidfd, self._pidfd = self._pidfd, -1
        is_ours = self.jailer.owner == os.getpid()  # and not of who forked us
        if self._control is not None:
            self._control.close()
            self._control = None
        if pidfd >= 0:
            kill(pidfd) if is_ours else os.close(pidfd)
        errors, self._errors = self._errors, -1
        if errors >= 0:
            os.close(errors)
        first, self.first_host_id = self.first_host_id, 0
        if first and is_ours:
            self._backend.host_ids().give_back(first)


def _mapped(tree: Tree, owner: tuple[int, int], host_id: int) -> Tree:
    """The same, with what is its owner's shown as another id's."""
    uid, gid = owner
    return {**tree, "idmap": f"{uid} {host_id} 1", "idmap_gid": f"{gid} {host_id} 1"}


def _shown() -> list[Tree]:
    """All of the host that any guest of ours may see, but for what a user mounts: once each."""
    _, trees = template.guest_root(identity.SANDBOX_UID)
    more = (*agent_code.interpreter()[1], *agent_code.foreign_trees())
    sources = [tree["source"] for tree in trees]
    sources += [source for source, _target, _attributes in (*more, *template.python_environment())]
    tops = [
        each
        for each in dict.fromkeys(sources)
        if not any(each.startswith(f"{other}/") for other in sources)
    ]
    return [template.tree(each, template.READ_ONLY) for each in tops]


def _stamp(shown: list[Tree]) -> list[tuple[int, int]]:
    """Identify each directory: its content may change while it stays the same directory."""
    found = [os.stat(tree["source"]) for tree in shown]
    return [(info.st_dev, info.st_ino) for info in found]


def _plan(trees: list[Tree], first_host_id: int) -> JailPlan:
    """The isolation around it; in there it has one id, and that is nobody's on the host."""
    name = f"view-{os.getpid()}"
    steps: Steps = [("bind", tree["source"], i) for i, tree in enumerate(trees)]
    return {
        **bare_jail(name, host(), f"0 {first_host_id} 1", filters.load_view_filter()),
        "trees": trees,
        "steps": [("dir", name, 0o755, False) for name in ("/proc", view.SHOWN)],
        "guest": {
            "path": view.SHOWN,
            "image": -1,
            "disk": -1,
            "size_bytes": _ROOT_BYTES,
            "inodes": _ROOT_INODES,
            "owner": 0,
            "steps": steps,
            "has_content": False,
            "process_image": "",
            "process_image_bytes": 0,
        },
        "keep_capabilities": True,  # it gives up all but one itself
    }
