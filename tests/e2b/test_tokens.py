"""Tokens of sandboxes and what each opens, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.e2b.tokens import Tokens

pytestmark = pytest.mark.anyone


def session(session_id: str, sandbox_id: str = "sbx-1") -> Any:
    """Make the ids that a token is derived from."""
    return SimpleNamespace(id=session_id, sandbox_id=sandbox_id)


@pytest.mark.parametrize("later", [session("ses-2"), session("ses-1", "sbx-2")])
def test_a_token_opens_one_session_of_one_sandbox(later: Any) -> None:
    """Another owner may get a sandbox's id later; no client chooses a session's id."""
    tokens, first = Tokens(None), session("ses-1")

    assert tokens.opens(first, tokens.of(first))
    assert tokens.opens_traffic(first, tokens.of_traffic(first))
    assert not tokens.opens(later, tokens.of(first))
    assert not tokens.opens_traffic(later, tokens.of_traffic(first))
    assert tokens.boot_id(first, 1) != tokens.boot_id(later, 1)


def test_a_token_of_one_use_is_none_of_another() -> None:
    """Traffic tokens open ports and nothing else; the sandbox's own token opens ports as well."""
    tokens, first = Tokens(None), session("ses-1")

    assert not tokens.opens(first, tokens.of_traffic(first))
    assert tokens.opens_traffic(first, tokens.of(first))
    assert not Tokens(None).opens(first, tokens.of(first)), "of another server"
