"""What `tools/fuzz_api.py` adds to schemathesis: rules that no document has, and things to ask about."""

from __future__ import annotations

import os
from typing import Any

import httpx
import schemathesis
from schemathesis.checks import CHECKS
from schemathesis.specs.openapi.checks import positive_data_acceptance as accepts
from schemathesis.specs.openapi.checks import use_after_free as is_gone

from tests.api.fuzz_rules import cannot_be_said

ADDRESS, KEY = os.environ.get("RINGFENCE_FUZZ", " ").split(" ", 1)


for _name in ("positive_data_acceptance", "use_after_free"):  # for ours of the same names
    CHECKS.unregister(_name)


@schemathesis.check
def positive_data_acceptance(ctx: Any, response: Any, case: Any) -> bool | None:
    if response.status_code == 422 and cannot_be_said(response.json()):
        return None
    found: bool | None = accepts(ctx, response, case)
    return found


@schemathesis.check
def use_after_free(ctx: Any, response: Any, case: Any) -> bool | None:
    """Let a closed context be read, which says so: the output of its cells stays."""
    _, is_context, rest = case.operation.path.partition("/contexts/{context_id}")
    if is_context and (rest.endswith("/events") or (not rest and not _runs(response))):
        return None
    found: bool | None = is_gone(ctx, response, case)
    return found


def _runs(response: Any) -> bool:
    return not response.content or response.json().get("running") is not False


class _Asked:
    """What is there to be asked about: one sandbox at a time, and the key that must live on."""

    def __init__(self) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=ADDRESS, headers=headers, timeout=60)
        keys = self.client.get("/v1/keys").json().get("items")  # admins' own matter
        self.own_key = keys[0]["id"] if keys else ""
        self._id, self._asked = "", 0

    def sandbox(self) -> str:
        """One that is there; looked at every tenth time, as asking costs."""
        self._asked += 1
        if not self._id or self._asked % 10 == 0:
            found = self.client.get(f"/v1/sandboxes/{self._id}") if self._id else None
            if found is None or found.json().get("state") not in ("provisioned", "running"):
                self._id = self.client.post("/v1/sandboxes", json={}).json().get("id", "")
        return self._id or "none"


asked = _Asked() if KEY else None


@schemathesis.hook
def before_call(_context: Any, case: Any, _options: Any) -> None:
    """Half of what asks about some sandbox or session asks about one that is there."""
    given = case.path_parameters
    if asked is None or not given:
        return
    for name in ("sandbox_id", "session_id"):
        if (
            name in given
            and len(case.id)
            and ord(case.id[0]) % 2
            and "sbx-" not in str(given[name])
        ):
            given[name] = asked.sandbox()
    if given.get("key_id") == asked.own_key:
        given["key_id"] = "key-of-this-run"
