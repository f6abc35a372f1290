"""Isolation of ours around a program that isolates its own guest, such as gVisor or an emulator.

The program runs as PID 1 of new namespaces, on a root that holds what it was given and nothing
else, with ids that mean nothing on the host. Below that root lies the guest's own, a tmpfs with a
size, which only the program serves to the guest. Run by the process that becomes the program.
"""

from __future__ import annotations

import _signal as signal
import errno
import fcntl
import posix as os
import resource

from ...linux import files, mounts, privileges, seccomp
from .. import build, cgroups, lockdown, network, newroot, wire
from ..machine_code.process_image import HEAD_IS_WRITTEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypedDict

    from ..fuse.serving import SharePlan
    from ..fuse.views import ViewPlan
    from ..placeholders import Placeholder
    from ..plan import NetworkPlan, Tree

    class GuestRoot(TypedDict):
        """The root file system that the program serves to its guest."""

        path: str  # in the jail's root
        image: int  # index of the tree that lies below what is written; -1: the steps make it all
        disk: int  # index of the tree that is written to; -1: a tmpfs
        size_bytes: int
        inodes: int
        owner: int  # id, in the jail's user namespace, of what is not the guest user's
        steps: list[tuple[Any, ...]]
        has_content: bool  # a snapshot to unpack there comes along
        process_image: str  # where the host's goes; empty: nowhere
        process_image_bytes: int

    class JailPlan(TypedDict):
        """A program and its isolation; plain values, decided by the host."""

        id: str
        namespaces: int  # CLONE_NEW* flags
        uid_map: str  # with an inside id 0: the program starts as that
        gid_map: str
        deny_setgroups: bool
        uid: int  # who owns what steps make "owned"
        gid: int
        scratch: str
        trees: list[Tree]
        steps: list[tuple[Any, ...]]
        network: NetworkPlan | None  # of the jail's namespace, where the program may use it
        guest: GuestRoot
        after: list[tuple[Any, ...]]  # steps in the jail's root once the guest's is there
        rlimits: list[tuple[int, int, int]]
        filter: bytes  # of system calls, for the program and all that it starts
        passes: int  # descriptors that the program gets as 3 and up
        descriptors: int  # for how many there is room from its start on; 0: as they come
        share: SharePlan | None  # with it more come along: its lines, and its socket to the host
        view: ViewPlan | None  # what of the trees is seen through one
        keep_capabilities: bool  # in the jail's user namespace; else nobody in there has any
        argv: list[str]  # none: it is no program but `view.serve`
        env: dict[str, str]
        cgroup_dirs: list[str]
        cgroup_values: list[tuple[str, str]]
        cgroup_version: int
        placeholders: list[Placeholder]
        note: str
        trusted_root: bool


_LAYERS = "layers"  # beside the guest's root, for a moment
_ASIDE = 64  # beyond every number that a program is given
_OWN_BYTES = 16 << 20  # of the jail's root: directories, settings, what the program notes down


def become(
    plan: JailPlan, go: wire.Socket, control: wire.Socket, errors: int, more: list[int]
) -> NoReturn:
    """Build the isolation, then be the program.

    Args:
        go: From the jailer: a word once our ids are mapped, with the trees that it opened, the
            cgroups to join, and what to unpack into the guest's root.
        control: Becomes the program's standard input. The host hears there what goes wrong before,
            and gets the file that is to be the guest's process image, and then the sockets of the
            network, where the plan has them.
        errors: A file that becomes its standard output and error.
        more: What it finds as descriptors 3 and up.
    """
    try:
        _make_room(plan["descriptors"], errors)
        _enter(plan, go, control)
        build.leave_host_network(plan["namespaces"])
        if plan["network"] is not None:
            _open_network(plan["network"], control)
        _start(plan, control, errors, more)
    except newroot.BuildError as exc:
        wire.refuse(control, exc.cause, exc.step)
    except OSError as exc:
        wire.refuse(control, exc, "jail")
    except BaseException as exc:  # noqa: BLE001  the host must hear of it, whatever it is
        wire.refuse(control, OSError(errno.EPROTO, repr(exc)), "jail")
    os._exit(1)


def _enter(plan: JailPlan, go: wire.Socket, control: wire.Socket) -> None:
    os.setsid()
    build.make_mounts_private()
    others = trees_of_jailer(plan)
    # Before our ids change: what only the host's administrator may read is still readable now.
    trees = [
        -1 if i in others else _step(f"open {tree['source']}", build.open_tree, tree, -1)
        for i, tree in enumerate(plan["trees"])
    ]
    word, fds = wire.receive(go)
    if word is None:
        os._exit(1)  # the jailer gave up
    tasks, has_content = word
    cgroups.join(fds[:tasks])
    content = fds.pop() if has_content else -1
    given = iter(fds[tasks:])
    trees = [next(given) if fd < 0 else fd for fd in trees]
    if not plan["deny_setgroups"]:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _build(plan, trees, content, control)


def _open_network(plan: NetworkPlan, control: wire.Socket) -> None:
    sockets = network.set_up(plan)
    wire.send_raw(control, b"O", sockets)
    for fd in sockets:
        os.close(fd)  # only who serves them may accept


def trees_of_jailer(plan: JailPlan) -> set[int]:
    """Which trees the jailer opens: those of a view and, as host root, what the user mounts, ids mapped."""
    view = plan["view"]
    through = {*view["trees"], view["image"]} - {-1} if view is not None else set()
    return through | {
        i for i, tree in enumerate(plan["trees"]) if plan["trusted_root"] and tree["inode"]
    }


def _build(plan: JailPlan, trees: list[int], content: int, control: wire.Socket) -> None:
    root = _tmpfs(plan, plan["scratch"], trees, f"size={_OWN_BYTES}")
    newroot.run_steps(root, plan["steps"])
    _guest_root(plan, trees, content, control)
    os.fchdir(root.fd)
    newroot.run_steps(root, plan["after"])
    flags = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
    _step("proc", mounts.mount, "proc", "proc", "proc", flags)
    _step("pivot_root", mounts.pivot_root, ".", ".")
    _step("leave the host's root", mounts.umount2, ".", mounts.MNT_DETACH)
    os.chdir("/")


def _tmpfs(
    plan: JailPlan, path: str, trees: list[int], size: str, disk: int = -1
) -> newroot.NewRoot:
    """A new tmpfs, or a file system on disk, at `path`, which is the current directory from here on."""
    flags = mounts.MS_NOSUID | mounts.MS_NODEV
    if disk >= 0:
        _step(f"disk {path}", mounts.move_mount, trees[disk], path)
    else:
        _step(f"tmpfs {path}", mounts.mount, "ringfence", path, "tmpfs", flags, f"mode=0755,{size}")
    os.chdir(path)
    os.umask(0)
    fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    whose: Any = plan
    return newroot.NewRoot(fd, whose, trees)


def _guest_root(plan: JailPlan, trees: list[int], content: int, control: wire.Socket) -> None:
    guest = plan["guest"]
    size = f"size={guest['size_bytes']},nr_inodes={guest['inodes']}"
    if guest["image"] < 0:
        root = _tmpfs(plan, guest["path"].lstrip("/"), trees, size, guest["disk"])
        newroot.run_steps(root, guest["steps"])
        if guest["owner"]:
            os.chown(".", guest["owner"], guest["owner"])
            _give_away(guest["steps"], guest["owner"])
        if guest["process_image"]:
            _place_process_image(guest, control)
    else:
        beside, _, name = guest["path"].rpartition("/")
        os.chdir(beside.lstrip("/"))
        os.mkdir(_LAYERS, 0o700)
        _tmpfs(plan, _LAYERS, trees, size, guest["disk"])
        _step("root of the image", build.overlay, [trees[guest["image"]]], f"../{name}")
        # It has them; nobody else shall.
        _step("hide its layers", mounts.umount2, f"../{_LAYERS}", mounts.MNT_DETACH)
        os.rmdir(f"../{_LAYERS}")
        # A link in an image may lead to "/", which there is its own.
        _in_guest("root of the image", _furnish, plan, trees)
    if content >= 0:
        _in_guest("unpack", _unpack, content, guest["image"] >= 0)


def _place_process_image(guest: GuestRoot, control: wire.Socket) -> None:
    """A file of its size for a copy of the agent, which is there for as long as that takes to start.

    The host fills it while we build, and while gVisor starts: there are 3 ms of copying in it. gVisor reads
    the head when it executes the agent, which waits for a message of the host before it reads the rest.

    Precondition: the guest's root is the current directory, and nothing is in it but what steps made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = _step("process_image", os.open, guest["process_image"].lstrip("/"), flags, 0o700)
    if guest["owner"]:
        os.fchown(fd, guest["owner"], guest["owner"])
    os.ftruncate(fd, guest["process_image_bytes"])  # gVisor asks for a file's size but once
    wire.send_raw(control, b"O", [fd])
    os.close(fd)


def _furnish(plan: JailPlan, trees: list[int]) -> None:
    """The steps of a root whose files are an image's. Precondition: it is our root directory."""
    whose: Any = plan
    guest = plan["guest"]
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    newroot.run_steps(newroot.NewRoot(fd, whose, trees), guest["steps"])
    if guest["owner"]:
        _give_away(guest["steps"], guest["owner"])


def _give_away(steps: list[tuple[Any, ...]], owner: int) -> None:
    """Give the files of the steps to the program's own id, except those of the guest's user."""
    for verb, path, *rest in steps:
        if verb in ("file", "symlink") or (verb == "dir" and not rest[1]):
            os.chown(path[1:], owner, owner, follow_symlinks=False)


def _unpack(content: int, is_layer: bool) -> None:
    """A snapshot's files: the names are a guest's."""
    from ..helpers import (  # the jailer has imported them: here our files may be out of sight
        layers,
        trees,
    )

    unpack = layers.unpack if is_layer else trees.unpack
    unpack(content, "/", one_file_system=True)


def _in_guest(what: str, work: Callable[..., None], *args: Any) -> None:
    """Let a child do `work` that cannot leave the guest's root, which is the current directory."""
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.chroot(".")
            os.chdir("/")
            work(*args)
            os.write(write, b"O")
        except BaseException as exc:  # noqa: BLE001  whatever it is, the host must hear of it
            os.write(write, repr(exc).encode("utf-8", "replace")[:1000])
        finally:
            os._exit(0)
    os.close(write)
    said = os.read(read, 4096)
    os.close(read)
    os.waitpid(child, 0)
    if said != b"O":
        problem = OSError(errno.EIO, said.decode("utf-8", "replace") or "it was killed")
        raise newroot.BuildError(what, problem)


def _step(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except OSError as exc:
        raise newroot.BuildError(name, exc) from exc


def _await_head(control: wire.Socket) -> None:
    """Wait until the host has written the head of the agent's copy.

    A busy host may write it after gVisor is up, which then finds zeros: "exec format error".
    """
    data, _ = wire.receive_raw(control)
    if data != HEAD_IS_WRITTEN:
        os._exit(1)  # the host gave up


def _start(plan: JailPlan, control: wire.Socket, errors: int, more: list[int]) -> NoReturn:
    if plan["guest"]["process_image"]:
        _await_head(control)
    os.umask(0o022)
    # First out of the way: one of them may be where another is to go.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ASIDE) for fd in more]
    aside, serving = aside[: plan["passes"]], aside[plan["passes"] :]
    for to, fd in enumerate((control.fileno(), errors, errors, *aside)):
        os.dup2(fd, to)
    for signum in range(1, signal.NSIG):
        try:
            signal.signal(signum, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    lockdown.apply_rlimits(plan["rlimits"])
    if not plan["keep_capabilities"]:
        privileges.empty_bounding_set()
        privileges.lock_securebits()
        privileges.empty_capability_sets()
    privileges.set_no_new_privs()
    privileges.die_with_parent(signal.SIGKILL)
    if not plan["argv"]:
        _serve_views(control, plan["filter"])
    seccomp.install_filter(plan["filter"])
    if plan["share"] is not None:
        _serve_beside(plan["share"], serving)
    os.execve(plan["argv"][0], plan["argv"], plan["env"])


def _make_room(descriptors: int, file: int) -> None:
    """Let the program's table have this size: its last one is open, as what it has open already.

    A table that grows under a program with threads makes the kernel wait: expand_files() of fs/file.c.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors and (descriptors <= most or most == resource.RLIM_INFINITY):
        os.dup2(file, descriptors - 1)


def _serve_views(control: wire.Socket, program: bytes) -> NoReturn:
    from ..fuse import view  # imported by the jailer

    try:
        view.serve(control, program)
    except BaseException as exc:  # noqa: BLE001  whatever it is, the last words tell it
        os.write(2, f"view: {exc!r}\n".encode("utf-8", "replace"))
    finally:
        os._exit(1)


def _serve_beside(plan: SharePlan, fds: list[int]) -> None:
    """Let a child, with the same isolation as the program, serve files to the program's guest."""
    from ..fuse import serving  # imported by the jailer

    if os.fork():
        return
    try:
        privileges.die_with_parent(signal.SIGKILL)
        own = range(3, 3 + len(fds))
        for to, fd in zip(own, fds, strict=True):  # which were put beyond all these
            os.dup2(fd, to)
        files.close_from(own.stop)
        *lines, control = own
        serving.serve(plan, lines, wire.adopt(control))
    except BaseException as exc:  # noqa: BLE001  whatever it is, the program's last words tell it
        os.write(2, f"files: {exc!r}\n".encode("utf-8", "replace"))
    finally:
        os._exit(1)
