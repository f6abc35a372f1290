"""tools/needs.sh: what a machine lacks for the tests is installed once, by root alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRELUDE = """
. tools/env.sh
. tools/needs.sh
needs='sh:has-sh no-such-command:lacks-command /no/such/*:lacks-file /usr/bin/en*:has-env'
find_python() { false; }  # none of what programs.toml needs
apt-get() { :; }
apt_install() { echo "install $*"; }
"""


def _bash(script: str) -> list[str]:
    run = subprocess.run(
        ["bash", "-euc", f"{PRELUDE}\n{script}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


def test_only_what_is_missing_is_installed_and_by_root() -> None:
    install = "may_install && add_packages || true"

    assert ["install lacks-command lacks-file"] == _bash(f"id() {{ echo 0; }}; {install}")
    assert [] == _bash(f"id() {{ echo 1000; }}; {install}")
    assert [] == _bash(f"id() {{ echo 0; }}; RINGFENCE_TEST_INSTALL=no; {install}")
    assert [] == _bash(f"id() {{ echo 0; }}; needs=sh:has-sh; {install}")


def test_the_list_is_in_one_place() -> None:
    for script in (".ci/run", "tools/test.sh"):
        text = (ROOT / script).read_text(encoding="utf-8")
        assert "add_needs" in text
        assert "postgresql" not in text


def test_a_tmp_that_users_cannot_write_to_is_opened(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    (said,) = _bash(f"open_tmp {tmp_path}; open_tmp {tmp_path}")
    assert "mode 1777" in said
    assert 0o1777 == tmp_path.stat().st_mode & 0o7777
