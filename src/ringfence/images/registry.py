"""Pulling from a registry: every byte is checked against the digest that it was asked for by.

Source: OCI distribution specification 1.1, "Pull"; Docker's token authentication.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ImageNotFound, ImageRefused, InvalidRequest, RegistryError, StorageFull
from ..model.image import Image
from . import manifest
from .credentials import configured
from .reference import Reference
from .store import ImageStore
from .unpack import MOST_BYTES, Layer

try:
    import httpx2
except ImportError as exc:
    raise InvalidRequest(
        "pulling an image needs the extra `images`",
        field="image",
        hint='pip install "ringfence[images]"',
    ) from exc

Progress = Callable[[str, int, int], None]  # what, bytes so far, bytes in all

_ATTEMPTS = 4
_TIMEOUT = httpx2.Timeout(30.0, connect=15.0)
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')


def pull(
    name: str,
    *,
    store: ImageStore | None = None,
    credentials: tuple[str, str] | None = None,
    plain_http: bool = False,
    progress: Progress | None = None,
) -> Image:
    """Fetch an image for this machine and unpack it; what is here already is not fetched again.

    Args:
        credentials: Name and password; None takes those of the user's Docker or Podman files.
        plain_http: Speak HTTP without TLS; registries on this machine may do so in any case.
        progress: Called with a short name of each blob, bytes so far and bytes in all.

    Raises:
        InvalidRequest: `name` is not the name of an image.
        ImageNotFound: The registry does not have it, or not for this machine.
        RegistryError: It could not be reached, refused us, or broke off again and again.
        ImageRefused: What came is not what its digest says, or is made to do harm.
        StorageFull: The disk is full.
    """
    reference = Reference.parse(name)
    with Registry(reference, credentials or configured(reference), plain_http) as registry:
        document, digest = registry.document(reference.wanted)
        if chosen := manifest.choose(document, str(reference)):
            document, digest = registry.document(chosen)
        found = manifest.read(document)
        if sum(layer.size for layer in found.layers) > MOST_BYTES:
            raise ImageRefused(f"{reference} has more than {MOST_BYTES >> 30} GiB of layers")
        into = store or ImageStore()
        with into.fetching():
            for blob in (found.config, *found.layers):
                registry.fetch(blob, into.blob(blob.digest), progress)
            return _unpacked(name, into, found, digest)


def _unpacked(name: str, into: ImageStore, found: manifest.Manifest, digest: str) -> Image:
    with open(into.blob(found.config.digest), "rb") as file:
        configuration = file.read()
    layers = [Layer(into.blob(layer.digest), is_known=True) for layer in found.layers]
    image = into.add(name, configuration, layers, digest=digest)
    into.remember_blobs(image, [found.config.digest, *(layer.digest for layer in found.layers)])
    return image


class Registry:
    """Client for one repository of a registry."""

    def __init__(
        self, reference: Reference, credentials: tuple[str, str] | None, plain_http: bool
    ) -> None:
        self.reference, self.credentials = reference, credentials
        self._plain = plain_http
        # Redirects lead to storage hosts, which must not see the registry's token.
        self._http = httpx2.Client(timeout=_TIMEOUT, follow_redirects=True)
        self._authorization = ""

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def document(self, wanted: str) -> tuple[bytes, str]:
        """A manifest or index by tag or digest, and its digest."""
        headers = {"Accept": ", ".join(manifest.ACCEPTED)}
        document = b""
        try:
            with self._get(f"manifests/{wanted}", headers) as answer:
                for piece in answer.iter_bytes():
                    document += piece
                    if len(document) > manifest.MOST_BYTES:
                        raise ImageRefused(f"the manifest of {self.reference} is too large")
        except httpx2.HTTPError as exc:
            what = str(exc) or type(exc).__name__
            raise RegistryError(f"{self.reference.registry} broke off: {what}") from exc
        digest = f"sha256:{hashlib.sha256(document).hexdigest()}"
        if ":" in wanted and digest != wanted:
            raise ImageRefused(f"{self.reference}: expected digest {wanted}, got {digest}")
        return document, digest

    def fetch(self, blob: manifest.Descriptor, path: str, progress: Progress | None) -> None:
        """Bring a blob to `path`, from where an earlier attempt broke off.

        One of several at once fetches it and the others wait: together they would write into one file.
        """
        partial = f"{path}.partial"
        while not os.path.exists(path):
            with open(partial, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_at(file.fileno(), partial):
                    continue  # who was before us has renamed or removed it
                if os.path.exists(path):
                    os.unlink(partial)  # it had come before we opened this one
                else:
                    self._fetch_whole(blob, path, progress)

    def _fetch_whole(self, blob: manifest.Descriptor, path: str, progress: Progress | None) -> None:
        partial = f"{path}.partial"
        last: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                self._fetch_rest(blob, partial, progress)
                break
            except httpx2.HTTPError as exc:  # what came is kept, and the rest asked for
                last = exc
            except OSError as exc:  # of a small blob only when its file is closed
                raise StorageFull(f"{partial}: {exc.strerror}", hint="free disk space") from exc
        else:
            raise RegistryError(
                f"{self.reference.registry} broke off {_ATTEMPTS} times: {last}",
                hint="pull again: the download resumes",
            )
        if _digest_of(partial) != blob.digest:
            os.unlink(partial)
            raise ImageRefused(
                f"{self.reference}: the download does not match {blob.digest}",
                hint="pull again, or ask the owner of the image",
            )
        os.rename(partial, path)

    def _fetch_rest(
        self, blob: manifest.Descriptor, partial: str, progress: Progress | None
    ) -> None:
        with open(partial, "ab") as file:
            have = file.tell()
            if have >= blob.size:
                return
            headers = {"Accept-Encoding": "identity"}
            if have:
                headers["Range"] = f"bytes={have}-"
            with self._get(f"blobs/{blob.digest}", headers) as answer:
                if have and answer.status_code != 206:
                    file.truncate(0)  # it does not do ranges
                    have = 0
                for piece in answer.iter_raw():  # in no larger pieces: a cut would lose one
                    have += len(piece)
                    if have > blob.size:
                        raise ImageRefused(
                            f"{self.reference}: a blob is longer than its manifest says"
                        )
                    file.write(piece)
                    if progress:
                        progress(blob.digest[7:19], have, blob.size)
            if have < blob.size:
                raise httpx2.RemoteProtocolError(f"{blob.size - have} bytes are missing")

    # -- asking -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _get(self, path: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        try:
            with self._once(path, headers) as answer:
                if answer.status_code != 401:
                    yield self._checked(answer, path)
                    return
                self._authorize(answer.headers.get("www-authenticate", ""))
            with self._once(path, headers) as answer:
                yield self._checked(answer, path)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as exc:
            raise RegistryError(
                f"{self.reference.registry} cannot be reached: {exc}",
                hint="check the name and the network; for a registry without TLS add --plain-http",
            ) from exc

    def _once(self, path: str, headers: dict[str, str]) -> Any:
        plain = self._plain or self.reference.is_loopback
        scheme = "http" if plain else "https"
        url = f"{scheme}://{self.reference.api_host}/v2/{self.reference.repository}/{path}"
        if self._authorization:
            headers = {**headers, "Authorization": self._authorization}
        return self._http.stream("GET", url, headers=headers)

    def _checked(self, answer: httpx2.Response, path: str) -> httpx2.Response:
        if answer.is_success:
            return answer
        status = answer.status_code
        if status == 404:
            raise ImageNotFound(
                f"{self.reference.registry} has no {self.reference} ({path})", field="image"
            )
        if status in (401, 403):
            given = "with this name and password" if self.credentials else "without a password"
            raise RegistryError(
                f"{self.reference.registry} refuses {self.reference.repository} {given} ({status})",
                hint=f"docker login {self.reference.registry}, or give credentials",
                retryable=False,
            )
        raise RegistryError(
            f"{self.reference.registry} answered {status}", retryable=status >= 500 or status == 429
        )

    def _authorize(self, challenge: str) -> None:
        """Basic, or a token from where the registry says, which gets name and password."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if self.credentials:
                basic = httpx2.BasicAuth(*self.credentials)
                request = next(basic.auth_flow(httpx2.Request("GET", "http://localhost")))
                self._authorization = request.headers["Authorization"]
            return
        told = dict(_CHALLENGE.findall(rest))
        realm = told.get("realm", "")
        local = self.reference.is_loopback or self._plain
        if scheme.lower() != "bearer" or not realm.startswith(
            ("https://", "http://") if local else "https://"
        ):
            raise RegistryError(
                f"{self.reference.registry} asks for an unknown authentication scheme: {challenge[:80]!r}",
                retryable=False,
            )
        asked = {"scope": told.get("scope") or f"repository:{self.reference.repository}:pull"}
        if service := told.get("service"):
            asked["service"] = service
        answer = self._http.get(
            realm, params=asked, auth=self.credentials or httpx2.USE_CLIENT_DEFAULT
        )
        if answer.is_success:
            self._authorization = f"Bearer {self._token_of(answer)}"

    def _token_of(self, answer: httpx2.Response) -> str:
        try:
            told = answer.json()
            found = told.get("token") or told.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            found = None
        if not isinstance(found, str):
            raise RegistryError(
                f"{self.reference.registry} names {answer.url.host}, which gives no token",
                retryable=False,
            )
        return found


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
