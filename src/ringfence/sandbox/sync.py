"""`Sandbox`: the library in three lines."""

from __future__ import annotations

import functools
import os
import threading

from ..backends.optional import Comparable
from ..backends.registry import DEFAULT, backend_named, backend_of, name_of, provision, tier_of
from ..errors import ExecNotFound, InvalidRequest, LifecycleError, Unsupported
from ..model.base import checks
from ..model.base.helpful import helpful
from ..model.calls import (
    check_callbacks,
    make_request,
    make_spec,
    options_in,
    others_in,
    parse_mount,
    parse_network,
    shell_argv,
)
from . import remote
from .files import Files
from .merge import merge as merge_trees
from .pump import Pump, begin, run_to_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Never, Unpack

    from ..backends.protocol import Backend, BackendSandbox
    from ..client import Client
    from ..contexts import Context, Contexts, Execution
    from ..contexts.context import CellParts
    from ..model.calls import Mounts, Network, StrPath
    from ..model.capabilities import Protection
    from ..model.changes import Changes
    from ..model.execs.exec import ExecResult
    from ..model.fork import ForkReport, Merged
    from ..model.granted import SandboxCapabilities
    from ..model.limits import Limits
    from ..model.mount import Mount
    from ..model.net.netlog import NetworkEvent
    from ..model.net.network import NetworkPolicy
    from ..model.parts import ExecParts
    from ..model.session import ResolvedMount, Session, Snapshot
    from ..model.spec import SandboxSpec
    from ..model.state import State
    from ..model.stats import SandboxStats
    from .expose import Exposure
    from .marks import Mark
    from .process import Process

DEFAULT_BACKEND = DEFAULT


@helpful
class Sandbox:
    """An isolated environment. Use it as a context manager: leaving it terminates it.

    Every method may be called from any thread. A sandbox ends with the process that made it, even
    when that process is killed.
    """

    _can_move = True  # a sandbox restored in its place may be put behind this object

    if not TYPE_CHECKING:

        def __new__(cls, *parts: object, **options: object) -> Sandbox:
            if len(parts) != 2 or options:
                raise TypeError("Sandbox() is not a constructor: use Sandbox.create(...)")
            return object.__new__(cls)

    def __init__(self, inner: BackendSandbox, spec: SandboxSpec) -> None:
        self._timer: threading.Timer | None = None
        self._exposures: list[Exposure] = []
        self._template: list[int] = []  # descriptors that keep its files
        self._home: Backend | None = None  # the backend that the caller chose as an object
        self._fork_report: ForkReport | None = None
        self._maker = os.getpid()
        self._inner = inner
        self.spec = spec
        self.files = Files(inner.files, lambda: inner.session.mounts)
        self._started: dict[str, Process] = {}  # by id, those that run and the last one
        self._starting = threading.Lock()
        if spec.ttl_s is not None:
            timer = threading.Timer(spec.ttl_s, self.terminate)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # the process has as many threads as it may
                inner.terminate()  # else it would outlive its time
                raise
            self._timer = timer

    @classmethod
    def create(
        cls,
        spec: SandboxSpec | None = None,
        *,
        mounts: Mounts = (),
        network: Network = "none",
        limits: Limits | Mapping[str, Any] | None = None,
        backend: Backend | str | None = None,
        server: str | Client | None = None,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str | int | None = None,
        workdir: StrPath | None = None,
        ttl_s: float | None = None,
        python_env: bool | None = None,
        disk_root: bool | None = None,
        protect: Sequence[str] | None = None,
        unprotect: Sequence[str] | None = None,
        deny: Sequence[str] | None = None,
        memory_dir: StrPath | None = None,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
        tier: str | None = None,
        profile: str | None = None,
        template: str | None = None,
        allow_degraded: Sequence[str] | None = None,
    ) -> Sandbox:
        """Make a sandbox, locked down and ready.

        Args:
            spec: All of it at once; or give its parts:
            mounts: `Mount`s or `"SRC:DST[:ro|rw]"`.
            network: `"none"`, `"unrestricted"`, a list of hosts or a policy.
            limits: `Limits`, or a mapping of its fields.
            backend: A backend or its name; None is the best of the tier that works here.
            server: Where the sandbox is to be: `unix:PATH`, `http://HOST:PORT`, or a `Client`. What is
                returned then is a `RemoteSandbox`, with the same methods. None: here.
            image: An OCI image on this machine whose files are the root.
            env: Variables of every command.
            secrets: By name; the network policy's rules write them into requests, and nothing inside
                ever sees them.
            user: Who commands run as, by name or uid; None is `sandbox`, without privileges.
            workdir: Where commands start and relative paths begin, absolute inside.
            ttl_s: Seconds after which the sandbox is terminated whatever it does.
            python_env: Also show this Python and its packages, read-only.
            disk_root: Keep files outside mounts on the host's disk, not in memory.
            protect: Paths inside writable mounts that stay read-only, besides the built-in set;
                `@git`, `@agents` and `@ci` name several. `unprotect` takes away from that set.
            deny: Paths that can be neither read nor written.
            memory_dir: Host directory behind /mnt/memory.
            labels: To find it by.
            tier: `light` (the host's kernel) or `strong` (gVisor, microVM); never replaced silently.
            profile: `os_hardened`, `own_root`, `debug` or `unrestricted`.
            template: Name or id of a built template, whose packages are added, read-only.
            allow_degraded: Protections and limits that may be weaker here, by name.

        Raises:
            InvalidRequest: Something in the request is malformed; nothing was started.
            IsolationError: A protection could not be put in place; nothing runs.
        """
        others = others_in(locals())
        if server is not None:
            with_parts = {"mounts": mounts, "network": network, "limits": limits, **others}
            name = remote.name_of(backend)
            far: Sandbox = remote.make(server, "create", spec, backend=name, **with_parts)
            return far  # a RemoteSandbox, with the same methods: tests/client compares them
        local = name_of(backend)
        if local is not None and spec is None and others.get("tier") is None:
            others["tier"] = tier_of(local)
        wanted = make_spec(spec, mounts, network, limits, others)
        if wanted.template != "default":
            return cls._from_template(wanted, backend)
        if backend is None or isinstance(backend, str):
            return cls(provision(wanted, backend), wanted)
        made = cls(backend.provision(wanted), wanted)
        made._home = backend
        return made

    @classmethod
    def _from_template(cls, wanted: SandboxSpec, backend: Backend | str | None) -> Sandbox:
        from ..environments.apply import apply

        applied, files = apply(wanted)
        try:
            if backend is None or isinstance(backend, str):
                inner = provision(applied, backend)
            else:
                inner = backend.provision(applied)
            made = cls(inner, wanted)
        except BaseException:
            os.close(files)
            raise
        made._template.append(files)
        return made

    @classmethod
    def restore(
        cls,
        snapshot_id: str,
        spec: SandboxSpec | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
        backend: Backend | str | None = None,
        server: str | Client | None = None,
    ) -> Sandbox:
        """A new sandbox with the files of a snapshot, whether or not its own sandbox still lives.

        One of `checkpoint` goes on with all that ran in it.

        Args:
            spec: None is the one it was taken under, network policy included.
            secrets: For that one: what no snapshot contains.
            backend: None is the one that took it.
            server: As for `create`.

        Raises:
            SnapshotNotFound: No such snapshot.
            SnapshotCorrupt: Its content is not what was saved.
            InvalidRequest: The policy writes a secret that is not given.
        """
        if server is not None:
            far: Sandbox = remote.make(server, "restore", snapshot_id, spec, secrets=secrets)
            return far
        if backend is None:
            backend = backend_of(snapshot_id)
        chosen = backend_named(backend) if isinstance(backend, str) else backend
        if spec is not None and secrets is not None:
            hint = "remove secrets=, or give SandboxSpec(secrets=...)"
            raise InvalidRequest("excludes spec=", field="secrets", hint=hint)
        if spec is not None:
            from ..model.spec import SandboxSpec as Spec

            checks.instance(spec, "spec", Spec)
        inner = chosen.restore(snapshot_id, spec, secrets=secrets)
        made = cls(inner, spec or inner.spec)
        made._home = chosen
        return made

    @staticmethod
    def snapshots(
        *, backend: Backend | str = DEFAULT_BACKEND, server: str | Client | None = None
    ) -> list[Snapshot]:
        """Every snapshot that is kept, oldest first."""
        if server is not None:
            with remote.opened(server) as client:
                return client.snapshots()
        chosen = backend_named(backend) if isinstance(backend, str) else backend
        return chosen.snapshots()

    @staticmethod
    def delete_snapshot(
        snapshot_id: str,
        *,
        backend: Backend | str = DEFAULT_BACKEND,
        server: str | Client | None = None,
    ) -> None:
        """Remove a snapshot; sandboxes restored from it are not touched.

        Raises:
            SnapshotNotFound: No such snapshot.
        """
        if server is not None:
            with remote.opened(server) as client:
                client.delete_snapshot(snapshot_id)
            return
        chosen = backend_named(backend) if isinstance(backend, str) else backend
        chosen.delete_snapshot(snapshot_id)

    # -- running commands -------------------------------------------------------------------

    def exec(
        self,
        argv: Sequence[StrPath],
        *more: Never,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        session_leader: bool = True,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """Run one process to its end.

        A non-zero exit, a signal, a timeout or an OOM kill is a result, not an error.

        Args:
            argv: At least one item; argv[0] is looked up on the sandbox's PATH.
            cwd: Absolute inside, or relative to the session's root.
            env: Added to the sandbox's environment.
            user: Name or uid; None is the sandbox's user.
            stdin: Sent to the process, which then reads the end of its input.
            timeout_s: Wall-clock seconds, > 0; then the whole process tree is killed.
            max_output_bytes: Kept of each stream, head and tail; the rest is counted.
            session_leader: False has the process lead neither a session nor its process group: setsid(1)
                then replaces it instead of forking, and a command's exit code is the result's.
            on_stdout, on_stderr: Called with each piece as it comes, in this thread.

        Raises:
            InvalidRequest: `argv`, `env`, `cwd` or `user` is malformed; nothing was started.
            SandboxLost: The sandbox went away; nothing is known of the process.
        """
        request = make_request(argv, *more, **options_in(locals()))
        check_callbacks(on_stdout, on_stderr)
        run = begin(self._inner, request)
        return run_to_end(Pump(run, request, self.spec.limits, on_stdout, on_stderr))

    def shell(self, script: str, **options: Unpack[ExecParts]) -> ExecResult:
        """Run a POSIX shell script; options as for `exec`."""
        return self.exec(shell_argv(script), **options)

    def start(
        self,
        argv: Sequence[StrPath],
        *more: Never,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bytes | str | None = None,
        stream_stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
        session_leader: bool = True,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> Process:
        """Start a process in the background.

        Args:
            stream_stdin: Keep standard input open, as `process.stdin`.
            pty: `(rows, columns)` of a terminal to run it on.
            on_stdout, on_stderr: Called from a background thread.
        """
        from .process import Process

        request = make_request(argv, *more, **options_in(locals()))
        check_callbacks(on_stdout, on_stderr)
        run = self._inner.start(request)
        pump = Pump(run, request, self.spec.limits, on_stdout, on_stderr)
        return self._began(Process(pump, stdin_open=stream_stdin or pty is not None))

    def process(self, exec_id: str) -> Process:
        """A process that was started before, or goes on in this fork under the id that it had.

        Raises:
            ExecNotFound: None with that id was started through this object.
        """
        found = self._started.get(exec_id)
        if found is None:
            raise ExecNotFound(f"no process {exec_id!r} was started through this sandbox object")
        return found

    def _began(self, process: Process) -> Process:
        with self._starting:
            running = {id: each for id, each in self._started.items() if each.running}
            self._started = {**running, process.id: process}
        return process

    # -- running code -------------------------------------------------------------------------

    def context(
        self,
        language: str = "python",
        *,
        kernel: str | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> Context:
        """Begin an interpreter that keeps its variables from one cell to the next.

        Args:
            language: `python`, `bash` or `node`.
            kernel: Kernelspec that Jupyter has inside, such as `python3`, in place of a language.
            cwd: Where it begins, absolute inside or relative to the session's root.
            env: Added to the sandbox's environment.
            id: Of one that was begun before, in place of a new one.

        Raises:
            ExecError: The interpreter did not start.
            ExecNotFound: There is none with that id.
        """
        return self._its_contexts.open(language, kernel=kernel, cwd=cwd, env=env, id=id)

    def run_code(
        self, code: str, *, language: str = "python", **options: Unpack[CellParts]
    ) -> Execution:
        """Run a cell in the default context, which begins with the first one; see `Context.run`."""
        from ..contexts.context import check_options

        check_options(options)
        return self._its_contexts.default(language).run(code, **options)

    @property
    def _its_contexts(self) -> Contexts:
        from ..contexts import Context, Contexts  # few sandboxes need it

        begin = functools.partial(Context, self)
        made: Contexts = self.__dict__.setdefault("_contexts", Contexts(begin))
        return made

    # -- describing and changing --------------------------------------------------------------

    @property
    def id(self) -> str:
        """Time-ordered, and valid as a file name."""
        return self.session.id

    @property
    def session(self) -> Session:
        """Id, backend, state and mounts now."""
        return self._inner.session

    @property
    def state(self) -> State:
        """`provisioned`, `running`, `suspended` or `terminated`."""
        return self.session.state

    def mount(self, mount: Mount | str) -> ResolvedMount:
        """Add a mount to the live sandbox."""
        return self._inner.attach(parse_mount(mount))

    def apply_network_policy(self, network: Network) -> None:
        """Change what the sandbox may reach, at once: what is connected against it is cut.

        Raises:
            NetworkPolicyError: It cannot be enforced, or is or was `unrestricted`; the old one holds.
        """
        self._inner.apply_network_policy(parse_network(network))

    def network_log(self) -> list[NetworkEvent]:
        """List the network events so far, oldest first; bounded.

        Kept are the newest thousand allowed events, the newest thousand of the rest, the first
        event of each of 4,096 destinations whatever its age, and open connections with their bytes
        so far.
        """
        return self._inner.network_log()

    def learned_policy(self) -> NetworkPolicy:
        """Build the smallest policy that allows the destinations reached so far."""
        from ..policy.learn import learned_policy

        return learned_policy(self.network_log())

    def connect(self, port: int) -> socket.socket:
        """A connection to a server inside, which listens on its loopback or on every address.

        Raises:
            ConnectError: Nothing accepts connections there.
        """
        return self._inner.connect(port)

    def expose(
        self, port: int, *, host: str = "127.0.0.1", host_port: int = 0, unix: str | None = None
    ) -> Exposure:
        """An address on the host that leads to a server inside, started already or later.

        Args:
            host: Of the host: its own loopback unless asked otherwise.
            host_port: 0 takes one that is free.
            unix: The path of a unix socket to make instead; only this user may connect to it.

        Raises:
            InvalidRequest: The address is taken, or `port` is none.
        """
        from .expose import Exposure, listen

        checks.integer(port, "port", 1, 65535)
        self._check_alive("expose")
        listener = listen(host, host_port, unix)
        self._exposures.append(Exposure(self._inner, port, listener))
        return self._exposures[-1]

    def _check_alive(self, what: str) -> None:
        if self.state == "terminated":
            raise LifecycleError(f"{what}: the sandbox is terminated", hint="create a new one")

    def suspend(self) -> None:
        """Freeze every process; idempotent."""
        self._inner.suspend()

    def resume(self) -> None:
        """Let them go on; idempotent."""
        self._inner.resume()

    def snapshot(self, metadata: Mapping[str, str] | None = None) -> Snapshot:
        """Save the sandbox's files; restorable after the sandbox is gone."""
        return self._inner.snapshot(checks.string_map(metadata or {}, "metadata"))

    def changes(self, since: Snapshot | str | None = None) -> Changes:
        """List the paths that were added, changed or removed, and the text that differs.

        Mounts of the host are left out. A change of a modification time alone is none. The sandbox
        stands still while its files are read, as for a snapshot.

        Args:
            since: Snapshot, or its id, to compare with; None: a new sandbox of the same spec.

        Raises:
            SnapshotNotFound, SnapshotCorrupt: As for `restore`.
            InvalidRequest: The snapshot is of another image.
            ResourceExhausted: There are more than 250,000 files.
            Unsupported: The backend saves no snapshots.
        """
        if not isinstance(self._inner, Comparable):
            name = self._inner.session.backend
            raise Unsupported(backend=name, operation="changes")
        return self._inner.compare(None if since is None else str(getattr(since, "id", since)))

    # -- forks and merges ---------------------------------------------------------------------

    @property
    def parent(self) -> str | None:
        """Id of the sandbox that this one was forked from; None: it is no fork."""
        lineage = self.lineage()
        return lineage[-1] if lineage else None

    def lineage(self) -> tuple[str, ...]:
        """Return the ids of the sandboxes that this one descends from, the first one first; 16 at most."""
        from ..fork.branches import lineage_of

        return lineage_of(self.spec.labels)

    @property
    def fork_report(self) -> ForkReport | None:
        """Return what this fork took along; None: it is no fork."""
        return self._fork_report

    def fork(
        self,
        n: int = 1,
        *,
        at: Mark | None = None,
        processes: str = "auto",
        network: Network | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> list[Sandbox]:
        """Make `n` new sandboxes with the files that this one has now; it goes on unchanged.

        Directories of the host that are mounted writable are shared, and not copied.

        Args:
            n: 1 to 1,000.
            at: An earlier moment to fork from; None: now. `processes` is the mark's then.
            processes: `auto` lets contexts and processes go on in the forks, where they can be copied, and
                says in `fork_report` what was left out and why: of contexts all, or single processes.
                `required` fails where anything that runs cannot be copied; `none` copies files only.
            network, limits, labels, secrets: Of the forks; None: as here.

        Raises:
            Unsupported: The backend saves no files, or `required` processes cannot be copied; nothing
                has happened.
            ResourceExhausted: There is no room for all of them; none is left.
        """
        from ..fork.branches import check_arguments, spec_of

        check_arguments(n, processes)
        if at is None:  # a mark outlives its sandbox
            self._check_alive("fork")
        given: dict[str, Any] = {
            "network": network,
            "limits": limits,
            "labels": labels,
            "secrets": secrets,
        }
        if at is not None:
            self._check_mark(at)
        # With the network policy that holds now.
        now = self.spec.altered(network=self._inner.spec.network)
        wanted = spec_of(now, self.id, **given)
        applied = spec_of(self._inner.spec.altered(secrets=self.spec.secrets), self.id, **given)
        mark = at or self._mark(processes, applied)

        def make(inner: BackendSandbox) -> Sandbox:
            fork = type(self)(inner, wanted)
            fork._home = self._home
            fork._template += [os.dup(fd) for fd in self._template]
            return fork

        try:
            return mark.branches(n, make, applied)
        finally:
            if at is None:
                mark.close()

    def mark(self, *, processes: str = "auto") -> Mark:
        """Keep this moment, its files and contexts, for `rewind` and `fork(at=)`; the sandbox goes on.

        Memory is copied meanwhile: `rewind` and `fork` wait for that, and fail if it fails.

        Args:
            processes: See `fork`.

        Raises:
            Unsupported: As `fork`.
            ResourceExhausted: This process keeps as many marks as it may, 64.
        """
        from ..fork.branches import check_arguments

        check_arguments(1, processes)
        self._check_alive("mark")
        return self._mark(processes, None)

    def _mark(self, processes: str, spec: SandboxSpec | None) -> Mark:
        from .marks import Mark

        return Mark(self, self._home or backend_named(self.session.backend), processes, spec)

    def rewind(self, mark: Mark) -> None:
        """Go back to a mark of this sandbox, in place: its files, and the contexts that ran.

        All that runs ends, and so do cells; what ran then goes on, contexts as the same objects, processes by
        `process(id)`. Contexts that were begun after the mark have ended then.
        Limits, network policy and the directories of the host are not changed.

        Args:
            mark: Of this sandbox, and not closed. It can be used again.

        Raises:
            InvalidRequest: The mark is of another sandbox.
            LifecycleError: The mark is closed.
            Unsupported: The memory of what ran could not be copied, and nothing has happened.
            RingfenceError: It could not be restored; the sandbox has ended then, and the mark is kept.
        """
        self._check_mark(mark)
        mark.wait()
        spec = self._as_it_is()
        self._inner.terminate()
        self._started = {}
        self._take_place(mark.restore(spec))
        try:
            mark.put_back(self)
        except BaseException:
            self.terminate()
            raise

    def _as_it_is(self) -> SandboxSpec:
        """Return the spec of what is restored in its place."""
        from ..model.spec import LINEAGE

        spec = self._inner.spec.altered(secrets=self.spec.secrets)
        labels = {**spec.labels, LINEAGE: spec.labels.get(LINEAGE, "")}
        return spec.altered(id=self.id, labels=labels)

    def _take_place(self, inner: BackendSandbox) -> None:
        self._inner = inner
        self.files._lead_to(inner.files, lambda: inner.session.mounts)
        for exposure in self._exposures:
            exposure.lead_to(inner)

    def _check_mark(self, mark: Mark) -> None:
        from .marks import Mark

        if not isinstance(mark, Mark):
            what = f"must be a Mark, not {type(mark).__name__}"
            raise InvalidRequest(what, field="mark", hint="as sandbox.mark() returns it")
        if mark.sandbox_id != self.id:
            raise InvalidRequest("is of another sandbox", field="mark")
        mark.check()

    def merge(
        self,
        into: Sandbox | StrPath,
        *,
        base: Snapshot | str,
        path: StrPath = ".",
        prefer: str | None = None,
        dry_run: bool = False,
    ) -> Merged:
        """Merge what has changed in a directory since a snapshot into another copy of that directory.

        A three-way merge: what only one side changed is taken from there, and text that both changed is
        merged by git. Where both changed the same lines, or one removed what the other changed, that is a
        conflict, and nothing is written. Files that this sandbox only moved keep the target's changes.

        Args:
            into: Another sandbox, or a directory of the host. There each file is replaced by one rename,
                no symlink is followed, and the paths that a writable mount protects are not changed.
            base: Snapshot that both sides come from, or its id.
            path: The directory here, and in another sandbox: absolute, or relative to the session's root.
            prefer: `ours` (the target's) or `theirs` (this sandbox's) version where there is a conflict.
            dry_run: Only tell what would change.

        Raises:
            FileError: The target directory is not there, a file has changed meanwhile, or the directory
                here has a device, a socket or a pipe in it.
            SnapshotNotFound, SnapshotCorrupt: As for `restore`.
        """
        return merge_trees(self, into, base=base, path=path, prefer=prefer, dry_run=dry_run)

    def checkpoint(self, metadata: Mapping[str, str] | None = None) -> Snapshot:
        """Save files and memory, and end: `restore` lets all that ran go on, as often as wanted.

        Raises:
            Unsupported: The backend saves files only.
            LifecycleError: Something inside holds what cannot be saved, such as a stream of an exec
                that still runs; the sandbox goes on.
        """
        return self._inner.checkpoint(checks.string_map(metadata or {}, "metadata"))

    def stats(self) -> SandboxStats:
        """Return the current resource usage, read from the kernel."""
        return self._inner.stats()

    def capabilities(self) -> SandboxCapabilities:
        """Read back from the kernel what the sandbox can do and what restricts it.

        Creation time and remaining time are known only to a session manager.

        Raises:
            LifecycleError: The sandbox is suspended, or has ended.
        """
        return self._inner.granted()

    def protections(self) -> tuple[Protection, ...]:
        """Read back from the kernel the protections of the host."""
        return self._inner.protections()

    def terminate(self) -> None:
        """End it: every process is gone when this returns. Legal in every state, idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        while self._exposures:
            self._exposures.pop().close()
        self._inner.terminate()
        while self._template:
            os.close(self._template.pop())

    def __enter__(self) -> Sandbox:
        return self

    @property
    def _is_ours(self) -> bool:
        """True in the process that made the sandbox. A forked child has a copy; closing it ends nothing."""
        return os.getpid() == self._maker

    def __exit__(self, *_exc: object) -> None:
        if self._is_ours:
            self.terminate()

    def __del__(self) -> None:
        # Dropped without terminate(): nothing else would ever end it.
        inner = getattr(self, "_inner", None)
        if inner is not None and self._is_ours and inner.session.state != "terminated":
            import warnings

            warnings.warn(
                f"{self!r} was never terminated", ResourceWarning, source=self, stacklevel=2
            )
            self.terminate()

    if not TYPE_CHECKING:  # for checkers a wrong name is an error

        def __setattr__(self, name: str, value: object) -> None:
            if name[0] != "_" and name not in self.__dict__:
                from ..model.calls import check_assignment

                check_assignment(self, name)
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        session = self.session
        return f"<Sandbox {session.id} {session.state}>"
