"""Every public error: what happened, whether to retry, and what to do about it.

`code` is stable: programs may compare it, and the wire form carries it. A failing
command is not an error; it is an `ExecResult` with a non-zero exit code.
"""

# ruff: noqa: N818 (the names say what happened; `code` is what programs compare)

from __future__ import annotations

import errno

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, without paying for the import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar


class RingfenceError(Exception):
    """The root of every error that Ringfence raises on purpose.

    Args:
        message: What happened, naming the thing it happened to.
        hint: What the reader can do about it; empty takes the class's, which is empty when nothing helps.
        field: The part of the request at fault, dotted (`limits.memory_bytes`).
        retryable: Whether the same call may succeed later; None takes the class's default.
    """

    code: ClassVar[str] = "ringfence_error"
    usual_hint: ClassVar[str] = ""  # where whoever raises it knows nothing better
    retryable: bool = False

    def __init__(
        self, message: str, *, hint: str = "", field: str = "", retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint
        self.field = field
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        """Format the error as one line with cause and fix, for tracebacks and logs."""
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.message}" + (f" ({self.hint})" if self.hint else "")

    def to_json(self) -> dict[str, Any]:
        """The wire form; read back by `error_from_json`."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "field": self.field,
            "retryable": self.retryable,
            **{name: getattr(self, name) for name in self.details},
        }

    details: ClassVar[tuple[str, ...]] = ()  # further attributes in the wire form


def _shortened(text: str, most: int) -> str:
    """Cut the middle out of a long text: errors repeat what was sent, which may be megabytes."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


class InvalidRequest(RingfenceError):
    """The request is malformed; `field` names the part. Nothing was started."""

    code = "invalid_request"

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(_shortened(message, 400), **more)
        self.field = _shortened(self.field, 100)


class BadJson(RingfenceError):
    """The text is not JSON at all."""

    code = "bad_json"
    usual_hint = (
        'as {"name": "text", "count": 1}: names and texts in double quotes, no comma at the end'
    )


class SandboxNotFound(RingfenceError):
    """No sandbox or session of this id, or it is another client's."""

    code = "sandbox_not_found"
    usual_hint = (
        "it has ended or belongs to another key: "
        "`ringfence list` and GET /v1/sandboxes list running sandboxes"
    )


class SnapshotNotFound(RingfenceError):
    """No snapshot of this id."""

    code = "snapshot_not_found"
    usual_hint = (
        "list snapshots with Sandbox.snapshots(), `ringfence snapshot list` or GET /v1/snapshots"
    )


class SnapshotCorrupt(RingfenceError):
    """The snapshot's content is not what was saved; nothing was restored."""

    code = "snapshot_corrupt"


class ImageNotFound(RingfenceError):
    """No image of this name is on this machine, or the registry has none that fits it."""

    code = "image_not_found"
    usual_hint = (
        "`ringfence image list` shows those of this machine, `ringfence image pull` fetches others"
    )


class ImageRefused(RingfenceError):
    """An image that is damaged, is not what its digest says, or is made to do harm."""

    code = "image_refused"


class RegistryError(RingfenceError):
    """A registry of images could not be reached, or did not do what was asked."""

    code = "registry"
    retryable = True


class ExecNotFound(RingfenceError):
    """No exec of this id in the sandbox."""

    code = "exec_not_found"
    usual_hint = (
        "`ringfence logs --list SANDBOX` and GET /v1/sandboxes/ID/execs list those that are kept"
    )


class Unsupported(RingfenceError):
    """This backend cannot do this, on this host or at all.

    Args:
        message: May be empty; then it is made from `backend` and `operation`.
        operation: The verb or capability asked for, such as `snapshot`.
    """

    code = "unsupported"
    details = ("backend", "operation")

    def __init__(
        self,
        message: str = "",
        *,
        backend: str = "",
        operation: str = "",
        hint: str = "",
        field: str = "",
        retryable: bool | None = None,
    ) -> None:
        text = message or f"backend {backend!r} does not support {operation}"
        super().__init__(text, hint=hint, field=field, retryable=retryable)
        self.backend = backend
        self.operation = operation


class LifecycleError(RingfenceError):
    """The sandbox's state does not allow this operation."""

    code = "lifecycle"


class ExecError(RingfenceError):
    """The process could not be started, so that there is no result."""

    code = "exec_failed"


class ExecNotStarted(RingfenceError):
    """The process never began, so that starting it again cannot run it twice."""

    code = "exec_not_started"
    usual_hint = "start the exec again; with the same idempotency key it runs once"
    retryable = True


class TimeoutExceeded(RingfenceError):
    """Ringfence's own operation took too long. (A command's timeout is a result.)"""

    code = "timeout"
    retryable = True


class NetworkPolicyError(RingfenceError):
    """This network policy cannot be enforced here; nothing was opened instead."""

    code = "network_policy"


class IsolationError(RingfenceError):
    """A protection could not be put in place; the sandbox was not started."""

    code = "isolation_failed"


class BackendUnavailable(RingfenceError):
    """No backend on this host can do what was asked; the message says why, one by one."""

    code = "backend_unavailable"


class SandboxLost(RingfenceError):
    """The sandbox went away by itself; nothing is known of its processes."""

    code = "sandbox_lost"


class ConnectError(RingfenceError):
    """Nothing inside the sandbox accepts connections there, not yet or not any more."""

    code = "connect_failed"
    retryable = True


class ResourceExhausted(RingfenceError):
    """A quota or the host has no room now."""

    code = "resource_exhausted"
    retryable = True


class QuotaExceeded(ResourceExhausted):
    """The caller has as much as it may: waiting makes no room, giving something back does."""

    code = "quota_exceeded"
    retryable = False


class StorageFull(ResourceExhausted):
    """A disk has no room, or no inodes, for what was to be written; nothing of it was."""

    code = "storage_full"


class StateInUse(RingfenceError):
    """Another process holds the state directory."""

    code = "state_in_use"
    retryable = True


class StateTooNew(RingfenceError):
    """The state was written by a newer version; it was not touched."""

    code = "state_too_new"


class IoError(RingfenceError):
    """Reading or writing on the host failed."""

    code = "io"


class NotFound(RingfenceError):
    """The server has nothing at this address."""

    code = "not_found"
    usual_hint = "GET /v1/openapi.json lists every path and its methods"


class Unauthenticated(RingfenceError):
    """The server does not know who asks: no key, or one that it does not have."""

    code = "unauthenticated"


class Forbidden(RingfenceError):
    """The server knows who asks, and does not let them."""

    code = "forbidden"


class TooLarge(RingfenceError):
    """More was sent than the server takes."""

    code = "too_large"


class TooSlow(RingfenceError):
    """The rest of a request did not come in time."""

    code = "too_slow"
    retryable = True


class TooManyRequests(RingfenceError):
    """This client asks for more at once than its share."""

    code = "too_many_requests"
    retryable = True


class ExecutionNotFound(RingfenceError):
    """The execution service knows no execution of this id, or it is another client's."""

    code = "execution_not_found"
    usual_hint = "the execution has expired or belongs to another key: execute it again"


class ExecutionTimeout(RingfenceError):
    """An execution took longer than it was given; its whole process tree is gone."""

    code = "execution_timeout"


class ExecutionKilled(RingfenceError):
    """An execution was killed because somebody asked for that."""

    code = "execution_killed"


class ResourceLimitExceeded(RingfenceError):
    """An execution was ended by one of its limits."""

    code = "resource_limit_exceeded"


class SandboxNotSupported(RingfenceError):
    """The tier asked for cannot be had here; nothing weaker was taken instead."""

    code = "sandbox_not_supported"


class ServerUnreachable(RingfenceError):
    """No Ringfence server answers there, or the connection broke."""

    code = "server_unreachable"
    retryable = True


class TaskFailed(RingfenceError):
    """A background task of Ringfence ended with an unexpected error."""

    code = "task_failed"


class FileError(RingfenceError):
    """A file operation inside a sandbox failed.

    Args:
        path: The path as the caller gave it.
    """

    code = "file_error"
    details = ("path",)

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        hint: str = "",
        field: str = "",
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, hint=hint, field=field, retryable=retryable)
        self.path = path


class FileNotFound(FileError):
    """The path, or a directory on the way to it, does not exist."""

    code = "file_not_found"
    usual_hint = (
        "check the path with files.list(DIRECTORY), or create a directory with files.make_dir(PATH)"
    )


class NotADirectory(FileError):
    """A directory was needed and something else is there."""

    code = "not_a_directory"
    usual_hint = "name a directory; a file is read with files.read(PATH)"


class IsADirectory(FileError):
    """A file was needed and a directory is there."""

    code = "is_a_directory"
    usual_hint = "add the name of a file, as DIRECTORY/a.txt; files.list(DIRECTORY) lists them"


class DirectoryNotEmpty(FileError):
    """A directory with entries is removed only with `recursive=True`."""

    code = "directory_not_empty"
    usual_hint = "remove(PATH, recursive=True) removes it with all that is in it"


class FileExists(FileError):
    """Something is already at the path."""

    code = "file_exists"


class PermissionDenied(FileError):
    """The sandbox's user may not do this to the path."""

    code = "permission_denied"
    usual_hint = "write below the home directory, /tmp or a mount with :rw"


_FILE_ERRORS: dict[int, type[FileError]] = {
    errno.ENOENT: FileNotFound,
    errno.ENOTDIR: NotADirectory,
    errno.EISDIR: IsADirectory,
    errno.ENOTEMPTY: DirectoryNotEmpty,
    errno.EEXIST: FileExists,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def file_error(number: int, path: str, text: str = "", hint: str = "") -> RingfenceError:
    """The typed error for errno `number` met at `path` inside a sandbox.

    A full disk or quota becomes `StorageFull`, a lack of descriptors or of inotify instances
    `ResourceExhausted`: the path is not at fault.
    """
    import os

    message = f"{path}: {text or os.strerror(number)}"
    if number == errno.ENOENT and not hint and (path.startswith("~/") or "/~/" in path):
        hint = "only a shell expands ~: leave it out, a relative path starts at the home directory"
    if number in _NO_ROOM:
        return StorageFull(message, hint="free space in the sandbox or raise disk/inodes")
    if number in _NO_DESCRIPTOR:
        more = "close files or watches, or raise `ulimit -n` and fs.inotify.max_user_instances"
        return ResourceExhausted(message, hint=more)
    return _FILE_ERRORS.get(number, FileError)(message, path=path, hint=hint)


def host_file_error(number: int, path: str) -> RingfenceError:
    """The typed error for errno `number` met at `path` on the host, by the library itself."""
    hint = "give a path on this host; a relative path starts at the current directory"
    return file_error(number, path, hint=hint)


def error_from_json(data: Mapping[str, Any]) -> RingfenceError:
    """The error that `to_json` described; an unknown code becomes a `RingfenceError`.

    An unknown code is kept on the instance, so that an old client can still show it.
    """
    code = str(data.get("code", RingfenceError.code))
    cls = _by_code().get(code, RingfenceError)
    error = cls(
        str(data.get("message", "")),
        hint=str(data.get("hint", "")),
        field=str(data.get("field", "")),
        retryable=bool(data.get("retryable", False)),
    )
    for name in cls.details:
        setattr(error, name, str(data.get(name, "")))
    if cls.code != code:
        error.__dict__["code"] = code
    return error


def _by_code() -> dict[str, type[RingfenceError]]:
    found: dict[str, type[RingfenceError]] = {}
    waiting = [RingfenceError]
    while waiting:
        cls = waiting.pop()
        found.setdefault(cls.code, cls)
        waiting.extend(cls.__subclasses__())
    return found
