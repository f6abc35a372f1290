"""The same on the command line: `ringfence run --net` and its kin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.egress.world import World

pytestmark = [pytest.mark.in_world, pytest.mark.full]


def test_net_allows_a_list_of_hosts(world: World) -> None:
    curl = ["--", "curl", "-sS", "-f", "-m", "8"]

    assert 0 == run("--net", "a.test", *curl, "http://a.test/").returncode
    assert 0 != run("--net", "a.test", *curl, "http://b.test/").returncode
    assert 0 != run(*curl, "http://a.test/").returncode


def test_net_none_has_only_lo(world: World) -> None:
    shown = run("--net", "none", "--", "cat", "/proc/net/dev")

    devices = [
        line.partition(":")[0].strip() for line in shown.stdout.decode().splitlines() if ":" in line
    ]
    assert {"lo"} >= set(devices) - {"sit0", "tunl0", "ip6tnl0", "gre0"}


def test_a_policy_from_a_file_and_the_record_in_one(world: World, tmp_path: Path) -> None:
    policy, log = tmp_path / "policy.json", tmp_path / "log"
    policy.write_text(json.dumps({"mode": "limited", "allowed_hosts": ["a.test:80"]}))

    options = ["--net-policy", str(policy), "--net-log", str(log)]
    curl = "curl -sS http://a.test/; curl -sS -m 5 http://b.test/; true"
    done = run(*options, "--", "sh", "-c", curl)

    assert 0 == done.returncode, done.stderr
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {("a.test", True), ("b.test", False)} <= {(e["host"], e["allowed"]) for e in events}


def test_a_secret_from_the_environment(world: World) -> None:
    mark = world.mark()
    done = run(
        *("--net", "a.test", "--secret", "a.test=MY_TOKEN", "--"),
        *("curl", "-sS", "-f", "-m", "8", "https://a.test/"),
        env={"MY_TOKEN": "t0k3n-value"},
    )

    assert 0 == done.returncode, done.stderr
    (seen,) = world.left(mark, kind="request")
    assert ["Authorization", "Bearer t0k3n-value"] in [[n.title(), v] for n, v in seen["headers"]]


def test_learning_from_the_command_line(world: World, tmp_path: Path) -> None:
    done = run("--net-learn", "--", "curl", "-sS", "http://a.test/")

    assert 0 == done.returncode, done.stderr
    assert b"a.test:80" in done.stdout + done.stderr
