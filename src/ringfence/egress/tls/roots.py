"""The roots that this host trusts: for servers that are verified here, and to be shown inside."""

from __future__ import annotations

import os

from ...policy.trust import JAVA_STORES, SYSTEM_BUNDLES, plan_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from ...policy.trust import Trust


def bundle_path() -> str:
    """The file of roots; "" when this host has none in any usual place.

    As OpenSSL does, `SSL_CERT_FILE` of this process is believed first. A Python built elsewhere has
    other places compiled in than this system's, so those are only looked at before the usual ones.
    """
    import ssl

    named = os.environ.get("SSL_CERT_FILE")
    if named:
        return named
    built_in = ssl.get_default_verify_paths().openssl_cafile
    return next((path for path in (built_in, *SYSTEM_BUNDLES) if os.path.isfile(path)), "")


def read_bundle() -> str:
    """The roots, PEM; "" when there are none.

    Raises:
        OSError: `SSL_CERT_FILE` names what cannot be read.
    """
    path = bundle_path()
    if not path:
        return ""
    with open(path, encoding="ascii", errors="replace") as file:  # comments may be in any language
        return file.read()


def trust(authority: str, shown: Iterable[str]) -> Trust:
    """How a sandbox that shows these host directories, at their own paths, trusts `authority` too.

    Raises:
        OSError: This host's roots cannot be read.
    """
    shown = tuple(f"{directory}/" for directory in shown)
    paths = [path for path in (*SYSTEM_BUNDLES, *JAVA_STORES) if path.startswith(shown)]
    # Nothing is bound over a link: what it leads to is one of the paths itself, or not shown.
    present = [path for path in paths if os.path.isfile(path) and os.path.realpath(path) == path]
    return plan_trust(authority, read_bundle(), present)


def client_context() -> ssl.SSLContext:
    """TLS to a server, verified in full against the host's roots: chain, dates and name.

    Raises:
        OSError: The roots cannot be read.
    """
    import ssl

    context = strict_context(ssl.PROTOCOL_TLS_CLIENT)
    path = bundle_path()
    if path:
        context.load_verify_locations(cafile=path)
    else:
        context.set_default_verify_paths()  # a directory of roots, one file each
    return context


def strict_context(side: int) -> ssl.SSLContext:
    """TLS 1.2 or 1.3, HTTP/1.1 alone, nothing negotiated twice; and a cut stream is no end of it."""
    import ssl

    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Python sets this with OpenSSL 3: whoever can cut a connection could then cut an answer short.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    return context
