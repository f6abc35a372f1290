"""What a sandbox with a policy is shown of it: variables, a resolver, and failures that come at once."""

from __future__ import annotations

import pytest

from tests.egress.inside.attempts import PROXY, RESOLVER
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World

pytestmark = pytest.mark.in_world

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


def variables(sandbox: object) -> dict[str, str]:
    output = sandbox.exec(["env"]).stdout_text  # type: ignore[attr-defined]
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def test_the_usual_variables_name_the_proxy(make: MakeSandbox) -> None:
    shown = variables(make(network="a.test"))

    assert {f"http://{PROXY[0]}:{PROXY[1]}"} == {shown[name] for name in VARIABLES}
    assert shown["no_proxy"] == shown["NO_PROXY"]
    assert {"localhost", "127.0.0.1", "0.0.0.0"} <= set(shown["no_proxy"].split(","))
    assert "ALL_PROXY" not in shown  # some programs fail on a proxy that they have no module for


@pytest.mark.parametrize("network", ["none", "unrestricted"])
def test_without_a_policy_there_is_no_proxy(make: MakeSandbox, network: str) -> None:
    assert not set(VARIABLES) & set(variables(make(network=network)))


def test_the_users_own_variables_win(make: MakeSandbox) -> None:
    sandbox = make(network="a.test", env={"HTTP_PROXY": "http://mine:1"})

    assert "http://mine:1" == variables(sandbox)["HTTP_PROXY"]
    result = sandbox.exec(["printenv", "https_proxy"], env={"https_proxy": "http://this:2"})
    assert "http://this:2\n" == result.stdout_text


@pytest.mark.parametrize("network", ["none", "a.test"])
def test_the_resolver_is_the_sandboxs_own(make: MakeSandbox, network: str) -> None:
    shown = make(network=network).exec(["cat", "/etc/resolv.conf"]).stdout_text

    assert [RESOLVER] == [line.split()[1] for line in shown.splitlines() if "nameserver" in line]


@pytest.mark.parametrize("network", ["none", "a.test"])
@pytest.mark.parametrize(
    "argv",
    [
        ["curl", "-sSf", "http://evil.test/"],
        ["curl", "-sS", "--noproxy", "*", "https://evil.test/"],
        ["curl", "-sS", "--noproxy", "*", "http://203.0.113.200/"],
        ["curl", "-sS", "--noproxy", "*", "http://[2001:db8::200]/"],
        ["getent", "ahosts", "evil.test"],
    ],
    ids=["proxy", "name", "address", "address, v6", "resolver"],
)
def test_what_is_refused_fails_at_once(
    make: MakeSandbox, world: World, network: str, argv: list[str]
) -> None:
    sandbox = make(network=network)
    mark = world.mark()

    result = sandbox.exec(argv, timeout_s=60, env={"RES_OPTIONS": "timeout:30 attempts:3"})

    assert not result.ok
    assert not result.timed_out
    assert [] == world.left(mark)


def test_a_forked_library_process_has_egress_of_its_own(make: MakeSandbox) -> None:
    """`os.fork` in a program that has sandboxes: parent and child each go on."""
    import os

    from ringfence import Sandbox

    sandbox = make(network="a.test")
    pid = os.fork()
    if 0 == pid:
        code = 1
        try:
            with Sandbox.create(network="b.test") as own:
                code = 0 if own.exec(["curl", "-sSf", "http://b.test/"], timeout_s=10).ok else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)

    assert 0 == os.waitstatus_to_exitcode(status)
    say = ["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"]
    assert " 200 " in attempt(sandbox, "tcp", host="a.test", port=80, say=say)["heard"][:20]
