"""Templates by E2B's own `Template`, unmodified."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2b import Sandbox
from tests.images import registry
from tests.images.conftest import small
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
        .copy("one.txt", ".")
        .copy("app/*.py", "rel/in")
        .run_cmd(["echo $COLOR > color", "python3 main.py", "cat one.txt rel/in/main.py"])
        .run_cmd("id -un > who", user="root")
        .set_user("user")
        .set_start_cmd("python3 -m http.server 8000", e2b.wait_for_port(8000))
    )


def test_a_template_from_its_steps_to_its_sandboxes(context: Path) -> None:
    lines: list[str] = []
    info = Template.build(
        _template(context), "my-app", tags=["v1"], on_build_logs=lambda e: lines.append(e.message)
    )
    assert {"main", "one", "print('main')"} <= {*lines}
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
    assert 9 == lines.count("cached")  # the working directory is one, too
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


def _build(template: Any, name: str, **options: Any) -> list[str]:
    """The log of a build."""
    lines: list[str] = []
    Template.build(template, name, on_build_logs=lambda e: lines.append(e.message), **options)
    return lines


def _said(name: str, script: str) -> str:
    """The output of a script in a new sandbox of a template."""
    with Sandbox.create(name, timeout=60) as box:
        return str(box.commands.run(script).stdout)


def test_packages_of_node_and_clones_of_git(context: Path) -> None:
    for name in ("pkg", "tool"):
        (context / name).mkdir()
        form = {"name": name, "version": "1.0.0", "main": "i.js", "bin": {f"{name}-it": "i.js"}}
        (context / name / "package.json").write_text(json.dumps(form))
        (context / name / "i.js").write_text("#!/usr/bin/env node\nconsole.log('in node')\n")
        (context / name / "i.js").chmod(0o755)
    git = ["git", "-c", "user.name=a", "-c", "user.email=b", "-C", str(context / "repo")]
    subprocess.run(["git", "init", "-q", "-b", "main", str(context / "repo")], check=True)
    for command in (["commit", "-q", "--allow-empty", "-m", "first"], ["branch", "dev"]):
        subprocess.run([*git, *command], check=True)
    template = Template(file_context_path=str(context)).from_base_image()
    for name in ("pkg", "tool", "repo"):
        template = template.copy(name, f"/home/user/{name}")
    template = template.set_workdir("/home/user/app").npm_install("/home/user/pkg")
    template = template.npm_install("/home/user/tool", g=True)
    _build(template.git_clone("/home/user/repo", "clone", branch="dev", depth=1), "tools")
    script = "node -e 'require(\"pkg\")'; tool-it; git -C clone log --format=%s%d; pwd"
    said = _said("tools", script).splitlines()
    assert ["in node", "in node", "/home/user/app"] == [*said[:2], said[-1]]
    assert said[2].startswith("first (HEAD -> dev")


def test_changes_of_files_and_many_of_them(context: Path) -> None:
    (context / "many" / "in").mkdir(parents=True)
    for i in range(1000):
        (context / "many" / f"f {i}").write_text(str(i))
    (context / "many" / "link").symlink_to("f 1")
    template = Template(file_context_path=str(context)).from_base_image()
    template = template.copy("many", "/home/user/many").copy("many/*", "/home/user/all", mode=0o600)
    template = template.make_dir("/home/user/d/e", mode=0o700).run_cmd("echo 1 > d/e/x")
    template = template.rename("/home/user/d/e/x", "/home/user/y").remove("d", recursive=True)
    _build(template.make_symlink("/home/user/y", "/home/user/l"), "files")
    script = "cd; ls; ls many | wc -l; ls all/f* | wc -l; cat l 'all/f 7'; stat -c %a all/f* | uniq"
    assert "all\nl\nmany\ny\n1002\n1000\n1\n7600\n" == _said("files", script)


def test_skip_cache_does_what_comes_after_it_anew() -> None:
    def times(**options: Any) -> list[str]:
        template = Template().from_base_image().run_cmd("date +%N > ~/one").skip_cache()
        _build(template.run_cmd("date +%N > ~/two").run_cmd("cat ~/two > ~/three"), "t", **options)
        return _said("t", "cat ~/one ~/two ~/three").split()

    first, second, third = times(), times(), times(skip_cache=True)
    assert first[0] == second[0]
    assert first[1] != second[1] == second[2]
    assert third[0] != first[0]


def test_users_and_ready_commands() -> None:
    template = Template().from_base_image().set_user("root").set_workdir("/srv/app")
    _build(template.run_cmd("pwd > here").run_cmd("id -u > who", user="root"), "users")
    assert "/srv/app\n" == _said("users", "cat here")
    start = "sleep 0.1; touch /tmp/ready; exec sleep 600"
    for ready in (e2b.wait_for_file("/tmp/ready"), e2b.wait_for_process("sleep"), "test -e /tmp"):
        _build(Template().from_base_image().set_start_cmd(start, ready), "started")
        with Sandbox.create("started", timeout=60) as box:
            # It becomes `sleep` a moment after the file is there.
            wait = "until pgrep -fx 'sleep 600' >/tmp/pid; do sleep 0.05; done; wc -l </tmp/pid"
            assert "1\n" == box.commands.run(wait).stdout


def test_an_image_that_the_operator_pulled(tmp_path: Path) -> None:
    with registry.serving(tmp_path) as host:
        registry.push(small(), host, "tools/small", "1")
        name = f"{host}/tools/small:1"
        with pytest.raises(e2b.BuildException, match="is not on this server"):
            _build(Template().from_image(name).run_cmd("true"), "small")
        subprocess.run(["ringfence", "image", "pull", name], check=True, stdout=subprocess.DEVNULL)
    template = Template().from_image(name).run_cmd("cat /srv/app/new /etc/os-release > ~/seen")
    _build(template, "small")
    with Sandbox.create("small", timeout=60) as box:
        assert "newID=small\n" == box.files.read("/home/user/seen")


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
