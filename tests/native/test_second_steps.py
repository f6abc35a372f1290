"""What a native sandbox does for the second user, snapshot, zygote or name of the same boot."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from ringfence import NetworkPolicy, NetworkRule, SandboxSpec
from ringfence.backends.local.host import identity
from ringfence.backends.local.mounts import layered
from ringfence.backends.native import inner
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.errors import LifecycleError, Unsupported
from ringfence.model.state import State
from ringfence.snapshots import layers
from ringfence.snapshots.catalogue import Catalogue
from tests.native.outside import until
from tests.native.test_handed_over import request, text_of
from tests.waiting import readable

RULES = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackend]:
    place = str(tmp_path_factory.mktemp("state"))
    with closing(NativeBackend(state_dir=place, prebuilt_s=0)) as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(backend: NativeBackend) -> Iterator[NativeSandbox]:
    made = backend.provision(SandboxSpec())
    yield made
    made.terminate()


def test_a_boot_id_is_another_each_time_that_it_is_renewed(sandbox: NativeSandbox) -> None:
    found = [text_of(sandbox, BOOT_ID)]
    for _ in range(2):
        sandbox.renew_boot_id()
        found.append(text_of(sandbox, BOOT_ID))
    sandbox.suspend()
    sandbox.renew_boot_id()
    assert State.SUSPENDED is sandbox.state
    sandbox.resume()
    found.append(text_of(sandbox, BOOT_ID))
    assert 4 == len({*found})
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        assert file.read() not in found


def test_each_user_has_one_agent_and_who_is_not_inside_none(
    sandbox: NativeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sandbox.first_host_id:
        with pytest.raises(Unsupported, match="one user inside") as refusal:
            inner.control_of(sandbox, identity.NOBODY)
        assert "user" == refusal.value.field
        return
    told: list[int] = []
    monkeypatch.setattr(
        sandbox.backend.handover, "add_agent", lambda _sandbox, uid: told.append(uid)
    )
    for uid in (identity.LOW_IDS - 1, identity.NOBODY):
        control = inner.control_of(sandbox, uid)
        assert control is inner.control_of(sandbox, uid)
        assert f"{uid}\n" == text_of_user(sandbox, uid, "id -u")
    for uid in (identity.LOW_IDS, identity.NOBODY - 1, identity.NOBODY + 1):
        with pytest.raises(Unsupported, match="not mapped"):
            inner.control_of(sandbox, uid)
    assert [identity.LOW_IDS - 1, identity.NOBODY] == told == [*sandbox.agents]


def text_of_user(sandbox: NativeSandbox, uid: int, script: str) -> str:
    run = sandbox.start(replace(request(script), user=str(uid)))
    assert run.stdout is not None
    assert readable([run.stdout], 20)
    data = os.read(run.stdout, 1 << 12)
    assert readable([run.done], 20)
    run.close()
    return data.decode()


def test_programs_of_every_user_are_ended_together(sandbox: NativeSandbox) -> None:
    users = [None, *(["1", "nobody"] if sandbox.first_host_id else [])]
    runs = [sandbox.start(replace(request("exec sleep 600"), user=user)) for user in users]
    sandbox.end_processes()
    for run in runs:
        assert readable([run.done], 20)
        assert signal.SIGKILL == run.status().signal
        run.close()
    assert "goes on\n" == text_of(sandbox, "echo goes on")


def test_secrets_are_not_saved_and_those_given_are_another_sandboxs(
    backend: NativeBackend,
) -> None:
    made = backend.provision(SandboxSpec(id="named", network=RULES, secrets={"TOKEN": "value"}))
    kept = made.snapshot({"a": "b"})
    without, given = backend.restore(kept.id), backend.restore(kept.id, secrets={"TOKEN": "new"})
    other = backend.restore(kept.id, SandboxSpec(env={"A": "x"}))
    try:
        assert ({}, {"TOKEN": "new"}) == (dict(without.spec.secrets), dict(given.spec.secrets))
        assert (RULES, RULES) == (without.spec.network, given.spec.network)
        assert 4 == len({made.id, without.id, given.id, other.id})
        assert (True, "x\n") == (other.spec.network.is_none, text_of(other, "echo $A"))
    finally:
        for each in (made, without, given, other):
            each.terminate()
        backend.delete_snapshot(kept.id)


def test_snapshots_over_others_are_loaded_from_the_lowest_on(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not unpacked; a later one removes what an earlier one had."""
    monkeypatch.setattr(layers, "LEAST_BYTES", 0)  # then each is of what was changed
    first = backend.provision(SandboxSpec())
    text_of(first, "echo 1 > one; echo 1 > both; echo 1 > gone")
    below = first.snapshot({})
    first.terminate()
    second = backend.restore(below.id)
    text_of(second, "echo 2 > two; echo 2 > both; rm gone")
    above = second.snapshot({})
    second.terminate()
    hold = layered.hold

    def lowest_only(catalogue: Catalogue, chain: tuple[str, ...], image: Any) -> Any:
        return hold(catalogue, chain[-1:], image)[0], chain[:-1]

    script = "for each in both gone one two; do test -e $each && echo $each:$(cat $each); done"
    before = len(os.listdir("/proc/self/fd"))
    for other in (lowest_only, lambda _catalogue, chain, _image: (None, chain)):
        monkeypatch.setattr(layered, "hold", other)
        again = backend.restore(above.id)
        assert "both:2 one:1 two:2" == " ".join(text_of(again, script).split())
        again.terminate()
        assert until(lambda: before == len(os.listdir("/proc/self/fd")))
    for each in (above, below):
        backend.delete_snapshot(each.id)


def test_one_that_ended_is_refused_a_name_or_another_mount(backend: NativeBackend) -> None:
    made: Any = backend.provision(SandboxSpec())
    made.terminate()
    for step in (made.renew_boot_id, made.suspend, lambda: made.snapshot({})):
        with pytest.raises(LifecycleError):
            step()
    with pytest.raises(LifecycleError):
        made.apply_network_policy(RULES)


def test_ids_are_held_by_the_next_zygote_too(backend: NativeBackend) -> None:
    """Else they would be free for others while its sandboxes have them, when this process has ended."""
    made: Any = backend.provision(SandboxSpec())
    zygote = backend.zygote()
    held = {os.fstat(lock).st_ino for lock in backend.host_ids().locks()}
    assert bool(made.first_host_id) == bool(held)
    os.kill(zygote.pid, signal.SIGKILL)
    assert until(lambda: State.TERMINATED is made.state and not zygote.alive)
    with pytest.raises(LifecycleError):
        made.renew_boot_id()
    again = backend.provision(SandboxSpec())
    place = f"/proc/{backend.zygote().pid}/fd"
    assert backend.zygote() is not zygote
    inodes = {os.stat(f"{place}/{fd}").st_ino for fd in os.listdir(place)}
    assert held <= inodes
    again.terminate()
    assert not {made.id, again.id} & {*backend._live}
