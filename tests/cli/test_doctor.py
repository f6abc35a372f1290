"""What `ringfence doctor` says of this host, and of hosts that refuse."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from ringfence.backends.local.host.readback import cores
from ringfence.cli.diagnosis import doctor
from ringfence.model.capabilities import STATUSES
from tests.cli.command import PATIENCE_S, RINGFENCE, environment, ringfence_command, run_json

EXPECTED = {
    "namespaces", "host_identity", "capabilities", "no_new_privs", "nested_user_namespaces",
    "seccomp", "landlock", "unix_sockets", "root_file_system", "read_only_mounts",
    "kernel_interfaces", "network", "memory_limit", "cpu_limit", "pids_limit", "disk_quota",
    "inode_quota", "open_files_limit", "terminals", "core_dumps",
}  # fmt: skip
ALWAYS_ENFORCED = EXPECTED - {"landlock", "memory_limit", "cpu_limit"}


@functools.cache
def _native() -> dict[str, Any]:
    result = ringfence_command("doctor", "--json")
    assert 0 == result.returncode, result.stderr.decode()
    found = json.loads(result.stdout)
    return next(each for each in found["backends"] if "native" == each["backend"])


def test_the_report_names_every_protection() -> None:
    report = _native()
    status = {each["name"]: each["status"] for each in report["protections"]}

    assert report["available"]
    assert set(status) == EXPECTED
    assert set(status.values()) <= set(STATUSES)
    assert {"enforced"} == {status[name] for name in ALWAYS_ENFORCED}


def test_what_is_not_enforced_has_a_reason_and_a_fix() -> None:
    weak = [each for each in _native()["protections"] if "enforced" != each["status"]]

    assert [] == [each["name"] for each in weak if not each["why"] or not each["fix"]]


@pytest.mark.full
def test_the_table_says_the_same() -> None:
    result = ringfence_command("doctor", "--verbose")
    lines = result.stdout.decode().splitlines()

    assert 0 == result.returncode
    for each in _native()["protections"]:
        line = next(line for line in lines if line.split()[:1] == [each["name"]])
        assert each["status"] == line.split()[1]


def test_one_that_breaks_down_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may stop while its container is looked at."""

    class Broken:
        def report(self) -> None:
            raise FileNotFoundError(2, "No such process")

    monkeypatch.setattr(doctor, "backend_named", lambda _name: Broken())
    report = doctor._report("docker")

    assert not report.available
    assert "No such process" in report.reason


def test_a_profile_without_protections_says_so() -> None:
    """The control: the same reading finds them missing when they are."""
    found = run_json("--profile", "unrestricted", "--", "true")["protections"]
    status = {each["name"]: each["status"] for each in found}

    assert ("missing", "missing") == (status["seccomp"], status["landlock"])
    assert "missing" == status["nested_user_namespaces"]
    assert "enforced" == status["capabilities"]


def test_the_hosts_network_is_not_called_isolated() -> None:
    found = run_json("--net", "unrestricted", "--", "true")["protections"]

    assert "missing" == {each["name"]: each["status"] for each in found}["network"]


def test_limits_are_read_back() -> None:
    found = run_json("--pids", "33", "--disk", "9m", "--open-files", "99", "--", "true")
    why = {each["name"]: each["why"] for each in found["protections"]}

    assert why["pids_limit"].startswith("33 by ")
    assert why["disk_quota"].startswith("9 MiB")
    assert why["open_files_limit"].startswith("99 ")


@pytest.mark.parametrize(("count", "said"), [(1.0, "1 core"), (0.5, "0.5 cores"), (2, "2 cores")])
def test_cores_are_counted(count: float, said: str) -> None:
    assert said == cores(count)


# -- hosts that refuse ------------------------------------------------------------------------


def _doctor_under(*launcher: str) -> tuple[int, dict[str, Any]]:
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"this machine lacks: {launcher[0]}")
    process = subprocess.run(
        [*launcher, *RINGFENCE, "doctor", "--json"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    return process.returncode, json.loads(process.stdout)["backends"][0]


def _in_namespaces(script: str, *more: str) -> tuple[int, dict[str, Any]]:
    return _doctor_under("unshare", "-Ur", *more, "sh", "-c", f'{script}; exec "$@"', "sh")


@pytest.mark.full
def test_no_user_namespaces_left() -> None:
    code, report = _in_namespaces("echo 0 > /proc/sys/user/max_user_namespaces")

    assert (1, False) == (code, report["available"])
    assert "user.max_user_namespaces is 0" in report["reason"]
    assert any("sysctl" in each["fix"] for each in report["protections"])


@pytest.mark.full
def test_a_masked_proc_as_in_a_container() -> None:
    script = "mount -t proc proc /proc && mount -t tmpfs none /proc/scsi"
    if not os.path.isdir("/proc/scsi"):
        script = "mount -t proc proc /proc && mount --bind /dev/null /proc/keys"
    code, report = _in_namespaces(script, "-m", "-p", "-f")

    # It works by a word of the caller's alone, so nothing starts without one.
    assert (1, True) == (code, report["available"])
    assert "--anywhere" in report["reason"]
    found = {each["name"]: each for each in report["protections"]}
    assert "degraded" == found["namespaces"]["status"]
    assert "command lines" in found["namespaces"]["why"]
    assert "systempaths=unconfined" in found["namespaces"]["fix"]


@pytest.mark.full
def test_a_proc_of_another_pid_namespace() -> None:
    """As `unshare --pid --fork` leaves it: no fault of user namespaces; the control has its own."""
    _, control = _in_namespaces("true", "-m", "-p", "-f", "--mount-proc")
    code, report = _in_namespaces("true", "-p", "-f")

    assert control["available"]
    assert (1, False) == (code, report["available"])
    assert "/proc is not of the PID namespace" in report["reason"]
    assert ["sandbox"] == [each["name"] for each in report["protections"]]
    assert all("--mount-proc" in each["fix"] for each in report["protections"])


def test_inside_a_sandbox_of_ours() -> None:
    """Nested: refused on purpose, and named."""
    from tests.cli.command import SOURCE, run

    mounts = ["--mount", f"{SOURCE}:/src"]
    result = run(
        *mounts, "--env", "PYTHONPATH=/src", "--env", "PYTHONDONTWRITEBYTECODE=1",
        "--", "python3", "-m", "ringfence", "doctor", "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)["backends"][0]

    assert (1, False) == (result.returncode, report["available"])
    assert "Ringfence sandbox" in report["reason"]


def test_run_on_such_a_host_refuses_and_names_the_switch() -> None:
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    launcher = ["unshare", "-Ur", "sh", "-c", script, "sh"]
    process = subprocess.run(
        [*launcher, *RINGFENCE, "run", "--", "echo", "unconfined"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )

    assert (125, b"") == (process.returncode, process.stdout)
    assert b"max_user_namespaces" in process.stderr
    assert 1 == process.stderr.count(b"\n")


@pytest.mark.parametrize(
    ("words", "said"), [(["gvisor"], b"--attack"), (["nobody", "--attack"], b"unknown backend")]
)
def test_a_backend_is_named_to_be_attacked(words: list[str], said: bytes) -> None:
    result = ringfence_command("doctor", "--backend", *words)

    assert (125, b"") == (result.returncode, result.stdout)
    assert said in result.stderr
