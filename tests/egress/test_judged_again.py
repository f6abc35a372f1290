"""Each reason for which a changed policy cuts an open connection, alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.egress.connection import Connection
from ringfence.policy.network import Decision

pytestmark = pytest.mark.anyone

YES = Decision(True, "")


def no(reason: str) -> Decision:
    return Decision(False, reason)


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({}, ""),
        ({"name": no("name")}, "name"),
        ({"address": no("address")}, "address"),
        ({"request": no("request")}, "request"),
        ({"is_opaque": True}, ""),
        ({"terminates": True}, ""),
        ({"is_opaque": True, "terminates": True}, "the policy checks each request to it"),
        ({"has_request": False, "request": no("request")}, ""),
        ({"host": "", "name": no("name"), "request": no("request")}, ""),
        ({"host": "", "address": no("address")}, "address"),
        ({"to": "", "address": no("address")}, ""),
    ],
)
def test_what_is_no_longer_allowed_is_named(changes: dict[str, Any], objection: str) -> None:
    given = {"host": "a.example", "to": "192.0.2.1", "is_opaque": False, "terminates": False}
    given |= {"name": YES, "address": YES, "request": YES, "has_request": True, **changes}
    request = SimpleNamespace(method="GET", target="/")
    sandbox = SimpleNamespace(
        judge_name=lambda _name, _port: given["name"],
        judge_address=lambda _name, _address, _port: given["address"],
        terminates=lambda _name, _port: given["terminates"],
        judge=SimpleNamespace(http_allowed=lambda *_: given["request"]),
    )
    connection: Any = SimpleNamespace(
        sandbox=sandbox,
        host=given["host"],
        address=given["to"],
        port=443,
        is_opaque=given["is_opaque"],
        site=SimpleNamespace(request=request if given["has_request"] else None),
    )
    assert objection == Connection._objection(connection)
