"""Refusals in words and fields, places in lists, and streams of events: what clients read of each."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ringfence import errors
from ringfence.api import names, problems, schemas
from ringfence.api.access.caller import ADMIN, Caller
from ringfence.api.routes import events
from ringfence.api.validation_errors import error_of
from ringfence.errors import BadJson, InvalidRequest
from ringfence.model.event import Event

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("error", "status", "retry", "asks_for_key"),
    [
        (errors.TooManyRequests("x"), 429, "1", False),
        (errors.ResourceExhausted("x"), 503, "1", False),
        (errors.QuotaExceeded("x"), 429, None, False),
        (errors.ServerUnreachable("x", retryable=False), 503, None, False),
        (errors.TimeoutExceeded("x", retryable=True), 504, None, False),
        (errors.Unauthenticated("x"), 401, None, True),
        (errors.Forbidden("x"), 403, None, False),
        (errors.InvalidRequest("x", field="f", hint="h"), 422, None, False),
        (errors.TaskFailed("x"), 500, None, False),
        (errors.SandboxLost("x"), 410, None, False),
        (errors.StorageFull("x"), 507, None, False),
        (errors.BadJson("x"), 400, None, False),
        (errors.TooLarge("x"), 413, None, False),
        (errors.TooSlow("x"), 408, None, False),
        (errors.LifecycleError("x"), 409, None, False),
    ],
)
def test_a_refusal_has_its_status_and_says_when_to_come_again(
    error: errors.RingfenceError, status: int, retry: str | None, asks_for_key: bool
) -> None:
    answer = problems.problem(error, {"x-more": "1"})
    assert (status, "application/problem+json") == (answer.status_code, answer.media_type)
    assert retry == answer.headers.get("retry-after")
    assert asks_for_key == ("www-authenticate" in answer.headers)
    assert ("no-store", "1") == (answer.headers["cache-control"], answer.headers["x-more"])
    form = json.loads(bytes(answer.body))
    assert (status, "x", error.code) == (form["status"], form["detail"], form["code"])
    assert (error.field, error.hint, error.retryable) == (
        form["field"], form["hint"], form["retryable"]
    )  # fmt: skip
    assert 405 == problems.problem(error, status=405).status_code


def test_what_was_not_foreseen_tells_nothing_of_itself() -> None:
    answer = problems.unforeseen("GET", "/x", ValueError("of the server alone"))
    assert 500 == answer.status_code
    assert b"of the server alone" not in bytes(answer.body)
    assert b"task_failed" in bytes(answer.body)


@pytest.mark.parametrize(
    ("error", "field", "said", "hint"),
    [
        ({"type": "missing", "loc": ("query", "path")}, "path", "is missing", "add it to the query string"),
        ({"type": "missing", "loc": ("body", "a", 0, "b")}, "a[0].b", "is missing", "add it to the body"),
        ({"type": "int_parsing", "loc": ("query", "n"), "input": "x"}, "n",
         "must be a whole number, not 'x'", ""),
        ({"type": "greater_than_equal", "loc": ("query", "n"), "input": "0", "ctx": {"ge": 1}}, "n",
         "must be at least 1, not 0", ""),
        ({"type": "less_than_equal", "loc": ("body", "n"), "input": 9.5, "ctx": {"le": 9.0}}, "n",
         "must be at most 9, not 9.5", ""),
        ({"type": "string_too_long", "loc": ("body", "n"), "ctx": {"max_length": 3}}, "n",
         "must have at most 3 characters", ""),
        ({"type": "extra_forbidden", "loc": ("body", "n")}, "n", "no such field", ""),
        ({"type": "string_pattern_mismatch", "loc": ("body", "n"), "input": "x",
          "ctx": {"pattern": "^(admin|user|metrics)$"}}, "n", "must be admin, user or metrics, not 'x'", ""),
        ({"type": "string_pattern_mismatch", "loc": ("query", "label", 1), "input": "x",
          "ctx": {"pattern": "^[^=]+="}}, "label[1]", "'x' is not KEY=VALUE", ""),
        ({"type": "string_pattern_mismatch", "loc": ("query", "mode"), "input": "x",
          "ctx": {"pattern": "^0?[0-7]{3}$"}}, "mode", "must be three octal digits, such as 644, not 'x'", ""),
        ({"type": "bool_parsing", "loc": ("query", "n"), "input": "x" * 90}, "n",
         "must be true or false, not '" + "x" * 79 + "…", ""),
        ({"type": "of_ours", "loc": ("body",), "msg": "said already"}, "", "said already", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place_and_what_was_given(
    error: dict[str, Any], field: str, said: str, hint: str
) -> None:
    found = error_of([error, {"type": "missing", "loc": ("body", "later")}])
    assert (field, said, hint) == (found.field, found.message, found.hint)
    assert isinstance(found, InvalidRequest)


def test_what_is_no_json_is_told_from_what_is_malformed() -> None:
    found = error_of([{"type": "json_invalid", "loc": ("body", 3), "ctx": {"error": "no end"}}])
    assert isinstance(found, BadJson)
    assert "no end" in found.message
    assert isinstance(error_of([]), InvalidRequest)


@pytest.mark.parametrize(
    "bad", ["x", "eA=", "====", "LQ==", "w6k=", "_w==", schemas.write_cursor("a b")]
)
def test_a_place_in_a_list_is_one_that_a_page_has_told(bad: str) -> None:
    assert "" == schemas.read_cursor("")
    assert schemas.write_cursor(None) is None
    told = schemas.write_cursor("sbx-0190b5a4-0000")
    assert "sbx-0190b5a4-0000" == schemas.read_cursor(str(told))
    with pytest.raises(InvalidRequest) as refused:
        schemas.read_cursor(bad)
    assert "cursor" == refused.value.field


def test_a_label_is_a_name_and_a_value() -> None:
    assert {"a": "b=c", "d": ""} == schemas.read_labels(["a=b", "d=", "a=b=c"])
    for bad in ("=x", "x", "", "a=\0"):
        with pytest.raises(InvalidRequest) as refused:
            schemas.read_labels(["a=b", bad])
        assert "label" == refused.value.field


def test_a_name_of_a_file_has_so_many_characters_whatever_they_are() -> None:
    for kind, least, most in ((names.Path, 1, 4095), (names.LastName, 0, 1024)):
        read = TypeAdapter(kind).validate_python
        for text in ("\udcff" * most, "x" * least):
            assert text == read(text)
        for bad in (*(["x" * (least - 1)] if least else []), "x" * (most + 1), 1, None):
            with pytest.raises(ValidationError):
                read(bad)
    for bad in ("", 1):
        with pytest.raises(ValidationError):
            TypeAdapter(names.Path).validate_python(bad)


class Log:
    """A log of events, some of which are lost."""

    epoch = "e1"

    def __init__(self, *kept: Event) -> None:
        self.kept, self.lost, self.listeners = [*kept], 0, 0
        self.asked: list[int] = []

    def since(self, seq: int) -> tuple[list[Event], int]:
        self.asked.append(seq)
        lost, self.lost = self.lost, 0
        return [each for each in self.kept if each.seq > seq], lost

    def listen(self, wake: Any) -> Any:
        self.listeners += 1
        self.wake = wake

        def stop() -> None:
            self.listeners -= 1

        return stop


def event(seq: int, client: str) -> Event:
    form = {"seq": seq, "time": 1.0, "kind": "created", "client_id": client, "session_id": "s"}
    return Event.from_json({**form, "sandbox_id": "sbx-1"})


def stream(log: Log, caller: Caller, **asked: Any) -> Any:
    service: Any = SimpleNamespace(manager=SimpleNamespace(events=log))
    return events.events(service, caller, follow=True, **asked)


async def test_a_stream_has_a_clients_own_events_and_says_what_was_missed() -> None:
    log = Log(event(1, "ann"), event(2, "bob"), event(3, "ann"))
    log.lost = 4
    answer = await stream(log, Caller("ann"))
    text = answer.body_iterator
    assert 'event: gap\ndata: {"lost": 4}\n\n' == await anext(text)
    for seq in (1, 3):
        told = await anext(text)
        assert told.startswith(f"id: e1-{seq}\nevent: created\ndata: {{")
    assert 1 == log.listeners
    following = anext(text)
    log.kept.append(event(5, "ann"))
    log.wake(log.kept[-1])
    assert (await following).startswith("id: e1-5\n")
    assert [0, 3] == log.asked, "what others did is not read again"
    await text.aclose()
    assert 0 == log.listeners
    every = (await stream(log, Caller("root", ADMIN))).body_iterator
    assert ["1", "2", "3", "5"] == [(await anext(every)).split("\n")[0][7:] for _ in range(4)]
    await every.aclose()


@pytest.mark.parametrize(
    ("since", "last_id", "begins_at", "is_anew"),
    [
        (0, "", 0, False), (2, "", 2, False), (0, "e1-2", 2, False), (1, "e1-2", 2, False),
        (2, "e0-2", 0, True), (2, "e1-", 0, True), (2, "e1-x", 0, True), (2, "2", 0, True),
    ],
)  # fmt: skip
async def test_a_stream_goes_on_after_the_last_event_that_was_seen_or_says_that_it_cannot(
    since: int, last_id: str, begins_at: int, is_anew: bool
) -> None:
    log = Log(event(1, "ann"), event(3, "ann"))
    answer = await stream(log, Caller("ann"), since=since, last_event_id=last_id)
    first = await anext(answer.body_iterator)
    assert is_anew == (first == 'event: gap\ndata: {"reason": "the server was started anew"}\n\n')
    if is_anew:
        first = await anext(answer.body_iterator)
    assert [begins_at] == log.asked
    assert first.startswith("id: e1-1\n" if begins_at < 1 else "id: e1-3\n")
    await answer.body_iterator.aclose()
