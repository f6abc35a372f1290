"""Files on disk, in this process, on a server and by E2B's API: what a client sees at the limit."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from ringfence import Sandbox
from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import MakeClient

pytestmark = pytest.mark.anyone
_LIMITS = {"memory_bytes": 256 << 20, "disk_bytes": 24 << 20}
_ON_DISK: dict[str, Any] = {"disk_root": True, "limits": _LIMITS, "allow_degraded": ["*"]}
_FULL = "No space left on device"
_WITHIN = "head -c 20m /dev/zero > f && wc -c < f; stat -f -c %T f; rm f"
_OVER = "mkdir d; cd d; for i in 1 2 3; do head -c 20m /dev/zero > $i || exit 3; done; sleep 60"


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    config = tmp_path_factory.mktemp("config") / "config.json"
    config.write_text(json.dumps({"e2b": {"templates": {"disk": _ON_DISK, "memory": {}}}}))
    return start_daemon("--e2b", "--listen", "127.0.0.1:0", "--config", str(config))


def text_of(messages: list[dict[str, Any]]) -> str:
    """What a command wrote to its standard error."""
    parts = [each.get("event", {}).get("data", {}).get("stderr", "") for each in messages]
    return "".join(base64.b64decode(each).decode() for each in parts)


@pytest.mark.full
@pytest.mark.parametrize("where", ["here", "server"])
def test_the_limit_is_kept_and_told(where: str, daemon: Daemon) -> None:
    """Exactly: a program gets an error. Sampled: the command ends, and is told why; the sandbox goes on."""
    more: dict[str, Any] = {"server": f"unix:{daemon.socket}"} if where == "server" else {}
    with Sandbox.create(**_ON_DISK, **more) as sandbox:
        size, kind = sandbox.shell(_WITHIN).stdout_text.split()
        assert ("20971520", False) == (size, kind == "tmpfs")
        quota = next(each for each in sandbox.protections() if each.name == "disk_quota")
        assert "on disk" in quota.why
        if quota.status == "enforced":
            full = sandbox.shell(_OVER)
            assert (3, True) == (full.exit_code, _FULL in full.stderr_text)
            assert "alive\n" == sandbox.shell("rm -r d; echo alive > f; cat f").stdout_text
            return
        assert ("degraded", True) == (quota.status, "as root" in quota.fix)
        ended = sandbox.shell(_OVER)
        assert (9, "disk") == (ended.signal, ended.killed_by)
        assert f"more than limits.disk_bytes, {_LIMITS['disk_bytes']}" in ended.stderr_text
        assert "alive\n" == sandbox.shell("rm -r d; echo alive > f; cat f").stdout_text
    with Sandbox.create(**more) as control:
        assert "tmpfs" in control.shell("stat -f -c %T .").stdout_text.replace("overlayfs", "tmpfs")


def test_by_e2bs_api(make_client: MakeClient) -> None:
    box = make_client().create(templateID="disk")
    kind = text_of(box.run(f"{_WITHIN} && stat -f -c %T . >&2"))
    assert kind in ("ext2/ext3\n", "overlayfs\n"), kind
    ended = box.run(_OVER)
    result = next(each["event"]["end"] for each in ended if "end" in each.get("event", {}))
    told = {3: _FULL, -1: "more than limits.disk_bytes"}  # an exact size, and one that is sampled
    assert told[result["exitCode"]] in text_of(ended), ended
    assert 204 == box.call("GET", "/health").status_code
