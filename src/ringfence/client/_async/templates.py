"""Templates of a server."""

from __future__ import annotations

from contextlib import aclosing

from ...errors import ExecError, ServerUnreachable
from ...model.base.helpful import helpful
from ...model.base.jsonform import loads
from ...model.template import TemplateRequest, TemplateView
from .. import uploads
from ..answers import pause_s
from .pauses import blocking, pause
from .transport import AsyncTransport, segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from typing import Any

    # `list` is a method here.
    Views = list[TemplateView]

_AT = "/v1/templates"
_PATIENCE = 3  # connections in a row that bring nothing


@helpful
class AsyncRemoteTemplates:
    """`client.templates`: those of this client, and public ones."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def begin(self, request: TemplateRequest | Mapping[str, Any]) -> TemplateView:
        """Have a template built; it is asked about by `get`, and by `follow`."""
        body = TemplateRequest.taken(request, "request").to_json()
        answer = await self._transport.json("POST", _AT, body=body, key=uploads.new_key())
        return TemplateView.from_json(answer)

    async def build(
        self,
        request: TemplateRequest | Mapping[str, Any],
        *,
        on_log: Callable[[dict[str, Any]], None] | None = None,
    ) -> TemplateView:
        """Have a template built, and wait for it.

        Args:
            on_log: Called with each line of the log: `at`, `step`, `level` and `message`.

        Raises:
            ExecError: A step failed; the template is what it was before.
        """
        asked = await self.begin(request)
        async with aclosing(self.follow(asked.id, asked.build_id)) as lines:
            async for line in lines:
                if on_log is not None and line["type"] == "log":
                    on_log(line)
                if line.get("error"):
                    raise ExecError(line["error"])
        return await self.get(asked.id)

    async def follow(
        self, template: str, build_id: str = ""
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Lines of a build's log, through as many connections as it takes; the last is of type `end`.

        Raises:
            ServerUnreachable: The server is gone, and does not come back.
        """
        offset, failures = 0, 0
        while True:
            before = offset
            params = {"follow": True, "build_id": build_id, "offset": offset}
            at = f"{_AT}/{segment(template)}/logs"
            try:
                async with self._transport.stream(at, params=params) as response:
                    async for text in response.aiter_lines():
                        line = loads(text)
                        offset = line["cursor"]
                        if line["type"] != "heartbeat":
                            yield line
                        if line["type"] == "end":
                            return
                raise ServerUnreachable("the log broke off")
            except ServerUnreachable:
                failures = 0 if offset != before else failures + 1
                if failures > _PATIENCE:
                    raise
                await pause(pause_s(failures, {}))

    async def get(self, template: str) -> TemplateView:
        """A template, by id or name.

        Raises:
            NotFound: There is none, or it is another client's.
        """
        answer = await self._transport.json("GET", f"{_AT}/{segment(template)}")
        return TemplateView.from_json(answer)

    async def list(self) -> Views:
        """Every template of this client, and public ones, oldest first."""
        answer = await self._transport.json("GET", _AT)
        return [TemplateView.from_json(each) for each in answer["items"]]

    async def publish(self, template: str, *, public: bool = True) -> TemplateView:
        """Let every client use a template; for admins."""
        answer = await self._transport.json(
            "PATCH", f"{_AT}/{segment(template)}", body={"public": public}, repeat=True
        )
        return TemplateView.from_json(answer)

    async def delete(self, template: str) -> None:
        """Remove a template, and end its builds; its sandboxes go on."""
        await self._transport.request("DELETE", f"{_AT}/{segment(template)}", repeat=False)

    async def has(self, digest: str) -> bool:
        """Return whether the server has an upload of this client."""
        answer = await self._transport.json("GET", f"/v1/uploads/{segment(digest)}")
        return bool(answer["present"])

    async def upload(self, path: str) -> str:
        """Send a file or directory of this machine, for `copy` steps; the digest to name it by."""
        return await blocking(uploads.upload, self._transport.blocking, path)
