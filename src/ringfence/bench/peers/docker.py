"""docker: an image of empty directories made for the run; the host's /usr is shown in it."""

from __future__ import annotations

import os
import subprocess
import tempfile

from . import oci
from .peer import CommandPeer, PeerMissingError, call, program


class Docker:
    """An engine with our image; nothing is pulled."""

    name = "docker"

    def __init__(self) -> None:
        self._program = program("docker")
        self._image = f"ringfence-bench:{os.getpid()}"
        self._containers: list[str] = []
        try:
            call(self._program, "version", "--format", "{{.Server.Version}}")
        except PeerMissingError as exc:
            raise PeerMissingError(f"the client is there, the engine is not: {exc}") from exc
        with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as directory:
            root = f"{directory}/root"
            oci.make_root(root)
            archive = subprocess.run(
                ["tar", "-C", root, "-c", "."], capture_output=True, check=True
            )
        call(self._program, "import", "-", self._image, stdin=archive.stdout)

    def once(self) -> CommandPeer:
        """A container's whole life, for one `true`."""
        return CommandPeer(self.name, *self._run("--rm"), "true")

    def live(self) -> CommandPeer:
        """`true` in a container that runs already."""
        container = call(*self._run("--detach"), *oci.FOREVER).decode().strip()
        self._containers.append(container)
        return CommandPeer(self.name, self._program, "exec", container, "true")

    def close(self) -> None:
        for container in self._containers:
            self._try("rm", "--force", container)
        self._containers.clear()
        self._try("rmi", "--force", self._image)

    def _run(self, option: str) -> list[str]:
        volumes = [f"--volume={place}:{place}:ro" for place in oci.shown()]
        return [self._program, "run", option, "--network=none", *volumes, self._image]

    def _try(self, *words: str) -> None:
        try:
            call(self._program, *words)
        except PeerMissingError:
            pass  # it is gone already
