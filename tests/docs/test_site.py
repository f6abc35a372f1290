"""What the hooks of the documentation site put together; `make docs` builds the site itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from tools import site

import ringfence

DOCS = Path(__file__).parents[2] / "docs"


def test_the_index_names_every_page() -> None:
    """Decisions are added by their directory."""
    named = {path for pages in site.sections_of_index().values() for _, path, _ in pages}
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}

    assert {"index.md"} == {page for page in pages - named if not page.startswith("decisions/")}


def _public_names() -> list[str]:
    """`__all__`, which the package makes when it is asked for."""
    names: list[str] = getattr(ringfence, "__all__")  # noqa: B009
    return names


def test_the_reference_has_every_public_name() -> None:
    directives = [line for line in "".join(site.public_names()).splitlines() if line[:3] == ":::"]

    assert sorted(f"::: ringfence.{name}" for name in _public_names()) == sorted(directives)


@pytest.mark.full
def test_shared_descriptions_say_something_of_a_parameter_that_is_there() -> None:
    """`make docs` fails for a parameter without a description; this, for a description without a parameter."""
    source = "\n".join(p.read_text() for p in (DOCS.parent / "src" / "ringfence").rglob("*.py"))
    table = tomllib.loads((DOCS / "reference" / "parameters.toml").read_text())
    shared = {name: text for name, text in table.items() if isinstance(text, str)}

    assert len(shared) > 50
    for name, text in shared.items():
        assert re.search(rf"\b{name}: ", source), name
        assert text.endswith((".", "`")), name
    for owner, own in table.items():
        assert isinstance(own, str) or hasattr(ringfence, owner), owner
