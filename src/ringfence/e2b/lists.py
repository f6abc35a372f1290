"""Filters and pages of E2B's lists."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

from ..errors import NotFound
from ..sessions.live import Live
from .call import ApiError, Call
from .codec import timestamp
from .notes import notes_of

MOST_PAGE = 100
ORDER = "x-ringfence-order"
"""Field of a list that a gateway gets: what its items are in the order of."""


def started_after(text: str, found: list[Live]) -> list[Live]:
    """Keep those that were started at this time or later, as clients have read it from an answer."""
    try:
        # A plus sign that was not quoted is a space here.
        after = timestamp(datetime.fromisoformat(text.replace(" ", "+")).timestamp())
    except (ValueError, OverflowError):
        raise ApiError(400, "startedAfter: must be a time, such as 2026-01-31T12:00:00Z") from None
    return [live for live in found if timestamp(live.created_at) >= after]


def of_template(call: Call, template: str, found: list[Live]) -> list[Live]:
    """Keep those of a template by its id or name; the tag makes no difference."""
    named = {id(live): notes_of(live.metadata).template for live in found}
    ids = {text: _id_of(call, text) for text in {template, *named.values()}}
    return [live for live in found if ids[named[id(live)]] == ids[template]]


def _id_of(call: Call, template: str) -> str:
    """The id of a built template, else the name that was given."""
    name, catalogue = template.rpartition("/")[2].partition(":")[0], call.service.manager.templates
    if call.shared.settings.spec_of(name) is not None:
        return name  # as when a sandbox is created, the configuration comes first
    build = catalogue.records.build(name)
    try:
        return catalogue.find(build.template if build else name, call.caller.sees).id
    except NotFound:
        return name


def page(
    call: Call, found: list[tuple[str, Any]], is_newest_first: bool
) -> tuple[list[Any], dict[str, str]]:
    """Cut a page out of a sorted list, by the token of the page before."""
    query = call.request.query_params
    limit = query.get("limit", str(MOST_PAGE))
    if not limit.isdecimal() or len(limit) > 6 or not 1 <= int(limit) <= MOST_PAGE:
        raise ApiError(400, f"limit: must be from 1 to {MOST_PAGE}")
    if token := query.get("nextToken", ""):
        try:
            last = base64.urlsafe_b64decode(token).decode()
        except ValueError:
            raise ApiError(400, "nextToken: is not a token") from None
        found = [each for each in found if (each[0] < last) == is_newest_first and each[0] != last]
    page, headers = found[: int(limit)], {}
    if len(found) > len(page):
        headers["x-next-token"] = base64.urlsafe_b64encode(page[-1][0].encode()).decode()
    if call.request.scope["state"].get("is_of_gateway"):  # which merges the pages of its nodes
        headers[ORDER] = ",".join(key for key, _ in page)
    return [each for _key, each in page], headers
