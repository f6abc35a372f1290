"""A PID 1 without work gives back the pages of programs, which are in files, and loses nothing by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.profiles import Profile
from ringfence.launcher.pid1 import idle_pages
from ringfence.linux import mappings
from ringfence.policy.seccomp import SeccompPolicy
from tests.native.outside import init_pid, until


def file_kib(pid: int) -> int:
    """What of files this process has in memory. Source: proc(5), status; its own user may read it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


def test_at_rest_it_gives_back_pages_and_answers_as_before(sandbox: Sandbox) -> None:
    """Twice: having worked again, it rests again."""
    pid = init_pid(sandbox)
    # It has the same mapped, and does not rest: as much would PID 1 have without.
    zygote: int = sandbox._inner.zygote.pid  # type: ignore[attr-defined]
    for said in ("one", "two"):
        assert f"{said}\n".encode() == sandbox.exec(["echo", said]).stdout
        assert until(lambda: file_kib(pid) * 4 < file_kib(zygote) * 3)


def test_only_what_is_in_files_is_learned() -> None:
    """A mapping with one page that the loader has written is none of them: smaps says the same."""
    wanted = []
    start, is_meant = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start = int(words[0].partition("-")[0], 16)
            is_meant = words[1] in ("r-xp", "r--p") and words[4] != "0"
        elif words[0] == "Anonymous:" and words[1] == "0" and is_meant:
            wanted.append(start)
    assert wanted
    assert wanted == [first for first, _length in mappings.of_files()]


def test_where_the_kernel_says_no_it_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that cannot give back goes on as it was."""
    monkeypatch.setattr(idle_pages, "_learned", [(1, 4096)])  # no page begins there: EINVAL
    assert idle_pages.is_of_use()
    idle_pages.give_back()
    assert not idle_pages.is_of_use()


def test_under_a_users_own_filter_it_does_not_even_try(tmp_path: Path) -> None:
    """That filter may kill who calls madvise(2), and PID 1 is under it too."""
    policy = SeccompPolicy.from_json(
        {"default_action": "allow", "rules": [{"names": ["madvise"], "action": "kill"}]}
    )
    own = {"own": Profile("own", policy=policy)}
    backend = NativeBackend(profiles=own, state_dir=str(tmp_path))
    try:
        rests = []
        for profile in ("own", "os_hardened"):
            with Sandbox.create(profile=profile, backend=backend) as made:
                rests.append(made._inner.lockdown["releases_idle_pages"])  # type: ignore[attr-defined]
        assert [False, True] == rests
    finally:
        backend.close()
