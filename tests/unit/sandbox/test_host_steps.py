"""Steps of a template over the host's files: what a pip step is, what it may reach, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.environments.apply import COPIES, VENV
from ringfence.errors import ExecError, InvalidRequest, StorageFull, Unsupported
from ringfence.model.mount import Mount
from ringfence.sandbox import host_steps, merge
from ringfence.sandbox.host_steps import (
    LINKS,
    copy_step,
    failed,
    listed,
    pip_argv,
    pip_key,
    pip_network,
)

pytestmark = pytest.mark.anyone


@pytest.fixture(autouse=True)
def _own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)


@pytest.mark.parametrize(
    "requirement",
    [
        "",
        " ",
        "--index-url=x",
        "-r",
        "./here",
        "../there",
        "/abs",
        "~/home",
        "git+https://x/y",
        "hg+ssh://x",
        "reqs.txt",
        "x.toml",
        "x.lock",
        "x.whl",
        "x.tar.gz",
        "numpy pandas",
    ],
)
def test_what_is_no_requirement_is_refused(requirement: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        pip_key(["pandas", requirement], None, None)
    assert "pip_install[1]" == refused.value.field


@pytest.mark.parametrize(
    "requirement",
    ["pandas", "pandas>=2", "pandas >=2", "a[b]", "x @ https://h/x.whl", "discord.py"],
)
def test_a_requirement_is_taken(requirement: str) -> None:
    assert [requirement] == pip_key([requirement], None, None)["pip"]


@pytest.mark.parametrize(
    ("index", "links", "field"),
    [
        ("https://a", "/d", "find_links"),
        ("ftp://a", None, "index_url"),
        ("https://", None, "index_url"),
        ("a", None, "index_url"),
    ],
)
def test_a_source_that_cannot_be_is_refused(index: str, links: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        pip_key(["a"], index, links)
    assert field == refused.value.field


def test_there_must_be_a_requirement() -> None:
    with pytest.raises(InvalidRequest, match="no requirement"):
        pip_key([], None, None)


@pytest.mark.parametrize(
    ("index", "links", "environment", "expected", "hosts"),
    [
        (None, None, None, "https://pypi.org/simple", ["pypi.org", "files.pythonhosted.org"]),
        (None, None, "https://own/x", "https://own/x", ["own"]),
        ("https://given:8/x", None, "https://own/x", "https://given:8/x", ["given"]),
        (None, "/d", "https://own/x", None, "none"),
    ],
)
def test_a_step_reaches_its_index_alone(
    index: str | None,
    links: str | None,
    environment: str | None,
    expected: str | None,
    hosts: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if environment:
        monkeypatch.setenv("PIP_INDEX_URL", environment)
    key = pip_key(["a"], index, links)
    assert (expected, hosts) == (key["index"], pip_network(key))
    argv = pip_argv(key, "python")
    assert ["python", "-m", "pip", "install"] == argv[:4]
    assert ":all:" == argv[argv.index("--only-binary") + 1], "a package's code never runs"
    assert "a" == argv[-1]
    if expected is None:
        assert ["--no-index", "--find-links", LINKS] == argv[-4:-1]
    else:
        assert ["--index-url", expected] == argv[-3:-1]


def image_of(*copies: str) -> Any:
    return SimpleNamespace(labels={"other": "kept", COPIES: json.dumps([*copies])})


@pytest.mark.parametrize(
    ("target", "is_refused"),
    [
        ("/data", True),
        ("/data/below", True),
        ("/", True),
        ("/dat", False),
        ("/data2", False),
        (VENV, True),
        (f"{VENV}/x", True),
    ],
)
def test_parts_of_a_template_do_not_overlap(target: str, is_refused: bool, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("x")
    path = str(tmp_path / "layer.tar")
    if is_refused:
        with pytest.raises(InvalidRequest):
            copy_step(str(tmp_path / "source"), target, image_of("/data"), path)
        assert not os.path.exists(path)
    else:
        found = copy_step(str(tmp_path / "source"), target, image_of("/data"), path)
        labels = found["Labels"]
        assert ("kept", ["/data", target]) == (labels["other"], json.loads(labels[COPIES]))
        with tarfile.open(path) as tar:
            assert [target[1:]] == tar.getnames()


def test_a_part_does_not_take_in_another(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("x")
    layer = str(tmp_path / "layer.tar")
    with pytest.raises(InvalidRequest, match="overlaps"):
        copy_step(str(tmp_path / "source"), "/data", image_of("/data/below"), layer)
    copy_step(str(tmp_path / "source"), "/data/other", image_of("/data/below"), layer)


@pytest.mark.parametrize(("size", "fits"), [(100, True), (101, False)])
def test_a_template_has_no_more_bytes_than_it_may(size: int, fits: bool, tmp_path: Path) -> None:
    def run(_argv: Any, *, on_stdout: Any, max_output_bytes: int) -> Any:
        on_stdout(bytes(60))
        on_stdout(bytes(size - 60))
        assert max_output_bytes < 1000
        return SimpleNamespace(ok=True)

    sandbox: Any = SimpleNamespace(exec=run)
    path = tmp_path / "layer.tar"
    if fits:
        host_steps._export(sandbox, str(path), 100)
        assert size == path.stat().st_size
    else:
        with pytest.raises(StorageFull):
            host_steps._export(sandbox, str(path), 100)


def test_a_template_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    result = SimpleNamespace(ok=False, stderr_text="why")
    sandbox: Any = SimpleNamespace(exec=lambda *_argv, **_how: result)
    with pytest.raises(ExecError, match="why"):
        host_steps._export(sandbox, str(tmp_path / "layer.tar"), 100)


def test_a_link_is_copied_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    copy_step(str(tmp_path / "link"), "/data", image_of(), str(tmp_path / "layer.tar"))
    with tarfile.open(tmp_path / "layer.tar") as tar:
        assert tar.getmember("data").isfile()


@pytest.mark.parametrize(("size", "is_emptied"), [(10, False), (11, True)])
def test_the_cache_is_its_owners_and_emptied_where_it_has_grown(
    size: int, is_emptied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_steps, "_MOST_CACHE", 10)
    store: Any = SimpleNamespace(directory=str(tmp_path))
    path = Path(host_steps._cache_of(store))
    (path / "below").mkdir()
    (path / "below/file").write_bytes(bytes(size))
    assert str(path) == host_steps._cache_of(store)
    assert is_emptied == (not (path / "below").exists())
    assert 0o700 == stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, []),
        ("a:/b", ["a:/b"]),
        (["a:/b"], ["a:/b"]),
        (Mount("/b", "/a"), [Mount("/b", "/a")]),
    ],
)
def test_mounts_are_a_list(given: Any, expected: list[Any]) -> None:
    assert expected == listed(given)


def test_a_failed_step_says_how_and_what_was_printed() -> None:
    def result(**changes: Any) -> Any:
        facts = {"timed_out": False, "exit_code": 3, "stderr_text": "why", "stdout_text": "out"}
        return SimpleNamespace(**{**facts, **changes})

    assert "`a 'b c'` ended with exit code 3: why" in str(
        failed(["a", "b c"], result(), is_shown=False)
    )
    assert "why" not in failed("x", result(), is_shown=True).message
    assert "took too long" in failed("x", result(timed_out=True), is_shown=True).message
    assert ": out" in failed("x", result(stderr_text=" "), is_shown=False).message
    silent = failed("x", result(stderr_text="", stdout_text=""), is_shown=True)
    assert "printed nothing" in silent.message
    no_match = "No matching distribution found"
    assert "name and version" in failed("x", result(stderr_text=no_match), is_shown=True).hint
    away = f"WARNING: Retrying\n{no_match}"
    assert "did not answer" in failed("x", result(stderr_text=away), is_shown=True).hint


@pytest.mark.parametrize("step", ["pip", "pip with an index", "run"])
@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_pip_step_writes_to_the_cache_of_downloads(
    step: str, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps start a Python that reads files of the packages."""
    if not is_first:
        (tmp_path / "root" / VENV[1:]).mkdir(parents=True)
    asked: dict[str, Any] = {}

    def create(**options: Any) -> Any:
        asked.update(options)
        raise Unsupported("no sandbox is needed here")

    monkeypatch.setattr(host_steps, "Sandbox", SimpleNamespace(create=create))
    store: Any = SimpleNamespace(
        directory=str(tmp_path), root=lambda _parent: str(tmp_path / "root")
    )
    parent: Any = SimpleNamespace(labels={COPIES: '["/data"]'}, env={"A": "1", "B": "1"})
    index = "https://packages.test/simple" if step == "pip with an index" else None
    links = None if index else "/links"
    key = {"run": ["true"]} if step == "run" else pip_key(["a"], index, links)
    options = {"env": {"B": "2"}, "mounts": "/srv:/own", "timeout_s": 5.0}
    with pytest.raises(Unsupported):
        host_steps.run_step(key, options, parent, store, None, str(tmp_path / "layer"))

    mounts = {each.target: each for each in asked["mounts"] if isinstance(each, Mount)}
    expected = {"/data", *([] if is_first else ["/mnt/parent"])}
    if step != "run":
        expected |= {*([] if index else [LINKS]), *(["/mnt/pip-cache"] if is_first else [])}
    assert expected == {*mounts}
    assert "/srv:/own" in asked["mounts"]
    assert {"A": "1", "B": "2"} == asked["env"]
    writable = {target for target, each in mounts.items() if each.is_writable}
    assert ({"/mnt/pip-cache"} & expected) == writable
    assert "timeout_s" not in asked


@pytest.mark.parametrize("into", [5, None, object()])
def test_a_merge_goes_into_a_sandbox_or_a_directory(into: Any) -> None:
    branch: Any = SimpleNamespace(_home=SimpleNamespace(restore=None), _inner=None, spec=None)
    options: Any = {"base": "snap-1", "path": "/x", "prefer": None, "dry_run": True}
    with pytest.raises(InvalidRequest) as refused:
        merge.merge(branch, into, **options)
    assert "into" == refused.value.field
    with pytest.raises(InvalidRequest):
        merge.merge(branch, branch, **options)
