"""Ray's own sandbox API over Ringfence: its actors, its REST routes, and Modal's client at its facade.

Ray's images need erofs-utils 1.7, which Debian 12 lacks. `Images` takes Ringfence's own, and the tests
the node's programs: `HOST`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.experimental.sandbox as of_ray
from ray.experimental.sandbox.config import SandboxConfig
from ray.experimental.sandbox.exceptions import (
    SandboxCreationError,
    SandboxError,
    SandboxExecError,
    SandboxNotFoundError,
    SandboxTimeoutError,
)

from ringfence.ray.backend import HOST, SETTING, Backend, Options, runtime_env
from tests.suites.ray.conftest import free_ports

WEAKER: dict[str, Any] = {"allow_degraded": ["cpu_limit"]}  # an ordinary user has no cgroup for it


@pytest.fixture(name="backend")
def fixture_backend() -> Backend:
    return Backend(options=Options(**WEAKER))


def test_it_keeps_rays_contract(backend: Backend) -> None:
    assert isinstance(backend, of_ray.BaseSandboxBackend)
    name = backend.create_sandbox(SandboxConfig(HOST, cpu=1.0, memory="512Mi", env={"A": "b"}))
    line = "echo $A; echo e >&2; exit 3"
    result = backend.exec_command(name, line)
    backend.write_file(name, "deep/er/file", "one")
    backend.write_file(name, "deep/er/file", b"two", append=True)

    assert (3, "b\n", "e\n") == (result.exit_code, result.stdout, result.stderr)
    assert b"onetwo" == backend.read_file(name, "deep/er/file")
    assert 143 == backend.exec_command(name, ["sh", "-c", "kill $$"]).exit_code
    if 0 == os.getuid():  # an ordinary user's sandbox has one user
        assert "0\n" == backend.exec_command(name, ["id", "-u"], user="0").stdout
    with pytest.raises(SandboxTimeoutError, match=r"killed after 0\.1 seconds"):
        backend.exec_command(name, ["sleep", "60"], timeout=0.1)
    with pytest.raises(SandboxError, match="nowhere"):
        backend.read_file(name, "nowhere")
    with pytest.raises(SandboxExecError, match="a group cannot be chosen"):
        backend.exec_command(name, ["id"], user="0:0")
    assert of_ray.SandboxStatus.RUNNING == backend.get_status(name)

    backend.delete_sandbox(name)
    backend.delete_sandbox(name)
    assert of_ray.SandboxStatus.TERMINATED == backend.get_status(name)
    with pytest.raises(SandboxNotFoundError):
        backend.exec_command(name, ["true"])


def test_what_ringfence_does_not_do_is_refused(backend: Backend) -> None:
    for network in ("public", "host"):
        with pytest.raises(SandboxCreationError, match="opens named hosts alone"):
            backend.create_sandbox(SandboxConfig(HOST, network=network))
    open_to = Backend(options=Options(public=["example.com:443"]))
    open_to.delete_sandbox(open_to.create_sandbox(SandboxConfig(HOST, network="public")))
    with pytest.raises(SandboxCreationError, match="nosuch"):
        Backend(options=Options(pull=False)).image_manager.pull_image("nosuch:1")
    with pytest.raises(TypeError, match="colour"):
        runtime_env(colour="blue")


@pytest.fixture(name="job", scope="module")
def fixture_job(cluster: Any) -> Iterator[None]:
    """A job whose worker processes have the backend; the session's own job comes back after it."""
    ray.shutdown()
    ray.init(address=cluster.address, runtime_env=runtime_env(**WEAKER), log_to_driver=False)
    yield
    ray.shutdown()
    ray.init(address=cluster.address, namespace="ringfence-tests", log_to_driver=False)


def test_rays_create_makes_a_ringfence_sandbox(job: None) -> None:
    actor = of_ray.create(image=HOST, cpu=0.1)
    result = ray.get(actor.exec.remote("cat /proc/self/status; id -un"))
    ray.get(actor.write_file.remote("f", "text"))

    assert re.search(r"Seccomp:\s2", result.stdout)
    assert result.stdout.endswith("sandbox\n")
    assert b"text" == ray.get(actor.read_file.remote("f"))
    assert HOST == ray.get(actor.get_config.remote()).image
    ray.get(actor.delete.remote())
    ray.kill(actor)


def test_rays_rest_routes(job: None) -> None:
    from fastapi.testclient import TestClient
    from ray.experimental.sandbox.http.app import create_app
    from ray.experimental.sandbox.http.schemas import SandboxAPISettings

    with TestClient(create_app(SandboxAPISettings())) as client:
        body = {"image": HOST, "network": "none", "resources": {"cpu_request": 0.1}}
        name = client.post("/api/v1/sandboxes", json=body).json()["sandbox_id"]
        path = f"/api/v1/sandboxes/{name}"
        while "running" != (info := client.get(path, params={"wait_seconds": 10}).json())["status"]:
            assert info["status"] not in ("error", "terminated"), info
        started = client.post(f"{path}/execs", json={"command": "echo over REST"}).json()
        done = client.get(f"{path}/execs/{started['exec_id']}", params={"wait_seconds": 20}).json()
        put = client.put(f"{path}/files", params={"path": "/tmp/f"}, content=b"bytes")
        got = client.get(f"{path}/files", params={"path": "/tmp/f"})
        client.delete(path)

    assert ("completed", "over REST\n") == (done["status"], done["stdout"])
    assert (204, b"bytes") == (put.status_code, got.content)


MODAL = """
import modal

app = modal.App.lookup("my-app", create_if_missing=True)
sandbox = modal.Sandbox.create(
    app=app, image=modal.Image.from_registry("ringfence/host"), block_network=True, timeout=120, cpu=0.1
)
process = sandbox.exec("python3", "-c", "print('hello')", timeout=60)
print(process.stdout.read(), process.wait(), end=" ")
for line in sandbox.exec("bash", "-c", "for i in {1..3}; do echo foo $i; done").stdout:
    print(line, end="")
sandbox.filesystem.write_text("text in a file", "/tmp/note")
print(sandbox.filesystem.read_text("/tmp/note"))
sandbox.terminate()
"""


def test_modals_client_at_rays_facade(cluster: Any, tmp_path: Path) -> None:
    """Its documented example: create, exec, files."""
    port = str(free_ports(1)[0])
    env = {**os.environ, "RAY_ADDRESS": cluster.address, SETTING: json.dumps(WEAKER)}
    facade = subprocess.Popen(
        [sys.executable, "-m", "ringfence.ray.backend", "--port", port],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert facade.stderr is not None
        seen = []
        for line in facade.stderr:
            seen.append(line)
            if "listening on" in line:
                break
        else:
            raise AssertionError("".join(seen))
        (tmp_path / "example.py").write_text(MODAL)
        tokens = {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1"}
        tokens["MODAL_SANDBOX_V2"] = "0"  # Ray's facade serves this protocol alone
        ran = subprocess.run(
            [sys.executable, "example.py"],
            cwd=tmp_path,
            env={**env, **tokens, "MODAL_SERVER_URL": f"http://127.0.0.1:{port}"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        facade.kill()
        facade.communicate()

    assert 0 == ran.returncode, ran.stderr
    assert "hello\n 0 foo 1\nfoo 2\nfoo 3\ntext in a file\n" == ran.stdout
