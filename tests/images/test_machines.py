"""Images in microVMs: one machine is booted, and every sandbox is continued from it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Credential, NetworkPolicy, NetworkRule, Sandbox
from ringfence.backends.microvm.backend import MicrovmBackend
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.model.capabilities import ENFORCED
from ringfence.sessions import BashConfig, SandboxBash
from tests.features import require
from tests.images.making import Made, layer, program
from tests.machines import machine_backend, require_machines

pytestmark = [pytest.mark.anyone, pytest.mark.full]

# A rule that reads inside TLS: programs of the image must trust who ends it.
SECRETS = {"TOKEN": "sk-5e1f77"}
POLICY = NetworkPolicy(rules=(NetworkRule("a.test", "443", credential=Credential("TOKEN")),))


@pytest.fixture(scope="module")
def machines() -> Iterator[MicrovmBackend]:
    require_machines()
    backend = machine_backend()
    yield backend
    backend.close()


def test_an_image_in_a_machine(machines: MicrovmBackend, image: str, store: ImageStore) -> None:
    root = Path(store.root(store.find(image)))
    with Sandbox.create(
        image=image,
        tier="strong",
        backend=machines,
        user="app",
        workdir="/usr/new",
        network=POLICY,
        secrets=SECRETS,
    ) as one:
        trusted = one.shell(
            "echo $TOKEN; read line <$SSL_CERT_FILE; echo $line; cat /etc/resolv.conf"
        )
        (network,) = [each for each in one.protections() if each.name == "network"]
        said = one.shell("id -u; pwd; echo $GREETING $HOME; cat /etc/os-release; echo x > mine; ls")
        one.files.write("/tmp/there", b"content")
        assert b"content" == one.files.read("/tmp/there")
        one.exec(["rm", "/etc/os-release"], user="root")
        saved = one.snapshot()
        with Sandbox.restore(saved.id, backend=machines, secrets=SECRETS) as again:
            after = again.shell("cat mine; ls /etc/os-release; cat /tmp/there")
        store.remove(image)
        assert 1 == len(store.collect()[1]), "its files are in use"
    freed, in_use = store.collect()

    assert trusted.stdout_text.startswith("ringfence-secret-TOKEN-"), trusted
    assert "-----BEGIN CERTIFICATE-----\nnameserver 127.0.0.53\n" in trusted.stdout_text
    assert ENFORCED == network.status, network
    assert "1234\n/usr/new\nhello /srv/app\nID=small\nmine\n" == said.stdout_text, said
    assert "x\ncontent" == after.stdout_text, after
    assert (True, [], False) == (freed > 0, in_use, root.exists())


def test_the_bash_tool_and_one_program(
    machines: MicrovmBackend, image: str, store: ImageStore, tmp_path: Path
) -> None:
    require("gcc")
    config = BashConfig(image=image, tier="strong", allow_degraded=("*",))
    with SandboxBash(config=config, backend=machines) as tool:
        said = tool.exec_command("rm /bin/touch; echo x > /etc/os-release; pwd; nothing-such")
    assert ("/workspace\n", 127) == (said.stdout, said.exit_code), said
    root = Path(store.root(store.find(image)))
    assert "ID=small\n" == (root / "etc/os-release").read_text()

    source = tmp_path / "answer.c"
    source.write_text('#include <unistd.h>\nint main() { write(1, "answer\\n", 7); return 42; }\n')
    subprocess.run(["gcc", "-static", "-o", str(tmp_path / "answer"), str(source)], check=True)
    only = Made([layer(program("answer", str(tmp_path / "answer")))])
    load(only.as_layout(tmp_path / "only"), "only", store=store)
    with Sandbox.create(image="only", tier="strong", backend=machines) as sandbox:
        ran = sandbox.exec(["/answer"])
        sandbox.files.write("/root/there", b"content")
        assert b"content" == sandbox.files.read("/root/there")
    assert (42, b"answer\n") == (ran.exit_code, ran.stdout)
