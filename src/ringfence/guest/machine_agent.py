"""The agent in a machine with a Linux of its own: what it can do there beyond others, and its start."""

from __future__ import annotations

import functools
import os
import signal

from ..launcher import wire
from ..launcher.helpers import layers, trees
from . import users
from .agent import Agent
from .boot import enter_user_namespace, start_mapper
from .groups import MachineGroups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .settings import Settings


def enter(settings: Settings) -> None:
    """From root of the machine to root of a user namespace, which owns nothing of the machine's.

    Precondition: the root is the guest's, with its own /proc.
    """
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    enter_user_namespace(settings, start_mapper(settings["id_map"]))


class MachineAgent(Agent):
    groups: MachineGroups

    def _do_freeze(self, _reply: wire.Socket, _fds: list[int], frozen: bool) -> bytes:
        """Nothing that execs have started changes a file meanwhile."""
        self.groups.freeze(frozen)
        return b""

    def _do_save(self, reply: wire.Socket, fds: list[int]) -> None:
        """Write all of the root, without what is shown in it, to the pipe that came along, as tar.

        Over an image, what differs from it: then the names of the image's files come along too.
        """
        out, *names = fds
        pack = functools.partial(trees.pack, out, "/", one_file_system=True)
        if names:
            pack = functools.partial(layers.pack, out, names[0], "/", one_file_system=True)
        self._by_child(reply, fds, users.become_root, pack)

    def _do_load(self, reply: wire.Socket, fds: list[int], is_layer: bool) -> None:
        """Unpack what `save` has written over the root."""
        work = layers.unpack if is_layer else trees.unpack
        unpack = functools.partial(work, fds[0], "/", one_file_system=True)
        self._by_child(reply, fds, users.become_root, unpack)
