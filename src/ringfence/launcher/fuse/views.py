"""The jailer's views: FUSE file systems through which one tenant's sandboxes see read-only files of the host.

They are mounted in a mount namespace of the jailer's own, beneath a directory that looks as before; an
ordinary user's jailer has a user namespace for it, in which those of all its jails are. With the last of
both they are gone: nothing on the host can leave them behind.
"""

from __future__ import annotations

import errno
import posix as os

from ...linux import mounts, namespaces
from .. import idmap, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypedDict

    from ..plan import Tree

    class ViewPlan(TypedDict):
        """A jail's part of a tenant's mount; plain values, decided by the host."""

        server: int  # pid of who serves it
        tenant: str
        once: bool  # nobody else will ever be of this tenant
        trees: list[int]  # indices of trees of the template
        image: int  # index of an image's tree; -1: none
        image_source: Tree | None  # the same as who serves it is to have it

    Key = tuple[str, int, int]  # a tenant; device and inode of an image's root, or 0 and 0


_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FLAGS = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
_MOST_IDLE = 8  # are kept for who comes again


class MountSpace:
    """The jailer's own mount namespace: tenant views are mounted below a directory that no path leads to.

    Args:
        scratch: A directory of the host's; it looks as before.
        owner: The ids of an ordinary user; None: we are the host's root.
        device: /dev/fuse.
    """

    def __init__(self, scratch: str, owner: tuple[int, int] | None, device: str) -> None:
        self._device = device
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))  # before anything has changed
        self._outside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        user = namespaces.CLONE_NEWUSER if owner is not None else 0
        namespaces.unshare(namespaces.CLONE_NEWNS | user)
        if owner is not None:
            maps = [f"{number} {number} 1" for number in owner]
            namespaces.write_id_maps(os.getpid(), *maps, deny_setgroups=True)
        # Receive later mounts of the host, and keep ours to ourselves.
        mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_SLAVE)
        self._inside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        above = mounts.open_tree(scratch)
        mounts.mount("ringfence", scratch, "tmpfs", mounts.MS_NOSUID, "mode=0700,size=64k")
        self.fd = os.open(scratch, _DIRECTORY)
        mounts.move_mount(above, scratch)
        os.close(above)
        self._is_roots = owner is None
        self.own = b"%d %d" % (owner or (0, 0))  # the ids of who serves, as our mounts have them
        self._made = 0

    def outside(self, work: Callable[[], int]) -> int:
        """Do `work` among the host's own mounts, of which only there copies can be made."""
        if not self._is_roots:
            return work()
        root = os.open("/", _DIRECTORY)
        try:
            namespaces.setns(self._outside, namespaces.CLONE_NEWNS)
            try:
                return work()
            finally:
                namespaces.setns(self._inside, namespaces.CLONE_NEWNS)
                os.fchdir(root)
                os.chroot(".")
                os.chdir("/")
        finally:
            os.close(root)

    def from_outside(self, work: Callable[..., None], *args: Any) -> None:
        """Do `work` among the host's own mounts, and stay there: for a child of ours."""
        if self._is_roots:
            namespaces.setns(self._outside, namespaces.CLONE_NEWNS)
        work(*args)

    def mount(self, serve: Callable[[int], None]) -> tuple[int, str]:
        """A new file system: its descriptor and name.

        Args:
            serve: Called with the descriptor where its kernel asks, which is closed then: only who
                answers may have one, so that nobody waits for ever for who has ended.
        """
        self._made += 1
        name, device = str(self._made), os.open(self._device, os.O_RDWR | os.O_CLOEXEC)
        place = f"/proc/self/fd/{self.fd}/{name}"
        try:
            os.mkdir(name, dir_fd=self.fd)
            options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
            options += ",allow_other,default_permissions"
            mounts.mount("ringfence", place, "fuse", _FLAGS, options)
            serve(device)
            return os.open(name, _DIRECTORY, dir_fd=self.fd), name
        except OSError:
            self._take_back(name)
            raise
        finally:
            os.close(device)

    def _take_back(self, name: str) -> None:
        """Leave nothing of a file system that could not be mounted, or that nobody serves."""
        try:
            self.unmount(name)
        except OSError:
            try:
                os.rmdir(name, dir_fd=self.fd)  # nothing is mounted there
            except FileNotFoundError:
                pass

    def unmount(self, name: str) -> None:
        mounts.umount2(f"/proc/self/fd/{self.fd}/{name}", mounts.MNT_DETACH)
        os.rmdir(name, dir_fd=self.fd)


class _View:
    """A mounted view: its descriptor and name, and the number of jails that use it."""

    def __init__(self, fd: int, name: str, *, once: bool) -> None:
        self.fd, self.name, self.once, self.users = fd, name, once, 0
        self.source = -1  # pins the image: nothing else gets its number


class Views:
    """All of a jailer's that one server answers for.

    Args:
        server: The process, and `control` our end of its socket.
    """

    def __init__(self, space: MountSpace, server: int, control: wire.Socket) -> None:
        self.space, self.server, self._control = space, server, control
        self.users, self._is_retired = 0, False
        self._views: dict[Key, _View] = {}

    def open(self, tree: Tree, plan: ViewPlan, source: Callable[[], int] | None) -> int:
        """A detached copy of what a tree is in the tenant's view, restricted as planned.

        Args:
            source: Opens an image's root for who serves it; None: it is a tree of the template.
        """
        if source is None:
            view = self._have((plan["tenant"], 0, 0), plan, None)
            path = tree["source"].lstrip("/")
        else:
            view = self._have((plan["tenant"], tree["device"], tree["inode"]), plan, source)
            path = ""
        return idmap.restricted(mounts.open_tree(path, dir_fd=view.fd, recursive=False), tree)

    def _have(self, key: Key, plan: ViewPlan, source: Callable[[], int] | None) -> _View:
        if key not in self._views:
            self._make_room()
            self._views[key] = self._make(source, once=plan["once"])
        view = self._views[key] = self._views.pop(key)  # the one used last is the last
        return view

    def _make(self, source: Callable[[], int] | None, *, once: bool) -> _View:
        shown = source() if source is not None else -1
        try:
            given = [shown] if shown >= 0 else []
            fd, name = self.space.mount(
                lambda device: wire.send_raw(self._control, self.space.own, [device, *given])
            )
        except OSError:
            if shown >= 0:
                os.close(shown)
            raise
        view = _View(fd, name, once=once)
        view.source = shown
        try:
            os.stat(
                ".", dir_fd=fd
            )  # only once it was answered does the kernel know what may be done
        except OSError:
            self._close(view)
            raise
        return view

    def can_map_ids(self, tree: Tree) -> bool:
        """Return whether this kernel can map the ids of a view's files, as an image's root
        requires.

        Args:
            tree: Of the view's root, with an id map.
        """
        view = self._make(None, once=True)
        try:
            copy = mounts.open_tree("", dir_fd=view.fd, recursive=False)
            os.close(idmap.restricted(copy, tree))
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.EPERM):
                raise
            return False
        finally:
            self._close(view)
        return True

    def use(self, plan: ViewPlan) -> list[Key]:
        """Note that a jail has what was opened for it; what to `release` when it is gone."""
        keys = [key for key in self._views if key[0] == plan["tenant"]]
        for key in keys:
            self._views[key].users += 1
        self.users += 1
        return keys

    def release(self, keys: list[Key]) -> None:
        for key in keys:
            view = self._views.get(key)
            if view is None:
                continue
            view.users -= 1
            if view.users == 0 and view.once:
                self._close(self._views.pop(key))
        self._make_room(0)
        self.users -= 1
        if self._is_retired:
            self.retire()

    def retire(self) -> None:
        """There is another one for jails to come: this one's server ends with the last that it has."""
        self._is_retired = True
        if not self.users:
            self._control.close()

    def _make_room(self, wanted: int = 1) -> None:
        """Unmount those that nobody has had for the longest time."""
        idle = [key for key, view in self._views.items() if not view.users]
        for key in idle[: max(0, len(idle) + wanted - _MOST_IDLE)]:
            self._close(self._views.pop(key))

    def _close(self, view: _View) -> None:
        os.close(view.fd)
        if view.source >= 0:
            os.close(view.source)
        self.space.unmount(view.name)

    def close(self) -> None:
        """Unmount all: nobody answers for them any more."""
        for view in self._views.values():
            self._close(view)
        self._views.clear()
        self._control.close()
