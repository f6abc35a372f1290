"""Images on this machine: layers by digest, one unpacked root file system per image.

    blobs/SHA256      layers and configurations as they came, checked; `SHA256.partial` on their way
    roots/ID/root     the files of an image, never written after they appeared
    roots/ID/image    its configuration; the lock that whoever uses the files holds
    names/NAME.json   what a name means here
    steps/KEY.json    what came of a step of a template: a cache, which `collect` empties
    builds/XX         locks of steps that are being built, and the layer on its way

A root appears by one rename. What a crash leaves half made has another name, and `collect` removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import ImageNotFound, ImageRefused
from ..model.image import Image
from . import config
from .reference import Reference, is_digest
from .unpack import Layer, check, unpack
from .unpacker import remove_tree

_PARTIAL = ".partial"


def default_directory() -> str:
    """Where this user's images are kept; the variable RINGFENCE_IMAGES says otherwise."""
    if given := os.environ.get("RINGFENCE_IMAGES"):
        return os.path.abspath(given)
    if os.geteuid() == 0:
        return "/var/lib/ringfence/images"
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(home, "ringfence", "images")


class ImageStore:
    """The images in `directory`, which is made (mode 0700) when the first one comes."""

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory or default_directory()

    # -- asking -------------------------------------------------------------------------------

    def find(self, name: str) -> Image:
        """Find an image on this machine by name or full `sha256:` id.

        Raises:
            ImageNotFound: No such image.
        """
        if is_digest(name):
            return self._find_id(name)
        path = self._name(str(Reference.parse(name)))
        try:
            with open(path, encoding="utf-8") as file:
                return Image.from_json(json.load(file))
        except FileNotFoundError:
            raise ImageNotFound(
                f"no image {name!r} on this machine",
                field="image",
                hint=f"ringfence image pull {name}",
            ) from None

    def _find_id(self, image_id: str) -> Image:
        for image in self.images():
            if image.id == image_id:
                return image
        for entry in _entries(os.path.join(self.directory, "steps")):
            step = self.step(entry.removesuffix(".json"))
            if step is not None and step.id == image_id:
                return step
        raise ImageNotFound(f"no image {image_id} on this machine", field="image")

    def images(self) -> list[Image]:
        """Every name and its image, in order of name."""
        found = []
        for entry in _entries(os.path.join(self.directory, "names")):
            path = os.path.join(self.directory, "names", entry)
            # One that is removed meanwhile hides none of the others: `collect` keeps what is listed.
            with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
                found.append(Image.from_json(json.load(file)))
        return sorted(found, key=lambda image: image.reference)

    def root(self, image: Image) -> str:
        """The directory with its files, to be mounted read-only."""
        return os.path.join(self._root(image.id), "root")

    def hold(self, image: Image) -> int:
        """A descriptor; until it is closed, by everybody who has it, the files stay.

        Raises:
            ImageNotFound: They are gone.
        """
        path = os.path.join(self._root(image.id), "image")
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(fd), os.stat(path)):  # else `collect` was quicker
                stack.pop_all()
                return fd
        raise ImageNotFound(
            f"the files of {image.reference} are gone", field="image", hint="pull it again"
        )

    # -- adding -------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        configuration: bytes,
        layers: Sequence[Layer],
        *,
        digest: str = "",
        **bounds: int,
    ) -> Image:
        """Unpack an image, unless its files are here already, and give it a name.

        Args:
            configuration: The image's, as JSON; its digest is the id.

        Raises:
            ImageRefused: A layer is not what the configuration says, whether the files are here or not,
                or is made to do harm.
        """
        image_id = f"sha256:{hashlib.sha256(configuration).hexdigest()}"
        told = config.read(configuration)
        diff_ids = told.diff_ids
        if diff_ids and len(diff_ids) != len(layers):
            raise ImageRefused(
                f"{name} has {len(layers)} layers and its configuration names {len(diff_ids)}"
            )
        checked = [
            replace(layer, diff_id=diff_ids[i] if diff_ids else layer.diff_id)
            for i, layer in enumerate(layers)
        ]
        unread = [layer for layer in checked if layer.diff_id and not layer.is_known]
        if unread and os.path.exists(self._root(image_id)):
            check(unread)  # what would not do where the image is new does not do here
        with self._locked():
            if not os.path.exists(self._root(image_id)):
                self._make_root(image_id, configuration, checked, bounds)
            image = self._describe(name, image_id, digest, told)
            self._write_name(image)
        return image

    def scratch(self, configuration: bytes) -> Image:
        """An image without files, on which `derive` puts layers; nameless."""
        image_id = f"sha256:{hashlib.sha256(configuration).hexdigest()}"
        with self._locked():
            if not os.path.exists(self._root(image_id)):
                self._make_root(image_id, configuration, [], {})
            return self._describe("scratch", image_id, "", config.read(configuration))

    def derive(
        self,
        parent: Image,
        changes: Mapping[str, object],
        layers: Sequence[Layer],
        *,
        whole: bool = False,
    ) -> Image:
        """An image with layers on top of another's files, which it shares by hard links; nameless.

        Args:
            changes: Parts of the configuration that differ: Env, User, WorkingDir, Cmd, ...
            layers: Each with its `diff_id`.
            whole: The layers may leave out directories that they do not change.
        """
        with open(os.path.join(self._root(parent.id), "image"), "rb") as file:
            configuration = config.derived(file.read(), changes, [one.diff_id for one in layers])
        image_id = f"sha256:{hashlib.sha256(configuration).hexdigest()}"
        with self._locked():
            if not os.path.exists(self._root(image_id)):
                self._make_root(image_id, configuration, layers, {}, self.root(parent), whole)
            return self._describe(parent.reference, image_id, "", config.read(configuration))

    def name(self, image: Image, name: str) -> Image:
        """Let `name` mean an image that is here."""
        named = replace(image, reference=str(Reference.parse(name)), digest="")
        with self._locked():
            self._write_name(named)
        return named

    @contextlib.contextmanager
    def building(self, key: str) -> Iterator[str]:
        """Hold the lock of a template step, so that of two builders the second finds its result.

        256 locks serve all keys: a builder holds one at a time. The value is a path for its layer.
        """
        path = self._made("builds", key[:2])
        layer = os.path.join(path, "layer")
        with _flocked(path, fcntl.LOCK_EX):
            try:
                yield layer
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(layer)

    def remember_step(self, key: str, image: Image) -> None:
        """Store the result of a template step, until `collect`."""
        self._made("steps")
        self._write_whole(self._step(key), json.dumps(image.to_json()).encode())

    def step(self, key: str) -> Image | None:
        """Find the stored result of a template step, if its files still exist."""
        try:
            with open(self._step(key), encoding="utf-8") as file:
                image = Image.from_json(json.load(file))
        except FileNotFoundError:
            return None
        return image if os.path.exists(self._root(image.id)) else None

    def _step(self, key: str) -> str:
        return os.path.join(self.directory, "steps", f"{key.removeprefix('sha256:')}.json")

    def _make_root(
        self,
        image_id: str,
        configuration: bytes,
        layers: Sequence[Layer],
        bounds: dict[str, int],
        base: str = "",
        whole: bool = False,
    ) -> None:
        roots = self._made("roots")
        partial = tempfile.mkdtemp(prefix=_PARTIAL, dir=roots)
        try:
            root = os.path.join(partial, "root")
            os.mkdir(root, 0o755)
            size = _link_tree(base, root, whole=whole or not layers) if base else 0
            if layers:
                size += unpack(layers, root, **bounds)
            with open(os.path.join(partial, "image"), "wb") as file:
                file.write(configuration)
            with open(os.path.join(partial, "size"), "w", encoding="ascii") as text:
                text.write(str(size))
            os.rename(partial, self._root(image_id))
        except BaseException:
            _remove(partial)
            raise

    def _describe(self, name: str, image_id: str, digest: str, told: config.Config) -> Image:
        with open(os.path.join(self._root(image_id), "size"), encoding="ascii") as file:
            size = int(file.read())
        root = os.path.join(self._root(image_id), "root")
        account = config.account_of(told.user, root, unknown=True)
        return Image(
            reference=str(Reference.parse(name)),
            id=image_id,
            digest=digest,
            size_bytes=size,
            created_at=time.time(),
            uid=account.uid,
            user=account.name,
            home=account.home,
            workdir=told.workdir,
            env=told.env,
            entrypoint=told.entrypoint,
            command=told.command,
            labels=told.labels,
        )

    def _write_name(self, image: Image) -> None:
        self._made("names")
        self._write_whole(self._name(image.reference), json.dumps(image.to_json()).encode())

    # -- removing -----------------------------------------------------------------------------

    def remove(self, name: str) -> Image:
        """Forget a name; `collect` removes files that no name means any more."""
        try:
            image = self.find(name)
        except ImageNotFound as exc:
            exc.hint = "see `ringfence image list`"  # who wants it gone is not to pull it
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name(image.reference))
        return image

    def collect(self) -> tuple[int, list[str]]:
        """Remove what no name means: roots that nobody uses, layers, what was half made.

        Returns:
            The bytes of roots and blobs removed; the ids that are still in use.
        """
        freed, in_use = 0, []
        with self._locked():
            images = self.images()
            wanted = {image.id for image in images}
            for entry in _entries(os.path.join(self.directory, "roots")):
                image_id = f"sha256:{entry}"
                if image_id in wanted:
                    continue
                path = os.path.join(self.directory, "roots", entry)
                if entry.startswith(_PARTIAL) or (path := _set_aside(path)):
                    freed += _size_of(path)
                    _remove(path)
                else:
                    in_use.append(image_id)
            for entry in _entries(os.path.join(self.directory, "steps")):
                if self.step(entry.removesuffix(".json")) is None:
                    os.unlink(os.path.join(self.directory, "steps", entry))
            self._remove_layers()
            for entry in _entries(self.directory):
                if entry.startswith(_PARTIAL):
                    os.unlink(os.path.join(self.directory, entry))
            freed += self._remove_blobs(keep=self._blobs_of(wanted | set(in_use)))
        return freed, in_use

    def _remove_layers(self) -> None:
        """Remove layers that killed builders left."""
        for entry in _entries(os.path.join(self.directory, "builds")):
            path = os.path.join(self.directory, "builds", entry)
            with (
                contextlib.suppress(BlockingIOError, FileNotFoundError),
                _flocked(path, fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                os.unlink(os.path.join(path, "layer"))

    def _remove_blobs(self, keep: set[str]) -> int:
        """All but these; none while somebody fetches, whose blobs are no image's yet."""
        freed, blobs = 0, os.path.join(self.directory, "blobs")
        with (
            contextlib.suppress(BlockingIOError, FileNotFoundError),
            _flocked(blobs, fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            for entry in set(os.listdir(blobs)) - keep:
                freed += os.path.getsize(os.path.join(blobs, entry))
                os.unlink(os.path.join(blobs, entry))
        return freed

    def _blobs_of(self, image_ids: set[str]) -> set[str]:
        """Names of the blobs that these images came from, so that the next pull need not fetch them."""
        kept = set()
        for image_id in image_ids:
            path = os.path.join(self._root(image_id), "blobs")
            with (
                contextlib.suppress(FileNotFoundError, ValueError),
                open(path, encoding="ascii") as file,
            ):
                kept |= set(json.load(file))
        return kept

    def remember_blobs(self, image: Image, digests: Sequence[str]) -> None:
        """Keep these blobs as long as the image."""
        names = [digest.removeprefix("sha256:") for digest in digests]
        path = os.path.join(self._root(image.id), "blobs")
        self._write_whole(path, json.dumps(names).encode())

    def _write_whole(self, path: str, data: bytes) -> None:
        """Write a file that is seen with all its content or not at all."""
        fd, partial = tempfile.mkstemp(prefix=_PARTIAL, dir=self.directory)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """While blobs come that no image names yet: `collect` leaves all of them."""
        with _flocked(self._made("blobs"), fcntl.LOCK_SH):
            yield

    def blob(self, digest: str) -> str:
        if not is_digest(digest):
            raise ImageRefused(f"{digest[:80]!r} is not a SHA-256 digest")
        return os.path.join(self._made("blobs"), digest.removeprefix("sha256:"))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock for adding and removing; reading needs none."""
        fd = os.open(
            os.path.join(self._made(), "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _made(self, *names: str) -> str:
        """Make a directory of the store for this user alone, and each above it up to the store's own."""
        path = self.directory
        os.makedirs(path, mode=0o700, exist_ok=True)  # the mode is of the last one only
        for name in names:
            path = os.path.join(path, name)
            os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def _root(self, image_id: str) -> str:
        if not is_digest(image_id):
            raise ImageNotFound(f"{image_id!r} is not the id of an image", field="image")
        return os.path.join(self.directory, "roots", image_id.removeprefix("sha256:"))

    def _name(self, reference: str) -> str:
        # A name may be longer than a file's: its digest is not.
        digest = hashlib.sha256(reference.encode()).hexdigest()
        return os.path.join(self.directory, "names", f"{digest}.json")


def _set_aside(path: str) -> str:
    """Give a root that nobody uses another name, so that nobody begins to; empty where somebody does."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(os.path.join(path, "image"), os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return ""
        # Sandboxes outlive a server that is stopped, and the locks that it had.
        if _is_mounted(os.path.basename(path)):
            return ""
        aside = tempfile.mkdtemp(prefix=_PARTIAL, dir=os.path.dirname(path))
        os.rename(path, aside)
        return aside


def _is_mounted(name: str) -> bool:
    """Return whether a mount of any process, as far as they may be read, lies below a root."""
    seen: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in seen:
                seen.add(namespace)
                with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
                    if f"/roots/{name}/" in file.read():
                        return True
    return False


@contextlib.contextmanager
def _flocked(directory: str, how: int) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _link_tree(base: str, root: str, *, whole: bool) -> int:
    """The files of `base` in the empty directory `root`, by hard links; returns their bytes.

    Args:
        whole: No layer comes on top, which would bring the modes of all directories.
    """
    size, modes = 0, []
    for here, directories, names in os.walk(base):
        there = root + here[len(base) :]
        for name in [*directories, *names]:
            source, target = os.path.join(here, name), os.path.join(there, name)
            info = os.lstat(source)
            if stat.S_ISDIR(info.st_mode):
                os.mkdir(target, 0o700)
                modes.append((target, stat.S_IMODE(info.st_mode)))
            else:
                os.link(source, target, follow_symlinks=False)
                size += info.st_size
    for target, mode in reversed(modes if whole else []):
        os.chmod(target, mode)
    return size


def _entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _remove(path: str) -> None:
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_tree(parent, os.path.basename(path))
    finally:
        os.close(parent)


def _size_of(path: str) -> int:
    try:
        with open(os.path.join(path, "size"), encoding="ascii") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return 0
