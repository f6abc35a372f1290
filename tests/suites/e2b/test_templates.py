"""Templates by E2B's own `Template`, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2b import Sandbox
from tests.suites.remote import serving_e2b

e2b: Any = pytest.importorskip("e2b")
Template: Any = getattr(e2b, "Template", None)
pytestmark = [
    pytest.mark.skipif(Template is None, reason="this SDK has no Template"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with serving_e2b():
        yield


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "app" / "sub").mkdir(parents=True)
    (tmp_path / "app" / "main.py").write_text("print('main')\n")
    (tmp_path / "app" / "sub" / "text").write_text("text\n")
    (tmp_path / "one.txt").write_text("one\n")
    return tmp_path


def _template(context: Path) -> Any:
    return (
        Template(file_context_path=str(context))
        .from_python_image("3")
        .set_envs({"COLOR": "red"})
        .copy("app", "/home/user/app")
        .copy("one.txt", "/home/user/")
        .copy("one.txt", "/srv/place/two.txt")
        .make_dir("/home/user/made")
        .set_workdir("/home/user/app")
        .run_cmd(["echo $COLOR > color", "python3 main.py"])
        .run_cmd("id -un > who", user="root")
        .set_user("user")
        .set_start_cmd("python3 -m http.server 8000", e2b.wait_for_port(8000))
    )


def test_a_template_from_its_steps_to_its_sandboxes(context: Path) -> None:
    lines: list[str] = []
    info = Template.build(
        _template(context), "my-app", tags=["v1"], on_build_logs=lambda e: lines.append(e.message)
    )
    assert "main" in lines
    with Sandbox.create("my-app", timeout=120) as box:
        script = "cat sub/text ../one.txt /srv/place/two.txt color; ls -d ~/made; curl -s localhost:8000/color"
        wanted = "text\none\none\nred\n/home/user/made\nred\n"
        assert wanted == box.commands.run(script).stdout
    assert [True, False] == [Template.exists("my-app"), Template.exists("nowhere")]
    assert info.build_id == Template.assign_tags("my-app:v1", "stable").build_id
    with Sandbox.create("my-app:stable", timeout=60) as box:
        assert "red\n" == box.files.read("/home/user/app/color")
    Template.remove_tags("my-app", "stable")
    assert ["v1"] == [each.tag for each in Template.get_tags("my-app")]

    lines.clear()
    Template.build(_template(context), "my-app", on_build_logs=lambda e: lines.append(e.message))
    assert 7 == lines.count("cached")  # the working directory is one, too
    over = Template().from_template("my-app").run_cmd("cat /home/user/app/color > /home/user/over")
    Template.build(over, "my-over")
    with Sandbox.create("my-over", timeout=60) as box:
        assert "red\n" == box.files.read("/home/user/over")


def test_what_fails_is_told_by_the_sdks_own_errors() -> None:
    def failing(template: Any) -> str:
        with pytest.raises(e2b.BuildException) as failed:
            Template.build(template, "failing")
        return str(failed.value)

    assert "ringfence image pull debian:12" in failing(Template().from_image("debian:12"))
    failed = Template().from_base_image().run_cmd("echo why; exit 4")
    assert "exit code 4: why" in failing(failed)
    assert "apt-get needs an image" in failing(Template().from_base_image().apt_install("vim"))


def test_asynchronously(context: Path) -> None:
    async def use() -> None:
        template = e2b.AsyncTemplate(file_context_path=str(context)).from_base_image()
        template = (
            template.copy("*.txt", "/home/user/all/")
            .skip_cache()
            .set_workdir("/home/user/new/place")
        )
        template = template.run_cmd("ls ~/all > listed")
        await e2b.AsyncTemplate.build(template, "by-async")
        box = await e2b.AsyncSandbox.create("by-async", timeout=60)
        assert "one\n" == await box.files.read("/home/user/all/one.txt")
        assert "one.txt\n" == (await box.commands.run("cat listed")).stdout
        await box.kill()

    asyncio.run(use())
