"""Where a server is, and with which key it opens."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from functools import cache

from ..errors import InvalidRequest

SERVER, KEY = "RINGFENCE_SERVER", "RINGFENCE_API_KEY"
_SOCKET = "ringfence.sock"
_SUN_PATH = 107  # include/uapi/linux/un.h UNIX_PATH_MAX, less the closing NUL
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:@\[\]]+)(?::[0-9]{1,5})?")
_FORMS = "unix:PATH, http://HOST:PORT or https://HOST"


@dataclass(frozen=True)
class Address:
    """A server.

    Attributes:
        url: What requests are relative to.
        unix: The path of its unix socket; empty for TCP.
        shown: As it was given, for messages.
    """

    url: str
    unix: str
    shown: str

    @classmethod
    def parse(cls, given: str | None) -> Address:
        """`unix:PATH`, `http://HOST:PORT` or `https://HOST[:PORT]`.

        None takes $RINGFENCE_SERVER, else the socket that `ringfence serve` of this user makes.

        Raises:
            InvalidRequest: It is something else.
        """
        if given is not None and (not isinstance(given, str) or not given):
            raise InvalidRequest(f"must be an address, not {given!r}", field="server", hint=_FORMS)
        text = given or os.environ.get(SERVER) or f"unix:{default_socket()}"
        if text.startswith("unix:"):
            path = text.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/"):
                hint = f"as unix:{os.path.abspath(path or _SOCKET)}"
                raise InvalidRequest(f"{text!r} has no absolute path", field="server", hint=hint)
            if "\0" in path or len(os.fsencode(path)) > _SUN_PATH:
                what = f"{text!r} is longer than {_SUN_PATH} bytes, or has a NUL"
                hint = "no unix socket has such a path: `ringfence serve` prints its own"
                raise InvalidRequest(what, field="server", hint=hint)
            return cls("http://localhost", path, text)
        if not text.startswith(("http://", "https://")) or len(text.split("/")) < 3:
            raise InvalidRequest(
                f"{text!r} is not a server address", field="server", hint=_meant(text)
            )
        if "@" in text.split("/")[2]:
            hint = 'give the key as key="..."'
            raise InvalidRequest(
                "has a user in the URL, which is not sent", field="server", hint=hint
            )
        if re.search("[?#]", text):
            hint = f"remove it: {re.split('[?#]', text)[0]}"
            raise InvalidRequest(f"{text!r} has a query or fragment", field="server", hint=hint)
        if not _HOST.fullmatch(text.split("/")[2]) or not 0 <= _port_of(text) < 65536:
            what = f"{text!r} has no host, or a port that is none"
            raise InvalidRequest(what, field="server", hint=_FORMS)
        return cls(text.rstrip("/"), "", text)

    def tls_context(self) -> ssl.SSLContext:
        """How certificates are checked: those of public authorities for `https:`, none else."""
        return _public_authorities() if self.url.startswith("https:") else _no_authorities()


@cache
def _public_authorities() -> ssl.SSLContext:
    # Reading the authorities takes 50 ms: once for all clients of this process.
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)


@cache
def _no_authorities() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _meant(text: str) -> str:
    """Complete an address that has no scheme."""
    if "://" in text:
        return _FORMS
    return f"did you mean {'unix:' if text.startswith('/') else 'http://'}{text}?"


def hint_of(address: Address, exc: Exception) -> str:
    """Say what to do about a connection that was not made."""
    if "WRONG_VERSION_NUMBER" in str(exc):  # OpenSSL's, of an answer without TLS
        return f"the server there serves without TLS: http:{address.url.removeprefix('https:')}"
    if "CERTIFICATE_VERIFY_FAILED" in str(exc):
        return "its certificate must be of a public authority, and name this host"
    if address.unix and os.path.isdir(address.unix):
        return f"it is a directory: did you mean {address.shown.rstrip('/')}/{_SOCKET}?"
    return "start it with `ringfence serve`; if it is just being started, try again"


def _port_of(text: str) -> int:
    digits = text.split("/")[2].rpartition("]")[2].rpartition(":")[2]
    return int(digits) if digits.isdigit() else 0


def key_of(given: str | None) -> str:
    """The key to use: the one given, else $RINGFENCE_API_KEY; empty for none.

    Raises:
        InvalidRequest: It cannot be sent, as a file of two lines cannot.
    """
    key = os.environ.get(KEY, "").strip() if given is None else given
    if not isinstance(key, str) or not key.isascii() or not (key.isprintable() and " " not in key):
        hint = "pass the line that `ringfence keys create` printed, without spaces"
        raise InvalidRequest("is not an API key", field="key", hint=hint)
    return key


def default_socket() -> str:
    """Of a daemon that this user started without options."""
    from ..model.places import state_directory

    return os.path.join(state_directory(), _SOCKET)
