"""PID 1 of a virtual machine: it boots, waits for its first message, and then relays the agent's
messages.

It is started from the initial RAM file system, by the interpreter that lies there, and has loaded all
that it needs when it says that the machine is up. There the host may write the machine down. What comes
after, it does in every machine that is continued from that: a name, the time, random numbers and a root
of its own. The agent runs in namespaces below, from which nobody sees this process.
"""

from __future__ import annotations

import errno
import marshal
import os
import signal
import time

from ..launcher import build, newroot, wire
from ..launcher.link import connection_relay
from ..launcher.link.line import CONTROL, DATA, frame
from ..linux import files, machine, mounts, namespaces, privileges
from . import sharing
from .channels import RESTED, Carrier, request
from .groups import MachineGroups
from .machine_agent import MachineAgent, enter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, TypedDict

    from .settings import Settings

    class Waking(TypedDict):
        """First message to a machine; plain values, decided by the host."""

        hostname: str
        now_ns: int
        entropy: bytes
        size_bytes: int  # of the root
        inodes: int
        memory_bytes: int  # of all that the guest runs, files in its root included
        uid: int  # who owns what steps make "owned"
        gid: int
        steps: list[tuple[Any, ...]]
        trees: list[tuple[str, int]]  # places below `SHARES` or /dev; MOUNT_ATTR_*
        image: int  # which of them the root is of, below what is written; -1: the steps make it all
        agent: Settings

    class Mounting(TypedDict):
        """Message that adds mounts to a running machine."""

        number: int  # which the answer begins with
        uid: int
        gid: int
        steps: list[tuple[Any, ...]]
        trees: list[tuple[str, int]]

    class Rising(TypedDict):
        """First message to a machine restored from a saved one."""

        now_ns: int
        entropy: bytes


BOOTED, READY = b"BOOTED", b"READY"
_ROUNDS = 4  # so many more questions than the kernel keeps back
_PREPARED = b"PREPARED"
MODULES = "/modules"  # in the initial RAM file system: files named in the order to load them
PORT, NETWORK_PORT = "ringfence", "ringfence-network"
_PORTS = "/sys/class/virtio-ports"
_GROUPS, _ROOT, _PROC = "/groups", "/root", "/proc"
SHARES = (
    "/share",
    "/mounts",
)  # what the host shows, and what the user mounts; so are the ports named
_PATIENCE_S = 60.0
_LOOK_S = 0.005
_IO = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
_APART = (
    namespaces.CLONE_NEWNS
    | namespaces.CLONE_NEWIPC
    | namespaces.CLONE_NEWUTS
    | namespaces.CLONE_NEWCGROUP
)


def main() -> NoReturn:
    """Boot, wait for the host, serve, and end the machine."""
    try:
        line, relays = _boot()
        agent, control = _start_agent(line)
        os.write(line, frame(DATA, CONTROL, BOOTED))
        _serve(line, control, agent, relays)
    except BaseException as exc:
        os.write(2, f"ringfence: {exc!r}\n".encode())
        raise
    finally:
        machine.power_off()
    os._exit(1)


def _boot() -> tuple[int, ConnectionRelays]:
    """From the kernel's first process to an open line to the host."""
    for kind, place in (("devtmpfs", "/dev"), ("proc", _PROC), ("sysfs", "/sys")):
        os.makedirs(place, exist_ok=True)
        try:
            mounts.mount(kind, place, kind, mounts.MS_NOSUID)
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
    for place in (*SHARES, _GROUPS, _ROOT):
        os.makedirs(place, exist_ok=True)
    for name in sorted(os.listdir(MODULES)):
        fd = os.open(f"{MODULES}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        machine.finit_module(fd)
        os.close(fd)
    build.leave_host_network(namespaces.CLONE_NEWNET)
    relays = ConnectionRelays()
    for place in SHARES:
        sharing.mount(place, _open_port(place))
    return _open_port(PORT), relays


class ConnectionRelays:
    """A child that relays connections, once the host says which; nothing in the guest sees it."""

    def __init__(self) -> None:
        self._pid = self._start(b"")

    def _start(self, token: bytes) -> int:
        if pid := os.fork():
            return pid
        try:
            files.close_from(3)
            sharing.survive()
            connection_relay.Inside(_open_port(NETWORK_PORT), token).run()
        finally:
            os._exit(1)

    def begin_anew(self, token: bytes) -> None:
        """All that is connected is reset; another child speaks with another one of the host's."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pid = self._start(token)


def _open_port(wanted: str) -> int:
    ends = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends:
        for name in os.listdir(_PORTS) if os.path.isdir(_PORTS) else ():
            with open(f"{_PORTS}/{name}/name", encoding="ascii") as file:
                if file.read().strip() == wanted and os.path.exists(f"/dev/{name}"):
                    return os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(_LOOK_S)
    raise OSError(errno.ENODEV, "the line to the host did not come")


def _start_agent(line: int) -> tuple[int, wire.Socket]:
    """A child that has all ready for the agent but what only a woken machine knows: pid and socket."""
    ours, theirs = wire.socketpair()
    namespaces.unshare(namespaces.CLONE_NEWPID)
    agent = os.fork()
    if agent == 0:
        ours.close()
        os.close(line)
        _be_agent(theirs)
    theirs.close()
    if wire.receive_raw(ours)[0] != _PREPARED:
        raise OSError(errno.EPROTO, "the agent did not come up")
    return agent, ours


def _serve(line: int, control: wire.Socket, agent: int, relays: ConnectionRelays) -> None:
    """Wait for the first message, be what it says, and carry what follows."""
    said, rest = _first_message(line)
    waking: Waking = marshal.loads(said)
    _become_itself(waking)
    wire.send(control, waking)
    while _carry(line, control, rest, agent, relays):
        _settle_files()
        os.set_blocking(line, True)
        os.write(line, frame(DATA, CONTROL, RESTED))
        # Here it is written down, and from here others of it go on.
        said, rest = _first_message(line)
        _become_itself(marshal.loads(said))
        os.write(line, frame(DATA, CONTROL, READY))


def _carry(
    line: int, control: wire.Socket, data: bytes, agent: int, relays: ConnectionRelays
) -> bool:
    """Relay until the machine ends; return True if it is to be saved instead."""
    carrier = Carrier(
        line,
        control,
        is_host=False,
        on_clock=_set_clock,
        on_relay=relays.begin_anew,
        on_mounts=lambda said: _mount_more(agent, said),
    )
    carrier.feed(data)
    carrier.run()
    return carrier.is_quiesced


def _mount_more(agent: int, said: bytes) -> bytes:
    """Let a child mount in the agent's namespace what the host has shown to this one: the answer."""
    told: Mounting = marshal.loads(said)
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        answer = b"E%d it was killed" % errno.EIO
        try:
            _mount_among(agent, told)
            answer = b"O"
        except newroot.BuildError as exc:
            answer = b"E%d %s" % (exc.cause.errno or errno.EIO, str(exc).encode())
        except Exception as exc:  # noqa: BLE001  the host must hear of it, whatever it is
            answer = b"E%d %s" % (errno.EIO, repr(exc).encode())
        finally:
            os.write(write, answer)
            os._exit(0)
    os.close(write)
    answer = os.read(read, 4096)
    os.close(read)
    os.waitpid(child, 0)
    return b"%d %s" % (told["number"], answer)


def _mount_among(agent: int, told: Mounting) -> None:
    trees = [_tree(source, attributes) for source, attributes in told["trees"]]
    namespace = os.open(f"{_PROC}/{agent}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    namespaces.setns(namespace, namespaces.CLONE_NEWNS)  # and on its root
    os.chdir("/")
    os.umask(0o022)
    shape: Any = told
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    newroot.run_or_undo(newroot.NewRoot(fd, shape, trees), told["steps"])


def _tree(source: str, attributes: int) -> int:
    fd = mounts.open_tree(source)
    mounts.mount_setattr(fd, attributes)
    return fd


def _become_itself(told: Waking | Rising) -> None:
    """Make the machine unique: entropy and time."""
    machine.add_entropy(told["entropy"])
    _set_clock(told["now_ns"])


def _settle_files() -> None:
    """Until no question about files is under way: each is answered after those before it."""
    os.sync()
    for place in SHARES * _ROUNDS:
        os.statvfs(place)


def _first_message(line: int) -> tuple[bytes, bytes]:
    """Read the host's first message, possibly long after the machine was saved; return it and the
    bytes behind.
    """
    data = b""
    while not (found := request(data)):
        piece = os.read(line, 1 << 16)
        if not piece:
            time.sleep(_LOOK_S)  # the other end is not open yet
        data += piece
    return found


def _set_clock(now_ns: int) -> None:
    time.clock_settime_ns(time.CLOCK_REALTIME, now_ns)


def _be_agent(control: wire.Socket) -> NoReturn:
    """The agent, PID 1 of its own namespace, on a root that holds what the host shows and no more."""
    groups = MachineGroups(_GROUPS)
    namespaces.unshare(_APART)
    build.make_mounts_private()
    mounts.mount("proc", _PROC, "proc", _IO)  # of the namespace that is ours
    mounts.mount("ringfence", _ROOT, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "mode=0755")
    wire.send_raw(control, _PREPARED)
    waking, _fds = wire.receive(control)
    if waking is None:
        os._exit(0)
    try:
        groups.limit(waking["agent"]["pids"], waking["memory_bytes"])
        namespaces.sethostname(waking["hostname"])
        _make_root(waking)
        enter(waking["agent"])
    except newroot.BuildError as exc:
        wire.refuse(control, exc.cause, exc.step)
        os._exit(1)
    except OSError as exc:
        wire.refuse(control, exc, "agent")
        os._exit(1)
    except Exception as exc:  # noqa: BLE001  the host must hear of it, whatever it is
        wire.refuse(control, OSError(errno.EPROTO, repr(exc)), "agent")
        os._exit(1)
    wire.answer(control, READY)
    MachineAgent(control, waking["agent"], groups).run()
    os._exit(0)


def _make_root(waking: Waking) -> None:
    """Build the root beside ours, and move there."""
    trees = [_tree(source, attributes) for source, attributes in waking["trees"]]
    proc = mounts.open_tree(_PROC, recursive=False)
    size = f"size={waking['size_bytes']},nr_inodes={waking['inodes']}"
    flags = mounts.MS_REMOUNT | mounts.MS_NOSUID | mounts.MS_NODEV
    mounts.mount("ringfence", _ROOT, "tmpfs", flags, size)
    os.chdir(_ROOT)
    os.umask(0)
    if waking["image"] >= 0:
        dev = build.enter_layers([trees[waking["image"]]])
        _move()
        # A link in an image may lead to "/", which from here on is its own.
        _furnish(waking, trees, proc, dev)
    else:
        _furnish(waking, trees, proc)
        _move()
    os.umask(0o022)
    privileges.set_no_new_privs()


def _furnish(waking: Waking, trees: list[int], proc: int, dev: int = -1) -> None:
    """Take the steps, in the root that is the current directory."""
    shape: Any = waking
    fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    newroot.run_steps(newroot.NewRoot(fd, shape, trees, proc, dev), waking["steps"])
    os.close(fd)


def _move() -> None:
    """Make the current directory, which is a mount, the root."""
    mounts.mount(".", "/", "none", mounts.MS_MOVE)
    os.chroot(".")
    os.chdir("/")
