"""Errors of ports as pages, for people who open a server inside in a browser.

Kept separate: it is HTML, and nothing else here is.
"""

from __future__ import annotations

import re
from html import escape

from starlette.responses import HTMLResponse

from .call import ApiError

_BROWSER = re.compile(r"mozilla|chrome|safari|firefox|edge|opera|msie", re.IGNORECASE)
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 36rem; margin: 15vh auto; padding: 0 1rem }}
</style></head>
<body><h1>{title}</h1><p>{text}</p></body>
</html>
"""


def is_browser(user_agent: str) -> bool:
    """Return whether a person will see the answer: E2B's proxy tells by the same words."""
    return _BROWSER.search(user_agent) is not None


def error_page(error: ApiError) -> HTMLResponse:
    """Return the page for an error of a port; its titles are those by which E2B's clients know it."""
    sandbox_id, port = error.form.get("sandboxId", ""), error.form.get("port")
    if port is not None:
        title = "Closed Port Error"
        text = f"{error}: sandbox {sandbox_id}. Connection refused on port {port}."
    elif sandbox_id:
        title, text = "Sandbox Not Found", f"{error}: {sandbox_id}. It has ended or is paused."
    else:
        title, text = "Error", str(error)
    return HTMLResponse(_PAGE.format(title=title, text=escape(text)), error.status)
