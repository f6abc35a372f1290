"""Manifests and indexes: which blobs an image is made of.

Source: OCI image specification 1.1, "Image Manifest", "Image Index"; Docker's manifest schema 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import ImageNotFound, ImageRefused
from .config import architecture
from .reference import is_digest

ACCEPTED = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MOST_BYTES = 4 << 20
_MOST_LAYERS = 512


@dataclass(frozen=True)
class Descriptor:
    """A blob: what it is called, and how long it is."""

    digest: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Manifest of an image for one platform."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


def choose(document: bytes, name: str) -> str | None:
    """The digest of the manifest for this machine, of an index; None when `document` is no index.

    Raises:
        ImageNotFound: The index has nothing for this machine.
    """
    told = _read(document)
    if "manifests" not in told:
        return None
    offered = []
    for each in told["manifests"]:
        machine = each.get("platform") or {}
        offered.append(f"{machine.get('os', '?')}/{machine.get('architecture', '?')}")
        if machine.get("os", "linux") == "linux" and machine.get("architecture") in (
            architecture(),
            None,
        ):
            return _descriptor(each).digest
    raise ImageNotFound(
        f"{name} has no image for linux/{architecture()}, only {', '.join(offered) or 'nothing'}",
        field="image",
    )


def read(document: bytes) -> Manifest:
    """A manifest.

    Raises:
        ImageRefused: It is not one.
    """
    told = _read(document)
    try:
        layers = tuple(_descriptor(each) for each in told["layers"])
        if len(layers) > _MOST_LAYERS:
            raise ImageRefused(f"the image has {len(layers)} layers; {_MOST_LAYERS} is the limit")
        return Manifest(_descriptor(told["config"]), layers)
    except (KeyError, TypeError, ValueError) as exc:
        raise ImageRefused(f"the manifest cannot be read: {exc!r}") from exc


def _read(document: bytes) -> dict[str, Any]:
    try:
        told = json.loads(document)
    except (ValueError, RecursionError) as exc:
        raise ImageRefused(f"the manifest is not JSON: {exc}") from exc
    if not isinstance(told, dict):
        raise ImageRefused("the manifest is not a JSON object")
    if told.get("schemaVersion") == 1:
        raise ImageRefused("the manifest is of Docker's old schema 1, which is not supported")
    return told


def _descriptor(told: dict[str, Any]) -> Descriptor:
    digest, size = told["digest"], told["size"]
    if not isinstance(digest, str) or not is_digest(digest):
        raise ImageRefused(f"{str(digest)[:80]!r} is not a SHA-256 digest")
    if not isinstance(size, int) or size < 0:
        raise ImageRefused(f"{size!r} is not the size of a blob")
    return Descriptor(digest, size)
