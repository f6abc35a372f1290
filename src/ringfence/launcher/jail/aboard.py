"""Helpers that enter a jail for the host: guest files as a stream, the jail's network, commands of
its program.

Each is forked from the jailer, does one thing inside and is gone.
"""

from __future__ import annotations

import _signal as signal
import errno
import fcntl
import posix as os

from ...linux import files, mounts, namespaces, privileges, seccomp
from .. import cgroups, enter, network, newroot, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..plan import Tree

    Answer = tuple[bytes, list[int]]  # what was said, and descriptors

_FILES = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS
_ALL = (
    _FILES
    | namespaces.CLONE_NEWPID
    | namespaces.CLONE_NEWNET
    | namespaces.CLONE_NEWIPC
    | namespaces.CLONE_NEWUTS
    | namespaces.CLONE_NEWCGROUP
)
_MOST_SAID = 4096
_LINE, _CONTROL = 3, 4  # descriptors of a relay's


def serve(request: dict[str, Any], reply: wire.Socket, fds: list[int]) -> None:
    """Do one request; answers on `reply` with "O" or "E"."""
    try:
        if request["op"] != "mount":
            # Before anything inside can see us: without root we have its uid.
            privileges.set_dumpable(False)
        said, made = _OPERATIONS[request["op"]](request, fds)
        wire.send_raw(reply, b"O" + said, made)
    except newroot.BuildError as exc:
        wire.refuse(reply, exc.cause, exc.step)
    except OSError as exc:
        wire.refuse(reply, exc, request["op"])
    except Exception as exc:  # noqa: BLE001  the host must hear of it, whatever it is
        wire.refuse(reply, OSError(errno.EPROTO, repr(exc)), request["op"])


def _pack(request: dict[str, Any], fds: list[int]) -> Answer:
    """Stream the guest's root, without what is shown in it: fds are a pidfd, a pipe and those of `_stream`.

    Precondition: the guest stands still.
    """
    from ..helpers import layers as _needed_inside  # noqa: F401  tarfile must be imported on this side

    pidfd, out, *names = fds
    namespaces.setns(pidfd, _FILES)
    _be_root()
    _stream(request, out, names)
    return b"", []


def _stream(request: dict[str, Any], out: int, names: list[int]) -> None:
    """The guest's root, walked by name in a root that no name leads out of.

    Args:
        names: A descriptor of the names of the image's files, where there is an image: see `layers`.
    """
    from ..helpers import layers, trees

    os.chroot(request["path"])
    os.chdir("/")
    if names:
        layers.pack(out, names[0], "/", one_file_system=True, mounted=set(request["shown"]))
    else:
        trees.pack(out, "/", one_file_system=True)


def _network(request: dict[str, Any], fds: list[int]) -> Answer:
    """Change the jail's network by a plan; fds are a pidfd. Answers with the sockets it asks for."""
    namespaces.setns(fds[0], namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNET)
    _be_root()
    return b"", network.set_up(request["network"])


def _relay(request: dict[str, Any], fds: list[int]) -> Answer:
    """Leave a process in the jail that relays a machine's connections; fds are a pidfd, the line to the
    machine, and where plans come from. It ends with the jail, or when one of these closes. Answers with
    its pid and a pidfd.
    """
    pidfd, line, control = fds
    tasks = cgroups.open_procs(request["cgroup_dirs"], request["cgroup_version"])
    namespaces.setns(pidfd, _ALL)
    if child := os.fork():  # into the PID namespace
        return b"%d" % child, [os.pidfd_open(child)]
    try:
        cgroups.join(tasks)
        _be_root()
        _be_relay(line, control, request["filter"], request["token"])
    finally:
        os._exit(1)


def _be_relay(line: int, control: int, program: bytes, token: bytes) -> None:
    """Run the connection relay, which parses guest input, with only the jail's network in reach."""
    from ..link import connection_relay

    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _CONTROL + 1) for fd in (line, control)]
    null = os.open("/dev/null", os.O_RDWR)
    for to, fd in enumerate((null, null, null, *above)):
        os.dup2(fd, to)
    files.close_from(_CONTROL + 1)
    privileges.set_name(b"ringfence-relay")
    privileges.empty_bounding_set()
    privileges.lock_securebits()
    privileges.empty_capability_sets()
    privileges.set_no_new_privs()
    seccomp.install_filter(program)
    connection_relay.Outside(_LINE, wire.adopt(_CONTROL), token).run()


def _run(request: dict[str, Any], fds: list[int]) -> Answer:
    """Run a command of the jail's program beside it; fds are a pidfd. Answers with what it said.

    With a "file", its path and content, that is there as long as the command takes.
    """
    namespaces.setns(fds[0], _ALL)
    _be_root()
    if "file" not in request:
        return _said_by(request, []), []
    path, content = request["file"]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
    try:
        os.write(fd, content)
        os.close(fd)  # a program that somebody may write to does not start
        return _said_by(request, []), []
    finally:
        os.unlink(path)


def _checkpoint(request: dict[str, Any], fds: list[int]) -> Answer:
    """Let the program write its guest's memory down, then stream the guest's root as `_pack` does.

    fds are a pidfd, a directory that the command finds as descriptor 3, a pipe and those of `_stream`.
    The program ends with it; we keep the jail's mounts.
    """
    from ..helpers import layers as _needed_inside  # noqa: F401

    pidfd, directory, out, *names = fds
    namespaces.setns(pidfd, _ALL)
    _be_root()
    # With the jail's PID 1 its PID namespace ends, and the command would be killed before it is done.
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    try:
        said = _said_by(request, [directory])
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    _stream(request, out, names)
    return said, []


def _mount(request: dict[str, Any], fds: list[int]) -> Answer:
    """Mount more of the host's: request has trees and steps; fds are a pidfd and what pins the sources."""
    pidfd, *pins = fds
    wanted: list[Tree] = request["trees"]
    if request["trusted_root"]:
        made = [enter.host_tree(tree, pins[tree["fd"]]) for tree in wanted]
    else:
        made = enter.trees_of_own_namespace(wanted) if wanted else []
    privileges.set_dumpable(False)  # not before: else an ordinary user may not map ids
    _go_to_files(pidfd)
    shape: Any = request
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    newroot.run_or_undo(newroot.NewRoot(fd, shape, made), request["steps"])
    return b"", []


def _unmount(request: dict[str, Any], fds: list[int]) -> Answer:
    """Undo that, with all that was mounted below: request has a path; fds are a pidfd."""
    _go_to_files(fds[0])
    mounts.umount2(request["path"], mounts.MNT_DETACH)
    return b"", []


def _be_root() -> None:
    """Be root of the jail's user namespace, without the caller's groups."""
    privileges.drop_groups()
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _go_to_files(pidfd: int) -> None:
    namespaces.setns(pidfd, _FILES)
    _be_root()
    os.chdir("/")
    os.umask(0o022)


def _said_by(request: dict[str, Any], more: list[int]) -> bytes:
    """Run a command to its end and return its output; it gets `more` from descriptor 3 on."""
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()  # into the PID namespace: it dies with the jail
    if child == 0:
        try:
            null = os.open("/dev/null", os.O_RDONLY)
            for to, fd in enumerate((null, write, write, *more)):
                os.dup2(fd, to)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.execve(request["argv"][0], request["argv"], request["env"])
        finally:
            os._exit(127)
    os.close(write)
    said = b""
    while piece := os.read(read, _MOST_SAID):
        said = (said + piece)[-_MOST_SAID:]
    status = os.waitpid(child, 0)[1]
    if status:
        if text := said.decode("utf-8", "replace").strip():
            raise OSError(errno.EIO, text)
        # Our own programs print nothing and exit with the errno: see `mount_program`.
        number = os.waitstatus_to_exitcode(status)
        raise (
            OSError(number, os.strerror(number))
            if number > 0
            else OSError(errno.EIO, f"ended by signal {-number}")
        )
    return said


_OPERATIONS = {
    "pack": _pack,
    "network": _network,
    "relay": _relay,
    "run": _run,
    "checkpoint": _checkpoint,
    "mount": _mount,
    "unmount": _unmount,
}
