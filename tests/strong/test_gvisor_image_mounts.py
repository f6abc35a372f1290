"""Over an image all files are the guest's own: what is denied, and what is attached, holds there too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.model.mount import Mount
from ringfence.sandbox import Sandbox
from tests.features import require
from tests.images.conftest import small

pytestmark = pytest.mark.full

DENY = ("/srv/app/new", "/usr/later")


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GvisorBackend]:
    require("user namespaces")
    require("runsc")
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    load(small().as_layout(tmp_path / "layout"), "known:1", store=ImageStore())
    made = GvisorBackend(state_dir=str(tmp_path / "state"))
    yield made
    made.close()


def test_of_an_image_a_path_is_denied(backend: GvisorBackend) -> None:
    shown = "cat /srv/app/new; mkdir -p /usr; echo later >/usr/later; cat /usr/later"
    with Sandbox.create(image="known:1", backend=backend) as control:
        assert "newlater\n" == control.exec(["/bin/sh", "-c", shown]).text
    with Sandbox.create(image="known:1", backend=backend, deny=DENY) as sandbox:
        assert "" == sandbox.exec(["/bin/sh", "-c", shown]).stdout_text
        saved = sandbox.snapshot()
    with Sandbox.create(image="known:1", backend=backend) as plain:
        spec = plain.spec
    with Sandbox.restore(saved.id, spec, backend=backend) as again:
        assert "new" == again.exec(["/bin/cat", "/srv/app/new"]).text


def test_what_mounts_inside_reads_no_library_of_the_image_s(
    backend: GvisorBackend, tmp_path: Path
) -> None:
    """Whatever these say by then."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("shown\n")
    spoil = "rm -f /etc/ld.so.preload; echo no >/etc/ld.so.preload"
    with Sandbox.create(image="known:1", backend=backend) as sandbox:
        sandbox.exec(["/bin/sh", "-c", spoil])
        sandbox.mount(Mount("/late", str(source)))
        assert "shown\n" == sandbox.exec(["/bin/cat", "/late/file"]).text
        assert not sandbox.exec(["/bin/sh", "-c", "echo x >/late/file"]).ok
