"""Sandboxes that are built ahead of whoever gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ...errors import InvalidRequest, LifecycleError, StorageFull
from ...model import capabilities as can
from ...model.limits import MIB, Limits
from ...model.mount import Mount
from ...model.state import State
from ..lab import Lab
from .base import ConformanceBase, needs

if TYPE_CHECKING:
    from pathlib import Path

    from ...backends.protocol import Backend, WarmSandbox
    from ...model.spec import SandboxSpec


class Warmth(ConformanceBase):
    binds_late: ClassVar[bool] = True
    """True if a claim can set mounts, limits and the root; else `fits` refuses a different spec."""

    def claim(self, warm: WarmSandbox, spec: SandboxSpec) -> Lab:
        return Lab(warm.claim(spec), self.patience_s)

    @needs(can.PREWARM)
    def test_it_becomes_what_is_asked_for(self, backend: Backend, tmp_path: Path) -> None:
        (tmp_path / "given").write_text("from the host")
        whose: dict[str, Any] = {"env": {"WHOSE": "mine"}, "labels": {"team": "red"}}
        more: dict[str, Any] = {
            "mounts": (Mount("/data", str(tmp_path)),),
            "limits": Limits(pids=64, disk_bytes=8 * MIB),
            "workdir": "/tmp/here",
        }
        warm = backend.prewarm(self.make_spec())
        assert self.binds_late == warm.fits(self.make_spec(**whose, **more))
        spec = self.make_spec(**whose, **(more if self.binds_late else {}))
        assert warm.fits(spec)

        lab = self.claim(warm, spec)

        try:
            assert warm.id == lab.sandbox.session.id
            assert "red" == lab.sandbox.session.metadata["team"]
            assert State.PROVISIONED == lab.state
            assert "mine\n" == lab.sh('echo "$WHOSE"').text
            if self.binds_late:
                assert "/tmp/here\n" == lab.sh("pwd").text
                assert b"from the host" == lab.get("/data/given")
            assert spec.limits == lab.sandbox.spec.limits
        finally:
            lab.close()

    @needs(can.PREWARM)
    def test_it_is_claimed_once(self, backend: Backend) -> None:
        warm = backend.prewarm(self.make_spec())
        lab = self.claim(warm, self.make_spec())

        try:
            with pytest.raises(LifecycleError):
                warm.claim(self.make_spec())
            assert lab.run("true").ok
        finally:
            lab.close()

    @needs(can.PREWARM)
    def test_a_claim_that_fails_leaves_nothing(self, backend: Backend) -> None:
        warm = backend.prewarm(self.make_spec())

        with pytest.raises(InvalidRequest):
            warm.claim(self.make_spec(mounts=(Mount("/data", "/no/such/directory"),)))

        assert not warm.alive
        again = Lab(backend.provision(self.make_spec(id=warm.id)), self.patience_s)
        assert again.run("true").ok
        again.close()

    @needs(can.PREWARM)
    def test_what_is_to_be_done_meanwhile_is_done_once(self, backend: Backend) -> None:
        warm, done = backend.prewarm(self.make_spec()), list[str]()

        lab = Lab(warm.claim(self.make_spec(), lambda: done.append("once")), self.patience_s)

        try:
            assert ["once"] == done
            assert lab.run("true").ok
        finally:
            lab.close()

    @needs(can.PREWARM)
    def test_what_fails_meanwhile_ends_the_claim(self, backend: Backend) -> None:
        warm = backend.prewarm(self.make_spec())

        def fails() -> None:
            raise StorageFull("nothing can be written down")

        with pytest.raises(StorageFull):
            warm.claim(self.make_spec(), fails)

        assert not warm.alive
        again = Lab(backend.provision(self.make_spec(id=warm.id)), self.patience_s)
        assert again.run("true").ok
        again.close()

    @needs(can.PREWARM)
    def test_it_can_be_discarded(self, backend: Backend) -> None:
        warm = backend.prewarm(self.make_spec())
        assert warm.alive

        warm.discard()

        assert not warm.alive
        with pytest.raises(LifecycleError):
            warm.claim(self.make_spec())

    @needs(can.PREWARM)
    def test_its_id_is_taken(self, backend: Backend) -> None:
        warm = backend.prewarm(self.make_spec(id="only-one-warm"))

        try:
            with pytest.raises(InvalidRequest) as refusal:
                backend.provision(self.make_spec(id="only-one-warm"))
        finally:
            warm.discard()

        assert "id" == refusal.value.field
