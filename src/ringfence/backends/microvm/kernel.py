"""A Linux kernel for guests: its location on this host, and the modules that a machine needs."""

from __future__ import annotations

import lzma
import os
import re
import zlib

from ...errors import BackendUnavailable

PLACES = ("/var/lib/ringfence/kernel", "~/.local/share/ringfence/kernel", "/")
VARIABLE = "RINGFENCE_GUEST_KERNEL"
_NEEDED = ("virtio_pci", "virtio_console", "fuse")
_FOR_IMAGES = "overlay"
_FOR_RULES = ("nf_tables", "nft_chain_nat", "nft_redir", "nft_ct")
_CHECKSUM = "crc32c_generic"  # asked for by name as connection tracking begins; newer kernels have it anyway
_MODINFO = re.compile(rb"(?:^|\0)depends=([^\0]*)\0")
_NAME = re.compile(r"([a-zA-Z0-9_-]+)\.ko(\.xz|\.gz)?$")
_MINE = PLACES[1 if os.geteuid() else 0]  # that this user may write to
HINT = (
    "unpack a distribution's kernel package with the modules virtio_pci, virtio_console, fuse and overlay, and "
    f"for rules of the network {', '.join(_FOR_RULES)}: "
    f"`mkdir -p {_MINE} && dpkg -x linux-image-*-amd64.deb {_MINE}`; or name the directory in {VARIABLE}"
)


class Kernel:
    """A kernel as packages install it: `boot/vmlinuz-RELEASE` and `lib/modules/RELEASE`."""

    def __init__(self, directory: str, release: str) -> None:
        self.release = release
        self.path = os.path.join(directory, "boot", f"vmlinuz-{release}")
        self._modules = _modules_of(directory, release)

    def stamp(self) -> str:
        info = os.stat(self.path)
        wanted = " ".join(self._wanted)
        return f"{self.release} {info.st_size} {info.st_mtime_ns} {wanted}"

    @property
    def lacks(self) -> list[str]:
        """Modules that a machine needs and that this kernel does not have."""
        return [name for name in _NEEDED if name not in self._modules]

    @property
    def has_overlays(self) -> bool:
        """True if a machine can have a root of its own over an image's files."""
        return _FOR_IMAGES in self._modules

    @property
    def has_rules(self) -> bool:
        """True if a machine can redirect its connections to the egress process."""
        return all(name in self._modules for name in _FOR_RULES)

    @property
    def _wanted(self) -> list[str]:
        wanted = [*_NEEDED, *([_FOR_IMAGES] if self.has_overlays else [])]
        if self.has_rules:
            wanted += [*([_CHECKSUM] if _CHECKSUM in self._modules else []), *_FOR_RULES]
        return wanted

    def modules(self) -> list[tuple[str, bytes]]:
        """Name and content of every module that a machine needs, in the order to load them."""
        found: dict[str, bytes] = {}

        def add(name: str) -> None:
            path = self._modules[name]
            if name in found or not path:  # "" is one that is built in
                return
            content = _content(path)
            depends = _MODINFO.search(content)
            for other in depends[1].decode().split(",") if depends else ():
                if other:
                    add(other.replace("-", "_"))
            found[name] = content

        for name in self._wanted:
            add(name)
        return list(found.items())


def find(place: str | None = None) -> Kernel:
    """The newest kernel at `place`, or where one usually is.

    Raises:
        BackendUnavailable: There is none that a machine can boot.
    """
    chosen = place or os.environ.get(VARIABLE)
    seen = []
    for directory in [chosen] if chosen else [os.path.expanduser(each) for each in PLACES]:
        for release in sorted(_releases(directory), key=_version, reverse=True):
            kernel = Kernel(directory, release)
            if not kernel.lacks and os.access(kernel.path, os.R_OK):
                return kernel
            lacking = ", ".join(kernel.lacks) or "leave to read it"
            seen.append(f"{kernel.path} lacks {lacking}")
    usual = f"{PLACES[0]} or {PLACES[1]}, nor one of this host's own in /boot"
    why = "; ".join(seen) or f"none in {chosen or usual}"
    raise BackendUnavailable(f"no kernel for guests: {why}", hint=HINT)


def _releases(directory: str) -> list[str]:
    try:
        names = os.listdir(os.path.join(directory, "boot"))
    except OSError:
        return []
    return [name.removeprefix("vmlinuz-") for name in names if name.startswith("vmlinuz-")]


def _version(release: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", release)]


def _modules_of(directory: str, release: str) -> dict[str, str]:
    """Name to path of every module; "" for what is built in."""
    found: dict[str, str] = {}
    for base in ("lib/modules", "usr/lib/modules"):
        top = os.path.join(directory, base, release)
        for parent, _directories, names in os.walk(top):
            for name in names:
                if match := _NAME.match(name):
                    found[match[1].replace("-", "_")] = os.path.join(parent, name)
        try:
            with open(os.path.join(top, "modules.builtin"), encoding="utf-8") as file:
                for line in file:
                    name = os.path.basename(line.strip()).removesuffix(".ko")
                    found.setdefault(name.replace("-", "_"), "")
        except OSError:
            continue
    return found


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        content = file.read()
    if path.endswith(".xz"):
        return lzma.decompress(content)
    if path.endswith(".gz"):
        return zlib.decompress(content, wbits=31)
    return content
