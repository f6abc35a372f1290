"""Sandboxes whose root is an OCI image's files, below the private writable layer."""

from __future__ import annotations

import os
from dataclasses import replace

from ....errors import InvalidRequest, RingfenceError
from ....images import config
from ....images.store import ImageStore
from ....snapshots.layers import as_file
from ..host import identity
from . import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ....launcher.plan import Tree
    from ....model.image import Image
    from ....model.spec import SandboxSpec

    T = TypeVar("T")
    Names = dict[bytes, dict[bytes, int]]

_NOT_WRITABLE = ("proc", "sys", "dev")


class Held:
    """An image in use: its files stay until `close`, by whoever has a copy of the lock.

    Args:
        lock: See `ImageStore.hold`.

    Attributes:
        owner: User and group on the host that all its files belong to.
    """

    def __init__(self, image: Image, root: str, lock: int) -> None:
        self.image, self.root = image, root
        self._fd = lock
        info = os.stat(self.root)
        self.owner = info.st_uid, info.st_gid
        self.tree: Tree = {
            "source": self.root,
            "device": info.st_dev,
            "inode": info.st_ino,
            "attributes": template.READ_ONLY,
            "idmap": "",
            "idmap_gid": "",
            "fd": -1,
        }

    ids: tuple[str, ...] = ()  # of snapshots over it: see `layered.Layered`
    lower = ids

    @property
    def locks(self) -> list[int]:
        """Descriptors of what keeps the files; ours to close."""
        return [self._fd]

    @property
    def trees(self) -> list[Tree]:
        """Trees to be mounted below the writable layer."""
        return [self.tree]

    def appear_to(self, first_host_id: int, uid: int, *, is_trusted_root: bool) -> None:
        """Map the files' owner to the sandbox's user, `uid` inside."""
        self.appear_as(identity.host_id(first_host_id, uid), is_trusted_root)

    def furniture(self, uid: int, *, python_env: bool) -> bytes:
        """Return the packed trees and steps that furnish the root."""
        del python_env  # an image has its own
        return template.packed_for_image(uid)

    def appear_as(self, host_id: int, is_trusted_root: bool) -> None:
        """Map the files' owner to the sandbox's user; rootless needs no map: there it is the same user."""
        if is_trusted_root:
            uid, gid = self.owner
            self.tree["idmap"], self.tree["idmap_gid"] = f"{uid} {host_id} 1", f"{gid} {host_id} 1"

    def directories(self) -> list[str]:
        """List the root directories that Landlock lets it write: all but the kernel's own."""
        with os.scandir(self.root) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        return [f"/{name}" for name in sorted(names) if name not in _NOT_WRITABLE]

    def open_names(self) -> int:
        return as_file(self.names())

    def names(self) -> Names:
        """Names and change times of its files, as `launcher.helpers.layers` reads them.

        Now, not when it was unpacked: a ctime changes with every new link to a file.
        """
        base = os.fsencode(self.root)
        found: Names = {}
        for directory, _, _ in os.walk(base):
            with os.scandir(directory) as entries:
                inside = {e.name: e.stat(follow_symlinks=False).st_ctime_ns for e in entries}
            found[directory[len(base) + 1 :]] = inside
        return found

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def made_from(spec: SandboxSpec, make: Callable[[SandboxSpec, Held], T]) -> T:
    """`make` of what `hold` gives; where that fails, the image is let go. Raises as `hold` does."""
    spec, held = hold(spec)
    try:
        return make(spec, held)
    except BaseException:
        held.close()
        raise


def hold(spec: SandboxSpec, store: ImageStore | None = None) -> tuple[SandboxSpec, Held]:
    """The spec with everything that the image decides filled in, and the image, held.

    Raises:
        ImageNotFound: It is not on this machine.
        InvalidRequest: It is not the name of an image, or the spec asks for what an image has not.
    """
    assert spec.image is not None
    if spec.python_env:
        raise InvalidRequest(
            "an image has its own Python or none; the caller's is not shown in it",
            field="python_env",
        )
    store = store or ImageStore()
    image = store.find(spec.image)
    held = Held(image, os.path.realpath(store.root(image)), store.hold(image))
    try:
        account = config.Account(image.uid, image.user, image.home)
        if spec.user is not None or account.uid is None:
            account = config.account_of(spec.user or image.user, held.root)
        workdir = config.place_of(spec.workdir or image.workdir, held.root)
    except BaseException:
        held.close()
        raise
    env = {
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        **{name: value for name, value in image.env.items() if _is_name(name)},
        **spec.env,
    }
    # By its id: a snapshot is restored over these very files, whatever the name means by then.
    spec = replace(spec, image=image.id, user=str(account.uid), env=env, workdir=workdir)
    return spec, held


def resolved(spec: SandboxSpec) -> SandboxSpec | None:
    """The spec as `hold` has it, for who holds the image's files already; None where nothing is meant."""
    try:
        wanted, held = hold(spec)
    except RingfenceError:
        return None
    held.close()
    return wanted


def _is_name(name: str) -> bool:
    return name.isascii() and name.isidentifier()
