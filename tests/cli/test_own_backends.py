"""Backends that are not ours: of installed packages, and of `backends.toml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends import registry
from ringfence.errors import BackendUnavailable
from tests.api.conftest import start
from tests.cli.command import SOURCE, ringfence_command
from tests.features import require
from tests.native.callers import TESTS

pytestmark = [pytest.mark.full, pytest.mark.anyone]

MODULE = """
from ringfence.backends.command.launchers import bubblewrap
from tests.unconfined import Unconfined
from ringfence.backends.registry import new_backend
from ringfence.errors import Unsupported
import dataclasses

class Packaged(Unconfined):
    name = "packaged"
    def __init__(self, state_dir=None):
        super().__init__()
        self.state_dir = state_dir
    def prewarm(self, spec):
        raise Unsupported("builds nothing ahead", backend=self.name, operation="prewarm")

class NoBackend:
    name = "lacking"
    def provision(self, spec): ...

class Misnamed(Packaged):
    name = "something-else"

LAUNCHER = dataclasses.replace(bubblewrap(), name="launched")
"""
POINTS = """[ringfence.backends]
packaged = a_plugin:Packaged
launched = a_plugin:LAUNCHER
broken = a_plugin_that_is_not_there:Backend
lacking = a_plugin:NoBackend
misnamed = a_plugin:Misnamed
"""
TABLES = """
[launchers.mine]
argv = ["bwrap", "--unshare-all", "--as-pid-1", "--uid", "{uid}", "--gid", "{uid}", "--cap-drop", "ALL",
        "--bind", "{root}", "/", "--ro-bind", "{etc}", "/etc", "{shown}", "--ro-bind", "{agent}", "/.ringfence",
        "--proc", "/proc", "--dev", "/dev", "--chdir", "/", "--"]
show = ["--ro-bind", "{source}", "{target}"]
programs = ["bwrap"]

[launchers.wrong]
argv = ["bwrap", "{rooot}"]

[codex]
binary = "/opt/nothing-here/codex"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory in which pip has installed a package with backends."""
    require("bwrap")
    place = tmp_path_factory.mktemp("plugin")
    wheel = place / "a_plugin-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "a_plugin-1.0.dist-info"
        archive.writestr("a_plugin.py", MODULE)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/entry_points.txt", POINTS)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(place / "target"), str(wheel)], check=True)
    return str(place / "target")


@pytest.fixture
def tables(tmp_path: Path) -> str:
    path = tmp_path / "backends.toml"
    path.write_text(TABLES)
    return str(path)


def found_by(installed: str, tables: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{SOURCE}:{TESTS}:{installed}", "RINGFENCE_BACKENDS": tables}


def test_doctor_lists_every_backend_and_what_is_wrong_with_one(installed: str, tables: str) -> None:
    """A package that cannot be imported, or has no backend, stops nothing else."""
    said = ringfence_command("doctor", "--json", env=found_by(installed, tables))

    reports = {each["backend"]: each for each in json.loads(said.stdout)["backends"]}
    assert 0 == said.returncode
    for name in ("native", "packaged", "launched", "mine"):
        assert reports[name]["available"]
    for name, why in (
        ("broken", "ModuleNotFoundError: No module named 'a_plugin_that_is_not_there'"),
        ("lacking", "NoBackend has no tiers, report, prewarm"),
        ("misnamed", "has the name 'something-else'"),
        ("wrong", "launchers.wrong.argv: '{rooot}' has an unknown placeholder"),
        ("codex", "'/opt/nothing-here/codex' is not installed"),
    ):
        assert not reports[name]["available"]
        assert why in reports[name]["reason"]


@pytest.mark.parametrize("name", ["launched", "mine"])
def test_run_takes_a_launcher_of_ones_own(installed: str, tables: str, name: str) -> None:
    said = ringfence_command(
        *("run", "--backend", name, "--", "id", "-u"),
        env=found_by(installed, tables),
    )

    assert (b"1000\n", 0) == (said.stdout, said.returncode), said.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", b"No module named 'a_plugin_that_is_not_there'"),
        ("wrong", b"known: {root}"),
        ("nobodys", b"describe your own backend in "),
    ],
)
def test_run_says_why_there_is_none(installed: str, tables: str, name: str, why: bytes) -> None:
    said = ringfence_command(
        *("run", "--backend", name, "--", "true"),
        env=found_by(installed, tables),
    )

    assert 0 != said.returncode
    assert why in said.stderr


def test_a_file_that_others_may_write_is_not_obeyed(tables: str) -> None:
    Path(tables).chmod(0o666)

    said = ringfence_command(
        "run", "--backend", "mine", "--", "true", env={"RINGFENCE_BACKENDS": tables}
    )

    assert 0 != said.returncode
    assert b"other users can write to this file" in said.stderr


def test_a_server_serves_them(
    installed: str, tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be loaded, and one without a pool, leave the server well."""
    config = tmp_path / "serve.json"
    backends = ["packaged", "broken", "mine"]
    config.write_text(json.dumps({"backends": backends, "backends_file": tables}))
    monkeypatch.setattr(sys, "path", [*sys.path, installed])
    daemon = start(tmp_path / "state", "--config", str(config))
    try:
        server = f"unix:{daemon.socket}"
        with Sandbox.create(server=server, backend="packaged") as first:
            assert "kept" == first.exec(["printf", "kept"]).text
        with Sandbox.create(server=server, backend="mine") as second:
            assert "1000" == second.exec(["id", "-u"]).text.strip()
        with pytest.raises(BackendUnavailable, match="a_plugin_that_is_not_there"):
            Sandbox.create(server=server, backend="broken")
        with daemon.client() as client:
            health = client.get("/v1/health")
    finally:
        daemon.stop()

    assert 200 == health.status_code
    assert health.json()["ok"]


def test_a_server_does_not_begin_where_no_named_backend_works(tables: str, tmp_path: Path) -> None:
    place = tmp_path / "state"

    said = ringfence_command(
        *("serve", "--state-dir", str(place), "--backend", "wrong"),
        env={"RINGFENCE_BACKENDS": tables},
    )

    assert (125, b"") == (said.returncode, said.stdout)
    assert b"backend wrong cannot make a sandbox: " in said.stderr
    assert b"ringfence doctor" in said.stderr
    assert not (place / "ringfence.sock").exists()


def test_a_server_says_which_of_its_backends_does_not_work(tables: str, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "ringfence",
        "serve",
        "--json",
        "--state-dir",
        str(tmp_path / "s"),
    ]
    argv += ["--backend", "wrong", "--backend", "native"]
    environment = {**os.environ, "RINGFENCE_BACKENDS": tables}
    with subprocess.Popen(argv, env=environment, stdout=-1, stderr=-1) as served:
        assert served.stdout is not None
        listening = json.loads(served.stdout.readline())["listening"]
        served.terminate()
        _, said = served.communicate(timeout=60)

    assert listening
    assert b"backend wrong cannot make a sandbox: " in said


def test_one_made_in_a_program_is_given_no_more_than_it_takes(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)

    backend = registry.new_backend("packaged", state_dir="/kept", outlive_s=None)

    assert "/kept" == vars(backend)["state_dir"]
