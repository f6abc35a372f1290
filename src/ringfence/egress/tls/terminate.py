"""Ends a client's TLS in the name of the server it asked for, and speaks TLS with that server itself.

Only so can requests inside be judged, and a credential be added that the sandbox never sees. The
client trusts the authority of its sandbox; the server is verified as any client would verify it.
"""

from __future__ import annotations

import ssl

from ..http.exchange import exchange, part
from ..http.reader import Reader
from ..io.loop import Deadline
from ..refused import Refused
from .stream import TlsStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..http.site import Site
    from ..io.streams import Stream
    from .ca import Authority
    from .hello import Hello

_PROTOCOL = "http/1.1"
_HUNG_UP = "the client closed the connection"
_ACCESS_DENIED, _NO_PROTOCOL = 49, 120  # RFC 8446, section 6: alert descriptions
# Alerts of a client that does not trust the certificate.
_DISBELIEF = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "ACCESS_DENIED")


async def serve(
    client: Stream,
    hello: Hello,
    site: Site,
    authority: Authority,
    reach: Callable[[], Awaitable[Stream]],
    roots: ssl.SSLContext,
) -> None:
    """Serve the one request of a client whose ClientHello named `site`; closes both streams.

    Args:
        client: Its first bytes are those of `hello`, still to be read.
        site: With the scheme `https`.
        reach: Connects to the server, without TLS.
        roots: Whom to trust; from `roots.client_context`.

    Raises:
        Refused: For the record; the client was told as far as it could be.
        OSError: The client went away.
    """
    try:
        secured = await _accept(client, hello, site, authority)
    except BaseException:
        client.abort()
        raise

    async def reach_secured() -> Stream:
        return await _connect(await reach(), site, roots)

    await exchange(secured, site, reach_secured)


def alert(description: int) -> bytes:
    """A fatal alert in plain text: how a client without an agreement is told. RFC 8446, section 6."""
    return b"\x15\x03\x03\x00\x02\x02" + bytes([description])


async def _accept(client: Stream, hello: Hello, site: Site, authority: Authority) -> TlsStream:
    if hello.alpn and _PROTOCOL not in hello.alpn:
        await _say(client, site, _NO_PROTOCOL)
        raise Refused(
            f"the client speaks only {', '.join(hello.alpn)!a}, and where TLS is ended there is only"
            " HTTP/1.1"
        )
    try:
        context = authority.context(site.host)
    except Refused:
        await _say(client, site, _ACCESS_DENIED)
        raise
    secured = TlsStream(client, context)
    try:
        with Deadline(site.limits.header_s):
            await secured.handshake()
    except TimeoutError:
        raise Refused(f"no TLS handshake within {site.limits.header_s:g} s") from None
    except ssl.SSLError as exc:
        raise _no_agreement(exc, site) from exc
    return secured


async def _say(client: Stream, site: Site, description: int) -> None:
    try:
        with Deadline(site.limits.header_s):
            await client.write(alert(description))
    except (OSError, TimeoutError):
        return
    await part(Reader(client))


def _no_agreement(exc: ssl.SSLError, site: Site) -> Refused:
    """Why the client did not go on: most often it does not trust the sandbox's authority."""
    if any(word in (exc.reason or "") for word in _DISBELIEF) or _said(exc) == _HUNG_UP:
        return Refused(
            f"the client does not accept the certificate that this sandbox has for {site.host}: it"
            " pins another, brings roots of its own, or was started without the variables that name"
            f" the sandbox's ({_said(exc)})"
        )
    return Refused(f"no TLS with the client: {_said(exc)}")


def _said(exc: ssl.SSLError) -> str:
    # The reason alone, before Python 3.11.4.
    if isinstance(exc, ssl.SSLEOFError) or exc.reason == "UNEXPECTED_EOF_WHILE_READING":
        return _HUNG_UP
    return (exc.reason or "no reason given").lower().replace("_", " ")


async def _connect(server: Stream, site: Site, roots: ssl.SSLContext) -> Stream:
    """TLS with the server, which must be who it was asked for.

    Raises:
        Refused: It is not, or does not speak TLS.
    """
    secured = TlsStream(server, roots, server_name=site.host)
    try:
        with Deadline(site.limits.connect_s):
            await secured.handshake()
    except TimeoutError:
        server.abort()
        raise
    except ssl.SSLCertVerificationError as exc:
        server.abort()
        raise Refused(
            f"this host does not trust the certificate of {site.host}: {exc.verify_message}",
            status=502,
        ) from None
    except ssl.SSLError as exc:
        server.abort()
        raise Refused(f"no TLS with {site.host}: {_said(exc)}", status=502) from None
    except BaseException:
        server.abort()
        raise
    return secured
