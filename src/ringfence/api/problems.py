"""Errors in responses: RFC 9457 problem details, and the table of statuses by code."""

from __future__ import annotations

import http
import json
import logging

from starlette.responses import Response

from ..errors import (
    BadJson,
    Forbidden,
    InvalidRequest,
    LifecycleError,
    NotFound,
    RingfenceError,
    TaskFailed,
    Unauthenticated,
    Unsupported,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("ringfence.api")

MEDIA_TYPE = "application/problem+json"

STATUS = {
    "bad_json": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "permission_denied": 403,
    "not_found": 404,
    "sandbox_not_found": 404,
    "snapshot_not_found": 404,
    "image_not_found": 404,
    "exec_not_found": 404,
    "execution_not_found": 404,
    "file_not_found": 404,
    "too_slow": 408,
    "lifecycle": 409,
    "state_in_use": 409,
    "snapshot_corrupt": 409,
    "not_a_directory": 409,
    "is_a_directory": 409,
    "directory_not_empty": 409,
    "file_exists": 409,
    "sandbox_lost": 410,
    "too_large": 413,
    "invalid_request": 422,
    "unsupported": 422,
    "sandbox_not_supported": 422,
    "network_policy": 422,
    "image_refused": 422,
    "backend_unavailable": 422,
    "exec_failed": 422,
    "file_error": 422,
    "quota_exceeded": 429,
    "too_many_requests": 429,
    "connect_failed": 502,
    "registry": 502,
    "resource_exhausted": 503,
    "server_unreachable": 503,
    "exec_not_started": 503,
    "timeout": 504,
    "storage_full": 507,
}
"""Codes that are not here are the server's own fault: 500."""

RETRY_AFTER_S = 1


def problem(
    error: RingfenceError, headers: Mapping[str, str] | None = None, *, status: int | None = None
) -> Response:
    """The response for an error.

    Args:
        status: Another one than that of its code, where the framework itself has refused.
    """
    status = status or STATUS.get(error.code, 500)
    form = {
        "type": "about:blank",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": error.message,
        **error.to_json(),
    }
    more = {"cache-control": "no-store", **(headers or {})}
    if status in (429, 503) and error.retryable:
        more["retry-after"] = str(getattr(error, "retry_after_s", RETRY_AFTER_S))
    if status == 401:
        more["www-authenticate"] = 'Bearer realm="ringfence"'
    text = json.dumps(form, separators=(",", ":"))
    return Response(text, status, headers=more, media_type=MEDIA_TYPE)


def of_status(status: int, detail: str) -> RingfenceError:
    kinds = {
        400: BadJson,
        401: Unauthenticated,
        403: Forbidden,
        404: NotFound,
        405: Unsupported,
        409: LifecycleError,
    }
    return kinds.get(status, InvalidRequest)(detail)


def unforeseen(method: str, path: str, error: Exception) -> Response:
    """Build the response for an unexpected exception; the log has the details."""
    logger.error("%s %s failed", method, path[:256], exc_info=error)
    return problem(TaskFailed("internal error: see the server's log"))
