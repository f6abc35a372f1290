"""Forks of live sandboxes, races between them, and merges, here and on a server."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringfence import AsyncSandbox, Sandbox, SandboxSpec, race
from ringfence.client import Client, RemoteSandbox
from ringfence.errors import (
    Forbidden,
    InvalidRequest,
    QuotaExceeded,
    RingfenceError,
    SandboxNotFound,
    SnapshotNotFound,
    Unsupported,
)
from ringfence.fork.text import TextMerger
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from tests.api.conftest import StartDaemon
from tests.fork.conftest import Create

BASE = "".join(f"{number}\n" for number in range(9))


def snapshots_of(sandbox: Any) -> list[Any]:
    if isinstance(sandbox, RemoteSandbox):
        found: list[Any] = sandbox._transport.json("GET", "/v1/snapshots")["items"]
        return found
    return [each for each in Sandbox.snapshots() if each.session_id == sandbox.id]


def test_forks_have_the_files_and_then_go_their_own_ways(sandbox: Any) -> None:
    sandbox.files.write("a", "before")
    with ExitStack() as stack:
        forks = [stack.enter_context(each) for each in sandbox.fork(3)]
        for number, fork in enumerate(forks):
            assert "before" == fork.files.read_text("a")
            fork.files.write("a", str(number))

        assert ["0", "1", "2"] == [each.files.read_text("a") for each in forks]
        assert "before" == sandbox.files.read_text("a")
        assert 4 == len({each.id for each in (sandbox, *forks)})
        assert {sandbox.id} == {each.parent for each in forks}
        (inner,) = forks[0].fork()
        stack.enter_context(inner)
        assert (sandbox.id, forks[0].id) == inner.lineage()
        assert "0" == inner.files.read_text("a")
        assert [] == snapshots_of(sandbox)


def test_a_fork_has_the_policy_that_holds_now_or_another(create: Create) -> None:
    labels = {"labels": {"job": "1"}}
    with create(network=["example.com"], limits={"pids": 50}, **labels) as sandbox:
        sandbox.apply_network_policy(["example.org"])
        (fork,) = sandbox.fork()
        (other,) = sandbox.fork(network="none", limits={"pids": 40}, labels={"job": "2"})
        with fork, other:
            enforced = fork._inner.spec if isinstance(fork, Sandbox) else fork.spec
            for spec in (fork.spec, enforced):
                assert ("example.org",) == tuple(spec.network.allowed_hosts)
            assert other.spec.network.is_none
            jobs = [each.session.metadata["job"] for each in (fork, other)]
            assert ["1", "2"] == jobs
            assert 40 == other.capabilities().limits.pids


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 1001}, {"processes": "some"}])
def test_a_malformed_fork_is_refused(sandbox: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sandbox.fork(**wrong)
    assert [*wrong] == [caught.value.field]


def test_the_first_attempt_that_succeeds_wins_and_the_others_end_at_once(sandbox: Any) -> None:
    began = time.monotonic()
    with race(sandbox, ["exit 3", "sleep 600", ["sh", "-c", "echo won > a"]]) as found:
        assert time.monotonic() - began < 300
        assert found.winner is not None
        assert "won\n" == found.winner.files.read_text("a")
        assert 1.0 == found.outcomes[2].score
        assert not found.outcomes[0].score
        assert not found.outcomes[1].score
        assert not sandbox.files.exists("a")


def test_the_best_attempts_win_by_the_judge(sandbox: Any) -> None:
    def attempt(size: int) -> Any:
        return lambda branch: branch.files.write("a", "x" * size) or size

    def judge(branch: Any, value: int) -> float:
        assert value == len(branch.files.read("a"))
        return value - 2

    attempts = [attempt(size) for size in (3, 9, 1, 5)]
    with race(sandbox, attempts, judge=judge, keep=2, pick="best") as found:
        assert [9, 5] == [len(each.files.read("a")) for each in found.winners]
    with race(sandbox, attempts[2:3], judge=judge) as found:
        assert found.winner is None


def test_an_attempt_that_raises_is_told_and_loses(sandbox: Any) -> None:
    def fail(_branch: Any) -> None:
        raise ValueError("no")

    with race(sandbox, [fail, "true"]) as found:
        assert found.winner is not None
    assert found.outcomes[0].error is None or isinstance(found.outcomes[0].error, ValueError)


def test_the_best_of_three_is_merged_to_the_host(sandbox: Any, tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    repository.mkdir()
    (repository / "code").write_text(BASE)
    sandbox.files.upload(str(repository), "repo")
    base = sandbox.snapshot()
    edit = "cd repo && sed -i s/^{}$/{}/ code && echo {} > new"
    with race(sandbox, ["exit 1", edit.format(2, "two", 2)]) as found:
        winner = found.winner
        (repository / "code").write_text(BASE.replace("7", "seven"))
        planned = winner.merge(repository, base=base, path="repo", dry_run=True)
        assert not planned.is_applied
        assert not (repository / "new").exists()
        merged = winner.merge(repository, base=base, path="repo")

        assert merged.is_applied
        assert planned.changes == merged.changes or len(planned.changes) == len(merged.changes)
        assert BASE.replace("7", "seven").replace("2", "two") == (repository / "code").read_text()
        (repository / "code").write_text(BASE.replace("2", "zwei"))
        again = winner.merge(repository, base=base, path="repo")
        assert ["code"] == [each.path for each in again.conflicts]
        assert BASE.replace("2", "zwei") == (repository / "code").read_text()

        assert winner.merge(sandbox, base=base.id, path="repo").is_applied
        assert BASE.replace("2", "two") == sandbox.files.read_text("repo/code")
        assert "2\n" == sandbox.files.read_text("repo/new")


def test_a_merge_brings_removals_modes_and_links_into_a_sandbox(sandbox: Any) -> None:
    sandbox.shell("mkdir -p d/e; echo 1 > d/e/gone; echo 2 > was; echo 3 > kind; mkdir dir")
    base = sandbox.snapshot()
    (branch,) = sandbox.fork()
    with branch:
        branch.shell(
            "rm -r d; chmod 700 was; rm kind; mkdir kind; echo 4 > kind/x; rmdir dir; echo 5 > dir; ln -s was l"
        )
        found = branch.merge(sandbox, base=base)
    assert found.is_applied, found
    listing = sandbox.shell("ls -d d kind/x dir l 2>&1; stat -c %a was; cat kind/x dir l").text
    assert "dir\nkind/x\nl\n700\n4\n5\n2\n" in listing
    assert not sandbox.files.exists("d")


def test_a_merge_without_a_snapshot_or_into_nothing_is_refused(
    sandbox: Any, tmp_path: Path
) -> None:
    base = sandbox.snapshot()
    with pytest.raises(SnapshotNotFound):
        sandbox.merge(tmp_path, base="snap-none")
    with pytest.raises(InvalidRequest, match="into"):
        sandbox.merge(3, base=base)
    with pytest.raises(InvalidRequest, match="prefer"):
        sandbox.merge(tmp_path, base=base, prefer="mine")
    with pytest.raises(RingfenceError, match="No such"):
        sandbox.merge(tmp_path / "none", base=base)


async def test_an_awaiting_caller_forks_and_merges(tmp_path: Path) -> None:
    async with await AsyncSandbox.create() as sandbox:
        await sandbox.files.write("repo/a", "1\n", parents=True)
        base = await sandbox.snapshot()
        (fork,) = await sandbox.fork()
        async with fork:
            await fork.files.write("repo/a", "2\n")
            (tmp_path / "a").write_text("1\n")
            found = await fork.merge(tmp_path, base=base, path="repo")
            assert found.is_applied
            assert (await fork.merge(sandbox, base=base, path="repo")).is_applied
            assert "2\n" == await sandbox.files.read_text("repo/a")
            assert sandbox.id == fork.parent
    await AsyncSandbox.delete_snapshot(base.id)
    assert "2\n" == (tmp_path / "a").read_text()


@pytest.mark.full
def test_forks_of_a_server_survive_its_kill(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with Client(f"unix:{daemon.socket}") as client:
        sandbox = client.create()
        sandbox.files.write("a", "1")
        (fork,) = sandbox.fork()
    daemon.process.kill()
    daemon.process.wait()
    again = start_daemon(state_dir=daemon.state_dir)
    with Client(f"unix:{again.socket}") as client:
        with client.get(fork.id) as found:
            assert ("1", sandbox.id) == (found.files.read_text("a"), found.parent)
        client.get(sandbox.id).terminate()


@pytest.mark.full
def test_a_user_s_key_forks_within_its_rights_only(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon("--listen", "127.0.0.1:0")
    with daemon.client() as admin:
        ask = {"owner": "one", "max_sandboxes": 2}
        key, other = (
            admin.post("/v1/keys", json={**ask, "owner": owner}).json()["key"]
            for owner in ("one", "two")
        )
    with Client(daemon.tcp, key=key) as client, client.create() as sandbox:
        base = sandbox.snapshot()
        with pytest.raises(Forbidden):
            sandbox.fork(network="unrestricted")
        with pytest.raises(QuotaExceeded):
            sandbox.fork(2)
        assert [sandbox.id] == [each.id for each in client.list()], "none is left"
        (fork,) = sandbox.fork(network="none")
        with fork, Client(daemon.tcp, key=other) as stranger, stranger.create() as its:
            for branch, into in ((its, sandbox), (its, fork)):
                with pytest.raises(SandboxNotFound):
                    branch.merge(into, base=its.snapshot())
            with pytest.raises(SnapshotNotFound):
                its.merge(tmp_path, base=base)
            its._at = sandbox._at
            with pytest.raises(SandboxNotFound):
                its.fork()
            its._at = f"/v1/sandboxes/{its.id}"


@pytest.mark.full
def test_a_fork_asked_for_again_under_its_key_is_the_same(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with Client(f"unix:{daemon.socket}") as client, client.create() as sandbox:
        with daemon.client() as admin:

            def ask(key: str, **body: Any) -> tuple[int, list[str]]:
                headers = {"idempotency-key": key} if key else {}
                at = f"/v1/sandboxes/{sandbox.id}/fork"
                answer = admin.post(at, json=body, headers=headers, timeout=60)
                return answer.status_code, [each["id"] for each in answer.json().get("items", ())]

            first = ask("one", n=3)
            assert (201, 3) == (first[0], len(set(first[1])))
            assert (200, first[1]) == ask("one", n=3)
            assert 4 == len(client.list())
            assert 422 == ask("one", n=2)[0], "another request under the same key"
            assert 422 == ask("one", n=3, labels={"a": "b"})[0]
            assert first[1] != ask("two", n=3)[1]
            assert first[1] != ask("", n=3)[1], "the control: without a key they are new ones"
            client.get(first[1][1]).terminate()
            assert (409, []) == ask("one", n=3)
        for each in client.list():
            if each.id != sandbox.id:
                client.get(each.id).terminate()


def test_half_of_a_fork_that_was_killed_is_made_anew(tmp_path: Path) -> None:
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with SessionManager(config, state_dir=str(tmp_path), background=False) as manager:
        source = manager.acquire(SandboxSpec(), client_id="ann")
        source.sandbox.files.write("a", "1")
        whole = manager.fork(source.id, 3, key="one")
        last = manager.index.under_key("ann", "one")
        assert last is not None
        assert last.id == whole[2].id
        manager.terminate(whole[2].id)
        manager.store._database.write("DELETE FROM sessions WHERE id = ?", (last.id,))
        again = manager.fork(source.id, 3, key="one")

        assert not {each.id for each in again} & {each.id for each in whole}
        assert {source.id, *(each.id for each in again)} == {
            each.session_id for each in manager.list()
        }
        assert [b"1"] * 3 == [each.sandbox.files.read("a") for each in again]


def test_a_server_keeps_no_marks_and_says_so(sandbox: Any) -> None:
    if isinstance(sandbox, Sandbox):
        pytest.skip("see test_live.py")
    for call in (sandbox.mark, lambda: sandbox.rewind(None), lambda: sandbox.fork(at="mark")):
        with pytest.raises(Unsupported, match="keeps no marks"):
            call()


@pytest.mark.root
def test_git_does_not_run_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are guests'. In git's place: a program that says who it is, and which settings it has."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        git = Path(directory, "git")
        git.write_text(
            '#!/bin/sh\nid -u; id -G; echo "$HOME $GIT_CONFIG_GLOBAL"; cat "$4" "$5" "$6"\n'
        )
        git.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        said = TextMerger().merge(b"base\n", b"ours\n", b"theirs\n")

    assert b"65534\n65534\n/proc /dev/null\nours\nbase\ntheirs\n" == said
