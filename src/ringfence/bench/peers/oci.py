"""runc and runsc: one small bundle of this host's /usr, made for the run and removed after it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile

from .peer import CommandPeer, PeerMissingError, call, program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_READ_ONLY = ["bind", "ro", "nosuid", "nodev"]
# Not a cgroup of the machine's own choosing: the bench has none to delegate.
OPTIONS = {"runc": (), "runsc": ("--platform=ptrace", "--network=none", "--ignore-cgroups")}
FOREVER = ["sleep", "infinity"]


class OciRuntime:
    """A runtime with a bundle; `live` adds a running container."""

    def __init__(self, name: str) -> None:
        if os.geteuid() != 0:
            raise PeerMissingError("needs root here")
        self.name = name
        self._program = program(name)
        self._directory = tempfile.mkdtemp(prefix="ringfence-bench-")
        self._containers: list[str] = []
        try:
            self._bundles = {
                "true": self._bundle("true", ["true"]),
                "live": self._bundle("live", FOREVER),
            }
        except BaseException:
            self.close()
            raise

    def once(self) -> CommandPeer:
        """A container's whole life, for one `true`."""
        return CommandPeer(
            self.name, *self._command("run", "--bundle", self._bundles["true"], self._id("once"))
        )

    def live(self) -> CommandPeer:
        """`true` in a container that runs already."""
        container = self._id("live")
        self._containers.append(container)
        start = self._command("run", "--detach", "--bundle", self._bundles["live"], container)
        # A detached container keeps our descriptors: give it none that anybody reads to its end.
        done = subprocess.run(
            start,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise PeerMissingError(
                f"`{self.name} run --detach` failed: exit status {done.returncode}"
            )
        return CommandPeer(self.name, *self._command("exec", container, "true"))

    def close(self) -> None:
        for container in self._containers:
            for command in ("kill", container, "KILL"), ("delete", "--force", container):
                try:
                    call(*self._command(*command))
                except PeerMissingError:
                    pass  # it is gone already
        self._containers.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _id(self, name: str) -> str:
        return f"ringfence-bench-{os.getpid()}-{name}"

    def _command(self, *words: str) -> list[str]:
        return [self._program, f"--root={self._directory}/state", *OPTIONS[self.name], *words]

    def _bundle(self, name: str, argv: list[str]) -> str:
        bundle = f"{self._directory}/{name}"
        make_root(f"{bundle}/rootfs")
        call(*self._spec_command(bundle))
        path = f"{bundle}/config.json"
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        fill(config, argv)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
        return bundle

    def _spec_command(self, bundle: str) -> list[str]:
        return [self._program, "spec", "--bundle", bundle]


def make_root(directory: str) -> None:
    """An empty root with the places for /usr, /proc, /dev and /sys, and links into /usr."""
    os.makedirs(directory)
    for name in ("usr", "proc", "dev", "sys", "tmp", "etc"):
        os.mkdir(f"{directory}/{name}")
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{directory}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{directory}/{name}")


def shown() -> list[str]:
    """Directories of the host that hold its programs and libraries."""
    own = [f"/{name}" for name in _LINKS]
    return ["/usr", *(p for p in own if os.path.isdir(p) and not os.path.islink(p))]


def fill(config: dict[str, Any], argv: list[str]) -> None:
    """Make what `spec` writes run `argv`, the programs of the host shown read-only."""
    config["process"]["args"] = argv
    config["process"]["terminal"] = False
    config["root"] = {"path": "rootfs", "readonly": True}
    config.setdefault("mounts", []).extend(
        {"destination": place, "source": place, "type": "bind", "options": _READ_ONLY}
        for place in shown()
    )
