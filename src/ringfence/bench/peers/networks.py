"""Peers with network access for a confined program: user-mode network stacks, and one with proxies."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile

from .. import traffic
from .peer import call, program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE_S = 120.0
_NOBODY = 65534


class Network:
    """A network peer; each run is a process of its own, timed inside it.

    Args:
        wrap: From a client's command line to that of the whole peer.
        host: Address of the host's loopback from inside.
    """

    def __init__(self, name: str, wrap: Callable[[list[str]], list[str]], host: str) -> None:
        self.name, self.host = name, host
        self._wrap = wrap

    def run(self, verb: str, port: int, *counts: int) -> list[float]:
        """The seconds that the client took, sorted.

        Raises:
            PeerMissingError: It does not work here.
        """
        argv = self._wrap(traffic.client(verb, self.host, port, *counts, python=_python()))
        return traffic.seconds(call(*argv))

    def close(self) -> None:
        """Nothing is left to remove."""


def pasta(port: int) -> Network:
    """`pasta` with the port spliced through to the host's loopback: its fastest way."""
    words = "--config-net -q -t none -u none -U none"
    found = program("pasta")
    return _usable(
        Network(
            "pasta",
            lambda argv: [*_as_nobody(), found, *words.split(), "-T", str(port), "--", *argv],
            "127.0.0.1",
        ),
        port,
    )


_SLIRP = """
import os, subprocess, sys
slirp, *argv = sys.argv[1:]
ready, tell = os.pipe()
go = os.pipe()
inside = subprocess.Popen(
    ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-S", "-c",
     "import os, sys; os.write(1, b'.'); os.read(0, 1); os.execvp(sys.argv[1], sys.argv[1:])", *argv],
    stdin=go[0], stdout=subprocess.PIPE)
inside.stdout.read(1)
options = ["--configure", "--mtu=65520", f"--ready-fd={tell}", str(inside.pid), "tap0"]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
outside = subprocess.Popen([slirp, *options], pass_fds=[tell], **quiet)
os.close(tell)
if not os.read(ready, 1):
    inside.kill()
    sys.exit("slirp4netns did not come up")
os.write(go[1], b".")
sys.stdout.buffer.write(inside.stdout.read())
inside.wait()
outside.terminate()
outside.wait()
sys.exit(inside.returncode)
"""


def slirp4netns(port: int) -> Network:
    """`slirp4netns` with its largest packets; the host's loopback is its gateway."""
    found = program("slirp4netns")
    wrapper = [_python(), "-S", "-c", _SLIRP, found]
    return _usable(
        Network("slirp4netns", lambda argv: [*_as_nobody(), *wrapper, *argv], "10.0.2.2"), port
    )


class SandboxRuntime(Network):
    """`srt` of the npm package @anthropic-ai/sandbox-runtime: HTTP proxies over unix sockets."""

    def __init__(self) -> None:
        found = program("srt")
        self._directory = tempfile.TemporaryDirectory(prefix="ringfence-bench-")
        settings = f"{self._directory.name}/settings.json"
        with open(settings, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "network": {"allowedDomains": ["127.0.0.1"], "deniedDomains": []},
                    "filesystem": {"denyRead": [], "allowWrite": [], "denyWrite": []},
                },
                file,
            )
        start = [found, "--settings", settings, "-c"]
        # Its words it joins to a shell's line by itself, unquoted. The client is to use the proxy.
        quoted = ["env", "TRAFFIC_PROXY=1"]
        super().__init__("srt", lambda argv: [*start, shlex.join([*quoted, *argv])], "127.0.0.1")

    def close(self) -> None:
        self._directory.cleanup()


def sandbox_runtime(port: int) -> Network:
    peer = SandboxRuntime()
    try:
        return _usable(peer, port)
    except BaseException:
        peer.close()
        raise


def _usable(peer: Network, port: int) -> Network:
    peer.run("connections", port, 1)
    return peer


def _python() -> str:
    """Find a Python that any user may run."""
    return "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable


def _as_nobody() -> list[str]:
    """Both are made for ordinary users; as root they become somebody by themselves, and fail at it."""
    if os.geteuid():
        return []
    ids = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    return [program("setpriv"), *ids]


OPENERS: dict[str, Callable[[int], Network]] = {
    "pasta": pasta,
    "slirp4netns": slirp4netns,
    "srt": sandbox_runtime,
}
