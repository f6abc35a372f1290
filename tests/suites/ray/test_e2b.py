"""E2B's own SDK, unmodified, over a gateway to three nodes: the checks of the suite `e2b`."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray

from e2b import Sandbox, Template
from ringfence.client import Client
from ringfence.cluster import admin
from ringfence.cluster.directory import Directory
from ringfence.model.base.ids import node_of
from tests.suites import remote
from tests.suites.e2b.test_e2b import (
    box,
    test_a_wrong_key_is_told_so,
    test_commands,
    test_files,
    test_life,
    test_pause_and_snapshots,
    test_signed_urls,
)
from tests.suites.e2b.test_templates import (
    context,
    test_a_template_from_its_steps_to_its_sandboxes,
    test_what_fails_is_told_by_the_sdks_own_errors,
)

from .conftest import node_options

__all__ = [
    "box",
    "context",
    "test_a_template_from_its_steps_to_its_sandboxes",
    "test_a_wrong_key_is_told_so",
    "test_commands",
    "test_files",
    "test_life",
    "test_pause_and_snapshots",
    "test_signed_urls",
    "test_what_fails_is_told_by_the_sdks_own_errors",
]
# The SDK leaves the connections of threads to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _gateway(cluster: Any) -> Iterator[None]:
    """A gateway with E2B's API, and the variables that a user sets."""
    added = [cluster.add_node(**node_options()) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "CLUSTER", cluster.address)
        with remote.serving_e2b():
            until = time.monotonic() + 300
            while len(admin.nodes(Directory(f"suite-{os.getpid()}"))) < 3:
                assert time.monotonic() < until, "the nodes do not come"
                time.sleep(0.1)
            yield
            gc.collect()
    for each in added:
        cluster.remove_node(each, allow_graceful=False)
    until = time.monotonic() + 300
    while sum(each["Alive"] for each in ray.nodes()) > 1:
        assert time.monotonic() < until, "Ray does not notice"
        time.sleep(0.1)


@pytest.mark.parametrize(("port", "status"), [(3000, 502), (49983, 403)])
def test_pages_of_a_sandbox_have_an_origin_and_the_api_takes_none(
    box: Sandbox, port: int, status: int
) -> None:
    """502: nothing listens there. Another page may not call what is inside."""
    headers = {"e2b-sandbox-id": box.sandbox_id, "e2b-sandbox-port": str(port)}
    headers["origin"] = "https://elsewhere.example"
    answer = httpx.get(f"{os.environ['E2B_SANDBOX_URL']}/health", headers=headers)

    assert status == answer.status_code


def test_lists_and_snapshots_are_of_all_nodes() -> None:
    """Pages merge in order; a snapshot's name finds its node, and is replaced wherever it was."""
    made = [Sandbox.create(timeout=60, metadata={"of": "all"}) for _ in range(9)]
    try:
        assert 1 < len({node_of(each.sandbox_id) for each in made})
        found, pages = [], Sandbox.list(limit=4)
        while pages.has_next:
            found += [each.sandbox_id for each in pages.next_items()]
        assert [each.sandbox_id for each in reversed(made)] == found
        for number, each in enumerate(made):
            each.files.write("number", str(number))
            each.create_snapshot(name="shared")
        with Sandbox.create("shared", timeout=60) as again:
            assert "8" == again.files.read("number")
        # An admin's list also has the layers of templates.
        named = [each for each in Sandbox.list_snapshots().next_items() if each.names]
        assert 1 == len(named)
    finally:
        for each in made:
            each.kill()


def test_a_build_over_a_template_of_another_node_is_refused_with_the_reason() -> None:
    """Its id, which the SDK has before it names the base, is of its owner's node."""
    address, key = os.environ["E2B_API_URL"], os.environ["E2B_API_KEY"].removeprefix("e2b_")
    with Client(address, key=f"rf_{bytes.fromhex(key).decode()}") as ann:
        mine = ann.templates.begin({"name": "mine"})
        for number in range(99):
            with Client(address, key=ann.make_key(f"o-{number}", scope="admin")["key"]) as other:
                name = f"of-{number}"
                made = other.templates.begin({"name": name, "public": True})
                assert "ready" == [*other.templates.follow(name, made.build_id)][-1]["status"]
                if node_of(made.id) != node_of(mine.id):
                    break
                other.templates.delete(name)
        with pytest.raises(Exception, match=f"'{name}' is on another node than this build"):
            Template.build(Template().from_template(name).run_cmd("true"), "over")
        built = Template.build(Template().from_template("mine").run_cmd("true"), "over")
        assert node_of(mine.id) == node_of(built.template_id)
        for each in ("over", "mine", name):
            ann.templates.delete(each)
