"""Files of templates beside the database: logs of builds, uploads, and downloads of pip."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress

from ...errors import FileNotFound, InvalidRequest, QuotaExceeded, StorageFull, TooLarge
from ...model.template import check_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...store.directory import StateDirectory

_LONGEST_LINE = 4096
_MOST_PIP_BYTES = 2 << 30
_PARTIAL = ".partial-"
_ABANDONED_S = 3600.0
"""Of a file on its way that nothing was added to: who wrote it was killed."""


def short(owner: str) -> str:
    """A name for files that stands for an owner."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


class Places:
    """The directory of templates; without a state directory it ends with this object."""

    def __init__(self, directory: StateDirectory | None) -> None:
        self._is_own = directory is None
        self._path = os.path.join(directory.path, "templates") if directory else ""
        self._lock = threading.Lock()
        self.incoming: Counter[str] = Counter()  # bytes of uploads under way, by owner

    def path(self, *names: str) -> str:
        """A path below; its directory is made."""
        with self._lock:
            if not self._path:
                self._path = tempfile.mkdtemp(prefix="ringfence-templates-")
        path = os.path.join(self._path, *names)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return path

    def close(self) -> None:
        """Remove what has no state directory to be kept in."""
        if self._is_own and self._path:
            shutil.rmtree(self._path, ignore_errors=True)

    def count_incoming(self, owner: str, more: int) -> int:
        """Count bytes of an upload under way; how many there are of this owner now."""
        with self._lock:  # several of an owner come at once, each in a thread
            self.incoming[owner] += more
            return self.incoming[owner]

    # -- uploads --------------------------------------------------------------------------------

    def upload(self, owner: str, digest: str) -> str:
        """The path of an upload.

        Raises:
            FileNotFound: This owner has none of that digest.
        """
        path = self.path("uploads", short(owner), check_digest(digest, "copy"))
        if not os.path.exists(path):
            raise FileNotFound(
                f"no upload {digest}", path=digest, hint="PUT /v1/uploads/SHA256 first"
            )
        os.utime(path)
        return path

    def has(self, owner: str, digest: str) -> bool:
        return os.path.exists(self.path("uploads", short(owner), check_digest(digest, "digest")))

    def named(self, owner: str, name: str) -> str:
        """The digest of what was uploaded under another name; empty where there is none."""
        path = self.path("uploads", short(owner), f"name-{check_digest(name, 'hash')}")
        with suppress(FileNotFoundError, FileNotFound), open(path, encoding="ascii") as file:
            digest = file.read()
            self.upload(owner, digest)
            return digest
        return ""

    def uploaded_bytes(self, owner: str) -> int:
        return _size_of(os.path.dirname(self.path("uploads", short(owner), "x")))

    def tidy(self, keep_s: float, needed: set[str], owner: str = "") -> None:
        """Remove uploads that were not used for long and that no build needs.

        Args:
            owner: Whose; empty for all.
        """
        now = time.time()
        whose = ("uploads", short(owner), "x") if owner else ("uploads", "x")
        for here, _, names in os.walk(os.path.dirname(self.path(*whose))):
            for name in names:
                path = os.path.join(here, name)
                is_partial = name.startswith(_PARTIAL)
                with suppress(FileNotFoundError):
                    unused_s = now - os.stat(path).st_mtime
                    if name not in needed and unused_s > (_ABANDONED_S if is_partial else keep_s):
                        os.unlink(path)

    # -- downloads of pip -----------------------------------------------------------------------

    def pip(self, owner: str) -> str:
        """The directory of an owner's downloads, emptied where it has grown large."""
        path = self.path("pip", short(owner), "")
        if _size_of(path) > _MOST_PIP_BYTES:
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path, mode=0o700, exist_ok=True)
        return path.rstrip("/")

    # -- logs -----------------------------------------------------------------------------------

    def log(self, build_id: str) -> str:
        return self.path("logs", f"{build_id}.ndjson")

    def remove_log(self, build_id: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.log(build_id))

    def read_log(self, build_id: str, offset: int, most: int) -> bytes:
        """Return whole lines of a log from `offset` on, `most` bytes at most.

        Raises:
            InvalidRequest: It is not the beginning of a line.
        """
        try:
            with open(self.log(build_id), "rb") as file:
                if offset > os.fstat(file.fileno()).st_size:
                    return b""  # a file system refuses to seek far beyond its largest file
                file.seek(max(0, offset - 1))
                before = file.read(1) if offset else b"\n"
                if before not in (b"\n", b""):
                    raise InvalidRequest("is not the beginning of a line", field="offset")
                data = file.read(most)
        except FileNotFoundError:
            return b""
        return data[: data.rfind(b"\n") + 1]


def _size_of(directory: str) -> int:
    """Bytes of all files below; of what goes away meanwhile, none."""
    size = 0
    for here, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(here, name)).st_size
    return size


class Upload:
    """A file on its way; blocks, and is of one thread at a time.

    Args:
        most: Bytes that it may have.
        left: Bytes that its owner may have beside what is on its way.
    """

    def __init__(self, places: Places, owner: str, most: int, left: Callable[[], int]) -> None:
        self._places, self._owner, self._most = places, owner, most
        self._left, self._digest, self.size = left(), hashlib.sha256(), 0
        self._place = os.path.dirname(places.path("uploads", short(owner), "x"))
        fd, self._path = tempfile.mkstemp(prefix=_PARTIAL, dir=self._place)
        self._file = open(fd, "wb")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Add bytes.

        Raises:
            TooLarge, QuotaExceeded, StorageFull: It is abandoned.
        """
        self.size += len(data)
        incoming = self._places.count_incoming(self._owner, len(data))
        if self.size > self._most:
            raise TooLarge(f"the upload is larger than {self._most} bytes")
        if incoming > self._left:
            raise QuotaExceeded(
                "this client's templates and uploads are as large as they may be",
                field="bytes",
                hint="delete a template, or ask an admin to raise `manager.templates.bytes`",
            )
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as exc:
            raise StorageFull(f"the upload was not stored: {exc.strerror}") from exc

    def finish(self, digest: str = "", name: str = "") -> str:
        """Put it in place, whole; its SHA-256.

        Args:
            digest: What its SHA-256 must be; empty for whatever it is.
            name: Another name, also a digest, under which it can be found.

        Raises:
            InvalidRequest: It is another one.
        """
        found = self._digest.hexdigest()
        if digest and found != digest:
            raise InvalidRequest(f"the content's SHA-256 is {found}", field="digest")
        try:
            self._file.close()
        except OSError as exc:
            raise StorageFull(f"the upload was not stored: {exc.strerror}") from exc
        path = self._places.path("uploads", short(self._owner), found)
        os.replace(self._path, path)
        if name:
            # Two uploads of one name may end at once.
            fd, beside = tempfile.mkstemp(prefix=_PARTIAL, dir=self._place)
            with open(fd, "w", encoding="ascii") as file:
                file.write(found)
            os.replace(beside, os.path.join(self._place, f"name-{name}"))
        return found

    def close(self) -> None:
        """Let go of it; what was not finished is removed."""
        self._places.count_incoming(self._owner, -self.size)
        self.size = 0
        with suppress(OSError):
            self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)


class Log:
    """The log of one build as it grows, a JSON object a line.

    Args:
        most: Bytes of output that it takes.
    """

    def __init__(self, path: str, most: int, wake: Callable[[], None]) -> None:
        self._file, self._most, self._wake = open(path, "ab"), most, wake  # noqa: SIM115
        self._left, self.step = [bytearray(), bytearray()], 0
        self._used = self._file.tell()

    def say(self, message: str, level: str = "info") -> None:
        """Add a line of our own."""
        text = message[:_LONGEST_LINE]
        form = {"at": round(time.time(), 3), "step": self.step, "level": level, "message": text}
        line = json.dumps(form, separators=(",", ":")).encode() + b"\n"
        self._used += len(line)
        self._file.write(line)
        self._file.flush()
        self._wake()

    def output(self, stream: int) -> Callable[[bytes], None]:
        """A function that takes what a program prints."""
        left = self._left[stream]

        def take(data: bytes) -> None:
            if self._used + len(data) > self._most:
                raise TooLarge(
                    f"the build printed more than {self._most} bytes",
                    hint="send the output of the step to a file or /dev/null",
                )
            self._used += len(data)
            left.extend(data)
            *lines, rest = bytes(left).split(b"\n")
            left[:] = rest
            if len(rest) > _LONGEST_LINE:
                lines.append(rest)
                left.clear()
            for each in lines:
                self.say(each.decode("utf-8", "replace").rstrip("\r"), "debug")

        return take

    def end_lines(self) -> None:
        for left in self._left:
            if left:
                self.say(bytes(left).decode("utf-8", "replace"), "debug")
                left.clear()

    def close(self) -> None:
        self._file.close()
