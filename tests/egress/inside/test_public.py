"""`public`: every name and every address of the internet, and nothing of the host's or around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence import Sandbox
from tests.egress.inside.test_without_namespaces import CONNECT, OK, PYTHON
from tests.egress.world import World, places
from tests.features import require

pytestmark = [pytest.mark.in_world, pytest.mark.anyone]

_RULES = "public:80,!public:22,!c.test,!203.0.113.200"
_WEB = "a.test", 80
_REACHED = (_WEB, ("v6.test", 80), (places.WEB_V4, 80), (places.WEB_V6, 80))
_AROUND = (
    *(("private.test", 80), ("metadata.test", 80), ("lan.test", 80), ("host.test", 80)),
    *(("10.0.0.5", 80), (places.METADATA_V4, 80), (places.GATEWAY_V4, 8080), (places.LAN_V4, 80)),
    *(("127.0.0.1", places.HOST_PORT_EVERYWHERE), (places.HOST_V4, places.HOST_PORT_EVERYWHERE)),
)
_DENIED = (
    *(("a.test", 22), (places.WEB_V4, 22), ("a.test", 443)),
    *(("c.test", 80), (places.OTHER_V4, 80)),
)


@pytest.fixture(scope="module", params=["native", "landlock", "runsc"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param != "native":
        require(request.param)
    return "gvisor" if request.param == "runsc" else str(request.param)


@pytest.fixture
def sandbox(world: World, backend: str) -> Iterator[Sandbox]:
    with Sandbox.create(backend=backend, network=_RULES) as made:
        yield made


def answers(sandbox: Sandbox, *asked: tuple[str, int]) -> dict[tuple[str, int], str]:
    ran = sandbox.exec([PYTHON, "-c", CONNECT, *(str(part) for each in asked for part in each)])
    assert ran.ok, ran
    return dict(zip(asked, ran.text.splitlines(), strict=True))


def test_it_reaches_the_internet_and_nothing_around_the_host(sandbox: Sandbox) -> None:
    found = answers(sandbox, *_REACHED, *_AROUND, *_DENIED)

    assert set(_REACHED) == {place for place, heard in found.items() if heard == OK}


def test_the_report_calls_it_enforced_and_says_what_it_is(sandbox: Sandbox) -> None:
    (found,) = [each for each in sandbox.protections() if each.name == "network"]

    if sandbox.session.backend == "landlock":  # whose network is the host's, which it says
        assert ("missing", False) == (found.status, "learning" in found.why)
    else:
        assert ("enforced", True) == (found.status, "every public host" in found.why), found


def test_the_controls_say_what_else_is_there(world: World) -> None:
    rules = ["public", *(host for host, _ in _AROUND if host[0].isdigit() and host != "127.0.0.1")]
    with Sandbox.create(network=rules) as sandbox:
        found = answers(sandbox, ("a.test", 443), ("c.test", 80), (places.OTHER_V4, 80))
        assert {"c.test", places.OTHER_V4} <= {
            host for (host, _), heard in found.items() if heard == OK
        }
        around = answers(sandbox, ("10.0.0.5", 80), (places.METADATA_V4, 80))
        assert {OK} == set(around.values())
