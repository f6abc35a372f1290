"""The page of permissions is the table that the server goes by.

`python -m tests.docs.test_permissions` prints the rows.
"""

from __future__ import annotations

import re
from pathlib import Path

from ringfence.api.access import permissions
from ringfence.api.access.caller import SCOPES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "permissions.md"


def _routes() -> list[str]:
    rows = []
    for (method, path), rule in permissions.ROUTES.items():
        shown = path.replace(":path}", "}")
        cells = ["yes" if scope in rule.scopes else "" for scope in SCOPES]
        rows.append(f"| `{method} {shown}` | {', '.join(rule.changes)} | {' | '.join(cells)} |")
    return rows


def _fields() -> list[str]:
    return [f"| `{name}` | {most} |" for name, most in permissions.FIELDS.items()]


def test_the_page_has_every_route_and_field_as_they_are_judged() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    routes = [line for line in lines if re.match(r"\| `[A-Z]+ /", line)]
    fields = [line for line in lines if re.match(r"\| `[a-z_.]+` \|", line)]

    assert routes == _routes()
    assert fields == _fields()


if __name__ == "__main__":
    print("\n".join((*_routes(), "", *_fields())))
