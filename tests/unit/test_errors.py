"""Errors: stable codes, one wire form, and a cause and a fix in one line."""

from __future__ import annotations

import errno
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import errors
from ringfence.errors import RingfenceError

pytestmark = pytest.mark.anyone

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, RingfenceError)
]
CODES = {
    "bad_json", "backend_unavailable", "connect_failed", "directory_not_empty", "exec_failed", "exec_not_found",
    "file_error", "file_exists", "file_not_found", "invalid_request", "io", "is_a_directory",
    "image_not_found", "image_refused", "registry",
    "isolation_failed", "lifecycle", "network_policy", "not_a_directory", "permission_denied", "quota_exceeded",
    "resource_exhausted", "ringfence_error", "sandbox_lost", "sandbox_not_found",
    "snapshot_corrupt", "snapshot_not_found", "state_in_use", "state_too_new", "task_failed",
    "timeout", "unsupported",
    "not_found", "unauthenticated", "forbidden", "too_large", "too_many_requests",
    "exec_not_started",
    "execution_not_found", "execution_timeout", "execution_killed", "resource_limit_exceeded",
    "sandbox_not_supported", "server_unreachable", "storage_full", "too_slow",
}  # fmt: skip


def test_the_codes_are_these() -> None:
    """Programs compare them: adding one is fine, changing one is not."""
    assert CODES == {cls.code for cls in CLASSES}
    assert len(CODES) == len(CLASSES)


@pytest.mark.full
@pytest.mark.parametrize("cls", CLASSES)
@given(st.text(), st.text(), st.text(), st.none() | st.booleans())
def test_every_error_crosses_the_wire(
    cls: type[RingfenceError], message: str, hint: str, field: str, retryable: bool | None
) -> None:
    error = cls(message or "x", hint=hint, field=field, retryable=retryable)

    again = errors.error_from_json(json.loads(json.dumps(error.to_json())))

    assert cls is type(again)
    assert error.to_json() == again.to_json()
    assert error.to_json() == pickle.loads(pickle.dumps(error)).to_json()


def test_details_cross_the_wire() -> None:
    refusal = errors.Unsupported(backend="somewhere", operation="fork")
    missing = errors.FileNotFound("none", path="/none")

    for error, name, value in ((refusal, "operation", "fork"), (missing, "path", "/none")):
        assert value == getattr(errors.error_from_json(error.to_json()), name)
    assert "somewhere" in str(refusal)
    assert "fork" in str(refusal)


def test_an_unknown_code_is_kept() -> None:
    """An old client of a new server can still show it, and the code."""
    error = errors.error_from_json({"code": "brand_new", "message": "m"})

    assert (RingfenceError, "brand_new") == (type(error), error.to_json()["code"])


def test_cause_and_fix_in_one_line() -> None:
    error = errors.InvalidRequest("must not be empty", field="argv", hint="name a command")

    assert "argv: must not be empty (name a command)" == str(error)


@pytest.mark.parametrize(
    ("number", "cls"),
    [
        (errno.ENOENT, errors.FileNotFound),
        (errno.ENOTDIR, errors.NotADirectory),
        (errno.EISDIR, errors.IsADirectory),
        (errno.ENOTEMPTY, errors.DirectoryNotEmpty),
        (errno.EEXIST, errors.FileExists),
        (errno.EACCES, errors.PermissionDenied),
        (errno.EPERM, errors.PermissionDenied),
        (errno.EROFS, errors.PermissionDenied),
        (errno.ELOOP, errors.FileError),
        (errno.ENOSPC, errors.StorageFull),
        (errno.EDQUOT, errors.StorageFull),
    ],
)
def test_errors_of_files_by_errno(number: int, cls: type[RingfenceError]) -> None:
    error = errors.file_error(number, "/some/path")

    assert cls is type(error)
    assert "/some/path" in str(error)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls.code.endswith("not_found")])
def test_what_is_not_there_says_what_next(cls: type[RingfenceError]) -> None:
    """Whoever raises it may know better; a path that is missing says all by itself."""
    if cls is errors.FileNotFound:
        return
    assert cls("no x").hint
    assert "better" == cls("no x", hint="better").hint
    assert not cls("no x").retryable
