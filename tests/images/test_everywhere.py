"""Images on every backend that has them: the same root, the same configuration, the same tools."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox, SandboxSpec, Template
from ringfence.backends.docker.backend import DockerBackend
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import IoError, Unsupported
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.model.limits import MIB, Limits
from ringfence.sessions import BashConfig, SandboxBash
from tests.engine import running_engine
from tests.features import require
from tests.images.conftest import small
from tests.images.making import Made, layer, program

pytestmark = pytest.mark.full

Create = Callable[..., Sandbox]
Where = tuple[Any, dict[str, Any]]


@contextmanager
def _native() -> Iterator[Where]:
    require("user namespaces")
    with tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-") as place:
        yield NativeBackend(state_dir=place), {}


@contextmanager
def _gvisor() -> Iterator[Where]:
    require("user namespaces")
    require("runsc")
    with tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-") as place:
        yield GvisorBackend(state_dir=place), {"tier": "strong"}


@contextmanager
def _docker() -> Iterator[Where]:
    require("root")  # an engine of one's own takes root
    require("dockerd")
    with (
        running_engine() as address,
        tempfile.TemporaryDirectory(prefix="snapshots-of-a-test-") as place,
    ):
        # Who runs in an engine without userns-remap must not be root: it would be the host's.
        yield DockerBackend(address, state_dir=place), {"user": "1000"}


@pytest.fixture(scope="module", params=[_native, _gvisor, _docker], ids=lambda each: each.__name__)
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    """A backend, and what a sandbox of it must be asked for besides."""
    with request.param() as (backend, options):
        yield backend, options
        backend.close()


# A container has a copy of the image, one user, and is not built ahead.
not_docker = pytest.mark.parametrize(
    "where", [_native, _gvisor], indirect=True, ids=lambda each: each.__name__
)


@pytest.fixture
def create(where: Where, store: ImageStore) -> Create:
    del store
    backend, options = where

    def make(image: str, **more: Any) -> Sandbox:
        return Sandbox.create(image=image, backend=backend, **{**options, **more})

    return make


def test_the_image_is_the_root_and_two_share_it(
    create: Create, image: str, store: ImageStore
) -> None:
    root = Path(store.root(store.find(image)))
    with create(image) as one, create(image) as two:
        wrote = one.shell(
            "pwd; echo $GREETING; cat /etc/os-release;"
            "echo mine > /etc/os-release; rm /bin/touch; rm -r /srv; mkdir /srv; > /srv/x"
        )
        one.files.write("/srv/y", b"y")
        told = one.shell("cat /etc/os-release; ls /srv /usr").stdout_text
        other = two.shell("cat /etc/os-release; ls /bin/touch /srv/app").stdout_text

    assert "/\nhello\nID=small\n" == wrote.stdout_text, wrote
    assert "mine\n/srv:\nx\ny\n" == told, "and nothing of the host's /usr"
    assert "ID=small\n/bin/touch\n/srv/app:\nnew\n" == other.replace("\n\n", "\n")
    assert "ID=small\n" == (root / "etc/os-release").read_text()
    assert (root / "bin/touch").is_symlink()


@pytest.mark.parametrize("where", [_docker], indirect=True, ids=lambda each: each.__name__)
def test_an_engine_keeps_no_image_of_which_a_file_could_not_be_read(
    create: Create, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tar that it gets ends where a file would begin: by that alone it would be whole."""
    load(small(Env=["GREETING=ho"]).as_layout(tmp_path / "layout"), "other:1", store=store)

    def unreadable(path: Any, *args: Any) -> Any:
        if str(path).endswith("etc/os-release"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr("tarfile.bltn_open", unreadable)
        with pytest.raises(IoError, match="Input/output error"):
            create("other:1")

    with create("other:1") as control:
        assert "ID=small\n" == control.shell("cat /etc/os-release").text


def test_a_template_over_the_hosts_files(where: Where, store: ImageStore, tmp_path: Path) -> None:
    del store  # of the test: templates are beside its images
    backend, options = where
    (tmp_path / "data").write_text("content")
    template = Template.from_host().run("echo made > /opt/venv/made")
    template.copy(str(tmp_path / "data"), "/srv/data").build("first")
    with Sandbox.create(template="first", backend=backend, **options) as sandbox:
        said = sandbox.shell("cat /opt/venv/made /srv/data; command -v python3; > /opt/venv/x")
        assert "made\ncontent/opt/venv/bin/python3\n" == said.stdout_text, said
        assert "Read-only" in said.stderr_text
        assert "'/opt/venv'" == sandbox.run_code("import sys; sys.prefix").text


def test_what_the_configuration_says(create: Create, tmp_path: Path, store: ImageStore) -> None:
    made = small(
        User="app", WorkingDir="/var/srv/app", Entrypoint=["cat"], Cmd=["new"], Env=["A=b"]
    )
    image = load(made.as_layout(tmp_path / "made"), "made", store=store)

    with create("made", user=None) as sandbox:
        told = sandbox.shell("id -u; pwd; echo $HOME $USER $A; echo > mine; ls mine")
        run = sandbox.exec(image.argv)
    with create("made", user="1000", workdir="/usr/new/place") as sandbox:
        assert "/usr/new/place\n" == sandbox.shell("touch mine; pwd").stdout_text
    with create("made", user="1000", workdir="/var/srv/new/place") as sandbox:
        assert "/srv/new/place\n" == sandbox.shell("touch mine; pwd -P").stdout_text
    with create("made", user="1000", workdir="/tmp", env={"HOME": "/x", "A": "c"}) as sandbox:
        asked = sandbox.shell("id -u; pwd; echo $HOME $A")

    assert "1234\n/srv/app\n/srv/app app b\nmine\n" == told.stdout_text, told
    assert b"new" == run.stdout
    assert "1000\n/tmp\n/x c\n" == asked.stdout_text


@pytest.mark.root  # an ordinary user has one id to give
@not_docker
def test_users_that_the_image_names(create: Create, image: str) -> None:
    with create(image) as sandbox:
        sandbox.shell("mkdir -m 0777 /srv/open")
        said = sandbox.exec(
            [
                "sh",
                "-c",
                "id -u; echo $HOME; cd /srv/open; echo x > mine; echo x > /srv/app/theirs",
            ],
            user="app",
        )
        kept = sandbox.shell("cat /srv/open/mine; ls /srv/app").stdout_text

    assert "1234\n/srv/app\n" == said.stdout_text, said
    assert "ermission denied" in said.stderr_text
    assert "x\nnew\n" == kept, "the control: what it may write is written"


def test_nothing_but_one_program(create: Create, tmp_path: Path, store: ImageStore) -> None:
    """No C library, no shell, no directory: commands, files and trees work all the same."""
    require("gcc")
    source = tmp_path / "answer.c"
    source.write_text('#include <unistd.h>\nint main() { write(1, "answer\\n", 7); return 42; }\n')
    subprocess.run(["gcc", "-static", "-o", str(tmp_path / "answer"), str(source)], check=True)
    only = Made([layer(program("answer", str(tmp_path / "answer")))], {"User": "1000"})
    load(only.as_layout(tmp_path / "layout"), "only", store=store)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("x")

    with create("only") as sandbox:
        ran = sandbox.exec(["/answer"])
        shell = sandbox.shell("true")
        sandbox.files.write("/tmp/there", b"content")
        sandbox.files.upload(str(tmp_path / "tree"), "/tmp/tree")
        sandbox.files.download("/tmp", str(tmp_path / "back"))

    assert (42, b"answer\n") == (ran.exit_code, ran.stdout)
    assert 127 == shell.exit_code
    assert b"content" == (tmp_path / "back" / "there").read_bytes()
    assert "x" == (tmp_path / "back" / "tree" / "file").read_text()


@not_docker
def test_files_in_use_stay(create: Create, image: str, store: ImageStore) -> None:
    with create(image) as sandbox:
        found = store.remove(image)
        assert [found.id] == store.collect()[1]
        assert 0 == sandbox.exec(["ls", "/bin"]).exit_code
    freed, in_use = store.collect()

    assert (True, []) == (freed > 0, in_use)


def test_the_bash_tool(where: Where, image: str, store: ImageStore) -> None:
    del store
    backend, options = where
    config = BashConfig(image=image, allow_degraded=("*",), **options)
    with SandboxBash(config=config, backend=backend) as tool:
        said = tool.exec_command("cat /etc/os-release; pwd; echo mine > file; nothing-such")
        kept = tool.exec_command("cat file; echo left > /srv/left", "/workspace")
        tool.shutdown()
        again = tool.exec_command("cat file /srv/left")

    assert ("ID=small\n/workspace\n", 127) == (said.stdout, said.exit_code), said
    assert "mine\n" == kept.stdout
    assert ("", 1) == (again.stdout, again.exit_code), "after shutdown all begins anew"


def test_the_bash_tool_in_a_workspace(
    where: Where, image: str, store: ImageStore, tmp_path: Path
) -> None:
    del store
    (tmp_path / "work").mkdir()
    backend, options = where
    config = BashConfig(image=image, allow_degraded=("*",), **options)
    with SandboxBash(str(tmp_path / "work"), config, backend=backend) as tool:
        assert "/workspace\n" == tool.exec_command("pwd; echo mine > file").stdout
        tool.shutdown()
        assert "mine\n" == tool.exec_command("cat file").stdout

    assert "mine\n" == (tmp_path / "work" / "file").read_text()


def test_the_bash_tool_remembers(where: Where, image: str, store: ImageStore) -> None:
    del store
    backend, options = where
    config = BashConfig(image=image, persistent=True, allow_degraded=("*",), **options)
    with SandboxBash(config=config, backend=backend) as tool:
        tool.exec_command("cd /srv; KEPT=yes")
        kept = tool.exec_command("pwd; echo $KEPT")

    assert "/srv\nyes\n" == kept.stdout


@not_docker
def test_warm_ones(where: Where, image: str, store: ImageStore) -> None:
    backend, options = where
    warm, unused = (backend.prewarm(SandboxSpec(image=image, **options)) for _ in range(2))
    spec = SandboxSpec(image=store.find(image).id, env={"MINE": "yes"}, **options)
    assert warm.fits(spec)
    assert not warm.fits(SandboxSpec(**options))
    assert not warm.fits(SandboxSpec(image=image, user="app", **options)), "its files are root's"
    with Sandbox(warm.claim(spec), spec) as sandbox:
        said = sandbox.shell("cat /etc/os-release; echo $GREETING $MINE; pwd; id -u")
    assert "ID=small\nhello yes\n/\n0\n" == said.stdout_text, said

    found = store.remove(image)
    assert not unused.fits(SandboxSpec(image=image, **options)), "its name means nothing any more"
    assert [found.id] == store.collect()[1], "and yet its files are in use"
    unused.discard()
    assert [] == store.collect()[1]


def test_a_snapshot_is_what_was_changed(
    create: Create, where: Where, image: str, store: ImageStore
) -> None:
    size = store.find(image).size_bytes
    backend = where[0]
    with create(image) as sandbox:
        sandbox.shell(
            "echo mine > /etc/os-release; rm /bin/touch; rm -r /srv/app; echo file > /srv/app"
        )
        taken = sandbox.snapshot()
        sandbox.shell("echo later > /etc/os-release")
    try:
        with Sandbox.restore(taken.id, backend=backend) as again:
            said = again.shell("cat /etc/os-release /srv/app; ls /bin/touch")
    finally:
        backend.delete_snapshot(taken.id)
    assert "mine\nfile\n" == said.stdout_text
    assert "/bin/touch" in said.stderr_text
    assert taken.size_bytes < size / 4, "the image is not in it"


@pytest.mark.parametrize("where", [_docker], indirect=True, ids=lambda each: each.__name__)
def test_a_container_is_never_the_host_s_root(create: Create, where: Where, image: str) -> None:
    client = where[0].client()
    with pytest.raises(Unsupported) as refused:
        create(image, user=None)
    with create(image) as sandbox:
        assert "1000\n" == sandbox.shell("id -u").stdout_text, "the control"
        names = _tags(client)
    create(image).terminate()

    assert names == _tags(client), "no second copy"
    assert "user" == refused.value.field


def _tags(client: Any) -> list[str]:
    """Of all images; the engine lists those of one second in any order."""
    return sorted(tag for each in client.images.list() for tag in each.tags)


@pytest.mark.parametrize("where", [_docker], indirect=True, ids=lambda each: each.__name__)
@pytest.mark.parametrize("limits", [Limits(disk_bytes=64 * MIB), Limits(inodes=1000)])
def test_what_the_engines_storage_cannot_bound_is_refused(
    create: Create, image: str, limits: Limits
) -> None:
    """The engine of the tests lies on a file system without quotas of projects."""
    with pytest.raises(Unsupported) as refused:
        create(image, limits=limits)

    assert refused.value.field in ("limits.disk_bytes", "limits.inodes")
    with create(image) as control:
        assert control.shell("true").ok
