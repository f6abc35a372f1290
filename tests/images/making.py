"""Images made by the tests: layers, layouts, and pushing them to a registry."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.images.config import architecture


@dataclass
class Entry:
    """One member of a layer."""

    name: str
    content: bytes = b""
    mode: int = 0o644
    kind: bytes = tarfile.REGTYPE
    link: str = ""

    def add_to(self, tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(self.name)
        member.size, member.mode, member.type = len(self.content), self.mode, self.kind
        member.linkname, member.uid, member.gid, member.mtime = self.link, 0, 0, 1_600_000_000
        tar.addfile(member, io.BytesIO(self.content))


def directory(name: str, mode: int = 0o755) -> Entry:
    return Entry(name, mode=mode, kind=tarfile.DIRTYPE)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.LNKTYPE, link=target)


def program(name: str, path: str) -> Entry:
    return Entry(name, Path(path).read_bytes(), 0o755)


def layer(*entries: Entry) -> bytes:
    """A plain tar stream."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            entry.add_to(tar)
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Made:
    """An image as blobs."""

    layers: Sequence[bytes]
    config: dict[str, Any] = field(default_factory=dict)
    machine: str = field(default_factory=architecture)

    def __post_init__(self) -> None:
        self.configuration = json.dumps(
            {
                "architecture": self.machine,
                "os": "linux",
                "config": self.config,
                "rootfs": {"type": "layers", "diff_ids": [digest_of(one) for one in self.layers]},
            }
        ).encode()
        self.blobs = [gzip.compress(one, 1, mtime=0) for one in self.layers]
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": self._told(self.configuration, "config.v1+json"),
                "layers": [self._told(one, "layer.v1.tar+gzip") for one in self.blobs],
            }
        ).encode()

    @staticmethod
    def _told(data: bytes, kind: str) -> dict[str, Any]:
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": digest_of(data), "size": len(data)}

    def as_layout(self, path: Path) -> str:
        """An OCI layout in a new directory."""
        blobs = path / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for data in (self.configuration, self.manifest, *self.blobs):
            (blobs / digest_of(data).removeprefix("sha256:")).write_bytes(data)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        told = self._told(self.manifest, "manifest.v1+json")
        (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [told]}))
        return str(path)

    def as_docker_archive(self, path: Path, name: str) -> str:
        """What `docker save` writes."""
        listed = [
            {
                "Config": "config.json",
                "RepoTags": [name],
                "Layers": [f"{i}/layer.tar" for i in range(len(self.layers))],
            }
        ]
        members = {"manifest.json": json.dumps(listed).encode(), "config.json": self.configuration}
        members |= {f"{i}/layer.tar": one for i, one in enumerate(self.layers)}
        with tarfile.open(path, "w") as tar:
            for member, data in members.items():
                Entry(member, data).add_to(tar)
        return str(path)
