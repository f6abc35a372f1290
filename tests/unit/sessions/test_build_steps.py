"""Builds of templates, step by step: what each may reach, how long, which layer is known, and what is kept."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests.unit.sessions.test_template_catalogue import (
    asked,
    build,
    built,
    ended,
    layers,
    record,
)
from tests.unit.sessions.whole import Whole

from ringfence.errors import ExecError, InvalidRequest, LifecycleError, TooLarge
from ringfence.model import capabilities as can
from ringfence.model.acquire import AcquireOptions
from ringfence.model.mount import READ_WRITE, Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import LIGHT, STRONG, SandboxSpec
from ringfence.model.template import TemplateStep
from ringfence.sessions.config import ManagerConfig, PoolConfig, TemplateBounds
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.templates import build as building
from ringfence.sessions.templates import places, steps
from ringfence.sessions.templates.build import LABEL, _Leased, client_of
from ringfence.sessions.templates.catalogue import Templates
from ringfence.store.templates import FAILED, READY

pytestmark = pytest.mark.anyone

ONE = {"run": "true"}
LIMITED = NetworkPolicy(allowed_hosts=("example.com",))


class Mounting(Whole):
    """Takes specs with mounts, images and a working directory; it mounts nothing."""

    lacks: ClassVar = {
        name: why for name, why in Whole.lacks.items() if name not in (can.MOUNT, can.IMAGE)
    }


class Second(Mounting):
    """Another backend."""

    name = "second"


def machine(place: Path, *, pool: PoolConfig | None = None, **bounds: Any) -> SessionManager:
    backends = [each(str(place / "snapshots")) for each in (Mounting, Second)]
    config = ManagerConfig(
        pool=pool or PoolConfig(enabled=False), templates=TemplateBounds(**bounds)
    )
    manager = SessionManager(config, backends=backends, state_dir=str(place), background=False)
    manager.before_store_closes += [each.close for each in backends]
    return manager


@pytest.fixture(autouse=True)
def _no_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer more where this machine has matplotlib is none of these tests' business."""
    monkeypatch.setattr(steps, "needs_fonts", lambda _sandbox: False)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[SessionManager]:
    with machine(tmp_path / "state") as made:
        yield made


@pytest.fixture
def templates(manager: SessionManager) -> Templates:
    return manager.templates


@pytest.fixture
def log(tmp_path: Path) -> Iterator[places.Log]:
    with closing(places.Log(str(tmp_path / "log"), 1 << 20, lambda: None)) as made:
        yield made


def said(log: places.Log) -> list[str]:
    with open(log._file.name, encoding="utf-8") as file:
        return [json.loads(line)["message"] for line in file]


def snapshot_of(templates: Templates, name: str, owner: str = "ann") -> str | None:
    found = templates.resolve(name, owner)
    assert found is not None
    return found.snapshot


# -- what a step may reach ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("https://pypi.org/simple", ("pypi.org", "files.pythonhosted.org")),
        ("https://index.example/simple", ("index.example",)),
        ("http://10.0.0.1:8080/simple", ("10.0.0.1:8080",)),
        ("http://[fd00::1]:81/simple", ("[fd00::1]:81",)),
        ("http://user:secret@index.example/simple", ("index.example",)),
    ],
)
def test_the_policy_of_an_index_reaches_it_and_nothing_else(
    url: str, hosts: tuple[str, ...]
) -> None:
    assert NetworkPolicy(allowed_hosts=hosts) == steps.index_policy(url)


@pytest.mark.parametrize("url", ["ftp://pypi.org/simple", "pypi.org", "https:///x", "file:///etc"])
def test_what_is_no_index_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a URL") as refused:
        steps.index_policy(url)
    assert "index_url" == refused.value.field


def test_each_step_has_its_own_network_or_that_of_the_base() -> None:
    base = SandboxSpec(network=LIMITED)
    other = NetworkPolicy(allowed_hosts=("other.example",))
    index = "https://index.example/simple"

    def network(step: TemplateStep) -> NetworkPolicy:
        return steps.spec_of(step, base, index, "").network

    run, pip = TemplateStep(run=("true",)), TemplateStep(pip_install=("x",))
    assert LIMITED == network(run)
    assert other == network(TemplateStep(run=("true",), network=other))
    assert steps.index_policy(index) == network(pip)
    assert other == network(TemplateStep(pip_install=("x",), network=other))
    theirs = "https://theirs.example/simple"
    assert steps.index_policy(theirs) == network(TemplateStep(pip_install=("x",), index_url=theirs))
    assert network(TemplateStep(copy="0" * 64, to="/srv/x")).is_none


def test_downloads_are_mounted_to_be_written_beside_what_the_base_mounts() -> None:
    base = SandboxSpec(mounts=(Mount("/data"),))
    step = TemplateStep(pip_install=("x",))
    (first, cache) = steps.spec_of(step, base, steps.PYPI, "/var/cache").mounts
    assert Mount("/data") == first
    assert ("/var/cache", READ_WRITE, ()) == (cache.source, cache.access, cache.protect)
    assert base.mounts == steps.spec_of(step, base, steps.PYPI, "").mounts


@pytest.mark.parametrize(
    ("to", "workdir", "place"),
    [
        ("/srv/a/file", None, "/srv/a"),
        ("/srv/a/", None, "/srv/a"),
        ("sub/file", "/app", "/app/sub"),
        ("file", None, None),
        ("/data/sub/file", None, None),
        ("/data/sub/file", "/app", "/app"),
        ("/database/file", None, "/database"),
    ],
)
def test_a_copy_starts_where_its_directory_is_made(
    to: str, workdir: str | None, place: str | None
) -> None:
    """The directory is made before the sandbox starts, which is too early below a mount."""
    base = SandboxSpec(mounts=(Mount("/data"),), workdir=workdir, network=LIMITED)
    step = TemplateStep(copy="0" * 64, to=to)
    assert place == steps.spec_of(step, base, steps.PYPI, "").workdir


def test_scripts_of_packages_are_found_unless_the_owner_says_where_to_look() -> None:
    pip, run = TemplateStep(pip_install=("x",)), TemplateStep(run=("true",))

    def path(step: TemplateStep, **spec: Any) -> str | None:
        return steps.environment(step, SandboxSpec(**spec)).env.get("PATH")

    assert (path(pip) or "").startswith("/")
    assert (path(pip, env={"HOME": "/h"}) or "").startswith("/h/.local/bin:")
    assert "/own" == path(pip, env={"PATH": "/own"})
    assert path(pip, image="debian") is path(run) is None


# -- how a step runs ------------------------------------------------------------------------------


def run_step(
    manager: SessionManager, log: places.Log, step: TemplateStep, left_s: float = 60.0
) -> None:
    with manager.acquire(client_id="ann") as lease:
        steps.run(
            step,
            lease.sandbox,
            log,
            left_s,
            cwd=None,
            index=steps.PYPI,
            upload=lambda sha256: sha256,
            has_cache=False,
        )


def test_a_step_takes_no_longer_than_it_or_its_build_may(
    manager: SessionManager, log: places.Log
) -> None:
    for of_step, left_s in ((60.0, 0.02), (0.02, 60.0)):
        step = TemplateStep(run=("sleep", "60"), timeout_s=of_step)
        with pytest.raises(ExecError, match=r"took longer than 0\.02 s"):
            run_step(manager, log, step, left_s)


def test_a_step_runs_as_its_user(manager: SessionManager, log: places.Log) -> None:
    run_step(manager, log, TemplateStep(run=("true",), user="sandbox"))
    with pytest.raises(InvalidRequest) as refused:  # here there is no other user
        run_step(manager, log, TemplateStep(run=("true",), user="somebody"))
    assert "user" == refused.value.field


def test_the_end_of_a_line_is_logged_although_it_has_no_end(
    manager: SessionManager, log: places.Log
) -> None:
    run_step(manager, log, TemplateStep(run=("sh", "-c", "printf 'one\\ntwo'; printf err >&2")))
    assert {"one", "two", "err"} == {*said(log)}
    script = "printf 'why; not the other' >&2; echo out; exit 3"
    with pytest.raises(ExecError, match="exit code 3: why; not the other") as failed:
        run_step(manager, log, TemplateStep(run=("sh", "-c", script)))
    assert "the template was not changed" in failed.value.hint


def test_packages_are_of_their_index_and_bring_no_code_that_is_built() -> None:
    run: list[tuple[list[str], dict[str, Any]]] = []

    def take(argv: list[str], **options: Any) -> Any:
        run.append((argv, options))
        return SimpleNamespace(ok=True)

    sandbox: Any = SimpleNamespace(exec=take)
    log: Any = SimpleNamespace(output=lambda _stream: None, end_lines=lambda: None)
    more: dict[str, Any] = {"cwd": None, "index": "https://ours/", "upload": str}
    for index in ("", "https://theirs/"):
        step = TemplateStep(pip_install=("x", "y>1"), index_url=index)
        for has_cache in (True, False):
            steps.run(step, sandbox, log, 5.0, has_cache=has_cache, **more)
    for number, (argv, options) in enumerate(run):
        asked_for = "https://ours/" if number < 2 else "https://theirs/"
        assert ["--index-url", asked_for, "x", "y>1"] == argv[-4:]
        assert ["--only-binary", ":all:"] == argv[4:6]
        assert ("--no-cache-dir" in argv) == bool(number % 2) != ("/mnt/pip-cache" in argv)
        assert (5.0, None) == (options["timeout_s"], options["user"])


def test_a_line_without_an_end_takes_no_room_and_a_log_counts_what_it_had(tmp_path: Path) -> None:
    """A build that goes on after a restart writes to the log that it has."""
    path, longest = str(tmp_path / "log"), places._LONGEST_LINE
    with closing(places.Log(path, 20_000, lambda: None)) as first:
        take = first.output(0)
        take(b"x" * longest)
        assert [] == said(first)
        take(b"y")
        assert ["x" * longest] == said(first), "one that is too long is cut"
        take(b"z\r\n")
        assert "z" == said(first)[-1]
    with closing(places.Log(f"{path}-new", 20_000, lambda: None)) as other:
        for size in (10_000, 4_000):
            other.output(1)(b"x" * size)
    with closing(places.Log(path, 20_000, lambda: None)) as again:
        again.output(1)(b"x" * 10_000)
        with pytest.raises(TooLarge):
            again.output(1)(b"x" * 4_000)


# -- layers that are known ------------------------------------------------------------------------


def test_a_layer_is_for_the_network_that_its_step_had(templates: Templates) -> None:
    built(templates, "one", ONE)
    first = snapshot_of(templates, "one")
    built(templates, "other", ONE, base={"network": LIMITED.to_json()})
    assert first != snapshot_of(templates, "other")
    built(templates, "third", ONE)
    assert first == snapshot_of(templates, "third")
    assert 2 == len(layers(templates))


def test_a_layer_is_of_the_backend_that_was_asked_for(
    manager: SessionManager, templates: Templates
) -> None:
    for backend in ("", "unconfined", "second"):
        built(templates, "one", ONE, backend=backend)
        saved = manager.store.snapshot(snapshot_of(templates, "one") or "")
        assert saved is not None
        assert (backend or "unconfined") == saved.backend


def test_a_template_is_as_public_as_its_last_build_asks(templates: Templates) -> None:
    for public in (False, True, False):
        assert public == built(templates, "one", public=public).public
        assert public == bool(templates.list("bob"))


def test_a_new_build_takes_its_own_tags_and_no_other(templates: Templates) -> None:
    first = built(templates, "one", ONE)
    templates.tag(templates.find("one", "ann"), first.build_id, ["v1"])
    second = built(templates, "one", ONE)
    assert {"default": second.build_id, "v1": first.build_id} == second.tags


def test_what_is_done_anew_is_known_from_then_on(templates: Templates) -> None:
    def found(*given: Any, **more: Any) -> list[str]:
        view = built(templates, "one", *given, **more)
        of_it = templates.records.build(view.build_id)
        assert of_it is not None
        return of_it.layers

    two = {"run": "true "}
    first = found(ONE, two)
    anew = found(ONE, {**two, "fresh": True})
    assert (first[0], False) == (anew[0], first[1] == anew[1])
    assert anew == found(ONE, two)
    whole = found(ONE, two, fresh=True)
    assert not {*anew} & {*whole}
    assert whole == found(ONE, two)
    assert not {*whole} & {*found({**ONE, "fresh": True}, two)}, "nor the steps after it"


def test_a_template_over_one_that_changed_is_built_over_what_that_is_now(
    templates: Templates,
) -> None:
    built(templates, "base", {"run": "echo first >file"})
    built(templates, "over", ONE, base={"template": "base"})
    first = snapshot_of(templates, "over")
    built(templates, "over", ONE, base={"template": "base"})
    assert first == snapshot_of(templates, "over")
    built(templates, "base", {"run": "echo second >file"})
    built(templates, "over", {"run": "grep -q second file"}, base={"template": "base"})
    built(templates, "over", ONE, base={"template": "base"})
    assert first != snapshot_of(templates, "over")


def test_a_template_over_another_without_a_step_has_its_files(
    manager: SessionManager, templates: Templates
) -> None:
    """Also when the one below is deleted before it is asked for."""
    built(templates, "base", {"run": "echo below >file"})
    built(templates, "over", base={"template": "base"})
    assert snapshot_of(templates, "base") == snapshot_of(templates, "over")
    templates.delete("base", "ann")
    with manager.acquire(SandboxSpec(template="over"), client_id="ann") as lease:
        assert b"below\n" == lease.sandbox.files.read("file")


def test_a_layer_that_is_used_again_counts_as_used_now(templates: Templates) -> None:
    built(templates, "one", ONE)
    (made,) = templates.records.layers("ann")
    templates.records.touch_layer("ann", made.key, 1.0)
    built(templates, "two", ONE)
    (now,) = templates.records.layers("ann")
    assert made.snapshot == now.snapshot
    assert abs(now.used_at - time.time()) < 60.0


def test_a_build_is_bounded_in_bytes_at_each_layer(tmp_path: Path) -> None:
    fills = [{"run": f"head -c 2000 /dev/zero >file{n}"} for n in range(2)]
    with machine(tmp_path, bytes=1000) as manager:
        view = ended(manager.templates, manager.templates.begin(asked("one", *fills), "ann"))
        assert (FAILED, 2) == (view.status, view.step)
        assert "take up 2000 bytes, of at most 1000" in view.error
        built(manager.templates, "one", ONE, owner="bob")


def test_a_build_takes_no_longer_than_any_may(tmp_path: Path) -> None:
    with machine(tmp_path, build_s=0.05) as manager:
        templates = manager.templates
        for timeout_s in (None, 600.0):
            request = asked("one", {"run": "sleep 5"}, timeout_s=timeout_s)
            view = ended(templates, templates.begin(request, "ann"))
            assert (FAILED, True) == (view.status, "took longer" in view.error)


# -- its sandboxes --------------------------------------------------------------------------------


def test_the_sandbox_of_a_step_ends_with_its_build_and_not_before(
    manager: SessionManager, templates: Templates, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    script = f"echo >{tmp_path / 'begun'}; cat {tmp_path / 'go'}"
    view = templates.begin(asked("one", {"run": script}, timeout_s=900.0), "ann")
    (tmp_path / "begun").read_bytes()
    [found] = manager.list(client_of("ann"))
    assert [None] * 3 == [
        getattr(found.timeouts, each) for each in ("idle_s", "detach_s", "suspend_s")
    ]
    assert 900.0 < (found.expires_in_s or 0.0) <= 960.0
    assert {LABEL: "one"} == manager.index.all()[0].spec.labels
    assert [] == manager.list("ann")
    (tmp_path / "go").write_text("x")
    assert READY == ended(templates, view).status
    assert [] == manager.list()


def test_a_build_that_was_stopped_before_its_sandbox_was_there_ends_that(
    manager: SessionManager,
) -> None:
    stopped: Any = SimpleNamespace(
        _client="builder", _lock=threading.Lock(), _why="the template was deleted", _lease=None
    )
    host: Any = manager
    with (
        pytest.raises(LifecycleError, match="was deleted"),
        _Leased(stopped, host, SandboxSpec(), AcquireOptions()),
    ):
        pass
    assert ([], 0) == (manager.list(), manager.slots.taken)
    stopped._why = ""
    with _Leased(stopped, host, SandboxSpec(), AcquireOptions()) as lease:
        assert [lease.id] == [each.session_id for each in manager.list()]
    assert ([], None) == (manager.list(), stopped._lease)


def test_only_pip_of_the_host_before_anything_else_has_run_keeps_downloads(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ran before could change what the next build of this owner installs."""
    seen: list[tuple[str, bool]] = []

    def note(step: TemplateStep, *_given: object, has_cache: bool, **_more: object) -> None:
        seen.append((step.kind, has_cache))

    monkeypatch.setattr(steps, "run", note)
    pip = {"pip_install": ["x"]}
    built(templates, "one", {"env": {"A": "1"}}, pip, ONE, {"pip_install": ["y"]})
    assert [("pip_install", True), ("run", False), ("pip_install", False)] == seen
    seen.clear()
    built(templates, "two", {"pip_install": ["z"]}, base={"template": "one"})
    built(templates, "three", ONE, {"pip_install": ["z"]})
    assert [("pip_install", False), ("run", False), ("pip_install", False)] == seen
    seen.clear()
    found = SimpleNamespace(find=lambda name: SimpleNamespace(id=f"id-of-{name}"))
    monkeypatch.setattr(building, "ImageStore", lambda: found)
    built(templates, "four", {"pip_install": ["z"]}, base={"image": "an-image"})
    assert [("pip_install", False)] == seen, "programs of an image may be anything"
    meant = templates.resolve("four", "ann")
    assert meant is not None
    assert "id-of-an-image" == meant.spec.image, "what the name means may change"


def test_a_directory_below_a_mount_is_made_by_a_step(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ...]] = []

    def note(step: TemplateStep, *_given: object, **_more: object) -> None:
        seen.append(step.run)

    monkeypatch.setattr(steps, "run", note)
    mounts = {"mounts": [{"target": "/data"}]}
    built(templates, "one", {"workdir": "/data/sub"}, {"workdir": "/database"}, base=mounts)
    assert [("mkdir", "-p", "/data/sub")] == seen
    found = templates.resolve("one", "ann")
    assert found is not None
    assert "/database" == found.spec.workdir


def test_downloads_of_pip_are_removed_once_they_are_large(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_MOST_PIP_BYTES", 10)
    mine, other = (templates.places.pip(owner) for owner in ("ann", "bob"))
    assert mine != other
    for place, size in ((mine, 11), (other, 10)):
        Path(place, "file").write_bytes(b"x" * size)
    assert mine == templates.places.pip("ann")
    assert other == templates.places.pip("bob")
    assert ([], ["file"]) == (os.listdir(mine), os.listdir(other))


def test_an_upload_that_a_build_reads_counts_as_used_now(templates: Templates) -> None:
    with closing(templates.upload("ann")) as upload:
        upload.write(b"some")
        held = upload.finish()
    path = templates.places.upload("ann", held)
    os.utime(path, (1, 1))
    templates.places.upload("ann", held)
    assert os.stat(path).st_mtime > 1


# -- sandboxes of a template ----------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("script", ["start", "ready"])
def test_what_a_template_starts_is_started_in_each_sandbox_or_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, warm: bool
) -> None:
    spec = SandboxSpec(template="one")
    pool = PoolConfig(min_warm=1, max_warm=1, warm_profiles=("made",), profiles={"made": spec})
    started: list[str] = []

    def start(sandbox: Any, request: Any, _timeout_s: float) -> None:
        started.append(sandbox.id)
        if len(started) > 1:
            raise ExecError("it is not ready")

    monkeypatch.setattr(steps, "start", start)
    with machine(tmp_path, pool=pool if warm else None) as manager:
        known = record(manager.templates, "one", default="b1")
        request = json.dumps({"name": "one", script: "true"})
        build(manager.templates, known, "b1", request=request)
        manager.templates.publish("one", public=True, sees="ann")
        if warm:
            manager.fill_pool()
            assert 1 == manager.pool.size
        lease = manager.acquire(spec, client_id="ann")
        assert [lease.session.sandbox_id] == started
        assert warm == bool(manager.counters["pool_hits"])
        if warm:
            manager.fill_pool()
        taken = manager.slots.taken
        with pytest.raises(ExecError):
            manager.acquire(spec, client_id="bob")
        assert "start command" == manager.get(started[1]).reason
        assert [lease.id] == [each.session_id for each in manager.list()]
        assert taken - warm == manager.slots.taken


def test_a_template_is_for_its_owner_and_one_that_is_public_for_all(
    manager: SessionManager, templates: Templates
) -> None:
    built(templates, "one", {"run": "echo made >file"})

    def content(client: str) -> bytes:
        with manager.acquire(SandboxSpec(template="one"), client_id=client) as lease:
            return lease.sandbox.files.read("file")

    assert b"made\n" == content("ann")
    with pytest.raises(InvalidRequest):
        content("bob")
    templates.publish("one", public=True, sees="ann")
    assert b"made\n" == content("bob")
    mine = manager.acquire(client_id="ann")
    saved = manager.snapshot(mine.id)
    with pytest.raises(InvalidRequest, match="files of its own") as refused:
        manager.acquire(
            SandboxSpec(template="one"), AcquireOptions(snapshot_id=saved.id), client_id="ann"
        )
    assert "template" == refused.value.field


def test_a_template_has_its_own_root_and_tier(templates: Templates) -> None:
    known = record(templates, "one", default="b1")
    build(templates, known, "b1", spec=json.dumps({"tier": STRONG}))
    found = templates.resolve("one", "ann")
    assert found is not None
    assert STRONG == found.merged(SandboxSpec(template="one")).tier
    assert LIGHT == SandboxSpec(template="one").tier
    with pytest.raises(InvalidRequest) as refused:
        found.merged(SandboxSpec(template="one", python_env=True))
    assert "python_env" == refused.value.field
