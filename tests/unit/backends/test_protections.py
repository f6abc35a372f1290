"""The table of protections and its readers: no check is lost, and an unreadable one is degraded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.command.far import FarReader
from ringfence.backends.command.report import CommandReader
from ringfence.backends.docker.report import DockerReader
from ringfence.backends.gvisor.posture import GvisorReader
from ringfence.backends.local.protections import CHECKS, Reader, enforced, protections_of
from ringfence.backends.microvm.report import MicrovmReader
from ringfence.backends.native.posture import NativeReader
from ringfence.model.state import State

PROCESS = {"namespaces", "host_identity", "capabilities", "no_new_privs", "seccomp", "network"}
MOUNTS = {"root_file_system", "read_only_mounts", "protected_paths", "kernel_interfaces"}
INSIDE = {*MOUNTS, "nested_user_namespaces", "unix_sockets", "process_trees"}
GROUPS, QUOTAS = {"memory_limit", "cpu_limit", "pids_limit"}, {"disk_quota", "inode_quota"}
OF_READERS: dict[type[Reader], set[str]] = {
    NativeReader: {
        *PROCESS,
        *MOUNTS,
        *GROUPS,
        *QUOTAS,
        *("nested_user_namespaces", "unix_sockets", "landlock"),
        *("open_files_limit", "terminals", "core_dumps"),
    },
    GvisorReader: {
        *(PROCESS - {"capabilities"}),
        *GROUPS,
        *QUOTAS,
        *("guest_kernel", "gvisor_release", "own_pages", "open_files_limit"),
        *("read_only_mounts", "protected_paths"),
    },
    MicrovmReader: {
        *PROCESS,
        *GROUPS,
        *QUOTAS,
        *("guest_kernel", "virtual_machine", "open_files_limit"),
    },
    CommandReader: {*PROCESS, *INSIDE, *GROUPS, *QUOTAS},
    DockerReader: {*PROCESS, *INSIDE, *QUOTAS, "memory_limit", "pids_limit"},
    FarReader: {*PROCESS, *INSIDE},  # it reports limits as absent
}


@pytest.mark.parametrize("reader", OF_READERS, ids=lambda reader: reader.__name__)
def test_a_reader_has_every_check_of_its_backend(reader: type[Reader]) -> None:
    assert OF_READERS[reader] == {name for name in CHECKS if hasattr(reader, name)}


def test_every_check_of_the_table_has_a_reader() -> None:
    assert set(CHECKS) == set().union(*OF_READERS.values())


class _HalfReadable(Reader):
    def namespaces(self) -> Any:
        raise PermissionError(13, "Permission denied")

    def seccomp(self) -> Any:
        return enforced("mode 2")

    def landlock(self) -> Any:
        return None


def test_what_cannot_be_read_is_degraded_and_the_rest_is_read() -> None:
    sandbox: Any = SimpleNamespace(state=State.RUNNING, last_protections=())

    found = protections_of(sandbox, lambda: _HalfReadable(sandbox))

    assert [("namespaces", "degraded"), ("seccomp", "enforced")] == [
        (each.name, each.status) for each in found
    ]
    assert "Permission denied" in found[0].why
    sandbox.state = State.TERMINATED
    assert found == protections_of(sandbox, lambda: _HalfReadable(sandbox))
