"""Templates over the host's files: wheels made here, installed once, shared read-only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from ringfence import Sandbox, SandboxSpec, SessionManager, Template
from ringfence.environments.apply import apply, store_of
from ringfence.errors import ExecError, ImageNotFound, InvalidRequest
from tests.features import require

pytestmark = [pytest.mark.full, pytest.mark.anyone]


def wheel(directory: Path, name: str, version: str, body: str) -> None:
    """Make a wheel of one module with a script of the package's name."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", body)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}={name}:main\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    for name in ("one", "two"):
        wheel(directory, name, "1", f"value = {name!r}\ndef main(): print('script', value)\n")
    return directory


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory: pytest.TempPathFactory) -> object:
    """One store for the file: the first build makes the virtual environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFENCE_IMAGES", str(tmp_path_factory.mktemp("images")))
        yield


@pytest.fixture(scope="module")
def first(wheels: Path) -> Template:
    """A template that is built, by the name `first`."""
    template = Template.from_host().pip_install("one", find_links=str(wheels))
    template.build("first")
    return template


def _said(script: str, name: str = "first", **options: object) -> str:
    with Sandbox.create(template=name, **options) as sandbox:  # type: ignore[arg-type]
        result = sandbox.shell(script)
        return result.stdout_text + result.stderr_text


@pytest.mark.full
def test_packages_are_visible_to_python_scripts_and_contexts(first: Template) -> None:
    with Sandbox.create(template="first") as sandbox:
        assert "script one\n" == sandbox.exec(["one"]).stdout_text
        assert "'one'" == sandbox.run_code("import one; one.value").text
        assert "one" in sandbox.shell("pip list --disable-pip-version-check").stdout_text
        assert "first" == sandbox.spec.template, "as it was asked for"


_LISTING = """
import os
path = os.path.join(os.environ["MPLCONFIGDIR"], "fontlist-v1.json")
if is_made := not os.path.exists(path):
    with open(path, "w") as file:
        file.write(str(os.path.exists("/mnt/pip-cache")))
"""


@pytest.mark.full
def test_matplotlibs_fonts_are_listed_by_the_build_and_not_by_each_sandbox(
    tmp_path: Path,
) -> None:
    """The package's code does not run where pip's downloads can be written."""
    with zipfile.ZipFile(tmp_path / "matplotlib-1-py3-none-any.whl", "w") as archive:
        archive.writestr("matplotlib/__init__.py", "")
        archive.writestr("matplotlib/font_manager.py", _LISTING)
        info = "matplotlib-1.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: matplotlib\nVersion: 1\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    Template.from_host().pip_install("matplotlib", find_links=str(tmp_path)).build("plots")
    load = "python3 -c 'from matplotlib import font_manager as f; print(f.is_made)'"
    script = (
        f"{load};"
        "cat $MPLCONFIGDIR/*; touch $MPLCONFIGDIR/new && ls $MPLCONFIGDIR; echo >$MPLCONFIGDIR/fontlist-v1.json"
    )
    wanted = "False\nFalsefontlist-v1.json\nnew\n"
    said = _said(script, "plots", env={"HOME": "/tmp"})
    assert said.startswith(wanted), said
    assert "Read-only file system" in said
    own = _said(load, "plots", env={"MPLCONFIGDIR": "/tmp"})
    assert "True\n" == own, "the control: a sandbox without that list"


@pytest.mark.full
def test_files_of_a_sandbox_stay_without_the_lock_of_a_server(wheels: Path) -> None:
    """As after a stop of the server, which sandboxes outlive."""
    Template.from_host().run("echo kept >/opt/venv/kept").build("outlived")
    spec, held = apply(SandboxSpec(template="outlived"))
    with Sandbox.create(spec) as sandbox:
        os.close(held)
        store = store_of()
        image = store.remove("outlived")
        assert image.id in store.collect()[1]
        assert "kept\n" == sandbox.shell("cat /opt/venv/kept").stdout_text
    assert image.id not in store.collect()[1]
    assert not os.path.exists(store.root(image))


@pytest.mark.full
def test_a_known_template_runs_no_pip(first: Template) -> None:
    heard: list[bytes] = []
    assert first.build(on_output=heard.append).id == first.build("again").id
    assert [] == heard


def test_the_files_are_shared_and_read_only(first: Template) -> None:
    place = "/opt/venv/lib/python3*/site-packages/one.py"
    one, two = (_said(f"stat -c %i {place}; cat /opt/venv/x") for _ in range(2))
    assert one == two, "one file for both"
    said = _said(f"echo x >> {place}; touch /opt/venv/x; rm -r /opt/venv; touch ~/x && echo home")
    assert "home" in said, "the control"
    assert 2 <= said.count("Read-only file system")
    assert "cannot" in said
    assert "script one\n" == _said("one")


@pytest.mark.full
def test_pip_inside_installs_for_the_sandbox_alone(first: Template, wheels: Path) -> None:
    with Sandbox.create(template="first", mounts=f"{wheels}:/wheels") as sandbox:
        installed = sandbox.shell("pip install --no-index --find-links /wheels two && two")
        assert installed.stdout_text.endswith("script two\n"), installed.stderr_text
        assert "('one', 'two')" == sandbox.run_code("import one, two; one.value, two.value").text
    assert "not found" in _said("two"), "the next has it not"


@pytest.mark.full
def test_pip_works_without_a_template_and_without_an_option(wheels: Path) -> None:
    require("pip3")
    with Sandbox.create(mounts=f"{wheels}:/wheels") as sandbox:
        script = "python3 -m pip install --no-index --find-links /wheels two"
        assert sandbox.shell(script).ok
        assert "'two'" == sandbox.run_code("import two; two.value").text
        sandbox.shell("pip3 uninstall -y two")
        refused = sandbox.shell(f"unset PIP_BREAK_SYSTEM_PACKAGES; {script} 2>&1 && echo installed")
        assert refused.stdout_text.endswith("installed\n") or "externally" in refused.stdout_text


@pytest.mark.full
def test_steps_are_layers(first: Template, tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "table").write_text("1,2")
    template = (
        first.run("rm /opt/venv/bin/one; echo made > /opt/venv/made; python3 -m one")
        .copy(str(tmp_path / "data"), "/srv/data")
        .env({"TABLE": "/srv/data/table"})
        .pip_install("two", find_links=str(wheels))
    )

    made = template.build("steps")

    assert "1,2made\nscript two\n" == _said("cat $TABLE /opt/venv/made; two", "steps")
    assert "not found" in _said("one", "steps"), "removed"
    assert "script one\n" == _said("one"), "what it started from is as it was"
    assert "Read-only" in _said("echo x > /srv/data/table", "steps")
    assert "mine\n" == _said("echo $TABLE", "steps", env={"TABLE": "mine"})
    store = store_of()
    roots = [Path(store.root(image), "opt/venv") for image in (store.find("first"), made)]
    config = [os.stat(next(root.glob("lib/python3*/site-packages/one.py"))) for root in roots]
    assert config[0].st_ino == config[1].st_ino, "no copy"


def test_a_step_gets_no_cache_to_write_to_and_leaves_no_privileges(first: Template) -> None:
    made = first.run(
        "ls /mnt/pip-cache; chmod 6755 /opt/venv/bin/one; ln -s /etc/shadow /opt/venv/s; true"
    )
    heard: list[bytes] = []
    image = made.build(on_output=heard.append)
    assert b"No such file" in b"".join(heard)
    script = Path(store_of().root(image), "opt/venv/bin/one")
    assert 0 == script.stat().st_mode & 0o6000
    assert "cannot open" in _said("cat /opt/venv/s 2>&1 || echo cannot open", image.id)


@pytest.mark.full
def test_what_cannot_be_is_refused(first: Template, tmp_path: Path, wheels: Path) -> None:
    host = Template.from_host()
    with pytest.raises(InvalidRequest, match="not a requirement"):
        host.pip_install("--pre")
    with pytest.raises(InvalidRequest, match="property of images"):
        host.workdir("/srv")
    with pytest.raises(InvalidRequest, match="overlaps"):
        first.copy(str(tmp_path), "/opt/venv/lib").build()
    with pytest.raises(InvalidRequest, match="'nothing' not found"):
        Sandbox.create(template="nothing")
    with pytest.raises(InvalidRequest, match="host's programs"):
        Sandbox.create(template="first", image="alpine")
    with pytest.raises(ExecError, match="No matching distribution") as missing:
        host.pip_install("absent", find_links=str(wheels)).build("absent")
    assert "builds one" in missing.value.hint
    closed = {"index_url": "http://127.0.0.1:9/simple", "env": {"PIP_RETRIES": "1"}}
    elsewhere = host.pip_install("absent", **closed)  # type: ignore[arg-type]
    with pytest.raises(ExecError, match="No matching distribution") as unreachable:
        elsewhere.build("absent")
    assert "did not answer" in unreachable.value.hint
    with pytest.raises(InvalidRequest) as built:
        Sandbox.create(template=first.build("first"))  # type: ignore[arg-type]
    assert "the NAME of build(NAME)" in built.value.hint
    with pytest.raises(ImageNotFound):
        store_of().find("absent")


def test_two_builders_build_once(first: Template) -> None:
    template = first.run("echo ran; sleep 0.2; > /opt/venv/once")
    heard: list[bytes] = []
    threads = [
        threading.Thread(target=template.build, kwargs={"on_output": heard.append})
        for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [b"ran\n"] == heard


def test_a_killed_build_leaves_nothing_that_is_used(
    first: Template, wheels: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "closed"
    gate.touch()
    script = "> /opt/venv/go; echo ready; while [ -e /gate/closed ]; do sleep 0.05; done"
    code = (
        "import sys; from ringfence import Template\n"
        "first = Template.from_host().pip_install('one', find_links=sys.argv[1])\n"
        "template = first.run(sys.argv[2], mounts=sys.argv[3])\n"
        "template.build('killed', on_output=lambda data: print(data.decode(), flush=True))"
    )
    mount = f"{tmp_path}:/gate"
    argv = [sys.executable, "-c", code, str(wheels), script, mount]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"ready\n"
        builder.send_signal(signal.SIGKILL)
    store, heard = store_of(), list[bytes]()
    with pytest.raises(ImageNotFound):
        store.find("killed")
    gate.unlink()
    first.run(script, mounts=mount).build("killed", on_output=heard.append)
    assert heard == [b"ready\n"], "built again"
    assert _said("[ -e /opt/venv/go ] && echo yes", "killed") == "yes\n"


def test_files_in_use_are_not_collected(first: Template) -> None:
    store = store_of()
    image = first.run("> /opt/venv/gone").build()
    with Sandbox.create(template=image.id) as sandbox:
        _freed, in_use = store.collect()
        assert [image.id] == in_use
        assert "script one\n" == sandbox.exec(["one"]).stdout_text
    freed, in_use = store.collect()
    assert freed > 0
    assert [] == in_use
    with pytest.raises(InvalidRequest, match="not found"):
        apply(SandboxSpec(template=image.id))
    assert "script one\n" == _said("one"), "what has a name stays"


def test_a_sandbox_of_a_server_names_it_too(first: Template, tmp_path: Path) -> None:
    with SessionManager(state_dir=str(tmp_path / "state")) as manager:
        lease = manager.acquire(SandboxSpec(template="first"), client_id="ann")
        assert "script one\n" == lease.sandbox.exec(["one"]).stdout_text
        with pytest.raises(InvalidRequest, match="'absent' not found"):
            manager.acquire(SandboxSpec(template="absent"), client_id="ann")


def test_commands(first: Template, wheels: Path) -> None:
    def ringfence(*argv: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ringfence", *argv], capture_output=True, check=True, text=True
        )
        return done.stdout

    options = ("--pip", "one", "--find-links", str(wheels))
    assert "built named\n" == ringfence("template", "build", "named", *options)
    assert "named" in ringfence("template", "list")
    assert "script one\n" == ringfence("run", "--template", "named", "--", "one")
    assert "removed named" in ringfence("template", "remove", "named")
    assert "named" not in ringfence("template", "list")


def _failing(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringfence", *argv]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert 125 == done.returncode
    return done


@pytest.mark.full
def test_what_pip_says_of_a_failure_is_printed_once(tmp_path: Path) -> None:
    """The commands print what pip prints, so their own line leaves it out."""
    said = "No matching distribution found for absent"

    built = _failing("template", "build", "x", "--pip", "absent", "--find-links", str(tmp_path))
    ran = _failing("run", "--pip", "six=>1", "--", "true")

    assert 1 == built.stderr.count(said)
    last = built.stderr.splitlines()[-1]
    assert last.startswith("ringfence: step `pip install absent` ended with exit code 1 (")
    assert "check its name and version" in last
    assert 1 == ran.stderr.count("Invalid requirement")
    assert "step `pip install 'six=>1'` ended with exit code" in ran.stderr.splitlines()[-1]
    with pytest.raises(ExecError, match=said):  # the control: the caller was not shown it
        Template.from_host().pip_install("absent", find_links=str(tmp_path)).build()


@pytest.mark.full
def test_a_program_that_reads_json_gets_the_reason_there() -> None:
    ran = _failing("run", "--json", "--pip", "six=>1", "--", "true")

    assert "Invalid requirement" in json.loads(ran.stdout)["error"]["message"]
    assert 1 == len(ran.stderr.splitlines())
