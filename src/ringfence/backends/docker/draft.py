"""From a spec to what a container is made with. Decides; starts nothing."""

from __future__ import annotations

import os
import stat

from ...linux import files
from ...policy.trust import DIRECTORY
from ..local.host import identity
from ..local.mounts import template
from ..local.mounts.mounting import Mounting
from ..local.session import all_mounts, is_below, is_own, must_make, session_root
from . import image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...guest.room import Room
    from ...model.spec import SandboxSpec
    from ..local.mounts.images import Held
    from ..local.mounts.trusted import Trusted
    from ..local.sizes import Sizes
    from .sandbox import DockerSandbox


class Draft:
    """A container under way.

    Args:
        held: What the root is of; None: the template's.
        taken_under: The spec of who was saved, where a snapshot's files are to come into it.

    Attributes:
        trusted: Who ends the TLS of its programs, if anybody.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        held: Held | None,
        taken_under: SandboxSpec | None = None,
    ) -> None:
        self.spec, self.id, self.held = spec, sandbox_id, held
        self.uid = identity.uid_of(spec.user)
        self.restores = taken_under is not None
        self._specs = [spec, *([taken_under] if taken_under else [])]
        self.trusted: Trusted | None = None

    def made_in(self) -> list[str]:
        """Directories of the root that nothing has yet: the engine's own / is root's, so it makes them."""
        wanted: dict[str, None] = {}
        for spec in self._specs:
            for path in (session_root(spec), *(mount.target for mount in spec.mounts)):
                if path == "/":
                    continue
                top = "/" + path.split("/")[1]
                # Of an image all is the user's, also what programs of the host's have elsewhere.
                if (self.held or is_own(path)) and not self._has(top):
                    wanted[top] = None
        return [top for top in wanted if top not in self.files_at_top()]

    def room(self, size: Sizes) -> Room | None:
        """All that may be written; None where an image's files are, which may be anywhere."""
        if self.held:
            return None
        return {
            "size_bytes": size.disk_bytes,
            "inodes": size.inodes,
            "places": [*image.OWN, *self.made_in(), "/dev/shm"],
        }

    def files_at_top(self) -> list[str]:
        """Targets that are not directories, and lie in the engine's own /."""
        hosts = [each for each in all_mounts(self.spec) if each.is_host_path]
        at_top = [each for each in hosts if each.target.count("/") == 1]
        return [
            each.target
            for each in at_top
            if not stat.S_ISDIR(os.stat(each.source).st_mode) and not self._has(each.target)
        ]

    def written(self) -> dict[str, bytes]:
        """Files of ours inside: path to content."""
        found = {**template.written(self.uid), **dict.fromkeys(self.files_at_top(), b"")}
        steps = self.trusted.steps if self.trusted else []
        return found | {path: rest[0] for verb, path, *rest in steps if verb == "file"}

    def shown(self) -> list[str]:
        """Where they are shown: a whole directory of them, or the file."""
        inside = f"{DIRECTORY}/"
        found = [DIRECTORY if path.startswith(inside) else path for path in self.written()]
        return list(dict.fromkeys(found))

    def complete(self, sandbox: DockerSandbox) -> None:
        """See to what takes a container that runs."""
        if sandbox.namespace_fds:
            steps = self.trusted.steps if self.trusted else []
            binds = [step for step in steps if step[0] == "bind_inside"]
            sandbox.furnish(Mounting(self.spec, binds))
        else:
            for mount in self.spec.mounts:
                sandbox.files.make_dir(mount.target)
        root = session_root(self.spec)
        if must_make(root, sandbox.mounts, of_image=self.held is not None):
            sandbox.files.make_dir(root)

    def _has(self, path: str) -> bool:
        """Return whether `path` exists in the image, its own symlinks resolved inside it."""
        if self.held is None:
            return any(is_below(path, each) for each in image.OWN)
        if any(step[1] == path for step in template.image_guest_root(self.uid)):
            return True
        top = os.open(self.held.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            resolve = files.RESOLVE_IN_ROOT | files.RESOLVE_NO_MAGICLINKS
            os.close(files.openat2(top, path, os.O_PATH, resolve=resolve))
        except OSError:
            return False
        finally:
            os.close(top)
        return True
