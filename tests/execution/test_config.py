"""The config of the execution service: validated, kept, reloadable, in force at once."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import InvalidRequest, Unsupported
from ringfence.execution.service import ExecutionService
from ringfence.execution.specs import completed
from ringfence.model.execution.config import ExecutionConfig
from ringfence.model.execution.execution import ExecutionRequest
from ringfence.model.net.network import NetworkPolicy
from ringfence.policy.seccomp import SeccompPolicy
from tests.execution.conftest import MakeService
from tests.features import has
from tests.strangers import let_others_in
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

FORKS = "import os, time\nfor _ in range(30):\n if os.fork() == 0: time.sleep(60)"
CONNECT = (
    "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print('in')"
)


@pytest.fixture(name="listener")
def fixture_listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def output(service: ExecutionService, script: str, *args: str) -> str:
    request = ExecutionRequest("sh", ("-c", script, "sh", *args))
    result = service.execute(request, client_id="a")
    return (result.stdout + result.stderr).decode()


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"default_timeout_secs": 301.0}, "default_timeout_secs"),
        ({"max_memory_mb": 1}, "default_memory_mb"),
        ({"default_cpus": "one"}, "default_cpus"),
        ({"max_processes": 0}, "max_processes"),
        ({"network_enabled": 1}, "network_enabled"),
        ({"work_dir": "relative"}, "work_dir"),
        ({"allowed_paths": ["rel"]}, "allowed_paths[0]"),
        ({"denied_paths": ["/a/../b"]}, "denied_paths[0]"),
        ({"denied_paths": ["/srv", "/home"]}, "denied_paths[1]"),
        ({"denied_paths": ["/"], "work_dir": "/tmp"}, "denied_paths[0]"),
        ({"allowed_paths": ["/srv/x"], "denied_paths": ["/srv"]}, "allowed_paths[0]"),
        ({"strong_runtime": {"color": "red"}}, "strong_runtime.color"),
        ({"strong_runtime": {"backend": "nosuch"}}, "strong_runtime.backend"),
        ({"strong_runtime": {"memory_mb": "much"}}, "strong_runtime.memory_mb"),
        ({"strong_runtime": {"memory_mb": 10**6}}, "strong_runtime.memory_mb"),
        ({"strong_runtime": {"memory_mb": 1.5}}, "strong_runtime.memory_mb"),
        ({"strong_runtime": {"cpus": 0}}, "strong_runtime.cpus"),
        ({"strong_runtime": {"vm_kernel": "here"}}, "strong_runtime.vm_kernel"),
        ({"strong_runtime": {"vm_kernel": "/nowhere"}}, "strong_runtime.vm_kernel"),
        ({"plain_results": 1}, "plain_results"),
        ({"seccomp": {"default_action": "allow", "rules": [{}]}}, "seccomp.rules[0].action"),
        ({"nonsense": 1}, "nonsense"),
        ([], ""),
    ],
)
def test_a_bad_change_is_refused_and_changes_nothing(
    service: ExecutionService, patch: Any, field: str
) -> None:
    before = service.config
    with pytest.raises(InvalidRequest) as refused:
        service.change(patch)

    assert field == refused.value.field
    assert before == service.config


def test_a_change_that_is_refused_is_not_written(make_service: MakeService, tmp_path: Path) -> None:
    service = make_service(str(tmp_path))
    service.change({"max_processes": 40})
    with pytest.raises(InvalidRequest):
        service.change({"strong_runtime": {"backend": "nosuch"}})

    written = json.loads((tmp_path / "execution.json").read_text())
    assert (40, {}) == (written["max_processes"], written["strong_runtime"])


@pytest.mark.parametrize(
    ("name", "value"), [("timeout_secs", 301.0), ("memory_mb", 5000), ("cpus", 5.0)]
)
def test_a_maximum_is_one(service: ExecutionService, name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        service.execute(ExecutionRequest("true", **{name: value}), client_id="a")  # type: ignore[arg-type]
    assert name == refused.value.field


def test_the_defaults_are_in_force(make_service: MakeService) -> None:
    service = make_service(default_timeout_secs=0.3, work_dir="/tmp")

    assert "/tmp\n" == output(service, "pwd")
    late = service.execute(ExecutionRequest("sleep", ("60",)), client_id="a")
    assert "timeout" == late.status


def test_a_change_is_kept_and_a_file_that_was_edited_is_read_again(
    make_service: MakeService, tmp_path: Path
) -> None:
    service = make_service(str(tmp_path))
    service.change({"max_processes": 50})
    service.close()
    service.manager.close()

    again = make_service(str(tmp_path))
    assert 50 == again.config.max_processes
    file = tmp_path / "execution.json"
    edited = {**json.loads(file.read_text()), "max_processes": 40}
    file.write_text(json.dumps(edited))
    assert 40 == again.reload().max_processes
    file.write_text("{")
    with pytest.raises(Exception, match="not JSON"):
        again.reload()
    assert 40 == again.config.max_processes


def test_the_network_is_switched_for_what_runs_already(
    make_service: MakeService, listener: socket.socket
) -> None:
    """Off at first; on, and an execution connects; off, and the connection is cut."""
    port = listener.getsockname()[1]
    service = make_service(network_policy=NetworkPolicy(allowed_hosts=(f"127.0.0.1:{port}",)))
    request = ExecutionRequest("python3", ("-c", CONNECT, str(port)))
    assert "failed" == service.execute(request, client_id="a").status

    service.change({"network_enabled": True})
    assert "completed" == service.execute(request, client_id="a").status
    listener.accept()[0].close()
    hold = (
        f"{CONNECT.replace('socket.create_connection', 's = socket.create_connection')};"
        "s.settimeout(None); s.sendall(b'here'); print('got', s.recv(9))"
    )
    held = service.submit(ExecutionRequest("python3", ("-c", hold, str(port))), client_id="a")
    peer = listener.accept()[0]
    assert b"here" == peer.recv(4)
    service.change({"network_enabled": False})

    assert held.result(20).stdout.decode() in ("in\ngot b''\n", "in\n")
    peer.close()
    assert "failed" == service.execute(request, client_id="a").status


def test_an_allowed_path_is_shown_and_a_denied_one_is_not_even_when_it_comes_later(
    make_service: MakeService, tmp_path: Path
) -> None:
    shown, secret = tmp_path / "shown", tmp_path / "shown" / "secret"
    secret.mkdir(parents=True)
    let_others_in(tmp_path)
    (shown / "open").write_text("open")
    (secret / "key").write_text("key")
    (tmp_path / "link").symlink_to(shown)
    denied = (str(secret), str(shown / "later"), "/tmp/own")
    service = make_service(
        allowed_paths=(f"{shown}:rw", f"{tmp_path / 'link'}"), denied_paths=denied
    )

    assert "open" == output(service, f"cat {shown}/open")
    for file in (f"{secret}/key", f"{tmp_path}/link/secret/key"):
        assert "Permission denied" in output(service, f"cat {file}")
    for directory in (f"{shown}/later", "/tmp/own"):
        assert "Permission denied" in output(service, f"echo x > {directory}/file")
    assert {"open", "secret"} == {path.name for path in shown.iterdir() if path.name[0] != "."}
    (shown / "later").mkdir()
    (shown / "later" / "key").write_text("later")
    assert "Permission denied" in output(service, f"cat {shown}/later/key")
    service.change({"denied_paths": []})
    assert "later" == output(service, f"cat {shown}/later/key")


def test_an_allowed_path_that_leads_into_a_denied_one_is_refused(
    make_service: MakeService, tmp_path: Path
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    service = make_service(
        allowed_paths=(str(tmp_path / "link"),), denied_paths=(str(tmp_path / "secret"),)
    )

    result = service.execute(ExecutionRequest("true"), client_id="a")
    assert "allowed_paths" == (result.error or {})["field"]
    with pytest.raises(InvalidRequest):
        service.execute(
            ExecutionRequest("true", work_dir=str(tmp_path / "secret" / "x")), client_id="a"
        )


def test_a_policy_of_ones_own_filters_system_calls(service: ExecutionService) -> None:
    script = "mkdir /tmp/made && echo made"
    assert "made\n" == output(service, script)
    default = service.seccomp()
    assert {"default_action", "rules"} <= set(default)
    own = {
        "extends": "os_hardened",
        "rules": [{"names": ["mkdir", "mkdirat"], "action": "EPERM"}],
    }

    service.change({"seccomp": own})
    assert "Operation not permitted" in output(service, script)
    assert ["mkdir", "mkdirat"] == service.seccomp()["rules"][0]["names"]
    service.change({"seccomp": None})
    assert "made\n" == output(service, script)


def test_nothing_takes_a_policy_where_no_backend_does(make_service: MakeService) -> None:
    from ringfence.sessions.manager import SessionManager

    with SessionManager(backends=(Unconfined(),), background=False) as manager:
        service = ExecutionService(manager)
        with pytest.raises(Unsupported):
            service.change({"seccomp": {"default_action": "allow", "rules": []}})
        service.close()


def test_changes_at_once_are_all_kept(service: ExecutionService) -> None:
    names = ("max_processes", "max_pending", "max_concurrent", "max_output_bytes")
    threads = [threading.Thread(target=service.change, args=({name: 33},)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [33] * 4 == [getattr(service.config, name) for name in names]
    assert service.config == ExecutionConfig.from_json(service.config.to_json())


def test_the_strong_tier_has_defaults_of_its_own() -> None:
    config = ExecutionConfig(strong_runtime={"memory_mb": 2048, "cpus": 2})  # type: ignore[dict-item]
    asked = ExecutionRequest("true", tier="strong")

    strong, light = completed(asked, config), completed(ExecutionRequest("true"), config)
    assert (2048, 2.0) == (strong.memory_mb, strong.cpus)
    assert (512, 1.0) == (light.memory_mb, light.cpus)
    assert 64 == completed(ExecutionRequest("true", tier="strong", memory_mb=64), config).memory_mb
    assert config == ExecutionConfig.from_json(config.to_json())


def test_the_kernel_of_microvms_is_chosen_by_the_config(tmp_path: Path) -> None:
    """The backend that is configured looks there and nowhere else; a place without one is refused."""
    from ringfence.sessions.manager import SessionManager

    place = tmp_path / "boot"
    place.mkdir()
    with SessionManager(backends=("microvm",), background=False) as manager:
        service = ExecutionService(manager)
        with pytest.raises(InvalidRequest, match=f"none in {tmp_path}") as refused:
            service.change({"strong_runtime": {"vm_kernel": str(tmp_path)}})
        assert "strong_runtime.vm_kernel" == refused.value.field
        used: list[str | None] = []
        backend: Any = manager.maker.backends["microvm"]
        backend.use_kernel = used.append
        service._adopt(service.config.changed({"strong_runtime": {"vm_kernel": str(tmp_path)}}))
        service.change({"strong_runtime": {}})
        assert [str(tmp_path), None] == used
        service.close()


def test_a_hook_hears_of_each_config(service: ExecutionService) -> None:
    heard: list[bool] = []

    def fails(_config: ExecutionConfig) -> None:
        raise ValueError("nobody hears this")

    service.on_config(fails)
    stop = service.on_config(lambda config: heard.append(config.network_enabled))
    service.change({"network_enabled": True})
    service.change({"network_enabled": True})  # nothing changes
    stop()
    service.change({"network_enabled": False})

    assert [True] == heard
    assert (
        service.info().supports_network_enabled
        is service.info().executors[0].supports_network_enabled
    )


def test_too_many_processes_are_said(make_service: MakeService) -> None:
    if not has("cgroup"):
        pytest.skip("nobody counts processes here")
    service = make_service(max_processes=8)
    request = ExecutionRequest("python3", ("-c", FORKS))
    result = service.execute(request, client_id="a")

    assert "failed" == result.status
    assert ("resource_limit_exceeded", "max_processes") == (
        (result.error or {})["code"],
        (result.error or {})["field"],
    )
    assert service.execute(ExecutionRequest("false"), client_id="a").error is None


def test_a_policy_that_stops_every_start_is_refused_when_it_is_given(
    service: ExecutionService,
) -> None:
    before = service.config
    for policy in (
        {"default_action": "kill", "rules": [{"names": ["read"], "action": "allow"}]},
        {"extends": "os_hardened", "rules": [{"names": ["execve"], "action": "EPERM"}]},
    ):
        with pytest.raises(InvalidRequest, match="no command runs") as refused:
            service.change({"seccomp": policy})
        assert ("seccomp", True) == (refused.value.field, "os_hardened" in refused.value.hint)
    assert before == service.config
    assert "fine\n" == output(service, "echo fine")


@pytest.mark.parametrize(
    "policy",
    [
        {
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [
                {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
                {"names": ["read", "arm_fadvise64_64"], "action": "SCMP_ACT_ALLOW"},
            ],
        },
        {
            "DefaultAction": "allow",
            "Syscalls": [{"Names": ["mkdir", "mkdirat"], "Action": "errno"}],
        },
    ],
)
def test_policies_in_the_shapes_of_others_are_read(
    service: ExecutionService, policy: dict[str, Any]
) -> None:
    assert "made\n" == output(service, "mkdir /tmp/made && echo made")
    service.change({"seccomp": policy})

    assert "Operation not permitted" in output(service, "mkdir /tmp/made && echo made")
    assert ["mkdir", "mkdirat"] == service.seccomp()["rules"][0]["names"]


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"defaultAction": "SCMP_ACT_TRACE"}, "seccomp.defaultAction"),
        ({"DefaultAction": "allow", "Syscals": [1]}, "seccomp.Syscals"),
        ({"defaultAction": "allow", "syscalls": [{"action": "kill"}]}, "seccomp.syscalls[0].names"),
        (
            {"defaultAction": "allow", "syscalls": [{"names": ["mkdri"], "action": "errno"}]},
            "seccomp.rules[0].names[0]",
        ),
        (
            {
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [
                    {
                        "names": ["personality"],
                        "action": "SCMP_ACT_ERRNO",
                        "args": [{"index": 0, "value": 8, "op": "SCMP_CMP_GT"}],
                    }
                ],
            },
            "seccomp.syscalls[0].args[0].op",
        ),
        (
            {
                "defaultAction": "SCMP_ACT_ERRNO",
                "syscalls": [
                    {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["X"]}}
                ],
            },
            "seccomp.syscalls[0].includes",
        ),
    ],
)
def test_what_cannot_be_read_of_them_is_named(
    service: ExecutionService, policy: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        service.change({"seccomp": policy})
    assert field == refused.value.field


def test_arguments_of_an_oci_policy_are_conditions() -> None:
    equal = {"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}
    masked = {"index": 1, "value": 6, "valueTwo": 2, "op": "SCMP_CMP_MASKED_EQ"}
    rule = {"names": ["personality"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
    policy = SeccompPolicy.from_json(
        {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{**rule, "args": [equal, masked]}]}
    )
    (made,) = policy.to_json()["rules"]

    assert "ENOSYS" == made["action"]
    first, second = made["args"]
    assert (0, 64, [8]) == (first["arg"], first["bits"], first["in"])
    assert (1, 6, [2]) == (second["arg"], second["mask"], second["in"])
