"""Which peers there are for a measure: opened, or missing with a reason; closed together."""

from __future__ import annotations

from ..rows import Missing
from . import docker, oci, sandlock
from .peer import CommandPeer, Peer, PeerMissingError, program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .peer import Peer

    Opener = Callable[["Gathered"], Peer]


class Gathered:
    """The peers of one measure, by name, in the order asked for; a context manager."""

    def __init__(self, openers: dict[str, Opener]) -> None:
        self.peers: dict[str, Peer] = {}
        self.missing: list[Missing] = []
        self._closers: list[Callable[[], None]] = []
        try:
            for name, opener in openers.items():
                self._open(name, opener)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, opener: Opener) -> None:
        try:
            peer = opener(self)
        except PeerMissingError as exc:
            self.missing.append(Missing(name, str(exc)))
            return
        self.peers[name] = peer
        self._closers.append(peer.close)

    def closing(self, close: Callable[[], None]) -> None:
        """Call `close` at the end, whatever happens until then."""
        self._closers.append(close)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()

    def __enter__(self) -> Gathered:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _oci_once(name: str) -> Opener:
    return lambda all_: _kept(all_, oci.OciRuntime(name)).once()


def _oci_live(name: str) -> Opener:
    return lambda all_: _kept(all_, oci.OciRuntime(name)).live()


def _kept(all_: Gathered, engine: oci.OciRuntime) -> oci.OciRuntime:
    all_.closing(engine.close)
    return engine


def _docker(all_: Gathered) -> docker.Docker:
    engine = docker.Docker()
    all_.closing(engine.close)
    return engine


BUBBLEWRAP: dict[str, Opener] = {"bwrap": lambda _: bubblewrap()}
# A whole life: made, one `true`, gone.
ONCE: dict[str, Opener] = {
    "nsjail": lambda _: nsjail(),
    "firejail": lambda _: firejail(),
    "sandlock": lambda _: sandlock.Sandlock(),
    "runc": _oci_once("runc"),
    "runsc": _oci_once("runsc"),
    "docker": lambda all_: _docker(all_).once(),
}
# `true` in something that lives already, where the peer has such a thing.
LIVE: dict[str, Opener] = {
    "docker": lambda all_: _docker(all_).live(),
    "runc": _oci_live("runc"),
    "runsc": _oci_live("runsc"),
    "sandlock": lambda _: sandlock.Sandlock(),
}


def bubblewrap() -> Peer:
    """All namespaces and the host's root read-only: no filter, no Landlock, no limits."""
    options = "--unshare-all --ro-bind / / --proc /proc --dev /dev"
    return CommandPeer("bwrap", program("bwrap"), *options.split(), "true")


def nsjail() -> Peer:
    options = "-Mo --really_quiet --chroot /"
    return CommandPeer("nsjail", program("nsjail"), *options.split(), "--", program("true"))


def firejail() -> Peer:
    return CommandPeer("firejail", program("firejail"), "--quiet", "--noprofile", "true")
