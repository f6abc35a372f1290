"""Templates of a manager: turns of builds, what tags mean, what goes, and what a second node does with them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.shared_store import make_store
from tests.unit.sessions.whole import Whole

from ringfence.errors import (
    InvalidRequest,
    IoError,
    LifecycleError,
    NotFound,
    QuotaExceeded,
    SnapshotNotFound,
)
from ringfence.model.mount import Mount
from ringfence.model.spec import DEBUG, OS_HARDENED, SandboxSpec
from ringfence.model.template import TemplateRequest, TemplateView
from ringfence.sessions import snapshots
from ringfence.sessions.config import ManagerConfig, PoolConfig, TemplateBounds
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.templates import places
from ringfence.sessions.templates.build import LABEL, client_of
from ringfence.sessions.templates.catalogue import Templates
from ringfence.sessions.templates.shared import SharedTemplates
from ringfence.snapshots.shared import SharedSnapshots
from ringfence.store.templates import (
    BUILDING,
    FAILED,
    READY,
    RESERVED,
    WAITING,
    BuildRecord,
    LayerRecord,
    TemplateRecord,
)

pytestmark = pytest.mark.anyone

PATIENCE_S = 60
NO_UPLOAD = "0" * 64


def machine(place: Path, shared: SharedSnapshots | None = None, **bounds: Any) -> SessionManager:
    backend = Whole(str(place / "snapshots"))
    config = ManagerConfig(pool=PoolConfig(enabled=False), templates=TemplateBounds(**bounds))
    manager = SessionManager(
        config, backends=[backend], state_dir=str(place), background=False, shared=shared
    )
    manager.before_store_closes.append(backend.close)
    return manager


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedSnapshots:
    return make_store(tmp_path / "store", monkeypatch)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[SessionManager]:
    with machine(tmp_path / "one", builds=2, builds_of_client=1, waiting_of_client=1) as made:
        yield made


@pytest.fixture
def templates(manager: SessionManager) -> Templates:
    return manager.templates


def asked(name: str, *steps: Any, **more: Any) -> TemplateRequest:
    return TemplateRequest.from_json({"name": name, "steps": steps, **more})


def ended(templates: Templates, view: TemplateView) -> TemplateView:
    """The template, once no build of it is under way."""

    def is_over() -> bool:
        builds = templates.records.builds(view.id)
        return not templates._running and all(e.status in (READY, FAILED) for e in builds)

    with templates.changed:
        assert templates.changed.wait_for(is_over, PATIENCE_S)
    return templates.view(view.id)


def built(
    templates: Templates, name: str, *steps: Any, owner: str = "ann", **more: Any
) -> TemplateView:
    view = ended(templates, templates.begin(asked(name, *steps, **more), owner))
    assert READY == view.status, view.error
    return view


def record(templates: Templates, name: str, owner: str = "ann", **tags: str) -> TemplateRecord:
    made = TemplateRecord(f"tpl-{name}-{owner}", owner, name, 0, tags, 1.0, 1.0)
    templates.records.add(made)
    return made


def build(templates: Templates, of: TemplateRecord, build_id: str, **more: Any) -> BuildRecord:
    given = {"status": READY, "request": '{"name": "x"}', "tags": [], "spec": "{}", **more}
    made = BuildRecord(id=build_id, template=of.id, **{"created_at": 1.0, **given})
    templates.records.add(made)
    return made


def layer(templates: Templates, owner: str, snapshot: str, used_at: float = 1.0) -> LayerRecord:
    made = LayerRecord(owner, f"key-{snapshot}", snapshot, 10, used_at)
    templates.records.add(made)
    return made


def layers(templates: Templates, owner: str | None = None) -> list[str]:
    return sorted(each.snapshot for each in templates.records.layers(owner))


def test_what_is_refused_leaves_nothing_and_what_was_there(templates: Templates) -> None:
    steps = {"copy": NO_UPLOAD, "to": "/x"}
    with pytest.raises(InvalidRequest) as refused:
        templates.begin(asked("new", {"run": "true"}, steps), "ann")
    assert ("steps[1].copy", "PUT /v1/uploads/SHA256 first") == (
        refused.value.field,
        refused.value.hint,
    )
    assert [] == templates.records.every()
    assert {} == templates.records.counts()

    before = built(templates, "kept")
    with pytest.raises(InvalidRequest):
        templates.begin(asked("kept", steps, public=True), "ann")
    assert before == templates.view(before.id)
    assert 1 == len(templates.records.builds(before.id))


def test_a_build_begins_once(templates: Templates) -> None:
    begun = templates.begin(asked("one"), "ann", "key")
    again = templates.begin(asked("one"), "ann", "key")
    assert begun.build_id == again.build_id
    ended(templates, begun)
    with pytest.raises(LifecycleError, match="already"):
        templates.start(begun.build_id, asked("one"), "ann")
    with pytest.raises(LifecycleError, match="already"):
        templates.refuse(begun.build_id, 1, "no")
    with pytest.raises(LifecycleError):
        templates.start("none", asked("one"), "ann")
    assert READY == templates.view(begun.id).status


def test_a_reserved_build_that_is_refused_has_failed_and_its_log_says_why(
    templates: Templates,
) -> None:
    found, reserved = templates.reserve("one", "ann", ["v1", "v2"])
    assert (RESERVED, ["v1", "v2"]) == (reserved.status, reserved.tags)
    templates.refuse(reserved.id, 3, "cannot be had")

    view = templates.view(found.id)
    assert (FAILED, 3, "cannot be had") == (view.status, view.step, view.error)
    line = json.loads(templates.places.read_log(reserved.id, 0, 1 << 20))
    assert (3, "error", "cannot be had") == (line["step"], line["level"], line["message"])
    made = templates.records.build(reserved.id)
    assert made is not None
    assert made.ended_at is not None


def test_each_tag_means_its_build_and_no_other(templates: Templates) -> None:
    known = record(templates, "one", v1="b1", v2="b2")
    for each in ("b0", "b1", "b2"):
        build(templates, known, each, layers=[f"s-{each}"])
    build(templates, known, "b3", status=FAILED, error="why")

    def meant(name: str, tag: str = "default", client: str | None = "ann") -> str:
        found = templates.resolve(name, client, tag)
        return "" if found is None else found.build.id

    assert ["b1", "b2"] == [meant("one", "v1"), meant("one", "v2")]
    assert "b2" == meant("one") == meant(known.id), "the newest where none has the default tag"
    assert "" == meant("one", "v3")
    assert "b0" == meant("b0"), "an id of a build means that one"
    for client in ("bob", client_of("bob")):
        assert "" == meant("one", client=client) == meant("b1", client=client)
    assert "b1" == meant("b1", client=client_of("ann")) == meant("b1", client=None)
    with pytest.raises(LifecycleError) as unbuilt:
        templates.resolve("b3", "ann")
    assert "why" == unbuilt.value.hint

    templates.tag(known, "b0", ["default", "v1"])
    assert ["b0", "b0", "b2"] == [meant("one"), meant("one", "v1"), meant("one", "v2")]
    now = templates.records.get(known.id)
    assert now is not None
    assert now.updated_at > 1.0
    templates.tag(now, "", ["default", "v2"])
    assert ["b0", "", "b0"] == [meant("one", "v1"), meant("one", "v2"), meant("one")]
    found = templates.resolve("one", "ann")
    assert found is not None
    assert "s-b0" == found.snapshot


def test_ones_own_is_found_before_a_public_one(templates: Templates) -> None:
    mine, common = record(templates, "same"), record(templates, "same", "bob")
    templates.publish(common.id, public=True, sees="bob")

    for sees, found in (("ann", mine), (client_of("ann"), mine), ("eve", common), ("bob", common)):
        assert found.id == templates.find("same", sees).id
    for who in ("eve", client_of("eve"), "ann"):
        with pytest.raises(NotFound):
            templates.find(common.id, who, is_mine=True)
        with pytest.raises(NotFound):
            templates.publish(common.id, public=False, sees=who)
        with pytest.raises(NotFound):
            templates.delete(common.id, who)
    assert [mine.id, common.id] == [each.id for each in templates.list("ann")]
    assert [common.id] == [each.id for each in templates.list("eve")]
    assert 2 == len(templates.list(None))
    templates.publish("same", public=False, sees="bob")
    assert [] == templates.list("eve")
    with pytest.raises(InvalidRequest):
        templates.find("same", None)
    assert mine.id == templates.find(mine.id, None).id


def test_a_build_of_another_template_is_not_found(templates: Templates) -> None:
    one, other = record(templates, "one"), record(templates, "other")
    for of, build_id, at in ((one, "b1", 1.0), (one, "b2", 2.0), (other, "b3", 3.0)):
        build(templates, of, build_id, created_at=at)

    assert "b2" == templates.build_of(one).id
    assert "b1" == templates.build_of(one, "b1").id
    for of, build_id in ((one, "b3"), (record(templates, "empty"), "")):
        with pytest.raises(NotFound) as missing:
            templates.build_of(of, build_id)
        assert "build_id" == missing.value.field


def test_builds_that_are_many_are_forgotten_but_not_those_that_something_means(
    templates: Templates,
) -> None:
    known = record(templates, "one", default="b01")
    for number in range(24):
        status = {2: WAITING, 3: BUILDING}.get(number, READY)
        each = build(templates, known, f"b{number:02}", status=status, created_at=float(number))
        templates.log_of(each.id).close()
    _, newest = templates.reserve("one", "ann", [])

    left = [each.id for each in templates.records.builds(known.id)]
    assert ["b01", "b02", "b03", *(f"b{n:02}" for n in range(5, 24)), newest.id] == left
    logs = os.listdir(os.path.dirname(templates.places.log("x")))
    assert sorted(f"{each}.ndjson" for each in left[:-1]) == sorted(logs)


def test_deleting_one_leaves_what_another_needs(templates: Templates) -> None:
    for owner, snapshot in (("ann", "s1"), ("ann", "s2"), ("ann", "s3"), ("bob", "s4")):
        layer(templates, owner, snapshot)
    one, other = record(templates, "one", default="b1"), record(templates, "other", default="b2")
    build(templates, one, "b1", layers=["s1", "s2", "s4"])
    build(templates, other, "b2", layers=["s1"])
    templates.log_of("b1").close()

    templates.delete("one", "ann")

    assert ["s1", "s3", "s4"] == layers(templates), "nor what another client made"
    assert [] == os.listdir(os.path.dirname(templates.places.log("x")))
    assert [other] == templates.records.every()
    assert templates.records.build("b1") is None


def test_room_is_made_of_what_this_client_alone_does_not_need(templates: Templates) -> None:
    now = time.time()
    for owner, snapshot, used_at in (
        ("ann", "old", 1.0),
        ("ann", "tagged", 1.0),
        ("ann", "building", 1.0),
        ("ann", "failed", 1.0),
        ("ann", "late", now),
        ("bob", "his", 1.0),
    ):
        layer(templates, owner, snapshot, used_at)
    known = record(templates, "one", default="b1")
    build(templates, known, "b1", layers=["tagged"])
    build(templates, known, "b2", layers=["building"], status=BUILDING)
    build(templates, known, "b3", layers=["failed"], status=FAILED)

    templates.collect("ann")
    assert ["building", "his", "late", "tagged"] == layers(templates)
    templates.collect("ann", keep_s=0.0)
    assert ["building", "his", "tagged"] == layers(templates)


def test_room_is_made_of_ones_own_uploads(tmp_path: Path) -> None:
    with machine(tmp_path, bytes=25) as manager:
        templates, held = manager.templates, {}
        for owner in ("ann", "bob"):
            with closing(templates.upload(owner)) as upload:
                upload.write(owner.encode())
                held[owner] = upload.finish()
        for snapshot in ("s1", "s2", "s3"):
            layer(templates, "ann", snapshot)
        templates.check_bytes("ann")
        assert [False, True] == [templates.places.has(each, held[each]) for each in held]


def test_what_a_template_of_another_node_needs_is_kept(
    tmp_path: Path, store: SharedSnapshots
) -> None:
    with machine(tmp_path / "one", store) as manager:
        templates = manager.templates
        for owner, snapshot in (("ann", "needed"), ("ann", "free"), ("bob", "his")):
            layer(templates, owner, snapshot)
        known = TemplateRecord("tpl-there", "ann", "there", 0, {"default": "b1"}, 1.0, 1.0)
        there = BuildRecord("b1", known.id, READY, "{}", [], 1.0, layers=["needed"])
        SharedTemplates(store, templates.records).put(known, [there])
        templates.collect("ann", keep_s=0.0)
        assert ["his", "needed"] == layers(templates)


def test_a_layer_made_anew_takes_the_others_place(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for snapshot in ("needed", "free"):
        layer(templates, "ann", snapshot)
    known = record(templates, "one", default="b1")
    build(templates, known, "b1", layers=["needed"])
    removed: list[str] = []
    monkeypatch.setattr(templates, "_remove_layer", removed.append)

    for snapshot in ("needed", "free"):
        templates.put(LayerRecord("ann", f"key-{snapshot}", f"{snapshot}-2", 1, 2.0))
    templates.put(LayerRecord("bob", "key-free", "his", 1, 2.0))

    assert ["free"] == removed
    assert ["free-2", "needed-2"] == layers(templates, "ann")


def test_bytes_are_of_layers_and_uploads_and_bounded_at_the_last_one(tmp_path: Path) -> None:
    with machine(tmp_path, bytes=25) as manager:
        templates = manager.templates
        known = record(templates, "one", default="b1")
        for snapshot in ("s1", "s2"):
            layer(templates, "ann", snapshot)
        build(templates, known, "b1", layers=["s1", "s2"])
        layer(templates, "bob", "s3")
        with closing(templates.upload("ann")) as upload:
            upload.write(b"1234")
            upload.finish()
        assert (24, 10) == (templates.used_bytes("ann"), templates.used_bytes("bob"))
        templates.check_bytes("ann")
        with closing(templates.upload("ann")) as upload, pytest.raises(QuotaExceeded) as full:
            upload.write(b"12")
        assert "bytes" == full.value.field
        with closing(templates.upload("ann")) as upload:
            upload.write(b"1")
            held = upload.finish()
        templates.check_bytes("ann", {held})  # frees the other upload
        assert 21 == templates.used_bytes("ann")
        layer(templates, "ann", "s4", time.time())
        build(templates, known, "b4", layers=["s4"], status=WAITING)
        with pytest.raises(QuotaExceeded):
            templates.begin(asked("two"), "ann")
        assert [known.id] == [each.id for each in templates.records.every()]


GATE = "until [ -e {0} ]; do sleep 0.01; done"


def test_builds_take_turns_by_client(templates: Templates, tmp_path: Path) -> None:
    """Two run at once, one of each client; one more of each waits."""
    step = {"run": GATE.format(tmp_path / "go")}
    views = [templates.begin(asked(f"t{n}", step), "ann") for n in range(2)]
    with pytest.raises(QuotaExceeded):
        templates.begin(asked("t2", step), "ann")
    views.append(templates.begin(asked("t", step), "bob"))
    views.append(templates.begin(asked("t", step), "eve"))

    assert {views[0].build_id, views[2].build_id} == set(templates._running)
    assert [views[1].build_id, views[3].build_id] == [each for _, each in templates._waiting]
    assert 2 == len(templates.records.every("ann"))
    templates.delete("t1", "ann")  # what waits never begins
    (tmp_path / "go").touch()
    for view in (views[0], views[2], views[3]):
        assert READY == ended(templates, view).status
    assert {READY: 3} == templates.records.counts()


def test_the_end_of_a_server_leaves_builds_for_the_next_one(tmp_path: Path) -> None:
    place, step = tmp_path / "state", {"run": GATE.format(tmp_path / "go")}
    with machine(place, builds_of_client=1) as first:
        first.templates.begin(asked("one", {"run": "true"}, step), "ann")
        first.templates.begin(asked("two"), "ann")
        tired = record(first.templates, "tired")
        build(first.templates, tired, "b-tired", status=BUILDING, tries=3)
        again = record(first.templates, "again")
        build(first.templates, again, "b-again", status=BUILDING, tries=2)
        first.templates.close()
        with pytest.raises(LifecycleError):
            first.templates.begin(asked("three"), "ann")
        states = {each.name: each.status for each in first.templates.list("ann")}
        assert (BUILDING, WAITING) == (states["one"], states["two"])
        assert "three" not in states
    with machine(place, builds=0) as busy:
        states = {each.name: each.status for each in busy.templates.list("ann")}
        assert [WAITING] * 3 == [states[each] for each in ("one", "two", "again")]
    (tmp_path / "go").touch()
    with machine(place) as second:
        for view in second.templates.list("ann"):
            ended(second.templates, view)
        found = {each.name: each for each in second.templates.list("ann")}
        assert [READY, READY, READY] == [found[e].status for e in ("one", "two", "again")]
        assert (FAILED, True) == (found["tired"].status, "3 times" in found["tired"].error)
        one = second.templates.records.build(found["one"].build_id)
        assert one is not None
        assert (2, 2) == (one.tries, len(one.layers))
        assert [] == second.list()


def test_a_start_removes_what_builds_left_half_made_and_nothing_of_clients(tmp_path: Path) -> None:
    place = tmp_path / "state"
    with machine(place) as first:
        made = built(first.templates, "one", {"run": "true"})
        for client in (client_of("ann"), "ann"):
            with first.acquire(SandboxSpec(labels={LABEL: "one"}), client_id=client) as lease:
                orphan = first.snapshot(lease.id, None, client).id
        kept = first.templates.records.layers()[0].snapshot
        assert 3 == len(first.store.snapshots())
    with machine(place) as second:
        assert {kept, orphan} == {each.id for each in second.store.snapshots()}
        assert READY == second.templates.view(made.id).status
        # Those of builds that were killed end; a client may have the same label.
        lives = [
            second.acquire(SandboxSpec(labels=labels), client_id=client)
            for client, labels in (
                (client_of("ann"), {LABEL: "one"}),
                ("ann", {LABEL: "one"}),
                (client_of("ann"), {}),
            )
        ]
        second.templates.recover()
        assert {each.id for each in lives[1:]} == {each.session_id for each in second.list()}


def test_a_build_whose_template_is_deleted_ends_and_leaves_nothing(
    manager: SessionManager, templates: Templates, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "begun")
    steps = [{"run": "true"}, {"run": f"echo >{tmp_path / 'begun'}; sleep 600"}]
    templates.begin(asked("one", *steps), "ann")
    (tmp_path / "begun").read_bytes()

    templates.delete("one", "ann")

    assert ([], [], {}, []) == (
        templates.records.every(),
        layers(templates),
        templates.records.counts(),
        manager.list(),
    )
    assert [] == manager.store.snapshots()
    assert {} == templates._running


def test_a_listener_hears_of_lines_until_it_stops(templates: Templates) -> None:
    heard: list[int] = []
    stop = templates.listen(lambda: heard.append(1))
    with closing(templates.log_of("one")) as log:
        log.say("first")
        assert 1 == len(heard)
        stop()
        stop()
        log.say("second")
    assert 1 == len(heard)


def test_a_second_node_uses_and_takes_over_what_another_built(
    tmp_path: Path, store: SharedSnapshots
) -> None:
    with machine(tmp_path / "one", store) as one, machine(tmp_path / "two", store) as two:
        made = built(one.templates, "shared", {"run": "true"}, {"run": "true"})
        found = two.templates.resolve("shared", "ann")
        assert found is not None
        assert made.build_id == found.build.id
        assert found.build.layers[-1] == found.snapshot
        assert [made.id] == [each.id for each in two.templates.list("ann")]
        assert made.id == two.templates.look("shared", "ann").id
        assert [] == two.templates.list("bob")
        with pytest.raises(NotFound):
            two.templates.look("shared", "bob")
        assert two.templates.resolve("shared", "bob") is None
        one.templates.publish("shared", public=True, sees="ann")
        assert two.templates.look("shared", "bob").public
        with pytest.raises(NotFound):
            two.templates.find("shared", "bob", is_mine=True)
        assert [] == two.templates.records.every(), "nothing of it was taken over by looking"

        # Asked for again there, it is built there under an id of that node.
        again = built(two.templates, "shared", {"run": "true"}, {"run": "true"})
        assert again.id != made.id
        assert 2 == len(two.templates.records.builds(again.id))
        two.templates.delete("shared", "ann")
        assert [] == two.templates.list("ann")[1:]


def test_a_node_in_the_place_of_a_lost_one_changes_what_that_built(
    tmp_path: Path, store: SharedSnapshots
) -> None:
    with machine(tmp_path / "one", store) as one:
        made = built(one.templates, "lost", {"run": "true"})
    with machine(tmp_path / "two", store) as two:
        view = two.templates.publish("lost", public=True, sees="ann")
        assert (made.id, True) == (view.id, view.public)
        assert made.id == two.templates.look("lost", "eve").id
        two.templates.delete("lost", "ann")
        assert two.templates.resolve("lost", "ann") is None
        assert [] == [each for each in store.names() if each.startswith("snap")]


def test_a_build_that_other_nodes_cannot_see_has_failed(
    tmp_path: Path, store: SharedSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: object) -> None:
        raise IoError("the store is not there")

    with machine(tmp_path / "one", store) as one:
        first = built(one.templates, "one", {"run": "true"})
        monkeypatch.setattr(store, "write", fails)
        second = ended(one.templates, one.templates.begin(asked("one"), "ann"))
        assert (FAILED, "the store is not there") == (second.status, second.error)
        meant = one.templates.resolve("one", "ann")
        assert meant is not None
        assert first.build_id == meant.build.id
        with pytest.raises(IoError):
            one.templates.publish("one", public=True, sees="ann")
        assert not one.templates.view(first.id).public


def test_what_a_sandbox_says_goes_before_what_its_template_says(templates: Templates) -> None:
    known = record(templates, "one", default="b1")
    mounts = [{"target": "/a"}, {"target": "/b"}]
    own = {"env": {"A": "1", "B": "1"}, "workdir": "/w", "mounts": mounts, "profile": DEBUG}
    build(templates, known, "b1", spec=json.dumps({**own, "user": "1000", "image": "img"}))
    found = templates.resolve("one", "ann")
    assert found is not None

    plain = found.merged(SandboxSpec(template="one"))
    assert ("default", "img", "/w", "1000", DEBUG) == (
        plain.template,
        plain.image,
        plain.workdir,
        plain.user,
        plain.profile,
    )
    given = SandboxSpec(
        template="one", env={"B": "2"}, workdir="/x", user="7", mounts=(Mount("/b", "/usr"),)
    )
    said = found.merged(given)
    assert ({"A": "1", "B": "2"}, "/x", "7") == (dict(said.env), said.workdir, said.user)
    assert [("/a", ""), ("/b", "/usr")] == [(e.target, e.source) for e in said.mounts]
    assert OS_HARDENED != plain.profile, "which is what a sandbox has that says nothing"
    with pytest.raises(InvalidRequest) as refused:
        found.merged(SandboxSpec(image="other"))
    assert "image" == refused.value.field


def test_a_layer_whose_snapshot_is_gone_is_made_anew(
    manager: SessionManager, templates: Templates
) -> None:
    step = {"run": "true"}
    first = built(templates, "one", step)
    (made,) = layers(templates)
    built(templates, "two", step)
    assert [made] == layers(templates)
    snapshots.delete(manager, made, None)
    with pytest.raises(SnapshotNotFound):
        snapshots.need(manager, made, None)

    again = built(templates, "three", step)

    assert [made] != layers(templates)
    newest = templates.records.build(again.build_id)
    assert newest is not None
    assert layers(templates) == newest.layers
    assert first.id != again.id


def test_a_log_is_read_in_whole_lines_from_the_beginning_of_one() -> None:
    made = places.Places(None)
    Path(made.log("b")).write_bytes(b"one\ntwo\nthr")
    assert b"one\ntwo\n" == made.read_log("b", 0, 100)
    assert b"two\n" == made.read_log("b", 4, 100) == made.read_log("b", 4, 5)
    assert (
        b"" == made.read_log("b", 8, 100) == made.read_log("b", 12, 100) == made.read_log("c", 5, 1)
    )
    for offset in (1, 3, 5):
        with pytest.raises(InvalidRequest):
            made.read_log("b", offset, 100)
    made.close()
    assert not os.path.exists(made._path)


def test_a_client_has_so_many_templates_and_not_one_more(tmp_path: Path) -> None:
    with machine(tmp_path / "one", templates=2) as made:
        templates = made.templates
        for name in ("a", "b", "a"):
            templates.reserve(name, "ann", ["default"])
        with pytest.raises(QuotaExceeded, match="has 2 templates, of at most 2"):
            templates.reserve("c", "ann", ["default"])
        templates.reserve("c", "bob", ["default"])
        assert ["a", "b"] == sorted(each.name for each in templates.records.every("ann"))
        templates.delete("a", "ann")
        templates.reserve("c", "ann", ["default"])


def test_a_template_that_is_deleted_has_no_turn_any_more(templates: Templates) -> None:
    """Else it would count among those of its client that wait."""
    for name in ("a", "b"):
        _, build = templates.reserve(name, "ann", ["default"])
        with templates.changed:
            templates.records.change_build(build.id, status=WAITING)
            templates._waiting.append(("ann", build.id))
    templates.delete("a", "ann")
    assert [("ann", build.id)] == templates._waiting
    templates.delete("b", "ann")
    assert [] == templates._waiting
