"""Log messages about execs: ids and numbers, never commands or output."""

from __future__ import annotations

import logging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..model.execs.exec_view import ExecView

FACTS = "facts"
"""The attribute of a log record that has its ids and numbers."""

_logger = logging.getLogger("ringfence.execs")


def began(view: ExecView) -> None:
    if not _logger.isEnabledFor(logging.INFO):
        return
    _logger.info("exec running", extra={FACTS: _ids(view)})


def ended(view: ExecView) -> None:
    is_fault = view.storage_fault or (view.problem is not None and view.state == "lost")
    level = logging.WARNING if is_fault else logging.INFO
    if not _logger.isEnabledFor(level):
        return
    facts, status = _ids(view), view.status
    facts.update(stdout_bytes=view.stdout_bytes, stderr_bytes=view.stderr_bytes)
    if status is not None:
        known = {"exit_code": status.exit_code, "signal": status.signal}
        facts.update({name: value for name, value in known.items() if value is not None})
        facts["duration_s"] = round(status.duration_s, 6)
        if status.killed_by:
            facts["killed_by"] = status.killed_by
    if view.problem is not None:
        facts["code"] = view.problem.code
    if view.storage_fault:
        facts["storage_fault"] = view.storage_fault
    _logger.log(level, "exec %s", view.state, extra={FACTS: facts})


def unwritten(view: ExecView, error: Exception) -> None:
    """Its end could not be written down: the next server will take it for lost."""
    _logger.warning(
        "the end of an exec could not be written down: %s", error, extra={FACTS: _ids(view)}
    )


def _ids(view: ExecView) -> dict[str, Any]:
    return {"exec": view.id, "sandbox": view.sandbox_id}
