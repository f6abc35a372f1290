"""Launchers: programs that run another program in some confinement, as argv templates.

A launcher gets the session's files as a directory on the host and shows them inside at the paths that
every backend has. It must pass its standard input on as it is, and give a PID namespace: else nobody
could be sure that all processes have ended.
"""

from __future__ import annotations

import os
import shutil

from ...errors import BackendUnavailable
from ...model.base.record import dataclass, field
from ..local.mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, eq=False, repr=False)
class Launcher:
    """A program that starts another one confined.

    Attributes:
        name: Of the backend.
        argv: The command; the program's own argv follows. `{root}` is the host directory with the files
            writable inside, `{etc}` and `{agent}` those read-only, `{uid}` the user inside; a word
            `{shown}` becomes `show` for every host path that is shown inside, with `{source}` and `{target}`;
            `{masked}` hides, in bubblewrap's syntax, the files of /proc about the whole host; `{own}` is a
            directory for the launcher's own files, `{host_id}` the host's uid of the user inside.
        env: Of the launcher itself, besides PATH; its values may use the same placeholders.
        programs: Programs that must be on PATH, or paths.
        seals: Protections it enforces, name to reason, by its own documentation.
        lacks: Capabilities it lacks beyond those that every launcher lacks, name to reason.
        shows: More host paths that the program needs to see.
        carries: Why it cannot pass a socket inside; empty where it can.
        filtered: The agent installs our own system-call filter inside.
        anew: Paths of the launcher to cover where the agent isolates its own processes inside too, so that
            they cannot see them. Empty: it does not.
        within: Its argv where the agent makes namespaces of its own inside, through which mounts and
            network rules come; empty: it cannot.
        probe_timeout_s: Timeout of its version command; 0: it is not run.
        idle: Words of stderr lines that do not explain a failed start.
    """

    name: str
    argv: tuple[str, ...]
    show: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    seals: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    carries: str = ""
    filtered: bool = False
    within: tuple[str, ...] = ()
    anew: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    probe_timeout_s: float = 0.0
    maps_ids = False  # it maps the user's id itself: host root starts it, not the slot's user

    def prepare(
        self, words: Mapping[str, str], shown: list[tuple[str, str]], *, isolated: bool
    ) -> None:
        """Write what the launcher reads before it starts, to files in `{own}`."""

    def describe(self) -> str:
        """Which program it is, for who reads a report; empty where its name says it."""
        return ""

    def check(self) -> None:
        """Check that all programs it needs are here.

        Raises:
            BackendUnavailable: A program is missing, or it cannot pass the agent's socket.
        """
        if self.carries:
            raise BackendUnavailable(f"{self.name}: {self.carries}")
        for program in self.programs:
            if shutil.which(program) is None:
                raise BackendUnavailable(
                    f"{self.name}: {program!r} is not installed",
                    hint="install it, or put it on PATH",
                )

    def command(
        self, words: Mapping[str, str], shown: list[tuple[str, str]], *, isolated: bool = False
    ) -> list[str]:
        """Its argv, filled in: around isolation of the agent's own, or the other."""
        command: list[str] = []
        for word in (self.within or self.argv) if isolated else self.argv:
            if word == "{masked}":
                command += _masks()
                continue
            if word != "{shown}":
                command.append(word.format(**words))
                continue
            for source, target in shown:
                command += [each.format(source=source, target=target) for each in self.show]
        return command

    def environment(self, words: Mapping[str, str]) -> dict[str, str]:
        path = os.environ.get("PATH", "/usr/bin:/bin")
        return {"PATH": path, **{name: text.format(**words) for name, text in self.env.items()}}


VIEW = (
    *("bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"),
    *("--unshare-uts", "--unshare-cgroup-try", "--as-pid-1", "--uid", "{uid}", "--gid", "{uid}"),
    *("--hostname", "ringfence", "--clearenv", "--cap-drop", "ALL"),
    *("--bind", "{root}", "/", "--ro-bind", "{etc}", "/etc", "{shown}"),
    *("--ro-bind", "{agent}", "/.ringfence", "--proc", "/proc"),
    *("--dev", "/dev", "--chdir", "/"),
)
_NAMESPACES = "bubblewrap gives it its own user, mount, pid, ipc, uts and network namespaces"
SEALS = {
    "namespaces": _NAMESPACES,
    "capabilities": "bubblewrap drops all",
    "no_new_privs": "bubblewrap sets it",
    "network": "a namespace with nothing but lo",
    "read_only_mounts": "bubblewrap shows the host's files read-only",
}


def bubblewrap(path: str = "bwrap") -> Launcher:
    """`bwrap`: namespaces and a private root; the filter is ours, and there are no limits."""
    return Launcher(
        name="bubblewrap",
        # Codex makes namespaces of its own below, which takes a /proc that is whole and can be written to.
        argv=(path, *VIEW[1:], "{masked}", "--remount-ro", "/proc", "--disable-userns", "--"),
        show=("--ro-bind", "{source}", "{target}"),
        programs=(path,),
        seals={**SEALS, "nested_user_namespaces": "bubblewrap forbids them"},
        filtered=True,
        # The agent masks /proc, and forbids further namespaces, when it has made its own.
        within=(path, *VIEW[1:], "--"),
    )


def _masks() -> list[str]:
    found = template.masked()
    files = [("--ro-bind", "/dev/null", path) for path in found if not os.path.isdir(path)]
    empty = [("--tmpfs", path, "--remount-ro", path) for path in found if os.path.isdir(path)]
    return [word for mask in (*files, *empty) for word in mask]


def sandbox_exec(profile: str) -> Launcher:
    """macOS's `sandbox-exec` with a profile text; see `seatbelt`."""
    return Launcher(
        name="sandbox-exec",
        argv=("sandbox-exec", "-p", profile.replace("{", "{{").replace("}", "}}")),
        programs=("sandbox-exec",),
        carries="macOS has no PID namespaces: Ringfence cannot tell that all processes have ended",
    )
