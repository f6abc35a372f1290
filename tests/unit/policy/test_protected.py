"""Names that are protected in a mount, by what is in its directory on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Mount, SandboxSpec
from ringfence.model.mount import READ_WRITE
from ringfence.policy.protected import DEFAULTS, WHERE, wanted

pytestmark = pytest.mark.anyone
MOUNT = Mount("/work", "/somewhere", READ_WRITE)


def names(source: Path) -> set[str]:
    return {name for name, _ in wanted(MOUNT, SandboxSpec(), str(source))}


def test_what_depends_on_nothing_is_always_protected(tmp_path: Path) -> None:
    assert {*DEFAULTS} - {*WHERE} == names(tmp_path)


@pytest.mark.parametrize("marker", sorted({*WHERE.values()}))
@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling link", "link to itself"])
def test_what_depends_on_another_is_protected_where_that_is_there_in_any_form(
    tmp_path: Path, marker: str, kind: str
) -> None:
    """A dangling link can be replaced, or what it names be made."""
    depending = {name for name, where in WHERE.items() if where == marker}
    assert depending.isdisjoint(names(tmp_path))
    place = tmp_path / marker
    if kind == "file":
        place.touch()
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to({"link": "/etc", "dangling link": "nowhere"}.get(kind, marker))

    assert {*DEFAULTS} - {*WHERE} | depending == names(tmp_path)
