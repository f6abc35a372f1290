"""What is measured about adapters, where their frameworks are not installed."""

from __future__ import annotations

import sys

import pytest

from ringfence.bench.measures import adapters
from ringfence.bench.rows import Missing
from ringfence.bench.settings import Settings

pytestmark = [pytest.mark.anyone, pytest.mark.full]


@pytest.mark.parametrize(
    ("name", "framework"), [("langchain", "deepagents"), ("mcp.server", "mcp"), ("adk", "google")]
)
def test_the_framework_is_read_from_the_adapter(name: str, framework: str) -> None:
    statements = adapters.framework_of(f"ringfence.integrations.{name}")

    assert any(line.split()[1].partition(".")[0] == framework for line in statements)
    assert not any(
        line.split()[1].partition(".")[0] in sys.stdlib_module_names for line in statements
    )
    assert not any("ringfence" in line for line in statements)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS", ("smolagents",))
    (row,) = adapters.measure(Settings(quick=True))

    assert isinstance(row, Missing)
    assert "smolagents" in row.peer
    assert "No module named 'smolagents'" in row.why


def test_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of ours that needs nothing is measured here, too."""
    ms, modules = adapters.cost("outcome")

    assert ms > 0
    assert "ringfence.integrations.outcome" in modules
