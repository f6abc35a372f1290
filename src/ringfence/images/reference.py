"""Names of images: `[REGISTRY/]REPOSITORY[:TAG][@DIGEST]`.

Source: OCI distribution specification 1.1, "Pulling manifests"; the defaults are Docker's, which
every tool follows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidRequest

DOCKER_HUB = "docker.io"
_HUB_API = "registry-1.docker.io"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst", ".oci")
_MOST = 512
_REPOSITORY = re.compile(
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REGISTRY = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
)
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Reference:
    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """`alpine`, `alpine:3.20`, `ghcr.io/owner/name@sha256:...`, `localhost:5000/mine:1`.

        Raises:
            InvalidRequest: It is none of these.
        """
        if not text:
            raise InvalidRequest("must not be empty", field="image", hint="as alpine:3.20")
        if len(text) > _MOST:
            raise _not_one(text[:40] + "...", "is too long")
        if text.endswith(_ARCHIVES) and not {"/", ":"} & {*text}:
            raise _not_one(text, "is the name of a file")
        name, at, digest = text.partition("@")
        if at and not is_digest(digest):
            raise _not_one(text, "has a digest that is not sha256: and 64 hexadecimal digits")
        registry, repository = _split(name)
        repository, colon, tag = repository.partition(":")
        if not _REGISTRY.fullmatch(registry):
            raise _not_one(text, f"names the registry {registry!r}")
        if not _REPOSITORY.fullmatch(repository):
            raise _not_one(text, f"names the repository {repository!r}")
        if colon and not _TAG.fullmatch(tag):
            raise _not_one(text, f"has the tag {tag!r}")
        if registry == DOCKER_HUB and "/" not in repository:
            repository = f"library/{repository}"
        return cls(registry, repository, tag or ("" if digest else "latest"), digest)

    @property
    def api_host(self) -> str:
        """The host, with a port if one was given, that serves its registry."""
        return _HUB_API if self.registry == DOCKER_HUB else self.registry

    @property
    def is_loopback(self) -> bool:
        """True if its registry is on this machine, where plain HTTP is usual."""
        host = self.registry.rpartition("]")[0] + "]" if "]" in self.registry else ""
        return (host or self.registry.partition(":")[0]) in _LOOPBACK

    @property
    def wanted(self) -> str:
        """The digest to request from the registry, or the tag without one."""
        return self.digest or self.tag

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"


def is_digest(text: str) -> bool:
    """Return whether it is `sha256:` and 64 lower-case hexadecimal digits: safe as a file name."""
    return _DIGEST.fullmatch(text) is not None


def _split(name: str) -> tuple[str, str]:
    first, slash, rest = name.partition("/")
    # Docker's rule: without a dot, a port or "localhost" the first part is a repository's.
    if slash and ("." in first or ":" in first or first == "localhost"):
        return ("docker.io" if first == "index.docker.io" else first), rest
    return DOCKER_HUB, name


def _not_one(text: str, what: str) -> InvalidRequest:
    hint = "an image is named [REGISTRY/]NAME[:TAG][@sha256:DIGEST], in lower case"
    if text.startswith(("./", "../", "/", "~")) or "\\" in text or text.endswith(_ARCHIVES):
        hint = "a path is not an image: use `ringfence image load PATH NAME`, then NAME"
    elif "://" in text:
        hint = "write the image without the URL, as alpine:3.20 or ghcr.io/OWNER/NAME:TAG"
    return InvalidRequest(f"image {text!r} {what}", field="image", hint=hint)
