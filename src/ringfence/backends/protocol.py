"""The backend contract: the interface between the library and an isolation mechanism.

All calls are synchronous and may come from any thread; the library adds async. Every refusal is
typed: `Unsupported` where the backend lacks the capability, `LifecycleError` where the sandbox's
state forbids it, `InvalidRequest` naming the field where the request is at fault, and `SandboxLost`
where the sandbox ended by itself. A failed call leaves nothing half made.
`ringfence.testing.conformance` checks all of this. What a backend may do besides is in `optional`.

Import this module for annotations only (`if TYPE_CHECKING`): it imports `typing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import BinaryIO

    from ..model.capabilities import BackendReport, Protection
    from ..model.execs.exec import ExecRequest, ExecStatus
    from ..model.files import FileInfo
    from ..model.granted import SandboxCapabilities
    from ..model.mount import Mount
    from ..model.net.netlog import NetworkEvent
    from ..model.net.network import NetworkPolicy
    from ..model.session import ResolvedMount, Session, Snapshot
    from ..model.spec import SandboxSpec
    from ..model.stats import SandboxStats

    Progress = Callable[[int, str], None]
    """Called with the bytes moved so far, framing included, and the path just finished."""


class Backend(Protocol):
    """Maker of sandboxes.

    A server gives these options to a class, or function, that has parameters of these names: `state_dir`, a
    directory for snapshots, and those of `optional.Durable`.
    """

    name: str

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the only tiers that it serves; the first is meant where only the backend is named."""
        ...

    def report(self) -> BackendReport:
        """Report the capabilities on this host, probed, never assumed; never raises."""
        ...

    def provision(self, spec: SandboxSpec) -> BackendSandbox:
        """Build one sandbox, locked down and ready for its first exec.

        Raises:
            InvalidRequest: An unknown profile, template or user, a missing host path, an id
                in use: `field` names it. Nothing was made.
            Unsupported: The tier, the network policy or a limit cannot be had here.
            IsolationError: A protection could not be put in place and `spec.allow_degraded`
                does not name it.
        """
        ...

    def prewarm(self, spec: SandboxSpec) -> WarmSandbox:
        """Build ahead what can be built before anybody's wishes are known.

        Of `spec` only its id and what cannot be bound later matter, such as user and template.

        Raises:
            Unsupported: This backend builds nothing ahead.
        """
        ...

    def restore(
        self,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
    ) -> BackendSandbox:
        """A new sandbox with the snapshot's files, whether or not its session still lives.

        Without `spec` it is the one the snapshot was taken under, with a fresh id, the network
        policy that held then, and `secrets`, which no snapshot contains.

        Raises:
            SnapshotNotFound: No such snapshot.
            SnapshotCorrupt: Its content is not what was saved.
            InvalidRequest: `field` is `secrets` where the policy writes one that is not given.
        """
        ...

    def snapshots(self) -> list[Snapshot]:
        """Every snapshot in the catalogue, oldest first."""
        ...

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot and free its space.

        Raises:
            SnapshotNotFound: No such snapshot, or deleted already.
        """
        ...

    def close(self) -> None:
        """Terminate every sandbox this backend made; idempotent. Snapshots stay."""
        ...


class WarmSandbox(Protocol):
    """A sandbox that waits for whoever gets it. Nothing has run in it, and nothing can."""

    @property
    def id(self) -> str:
        """Of the sandbox that it becomes."""
        ...

    @property
    def alive(self) -> bool:
        """False once the sandbox is known to be dead and cannot be claimed."""
        ...

    def fits(self, spec: SandboxSpec) -> bool:
        """Return whether `claim` can turn it into a sandbox for `spec`.

        Raises:
            InvalidRequest: No sandbox of this backend could fit: an unknown profile or user.
        """
        ...

    def claim(
        self, spec: SandboxSpec, meanwhile: Callable[[], None] | None = None
    ) -> BackendSandbox:
        """Bind all of `spec`: the result is as protected, and as limited, as a new sandbox.

        Raises what `Backend.provision` does; then the warm sandbox has ended, and nothing is left.

        Args:
            meanwhile: Called once before this returns, best of all while the sandbox locks itself
                down: what has to be done anyway need not be waited for. What it raises ends the claim.

        Preconditions: `fits`; `spec.id` is None or its own; claimed once.
        """
        ...

    def discard(self) -> None:
        """End it unused; nothing is left when this returns."""
        ...


class BackendSandbox(Protocol):
    """An isolated environment.

    On a terminated sandbox every call raises `LifecycleError`, except `session`, `stats`,
    `protections`, `network_log` and `terminate`; on a suspended one, `start` and `connect` do.
    """

    @property
    def session(self) -> Session:
        """Id, current state and mounts; `metadata` holds labels, `profile` and `tier`."""
        ...

    @property
    def spec(self) -> SandboxSpec:
        """The spec it was made from, with the current network policy; `id` is None where one was generated."""
        ...

    @property
    def files(self) -> BackendFiles:
        """The files inside."""
        ...

    def start(self, request: ExecRequest) -> BackendExec:
        """Start one process; the sandbox is `running` from then on.

        A command that cannot be found ends with exit code 127, one that cannot be executed
        with 126: these are results. The timeout counts from here; when it passes, the whole
        process tree is dead before `done` becomes readable.

        Raises:
            InvalidRequest: `field` is `user` for a user the sandbox does not have.
            InvalidRequest: `field` is `user` for a user, or `cwd` for a directory, that is not there.
        """
        ...

    def attach(self, mount: Mount) -> ResolvedMount:
        """Add a mount to the live sandbox; running processes see it too.

        Raises:
            InvalidRequest: `field` is `source` for a host path that is not there.
        """
        ...

    def apply_network_policy(self, policy: NetworkPolicy) -> None:
        """Change what can be reached, also for processes that already run, and cut the rest.

        Raises:
            Unsupported, NetworkPolicyError: It cannot be enforced; the old policy holds.
        """
        ...

    def connect(self, port: int) -> socket.socket:
        """A blocking connection to a server inside, on its loopback or on every address.

        Raises:
            ConnectError: Nothing accepts connections there.
            InvalidRequest: `field` is `port` for a number that is no port.
        """
        ...

    def forward(self, port: int, client: socket.socket) -> None:
        """Join a client's connection with one to a server inside; data then needs nobody's help.

        `client` is the backend's from then on. Where nothing accepts, it is reset.

        Raises:
            ConnectError: Nothing accepts connections there.
        """
        ...

    def network_log(self) -> list[NetworkEvent]:
        """List the network events so far, oldest first; bounded.

        Kept are the newest thousand allowed events, the newest thousand of the rest, the first
        event of each of 4,096 destinations whatever its age, and open connections with their bytes
        so far.
        """
        ...

    def suspend(self) -> None:
        """Freeze every process; no effect when already suspended."""
        ...

    def resume(self) -> None:
        """Thaw; no effect on a sandbox that is not suspended."""
        ...

    def snapshot(self, metadata: Mapping[str, str]) -> Snapshot:
        """Save the sandbox's files, without mounts and secrets; it keeps running."""
        ...

    def checkpoint(self, metadata: Mapping[str, str]) -> Snapshot:
        """Save files and memory, and end: `Backend.restore` lets all that ran go on, as often as wanted.

        Each restored sandbox has a hostname and randomness of its own, and is otherwise as it was: its
        spec cannot be changed.

        Raises:
            Unsupported: The backend cannot.
            LifecycleError: Something inside holds what cannot be saved, such as a stream of an exec
                that still runs; the message says what, and the sandbox goes on.
            IoError: It was not saved, and the sandbox has ended.
        """
        ...

    def stats(self) -> SandboxStats:
        """Return the current resource usage, or the last one of an ended sandbox."""
        ...

    def granted(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do; the caller fills in the times.

        Raises:
            LifecycleError: It is suspended, or has ended.
        """
        ...

    def protections(self) -> tuple[Protection, ...]:
        """Read back from the kernel the protections of the host from this sandbox."""
        ...

    def terminate(self) -> None:
        """End every process and free everything; legal in every state, idempotent.

        When it returns no process of the sandbox is left, and every exec's `done` is readable:
        its status is signal 9 with `killed_by` `terminate`, also where the process ended by itself
        at that very moment and nobody could tell any more.
        """
        ...


class BackendExec(Protocol):
    """A running process. The fds are the host's ends, non-blocking, owned by this object.

    Attributes:
        stdin: To write to; None when the request has none (`ExecRequest.has_stdin`). The
            library writes `request.stdin`, not the backend. Use `close_stdin` to end it.
        stdout: To read from until end of file. With a PTY the terminal's master, which then
            is `stdin` too, perhaps as another fd.
        stderr: As stdout; None with a PTY.
        done: Becomes readable, and stays so, when the process has ended. Output may still be
            in the pipes, and a surviving child may still hold them.
    """

    @property
    def id(self) -> str: ...
    @property
    def stdin(self) -> int | None: ...
    @property
    def stdout(self) -> int | None: ...
    @property
    def stderr(self) -> int | None: ...
    @property
    def done(self) -> int: ...

    def status(self) -> ExecStatus:
        """How it ended. May be asked again, also after `close`.

        Raises:
            SandboxLost: The sandbox went away; nothing is known of the process.

        Preconditions: `done` is readable, else LifecycleError.
        """
        ...

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to the process itself, or as a terminal does to its whole process group.

        No effect once it has ended.

        Raises:
            InvalidRequest: `field` is `signum` for a number that is no signal.
        """
        ...

    def kill(self) -> None:
        """Kill the whole process tree, daemonised children too; idempotent."""
        ...

    def resize(self, rows: int, cols: int) -> None:
        """Set the terminal's size.

        Raises:
            InvalidRequest: The exec has no PTY.
        """
        ...

    def close_stdin(self) -> None:
        """Close our end of stdin, so that the process reads end of file; idempotent."""
        ...

    def close(self) -> None:
        """Close the fds; idempotent. The process is not ended by this."""
        ...


class HelperTask(Protocol):
    """A helper inside a sandbox that does one thing with its files; see `BackendFiles.start_helper`.

    Attributes:
        stream: A pipe, this object's: to write the tree `in`, to read what comes otherwise.
    """

    stream: int

    def finish(self, path: str) -> None:
        """Close the stream and wait for the helper's word that all went well.

        Raises:
            FileError: As the kernel told the helper; `path` is what the error names.
        """
        ...

    def abandon(self) -> None:
        """Close the stream and let the helper end as it may."""
        ...


class BackendFiles(Protocol):
    """Files of one sandbox, seen as its default user sees them.

    An open file is an ordinary file object: what goes wrong while it is read or written
    (a full disk, say) is an `OSError`, or better the typed error of `errors.file_error`.

    Paths are absolute inside, or relative to the session's root. They are resolved inside
    the sandbox: no symlink leads out of it. Errors are the subclasses of `FileError`.
    """

    def open_read(self, path: str) -> BinaryIO:
        """Stream a file of any size; the last symlink is followed, inside.

        Raises:
            FileNotFound, IsADirectory, PermissionDenied: As named.
        """
        ...

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        """Create or replace a file and stream to it; its directory must exist.

        `mode` is given to a file that is created, as it is (no umask).
        """
        ...

    def list(self, path: str, after: str = "", most: int | None = None) -> list[FileInfo]:
        """A directory's entries, sorted by name: those after a name, `most` at most.

        Of a directory with a million entries no more than `most` are held in memory.

        Raises:
            NotADirectory: `path` is something else.
        """
        ...

    def stat(self, path: str) -> FileInfo:
        """Stat `path` itself: the last symlink is not followed."""
        ...

    def make_dir(self, path: str, *, parents: bool = True) -> None:
        """Make a directory; with `parents` also those above, and no error if it exists.

        Raises:
            FileExists: Something else is there, or anything is and `parents` is false.
        """
        ...

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a symlink itself or an empty directory.

        Raises:
            DirectoryNotEmpty: It has entries and `recursive` is false.
        """
        ...

    def move(self, src: str, dst: str) -> None:
        """Rename, replacing a file at `dst`; also across mounts."""
        ...

    def upload_tree(self, local: str, remote: str, *, progress: Progress | None = None) -> None:
        """Copy host file or directory `local` to `remote`, made if need be.

        Contents, permission bits and symlinks (as they are, never followed) are kept; the
        sandbox's user owns the copies. A file or symlink in the way is replaced, never
        written through. Devices, sockets and pipes are refused.

        Raises:
            FileNotFound: Nothing is at `local`.
            FileError: A special file; `path` names it.
        """
        ...

    def download_tree(
        self, remote: str, local: str, *, overwrite: bool = False, progress: Progress | None = None
    ) -> None:
        """Copy file or directory `remote` to the host at `local`, made if need be.

        Nothing is written outside `local`, whatever the tree holds: symlinks are copied as
        they are and never followed, those already there are replaced or refused; setuid and
        setgid bits are dropped.

        Raises:
            FileNotFound: Nothing is at `remote`; then nothing is made on the host.
            FileExists: A file that the copy would replace is there, and `overwrite` is not set.
            FileError: Something in the way cannot be replaced safely.
        """
        ...

    def start_helper(self, what: str, path: str, options: str = "") -> HelperTask:
        """Send a helper inside, locked down as the sandbox's user, to do one thing at `path`.

        Args:
            what: `in` unpacks a tar stream below `path`, `out` packs one, with any
                options for our own reader, and with a JSON list of paths below `path` the entries of
                these and of the directories above them alone; `find`, `search`, `replace`
                and `watch` answer with JSON lines, to `options` in JSON: see `launcher.helpers.finding` and
                `launcher.helpers.watching`.

        Raises:
            Unsupported: This backend cannot do that.
        """
        ...
