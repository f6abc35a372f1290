"""The network options of `run`: which policy they make, what is refused, and the record."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from ringfence.cli import network
from ringfence.cli.network import Record, for_json, network_of
from ringfence.errors import InvalidRequest
from ringfence.model import Credential, NetworkEvent, NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.model.spec import SandboxSpec
from tests.cli.command import run

pytestmark = pytest.mark.anyone

TOKEN = Credential("TOKEN")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    monkeypatch.delenv("NO_SUCH", raising=False)


class Stub:
    """A sandbox that has ended, as far as the record is concerned."""

    def __init__(self, policy: NetworkPolicy, *events: NetworkEvent) -> None:
        self.spec = SandboxSpec(network=policy)
        self._events = list(events)

    def network_log(self) -> list[NetworkEvent]:
        return self._events


def stub(policy: NetworkPolicy, *events: NetworkEvent) -> Any:
    return cast("Any", Stub(policy, *events))


def event(host: str, port: int, *, allowed: bool = True, reason: str = "") -> NetworkEvent:
    return NetworkEvent(1.5, "a", "tcp", host, "203.0.113.5", port, allowed, reason)


def policy_of(**given: Any) -> NetworkPolicy:
    options = {name.replace("_", "-"): value for name, value in given.items()}
    return cast("NetworkPolicy", network_of(options)["network"])


def field_of(**given: Any) -> str:
    with pytest.raises(InvalidRequest) as refusal:
        policy_of(**given)
    assert "hunter2" not in str(refusal.value)
    return refusal.value.field


class TestPolicies:
    def test_net(self) -> None:
        assert NetworkPolicy.parse("a.com:80,443,!x.a.com") == policy_of(
            net="a.com:80,443,!x.a.com"
        )

    def test_net_policy(self, tmp_path: Path) -> None:
        policy = NetworkPolicy(
            rules=(NetworkRule("a.com", methods=("GET",)),), limits=NetworkLimits(connections=3)
        )
        file = tmp_path / "policy.json"
        file.write_text(json.dumps(policy.to_json()))

        assert policy == policy_of(net_policy=str(file))
        learning = policy_of(net_policy=str(file), net_learn=True)
        assert (True, policy.rules, policy.limits) == (
            learning.learn,
            learning.rules,
            learning.limits,
        )
        told = policy_of(net_policy=str(file), secret=["api.test=TOKEN"])
        rule = NetworkRule("api.test", "443", credential=TOKEN)
        assert ((*policy.rules, rule), policy.limits) == (told.rules, told.limits)

    def test_learning_keeps_what_is_said(self) -> None:
        assert NetworkPolicy(learn=True) == policy_of(net_learn=True)
        assert NetworkPolicy(learn=True) == policy_of(net="none", net_learn=True)
        assert NetworkPolicy.parse("!a.com", learn=True) == policy_of(net="!a.com", net_learn=True)

    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("api.test=TOKEN", NetworkRule("api.test", "443", credential=TOKEN)),
            ("*.api.test:8443=TOKEN", NetworkRule("*.api.test", "8443", credential=TOKEN)),
            (
                "api.test=TOKEN:X-Api-Key",
                NetworkRule("api.test", "443", credential=Credential("TOKEN", "x-api-key", "")),
            ),
        ],
    )
    def test_secrets(self, text: str, rule: NetworkRule) -> None:
        parts = network_of({"secret": [text], "net": "a.com"})

        assert NetworkPolicy(allowed_hosts=("a.com",), rules=(rule,)) == parts["network"]
        assert {"TOKEN": "hunter2"} == parts["secrets"]
        spec = SandboxSpec(**parts)
        assert "hunter2" not in repr(spec)
        assert "hunter2" not in json.dumps(spec.to_json())


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("network", {"net": ""}),
        ("network.allowed_hosts[0]", {"net": "a b"}),
        ("network.allowed_hosts", {"net": "!a.com"}),
        ("net-policy", {"net": "a.com", "net_policy": "/dev/null"}),
        ("net-policy", {"net_policy": "/dev/null"}),
        ("net-policy", {"net_policy": "/no/such"}),
        ("net-policy", {"net_policy": "/dev/zero"}),
        ("net-policy", {"net_policy": "a\0b"}),
        ("net-learn", {"net": "unrestricted", "net_learn": True}),
        ("net-log", {"net": "unrestricted", "net_log": "/dev/null"}),
        ("secret", {"net": "unrestricted", "secret": ["a.com=TOKEN"]}),
        ("secret", {"secret": ["a.com"]}),
        ("secret", {"secret": ["a.com="]}),
        ("secret", {"secret": ["a.com=TOKEN:"]}),
        ("secret", {"secret": ["a.com=NO_SUCH"]}),
        ("secret", {"secret": ["a.com=TO-KEN"]}),
        ("secret", {"secret": ["a.com=TOKEN:Host"]}),
        ("secret", {"secret": ["=TOKEN"]}),
        ("secret", {"secret": ["!a.com=TOKEN"]}),
        ("secret", {"secret": ["10.0.0.1=TOKEN"]}),
    ],
    ids=str,
)
def test_what_is_refused(field: str, given: dict[str, Any]) -> None:
    assert field == field_of(**given)


def test_what_may_be_the_secret_itself_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")
    for text, said in (
        ("a.com=sk-hunter2", "no name of a variable"), ("a.com=sk_hunter2", "no variable of that name"),
        ("a.com=NO_SUCH", "NO_SUCH is not set"), ("a.com=EMPTY", "EMPTY is empty"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as refusal:
            policy_of(secret=[text])
        assert said in str(refusal.value)
        assert "hunter2" not in str(refusal.value)


def test_a_policy_that_a_person_wrote_is_read_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.json"
    for text, said in (
        ('{"mode": "limited", "mode": "unrestricted"}', "twice"), ("{}", "mode"),
        (" " * (16 * 2**20 + 1), "larger than 16 MiB"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(InvalidRequest, match=said) as refusal:
            policy_of(net_policy=str(file))
        assert "net-policy" == refusal.value.field
    file.write_text(json.dumps(NetworkPolicy(learn=True).to_json()))
    assert policy_of(net_policy=str(file), secret=["api.test=TOKEN"]).learn
    with monkeypatch.context() as patch:
        patch.setattr(network, "_MOST_BYTES", file.stat().st_size)
        assert policy_of(net_policy=str(file)).learn, "as large as it may be"
    assert "network.allowed_hosts[0]" == field_of(net="localhost")


def test_an_error_in_a_file_says_where(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"mode": "limited", "rules": [{"host": "a.com", "path": ["/"]}]}')

    result = run("--net-policy", str(file), "--", "true")

    assert 125 == result.returncode
    assert result.stderr.startswith(f"ringfence: --net-policy: '{file}': rules[0].path: ".encode())


@pytest.mark.parametrize(
    ("flag", "args"),
    [
        ("--net", ["--net", "a.com:x"]),
        ("--net", ["--net", "127.1"]),
        ("--net", ["--net", "ä.com"]),
        ("--net-learn", ["--net", "unrestricted", "--net-learn"]),
        ("--net-log", ["--net-learn", "--net-log", "/no/such/directory/log"]),
        ("--secret", ["--secret", "a.com=NO_SUCH_VARIABLE"]),
        ("--secret", ["--secret", "a.com"]),
        ("--net-policy", ["--net-policy", "/no/such/file"]),
    ],
)
def test_the_option_is_named(flag: str, args: list[str]) -> None:
    result = run(*args, "--", "true")

    assert (125, b"") == (result.returncode, result.stdout)
    assert result.stderr.startswith(f"ringfence: {flag}: ".encode())
    assert 1 == result.stderr.count(b"\n")


class TestRecords:
    LEARNING = NetworkPolicy(learn=True)

    def test_the_log_is_json_lines_for_nobody_else(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        events = [event("a.com", 443), event("b.com", 80, allowed=False, reason="no\x1b[2J\n")]
        record = Record({"net-log": str(log)})
        record.close(stub(self.LEARNING, *events))

        lines = log.read_text().splitlines()
        assert events == [NetworkEvent.from_json(json.loads(line)) for line in lines]
        assert 0o600 == stat.S_IMODE(log.stat().st_mode)
        assert "\x1b" not in log.read_text()

    def test_what_was_learned_can_be_pasted(self, capfd: pytest.CaptureFixture[str]) -> None:
        events = [
            event("b.com", 443),
            event("b.com", 80),
            event("", 22),
            event("x", 1, allowed=False),
        ]
        Record({"net-learn": True}).close(stub(self.LEARNING, *events))

        said = capfd.readouterr().err
        assert "ringfence: learned: --net 203.0.113.5:22,b.com:80,443\n" == said
        again = NetworkPolicy.parse(said.split()[-1])
        assert ("203.0.113.5:22", "b.com:80,443") == again.allowed_hosts

    def test_a_shell_leaves_brackets_alone(self, capfd: pytest.CaptureFixture[str]) -> None:
        there = NetworkEvent(1.5, "a", "tcp", "", "2001:db8::1", 22, True)
        Record({"net-learn": True}).close(stub(self.LEARNING, there))

        assert "ringfence: learned: --net '[2001:db8::1]:22'\n" == capfd.readouterr().err

    def test_nothing_reached_is_none(self, capfd: pytest.CaptureFixture[str]) -> None:
        Record({"net-learn": True}).close(stub(self.LEARNING))

        assert "ringfence: learned: --net none\n" == capfd.readouterr().err

    def test_a_disk_that_is_full_is_said(self, capfd: pytest.CaptureFixture[str]) -> None:
        Record({"net-log": "/dev/full"}).close(stub(self.LEARNING, event("a.com", 443)))

        assert "/dev/full" in capfd.readouterr().err

    def test_no_descriptor_is_left(self, tmp_path: Path) -> None:
        before = os.listdir("/proc/self/fd")
        Record({"net-log": str(tmp_path / "log")}).close(stub(self.LEARNING))

        assert before == os.listdir("/proc/self/fd")

    def test_json(self) -> None:
        form = for_json(stub(self.LEARNING, event("a.com", 443)))

        assert {"mode": "limited", "allowed_hosts": [], "learn": True} == form["policy"]
        assert {"mode": "limited", "allowed_hosts": ["a.com:443"]} == form["learned"]
        assert "a.com" == form["events"][0]["host"]
        assert "learned" not in for_json(stub(NetworkPolicy.parse("a.com")))
