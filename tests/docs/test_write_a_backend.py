"""The guide's backend, installed as a package, is found, chosen, restarted and tested as the guide says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ringfence import Sandbox, SandboxSpec
from ringfence.backends.optional import Durable, Tenanted
from ringfence.execution.service import ExecutionService
from ringfence.model.execution.execution import ExecutionRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.api.conftest import start
from tests.cli.command import SOURCE, ringfence_command
from tests.docs.blocks import blocks_of
from tests.features import require

pytestmark = [pytest.mark.full, pytest.mark.anyone]

ROOT = Path(__file__).parent.parent.parent
BLOCKS = blocks_of((ROOT / "docs/how-to/write-a-backend.md").read_text(encoding="utf-8"))
MODULE, TESTS = (block.text for block in BLOCKS if block.language == "python")
PROJECT = next(block.text for block in BLOCKS if block.language == "toml")
MOST_LINES = 110
CONFIG = ManagerConfig(pool=PoolConfig(enabled=False))
NOTE = "note.txt"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory as pip leaves it: the module, and its metadata with the entry point."""
    require("user namespaces")
    require("bwrap")
    place = tmp_path_factory.mktemp("installed")
    project = tomllib.loads(PROJECT)["project"]
    metadata = place / f"ringfence_boxes-{project['version']}.dist-info"
    metadata.mkdir()
    named = f"Name: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
    points = project["entry-points"]["ringfence.backends"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[ringfence.backends]", *lines]))
    (place / "boxes.py").write_text(MODULE)
    return str(place)


@pytest.fixture
def importable(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, installed])


def conformance(place: Path, installed: str, tests: str) -> subprocess.CompletedProcess[str]:
    (place / "test_boxes.py").write_text(tests)
    (place / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "--rootdir", str(place)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_boxes.py"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, installed, *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_about_a_hundred_lines() -> None:
    assert MODULE.count("\n") < MOST_LINES


def test_it_passes_the_basic_conformance(installed: str, tmp_path: Path) -> None:
    ended = conformance(tmp_path, installed, TESTS)

    assert 0 == ended.returncode, ended.stdout
    assert " failed" not in ended.stdout


@pytest.mark.parametrize(
    ("lack", "why"),
    [
        ("snapshots = property(lambda self: self.no_such)", "Lacking has no snapshots"),
        ("__init__ = None", "TypeError"),
        ("provision = report = lambda self, spec=None: 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_lack_is_one_failure(installed: str, tmp_path: Path, lack: str, why: str) -> None:
    lacking = f"class Lacking(BoxBackend):\n    {lack}\n\n\n"
    tests = TESTS.replace("class TestBoxes", f"{lacking}class TestBoxes")
    tests = tests.replace("return BoxBackend(", "return Lacking(")
    ended = conformance(tmp_path, installed, tests)

    assert "1 failed" in ended.stdout
    assert " passed" not in ended.stdout
    assert " error" not in ended.stdout.splitlines()[-1]
    assert why in ended.stdout


def test_doctor_lists_it_and_run_uses_it(installed: str) -> None:
    found = {"PYTHONPATH": f"{SOURCE}:{installed}"}
    listed = ringfence_command("doctor", "--json", env=found)
    ran = ringfence_command("run", "--backend", "boxes", "--", "echo", "hello", env=found)

    reports = {each["backend"]: each for each in json.loads(listed.stdout)["backends"]}
    assert reports["boxes"]["available"]
    assert (b"hello\n", 0) == (ran.stdout, ran.returncode), ran.stderr


@pytest.mark.usefixtures("importable")
def test_a_program_creates_with_it() -> None:
    with Sandbox.create(SandboxSpec(labels={"team": "red"}), backend="boxes") as sandbox:
        assert "1000" == sandbox.exec(["id", "-u"]).text.strip()
        assert sandbox.id.startswith("boxes-")


@pytest.mark.usefixtures("importable")
def test_a_server_serves_it_and_the_next_one_goes_on(tmp_path: Path) -> None:
    config = tmp_path / "serve.json"
    config.write_text(json.dumps({"backends": ["boxes"]}))
    first = start(tmp_path / "state", "--config", str(config))
    server = f"unix:{first.socket}"
    sandbox = Sandbox.create(server=server)
    sandbox.files.write(NOTE, "kept")
    second = start(tmp_path / "state", "--config", str(config), "--take-over")
    try:
        assert "kept" == sandbox.exec(["cat", NOTE]).text
    finally:
        second.stop()
        first.stop()


@pytest.mark.usefixtures("importable")
def test_a_manager_gives_it_restart_tenancy_and_profiles(tmp_path: Path) -> None:
    def manage() -> SessionManager:
        return SessionManager(
            CONFIG, state_dir=str(tmp_path), backends=["boxes"], outlive_s=60, background=False
        )

    first = manage()
    backend = first.maker.backends["boxes"]
    assert isinstance(backend, Durable)
    assert isinstance(backend, Tenanted)
    lease = first.acquire(client_id="ann")
    lease.sandbox.files.write(NOTE, "kept")
    first.close(keep=True)
    assert (tmp_path / "boxes" / "ann" / lease.session.sandbox_id / "files" / NOTE).is_file()

    with manage() as second:
        assert "active" == second.get(lease.id).state
        live = second.index.find(lease.id)
        assert live
        assert b"kept" == live.sandbox.exec(["cat", NOTE]).stdout
        service = ExecutionService(second)
        rules = [{"names": ["mkdir", "mkdirat"], "action": "EPERM"}]
        service.change({"seccomp": {"extends": "os_hardened", "rules": rules}})
        request = ExecutionRequest("sh", ("-c", "mkdir /tmp/made"))
        ended = service.execute(request, client_id="ann")
        assert b"Operation not permitted" in ended.stderr
        service.close()
