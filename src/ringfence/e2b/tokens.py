"""Tokens of sandboxes, derived from a secret of the server, and signatures made with them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import time
import uuid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..sessions.live import Live
    from ..store.directory import StateDirectory

_SECRET_BYTES = 32
_FILE = "e2b.secret"
_MOST_PATH = 4096  # PATH_MAX: no file has a longer one
_SIGNATURE_CHARACTERS = 46  # "v1_" and 32 bytes in base64
_MOST_DIGITS = 19  # of a moment in seconds


class Tokens:
    """Tokens that can be shown again: nothing is stored but one secret.

    Args:
        directory: Where the secret is kept; None: it ends with this process.
    """

    def __init__(self, directory: StateDirectory | None) -> None:
        self._secret = os.urandom(_SECRET_BYTES) if directory is None else _secret_in(directory)

    def of(self, live: Live) -> str:
        """Return the token that opens a sandbox's processes, files and interpreters."""
        return self._derive("envd", live)

    def of_traffic(self, live: Live) -> str:
        """Return the token that opens a sandbox's ports."""
        return self._derive("traffic", live)

    def boot_id(self, live: Live, boots: int) -> str:
        """Return an id of the sandbox's present boot, in the form of random(4)."""
        return f"{uuid.UUID(self._derive(f'boot {boots}', live)[:32], version=4)}\n"

    def _derive(self, use: str, live: Live) -> str:
        # With the session's id, which no client chooses: another owner may take a sandbox's id again.
        text = f"{use}:{live.id}:{live.sandbox_id}"
        return hmac.digest(self._secret, text.encode(), "sha256").hex()

    def upload(self, template_id: str, name: str, until: int) -> str:
        """Return the signature that lets files be uploaded for a template, until that time."""
        text = f"upload:{template_id}:{name}:{until}"
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()

    def opens(self, live: Live, shown: str) -> bool:
        return _same(shown, self.of(live))

    def opens_traffic(self, live: Live, shown: str) -> bool:
        """Return whether this is a token that opens the sandbox's ports."""
        # Both are compared, so that the time does not tell which kind was shown.
        return _same(shown, self.of_traffic(live)) | self.opens(live, shown)

    def signs(self, live: Live, operation: str, query: Mapping[str, str]) -> str:
        """Judge a signed URL: empty if it is valid, else what E2B says.

        Args:
            operation: `read` or `write`; a signature is good for one of them and one path.
        """
        if not self.signed(operation, query)(live):
            return "invalid signature"
        until = query.get("signature_expiration", "")
        if until and int(until) < time.time():
            return "signature is already expired"
        return ""

    def signed(self, operation: str, query: Mapping[str, str]) -> Callable[[Live], bool]:
        """Return what tells whether a signed URL was made with a sandbox's token, however long ago.

        A stranger has every sandbox tried on the loop: what all have in common is hashed once.
        """
        path, until = query.get("path", ""), query.get("signature_expiration", "")
        user, shown = query.get("username", ""), query.get("signature", "")
        is_number = not until or (until.isdecimal() and len(until) < _MOST_DIGITS)
        # With a colon in the name, one for reading `a:write` would be one for writing `a`.
        is_form = (
            len(shown) == _SIGNATURE_CHARACTERS and len(path) <= _MOST_PATH and ":" not in user
        )
        begun = hashlib.sha256(f"{path[:_MOST_PATH]}:{operation}:{user[:_MOST_PATH]}:".encode())

        def is_signed(live: Live) -> bool:
            whole = begun.copy()
            whole.update(":".join([self.of(live), *([until] if until else [])]).encode())
            digest = base64.b64encode(whole.digest()).rstrip(b"=").decode()
            return _same(shown, f"v1_{digest}")

        return is_signed if is_number and is_form else lambda _: False


def _same(shown: str, kept: str) -> bool:
    return hmac.compare_digest(shown.encode(), kept.encode())


def _secret_in(directory: StateDirectory) -> bytes:
    path = directory.file(_FILE)
    try:
        with open(path, "rb") as file:
            secret = file.read()
        if len(secret) == _SECRET_BYTES:
            return secret
    except FileNotFoundError:
        pass
    # Renamed into place: a file cut short by a crash would be a secret that is easy to guess.
    secret, beside = os.urandom(_SECRET_BYTES), f"{path}.new"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    return secret
