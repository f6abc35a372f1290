"""State of an egress process that ends TLS: trusted roots, and each sandbox's authority."""

from __future__ import annotations

from ..http.scrub import spellings
from . import roots, terminate
from .ca import Authority

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from ..http.site import Site
    from ..io.streams import Stream
    from .hello import Hello


class Terminator:
    """Made before the process gives up reading this host's files."""

    def __init__(self) -> None:
        self._roots = roots.client_context()
        # Whatever is imported on first use only: later it could not be read.
        "warm.test".encode("idna")  # by `ssl`, for the name of a server
        spellings("warm")
        Authority.create(["warm.test"]).context("warm.test")

    def make(self, hosts: Iterable[str]) -> dict[str, str]:
        """A new authority for `hosts`, as the host process keeps it."""
        authority = Authority.create(hosts)
        return {"cert": authority.certificate, "key": authority.private_key()}

    def authority(self, given: dict[str, str]) -> Authority:
        return Authority.load(given["cert"], given["key"])

    async def serve(
        self,
        client: Stream,
        hello: Hello,
        site: Site,
        authority: Authority,
        reach: Callable[[], Awaitable[Stream]],
    ) -> None:
        """As `terminate.serve`, with this host's roots."""
        await terminate.serve(client, hello, site, authority, reach, self._roots)
