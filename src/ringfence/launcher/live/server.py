"""Stops a process, makes a template of it, and copies of that: one helper for each process, on the host."""

from __future__ import annotations

import _signal as signal
import errno
import marshal
import posix as os

from ...linux import files, libc, privileges
from .. import cgroups, wire
from .copying import Place, program
from .sockets import CannotCopy
from .template import Template
from .tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CONTROL = 3
NAME = b"ringfence-copy"


def serve(control_fd: int) -> None:
    """Serve requests on a socket until it closes; all that was made here ends with it."""
    if libc.MACHINE != "x86_64":
        raise OSError(errno.ENOSYS, f"no copies of processes on {libc.MACHINE}")
    privileges.die_with_parent(signal.SIGKILL)
    # The zygote's handler reaps every child, and its descriptors are other sandboxes'.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.dup2(control_fd, _CONTROL)
    files.close_from(_CONTROL + 1)
    privileges.set_name(NAME)
    _prefer_for_oom()
    if os.geteuid() == 0:
        os.setgroups([])
    _Server(wire.adopt(_CONTROL)).run()


def _prefer_for_oom() -> None:
    """Copies inherit it, as programs have it: see `pid1.init`."""
    with open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"500")


class _Server:
    def __init__(self, control: wire.Socket) -> None:
        self.control = control
        self.tree: Tree | None = None
        self.template: Template | None = None

    def run(self) -> None:
        while True:
            message, fds = wire.receive(self.control)
            if message is None:
                break
            verb, argument = message
            try:
                answer = getattr(self, f"_do_{verb}")(argument, fds)
                wire.send_raw(self.control, b"O" + marshal.dumps(answer))
            except CannotCopy as exc:
                wire.refuse(self.control, OSError(errno.EOPNOTSUPP, str(exc)))
            except OSError as exc:
                wire.refuse(self.control, exc)
            except Exception as exc:  # noqa: BLE001  the host must hear of it, whatever it is
                wire.refuse(self.control, OSError(errno.EPROTO, repr(exc)))
            finally:
                for fd in fds:
                    os.close(fd)
        if self.tree is not None:
            self.tree.release()
            self.tree.drop()
        if self.template is not None:
            self.template.close()

    def _do_stop(self, argument: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        tree = Tree(argument["pid"], argument["streams"], argument["files"])
        tree.stop()
        self.tree = tree
        return tree.describe()

    def _do_release(self, _argument: None, _fds: list[int]) -> None:
        assert self.tree is not None
        self.tree.release()

    def _do_load(self, _argument: None, _fds: list[int]) -> None:
        assert self.tree is not None
        try:
            self.template = Template(self.tree)
        finally:
            self.tree.drop()

    def _do_copy(self, argument: dict[str, Any], fds: list[int]) -> None:
        """Descriptors: of namespaces, the streams, and the report's socket."""
        assert self.template is not None
        plan = argument["plan"]
        tasks = cgroups.open_procs(argument["cgroup_dirs"], plan["cgroup_version"])
        try:
            place = Place(
                plan,
                len(tasks),
                argument["namespaces"],
                len(fds) - len(argument["namespaces"]) - 1,
                argument["tag"],
                argument["taken"],
            )
            secrets, content = program(self.template, place)
            self.template.send(secrets, content, [*tasks, *fds])
        finally:
            for fd in tasks:
                os.close(fd)
