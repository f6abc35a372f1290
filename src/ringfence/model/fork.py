"""Results of forking a sandbox and of merging one's files into another place."""

from __future__ import annotations

from .base.model import Model
from .base.record import dataclass
from .changes import PathChange

MOST_FORKS = 1000
MOST_ANCESTORS = 16
PROCESSES = ("auto", "none", "required")
SIDES = ("ours", "theirs")


@dataclass(frozen=True, eq=False, repr=False)
class CopiedProcess(Model):
    """A process that goes on in a fork, and whether it draws other random numbers there.

    The kernel's random numbers differ in all copies. This is about generators in the memory of the process,
    such as those of OpenSSL and of Python's `random`.

    Attributes:
        exec_id: Id of its context or exec.
        command: Name of the program.
        pid: Inside; the same in the fork. None: not known, and it is the interpreter of the context or the
            first process of the exec.
        is_reseeded: True if each copy seeds them anew before it runs a cell.
        reason: Why not; empty where it does.
    """

    exec_id: str
    command: str
    pid: int | None = None
    is_reseeded: bool = False
    reason: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class ForkReport(Model):
    """Report of what a fork took along.

    Attributes:
        parent: Id of the sandbox that was forked.
        has_processes: True if something that ran goes on in the fork; False: only the files are there.
        reason: Why something was left out; empty where nothing was, or nothing was asked for.
        contexts: Ids of the contexts that go on, which are the same in the fork.
        processes: Ids of other processes that go on, which are the same in the fork.
        left_out: Execs that ran in the parent, and are not in the fork: id and command.
        copies: Processes of what goes on. On a server, in gVisor and in microVMs one for each context and exec:
            their child processes seed nothing anew.
    """

    parent: str
    has_processes: bool = False
    reason: str = ""
    contexts: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    copies: tuple[CopiedProcess, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class MergeConflict(Model):
    """A path that both sides changed, each in its own way.

    Attributes:
        path: Relative to the directory that is merged.
        reason: How the two changes exclude each other.
        base: Text of the file in the snapshot; None where it is no text of at most 64 KiB, or no file.
        ours: The same of the target.
        theirs: The same of the branch.
    """

    path: str
    reason: str
    base: str | None = None
    ours: str | None = None
    theirs: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Merged(Model):
    """Outcome of a merge.

    Attributes:
        is_applied: True if the target has the changes now; False after a dry run and where there are conflicts.
        changes: What the merge changes in the target, in order of path. Paths are relative to the
            directory that is merged.
        conflicts: In order of path. Where there is one, nothing is written.
    """

    is_applied: bool = False
    changes: tuple[PathChange, ...] = ()
    conflicts: tuple[MergeConflict, ...] = ()
