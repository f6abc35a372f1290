"""A long answer is encoded in turns: the C encoder holds the GIL, and with it the loop, for a whole call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringfence.api import models

pytestmark = pytest.mark.anyone
ITEM = {"path": "a" * 100, "line": 1, "text": 'a "quoted" text'}


@pytest.fixture(name="longest")
def fixture_longest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each call of the encoder has made, in characters."""
    made: list[int] = []
    real = models._as_json

    def encode(form: Any) -> str:
        text = real(form)
        made.append(len(text))
        return text

    monkeypatch.setattr(models, "_as_json", encode)
    return made


def test_a_long_list_is_encoded_item_by_item(longest: list[int]) -> None:
    form = {"items": [ITEM] * 10_000, "truncated": False, "names": ["b"] * 10_000}

    answer = models.json_answer(form)

    assert json.loads(bytes(answer.body)) == form
    assert max(longest) == len(json.dumps(ITEM, separators=(",", ":")))


def test_a_short_answer_takes_one_call(longest: list[int]) -> None:
    form = {"items": [ITEM] * 50, "truncated": False}

    answer = models.json_answer(form, 201)

    assert (201, form) == (answer.status_code, json.loads(bytes(answer.body)))
    assert len(longest) == 1
